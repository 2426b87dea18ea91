"""The quickstart's reward rises on every seed, and so does that of the single-file version."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.view.tracking import read_metrics

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_reward_rises(tmp_path, seed):
    run_dir = tmp_path / "run"
    run_file = ROOT / "examples" / "quickstart" / "run.toml"
    command = [sys.executable, "-m", "agentrl", "train", str(run_file), "--run.seed", str(seed)]
    done = subprocess.run(
        [*command, "--run.dir", str(run_dir)], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = read_metrics(run_dir)
    rewards = [row["reward/mean"] for row in metrics]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"seed {seed}: {first:.3f} -> {last:.3f}, gain {last - first:.3f}")
    assert last - first >= 0.3
    assert max(row["policy/rollout_train_logprob_diff_max"] for row in metrics) < 1e-4
    assert max(row["policy/ratio_max"] for row in metrics) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_idea_in_one_file(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "minimal_grpo.py")],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 >= 0.2, rewards
