"""Runs plain `def` methods in daemon threads, because they would block the event loop.

A thread cannot be stopped from outside. A call whose caller gave up is *hung* until it returns: its
thread is replaced, and the number of hung calls is bounded, because a process that collects them
needs a restart, not more threads. The threads are daemons, so that a hung call cannot keep the
process from ending; the executors of the standard library do not combine the two.

At most one thread at a time is being woken. It wakes the next one if more calls wait, so one or two
threads run any number of short calls, while calls that block get a thread each.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, ParamSpec, TypeVar

from agentrl.errors import EnvUnavailable

logger = logging.getLogger("agentrl.env")

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 1024
"""The most calls that run at a time. A session makes one call at a time, so this many sessions can
block at once; a blocked thread takes some 100 KiB."""
MAX_HUNG = 256
"""Number of hung calls at which a process refuses further calls."""
IDLE_S = 30.0
"""Seconds after which an idle thread ends."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], object]
    future: asyncio.Future
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    status: Literal["waiting", "running", "hung", "done"] = "waiting"


@functools.cache
def default_pool() -> WorkerPool:
    """Returns the pool for instances without a session manager, such as those in a test."""
    return WorkerPool()


class WorkerPool:
    """Runs calls of any event loops in at most `max_threads` threads beside those that hang."""

    def __init__(self, max_threads: int = MAX_THREADS, *, max_hung: int = MAX_HUNG) -> None:
        self.max_threads = max_threads
        self.max_hung = max_hung
        self.num_threads = 0
        """Threads that live: busy, idle and hung."""
        self.num_hung = 0
        """Number of running calls without a caller."""
        self._num_idle = 0
        self._waking = False
        """Whether a thread was woken or started and has not looked for a call yet."""
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes one idle thread per item."""
        self._waiting: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait for a thread."""
        return len(self._waiting)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` in a thread and returns its result. Cancelling gives the call up.

        Raises:
            EnvUnavailable: `max_hung` earlier calls still hang.
            RuntimeError: the pool is closed.
        """
        if self.num_hung >= self.max_hung:
            raise EnvUnavailable(
                f"{self.num_hung} calls in this process hang past their deadline; "
                "restart it, and give the environment's blocking calls their own timeouts"
            )
        future = asyncio.get_running_loop().create_future()
        call = _Call(functools.partial(function, *args, **kwargs), future)
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            self._waiting.append(call)
            self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    def close(self) -> None:
        """Ends idle threads now and the others after their call. Cancels waiting calls."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            for _ in range(self._num_idle):
                self._bell.put(None)
        for call in waiting:
            _call_soon(call.future, call.future.cancel)

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            if call.status == "running":
                call.status = "hung"
                self.num_hung += 1
                self._wake()
            elif call in self._waiting:
                self._waiting.remove(call)
                # A loop that ends cancels calls as well, while threads are free.
                if not self._num_idle and self.num_threads - self.num_hung >= self.max_threads:
                    logger.warning(
                        "a call of a `def` method ran out of time before it had a thread: all %d "
                        "are busy; raise --worker-threads, or make the method async",
                        self.max_threads,
                    )

    def _wake(self) -> None:
        """Wakes or starts a thread if a call waits and none is on its way; called with the lock."""
        if self._waking or not self._waiting:
            return
        if self._num_idle:
            self._num_idle -= 1
            self._bell.put(None)
        elif self.num_threads - self.num_hung < self.max_threads:
            threading.Thread(target=self._work, name="agentrl-env-worker", daemon=True).start()
            self.num_threads += 1
        else:
            return
        self._waking = True

    # The following run in the threads.

    def _work(self) -> None:
        while True:
            call = self._next_call(None)
            while call is not None:
                outcome: object = None
                error: BaseException | None = None
                try:
                    outcome = call.context.run(call.function)
                except BaseException as raised:  # raised in the caller, whatever it is
                    error = raised
                    if isinstance(raised, StopIteration):  # a future refuses to hold one
                        error = RuntimeError(f"StopIteration({raised.value!r}) left the call")
                future = call.future
                call = self._next_call(call)
                _call_soon(future, _settle, future, outcome, error)
                del future, outcome, error
            if not self._sleep():
                return

    def _next_call(self, ended: _Call | None) -> _Call | None:
        """Returns the call to run after `ended`, or None if the thread is to sleep."""
        with self._lock:
            if ended is None:
                self._waking = False
            elif ended.status == "hung":
                self.num_hung -= 1
            else:
                ended.status = "done"
            if not self._waiting:
                self._num_idle += 1
                return None
            call = self._waiting.popleft()
            call.status = "running"
            self._wake()
            return call

    def _sleep(self) -> bool:
        """Waits until there are calls (True) or this thread has to end (False)."""
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=IDLE_S)
                if not self._closed:
                    return True
            with self._lock:
                if not self._waking and not self._closed:
                    self._num_idle -= 1
                    break
        with self._lock:
            self.num_threads -= 1
        return False


def _call_soon(future: asyncio.Future, function: Callable[..., object], *args: object) -> None:
    """Calls a function in the event loop of a future, which runs in another thread or is closed."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(function, *args)


def _settle(future: asyncio.Future, outcome: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)
