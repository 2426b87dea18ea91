"""A short run of three environments: metrics of each, and a resume that changes nothing."""

import shutil
from pathlib import Path

import pytest
from test_loop import contents, require_same

from agentrl.config import load_config
from agentrl.errors import CheckpointError, ConfigError
from agentrl.train.loop import train
from agentrl.view.tracking import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixture" / "run.toml"
SMALL = [
    *("--rollout.groups_per_step", "4", "--rollout.group_size", "2", "--eval.num_tasks", "2"),
    *("--run.num_steps", "3", "--run.save_every", "1", "--run.keep_checkpoints", "9"),
    *("--run.eval_every", "3"),
]


def run(run_dir: Path, *overrides: str) -> Path:
    config = load_config(EXAMPLE, [*SMALL, "--run.dir", str(run_dir), *overrides])
    return train(config, quiet=True)


CHOOSING = [  # products by difficulty, of so few that they come again; sums in two pools
    *("--rollout.sampler", "difficulty", "--env.products.config.num_tasks", "3"),
    *("--env.sums.sampler", "staged", "--env.sums.sampler_stages", "[4]"),
    *("--env.sums.config.num_tasks", "8", "--env.search.sampler", "uniform"),
]


@pytest.mark.parametrize("keys", [[], CHOOSING], ids=["uniform", "choosing"])
def test_three_environments_and_a_resume_after_a_kill(tmp_path, keys):
    whole = run(tmp_path / "whole", *keys)
    metrics = read_metrics(whole)
    played = [
        [row[f"env/{name}/rollout/trajectories"] for name in ("products", "sums")]
        for row in metrics
    ]
    assert played == [[4, 2], [2, 4], [4, 4]]
    assert ["env/search/rollout/turns" in row for row in metrics] == [True, True, False]
    for row in metrics:
        parts = [
            name for name in ("products", "sums", "search") if f"env/{name}/loss/policy" in row
        ]
        assert sum(row[f"env/{name}/train/samples"] for name in parts) == row["train/samples"]
        losses = [row[f"env/{name}/loss/policy"] for name in parts]
        assert sum(losses) == pytest.approx(row["loss/policy"], abs=1e-6)
        entropies = [row[f"env/{name}/policy/entropy"] for name in parts]
        assert min(entropies) <= row["policy/entropy"] <= max(entropies)
        assert all(0 <= row[f"env/{name}/group/zero_variance_fraction"] <= 1 for name in parts)
    for name in ("products", "sums", "search"):
        assert 0 <= metrics[-1][f"eval/{name}/avg@1"] <= 1
    assert all(
        trajectory_id.split("-g")[0] in ("products", "sums", "search")
        for _, trajectory_id, *_ in contents(whole)
    )

    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    for step in (2, 3):  # as if killed in step 2
        shutil.rmtree(killed / "checkpoints" / f"step_{step:06d}")
    run(killed, *keys, "--run.resume")
    require_same(killed, whole, 3)

    if keys:
        last = metrics[-1]
        assert last["env/products/sampler/tasks"] <= 3 and last["env/sums/sampler/stage"] == 0
        assert last["env/products/sampler/repeated_fraction"] == 1
        assert not any("env/search/sampler/tasks" in row for row in metrics)
        with pytest.raises(CheckpointError, match=r"env.sums.sampler: checkpoint \"staged\""):
            other = ("--env.sums.sampler", "difficulty", "--env.sums.sampler_stages", "[]")
            run(killed, *keys, "--run.resume", *other)


def test_an_environment_that_fails_at_the_start_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"\[\[env\]\] sums: .*no split 'tests'"):
        run(tmp_path / "run", "--env.sums.split", "tests")
    assert not (tmp_path / "run").exists()
