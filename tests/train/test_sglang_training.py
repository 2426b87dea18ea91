"""Whole runs on a real SGLang server: the curve, every sampled token's log-probability, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from sglang_fixture import sglang_python

from agentrl.rollout import read_trajectories
from agentrl.view.tracking import read_metrics

RUN = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
SMALL = [
    *("--rollout.groups_per_step", "4", "--rollout.group_size", "4"),
    *("--inference.backend", "sglang", "--model.dtype", "float32", "--model.device", "cpu"),
]
pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_trains_on_exactly_what_was_sampled(tmp_path, staleness):
    command = [
        *(sys.executable, "-m", "agentrl", "train", str(RUN), *SMALL, "--run.num_steps", "6"),
        *("--run.dir", str(tmp_path / "run"), "--inference.python", sglang_python()),
        *("--rollout.max_staleness", str(staleness)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_metrics(tmp_path / "run")
    assert [row["step"] for row in metrics] == list(range(1, 7))
    assert sum(row["rollout/error_fraction"] for row in metrics) == 0
    assert max(row["sync/probe_logprob_diff_max"] for row in metrics) < 1e-4
    fresh = [row for row in metrics if row["rollout/staleness_max"] == 0]
    assert fresh and max(row["policy/rollout_train_logprob_diff_max"] for row in fresh) < 1e-4
    for step, trajectory in read_trajectories(tmp_path / "run"):
        assert trajectory.oldest_version is not None
        assert step - 1 - trajectory.oldest_version <= staleness
