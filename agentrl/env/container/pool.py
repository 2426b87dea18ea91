"""Starts containers ahead of time, so that an episode does not wait a second for one.

spec = ContainerSpec("python:3.12-slim", memory_mb=512)

class Shell(Environment):
    @classmethod
    def load_shared(cls, config):
        return ContainerPool(spec, ready=4)
    async def reset(self, task, *, seed):
        self.container = await self.shared.acquire()
    @tool(timeout_s=40)
    async def bash(self, command: str) -> str:
        return (await self.container.run(command, timeout_s=30)).output
    async def close(self):
        if hasattr(self, "container"):  # reset may have failed before it got one
            await self.container.remove()
    @classmethod
    def close_shared(cls, shared):
        shared.close()
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from agentrl.env.container.container import Container, ContainerSpec
from agentrl.env.container.engine import Engine, labels, reap
from agentrl.errors import ConfigError, EnvError, EnvUnavailable

__all__ = ["ContainerPool", "ContainerSpec"]

logger = logging.getLogger(__name__)

_MAX_PAUSE_S = 30.0
"""Longest pause, in seconds, before the next attempt to start a container after failures."""


class ContainerPool:
    """Keeps containers ready, for one event loop at a time.

    A container is used once: its user removes it, and the pool starts another. `close`, to be
    called in `close_shared`, removes all; otherwise they end with the process.
    """

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        ready: int = 2,
        max_containers: int = 64,
        max_starting: int = 4,
    ) -> None:
        """
        Args:
            spec: image and limits of the containers.
            ready: idle containers to keep, in addition to those in use.
            max_containers: most containers in use at a time; further callers wait.
            max_starting: most containers started at a time; an engine that starts dozens at a time
                becomes very slow.

        Raises:
            ConfigError: a number is too small.
        """
        if ready < 0 or max_containers < 1 or max_starting < 1:
            raise ConfigError(
                f"ContainerPool: ready = {ready} must be at least 0, max_containers = "
                f"{max_containers} and max_starting = {max_starting} at least 1"
            )
        self.spec = spec
        self._num_wanted = ready
        self._max_containers = max_containers
        self._max_starting = max_starting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = Engine()
        self._known: set[Container] = set()
        self._idle: deque[Container] = deque()

    @property
    def num_live(self) -> int:
        """Containers in use and idle ones."""
        return len(self._known)

    async def warm(self, timeout_s: float = 60.0) -> None:
        """Starts the idle containers and waits for them. Without this, the first `acquire` starts
        them.

        Raises:
            EnvUnavailable: they were not ready in time.
        """
        self._refill()
        deadline = time.monotonic() + timeout_s
        while len(self._idle) < self._num_wanted:
            if time.monotonic() > deadline:
                raise EnvUnavailable(
                    f"{len(self._idle)} of {self._num_wanted} containers of {self.spec.image} were "
                    f"ready after {timeout_s:g} s"
                )
            await asyncio.sleep(0.02)

    async def acquire(self, *, timeout_s: float = 60.0) -> Container:
        """Returns a fresh container, which the caller must remove.

        Raises:
            EnvUnavailable: none became available within `timeout_s`, or the engine does not answer.
            EnvError: the engine refused, or the pool belongs to another event loop that is open.
        """
        self._bind()
        in_use = self._in_use
        try:
            async with asyncio.timeout(timeout_s):
                await in_use.acquire()
                try:
                    container = await self._next()
                except BaseException:
                    in_use.release()
                    raise
        except TimeoutError:
            raise EnvUnavailable(
                f"no container of {self.spec.image} became available within {timeout_s:g} s: at "
                f"most {self._max_containers} may be in use (max_containers) and "
                f"{self._max_starting} be starting (max_starting) at a time",
                retry_after_s=1.0,
            ) from None

        def end() -> None:
            self._known.discard(container)
            in_use.release()

        container.on_end = end
        self._refill()
        return container

    @asynccontextmanager
    async def container(self, *, timeout_s: float = 60.0) -> AsyncIterator[Container]:
        """Acquires a container while in the context, and removes it afterwards."""
        container = await self.acquire(timeout_s=timeout_s)
        try:
            yield container
        finally:
            await container.remove()

    async def aclose(self) -> None:
        """Removes all containers, including those in use."""
        tasks, self._loop = list(self._tasks) if self._loop else [], None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        known, self._known = self._known, set()
        self._idle.clear()
        await asyncio.gather(*(container.remove() for container in known), return_exceptions=True)
        await self._engine.settle()

    def close(self) -> None:
        """Calls `aclose` from another thread than the event loop's, or after the loop has ended."""
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result(60)
        elif self._known:
            self._loop = None
            asyncio.run(self.aclose())

    def _bind(self) -> None:
        """Binds the pool to the running event loop, and removes containers of an earlier loop.

        Raises:
            EnvError: it is bound to another loop, which is not closed.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise EnvError("a ContainerPool belongs to one event loop: make another for this one")
        self._loop = loop
        self._in_use = asyncio.Semaphore(self._max_containers)
        self._starting = asyncio.Semaphore(self._max_starting)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_filling = 0
        left, self._known = self._known, set()
        self._idle.clear()
        for container in left:
            self._spawn(self._end(container))
        self._spawn(self._reap())

    async def _next(self) -> Container:
        """Returns an idle container that is still alive, or a new one."""
        while self._idle:
            container = self._idle.popleft()
            age_s = time.monotonic() - container.started
            if age_s < self.spec.life_s / 2 and await container.alive():
                return container
            self._spawn(self._end(container))
        async with self._starting:
            # One may have become idle while this caller waited for its turn.
            return self._idle.popleft() if self._idle else await self._create()

    async def _create(self) -> Container:
        container = await Container.create(self._engine, self.spec, labels("pool", "episode"))
        self._known.add(container)
        return container

    def _refill(self) -> None:
        """Starts the idle containers that are missing."""
        self._bind()
        while len(self._idle) + self._num_filling < self._num_wanted:
            self._num_filling += 1
            self._spawn(self._fill())

    async def _fill(self) -> None:
        """Starts an idle container, and tries again after a pause if that fails."""
        pause_s = 2.0
        try:
            while True:
                try:
                    async with self._starting:
                        self._idle.append(await self._create())
                    return
                except EnvError as error:
                    logger.warning("a container of %s did not start: %s", self.spec.image, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        finally:
            self._num_filling -= 1

    async def _reap(self) -> None:
        try:
            for line in await self._engine.call(reap):
                logger.info("removed an abandoned container: %s", line)
        except EnvError as error:  # `acquire` raises it too
            logger.warning("cannot remove abandoned containers: %s", error)

    async def _end(self, container: Container) -> None:
        self._known.discard(container)
        with suppress(EnvError):
            await container.remove()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
