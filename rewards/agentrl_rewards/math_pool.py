"""A pool of killable processes that compare two mathematical expressions.

Computer algebra on a policy's text can run forever, exhaust memory or crash, so it never runs in
this process. Each worker is a `math_worker.py` program on the other end of two pipes; its comparing
child is killed at the deadline and replaced. A check that is killed or crashes raises
`GraderError`; it never counts as "not equal".

Each check is first tried for FIRST_TRY_S. If it needs longer, it is queued again with its full
deadline, and such checks occupy at most half the workers. So slow expressions mostly wait for other
slow ones, and delay quick ones by a bounded amount. Both queues serve callers in turn (see
`agentrl.caller`), so one caller's backlog does not hold up the others. Deadlines are measured in
CPU time of the comparing process, so that a busy machine does not change scores. Waiting for a
worker is limited to MAX_WAIT_S.

Workers start on first use, one more whenever all are busy, up to `num_workers`. A pool may be used
from any thread, from asyncio and from forked or spawned processes; a forked child starts its own
workers. POSIX only.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agentrl.caller import caller
from agentrl.errors import GraderError
from agentrl.runtime import kill_group, start_group

WORKER_FILE = Path(__file__).with_name("math_worker.py")
FIRST_TRY_S = 0.25
"""CPU seconds of the first try. Typical comparisons take a tenth of it."""
MAX_WAIT_S = 50.0
"""Longest wait for a worker. Shorter than the 60 s that an environment's step may take."""
MAX_SLOW_WAIT_S = 30.0
"""Longest time from the start of a check to that of its second try, for the same reason."""
INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
"""The only environment variables a worker gets: it handles untrusted text and needs no secrets."""


_Reply = Future[dict[str, object]]


@dataclass(slots=True, frozen=True)
class PoolStatus:
    num_workers: int
    """Maximum number of workers."""
    num_alive: int
    num_busy: int
    num_waiting: int
    """Checks that no worker has taken yet."""
    num_killed: int
    """Workers that died or were killed since the pool was made. A check stopped at its deadline
    does not count: it costs only the worker's child."""
    num_slow: int
    """Checks that needed a second try."""
    num_expired: int
    """Checks that gave up waiting for a worker."""


class MathPool:
    """Up to `num_workers` processes, each of which compares one pair of expressions at a time.

    Args:
        num_workers: None uses half the CPU cores, at least 2 and at most 8.
        memory_bytes: limit on the address space of a comparing process (RLIMIT_AS).
    """

    def __init__(self, num_workers: int | None = None, *, memory_bytes: int = 1 << 30) -> None:
        if num_workers is None:
            num_workers = max(2, min(8, (os.cpu_count() or 2) // 2))
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; a pool needs at least 1")
        self.num_workers = num_workers
        self.memory_bytes = memory_bytes
        self._start_empty()
        _POOLS.add(self)

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Semaphore(self.num_workers)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._lanes = (
            _Lane(self.num_workers, "math-grader"),
            _Lane(max(1, self.num_workers // 2), "math-grader-slow"),
        )

    def check(self, answer: str, reference: str, deadline_s: float = 2.0) -> bool | None:
        """Returns whether math-verify finds the two LaTeX expressions equal.

        Returns None if the answer would cost too much to evaluate. Blocks; may be called from any
        thread.

        Args:
            deadline_s: CPU seconds of the comparing process. Waiting for a worker does not count;
                it is limited to MAX_WAIT_S.

        Raises:
            GraderError: the deadline passed, no worker came free in time, the comparing process
                crashed or ran out of memory, or math-verify is not installed.
            RuntimeError: the pool is closed.
        """
        started = time.monotonic()
        reply = self._submit(answer, reference, min(deadline_s, FIRST_TRY_S), started).result()
        if "late" in reply and deadline_s > FIRST_TRY_S:
            reply = self._submit(answer, reference, deadline_s, started).result()
        return _read_reply(reply, answer)

    async def check_async(
        self, answer: str, reference: str, deadline_s: float = 2.0
    ) -> bool | None:
        """Does the same as `check` without blocking the event loop; raises the same errors.

        If it is cancelled, the worker finishes the comparison before it takes another.
        """
        started = time.monotonic()
        first = self._submit(answer, reference, min(deadline_s, FIRST_TRY_S), started)
        reply = await asyncio.wrap_future(first)
        if "late" in reply and deadline_s > FIRST_TRY_S:
            second = self._submit(answer, reference, deadline_s, started)
            reply = await asyncio.wrap_future(second)
        return _read_reply(reply, answer)

    def _submit(self, answer: str, reference: str, deadline_s: float, started: float) -> _Reply:
        """Queues a try in the fast or the slow lane, depending on its deadline."""
        request = {"answer": answer, "reference": reference, "deadline_s": deadline_s}
        is_slow = deadline_s > FIRST_TRY_S
        end = started + (MAX_SLOW_WAIT_S if is_slow else MAX_WAIT_S)
        with self._lock:
            if self._closed:
                raise RuntimeError("this MathPool is closed; make a new one")
            self._counts["slow"] += is_slow
            self._counts["pending"] += 1
            future = self._lanes[is_slow].submit(lambda: self._try(request, end))
        future.add_done_callback(lambda _: self._count("pending", -1))
        return future

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def _try(self, request: dict[str, object], end: float) -> dict[str, object]:
        """Has a worker answer the request, if one is free before `end`, in monotonic seconds."""
        left_s = end - time.monotonic()
        if left_s <= 0 or not self._free.acquire(timeout=left_s):
            self._count("expired")
            raise GraderError(
                "no math worker came free in time: too many answers are slow to compare; use more "
                "workers, MathPool(num_workers)"
            )
        try:
            worker = self._take()
            try:
                reply = worker.ask(request)
            except BaseException:
                self._discard(worker)
                raise
            self._idle.append(worker)
            return reply
        finally:
            self._free.release()

    def _take(self) -> _Worker:
        """Returns an idle worker that lives, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            self._discard(worker)
        worker = _Worker(self.memory_bytes)
        with self._lock:
            self._workers.add(worker)
            closed = self._closed
        if closed:
            self._discard(worker)
            raise GraderError("the math grader's pool was closed during a check")
        return worker

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._workers.discard(worker)
            self._counts["killed"] += 1

    def status(self) -> PoolStatus:
        with self._lock:
            num_busy = len(self._workers) - len(self._idle)
            return PoolStatus(
                num_workers=self.num_workers,
                num_alive=sum(worker.process.poll() is None for worker in self._workers),
                num_busy=num_busy,
                num_waiting=max(0, self._counts["pending"] - num_busy),
                num_killed=self._counts["killed"],
                num_slow=self._counts["slow"],
                num_expired=self._counts["expired"],
            )

    def close(self) -> None:
        """Kills the workers. Running checks raise GraderError; later ones raise RuntimeError."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for lane in self._lanes:
            lane.close()
        for worker in workers:  # whoever waits for its reply sees it end
            kill_group(worker.process)

    def _forget_after_fork(self) -> None:
        # Inherited pipes would keep the parent's workers alive after the parent has exited.
        for worker in self._workers:
            worker.close_pipes()
        self._start_empty()


class _Lane:
    """A queue with its own threads, which serve the callers in turn, oldest call first."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[_Reply, Callable[[], dict[str, object]]]]]
        self._waiting = OrderedDict()

    def submit(self, call: Callable[[], dict[str, object]]) -> _Reply:
        reply: _Reply = Future()
        with self._lock:
            self._waiting.setdefault(caller.get(), deque()).append((reply, call))
        self._threads.submit(self._run_next)
        return reply

    def _run_next(self) -> None:
        reply, call = self._next()
        if not reply.set_running_or_notify_cancel():
            return
        try:
            reply.set_result(call())
        except BaseException as error:  # re-raised by whoever awaits the future
            reply.set_exception(error)

    def _next(self) -> tuple[_Reply, Callable[[], dict[str, object]]]:
        with self._lock:
            name, calls = self._waiting.popitem(last=False)
            first = calls.popleft()
            if calls:
                self._waiting[name] = calls  # to the back of the queue
        return first

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [reply for calls in self._waiting.values() for reply, _ in calls]
            self._waiting.clear()
        for reply in waiting:
            reply.cancel()


def _read_reply(reply: dict[str, object], answer: str) -> bool | None:
    if "error" in reply:
        raise GraderError(
            f"comparing the answer {answer[:80]!r} with the reference failed: {reply['error']}"
        )
    return cast(bool | None, reply["equal"])


class _Worker:
    """One `math_worker.py` process and its two pipes. The constructor waits until it is ready."""

    def __init__(self, memory_bytes: int) -> None:
        environment = {k: os.environ[k] for k in INHERITED_VARIABLES if k in os.environ}
        # Same import path as here; fixed hashes, so that sympy always orders terms the same way.
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONHASHSEED": "0",
        }
        # A process group of its own: Ctrl-C does not reach it, and its child is killed with it.
        self.process = start_group(
            # -P: otherwise this folder, which contains a module named `math`, is on the path
            [sys.executable, "-P", str(WORKER_FILE), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        try:
            ready = self._read_reply()
        except BaseException:
            self.kill()
            raise
        if "error" in ready:
            self.kill()
            raise GraderError(f"the math grader cannot start: {ready['error']}")

    def ask(self, request: dict[str, object]) -> dict[str, object]:
        """Sends a request and returns the reply.

        Raises:
            GraderError: the worker died, and has to be discarded.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise GraderError("the math grader's worker process died") from error
        return self._read_reply()

    def _read_reply(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise GraderError("the math grader's worker process died")
        return json.loads(line)

    def kill(self) -> None:
        """Kills and reaps the process and its child and closes the pipes. May be called twice."""
        kill_group(self.process)
        self.close_pipes()

    def close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


_POOLS: weakref.WeakSet[MathPool] = weakref.WeakSet()
_default_pool: MathPool | None = None
_default_lock = threading.Lock()


def default_pool() -> MathPool:
    """Returns this process's shared pool, which is made on first use and closed at exit."""
    global _default_pool
    with _default_lock:
        if _default_pool is None:
            _default_pool = MathPool()
        return _default_pool


def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


def _after_fork_in_child() -> None:
    global _default_lock
    _default_lock = threading.Lock()
    for pool in list(_POOLS):
        pool._forget_after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
