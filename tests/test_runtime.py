"""The event loop, retries, processes that end as a group, and parsing beside other threads."""

import ast
import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl import runtime
from agentrl.model.text.calls import pythonic_calls
from agentrl.runtime import (
    MAX_ATTEMPTS,
    kill_group,
    parse_python,
    retry,
    run_guarded,
    signal_group,
    start_group,
)
from agentrl_math.calculator import calculate
from agentrl_rewards.code import read_tests
from agentrl_rewards.withheld import withhold


async def threshold() -> int:
    return gc.get_threshold()[0]


async def fails() -> None:
    raise OSError("of the work")


async def beside_another() -> int:
    return runtime.run(threshold())


def test_garbage_is_collected_rarely_while_it_runs():
    before = gc.get_threshold()
    assert runtime.run(threshold()) > before[0]
    assert asyncio.run(beside_another()) > before[0], "in a thread, since a loop runs already"
    with pytest.raises(OSError, match="of the work"):
        runtime.run(fails())
    assert gc.get_threshold() == before


class Busy(Exception):
    pass


def flaky(num_failures, error=Busy):
    calls = []

    async def attempt(remaining_s):
        calls.append(remaining_s)
        if len(calls) <= num_failures:
            raise error(f"attempt {len(calls)}")
        return "done"

    return attempt, calls


def busy_only(error):
    return 0.0 if isinstance(error, Busy) else None


async def test_what_failed_is_called_again_with_less_time_left():
    attempt, calls = flaky(3)
    done = await retry(attempt, timeout_s=5.0, retry_after_s=busy_only, first_pause_s=0.001)
    assert done == "done" and len(calls) == 4
    assert calls == sorted(calls, reverse=True)


@pytest.mark.parametrize(
    ("error", "options", "num_calls"),
    [
        (ValueError, {"timeout_s": 5.0, "retry_after_s": busy_only}, 1),  # final, raised at once
        (Busy, {"timeout_s": 1.0, "retry_after_s": lambda error: 60.0}, 1),  # longer than is left
        (Busy, {"retry_after_s": busy_only, "first_pause_s": 0.001, "max_attempts": 3}, 3),
    ],
)
async def test_the_last_error_is_raised_after_so_many_calls(error, options, num_calls):
    attempt, calls = flaky(10**6, error)
    with pytest.raises(error, match=f"attempt {num_calls}"):
        await retry(attempt, **options)
    assert len(calls) == num_calls


async def test_the_last_error_is_raised_when_the_next_pause_would_pass_the_deadline():
    attempt, calls = flaky(10**6)
    started = time.monotonic()
    with pytest.raises(Busy, match=r"attempt \d+"):
        await retry(attempt, timeout_s=0.05, retry_after_s=busy_only, first_pause_s=0.01)
    assert len(calls) >= 2 and time.monotonic() - started < 2.0


async def test_no_pause_is_shorter_than_was_asked_for(monkeypatch):
    monkeypatch.setattr("agentrl.runtime.random.uniform", lambda low, high: low)
    attempt, _ = flaky(1)
    started = time.monotonic()
    await retry(attempt, retry_after_s=lambda error: 0.1, first_pause_s=0.001)
    assert time.monotonic() - started >= 0.1


FAMILY = """
import os, sys, time
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
sys.stdin.read()
"""
ORPHAN = """
import os, sys, time
from agentrl.runtime import die_with_parent
parent = os.getpid()
child = os.fork()
if child == 0:
    die_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_dead(pid: int) -> None:
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline, f"{pid} lives on"
        time.sleep(0.01)


def family() -> tuple[subprocess.Popen[bytes], int]:
    pipe = subprocess.PIPE
    process = start_group([sys.executable, "-c", FAMILY], stdin=pipe, stdout=pipe)
    return process, int(process.stdout.readline())


def test_a_group_ends_as_a_whole():
    process, child = family()
    assert os.getpgid(child) == os.getsid(child) == process.pid != os.getpgid(0)
    with process:
        kill_group(process)
        assert process.returncode == -signal.SIGKILL
        until_dead(child)
        kill_group(process)  # again, and to nobody


def test_a_leader_that_ended_leaves_its_group_to_be_killed():
    process, child = family()
    with process:
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert alive(child)
        kill_group(process)
        until_dead(child)
    signal_group(process.pid, signal.SIGKILL)  # nobody is left, which is no error


DETACHED = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(600)
sys.stderr.write("said")
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the guard reads /proc")
@pytest.mark.parametrize(("sleep_s", "status"), [("0.5", 3), ("600", None)])
async def test_of_a_guarded_command_nothing_is_left(sleep_s, status):
    command = [sys.executable, "-c", DETACHED, sleep_s]
    ended, output, errors = await run_guarded(command, grace_s=0.0, timeout_s=3.0)
    assert (ended, errors) == (status, b"said")
    assert not alive(int(output))
    assert await run_guarded(["echo", "12345"], grace_s=0.0, max_bytes=3) == (0, b"45\n", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_forked_child_dies_with_its_parent():
    with start_group([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        assert alive(child)
        os.kill(process.pid, signal.SIGKILL)
        until_dead(child)


@contextmanager
def interrupted(times):
    """Lets the next calls of `ast.parse` fail as CPython 3.11's do; all of them must be made."""
    parse, left = ast.parse, [times]

    def fails(*args, **keywords):
        if left[0]:
            left[0] -= 1
            raise SystemError("AST constructor recursion depth mismatch (before=30, after=32)")
        return parse(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", fails)
        yield
    assert not left[0]


@pytest.mark.parametrize(
    "read, text",
    [
        (calculate, "17+25"),
        (lambda text: pythonic_calls(text, []), "[add(a=1, b=2)]"),
        (read_tests, "assert f(1) == 1"),
        (
            lambda text: list(withhold(text, report_file="r").probes),
            "def test():\n    assert f()\n",
        ),
    ],
)
def test_a_parse_that_another_thread_interrupts_is_tried_again(read, text):
    undisturbed = read(text)
    with interrupted(2):
        again = read(text)
    assert again == undisturbed


def test_an_error_that_stays_is_raised():
    with interrupted(MAX_ATTEMPTS), pytest.raises(SystemError):
        parse_python("1")
