"""Limits how many sessions may be open, and how many may be in their reset.

Sessions are counted per environment and per process. When there is no room, the creation of a
session waits: in order of arrival, for a limited time, in a queue of limited length.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.env.base import Environment
from agentrl.env.protocol import make_error
from agentrl.errors import EnvError

MAX_WAIT_S = 10.0
"""Most seconds that a creation waits for capacity before it is refused; its client retries."""
MAX_WAITING = 1024
"""Most creations that wait at a time."""
_RETRY_AFTER_S = 1.0


class Capacity:
    """Counts the sessions of one process. Used from one event loop."""

    def __init__(self, max_sessions: int | None = None, max_wait_s: float = MAX_WAIT_S) -> None:
        """
        Args:
            max_sessions: limit over all environments; None: only each environment's own limit.
            max_wait_s: most seconds that a creation waits.
        """
        self.live: Counter[str] = Counter()
        """Environment id -> its sessions; a session counts until its instance is closed."""
        self.num_waiting = 0
        self.closed = False
        """Refuse every further creation with `draining`."""
        self._max_sessions = max_sessions
        self._max_wait_s = max_wait_s
        self._process = asyncio.Semaphore(sys.maxsize if max_sessions is None else max_sessions)
        self._environments: dict[str, asyncio.Semaphore] = {}
        self._resets: dict[str, asyncio.Semaphore] = {}

    @property
    def num_live(self) -> int:
        return self.live.total()

    def limit(self, environment: type[Environment]) -> int:
        """Returns the most sessions of an environment that may be open."""
        return min(environment.max_sessions, self._max_sessions or environment.max_sessions)

    async def acquire(self, environment: type[Environment], timeout_s: float) -> None:
        """Takes capacity for one session, after the creations that already wait.

        One that waits for a full environment does not hold up those for other environments.

        Args:
            timeout_s: the time limit of the whole creation; at most half of it is spent waiting.

        Raises:
            EnvError: `at_capacity`: the queue is full, or nothing became free in time; `draining`:
                the server is shutting down.
        """
        if self.num_waiting >= MAX_WAITING:
            raise self._full(environment, f"{self.num_waiting} creations are waiting")
        wait_s = min(timeout_s / 2, self._max_wait_s)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                own = self._environments.setdefault(
                    environment.id, asyncio.Semaphore(environment.max_sessions)
                )
                await own.acquire()
                try:
                    await self._process.acquire()
                except BaseException:
                    own.release()
                    raise
        except TimeoutError:
            raise self._full(environment, f"none became free in {wait_s:g} s") from None
        finally:
            self.num_waiting -= 1
        self.live[environment.id] += 1
        if self.closed:
            self.release(environment)
            raise draining()

    def release(self, environment: type[Environment]) -> None:
        """Gives back the capacity of one session."""
        self.live[environment.id] -= 1
        self._environments[environment.id].release()
        self._process.release()

    @asynccontextmanager
    async def resetting(self, environment: type[Environment], wait_s: float) -> AsyncIterator[None]:
        """Surrounds a reset, so that at most `max_creating` of an environment run at a time.

        Raises:
            EnvError: `at_capacity`: no other reset ended within `wait_s`.
        """
        limit = environment.max_creating
        if limit is None:
            yield
            return
        resets = self._resets.setdefault(environment.id, asyncio.Semaphore(limit))
        try:
            async with asyncio.timeout(wait_s):
                await resets.acquire()
        except TimeoutError:
            raise make_error(
                "at_capacity",
                f"'{environment.id}' resets at most {limit} sessions at a time (max_creating), and "
                f"none of them was ready within {wait_s:g} s",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        try:
            yield
        finally:
            resets.release()

    def _full(self, environment: type[Environment], why: str) -> EnvError:
        if self.closed:
            return draining()
        used, limit = self.live[environment.id], self.limit(environment)
        return make_error(
            "at_capacity",
            f"{used} of {limit} sessions of '{environment.id}' are in use and {why}; close some, "
            "or raise max_sessions",
            retry_after_s=_RETRY_AFTER_S,
        )


def draining() -> EnvError:
    """Returns the error for calls on a server that is shutting down."""
    return make_error("draining", "the server is shutting down", retry_after_s=5.0)
