"""The killable processes: deadlines, crashes, orphans, and every way of being called."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.caller import caller
from agentrl.errors import GraderError
from agentrl_rewards import math_pool
from agentrl_rewards.math import grade, math_reward, math_reward_async
from agentrl_rewards.math_pool import MathPool

SLOW_ANSWER = r"(\sin x+\cos x)^{150}=3"
"""Passes every guard and keeps the algebra system busy for minutes."""
SLOW = (SLOW_ANSWER, "x=7")
POLYNOMIAL = ("(x+1)^2", "x^2+2x+1")

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def pool():
    pool = MathPool(2)
    yield pool
    pool.close()


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in found for child in each.read_text().split()]


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def programs() -> list[int]:
    """The pools' programs that this process has started, oldest first."""
    command = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(os.getpid())}
    # by the time of their start, because numbers of processes begin again at their limit
    return sorted(
        (pid for pid, line in command.items() if b"worker.py" in line),
        key=lambda pid: int(stat_of(pid)[19]),
    )


def is_running(pid: int) -> bool:
    try:
        return stat_of(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processor_s(pid: int) -> float:
    return int(stat_of(pid)[11]) / os.sysconf("SC_CLK_TCK")


def comparing_process() -> int:
    """A process at work on a slow check, past its first try."""
    at_work: list[int] = []

    def find() -> bool:
        at_work[:] = [pid for pid in children_of(programs()[-1]) if processor_s(pid) > 0.3]
        return bool(at_work)

    wait_until(find)
    return at_work[0]


def wait_until(condition, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


@linux_only
def test_nothing_starts_before_the_first_check(pool):
    before = programs()
    assert pool.check(*POLYNOMIAL) is True
    assert pool.check("(x-1)^2", POLYNOMIAL[1]) is False
    (started,) = set(programs()) - {*before}
    assert len(children_of(started)) == 1


async def test_callers_take_turns():
    pool, order = MathPool(1), []

    async def one(name, number):
        caller.set(name)
        assert await pool.check_async(f"x+{number}", f"{number}+x")
        order.append(name)

    many = [asyncio.create_task(one("many", number)) for number in range(8)]
    await asyncio.gather(*many, asyncio.create_task(one("few", 1)))
    pool.close()
    assert len(order) == 9 and order.index("few") <= 3  # behind what the program had, and one more


BOMBS = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "9**9**9**9",
    "10^{10^{10}}",
    "((10^{999})^{999})^{999}",
    "x^{x^{x^{x^{x}}}}",
    "2^{99999999999}",
    "100000000!",
    r"\Gamma(10^{10})",
    r"\binom{10^9}{5 \cdot 10^8}",
    r"\sum_{i=1}^{1000000000} i",
    r"\prod_{n=1}^{10^{9}} n",
    r"\int_0^1 x^{x^{x^x}} dx",
    "1e999999999",
    "9" * 100_000,
    "x" * 1_000_000,
    "{" * 1000 + "1" + "}" * 1000,
    "(" * 100 + "1" + ")" * 100,
    r"\frac{1}{" * 25 + "2" + "}" * 25,
    "__import__('os').system('touch {canary}')",
    "exec(\"open('{canary}', 'w')\")",
    r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11}+\sqrt{13})^{20}",
    "(1+x)^{9999}",
    "(x+y+z+w)^{500}",
    "((x+1)^{99}+1)^{99}",
    r"\sin(" * 12 + "x" + ")" * 12,
    SLOW_ANSWER,
    r"\log_{2}(" * 20 + "3" + ")" * 20,
]


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [0.3, 2.0])
def test_bombs_end_in_time_and_cost_no_worker(pool, tmp_path, deadline_s):
    canary = tmp_path / "executed"
    pool.check(*POLYNOMIAL)  # the program's start is not part of a check
    started = programs()
    refused = 0
    for bomb in BOMBS:
        text = f"\\boxed{{{bomb.replace('{canary}', str(canary))}}}"
        try:
            result = grade(text, "x^2+y+z+w+1", pool=pool, deadline_s=deadline_s)
        except GraderError as error:
            assert f"{deadline_s:g} s" in str(error)
        else:
            assert result.score == 0.0
            refused += result.method == "refused"
    assert refused >= 17
    assert programs() == started
    assert pool.check(*POLYNOMIAL)
    assert not canary.exists()


@linux_only
@pytest.mark.slow
def test_sigkill_of_the_program_mid_check(pool):
    pool.check(*POLYNOMIAL)
    with ThreadPoolExecutor(1) as executor:
        check = executor.submit(pool.check, *SLOW, 3.0)
        child = comparing_process()
        os.kill(programs()[-1], signal.SIGKILL)
        with pytest.raises(GraderError):
            check.result(timeout=60)
    assert pool.check(*POLYNOMIAL)
    # its CPU limit ends the child that nobody can reach any more
    wait_until(lambda: not is_running(child))


@linux_only
@pytest.mark.slow
def test_sigkill_of_an_idle_process_costs_no_check(pool):
    pool.check(*POLYNOMIAL)
    started = programs()[-1]
    os.kill(started, signal.SIGKILL)
    wait_until(lambda: not is_running(started))
    assert pool.check(*POLYNOMIAL)
    (child,) = children_of(programs()[-1])
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not is_running(child))
    assert pool.check(*POLYNOMIAL)


@pytest.fixture
def change_worker(tmp_path, monkeypatch):
    """Takes the real worker program with other pieces of source; of `compare`, what it returns."""

    def change(changes: dict[str, str] | None = None, compare: str = "") -> None:
        source = math_pool.WORKER_FILE.read_text()
        if compare:
            source = source.replace("compare = load_compare()", f"compare = lambda a, b: {compare}")
        for old, new in (changes or {}).items():
            source = source.replace(old, new)
        (tmp_path / "worker.py").write_text(source)
        monkeypatch.setattr(math_pool, "WORKER_FILE", tmp_path / "worker.py")

    return change


@pytest.mark.parametrize(
    "compare",
    [
        "1 / 0",
        "[0] * 10**12",
        "os._exit(3)",
        "os.abort()",
        "signal.raise_signal(signal.SIGSEGV)",
        "json.loads('[' * 100_000)",
    ],
)
def test_a_crash_of_the_grader_is_an_error_not_a_wrong_answer(pool, change_worker, compare):
    change_worker(compare=compare)
    for _ in range(2):  # the second finds a fresh process
        with pytest.raises(GraderError):
            grade(r"\boxed{\sqrt{2}}", r"\pi", pool=pool)


def test_a_stray_print_does_not_break_the_protocol(pool, change_worker):
    change_worker(compare="print('{\"equal\": true}', flush=True) or False")
    assert pool.check("a", "b") is False


@pytest.mark.slow
def test_a_missing_library_says_how_to_get_it(pool, tmp_path, monkeypatch):
    source = math_pool.WORKER_FILE.read_text().replace("from math_verify", "from no_math_verify")
    path = tmp_path / "worker.py"
    path.write_text(source)
    monkeypatch.setattr(math_pool, "WORKER_FILE", path)
    for _ in range(3):  # a failed start gives its place back
        with pytest.raises(GraderError, match=r"pip install 'agentrl-gym\[math\]'"):
            pool.check(*POLYNOMIAL)


@linux_only
def test_children_are_replaced_before_their_caches_grow(pool, change_worker):
    changes = {"CHECKS_PER_CHILD = 500": "CHECKS_PER_CHILD = 3"}
    change_worker(changes, compare="os.getpid() == int(b)")
    pool.check("a", "0")
    (first,) = children_of(programs()[-1])
    assert [pool.check("a", str(first)) for _ in range(4)] == [True, True, False, False]


async def test_from_asyncio_without_blocking_the_loop():
    await math_reward_async(r"\boxed{(x+2)^2}", "x^2+4x+4")
    scores = await asyncio.gather(
        *(math_reward_async(rf"\boxed{{(x+{i})^2}}", "x^2+4x+4") for i in range(6)),
        math_reward_async("#### 18", "18"),
    )
    slow = asyncio.create_task(
        math_reward_async(f"\\boxed{{{SLOW_ANSWER}}}", "x=7", deadline_s=0.5)
    )
    num_turns = 0
    while not slow.done():
        await asyncio.sleep(0)
        num_turns += 1
    with pytest.raises(GraderError):
        slow.result()
    assert num_turns > 100  # a blocked loop has a handful
    assert list(scores) == [0, 0, 1, 0, 0, 0, 1]


@pytest.mark.slow
async def test_a_cancelled_check_gives_its_worker_back(pool):
    check = asyncio.create_task(pool.check_async(*SLOW, 0.5))
    await asyncio.sleep(0.1)
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    assert await pool.check_async(*POLYNOMIAL)


def score(text: str) -> float:
    return math_reward(text, "x^2+2x+1")


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("spawn", "forkserver"))]
)
def test_from_a_process_pool(method):
    assert score(r"\boxed{(x+1)^2}") == 1.0  # a forked child must not use the parent's workers
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        texts = [r"\boxed{(x+1)^2}", r"\boxed{(x-1)^2}"] * 3
        assert list(executor.map(score, texts)) == [1.0, 0.0] * 3
    assert score(r"\boxed{(1+x)^2}") == 1.0


def test_secrets_of_the_environment_do_not_reach_the_worker(pool, change_worker, monkeypatch):
    monkeypatch.setenv("AGENTRL_SECRET", "hunter2")
    change_worker(compare="'AGENTRL_SECRET' in os.environ")
    assert pool.check("a", "b") is False


@linux_only
def test_no_orphans_when_the_caller_is_killed_or_ends(tmp_path):
    source = r"""
        import json, os, signal, sys, threading, time
        from pathlib import Path
        from agentrl_rewards.math_pool import default_pool
        pool = default_pool()
        pool.check("(x+1)^2", "x^2+2x+1")
        def children(pid):
            found = Path(f"/proc/{pid}/task").glob("*/children")
            return [int(child) for each in found for child in each.read_text().split()]
        (program,) = children(os.getpid())
        pids = [program, *children(program)]
        print(json.dumps(pids), flush=True)
        if len(sys.argv) > 1:
            threading.Thread(
                target=pool.check, args=(r"(\sin x+\cos x)^{150}=3", "x=7", 20.0), daemon=True
            ).start()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(source))
    for arguments in ([], ["killed mid-check"]):
        done = subprocess.run(
            [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=60
        )
        pids = json.loads(done.stdout)
        assert len(pids) == 2
        assert done.returncode == (-signal.SIGKILL if arguments else 0), done.stderr
        wait_until(lambda pids=pids: not any(map(is_running, pids)))


@linux_only
async def test_close_ends_the_pool_and_its_checks():
    pool = MathPool(1)
    await pool.check_async(*POLYNOMIAL)
    started = programs()[-1]
    checks = [asyncio.create_task(pool.check_async(*SLOW)) for _ in range(3)]
    await asyncio.sleep(0.1)
    pool.close()
    *sent, waiting = await asyncio.gather(*checks, return_exceptions=True)
    assert all(isinstance(each, GraderError) for each in sent)
    assert isinstance(waiting, asyncio.CancelledError)
    with pytest.raises(RuntimeError):
        pool.check(*POLYNOMIAL)
    assert not is_running(started)


@linux_only
@pytest.mark.slow
def test_slow_checks_leave_places_to_quick_ones(pool, monkeypatch):
    monkeypatch.setitem(math_pool.MAX_WAIT_S, "slow", 600.0)
    pool.check("x+1", "1+x")
    with ThreadPoolExecutor(8) as executor:
        slow = [executor.submit(pool.check, *SLOW, 600.0) for _ in range(4)]
        comparing_process()
        assert [pool.check("x+1", "1+x", 600.0) for _ in range(5)] == [True] * 5
        assert not any(check.done() for check in slow)
        pool.close()
        for check in slow:
            with pytest.raises((GraderError, CancelledError)):
                check.result(timeout=60)


@linux_only
@pytest.mark.slow
def test_the_wait_for_a_place_is_bounded(monkeypatch):
    monkeypatch.setattr(math_pool, "FIRST_TRY_S", 600.0)
    monkeypatch.setitem(math_pool.MAX_WAIT_S, "quick", 0.2)
    pool = MathPool(1)
    pool.check(*POLYNOMIAL)
    with ThreadPoolExecutor(3) as executor:
        slow = executor.submit(pool.check, *SLOW, 600.0)
        child = comparing_process()
        following = executor.submit(pool.check, *POLYNOMIAL)  # the program has it already
        time.sleep(0.2)
        late = executor.submit(pool.check, *POLYNOMIAL)
        time.sleep(0.5)
        assert not late.done()
        os.kill(child, signal.SIGKILL)
        assert following.result(timeout=60)
        for check in (late, slow):
            with pytest.raises(GraderError):
                check.result(timeout=60)
    assert pool.check(*POLYNOMIAL)
    pool.close()
