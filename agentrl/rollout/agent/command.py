"""Agents that are programs: a box per episode, by default a folder on this machine.

Every process that an agent started, detached or not, ends with the agent and with this process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import shutil
import site
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.env.container.box import Box
from agentrl.env.container.engine import MAX_LIFE_S
from agentrl.env.container.process import ProcessBox
from agentrl.errors import AgentError, ConfigError
from agentrl.images import count_images
from agentrl.types import JSON, Message, ToolSpec

logger = logging.getLogger("agentrl.rollout")

MAX_OUTPUT_BYTES = 16 << 20
"""An agent in a container that writes more fails; of any other's output the end is read."""
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
        """Runs the command in a box of its own and returns its answer. Every process that it
        started has ended when this call or this process has."""
        command = [filled(part, task, base_url, api_key) for part in self._command]
        async with self._box() as box:
            ran = await box.execute(
                command,
                timeout_s=MAX_LIFE_S,  # the episode has a deadline
                max_bytes=MAX_OUTPUT_BYTES,
                environment=agent_variables(task, base_url, api_key),
            )
            printed = ran.output.decode(errors="replace")
            if ran.flooded:
                raise AgentError(f"{command[0]} wrote more than {MAX_OUTPUT_BYTES >> 20} MiB")
            if ran.exit_code:
                said = (ran.errors or printed).strip()[-1000:] or "it printed nothing"
                raise AgentError(f"{command[0]} exited with status {ran.exit_code}: {said}")
            kind, _, path = self._answer.partition(":")
            if kind == "file":
                written = await box.get(path, MAX_OUTPUT_BYTES)
                return _no_file(path) if written is None else written.decode(errors="replace")
        return last_line(printed) if self._answer == "last_line" else None

    @asynccontextmanager
    async def _box(self) -> AsyncIterator[Box]:
        box = ProcessBox(os.environ)
        try:
            if self._home != "shared":
                home = box.folder / "home"
                if self._home == "private":
                    home.mkdir()
                else:
                    await asyncio.to_thread(shutil.copytree, self._home, home, symlinks=True)
                # What a user installed is found as before; settings and caches are private.
                box.environ.setdefault("PYTHONUSERBASE", site.getuserbase())
                box.environ["HOME"] = str(home)
                for name in _BESIDE_HOME:
                    box.environ.pop(name, None)
            yield box
        finally:
            await box.end()

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


def last_line(printed: str) -> str | None:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1] if lines else None


@functools.cache
def _no_file(path: str) -> str:
    """Returns an empty answer for an agent that did not write its file, and warns once."""
    logger.warning("agent.answer: an agent left no file %s; its answer is empty (said once)", path)
    return ""


def filled(part: str, task: AgentTask, base_url: str, api_key: str) -> str:
    """Returns an argument of a command with its placeholders replaced; other braces stay."""
    values = {"prompt": task.prompt, "task_id": task.id, "base_url": base_url, "api_key": api_key}
    values |= {"mcp_url": task.mcp_url, "tools_url": task.tools_url}
    # All at once, so that placeholders within a prompt are not replaced.
    return re.sub("{(" + "|".join(values) + ")}", lambda found: values[found[1]], part)
