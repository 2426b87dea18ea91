"""Ends a run in which a rank hangs or is lost, and reports which rank it was.

A rank that hangs makes all others wait, and none of them can tell why. So in every rank a thread
watches whether the rank's work, and a save in the background, make progress. If some work makes
none for `train.parallel.deadline_s` seconds, its rank raises the alarm: every rank writes its stack
to the log and its position to the launcher's store, the rank that raised the alarm reports which
rank the others wait for, and all of them end. torchrun restarts them (--max-restarts), and the run
continues from its last checkpoint.

A killed rank closes its connections, so the others fail at once in what they do with it. They write
their positions too, and whichever rank is missing is reported (`lost`). A machine that loses its
power closes nothing, and NCCL waits for a lost rank for ever. So every rank increments a counter in
the store once a second and watches that of the next rank; a rank silent for `SILENT_S` ends the
run. If the store itself was on the lost machine, its silence ends the others.
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
"""Seconds that a rank has to write its position; a stopped rank never does."""
SILENT_S = 45.0
"""Seconds of silence after which a rank is lost. No call holds Python's lock for so long."""
LOOK_S = 1.0
"""Seconds between two looks."""
CLOSE_S = 60.0
"""Seconds that a rank has to close everything once a connection broke."""


@dataclass(slots=True, frozen=True)
class Standing:
    """The position of a rank when an alarm is raised."""

    where: str
    """Its machine and process: `host, process 123`."""
    line: str
    """The name of its work, and the innermost line of code."""
    waits: bool
    """It is in a call that waits for other ranks."""


class Watchdog:
    """Watches this rank's work and the next rank's signs of life, in a thread, until `close`."""

    def __init__(self, store: Any, rank: int, size: int, deadline_s: float) -> None:
        """
        Args:
            store: torch's store of this attempt, on a connection that nothing else uses.
            deadline_s: seconds without progress after which the run ends.
        """
        self._store, self._rank, self._size = store, rank, size
        self._deadline_s = deadline_s
        self._works: dict[int, tuple[str, float]] = {}
        """Thread -> its work, and the time of its last progress."""
        self._over = threading.Event()
        self._failed = self._broken = False
        self._next = (rank + 1) % size
        """Rank whose signs of life this one watches."""
        self._last_beat, self._silent_s = -1, 0.0
        self._place = f"{socket.gethostname()}, process {os.getpid()}"
        store.set(f"place/{rank}", self._place)
        self._thread = threading.Thread(target=self._watch, name="agentrl-watchdog", daemon=True)
        self._thread.start()
        # A thread in torch's code while the interpreter shuts down would abort the process.
        atexit.register(self._leave)

    def close(self) -> None:
        """Stops watching."""
        self._over.set()
        self._thread.join(ANSWER_S)

    def _leave(self) -> None:
        # If `close` was not called, this rank ends with its own error and must not be called lost.
        self._failed = not self._over.is_set()
        self.close()
        if self._broken:
            # The threads of a broken group may keep the interpreter from shutting down.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @contextlib.contextmanager
    def working(self, work: str) -> Iterator[None]:
        """Expects this thread to make progress while the block runs."""
        thread = threading.get_ident()
        self._works[thread] = work, time.monotonic()
        try:
            yield
        finally:
            self._works.pop(thread, None)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Lets this rank give no sign of life while the block runs and holds Python's lock."""
        self._store.set(f"closed/{self._rank}", "")
        try:
            yield
        finally:
            self._store.delete_key(f"closed/{self._rank}")

    def moved(self) -> None:
        """Notes that this thread's work made progress."""
        thread = threading.get_ident()
        if thread in self._works:
            self._works[thread] = self._works[thread][0], time.monotonic()

    def _slowest(self) -> tuple[int, str, float] | None:
        """Returns the thread whose last progress is oldest, its work and the time of that progress;
        None if no thread is working."""
        works = [(thread, *each) for thread, each in list(self._works.items())]
        return min(works, key=lambda each: each[2], default=None)

    def broke(self) -> None:
        """Notes that a connection to another rank broke.

        If this rank does not call `closed` within `CLOSE_S`, it writes its stacks and ends.
        """
        self._broken = True
        faulthandler.dump_traceback_later(CLOSE_S, exit=True, file=sys.__stderr__ or sys.stderr)

    def closed(self) -> None:
        """Lifts the limit that `broke` set: everything is closed."""
        faulthandler.cancel_dump_traceback_later()

    def lost(self) -> str | None:
        """Returns a sentence that names the lost ranks, after a connection broke.

        None if another rank reports them, or one of them ended with an error that says why.
        """
        try:
            self._store.set("lost", "")
            self._answer()
            deadline = time.monotonic() + ANSWER_S
            # At least one rank is gone, so once all others have answered there is no need to wait.
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
        """Looks once per `LOOK_S` until `close`; ends the process if the store is silent."""
        silent_s = min(self._deadline_s, SILENT_S)
        while not self._over.wait(min(LOOK_S, self._deadline_s / 4)):
            # A store on a machine without power never answers, so the look gets its own thread.
            look = threading.Thread(target=self._look, daemon=True)
            look.start()
            # Waiting in short parts does not count the time for which this process was stopped.
            for _ in range(math.ceil(silent_s + 2 * ANSWER_S)):
                look.join(1.0)
                if not look.is_alive():
                    break
            if look.is_alive() and not self._over.is_set():
                faulthandler.dump_traceback(all_threads=True)
                _say(
                    f"{self._place}: the launcher's store{_where()} has not answered for "
                    f"{silent_s:g} s: its machine is gone, or stopped. {REMEDY}"
                )
                os._exit(1)
        with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
            self._store.set(f"{'left' if self._failed else 'closed'}/{self._rank}", "")

    def _look(self) -> None:
        """Checks this rank's work, the alarms of others and the next rank's counter."""
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
                failed = self._store.check([f"left/{self._next}"])  # its error said why
                self._store.set("rung", "")
                self._end(None if failed else self._silence)
        except RuntimeError:
            # Without the store nothing can be reported, and torchrun ends this rank.
            self._over.set()

    def _next_is_silent(self) -> bool:
        beat = self._store.add(f"beat/{self._next}", 0)
        if beat != self._last_beat or self._store.check([f"closed/{self._next}"]):
            self._last_beat, self._silent_s = beat, 0.0
        # Counted in looks, because a clock runs on while this rank is stopped.
        self._silent_s += min(LOOK_S, self._deadline_s / 4)
        return self._silent_s > SILENT_S

    def _silence(self, found: Mapping[int, Standing]) -> str:
        silent = sorted({self._next} | set(range(self._size)).difference(found))
        who = ", ".join(f"rank {n} ({self._store.get(f'place/{n}').decode()})" for n in silent)
        return (
            f"{who} of {self._size} gave no sign of life for {SILENT_S:g} s: it was stopped, or "
            f"its machine is gone. The stacks of the others are above. {REMEDY}"
        )

    def _end(self, why: Callable[[Mapping[int, Standing]], str] | None = None) -> None:
        """Writes this rank's stack and position, and ends the process.

        Args:
            why: makes the message from the positions of the ranks that answered; None if another
                rank reports.
        """
        faulthandler.dump_traceback(all_threads=True)
        self._answer()
        time.sleep(ANSWER_S)
        # If several ranks raised the alarm at once, one reports.
        if why is not None and self._store.add("named", 1) == 1:
            _say(why(self._standings()))
        os._exit(1)

    def _answer(self) -> None:
        self._store.set(f"standing/{self._rank}", json.dumps(asdict(self._standing())))

    def _standings(self) -> dict[int, Standing]:
        keys = {rank: f"standing/{rank}" for rank in range(self._size)}
        found = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: Standing(**json.loads(self._store.get(key))) for rank, key in found.items()}

    def _standing(self) -> Standing:
        thread, work, _ = self._slowest() or (0, "", 0.0)
        frame = sys._current_frames().get(thread)
        if frame is None:
            return Standing(self._place, "between two commands of rank 0", True)
        path = frame.f_code.co_filename
        return Standing(
            self._place,
            f"{work}: {path}:{frame.f_lineno} in {frame.f_code.co_name}",
            "torch/distributed" in path,
        )


def verdict(work: str, deadline_s: float, size: int, standings: Mapping[int, Standing]) -> str:
    """Returns a message that names the rank for which the others wait.

    Args:
        work: the work that made no progress.
        standings: positions of the ranks that answered.
    """
    silent = [f"rank {rank}" for rank in range(size) if rank not in standings]
    busy = [
        f"rank {rank} ({each.where}; {each.line})"
        for rank, each in sorted(standings.items())
        if not each.waits
    ]
    if silent:
        reason = (
            f"{', '.join(silent)} of {size} does not answer: it was stopped, or its machine is gone"
        )
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
