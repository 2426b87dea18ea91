"""A training whose environment server, or one of its worker processes, is killed: the run goes on,
and every episode counts once."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.env import client
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.driver import Limits
from agentrl.rollout.log import read_trajectories
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import GroupScheduler, TaskSource
from agentrl.types import StopReason

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 4, 4, 8


@contextlib.contextmanager
def environment_server(log: Path, *options: str, port: int = 0):
    """A real server process; yields the process and its URL, or those of its workers."""
    command = [sys.executable, "-m", "agentrl", "env", "serve", "math", "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT)
    try:
        while not (found := re.search(r" at (http\S+)\n", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        yield server, found[1]
    finally:
        server.kill()
        server.wait()


def num_sessions(url: str) -> int:
    with urllib.request.urlopen(f"{url}/healthz") as answer:
        return json.load(answer)["sessions"]


def two_free_ports() -> int:
    """The first of them."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def num_ended(log: Path) -> int:
    return log.read_text().count('"event": "episode"')


@contextlib.contextmanager
def training_run(run_dir: Path, url: str, log: Path):
    """A training process that has played some episodes and is in the middle of others."""
    training = subprocess.Popen(
        [
            *(sys.executable, "-m", "agentrl", "train", str(QUICKSTART), "--env.url", url),
            *("--run.num_steps", str(NUM_STEPS), "--run.dir", str(run_dir)),
            *("--rollout.groups_per_step", str(GROUPS_PER_STEP)),
            *("--rollout.group_size", str(GROUP_SIZE)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while not num_ended(log) or not all(map(num_sessions, url.split(","))):
            assert training.poll() is None, training.communicate()[0]
            time.sleep(0.005)
        yield training
    finally:
        training.kill()
        training.wait()


def test_episodes_of_a_killed_server_are_played_again_on_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "UNREACHABLE_S", 0.2)
    group_size, num_groups = 5, 8
    renderer = Renderer(make_tokenizer())
    num_turns = 0

    def say(request_id, prompt):
        nonlocal num_turns
        num_turns += 1
        if num_turns == group_size * num_groups // 2:
            first.kill()
            first.wait()
        return "\\boxed{1}"

    async def main(urls):
        env = client.connect(urls)
        scheduler = GroupScheduler(
            TokenPolicy(ScriptedEngine(renderer, say, 0.05), renderer, 64, 4096),
            env,
            TaskSource("train", None, seed=1),
            env_id="math",
            env_config={},
            group_size=group_size,
            max_concurrent=group_size * num_groups,
            limits=Limits(max_turns=2, turn_timeout_s=30, step_timeout_s=30, episode_timeout_s=60),
            seed=1,
        )
        batch = await scheduler.collect(num_groups)
        await env.aclose()
        return batch

    with (
        environment_server(tmp_path / "first.log") as (first, first_url),
        environment_server(tmp_path / "second.log") as (_, second_url),
    ):
        batch = asyncio.run(main([first_url, second_url]))
    assert len(batch.trajectories) == group_size * num_groups
    assert len({each.trajectory_id for each in batch.trajectories}) == group_size * num_groups
    assert {each.error for each in batch.trajectories} == {None}
    assert 0 < batch.num_restarts <= group_size * num_groups // 2 + 1, "half of them were there"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_survives_a_killed_environment_server(tmp_path):
    log, run_dir = tmp_path / "first.log", tmp_path / "run"
    with environment_server(log) as (server, url), training_run(run_dir, url, log) as training:
        server.send_signal(signal.SIGKILL)
        server.wait()
        with environment_server(tmp_path / "second.log", port=int(url.rpartition(":")[2])):
            output, _ = training.communicate(timeout=240)
    assert training.returncode == 0, output
    check_run(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_survives_a_killed_worker_process(tmp_path):
    log, run_dir = tmp_path / "server.log", tmp_path / "run"
    with (
        environment_server(log, "--workers", "2", port=two_free_ports()) as (server, url),
        training_run(run_dir, url, log) as training,
    ):
        listings = Path(f"/proc/{server.pid}/task").glob("*/children")  # by the thread that made it
        workers = [int(pid) for each in listings for pid in each.read_text().split()]
        os.kill(workers[-1], signal.SIGKILL)
        output, _ = training.communicate(timeout=240)
        server.send_signal(signal.SIGTERM)
        server.wait(20)
    assert training.returncode == 0, output
    check_run(run_dir)


def check_run(run_dir: Path) -> None:
    """Episodes were started over, and every dispatched trajectory is there once, whole."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "rollout/trajectories" in record]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    restarts = sum(record["rollout/restarted_episodes"] for record in steps)
    assert restarts > 0, "it was killed while episodes were played"

    trajectories = [trajectory for _, trajectory in read_trajectories(run_dir)]
    ids = Counter(trajectory.trajectory_id for trajectory in trajectories)
    assert len(ids) == NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE and set(ids.values()) == {1}
    groups = Counter(trajectory.group_id for trajectory in trajectories)
    assert set(groups.values()) == {GROUP_SIZE}
    assert sum(record["rollout/trajectories"] for record in steps) == len(ids)
    assert {trajectory.error for trajectory in trajectories} == {None}
    ends = (StopReason.TERMINATED, StopReason.MAX_TURNS, StopReason.CONTEXT_LENGTH)
    for trajectory in trajectories:
        assert trajectory.stop_reason in ends
        # Nothing of a lost attempt: as many turns as rows hold, each token in one of them.
        sampled = sum(sum(row.loss_mask) for row in trajectory.branches)
        assert sampled == trajectory.num_sampled_tokens > 0
        roles = [message["role"] for message in trajectory.messages]
        assert roles.count("assistant") == len(trajectory.turns)
    print(f"\n{restarts} episodes started over; {len(ids)} trajectories, each recorded once")
