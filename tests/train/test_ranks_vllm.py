"""Ranks that train what real vLLM servers sample: pushed from shards, probed after every push."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from test_meshes import save_family
from test_vllm_training import RUN, groups_trained, server_processes
from vllm_fixture import running_vllm, vllm_python

from agentrl.inference.weights.plugin import write_plugin
from agentrl.rollout import read_trajectories
from agentrl.view.tracking import read_metrics

NUM_STEPS = int(os.environ.get("AGENTRL_RANKS_VLLM_STEPS", "12"))
"""60 show the whole curve of the quickstart."""
NUM_MIXTURE_STEPS = int(os.environ.get("AGENTRL_MIXTURE_VLLM_STEPS", "6"))
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


def train(run_dir: Path, *arguments: str) -> list[dict]:
    """Trains on two ranks and returns the metrics of every step."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = [*launch, "-m", "agentrl", "train", str(RUN), "--run.dir", str(run_dir), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return read_metrics(run_dir)


def require_same_weights(metrics: list[dict], num_steps: int) -> None:
    """The server computed what the trainer does after every push, and sampled from it."""
    assert [row["step"] for row in metrics] == list(range(1, num_steps + 1))
    for row in metrics:
        assert row["sync/probe_logprob_diff_max"] < 1e-3 and row["sync/servers_missed"] == 0
        assert row["rollout/error_fraction"] == 0
        if row["rollout/staleness_max"] == 0:
            assert row["policy/rollout_train_logprob_diff_max"] < 1e-4


def test_ranks_learn_on_an_attached_server(tmp_path):
    plugin = write_plugin(tmp_path / "plugin")
    with running_vllm(tmp_path / "server", plugin_dir=plugin, max_model_len=256) as launcher:
        metrics = train(
            tmp_path / "run",
            *("--inference.urls", launcher.urls[0], "--run.num_steps", str(NUM_STEPS)),
        )
    require_same_weights(metrics, NUM_STEPS)
    rewards = [row["reward/mean"] for row in metrics]
    print("2 ranks:", " ".join(f"{reward:.2f}" for reward in rewards))
    third = NUM_STEPS // 3
    assert sum(rewards[-third:]) > sum(rewards[:third]), "it learns"


@pytest.mark.parametrize("axis", ["expert", "data"])
def test_ranks_train_a_mixture_that_a_server_samples(axis, tmp_path):
    """Experts are gathered from their ranks, named one by one and packed again by the server."""
    model = save_family(tmp_path, "qwen3_moe", head_dim=32)  # no smaller heads on a CPU
    plugin = write_plugin(tmp_path / "plugin")
    settings = {"model": model, "plugin_dir": plugin, "max_model_len": 256}
    with running_vllm(tmp_path / "server", **settings) as launcher:
        metrics = train(
            tmp_path / "run",
            *("--model.path", model, "--inference.urls", launcher.urls[0]),
            *(f"--train.parallel.{axis}", "2", "--run.num_steps", str(NUM_MIXTURE_STEPS)),
            *("--rollout.groups_per_step", "4", "--rollout.group_size", "4"),
            # The untrained mixture solves nothing: it learns from its entropy alone.
            *("--run.preflight", "false", "--run.eval_every", "0"),
            *("--objective.entropy.coef", "0.05", "--train.learning_rate", "1e-3"),
        )
    for row in metrics:
        keys = ("policy/rollout_train_logprob_diff_mean", "policy/rollout_train_logprob_diff_max")
        probe, moved = row["sync/probe_logprob_diff_max"], row["train/grad_norm"]
        figures = " ".join(f"{row[key]:.1e}" for key in keys)
        print(f"{axis} 2, step {row['step']}: {figures} probe {probe:.1e} gradient {moved:.1e}")
    require_same_weights(metrics, NUM_MIXTURE_STEPS)
    assert all(row["train/grad_norm"] > 1e-4 for row in metrics)


@pytest.mark.parametrize("arguments", [[], ["--model.lora.rank", "8"]], ids=["weights", "adapter"])
def test_rank_0_starts_a_server_that_samples_ahead_of_the_ranks(tmp_path, arguments):
    run_dir, staleness = tmp_path / "run", 1 if arguments else 2
    metrics = train(
        run_dir,
        *("--inference.python", vllm_python(), "--run.num_steps", "6", "--run.save_every", "3"),
        *("--rollout.groups_per_step", "4", "--rollout.group_size", "4"),
        *("--rollout.max_staleness", str(staleness), *arguments),
        *("--inference.args", '["--enforce-eager"]'),  # starts in half the time
    )
    require_same_weights(metrics, 6)
    for step, trajectory in read_trajectories(run_dir):
        if trajectory.oldest_version is not None:
            assert 0 <= step - 1 - trajectory.oldest_version <= staleness
    assert max(row["rollout/staleness_max"] for row in metrics) > 0
    groups = groups_trained(run_dir)
    assert len(groups) == 6 * 4 * 4 and len(set(groups)) == 6 * 4
    assert [path.name for path in (run_dir / "logs").iterdir()] == ["vllm-0.log"]
    assert not server_processes(run_dir)
