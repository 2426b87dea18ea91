"""Where an instance runs: in this process, or in one of its own.

A runner is one instance of an environment, and lives for one episode: `start` or `restore`, any
number of `turn`s and `snapshot`s, `close`. The session manager never calls it twice at a time,
except for `kill`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from agentrl.env import protocol
from agentrl.env.base import Environment, Episode, can_snapshot
from agentrl.env.protocol import InlineTask, WireAction, make_error
from agentrl.env.session.episode import check_json, start_episode, take_turn
from agentrl.errors import EnvError
from agentrl.types import Action, Message, StepResult, Task, ToolSpec

if TYPE_CHECKING:
    from agentrl.env.session.sources import Source


class Runner(Protocol):
    """Methods raise what the author's code raises, or an EnvError that says how its process ended.
    Cancelling one cancels the author's code."""

    tools: list[ToolSpec]
    """What this instance offers to the agent."""
    starts_at_once: bool
    """`start` does not wait for anything, so that it can be called where nothing could stop it."""
    closes_at_once: bool
    """There is nothing to free: `close` need not be called."""

    async def start(self, task: Task, seed: int) -> list[Message]:
        """Reset the instance and return the first prompt."""
        ...

    def turn(self, action: Action, *, last: bool) -> Coroutine[Any, Any, StepResult]:
        """Answer one action."""
        ...

    async def snapshot(self) -> bytes:
        """All that `restore` needs: the episode, the random numbers and the author's state."""
        ...

    async def restore(self, blob: bytes) -> list[Message]:
        """Go on, in place of `start`, where the snapshot was taken; returns the messages so far."""
        ...

    async def close(self) -> None:
        """Free what the instance holds."""
        ...

    def kill(self) -> None:
        """Stop whatever still runs, if that can be done: a process is killed, a thread cannot
        be."""
        ...


class _State(Struct):
    """A snapshot, as JSON."""

    task: InlineTask
    seed: int
    messages: list[dict[str, Any]]
    actions: list[WireAction]
    reward: float
    metrics: dict[str, float]
    info: dict[str, Any]
    random: tuple[int, list[int], float | None]
    """`random.Random.getstate()`."""
    author: Any
    """What the environment's `snapshot` returned."""


class LocalRunner:
    """An instance in this process; its `def` methods run in threads."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.starts_at_once = _is_default(environment.reset, Environment.reset)
        self.closes_at_once = _is_default(environment.close, Environment.close)
        self.tools: list[ToolSpec] = [tool.spec for tool in environment._tools.values()]

    async def start(self, task: Task, seed: int) -> list[Message]:
        return await start_episode(self.environment, task, seed)

    def turn(self, action: Action, *, last: bool) -> Coroutine[Any, Any, StepResult]:
        return take_turn(self.environment, action, last=last)

    async def snapshot(self) -> bytes:
        environment, episode = self.environment, self.environment.episode
        if not can_snapshot(type(environment)):
            raise make_error(
                "not_supported",
                f"environment '{environment.id}' has no snapshot() and restore() methods",
            )
        author = await environment.call(environment.snapshot)
        check_json(author, "snapshot()")
        task = protocol.to_task_spec(episode.task).inline
        assert task is not None
        messages: Any = episode.messages
        version, numbers, gauss = environment.rng.getstate()
        state = _State(
            task,
            episode.seed,
            messages,
            [protocol.to_wire_action(action) for action in episode.actions],
            episode.reward,
            episode.metrics,
            episode.info,
            (version, list(numbers), gauss),
            author,
        )
        try:
            return protocol.encode(state)
        except TypeError as error:
            raise EnvError(f"snapshot() of {type(environment).__name__}: {error}") from error

    async def restore(self, blob: bytes) -> list[Message]:
        environment = self.environment
        state = msgspec.json.decode(blob, type=_State)
        environment._episode = Episode(
            protocol.from_inline(state.task),
            state.seed,
            protocol.from_wire_messages(state.messages),
            [protocol.from_wire_action(action) for action in state.actions],
            state.reward,
            state.metrics,
            state.info,
        )
        environment._finish = None
        environment._rng = random.Random()
        version, numbers, gauss = state.random
        environment._rng.setstate((version, tuple(numbers), gauss))
        await environment.call(environment.restore, state.author)
        return environment.episode.messages

    async def close(self) -> None:
        await self.environment.call(self.environment.close)

    def kill(self) -> None:
        pass


def _is_default(method: Callable[..., object], default: Callable[..., object]) -> bool:
    """Whether the author left a method alone."""
    return getattr(method, "__func__", method) is default


async def make_runner(source: Source) -> Runner:
    """A fresh instance of a loaded source, where `Environment.isolation` says."""
    if source.host is not None:
        return await source.host.runner()
    assert source.instance is not None
    environment = source.environment(source.config, shared=source.instance.shared)
    environment._workers = source.workers
    return LocalRunner(environment)
