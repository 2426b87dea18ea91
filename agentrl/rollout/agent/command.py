"""Agents that are programs: a process per episode, in a folder of its own.

It runs below a guard, which ends all that it started, detached or not, as soon as it ends, or this
process does.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import AgentError, ConfigError
from agentrl.inference import guard
from agentrl.types import Message, ToolSpec

GRACE_S = 5.0
"""How long an agent that was told to stop may take."""
MAX_OUTPUT_BYTES = 1 << 20
"""Of what a command writes, the last so many are looked at."""


@dataclass(slots=True, frozen=True)
class AgentTask:
    """What an agent is given to do."""

    id: str
    prompt: str
    """The environment's messages as one text."""
    messages: list[Message]
    tools: list[ToolSpec] = field(default_factory=list)
    """Those of the environment."""
    mcp_url: str = ""
    """Where it offers them over MCP (streamable HTTP)."""
    tools_url: str = ""
    """And as plain HTTP: GET lists them, POST to `<tools_url>/<name>` with the arguments as a JSON
    object calls one."""


class CommandRunner:
    def __init__(self, command: list[str]) -> None:
        """
        Raises:
            ConfigError: there is no such program.
        """
        if shutil.which(command[0]) is None:
            raise ConfigError(f"agent.command: there is no program {command[0]!r} in PATH")
        self._command = command

    async def run(self, task: AgentTask, base_url: str, api_key: str) -> str | float | None:
        """The last line that the command prints. It runs below a guard, which ends all that it
        started, detached or not, as soon as this ends, or this process does."""
        command = [filled(part, task, base_url, api_key) for part in self._command]
        with tempfile.TemporaryDirectory(
            prefix="agentrl-agent-", ignore_cleanup_errors=True
        ) as cwd:
            output, errors = Path(cwd) / ".stdout", Path(cwd) / ".stderr"
            with output.open("wb") as out, errors.open("wb") as err:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, guard.__file__, str(os.getpid()), str(GRACE_S), *command),
                    cwd=cwd,
                    env=os.environ | agent_variables(task, base_url, api_key),
                    stdin=asyncio.subprocess.PIPE,  # closed: the guard ends everything
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            try:
                await process.wait()
            finally:
                if process.returncode is None and process.stdin is not None:
                    process.stdin.close()
                    await process.wait()
            printed, said = _tail(output), _tail(errors)
        if process.returncode:
            raise exited(command, process.returncode, said or printed)
        return last_line(printed)

    async def aclose(self) -> None:
        """Every process ended with its episode."""


def agent_variables(task: AgentTask, base_url: str, api_key: str) -> dict[str, str]:
    """The environment variables by which programs find their model."""
    root = base_url.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # litellm
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": api_key,
        "AGENTRL_TASK_ID": task.id,
        "AGENTRL_PROMPT": task.prompt,
        "AGENTRL_MCP_URL": task.mcp_url,
        "AGENTRL_TOOLS_URL": task.tools_url,
    }


def exited(command: list[str], status: int | None, said: str) -> AgentError:
    told = said.strip()[-1000:] or "it printed nothing"
    return AgentError(f"{command[0]} exited with status {status}: {told}")


def last_line(printed: str) -> str | None:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1] if lines else None


def filled(part: str, task: AgentTask, base_url: str, api_key: str) -> str:
    """An argument of a command with its placeholders replaced; other braces stay."""
    values = {"prompt": task.prompt, "task_id": task.id, "base_url": base_url, "api_key": api_key}
    values |= {"mcp_url": task.mcp_url, "tools_url": task.tools_url}
    # In one go: what a prompt holds is not looked into.
    return re.sub("{(" + "|".join(values) + ")}", lambda found: values[found[1]], part)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_OUTPUT_BYTES))
        return file.read().decode("utf-8", "replace")
