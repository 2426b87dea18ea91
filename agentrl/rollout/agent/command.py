"""Agents that are programs: a process per episode, in its own folder.

It runs below a guard, which ends every process that it started, detached or not, as soon as the
agent or this process ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import shutil
import site
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import AgentError, ConfigError
from agentrl.images import count_images
from agentrl.inference import guard
from agentrl.types import JSON, Message, ToolSpec

logger = logging.getLogger("agentrl.rollout")

GRACE_S = 5.0
"""How long an agent that was told to stop may take."""
MAX_OUTPUT_BYTES = 1 << 20
"""Only so many bytes at the end of a command's output are read."""
_BESIDE_HOME = {"XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"}
"""Variables that lead to folders which programs look for in HOME otherwise."""


@dataclass(slots=True, frozen=True)
class AgentTask:
    """The task that an agent is given."""

    id: str
    prompt: str
    """The environment's messages as one text, in which `[image]` stands for each image."""
    messages: list[Message]
    tools: list[ToolSpec] = field(default_factory=list)
    """Those of the environment."""
    mcp_url: str = ""
    """Address at which they are offered over MCP (streamable HTTP)."""
    tools_url: str = ""
    """Address at which they are offered as plain HTTP: GET lists them, POST to `<tools_url>/<name>`
    with the arguments as a JSON object calls one."""
    metadata: dict[str, JSON] = field(default_factory=dict)
    """`env_id`, `seed`, `trajectory_id` and `group_id` of the episode, and `Task.public`: the
    columns that `env.config.public_keys` names. What else the environment keeps with its task may
    hold the solution, and does not leave it."""


class CommandRunner:
    def __init__(
        self, command: list[str], *, answer: str = "last_line", home: str = "private"
    ) -> None:
        """
        Args:
            answer, home: as in `AgentSection`.

        Raises:
            ConfigError: the program or the folder does not exist.
        """
        if shutil.which(command[0]) is None:
            raise ConfigError(f"agent.command: there is no program {command[0]!r} in PATH")
        if home not in ("private", "shared") and not Path(home).is_dir():
            raise ConfigError(f"agent.home: {home!r} is neither private, shared nor a folder")
        self._command, self._answer, self._home = command, answer, home

    async def run(self, task: AgentTask, base_url: str, api_key: str) -> str | float | None:
        """Runs the command and returns its answer. The command runs below a guard, which ends every
        process that it started, detached or not, when this call or this process ends."""
        command = [filled(part, task, base_url, api_key) for part in self._command]
        with tempfile.TemporaryDirectory(
            prefix="agentrl-agent-", ignore_cleanup_errors=True
        ) as folder:
            output, errors = Path(folder) / "stdout", Path(folder) / "stderr"
            cwd, home = Path(folder) / "work", Path(folder) / "home"
            cwd.mkdir()
            environment = os.environ | agent_variables(task, base_url, api_key)
            if self._home == "private":
                home.mkdir()
            elif self._home != "shared":
                await asyncio.to_thread(shutil.copytree, self._home, home, symlinks=True)
            if self._home != "shared":
                # What a user installed is found as before; settings and caches are private.
                environment.setdefault("PYTHONUSERBASE", site.getuserbase())
                environment |= {"HOME": str(home)}
                environment = {k: v for k, v in environment.items() if k not in _BESIDE_HOME}
            with output.open("wb") as out, errors.open("wb") as err:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    guard.__file__,
                    str(os.getpid()),
                    str(GRACE_S),
                    *command,
                    cwd=cwd,
                    env=environment,
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
            if (path := answer_file(self._answer)) is not None:
                return _tail(cwd / path) if (cwd / path).is_file() else no_file(path)
        return last_line(printed) if self._answer == "last_line" else None

    async def aclose(self) -> None:
        """Does nothing: every process ended with its episode."""


def agent_variables(task: AgentTask, base_url: str, api_key: str) -> dict[str, str]:
    """Returns the environment variables by which a program finds its model.

    Raises:
        AgentError: the task shows an image.
    """
    if any(count_images(message["content"]) for message in task.messages):
        raise AgentError(
            "the task shows an image, and a program is given the text of its task only; use an "
            "agent that is a Python function, which reads task.messages, or let a tool of the "
            "environment show the image"
        )
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


def answer_file(answer: str) -> str | None:
    """Returns the path in `agent.answer`; None if it does not name a file."""
    kind, _, path = answer.partition(":")
    return path if kind == "file" else None


@functools.cache
def no_file(path: str) -> str:
    """Returns an empty answer for an agent that did not write its file, and warns once."""
    logger.warning("agent.answer: an agent left no file %s; its answer is empty (said once)", path)
    return ""


def filled(part: str, task: AgentTask, base_url: str, api_key: str) -> str:
    """Returns an argument of a command with its placeholders replaced; other braces stay."""
    values = {"prompt": task.prompt, "task_id": task.id, "base_url": base_url, "api_key": api_key}
    values |= {"mcp_url": task.mcp_url, "tools_url": task.tools_url}
    # All at once, so that placeholders within a prompt are not replaced.
    return re.sub("{(" + "|".join(values) + ")}", lambda found: values[found[1]], part)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_OUTPUT_BYTES))
        return file.read().decode("utf-8", "replace")
