"""The example's model acts in containers and learns from real gradings."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config import RunConfig
from agentrl.rollout import read_trajectories
from agentrl.view.tracking import read_metrics

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "swebench"


def test_the_run_file_for_one_gpu_is_valid(capsys):
    assert main(["train", str(EXAMPLE / "one_gpu.toml"), "--dry-run"]) == 0
    assert "max_turns = 30" in capsys.readouterr().out


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_example_acts_and_is_graded(fixture_dir, engine, tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "swebench").symlink_to(fixture_dir)
    code = "import sys, agentrl_swebench.env; from agentrl.cli.main import main; sys.exit(main())"
    run_file = EXAMPLE / "run.toml"
    arguments = ["--run.dir", str(tmp_path / "run"), "--run.num_steps", "2"]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(run_file), *arguments],
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
        assert row["reward/mean"] == row["env/resolved"]
        assert row["env/commands"] > 0.5 and row["env/grade_s"] > 0
    assert 0 < metrics[0]["reward/mean"] < 1
    assert metrics[0]["train/grad_norm"] > 0
    trajectories = [each for _, each in read_trajectories(tmp_path / "run")]
    assert {each.task_id for each in trajectories} == {"agentrl__gauge-1", "agentrl__spans-1"}
    for each in trajectories:
        paid = each.info["resolved"] and "wrong_values" not in each.info["verdict_flags"]
        assert each.reward == float(paid), each.info
    assert len({each.info["outcome"] for each in trajectories}) > 1
    # An engine may be shared: of this process' own nothing is left, by its trajectories' names.
    left = engine.api.containers(all=True, filters={"label": "agentrl.role=agent"})
    ours = {each.info["run_id"] for each in trajectories}
    assert not [each for each in left if each["Labels"]["agentrl.run"] in ours]


@pytest.mark.docker
def test_the_recipe_trains_for_two_steps(fixture_dir, engine, tmp_path):
    """Its own keys but for model, data, engine, ranks and size."""
    run = tomllib.loads((ROOT / "examples" / "recipes" / "swe.toml").read_text())
    data = str(fixture_dir / "dataset.jsonl")
    run["run"] |= {"num_steps": 2, "dir": str(tmp_path / "run")}
    run["model"]["path"] = str(ROOT / "examples" / "quickstart" / "model")
    run["env"]["config"] |= {"source": {"train": data, "test": data}}
    run["env"]["config"] |= {"memory_mb": 1024, "min_free_gb": 2}
    run["inference"] = {"backend": "embedded"}
    run["rollout"] |= {"groups_per_step": 2, "group_size": 2, "max_turns": 2, "max_waves": 1}
    run["rollout"] |= {"max_turn_tokens": 32, "max_context_tokens": 4096, "max_staleness": 0}
    run["rollout"]["keep"] = []  # this model solves nothing
    del run["train"]["parallel"]
    run_file = tmp_path / "run.toml"
    run_file.write_text(RunConfig.model_validate(run).to_toml())
    code = "import sys, agentrl_swebench.env; from agentrl.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(run_file)],
        env=os.environ | {"AGENTRL_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = read_metrics(tmp_path / "run")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["rollout/error_fraction"] == 0.0 for row in metrics)
    assert not engine.api.containers(all=True, filters={"label": "agentrl.role=agent"})
