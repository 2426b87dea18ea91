"""A rank that hangs holds up all others, and none of them can say so: each only waits.

So a thread beside the work of every rank, and beside a save in the background, looks whether it
moves. Where it has not for `train.parallel.deadline_s`, that rank rings; every rank writes its
stack to the log and where it stands to the launcher's store; the one that rang says which rank the
others wait for, and all end. torchrun starts them again under --max-restarts, and the run goes on
from its last checkpoint.

A rank that is killed closes its connections, so that what the others do with it fails at once. They
answer then as well, and the one that is missing is named (`lost`). A machine that lost its power
closes nothing, and NCCL waits for a rank whatever became of it. So every rank counts on in the
store, once a second, and looks whether the next one does: one that is silent for `SILENT_S` ends
the run. Where the store was on the lost machine, that the store is silent ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

REMEDY = "Continue with --resume, or start with torchrun --max-restarts"
ANSWER_S = 5.0
"""The time that a rank has to say where it stands; a stopped one never does."""
SILENT_S = 45.0
"""A rank that gives no sign of life for so long is lost. No call keeps Python's lock so long."""
LOOK_S = 1.0
"""Between two looks."""
CLOSE_S = 60.0
"""The time that a rank has to close what it opened, once a connection broke."""


@dataclass(slots=True, frozen=True)
class Standing:
    """The place at which a rank is when another rings."""

    where: str
    """`host, process 123`"""
    line: str
    """The innermost line of its work, and what it was at."""
    waits: bool
    """It is in a call that waits for other ranks."""


class Watchdog:
    def __init__(self, store: Any, rank: int, size: int, deadline_s: float) -> None:
        """
        Args:
            store: of torch, of this attempt; a connection of its own.
        """
        self._store, self._rank, self._size = store, rank, size
        self._deadline_s = deadline_s
        self._works: dict[int, tuple[str, float]] = {}
        """The work of each thread, and when it moved last."""
        self._over = threading.Event()
        self._failed = self._broken = False
        self._next = (rank + 1) % size
        """The rank whose signs of life this one watches."""
        self._last_beat, self._silent_s = -1, 0.0
        self._place = f"{socket.gethostname()}, process {os.getpid()}"
        store.set(f"place/{rank}", self._place)
        self._thread = threading.Thread(target=self._watch, name="agentrl-watchdog", daemon=True)
        self._thread.start()
        # A thread that is in torch's code while the interpreter is taken down aborts the process.
        atexit.register(self._leave)

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join(ANSWER_S)

    def _leave(self) -> None:
        # Not closed before: this rank ends with an error of its own, and is not to be called lost.
        self._failed = not self._over.is_set()
        self.close()
        if self._broken:
            # Torch's threads, in a group that broke, may hang the taking down of the interpreter.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @contextlib.contextmanager
    def working(self, work: str) -> Iterator[None]:
        """Expect this thread to move while the block runs, which other ranks may wait for."""
        thread = threading.get_ident()
        self._works[thread] = work, time.monotonic()
        try:
            yield
        finally:
            self._works.pop(thread, None)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Let this rank give no sign of life while the block runs, which keeps Python's lock."""
        self._store.set(f"closed/{self._rank}", "")
        try:
            yield
        finally:
            self._store.delete_key(f"closed/{self._rank}")

    def moved(self) -> None:
        thread = threading.get_ident()
        if thread in self._works:
            self._works[thread] = self._works[thread][0], time.monotonic()

    def _slowest(self) -> tuple[int, str, float] | None:
        """Returns the thread that has not moved for longest, its work, and when it moved; None if
        all rest."""
        works = [(thread, *each) for thread, each in list(self._works.items())]
        return min(works, key=lambda each: each[2], default=None)

    def broke(self) -> None:
        """Note that a connection to another rank broke. If this rank has not closed what it opened
        within `CLOSE_S`, it writes its stacks and ends."""
        self._broken = True
        faulthandler.dump_traceback_later(CLOSE_S, exit=True, file=sys.__stderr__ or sys.stderr)

    def closed(self) -> None:
        """Lift the limit that `broke` set: all is closed, and what comes next may take longer."""
        faulthandler.cancel_dump_traceback_later()

    def lost(self) -> str | None:
        """Says which ranks are gone, in a sentence, after a connection to another rank broke.

        None: another rank says it, or one of them ended with an error that said why.
        """
        try:
            self._store.set("lost", "")
            self._answer()
            deadline = time.monotonic() + ANSWER_S
            # One at least is gone, so there is nothing to wait for when all others have answered.
            while len(self._standings()) < self._size - 1 and time.monotonic() < deadline:
                time.sleep(0.1)
            gone = [rank for rank in range(self._size) if rank not in self._standings()]
            if any(self._store.check([f"left/{rank}"]) for rank in gone):
                return None
            if self._rank > 0 and (0 not in gone or self._store.add("named", 1) > 1):
                return None
            who = ", ".join(
                f"rank {rank} ({self._store.get(f'place/{rank}').decode()})" for rank in gone
            )
        except RuntimeError:
            return f"the launcher's store{_where()} is gone, and with it a machine"
        if not gone:
            return "a connection broke between ranks that all answer"
        return f"{who} of {self._size} is gone: killed, or its machine lost"

    def _watch(self) -> None:
        silent_s = min(self._deadline_s, SILENT_S)
        while not self._over.wait(min(LOOK_S, self._deadline_s / 4)):
            # The store of a machine that lost its power does not refuse, it never answers.
            look = threading.Thread(target=self._look, daemon=True)
            look.start()
            # In parts, so that it does not count for how long all of them were stopped together.
            for _ in range(math.ceil(silent_s + 2 * ANSWER_S)):
                look.join(1.0)
                if not look.is_alive():
                    break
            if look.is_alive() and not self._over.is_set():
                faulthandler.dump_traceback(all_threads=True)
                _say(
                    f"{self._place}: the launcher's store{_where()} does not answer for "
                    f"{silent_s:g} s: its machine is gone, or stopped. {REMEDY}"
                )
                os._exit(1)
        with contextlib.suppress(RuntimeError):  # rank 0, and the store with it, may be gone first
            self._store.set(f"{'left' if self._failed else 'closed'}/{self._rank}", "")

    def _look(self) -> None:
        try:
            slowest = self._slowest()
            if slowest is not None and time.monotonic() - slowest[2] > self._deadline_s:
                self._store.set("rung", slowest[1])
                self._end(lambda found: verdict(slowest[1], self._deadline_s, self._size, found))
            if self._store.check(["rung"]):
                self._end()
            if self._store.check(["lost"]):
                self._answer()
            self._store.add(f"beat/{self._rank}", 1)
            if self._next_is_silent():
                failed = self._store.check([f"left/{self._next}"])  # with an error that said why
                self._store.set("rung", "")
                self._end(None if failed else self._silence)
        except RuntimeError:
            # Without the launcher's store there is nobody to tell, and torchrun ends this rank.
            self._over.set()

    def _next_is_silent(self) -> bool:
        beat = self._store.add(f"beat/{self._next}", 0)
        if beat != self._last_beat or self._store.check([f"closed/{self._next}"]):
            self._last_beat, self._silent_s = beat, 0.0
        # By looks, not by a clock: it goes on while all ranks are stopped.
        self._silent_s += min(LOOK_S, self._deadline_s / 4)
        return self._silent_s > SILENT_S

    def _silence(self, found: Mapping[int, Standing]) -> str:
        silent = sorted({self._next} | set(range(self._size)).difference(found))
        who = ", ".join(f"rank {n} ({self._store.get(f'place/{n}').decode()})" for n in silent)
        return (
            f"{who} of {self._size} gave no sign of life for {SILENT_S:g} s: stopped, or its "
            f"machine is gone. The stacks of the others are above. {REMEDY}"
        )

    def _end(self, why: Callable[[Mapping[int, Standing]], str] | None = None) -> None:
        """
        Args:
            why: what this rank says, from what the others answer; None: another one says it.
        """
        faulthandler.dump_traceback(all_threads=True)
        self._answer()
        time.sleep(ANSWER_S)
        # Of several that rang at once, one says so.
        if why is not None and self._store.add("named", 1) == 1:
            _say(why(self._standings()))
        os._exit(1)

    def _answer(self) -> None:
        self._store.set(f"standing/{self._rank}", json.dumps(asdict(self._standing())))

    def _standings(self) -> dict[int, Standing]:
        """Returns the standings of the ranks that have answered."""
        keys = {rank: f"standing/{rank}" for rank in range(self._size)}
        found = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: Standing(**json.loads(self._store.get(key))) for rank, key in found.items()}

    def _standing(self) -> Standing:
        thread, work, _ = self._slowest() or (0, "", 0.0)
        frame = sys._current_frames().get(thread)
        if frame is None:
            return Standing(self._place, "between two words of rank 0", True)
        path = frame.f_code.co_filename
        return Standing(
            self._place,
            f"{work}: {path}:{frame.f_lineno} in {frame.f_code.co_name}",
            "torch/distributed" in path,
        )


def verdict(work: str, deadline_s: float, size: int, standings: Mapping[int, Standing]) -> str:
    """The message: which rank the others wait for.

    Args:
        standings: of the ranks that answered.
    """
    silent = [f"rank {rank}" for rank in range(size) if rank not in standings]
    busy = [
        f"rank {rank} ({each.where}; {each.line})"
        for rank, each in sorted(standings.items())
        if not each.waits
    ]
    if silent:
        reason = f"{', '.join(silent)} of {size} does not answer: stopped, or its machine is gone"
    elif busy:
        reason = f"the others wait for {', '.join(busy)}"
    else:
        reason = "all ranks wait for each other"
    return (
        f"nothing moved for {deadline_s:g} s during {work} (train.parallel.deadline_s); {reason}. "
        f"The stacks of all that answered are above. {REMEDY}"
    )


def _say(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def _where() -> str:
    address = os.environ.get("MASTER_ADDR")
    return f" on {address}" if address else ""
