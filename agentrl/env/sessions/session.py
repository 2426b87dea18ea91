"""Holds one session: an episode played on its own instance of an environment."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from agentrl.env import episode
from agentrl.env.base import Environment
from agentrl.env.protocol import StepReply, StepRequest, as_json, encode
from agentrl.env.sessions.loaded import LoadedEnvironment
from agentrl.env.tools import Tool
from agentrl.errors import EnvError
from agentrl.types import Message, Task, ToolSpec


@dataclass(slots=True, eq=False)
class Step:
    """A step that is running, or the last one that ran."""

    index: int
    body: bytes
    """The encoded request, which tells a repeated call from a conflicting one."""
    started: float
    """When it began, on the event loop's clock."""
    outcome: bytes | EnvError | None = None
    """The encoded reply, or the error; None while the step runs."""
    task: asyncio.Task[None] = field(init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> bytes:
        """Waits for the step and returns its encoded reply.

        Any number of callers may wait; cancelling one affects neither the step nor the others.

        Raises:
            EnvError: the step failed.
        """
        await self._ended.wait()
        assert self.outcome is not None
        if isinstance(self.outcome, EnvError):
            raise self.outcome.with_traceback(None)  # it would grow each time it is raised
        return self.outcome

    def settle(self, outcome: bytes | EnvError) -> None:
        """Sets the outcome and wakes the waiting callers."""
        self.outcome = outcome
        self._ended.set()


@dataclass(slots=True, eq=False)
class Session:
    """The state of one session. `SessionManager` changes it."""

    id: str
    loaded: LoadedEnvironment
    task: Task
    seed: int
    lease_s: float
    key: str | None
    """The Idempotency-Key that it was opened with."""
    max_turns: int | None = None
    """Most turns that the agent gets; None: not known."""
    instance: Environment | None = None
    """None until the reset begins."""
    expires: float = 0.0
    """When its lease ends, on the event loop's clock."""
    observation: list[Message] = field(default_factory=list)
    """The first prompt."""
    tools: list[ToolSpec] = field(default_factory=list)
    """Specifications of the tools that are offered."""
    offered: dict[str, Tool] | None = None
    """The tools that `tools` was made from."""
    told: bytes = b"[]"
    """`tools`, encoded: the author's code may change the objects in place."""
    step: int = 0
    """Steps taken so far, which is the index of the next one."""
    status: str = "live"
    """`live`, `ended` or `failed`."""
    reward: float = 0.0
    """Sum over the steps so far."""
    current: Step | None = None
    """The step that is running, or the last one that ran."""
    reply: bytes | None = None
    """The encoded reply of the last step that succeeded."""
    calling: asyncio.Task[Any] | None = None
    """The last call into the author's code."""
    opened: float = field(default_factory=time.monotonic)
    """When it was made, on the monotonic clock."""
    retired: bool = False
    """True once its instance is closed or about to be."""

    @property
    def environment(self) -> type[Environment]:
        return self.loaded.environment

    @property
    def busy(self) -> bool:
        """True while a step runs."""
        return self.current is not None and self.current.outcome is None


async def start(session: Session) -> None:
    """Makes a session's instance and resets it.

    The first prompt is copied through JSON, so that the author's code cannot change it later.
    """
    instance = session.instance = session.loaded.make_instance()
    first = await episode.start_episode(instance, session.task, session.seed, session.max_turns)
    session.observation = as_json(first)
    tell_tools(session, instance)


async def take_turn(session: Session, request: StepRequest) -> tuple[StepReply, bytes]:
    """Plays one turn, and returns the reply and its JSON.

    Raises:
        Exception: whatever the author's code raised, or what makes its reply not encodable.
    """
    assert session.instance is not None
    result = await episode.take_turn(session.instance, request.action, last=request.last)
    changed = tell_tools(session, session.instance)
    reply = StepReply(
        observation=result.observation,
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        reward_components=result.reward_components,
        info=result.info,
        metrics=result.metrics,
        step=session.step + 1,
        tools=session.tools if changed else None,
    )
    return reply, encode(reply)


def tell_tools(session: Session, instance: Environment) -> bool:
    """Updates the session's tools from the instance, and returns True if they have changed."""
    offered = instance._tools
    if offered is session.offered:
        return False
    session.offered = offered
    session.tools = [tool.spec for tool in offered.values()]
    before, session.told = session.told, encode(session.tools)
    return session.told != before


def episode_record(session: Session, outcome: str, error: BaseException | None) -> dict[str, Any]:
    """Returns the episode's record for the log."""
    record = {
        "event": "episode",
        "env": session.environment.id,
        "session": session.id[:8],
        "task": session.task.id,
        "seed": session.seed,
        "turns": session.step,
        "reward": session.reward,
        "outcome": outcome,
        "seconds": round(time.monotonic() - session.opened, 3),
    }
    return record if error is None else record | {"error": str(error)}
