"""Runs on several ranks that lose a machine or a disk continue, or name the one that failed."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_loop import QUICKSTART
from test_ranks_runs import SMALL, children, num_steps, require_bitwise, start, train

from agentrl.train.checkpoint import latest_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STUCK_DISK = "stuck_disk.py"


class Nodes:
    """Two "machines" of one rank each: an agent of torchrun and its rank, on loopback."""

    def __init__(self, folder: Path, *arguments: str, restarts: int = 0) -> None:
        self.folder, self._arguments = folder, [*arguments, "--run.dir", str(folder / "run")]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"localhost:{free.getsockname()[1]}"
        self._launch = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "1", "--max-restarts", str(restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", endpoint),
            *("--local-addr", "localhost", "--monitor-interval", "0.5", "--rdzv-conf"),
        ]
        self.agents: list[subprocess.Popen] = []
        for number in range(2):
            self.boot(number)

    def log(self, number: int) -> str:
        return (self.folder / f"node-{number}.log").read_text()

    def boot(self, number: int) -> None:
        """The machine that hosts the rendezvous is number 0."""
        command = [*self._launch, f"is_host={int(number == 0)}", "-m", "agentrl", "train"]
        with open(self.folder / f"node-{number}.log", "a") as log:
            agent = subprocess.Popen(
                [*command, str(QUICKSTART), *SMALL, *self._arguments],
                stdout=log,
                stderr=log,
                start_new_session=True,
                # As docs/scaling.md says: the agents count restarts each for itself.
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
                | {"PYTHONFAULTHANDLER": "1"},
            )
        self.agents[number : number + 1] = [agent]

    def processes(self, number: int) -> list[int]:
        agent = self.agents[number].pid
        return [agent, *children(agent)]

    def signal(self, number: int, what: int) -> None:
        for pid in self.processes(number):
            os.kill(pid, what)

    def until_trained(self, least: int) -> None:
        while num_steps(self.folder / "run/metrics.jsonl") < least:
            assert all(agent.poll() is None for agent in self.agents), self.log(0)[-4000:]
            time.sleep(0.05)

    def ended(self, number: int, timeout_s: float) -> int:
        """The exit status of a machine's agent. One that hangs fails the test with its log and the
        stacks of all its threads, its rank's among them."""
        try:
            return self.agents[number].wait(timeout_s)
        except subprocess.TimeoutExpired:
            steps = num_steps(self.folder / "run/metrics.jsonl")
            stuck = self.processes(number)
            for pid in reversed(stuck):  # the rank first, before its agent ends it
                os.kill(pid, signal.SIGABRT)  # Python writes the stacks
            self.agents[number].wait(30)
            pytest.fail(f"{stuck} did not end in {timeout_s} s, step {steps}\n{self.log(number)}")

    def close(self) -> None:
        for number, agent in enumerate(self.agents):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                self.signal(number, signal.SIGKILL)
            agent.wait(30)


@pytest.fixture
def nodes(tmp_path):
    opened = []

    def open_nodes(*arguments: str, **options) -> Nodes:
        opened.append(Nodes(tmp_path, *arguments, **options))
        return opened[0]

    yield open_nodes
    for each in opened:
        each.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_lost_is_named_and_the_run_ends(nodes, lost):
    pair = nodes("--run.num_steps", "500")
    pair.until_trained(1)
    pair.signal(lost, signal.SIGKILL)
    assert pair.ended(1 - lost, 120) != 0
    said = [line for line in pair.log(1 - lost).splitlines() if "error: " in line]
    assert len(said) == 1, said
    print(said)


def test_a_machine_that_comes_back_goes_on_where_the_run_was(nodes, tmp_path):
    steps = ["--run.num_steps", "12", "--run.save_every", "1"]
    pair = nodes(*steps, restarts=3)
    for least in (2, 6):
        pair.until_trained(least)
        pair.signal(1, signal.SIGKILL)
        pair.boot(1)
    for number in range(2):
        assert pair.ended(number, 200) == 0, pair.log(number)[-4000:]
    require_bitwise(tmp_path / "run", train(2, tmp_path / "undisturbed", *steps), 12)


def test_a_machine_that_stops_answering_ends_the_others(nodes):
    """As one without power does: its connections stay open. The launcher's store is on it."""
    pair = nodes("--run.num_steps", "500", "--train.parallel.deadline_s", "8")
    pair.until_trained(1)
    state = Path(f"/proc/{pair.processes(1)[1]}/stat")
    pair.signal(0, signal.SIGSTOP)
    deadline = time.monotonic() + 90
    # Its agent waits for the same store, without a deadline, and may not even bury it.
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, pair.log(1)[-4000:]
        time.sleep(0.2)
    said = [line for line in pair.log(1).splitlines() if "error: " in line]
    assert len(said) == 1 and "store on localhost has not answered for 8 s" in said[0], said


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_rank_whose_disk_never_answers_is_named(tmp_path, async_save):
    """In the background too, where the rank itself goes on and only its save hangs."""
    run_dir = tmp_path / "run"
    arguments = ["--run.num_steps", "500", "--run.save_every", "1", "--run.async_save", async_save]
    arguments += ["--train.parallel.deadline_s", "8"]
    process = start(2, run_dir, *arguments, program=(str(Path(__file__).with_name(STUCK_DISK)),))
    try:
        assert process.wait(200) != 0
    finally:
        process.kill()
    log = run_dir.with_suffix(".log").read_text()
    said = [line for line in log.splitlines() if "error: " in line]
    assert len(said) == 1 and "nothing moved for 8 s during save" in said[0], log[-4000:]
    waited_for = said[0].partition("the others wait for ")[2]
    assert waited_for.startswith("rank 1 (") and "rank 0" not in waited_for
    assert STUCK_DISK in waited_for
    assert latest_checkpoint(run_dir) is not None


def test_a_rank_whose_disk_is_full_is_named_and_saves_again_when_it_is_not(tmp_path):
    """The disk of rank 1 alone, as with a quota: the system refuses what it writes."""
    run_dir = tmp_path / "run"
    process = start(2, run_dir, "--run.num_steps", "500", "--run.save_every", "1")
    metrics, log = run_dir / "metrics.jsonl", run_dir.with_suffix(".log")
    named = "rank 1: [Errno 27] File too large"

    def wait_until(condition) -> None:
        while not condition():
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.05)

    try:
        wait_until(lambda: num_steps(metrics) >= 1)
        victim = children(process.pid)[1]
        limit = resource.prlimit(victim, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        wait_until(lambda: named in log.read_text())
        refused = latest_checkpoint(run_dir)
        assert refused is not None, "older ones stay"
        steps = num_steps(metrics)
        wait_until(lambda: num_steps(metrics) >= steps + 2)
        assert latest_checkpoint(run_dir) == refused
        resource.prlimit(victim, resource.RLIMIT_FSIZE, limit)
        wait_until(lambda: latest_checkpoint(run_dir) != refused)
        # Full for good: what cannot be saved is said, and the run has failed.
        resource.prlimit(victim, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        wait_until(lambda: log.read_text().count("not saved") >= 5)
        os.kill(children(process.pid)[0], signal.SIGTERM)
        assert process.wait(120) != 0
    finally:
        process.kill()
    said = [line for line in log.read_text().splitlines() if "agentrl: error: " in line]
    assert len(said) == 1 and "NOT saved" in said[0], said


def test_an_error_of_rank_0_is_the_only_one_that_is_said(tmp_path):
    run_dir = tmp_path / "run"
    assert start(2, run_dir, "--env.id", "nowhere").wait(120) != 0
    log = run_dir.with_suffix(".log").read_text()
    said = [line for line in log.splitlines() if "error: " in line]
    assert len(said) == 1 and "nowhere" in said[0], said
    assert "[rank1]" not in log, "the stack of a rank that only waited"
