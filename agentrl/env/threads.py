"""A bounded pool of threads for plain `def` methods, with deadlines by abandonment.

The event loop must never wait for an author's blocking code, and a thread cannot be stopped from
outside. So a call whose deadline passes is *abandoned*: its caller goes on at once, the thread is
written off and replaced, and if the code ever returns, the thread is taken back or ended. The
number of abandoned threads is bounded too; beyond it new calls are refused, because a process that
collects hung threads needs a restart, not more threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from agentrl.errors import EnvUnavailable

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], object]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    running: bool = False
    abandoned: bool = False


@functools.cache
def default_pool() -> WorkerPool:
    """The pool of instances that no session manager runs, such as those in an author's test."""
    return WorkerPool()


class WorkerPool:
    """At most `max_threads` threads that are of use, started on demand, and `max_abandoned` lost.

    One pool serves any number of event loops. Threads are daemons, so a hung one never keeps the
    process from ending.
    """

    def __init__(self, max_threads: int = 32, *, max_abandoned: int | None = None) -> None:
        """
        Args:
            max_abandoned: by default four times `max_threads`. A hung thread costs some 100 KiB,
                so there is room for many, and the process can say that it is not ready long
                before it refuses a call.
        """
        self.max_threads = max_threads
        self.max_abandoned = 4 * max_threads if max_abandoned is None else max_abandoned
        self.num_abandoned = 0
        """Threads that still run a call nobody waits for."""
        self._num_threads = 0
        self._num_idle = 0
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a thread and wait for it. Cancelling the wait abandons the call.

        Raises:
            EnvUnavailable: `max_abandoned` earlier calls still hang.
        """
        loop = asyncio.get_running_loop()
        job = _Job(lambda: function(*args, **kwargs), loop, loop.create_future())
        with self._changed:
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            if self.num_abandoned >= self.max_abandoned:
                raise EnvUnavailable(
                    f"{self.num_abandoned} calls of this process hang past their deadline; "
                    "restart it, and give the environment's blocking calls their own timeouts"
                )
            self._jobs.append(job)
            if self._num_idle < len(self._jobs) and self._num_useful < self.max_threads:
                self._num_threads += 1
                threading.Thread(target=self._work, name="agentrl-env-worker", daemon=True).start()
            else:
                self._changed.notify()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def close(self) -> None:
        """End idle threads now and the others after their call; queued calls are dropped."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()

    @property
    def _num_useful(self) -> int:
        return self._num_threads - self.num_abandoned

    def _abandon(self, job: _Job) -> None:
        with self._changed:
            if job.running:
                job.abandoned = True
                self.num_abandoned += 1
                if self._jobs and self._num_idle == 0:
                    self._num_threads += 1
                    threading.Thread(
                        target=self._work, name="agentrl-env-worker", daemon=True
                    ).start()
            elif job in self._jobs:
                self._jobs.remove(job)

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            outcome: object = None
            error: BaseException | None = None
            try:
                outcome = job.context.run(job.call)
            except BaseException as raised:  # carried to the caller, whatever it is
                error = raised
                if isinstance(raised, StopIteration):  # a future refuses to hold one
                    error = RuntimeError(f"StopIteration({raised.value!r}) left the call")
            with self._changed:
                job.running = False
                if job.abandoned:
                    self.num_abandoned -= 1
            if not job.loop.is_closed():
                with contextlib.suppress(RuntimeError):  # the loop closed in between
                    job.loop.call_soon_threadsafe(_settle, job.future, outcome, error)
            del job, outcome, error

    def _next_job(self) -> _Job | None:
        """Wait for a job; None ends the thread."""
        with self._changed:
            self._num_idle += 1
            try:
                while not self._jobs:
                    if self._closed or self._num_useful > self.max_threads:
                        self._num_threads -= 1
                        return None
                    self._changed.wait()
                if self._num_useful > self.max_threads:
                    self._num_threads -= 1
                    return None
                job = self._jobs.popleft()
                job.running = True
                return job
            finally:
                self._num_idle -= 1


def _settle(future: asyncio.Future, outcome: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)
