"""Whole runs on real vLLM servers: live weight updates, a killed server, a killed trainer."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from vllm_fixture import tree, vllm_python

from agentrl.rollout import read_trajectories
from agentrl.view.tracking import read_metrics

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples" / "vllm_cpu" / "run.toml"
SMALL = [
    *("--rollout.groups_per_step", "4", "--rollout.group_size", "4"),
    *("--run.save_every", "1", "--rollout.max_staleness", "1"),
]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "agentrl", "train", str(RUN), *SMALL),
            *("--run.dir", str(run_dir), "--inference.python", vllm_python(), *overrides),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def until_step(process: subprocess.Popen[str], step: int) -> None:
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError("".join(seen))


def server_processes(run_dir: Path) -> list[int]:
    """Processes whose environment names this run's plugin: servers and what they started."""
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                environment = (proc / "environ").read_bytes()
                state = re.search(r"\) (\w)", (proc / "stat").read_text())[1]
            except OSError:
                continue
            if str(run_dir / "plugin").encode() in environment and state != "Z":
                found.append(int(proc.name))
    return found


def groups_trained(run_dir: Path) -> list[str]:
    return [trajectory.group_id for _, trajectory in read_trajectories(run_dir)]


def shared_memory(pid: int) -> set[str]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {line.split()[-1] for line in maps.splitlines() if "/dev/shm/psm_" in line}


@pytest.mark.timeout(1500)
def test_a_killed_server_comes_back_and_a_killed_trainer_leaves_nothing(tmp_path):
    run_dir = tmp_path / "run"
    process = start(run_dir, "--run.num_steps", "12")
    until_step(process, 3)
    workers = server_processes(run_dir)
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    until_step(process, 8)  # it came back: samples are at most one version old
    shared = set().union(*map(shared_memory, tree(process.pid)))
    assert server_processes(run_dir) and shared
    process.kill()
    killed_at = time.monotonic()
    process.wait()
    process.stdout.close()
    while server_processes(run_dir) and time.monotonic() < killed_at + 15:
        time.sleep(0.2)
    assert not server_processes(run_dir)
    assert not [name for name in shared if Path(name).exists()]
    print(f"\ntrainer killed; its servers were gone {time.monotonic() - killed_at:.1f} s later")

    resumed = start(run_dir, "--run.num_steps", "12", "--run.resume")
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    metrics = read_metrics(run_dir)
    assert [row["step"] for row in metrics] == list(range(1, 13))
    # No token of the restarted server's old weights: every label is within the bound, and fresh
    # tokens have the trainer's own log-probabilities.
    for step, trajectory in read_trajectories(run_dir):
        if trajectory.oldest_version is not None:
            assert step - 1 - trajectory.oldest_version <= 1
    for row in metrics:
        if row["rollout/staleness_max"] == 0:
            assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
    assert sum(row["rollout/error_fraction"] for row in metrics) == 0, "paused, not failed"
    groups = groups_trained(run_dir)
    assert len(groups) == 12 * 4 * 4 and len(set(groups)) == 12 * 4
    assert not server_processes(run_dir)


@pytest.mark.parametrize("on_update", ["wait", "abort"])
def test_every_way_of_updating_trains_on_bfloat16(tmp_path, on_update):
    run_dir = tmp_path / "run"
    process = start(
        run_dir,
        *("--run.num_steps", "5", "--rollout.max_staleness", "2", "--model.dtype", "bfloat16"),
        *("--rollout.on_update", on_update),
    )
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    metrics = read_metrics(run_dir)
    assert sum(row["rollout/error_fraction"] for row in metrics) == 0
    fresh = [row for row in metrics if row["rollout/staleness_max"] == 0]
    assert fresh and max(row["policy/rollout_train_logprob_diff_max"] for row in fresh) < 0.5
    finishes = {turn.finish_reason for _, t in read_trajectories(run_dir) for turn in t.turns}
    assert "abort" not in finishes
    versions = {v for _, t in read_trajectories(run_dir) for v in t.branches[0].policy_versions}
    print("\n", on_update, json.dumps(sorted(versions)), metrics[-1]["rollout/staleness_mean"])
