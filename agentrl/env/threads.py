"""A pool of threads for plain `def` methods, which would block the event loop.

A thread cannot be stopped from outside. So a call whose deadline passes is *abandoned*: its caller
continues at once, the thread is replaced, and it is reused if the call ever returns. The number of
abandoned threads is bounded: beyond it new calls are refused, because a process that collects hung
threads needs a restart, not more threads. The threads are daemons, so that a hung call cannot keep
the process from ending; the pools of common libraries do not combine the two.

Calls wait in one queue, and at most one thread at a time is being woken for them. That thread wakes
the next one if more calls wait. So one or two threads run any number of short calls, while calls
that block get a thread each, up to `max_threads`. Idle threads end after `IDLE_S`. The deadline of
a call is paused while all threads are busy; see `Deadline`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from agentrl.env.protocol import make_error
from agentrl.errors import EnvUnavailable

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 1024
"""The most calls that run at a time. A session makes one call at a time, so this many sessions can
block at once; a blocked thread takes some 100 KiB."""
MAX_ABANDONED = 256
"""Number of hung threads at which a process refuses further calls."""
MAX_WAIT_S = 60.0
"""Seconds that a call waits for a thread before it fails with `at_capacity`."""
IDLE_S = 30.0
"""Seconds after which an idle thread ends."""


class Deadline:
    """Calls `expire` after `timeout_s` seconds.

    It is paused while a call in this task, or in a task started within it, waits because all
    threads of a `WorkerPool` are busy.
    """

    __slots__ = ("_expire", "_left_s", "_num_waiting", "_timer")

    def __init__(self, timeout_s: float, expire: Callable[[], None]) -> None:
        self._expire = expire
        self._num_waiting = 0
        self._left_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._start()
        _deadlines.set((*_deadlines.get(), self))

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._left_s, self._expire)

    def pause(self) -> None:
        self._num_waiting += 1
        if self._num_waiting == 1 and self._timer is not None:
            self._left_s = self._timer.when() - asyncio.get_running_loop().time()
            self._timer.cancel()

    def resume(self) -> None:
        self._num_waiting -= 1
        if self._num_waiting == 0 and self._timer is not None:
            self._start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            # Copies of this context may live on in timers and must not keep `expire` alive.
            self._timer, self._expire = None, _nothing


def _nothing() -> None:
    pass


_deadlines: contextvars.ContextVar[tuple[Deadline, ...]] = contextvars.ContextVar(
    "agentrl_deadlines", default=()
)
"""The deadlines that apply to the running code."""


@contextlib.asynccontextmanager
async def call_timeout(timeout_s: float) -> AsyncIterator[None]:
    """Works like `asyncio.timeout`, but pauses as a `Deadline` does."""
    loop, before = asyncio.get_running_loop(), _deadlines.get()
    async with asyncio.timeout(None) as timeout:
        deadline = Deadline(timeout_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield
        finally:
            deadline.cancel()
            _deadlines.set(before)


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], object]
    future: asyncio.Future
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    status: Literal["waiting", "running", "abandoned", "done"] = "waiting"
    """`waiting`: for a thread."""
    since: float = field(default_factory=time.monotonic)
    timer: asyncio.TimerHandle | None = None
    """Ends the wait if all threads stay busy."""
    paused: tuple[Deadline, ...] = ()
    """The deadlines that are paused while it waits."""

    def resume(self) -> None:
        paused, self.paused = self.paused, ()
        for deadline in paused:
            deadline.resume()


_Bell: TypeAlias = "queue.SimpleQueue[bool]"
"""Wakes a thread to run calls (True), or ends it (False)."""


@functools.cache
def default_pool() -> WorkerPool:
    """Returns the pool for instances without a session manager, such as those in a test."""
    return WorkerPool()


class WorkerPool:
    """Runs calls in at most `max_threads` threads, plus at most `max_abandoned` that hang.

    Several event loops may share a pool.
    """

    def __init__(
        self,
        max_threads: int = MAX_THREADS,
        *,
        max_abandoned: int = MAX_ABANDONED,
        max_wait_s: float = MAX_WAIT_S,
        on_wait: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """
        Args:
            max_wait_s: seconds that a call waits for a thread before it fails.
            on_wait: called with the seconds that each call waited for its thread.
        """
        self.max_threads = max_threads
        self.max_abandoned = max_abandoned
        self.max_wait_s = max_wait_s
        self.num_threads = 0
        """Threads that live: busy, idle and abandoned."""
        self.num_abandoned = 0
        """Number of threads whose call has no caller any more."""
        self._on_wait = on_wait
        self._num_running = 0
        """Number of calls that run, without abandoned ones."""
        self._waking = False
        """Whether a thread was woken or started and has not looked for a call yet."""
        self._idle: list[_Bell] = []
        """The last to become idle is used first, so that superfluous threads reach `IDLE_S`."""
        self._waiting: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait for a thread."""
        return len(self._waiting)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` in a thread and returns its result. Cancelling abandons the call.

        Raises:
            EnvError: `at_capacity` (retryable): no thread became free within `max_wait_s`.
            EnvUnavailable: `max_abandoned` earlier calls still hang.
            RuntimeError: the pool is closed.
        """
        loop = asyncio.get_running_loop()
        call = _Call(functools.partial(function, *args, **kwargs), loop.create_future())
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            if self.num_abandoned >= self.max_abandoned:
                raise EnvUnavailable(
                    f"{self.num_abandoned} calls in this process hang past their deadline; "
                    "restart it, and give the environment's blocking calls their own timeouts"
                )
            if self._num_running + len(self._waiting) >= self.max_threads:
                call.timer = loop.call_later(self.max_wait_s, self._refuse, call)
                call.paused = _deadlines.get()
                for deadline in call.paused:
                    deadline.pause()
            self._waiting.append(call)
            self._wake()
        try:
            return await call.future
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        finally:
            call.resume()
            if call.timer is not None:
                call.timer.cancel()

    def close(self) -> None:
        """Ends idle threads now and the others after their call. Cancels waiting calls."""
        with self._lock:
            self._closed = True
            while self._waiting:
                call = self._take("done")
                _call_soon(call.future, call.future.cancel)
            for bell in self._idle:
                bell.put(False)
            self.num_threads -= len(self._idle)
            self._idle.clear()

    def _refuse(self, call: _Call) -> None:
        """Fails a call that got no thread in time."""
        with self._lock:
            if call.status != "waiting":
                return
            self._waiting.remove(call)
            self._count_wait(call, "done")
        message = (
            f"no thread became free for a `def` method within {self.max_wait_s:g} s: all "
            f"{self.max_threads} are busy; raise worker_threads, or make the method async"
        )
        _settle(call.future, None, make_error("at_capacity", message))

    def _abandon(self, call: _Call) -> None:
        with self._lock:
            if call.status == "waiting":
                self._waiting.remove(call)
                self._count_wait(call, "done")
            elif call.status == "running":
                call.status = "abandoned"
                self._num_running -= 1
                self.num_abandoned += 1
                self._wake()

    # The following are called with the lock held.

    def _wake(self) -> None:
        """Wakes or starts a thread if a call waits and no thread is being woken already."""
        if self._waking or not self._waiting:
            return
        if self._idle:
            self._idle.pop().put(True)
        elif self.num_threads - self.num_abandoned < self.max_threads:
            threading.Thread(target=self._work, name="agentrl-env-worker", daemon=True).start()
            self.num_threads += 1
        else:
            return
        self._waking = True

    def _take(self, status: Literal["running", "done"]) -> _Call:
        call = self._waiting.popleft()
        self._count_wait(call, status)
        if call.paused:
            _call_soon(call.future, call.resume)
        return call

    def _count_wait(self, call: _Call, status: Literal["running", "done"]) -> None:
        call.status = status
        self._on_wait(time.monotonic() - call.since)

    # The following run in the threads.

    def _work(self) -> None:
        bell: _Bell = queue.SimpleQueue()
        bell.put(True)
        while self._is_woken(bell):
            call = self._next_call(bell)
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
                call = self._next_call(bell, call)
                _call_soon(future, _settle, future, outcome, error)
                del future, outcome, error

    def _is_woken(self, bell: _Bell) -> bool:
        """Sleeps until there are calls (True) or this thread has to end (False)."""
        with contextlib.suppress(queue.Empty):
            return bell.get(timeout=IDLE_S)
        with self._lock:
            if bell in self._idle:
                self._idle.remove(bell)
                self.num_threads -= 1
                return False
        return bell.get()  # it was woken just before it would have ended

    def _next_call(self, bell: _Bell, ended: _Call | None = None) -> _Call | None:
        """Returns the call to run after `ended`, or None if the thread has to sleep or end."""
        with self._lock:
            if ended is None:
                self._waking = False
            elif ended.status == "abandoned":
                self.num_abandoned -= 1
            else:
                ended.status = "done"
                self._num_running -= 1
            # Also ends a thread that was replaced while its call hung.
            if self._closed or self.num_threads - self.num_abandoned > self.max_threads:
                self.num_threads -= 1
                bell.put(False)
            elif self._waiting:
                self._num_running += 1
                call = self._take("running")
                self._wake()
                return call
            else:
                self._idle.append(bell)
        return None


def _call_soon(future: asyncio.Future, function: Callable[..., object], *args: object) -> None:
    """Calls a function in the event loop of a future, unless that loop is closed.

    The loop runs in another thread.
    """
    with contextlib.suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(function, *args)


def _settle(future: asyncio.Future, outcome: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)
