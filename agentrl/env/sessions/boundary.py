"""Running an author's code: what it raises becomes a problem code, and a deadline is kept.

Exceptions of environments, whatever they are, are caught here and nowhere else.
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
"""A cancelled coroutine that has not stopped after so long is closed."""


async def guard(awaitable: Awaitable[T], env_id: str, task: Task | None = None) -> T:
    """Await an author's code; whatever it raises comes out as an EnvError."""
    try:
        return await awaitable
    except (Exception, SystemExit) as error:
        raise to_env_error(error, env_id, task) from error


def to_env_error(error: Exception | SystemExit, env_id: str, task: Task | None = None) -> EnvError:
    """Turns what an author's code raised into an EnvError, and logs the trace of what the author
    did not mean to raise.

    A ConfigError or DataError is about what the caller asked for, and so `invalid_request`.
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
    """The asyncio tasks of a session manager."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.stuck: set[asyncio.Task[Any]] = set()
        """Those that were told to stop and have not."""

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        observe(task)

    async def call(self, awaitable: Awaitable[T], env_id: str, task: Task | None = None) -> T:
        """Run an author's code in a task of its own and `wait` for it."""
        return await self.wait(self.spawn(guard(awaitable, env_id, task)), env_id)

    async def wait(self, running: asyncio.Task[T], env_id: str) -> T:
        """Wait for an author's code that runs in a task of its own.

        Where the waiting is cancelled, as `call_timeout` does at a deadline, it ends at once,
        whether or not the author's code reacts to being cancelled.

        Raises:
            EnvError: what the code raised.
        """
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise make_error("env_error", f"'{env_id}' cancelled its own call") from None
            self.stop(running)
            raise

    def stop(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task, and close its coroutine if it goes on regardless."""
        task.cancel()
        self.stuck.add(task)
        task.add_done_callback(self.stuck.discard)
        asyncio.get_running_loop().call_later(STOP_S, _close_coroutine, task)


def _close_coroutine(task: asyncio.Task[Any]) -> None:
    """End a coroutine that caught its cancellation and went on.

    `close` raises GeneratorExit where it waits, which neither `except Exception` nor `except
    CancelledError` catches. An inner coroutine that catches even that and waits again is dropped:
    its caller, and in the end `guard`, gets a RuntimeError. The task then finds its coroutine
    finished as soon as it is woken.
    """
    if task.done():
        return
    coroutine = task.get_coro()
    assert coroutine is not None
    try:
        coroutine.close()
    except (Exception, SystemExit) as error:  # its last words: the boundary to an author's code
        logger.debug("closing a call that passed its deadline: %s", error)
    task.cancel()


def observe(future: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not report an error nobody waited for."""
    if not future.cancelled():
        future.exception()
