"""Runs an author's code: turns what it raises into an EnvError, and stops it at its deadline.

Exceptions from a session's environment become EnvErrors here and nowhere else. That includes the
ones that are no `Exception`, such as KeyboardInterrupt or an extension module's panic: in a task of
asyncio they would end the event loop, or leave the step without an answer.
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

CLOSE_TIMEOUT_S = 30.0
"""Time limit of an environment's `close` and of its `close_shared`."""


def to_env_error(error: BaseException, env_id: str, task: Task | None = None) -> EnvError:
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


async def guard(awaitable: Awaitable[T], env_id: str, task: Task | None = None) -> T:
    """Awaits an author's code, and turns whatever it raises into an EnvError.

    Only the cancellation of its task is passed on.
    """
    try:
        return await awaitable
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        raise cancelled_itself(env_id) from None
    except BaseException as error:
        if isinstance(error, GeneratorExit) and not _in_loop():
            raise  # this coroutine is collected after its event loop has ended
        raise to_env_error(error, env_id, task) from error


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def cancelled_itself(env_id: str) -> EnvError:
    return make_error("env_error", f"'{env_id}' cancelled its own call")


class Background:
    """Holds the asyncio tasks of a session manager."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.stopped: set[asyncio.Task[Any]] = set()
        """Tasks that `stop` cancelled and that still run."""

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

        If this coroutine is cancelled, as `asyncio.timeout` does at a deadline, it ends at once,
        even if the author's code ignores its own cancellation.
        """
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise cancelled_itself(env_id) from None
            self.stop(running)
            raise

    async def close(self, closing: Awaitable[Any], what: str, env_id: str) -> None:
        """Runs an author's `close` or `close_shared`; a failure of it is only logged."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.call(closing, env_id)
        except TimeoutError:
            logger.warning("%s of '%s' ran out of time", what, env_id)
        except EnvError as error:
            logger.warning("%s", error)

    def stop(self, task: asyncio.Task[Any]) -> None:
        """Cancels a task. One that ignores it counts as hung until it ends."""
        if task.done():
            return
        self.stopped.add(task)
        task.add_done_callback(self.stopped.discard)
        task.add_done_callback(observe)
        task.cancel()


def observe(future: asyncio.Future[Any]) -> None:
    """Reads the outcome, so that asyncio does not report an error that nobody awaited."""
    if not future.cancelled():
        future.exception()
