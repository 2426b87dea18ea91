"""Starts processes that certainly end, together with every process that they started.

`start_group` starts a command at the head of a session and process group of its own, and
`kill_group` ends all of that group. A process that can only be forked, not started as a command,
calls `die_with_parent` in the child. The module needs only the standard library.

A process that leaves the group for a session of its own is out of reach. Where that matters, the
command runs in a PID namespace, in a container, or below `agentrl/inference/guard.py`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1


def start_group(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a command as the leader of its own session.

    A Ctrl-C in the terminal does not reach it. It ends when `kill_group` is called, and a command
    that reads its standard input until the end also ends with this process, which closes the pipe.

    Args:
        options: as for `subprocess.Popen`.

    Raises:
        OSError: the command cannot be run.
    """
    return subprocess.Popen(command, start_new_session=True, **options)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kills a process from `start_group` and all others of its group, and waits until it has ended.

    Does nothing to a process that was waited for: its id may belong to another one by now.
    """
    if process.returncode is None:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def signal_group(leader_pid: int, number: int) -> None:
    """Sends a signal to a process and all others of its group; ignores processes that have ended.

    Only before the leader is waited for: from then on its id may be given to another process.
    """
    with suppress(ProcessLookupError):
        os.killpg(leader_pid, number)


def how_ended(status: int) -> str:
    """Describes how a process ended, from a status of `subprocess` or
    `os.waitstatus_to_exitcode`."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:
        return f"died of signal {-status}"


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent ends. Linux only.

    Call it in a child right after the fork. The kernel watches the thread that forked: the child of
    a thread that ends is killed even if that thread's process goes on.

    Args:
        parent_pid: `os.getpid()` of the parent, read before the fork.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the kernel watched it
        os._exit(1)
