"""Runs an author's code: turns what it raises into an EnvError, and stops it at its deadline.

Exceptions from a session's environment become EnvErrors here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from agentrl.env.protocol import make_error
from agentrl.env.secret import hide_secrets
from agentrl.env.values import describe
from agentrl.errors import AgentRLError, ConfigError, DataError, EnvError
from agentrl.types import Task

logger = logging.getLogger("agentrl.env")

T = TypeVar("T")

STOP_S = 2.0
"""Seconds after which a cancelled coroutine that still runs is closed."""


async def guard(awaitable: Awaitable[T], env_id: str, task: Task | None = None) -> T:
    """Awaits an author's code, and turns whatever it raises into an EnvError."""
    try:
        return await awaitable
    except (Exception, SystemExit) as error:
        raise to_env_error(error, env_id, task) from error


def to_env_error(error: Exception | SystemExit, env_id: str, task: Task | None = None) -> EnvError:
    """Converts an exception from an author's code into an EnvError.

    A ConfigError or DataError concerns the caller's request, so it becomes `invalid_request`. Any
    other error is the environment's: `env_error`. Errors that are not agentrl's own are logged with
    their traceback.
    """
    if isinstance(error, EnvError):
        return error
    if isinstance(error, ConfigError | DataError):
        return make_error("invalid_request", hide_secrets(str(error)))
    if isinstance(error, AgentRLError):
        return make_error("env_error", hide_secrets(str(error)))
    logger.error("environment '%s' failed", env_id, exc_info=error)
    return make_error("env_error", f"'{env_id}' raised {describe(error, task)}")


class Background:
    """Holds the asyncio tasks of a session manager."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.stuck: set[asyncio.Task[Any]] = set()
        """Tasks that were cancelled and still run."""

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a coroutine as a task and keeps the task until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)  # the event loop itself holds only weak references
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        observe(task)

    async def call(self, awaitable: Awaitable[T], env_id: str, task: Task | None = None) -> T:
        """Runs an author's code in its own task and waits for it; see `wait`."""
        return await self.wait(self.spawn(guard(awaitable, env_id, task)), env_id)

    async def wait(self, running: asyncio.Task[T], env_id: str) -> T:
        """Waits for an author's code that runs in its own task, and returns its result.

        If this coroutine is cancelled, as `call_timeout` does at a deadline, it ends at once, even
        if the author's code ignores its own cancellation.

        Raises:
            EnvError: the code raised, or cancelled its own task.
        """
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise make_error("env_error", f"'{env_id}' cancelled its own call") from None
            self.stop(running)
            raise

    def stop(self, task: asyncio.Task[Any]) -> None:
        """Cancels a task, and closes its coroutine if it still runs after `STOP_S`."""
        task.cancel()
        self.stuck.add(task)
        task.add_done_callback(observe)  # one whose coroutine was closed ends in a RuntimeError
        task.add_done_callback(self.stuck.discard)
        asyncio.get_running_loop().call_later(STOP_S, _close_coroutine, task)


def _close_coroutine(task: asyncio.Task[Any]) -> None:
    """Ends a coroutine that caught its cancellation and went on.

    `close` raises GeneratorExit at the point where the coroutine waits; neither `except Exception`
    nor `except CancelledError` catches that. An inner coroutine that catches even GeneratorExit and
    waits again is dropped: its caller, and finally `guard`, gets a RuntimeError. The task finds its
    coroutine finished when it next runs.
    """
    if task.done():
        return
    coroutine = task.get_coro()
    assert coroutine is not None
    try:
        coroutine.close()
    except (Exception, SystemExit) as error:  # an author's code may raise anything here too
        logger.debug("closing a call that passed its deadline: %s", error)
    task.cancel()


def observe(future: asyncio.Future[Any]) -> None:
    """Reads the outcome, so that asyncio does not report an error that nobody awaited."""
    if not future.cancelled():
        future.exception()
