"""The environment's own tools, offered to an agent: as plain HTTP here, over MCP in `mcp_tools.py`.

Every call is one step of the environment's session, in the order in which calls
came: rewards, metrics and the end of the episode are those of that step. A call whose client
disconnects goes on, because the environment has accepted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentrl.env.client import EnvSession
from agentrl.errors import AgentError
from agentrl.images import content_text, join_contents
from agentrl.rollout.messages import RequestRefused
from agentrl.types import JSON, Action, Content, StepResult, ToolCall, ToolSpec, Trajectory

MAX_NOTED_CHARS = 2000
"""Length to which a tool's answer is cut in the trajectory's info. The dialogue holds all that the
policy read."""


@dataclass(slots=True, frozen=True)
class ToolReply:
    content: Content
    """Parts in OpenAI's shape where the environment shows an image."""
    terminated: bool
    truncated: bool
    """The environment has ended the episode; the agent may say its last words."""


class EnvTools:
    """The environment's tools in one episode."""

    def __init__(
        self,
        session: EnvSession,
        step: Callable[[Action], Awaitable[StepResult]],
        trajectory: Trajectory,
    ) -> None:
        self._session, self._step, self._trajectory = session, step, trajectory
        self._one_at_a_time = asyncio.Lock()
        self._calls: dict[str, asyncio.Task[Any]] = {}
        """By idempotency key."""
        self._closed = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what ends the episode from the environment's side."""

    @property
    def specs(self) -> list[ToolSpec]:
        """Returns the tools that can be called now."""
        return self._session.tools

    @property
    def is_over(self) -> bool:
        """True once the environment has ended the episode."""
        return self._trajectory.stop_reason is not None

    async def call(self, name: str, arguments: dict[str, JSON], key: str = "") -> ToolReply:
        """Calls one tool, as a step of the environment's session.

        Args:
            key: a repeated key returns the answer of the first call with it.

        Raises:
            RequestRefused: the episode is over, or this call fails and ends it.
        """
        number = len(self._calls)
        key = key or f" {number}"  # no header has such a value
        if (task := self._calls.get(key)) is None:
            action = Action(tool_calls=(ToolCall(f"agent-{number}", name, arguments),))
            task = self._calls[key] = asyncio.create_task(self._take(action))
            task.add_done_callback(self._ended)
        await asyncio.wait((task,))
        if task.cancelled() or _broke(task):
            raise RequestRefused(
                "the environment failed, and the episode with it", status=500, code="env_failed"
            )
        return task.result()

    async def _take(self, action: Action) -> ToolReply:
        async with self._one_at_a_time:
            if self._closed or self.is_over:
                raise RequestRefused("this episode is over", status=410, code="episode_over")
            turn = len(self._trajectory.turns) - 1
            result = await self._step(action)
        (call,) = action.tool_calls
        content = join_contents((each["content"] for each in result.observation), "\n")
        noted: Any = self._trajectory.info.setdefault("tool_calls", [])
        noted.append(
            {
                "after_turn": turn,
                "name": call.name,
                "arguments": call.arguments,
                "content": content_text(content, "[image]")[:MAX_NOTED_CHARS],
            }
        )
        return ToolReply(content, result.terminated, result.truncated)

    async def step(self, action: Action) -> StepResult:
        """Takes a step that does not come from a call over HTTP or MCP.

        Raises:
            AgentError: the episode is over.
        """
        task = self._calls[f" {len(self._calls)}"] = asyncio.create_task(self._take_step(action))
        task.add_done_callback(self._ended)
        return await task

    async def _take_step(self, action: Action) -> StepResult:
        async with self._one_at_a_time:
            if self._closed or self.is_over:
                raise AgentError("this episode is over")
            return await self._step(action)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and _broke(task):
            self._closed = True
            error = task.exception()
            if error is not None and not self.failure.done():
                self.failure.set_exception(error)

    async def settle(self) -> None:
        """Refuses further calls and waits for the step in progress, because a session takes one
        step at a time."""
        self._closed = True
        if self._calls:
            await asyncio.wait(self._calls.values())

    def close(self) -> None:
        """Cancels the calls in progress, because the session ends."""
        self._closed = True
        for task in self._calls.values():
            task.cancel()
        if not self.failure.done():
            self.failure.cancel()
        elif not self.failure.cancelled():
            self.failure.exception()  # seen


def _broke(task: asyncio.Task[Any]) -> bool:
    """Tells whether a task failed with an error other than a refusal."""
    return not isinstance(task.exception(), RequestRefused | AgentError | None)
