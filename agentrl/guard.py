"""Runs one command and cleans up everything it leaves behind, however the command or its parent
ends.

    python guard.py PARENT_PID GRACE_S COMMAND ...

`agentrl.runtime.guarded` starts this file, for a server with the server's own Python, so it uses
only the standard library. It ends the command when its standard input is closed or its parent is
gone: closing the pipe is all that a killed trainer does. It then waits until every process that the
command started has ended, detached ones included, and removes their shared memory.

GRACE_S is the time in seconds between SIGTERM and SIGKILL. Exits with the command's status, or with
0 if it was asked to end the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.2
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = ("/dev/shm/psm_", "/dev/shm/sem.mp-")
"""Prefixes of the names that Python gives shared memory and semaphores. Nothing else is removed."""


def main() -> int:
    parent, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stopped.append(number))
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans of the command become children of this process instead of init's.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # The command dies with this process, even by SIGKILL. One thread: safe after the fork.
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    status = None
    while status is None and not stopped and os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable and not os.read(0, 1024):
            break
        status = _reap().get(child.pid)
    _end_all(child.pid, grace_s)
    if status is None or status == -signal.SIGTERM:
        return 0
    return status if status >= 0 else 128 - status


def _end_all(child_pid: int, grace_s: float) -> None:
    """Asks the command to end, then the processes it left behind, and kills what is left after
    `grace_s`."""
    deadline = time.monotonic() + grace_s
    shared: set[str] = set()
    asked: set[int] = set()
    while processes := _descendants(os.getpid()):
        shared.update(*map(_shared_memory, processes))
        if time.monotonic() > deadline:
            for pid in processes:
                _signal(pid, signal.SIGKILL)
        else:
            # While it lives, the command ends its own children, in its own order.
            for pid in {child_pid} if child_pid in processes else set(processes):
                if pid not in asked:
                    asked.add(pid)
                    _signal(pid, signal.SIGTERM)
        time.sleep(0.05)
        _reap()
    for name in shared:
        Path(name).unlink(missing_ok=True)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> dict[int, int]:
    """Returns process id -> exit status of the children that have ended."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue  # it has ended meanwhile
        # pid (name, which may contain anything) state parent ...
        state, parent = stat.rpartition(")")[2].split()[:2]
        children.setdefault(int(parent), []).append(int(entry))
        if state == "Z":
            zombies.add(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found += [pid for pid in below if pid not in zombies]
    return found


def _shared_memory(pid: int) -> set[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    names = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/dev/shm/" in line}
    return {name for name in names if name.startswith(SHARED_MEMORY)}


if __name__ == "__main__":
    sys.exit(main())
