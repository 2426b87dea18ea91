"""Process groups that end as a whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.processes import kill_group, signal_group, start_group

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
from agentrl.processes import die_with_parent
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


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_forked_child_dies_with_its_parent():
    with start_group([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        assert alive(child)
        os.kill(process.pid, signal.SIGKILL)
        until_dead(child)
