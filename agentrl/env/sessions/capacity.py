"""Limits how many sessions may be open, and how many may be in their reset.

Sessions are counted per environment and per process. When there is no room, the creation of a
session waits: in order of arrival, for a limited time, in a queue of limited length.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.env.base import Environment
from agentrl.env.protocol import make_error
from agentrl.errors import EnvError

MAX_WAIT_S = 10.0
"""Most seconds that a creation waits for capacity before it is refused; its client retries."""
MAX_WAITING = 1024
"""Most creations that wait at a time."""
_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    environment: type[Environment]
    granted: asyncio.Future[None]


class Capacity:
    """Counts the sessions of one process. Used from one event loop."""

    def __init__(
        self,
        max_sessions: int | None = None,
        max_wait_s: float = MAX_WAIT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """
        Args:
            max_sessions: limit over all environments; None: only each environment's own limit.
            max_wait_s: most seconds that a creation waits.
            max_waiting: most creations that wait at a time.
        """
        self.live: Counter[str] = Counter()
        """Environment id -> its sessions; a session counts until its instance is closed."""
        self._max_sessions = max_sessions
        self._max_wait_s = max_wait_s
        self._max_waiting = max_waiting
        self._queue: list[_Waiter] = []
        self._resets: dict[str, asyncio.Semaphore] = {}

    @property
    def num_live(self) -> int:
        return self.live.total()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def limit(self, environment: type[Environment]) -> int:
        """Returns the most sessions of an environment that may be open."""
        return min(environment.max_sessions, self._max_sessions or environment.max_sessions)

    async def acquire(self, environment: type[Environment], timeout_s: float) -> None:
        """Takes capacity for one session, after the creations that already wait.

        Args:
            timeout_s: the time limit of the whole creation; at most half of it is spent waiting.

        Raises:
            EnvError: `at_capacity`: the queue is full, or nothing became free in time; `draining`:
                `close` was called meanwhile.
        """
        if not self._queue and self._fits(environment):
            self.live[environment.id] += 1
            return
        if len(self._queue) >= self._max_waiting:
            raise self._full(environment, f"{len(self._queue)} creations are waiting")
        waiter = _Waiter(environment, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._grant()
        wait_s = min(timeout_s / 2, self._max_wait_s)
        try:
            await asyncio.wait((waiter.granted,), timeout=wait_s)
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise
        if not waiter.granted.done():
            self._give_up(waiter)
            raise self._full(environment, f"none became free in {wait_s:g} s")
        waiter.granted.result()

    def release(self, environment: type[Environment]) -> None:
        """Gives back the capacity of one session."""
        self.live[environment.id] -= 1
        self._grant()

    def close(self) -> None:
        """Refuses all waiting creations with `draining`."""
        for waiter in self._queue:
            waiter.granted.set_exception(draining())
        self._queue.clear()

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

    def _fits(self, environment: type[Environment]) -> bool:
        in_use = self.live[environment.id]
        return in_use < environment.max_sessions and not self._is_full()

    def _is_full(self) -> bool:
        return self._max_sessions is not None and self.num_live >= self._max_sessions

    def _grant(self) -> None:
        """Grants free capacity to waiting creations, in order.

        One that waits for a full environment does not hold up those for other environments; later
        ones for the same environment stay behind it.
        """
        full: set[str] = set()
        waiting: list[_Waiter] = []
        for position, waiter in enumerate(self._queue):
            if self._is_full():
                waiting += self._queue[position:]
                break
            env_id = waiter.environment.id
            if env_id in full or not self._fits(waiter.environment):
                full.add(env_id)
                waiting.append(waiter)
            else:
                self.live[env_id] += 1
                waiter.granted.set_result(None)
        self._queue = waiting

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
            self._grant()  # creations behind it may fit now
        elif waiter.granted.exception() is None:  # it was granted at the same moment
            self.release(waiter.environment)

    def _full(self, environment: type[Environment], why: str) -> EnvError:
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
