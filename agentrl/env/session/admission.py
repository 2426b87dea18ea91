"""Admission: who may open a session now, who waits for it, and who is told to come back later.

Three gates, in this order:

* The *breaker* of an environment opens when its sessions failed to start several times in a row,
  by its own fault. Everybody is refused then, for a time that doubles with every failed attempt;
  after it one creation at a time is let through as a probe, and the first success closes it.
  So a Docker engine that is out of disk is asked once a minute, not a thousand times a second.
* *Slots*: live sessions per environment and per process. Creations wait for them in the order they
  came, for a bounded time, in a queue of bounded length.
* *Creating*: how many sessions of an environment may be in their reset at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass

from agentrl.env.base import Environment
from agentrl.env.protocol import make_error
from agentrl.errors import EnvError

MAX_WAIT_S = 10.0
"""A creation waits for its slots no longer; its client asks again."""
MAX_WAITING = 1024
"""Creations that wait at a time."""
BREAKER_THRESHOLD = 8
"""Creations that failed in a row before the breaker opens."""
BREAKER_FIRST_S = 1.0
BREAKER_LONGEST_S = 60.0
_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    environment: type[Environment]
    count: int
    granted: asyncio.Future[None]


class Breaker:
    """Of one environment."""

    def __init__(self) -> None:
        self._failures = 0
        self._open_s = 0.0
        self._until = 0.0
        self._probing = False

    @property
    def state(self) -> str:
        if self._open_s == 0.0:
            return "closed"
        return "open" if asyncio.get_running_loop().time() < self._until else "half_open"

    @contextmanager
    def watch(self, environment: type[Environment], timeout_s: float) -> Iterator[None]:
        """Around the opening of sessions, which got `timeout_s`.

        Raises:
            EnvError: `unavailable`, with the time to come back after.
        """
        if self._open_s > 0.0:
            remaining = self._until - asyncio.get_running_loop().time()
            if remaining > 0 or self._probing:
                raise make_error(
                    "unavailable",
                    f"'{environment.id}' failed to start {self._failures} times in a row and is "
                    "given a rest; the server's log says why",
                    retry_after_s=max(remaining, _RETRY_AFTER_S),
                )
            self._probing = True
        probing = self._probing
        try:
            yield
        except EnvError as error:
            if _is_environments_fault(error, environment, timeout_s):
                self._failed(probing)
            raise
        else:
            self._failures, self._open_s = 0, 0.0
        finally:
            if probing:
                self._probing = False

    def _failed(self, probing: bool) -> None:
        self._failures += 1
        if probing or (self._open_s == 0.0 and self._failures >= BREAKER_THRESHOLD):
            self._open_s = min(max(2 * self._open_s, BREAKER_FIRST_S), BREAKER_LONGEST_S)
            self._until = asyncio.get_running_loop().time() + self._open_s


def _is_environments_fault(
    error: EnvError, environment: type[Environment], timeout_s: float
) -> bool:
    """A caller that grants less time than the environment says it needs proves nothing by running
    out of it."""
    if error.code == "reset_timeout":
        return not error.retryable and timeout_s >= environment.reset_timeout_s
    return error.code in ("env_error", "grader_error", "unavailable")


class Admission:
    def __init__(
        self,
        max_sessions: int | None = None,
        max_wait_s: float = MAX_WAIT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """
        Args:
            max_sessions: slots over all environments; None leaves it to each environment's own.
        """
        self.live: dict[str, int] = {}
        """Slots in use, by environment; a slot is free again once its instance is closed."""
        self._max_sessions = max_sessions
        self._max_wait_s = max_wait_s
        self._max_waiting = max_waiting
        self._queue: list[_Waiter] = []
        self._creating: dict[str, asyncio.Semaphore] = {}
        self._breakers: dict[str, Breaker] = {}

    @property
    def num_live(self) -> int:
        return sum(self.live.values())

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def limit(self, environment: type[Environment]) -> int:
        return min(environment.max_sessions, self._max_sessions or environment.max_sessions)

    def breaker(self, environment: type[Environment]) -> Breaker:
        return self._breakers.setdefault(environment.id, Breaker())

    def breaker_states(self) -> dict[str, str]:
        states = {env_id: breaker.state for env_id, breaker in self._breakers.items()}
        return {env_id: state for env_id, state in states.items() if state != "closed"}

    async def acquire(
        self,
        environment: type[Environment],
        count: int,
        timeout_s: float,
        *,
        first: bool = False,
    ) -> None:
        """Take `count` slots, all at once, waiting for them behind those who came before.

        Args:
            timeout_s: the deadline of the whole creation, of which at most half is waited.
            first: go before the others: the caller has just given up a slot of its own.

        Raises:
            EnvError: `invalid_request` if so many never fit, else `at_capacity`.
        """
        limit = self.limit(environment)
        if count > limit:
            raise make_error(
                "invalid_request",
                f"a group of {count} never fits: '{environment.id}' takes {limit} sessions",
            )
        if not self._queue and self._fits(environment, count):
            self._take(environment, count)
            return
        if len(self._queue) >= self._max_waiting and not first:
            raise self._full(environment, f"{len(self._queue)} creations wait")
        waiter = _Waiter(environment, count, asyncio.get_running_loop().create_future())
        self._queue.insert(0 if first else len(self._queue), waiter)
        self._serve()
        wait_s = timeout_s / 2 if first else min(timeout_s / 2, self._max_wait_s)
        try:
            async with asyncio.timeout(wait_s):
                await waiter.granted
        except BaseException as error:
            if waiter in self._queue:
                self._queue.remove(waiter)
                self._serve()  # those behind it may fit now
            elif _was_granted(waiter):  # in the same moment
                self.release(environment, count)
            if isinstance(error, TimeoutError):
                raise self._full(environment, f"none became free in {wait_s:g} s") from None
            raise

    def release(self, environment: type[Environment], count: int = 1) -> None:
        self.live[environment.id] -= count
        self._serve()

    def close(self) -> None:
        """Refuse those who wait."""
        for waiter in self._queue:
            if not waiter.granted.done():
                waiter.granted.set_exception(draining())
        self._queue.clear()

    def creating(
        self, environment: type[Environment], timeout_s: float
    ) -> AbstractAsyncContextManager[None]:
        """Hold one of the environment's `max_creating` places.

        Raises:
            EnvError: `at_capacity`, none became free.
        """
        if environment.max_creating is None:
            return nullcontext()
        return self._place(environment, environment.max_creating, timeout_s)

    @asynccontextmanager
    async def _place(
        self, environment: type[Environment], max_creating: int, timeout_s: float
    ) -> AsyncIterator[None]:
        places = self._creating.get(environment.id)
        if places is None:
            places = asyncio.Semaphore(max_creating)
            self._creating[environment.id] = places
        try:
            async with asyncio.timeout(timeout_s):
                await places.acquire()
        except TimeoutError:
            raise make_error(
                "at_capacity",
                f"'{environment.id}' starts {max_creating} sessions at a time, and "
                f"none was done in {timeout_s:g} s",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        try:
            yield
        finally:
            places.release()

    def _fits(self, environment: type[Environment], count: int) -> bool:
        return self.live.get(
            environment.id, 0
        ) + count <= environment.max_sessions and self._fits_process(count)

    def _fits_process(self, count: int) -> bool:
        return self._max_sessions is None or self.num_live + count <= self._max_sessions

    def _take(self, environment: type[Environment], count: int) -> None:
        self.live[environment.id] = self.live.get(environment.id, 0) + count

    def _serve(self) -> None:
        """Give free slots to those who wait. Nobody overtakes: neither in the queue of an
        environment that is full, nor anybody where the process is full."""
        full: set[str] = set()
        waiting: list[_Waiter] = []
        for position, waiter in enumerate(self._queue):
            if not self._fits_process(waiter.count):
                waiting += self._queue[position:]
                break
            env_id = waiter.environment.id
            if env_id in full or not self._fits(waiter.environment, waiter.count):
                full.add(env_id)
                waiting.append(waiter)
            elif not waiter.granted.done():
                self._take(waiter.environment, waiter.count)
                waiter.granted.set_result(None)
        self._queue = waiting

    def _full(self, environment: type[Environment], why: str) -> EnvError:
        used, limit = self.live.get(environment.id, 0), self.limit(environment)
        return make_error(
            "at_capacity",
            f"{used} of {limit} sessions of '{environment.id}' are in use and {why}; close some, "
            "or raise max_sessions",
            retry_after_s=_RETRY_AFTER_S,
        )


def _was_granted(waiter: _Waiter) -> bool:
    granted = waiter.granted
    return granted.done() and not granted.cancelled() and granted.exception() is None


def draining() -> EnvError:
    return make_error("draining", "the server is shutting down", retry_after_s=5.0)
