"""Runs coroutines, retries calls, starts processes that certainly end, parses Python, writes files.

The event loop of runs and servers is uvloop's, where there is one. `start_group` starts a command
at the head of a session and process group of its own, and `kill_group` ends all of that group. A
process that can only be forked, not started as a command, calls `die_with_parent` in the child. A
process that leaves the group for a session of its own is out of reach: where that matters, the
command runs in a PID namespace, in a container, or below the guard (`guarded`, `run_guarded`).
"""

from __future__ import annotations

import ast
import asyncio
import ctypes
import gc
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_GUARD = str(Path(__file__).with_name("guard.py"))
MAX_ATTEMPTS = 10
_one_at_a_time = threading.Lock()
_stops: list[Callable[[], object]] = []
"""Functions that a KeyboardInterrupt calls in a thread that waits for a loop in another."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Lets the garbage collector look at young objects less often.

    Hundreds of concurrent episodes are tens of thousands of objects, none of them garbage. With
    Python's own threshold of 700, the repeated collections take a quarter of a rollout's time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 10, 4)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine like `asyncio.run`, on uvloop's loop if installed; in a thread if a loop is
    already running, as in a notebook.

    A first KeyboardInterrupt asks the work to stop, if it can be asked (`stopped_by`), and its
    result is returned; a second one cancels it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with _rare_collections(), asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(coroutine)
    loop = new_event_loop()
    work = loop.create_task(coroutine)
    with (
        _rare_collections(),
        ThreadPoolExecutor(1, thread_name_prefix="agentrl-loop") as thread,
    ):
        done = thread.submit(_run_in_thread, loop, work)
        while True:
            try:
                return done.result()
            except KeyboardInterrupt:
                if not _stops:
                    with suppress(RuntimeError):  # the loop is closed, its work done
                        loop.call_soon_threadsafe(work.cancel)
                    raise
                _stops.pop()()


def _run_in_thread(loop: asyncio.AbstractEventLoop, work: asyncio.Task[T]) -> T:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.get_loop().run_until_complete(work)


@contextmanager
def stopped_by(stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` on a first KeyboardInterrupt in the waiting thread, while in the context."""
    _stops.append(stop)
    try:
        yield
    finally:
        if stop in _stops:
            _stops.remove(stop)


async def retry(
    attempt: Callable[[float], Awaitable[T]],
    *,
    timeout_s: float = math.inf,
    retry_after_s: Callable[[Exception], float | None],
    first_pause_s: float = 0.05,
    max_pause_s: float = 2.0,
    max_attempts: int | None = None,
) -> T:
    """Calls `attempt` until it succeeds, its error is final, there were `max_attempts`, or the next
    pause would pass the deadline; then raises the last error.

    Args:
        attempt: called with the seconds that are left.
        retry_after_s: the least pause in seconds that an error asks for; None: it is final.
        first_pause_s: pauses double from this one up to `max_pause_s`, each within 25% of that.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    pause_s = first_pause_s
    num_attempts = 0
    while True:
        num_attempts += 1
        try:
            return await attempt(deadline - clock())
        except Exception as error:
            asked_s = retry_after_s(error)
            if asked_s is None or num_attempts == max_attempts:
                raise
            # Never less than was asked for.
            wait_s = max(asked_s * random.uniform(1.0, 1.25), pause_s * random.uniform(0.75, 1.25))
            if clock() + wait_s >= deadline:
                raise
        await asyncio.sleep(wait_s)
        pause_s = min(2 * pause_s, max_pause_s)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that a kill, or a full disk, leaves either the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


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


def guarded(command: Sequence[str], grace_s: float, python: str = sys.executable) -> list[str]:
    """Returns a command that runs another one and ends every process that it started, detached or
    not, when it ends, when this process ends, or when its standard input, a pipe, is closed.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
        python: path of the Python that runs the guard.
    """
    # -I: the folder of the guard has modules whose names hide Python's own.
    return [python, "-I", _GUARD, str(os.getpid()), str(grace_s), *command]


async def run_guarded(
    command: Sequence[str],
    *,
    grace_s: float,
    timeout_s: float | None = None,
    max_bytes: int = 1 << 20,
    **options: Any,
) -> tuple[int | None, bytes, bytes]:
    """Runs a command below the guard until it ends, without input.

    When this returns or is cancelled, every process that the command started has ended.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL where the command has to be ended.
        timeout_s: seconds after which the command is ended; None: no limit.
        max_bytes: only so many bytes at the end of the output, and of the errors, are returned.
        options: as for `asyncio.create_subprocess_exec`.

    Returns:
        The exit status, None if the time was up; the output; and the errors.

    Raises:
        OSError: the process cannot be started.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *guarded(command, grace_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            **options,
        )
        assert process.stdin is not None
        status = None
        try:
            async with asyncio.timeout(timeout_s):
                status = await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.stdin.close()
                await process.wait()
        return status, _tail(output, max_bytes), _tail(errors, max_bytes)


def _tail(file: IO[bytes], max_bytes: int) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
    return file.read()


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


def parse_python(source: str) -> ast.Module:
    """Returns the tree of statements; raises what `ast.parse` raises."""
    return cast(ast.Module, _parse(source, "exec"))


def parse_expression(source: str) -> ast.Expression:
    """Returns the tree of one expression; raises what `ast.parse` raises."""
    return cast(ast.Expression, _parse(source, "eval"))


def _parse(source: str, mode: str) -> ast.AST:
    # CPython 3.11 keeps the depth of the tree that it builds in one place for all threads, and says
    # "AST constructor recursion depth mismatch" where one interrupts another. The lock keeps apart
    # those that parse here; the attempts are for libraries that parse meanwhile.
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            with _one_at_a_time:
                return ast.parse(source, mode=mode)
        except SystemError:
            continue
    return ast.parse(source, mode=mode)
