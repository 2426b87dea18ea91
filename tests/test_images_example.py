"""examples/images: a tiny model learns to see, and its environments keep their promises."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.view.tracking import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "images"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Colour", "Zoom"])
def test_the_environments_keep_their_promises(name):
    only = [
        word for each in ("tools", "schema", "determinism", "oracle") for word in ("--only", each)
    ]
    assert main(["env", "check", f"{EXAMPLE / 'shapes.py'}:{name}", *only]) == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_reward_rises(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "agentrl", "train", str(EXAMPLE / "run.toml")]
    command += ["--run.num_steps", "60", "--run.dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = read_metrics(run_dir)
    rewards = [row["reward/mean"] for row in metrics]
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert last - first >= 0.3, rewards
    assert max(row["policy/rollout_train_logprob_diff_max"] for row in metrics) < 1e-4
