"""One session: an episode on an instance of its own, and the step it is at."""

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
    """A step that runs, or the last one that ran."""

    index: int
    body: bytes
    """What was asked for, to tell a repetition from a conflict."""
    started: float
    """On the event loop's clock."""
    outcome: bytes | EnvError | None = None
    """The encoded reply, or why there is none; None while the step runs."""
    task: asyncio.Task[None] = field(init=False)
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    async def wait(self) -> bytes:
        """The encoded reply, once there is one. A caller who goes away disturbs no other.

        Raises:
            EnvError: why there is none.
        """
        if self.outcome is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        assert self.outcome is not None
        if isinstance(self.outcome, EnvError):
            raise self.outcome.with_traceback(None)  # else each repetition makes it longer
        return self.outcome

    def settle(self, outcome: bytes | EnvError) -> None:
        self.outcome = outcome
        for waiter in self._waiters:
            if not waiter.done():  # cancelled with its caller
                waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Session:
    id: str
    loaded: LoadedEnvironment
    task: Task
    seed: int
    lease_s: float
    key: str | None
    """The Idempotency-Key it was opened with."""
    max_turns: int | None = None
    instance: Environment | None = None
    """None until the reset begins."""
    expires: float = 0.0
    """On the event loop's clock."""
    observation: list[Message] = field(default_factory=list)
    """The first prompt."""
    tools: list[ToolSpec] = field(default_factory=list)
    """As the agent was last told."""
    offered: dict[str, Tool] | None = None
    """What `tools` was made of."""
    told: bytes = b"[]"
    """`tools`, encoded, because the author's code may change the very objects."""
    step: int = 0
    status: str = "live"
    reward: float = 0.0
    current: Step | None = None
    reply: bytes | None = None
    """Of the last step that succeeded."""
    calling: asyncio.Task[Any] | None = None
    """The last call into the author's code."""
    opened: float = field(default_factory=time.monotonic)
    retired: bool = False
    """Its instance is closed, or about to be."""

    @property
    def environment(self) -> type[Environment]:
        return self.loaded.environment

    @property
    def caller(self) -> str:
        """See `agentrl.caller`."""
        return (self.key or "").partition("/")[0]

    @property
    def busy(self) -> bool:
        return self.current is not None and self.current.outcome is None


async def start(session: Session) -> None:
    """Make a session's instance and reset it. The prompt is copied as the wire would, so that
    nobody can change it afterwards."""
    instance = session.instance = session.loaded.make_instance()
    first = await episode.start_episode(instance, session.task, session.seed, session.max_turns)
    session.observation = as_json(first)
    tell_tools(session, instance)


async def take_turn(session: Session, request: StepRequest) -> tuple[StepReply, bytes]:
    """Returns the reply to an action, and its JSON; what has none is the environment's error."""
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
    """Notes what the agent is offered now, and returns whether that has changed."""
    if instance._tools is session.offered:
        return False
    session.offered = instance._tools
    session.tools = [tool.spec for tool in session.offered.values()]
    before, session.told = session.told, encode(session.tools)
    return session.told != before


def episode_record(session: Session, outcome: str, error: BaseException | None) -> dict[str, Any]:
    """The episode's line in the log."""
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
