"""A pool of killable processes that compare two mathematical expressions.

Computer algebra on a policy's text can run forever, exhaust memory or crash, so it never runs in
this process, but in children of one `math_worker.py` program, which are killed at the deadline and
replaced. A check that is killed or crashes raises `GraderError`; it never counts as "not equal".

Each check is first tried for FIRST_TRY_S. If it needs longer, it is queued again with its full
deadline, and such checks occupy at most half the children. So slow expressions mostly wait for
other slow ones, and delay quick ones by a bounded amount. Both queues serve callers in turn (see
`agentrl.caller`), so one caller's backlog does not hold up the others. Deadlines are measured in
CPU time of the comparing process, so that a busy machine does not change scores. A check that has
waited too long for its turn fails.

The program starts on first use. A pool may be used from any thread, from asyncio and from forked or
spawned processes; a forked child starts its own program. POSIX only.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.caller import caller
from agentrl.errors import GraderError
from agentrl.runtime import kill_group, start_group

WORKER_FILE = Path(__file__).with_name("math_worker.py")
FIRST_TRY_S = 0.25
"""CPU seconds of the first try. Typical comparisons take a tenth of it."""
MAX_WAIT_S = {"quick": 50.0, "slow": 30.0}
"""Longest time from the start of a check to that of its first and of its second try. Shorter than
the 60 s that an environment's step may take."""
INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
"""The only environment variables the program gets: it handles untrusted text and needs no
secrets."""
AHEAD = 2
"""Quick checks per child that the program may have: one that it compares, and the next one, so that
the child need not wait for this process."""


@dataclass(slots=True, eq=False)
class _Check:
    answer: str
    reference: str
    deadline_s: float
    caller: str
    queue: str = "quick"
    process: subprocess.Popen[bytes] | None = None
    """The program that has it."""
    started: float = field(default_factory=time.monotonic)
    result: Future[bool | None] = field(default_factory=Future)


class MathPool:
    """Compares up to `num_workers` pairs of expressions at a time, each in a process of its own.

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
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[str, OrderedDict[str, deque[_Check]]]
        self._waiting = {"slow": OrderedDict(), "quick": OrderedDict()}
        """Queue -> caller, the next one first -> its checks."""
        self._running: dict[int, _Check] = {}
        self._numbers = itertools.count()
        self._closed = False

    def check(self, answer: str, reference: str, deadline_s: float = 2.0) -> bool | None:
        """Returns whether math-verify finds the two LaTeX expressions equal.

        Returns None if the answer would cost too much to evaluate. Blocks; may be called from any
        thread.

        Args:
            deadline_s: CPU seconds of the comparing process. Waiting does not count; it is limited
                to MAX_WAIT_S.

        Raises:
            GraderError: the deadline passed, the check waited too long, the comparing process
                crashed or ran out of memory, or math-verify is not installed.
            RuntimeError: the pool is closed.
        """
        return self._submit(answer, reference, deadline_s).result()

    async def check_async(
        self, answer: str, reference: str, deadline_s: float = 2.0
    ) -> bool | None:
        """Does the same as `check` without blocking the event loop; raises the same errors.

        If it is cancelled, a comparison that runs is finished before its place is free again.
        """
        return await asyncio.wrap_future(self._submit(answer, reference, deadline_s))

    def _submit(self, answer: str, reference: str, deadline_s: float) -> Future[bool | None]:
        check = _Check(answer, reference, deadline_s, caller.get())
        with self._lock:
            if self._closed:
                raise RuntimeError("this MathPool is closed; make a new one")
            self._put(check)
        return check.result

    def _put(self, check: _Check) -> None:
        self._waiting[check.queue].setdefault(check.caller, deque()).append(check)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Starts checks while there are free places, slow ones first, which have fewer."""
        places = {"slow": max(1, self.num_workers // 2), "quick": AHEAD * self.num_workers}
        for queue, callers in self._waiting.items():
            while callers:
                if sum(check.queue == queue for check in self._running.values()) == places[queue]:
                    break
                name, checks = callers.popitem(last=False)
                check = checks.popleft()
                if checks:
                    callers[name] = checks  # behind the other callers
                if check.queue == "quick" and not check.result.set_running_or_notify_cancel():
                    continue
                if time.monotonic() - check.started > MAX_WAIT_S[queue]:
                    message = "too many answers are slow to compare; use more workers"
                    check.result.set_exception(
                        GraderError(f"{message}, MathPool(num_workers); this one found no place")
                    )
                else:
                    self._start(check)

    def _start(self, check: _Check) -> None:
        """Sends a check to the program, which begins it as soon as a child is free."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start_program(self.num_workers, self.memory_bytes)
            # daemon: it ends with the program, which is killed at exit
            threading.Thread(target=self._read_replies, args=[self._process], daemon=True).start()
        first_try_s = FIRST_TRY_S if check.queue == "quick" else check.deadline_s
        number, check.process = next(self._numbers), self._process
        self._running[number] = check
        request = {
            "id": number,
            "answer": check.answer,
            "reference": check.reference,
            "deadline_s": min(check.deadline_s, first_try_s),
        }
        assert self._process.stdin is not None
        with suppress(OSError):  # it died; `_read_replies` says so
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def _read_replies(self, process: subprocess.Popen[bytes]) -> None:
        """Reads a program's replies until it ends, and then fails the checks that it still had."""
        reason = "the math grader's process died"
        assert process.stdout is not None
        for line in process.stdout:
            reply = json.loads(line)
            if "id" not in reply:
                reason = f"the math grader cannot start: {reply['error']}"
                continue
            with self._lock:
                self._finish(self._running.pop(reply["id"]), reply)
                self._start_waiting()
        process.wait()
        with self._lock:
            lost = [number for number, each in self._running.items() if each.process is process]
            for number in lost:
                self._running.pop(number).result.set_exception(GraderError(reason))
            self._start_waiting()

    def _finish(self, check: _Check, reply: dict[str, Any]) -> None:
        if "late" in reply and check.queue == "quick" and check.deadline_s > FIRST_TRY_S:
            check.queue = "slow"
            self._put(check)
        elif "error" in reply:
            check.result.set_exception(
                GraderError(
                    f"comparing the answer {check.answer[:80]!r} with the reference failed: "
                    f"{reply['error']}"
                )
            )
        else:
            check.result.set_result(reply["equal"])

    def close(self) -> None:
        """Kills the processes. Running checks raise GraderError; later ones raise RuntimeError."""
        with self._lock:
            self._closed = True
            queues = self._waiting.values()
            waiting = [check for queue in queues for checks in queue.values() for check in checks]
            for queue in queues:
                queue.clear()
        for check in waiting:
            if not check.result.cancel():
                check.result.set_exception(GraderError("the math grader's pool was closed"))
        if self._process is not None:
            kill_group(self._process)

    def _forget_after_fork(self) -> None:
        # Inherited pipes would keep the parent's program alive after the parent has exited.
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._start_empty()


def _start_program(num_children: int, memory_bytes: int) -> subprocess.Popen[bytes]:
    environment = {k: os.environ[k] for k in INHERITED_VARIABLES if k in os.environ}
    # Same import path as here; fixed hashes, so that sympy always orders terms the same way.
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
    # A process group of its own: Ctrl-C does not reach it, and its children are killed with it.
    return start_group(
        # -P: otherwise this folder, which contains a module named `math`, is on the path
        [sys.executable, "-P", str(WORKER_FILE), str(num_children), str(memory_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        bufsize=0,
    )


_POOLS: weakref.WeakSet[MathPool] = weakref.WeakSet()
_DEFAULT = MathPool()  # made here: two threads' first checks would make two


def default_pool() -> MathPool:
    """Returns this process's shared pool, which starts nothing before its first check."""
    return _DEFAULT


def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


def _after_fork_in_child() -> None:
    for pool in list(_POOLS):
        pool._forget_after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
