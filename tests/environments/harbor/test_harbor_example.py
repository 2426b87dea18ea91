"""The example's model is made, acts in containers and learns from tasks' own tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.rollout import read_trajectories
from agentrl.view.tracking import read_metrics

EXAMPLE = Path(__file__).parents[3] / "examples" / "harbor"


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_acts_and_is_verified(base_image, tmp_path):
    made = tmp_path / "build" / "harbor"
    make = [str(EXAMPLE / "make_model.py"), "--image", base_image, "--out", str(made)]
    train = ["-m", "agentrl", "train", str(EXAMPLE / "run.toml"), "--run.num_steps", "2"]
    train += ["--run.dir", str(tmp_path / "run"), "--model.path", str(made / "model")]
    for arguments in (make, train):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"AGENTRL_STATE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    metrics = read_metrics(tmp_path / "run")
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert row["rollout/error_fraction"] == 0.0 and row["rollout/trajectories"] == 16
        assert row["env/commands"] > 0.5 and row["env/no_reward"] == 0.0
    trajectories = [each for _, each in read_trajectories(tmp_path / "run")]
    rewards = [each.reward for each in trajectories]
    assert set(rewards) == {0.0, 1.0}  # it knows how, and not yet which number
    for each in trajectories:
        asked = each.task_id.removeprefix("number-")
        assert each.info["rewards"] == {"reward": each.reward}, asked
