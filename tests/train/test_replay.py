"""Learning from what a run recorded: its updates repeated, and its best trajectories."""

from pathlib import Path

import pytest
from test_loop import QUICKSTART, SMALL, untimed
from transformers import AutoModelForCausalLM

from agentrl.cli import main
from agentrl.config import load_config
from agentrl.errors import ConfigError, DataError
from agentrl.rollout import read_trajectories
from agentrl.rollout.recorded import best_trajectories
from agentrl.tracking import read_metrics
from agentrl.train.loop import train

EXAMPLE = QUICKSTART.parents[1] / "mixture" / "run.toml"


def run(file: Path, run_dir: Path, *overrides: str) -> Path:
    config = load_config(
        file, [*SMALL, "--run.eval_every", "0", "--run.dir", str(run_dir), *overrides]
    )
    return train(config, quiet=True)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return run(QUICKSTART, tmp_path_factory.mktemp("recorded") / "run")


def weights(run_dir: Path) -> list[tuple[str, bytes]]:
    files = sorted((run_dir / "checkpoints" / "step_000003").glob("*.safetensors"))
    assert files
    return [(file.name, file.read_bytes()) for file in files]


def same_but_for_time(a: Path, b: Path) -> bool:
    return untimed(read_metrics(a)) == untimed(read_metrics(b))


def test_a_replay_repeats_every_update_bit_for_bit(recorded, tmp_path, monkeypatch):
    from agentrl.env.client import EnvClient

    async def refuse(self, *_, **__):
        raise AssertionError("a replay asks no environment")

    monkeypatch.setattr(EnvClient, "info", refuse)
    monkeypatch.setattr(EnvClient, "session", refuse)
    again = run(QUICKSTART, tmp_path / "again", "--run.replay", str(recorded))
    assert weights(again) == weights(recorded)
    assert same_but_for_time(again, recorded)


@pytest.mark.slow
def test_a_mixture_with_filters_is_replayed_too(tmp_path):
    settings = ["--rollout.keep", "zero_variance", "--rollout.max_waves", "2"]
    first = run(EXAMPLE, tmp_path / "first", *settings)
    assert sum(row["rollout/dropped_groups"] for row in read_metrics(first))
    again = run(EXAMPLE, tmp_path / "again", *settings, "--run.replay", str(first))
    assert weights(again) == weights(first)
    assert same_but_for_time(again, first)


def test_what_cannot_be_replayed_is_refused(recorded, tmp_path):
    replay = ["--run.replay", str(recorded)]
    with pytest.raises(DataError, match=r"no trajectories of step 4; set run.num_steps = 3"):
        run(QUICKSTART, tmp_path / "longer", *replay, "--run.num_steps", "4")
    for key, value in {
        "objective.baseline.kind": "given",
        "run.eval_every": "1",
        "rollout.top_p": "0.9",
    }.items():
        settings = [f"--{key}", value, "--rollout.truncated_sampling", "correct"]
        settings += ["--objective.scale.kind", "none"]
        with pytest.raises(ConfigError, match=r"run\.replay"):
            load_config(QUICKSTART, [*replay, *settings])


def test_the_best_of_every_task_are_chosen(recorded):
    played = [t for _, t in read_trajectories(recorded)]
    best = best_trajectories(recorded, 2, 0.5)
    by_task = {}
    for trajectory in played:
        by_task.setdefault(trajectory.task_id, []).append(trajectory.reward)
    for task, rewards in by_task.items():
        wanted = sorted((r for r in rewards if r >= 0.5), reverse=True)[:2]
        assert [t.reward for t in best if t.task_id == task] == wanted
    with pytest.raises(DataError, match="none of its 36 trajectories has a reward of 7 or more"):
        best_trajectories(recorded, 1, 7)


def test_sft_learns_the_tokens_that_were_sampled(recorded, tmp_path, capsys):
    out = tmp_path / "tuned"
    command = ["sft", "--from", str(recorded), "--best", "1", "--out", str(out), "--epochs", "2"]
    assert main([*command, "--learning-rate", "1e-4", "--warmup-steps", "1"]) == 0
    assert "2 updates" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(out)
    assert main(["sft", "--out", str(tmp_path / "none")]) == 2
    assert "or from a run with --from" in capsys.readouterr().err
