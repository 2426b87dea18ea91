"""Evaluations while training: sets by name, the best checkpoint, the end once nothing improves."""

from contextlib import aclosing
from pathlib import Path

import pytest
from test_loop import QUICKSTART, untimed

from agentrl.config import load_config
from agentrl.env.client import connect
from agentrl.errors import ConfigError
from agentrl.train.checkpoint import load_checkpoint
from agentrl.train.held_out import HeldOut, default_interval
from agentrl.train.loop import train
from agentrl.view.tracking import read_metrics, read_status

SMALL = [
    *("--rollout.groups_per_step", "2", "--rollout.group_size", "2", "--eval.num_tasks", "4"),
    *("--eval.sets.long.config.digits", "4", "--eval.sets.greedy.temperature", "0"),
    *("--run.save_every", "3", "--run.eval_every", "1", "--run.keep_checkpoints", "1"),
]


def run(run_dir: Path, *overrides: str) -> Path:
    return train(load_config(QUICKSTART, [*SMALL, "--run.dir", str(run_dir), *overrides]), quiet=1)


def scripted(monkeypatch, values):
    """Evaluations of `greedy` come out like this, step by step."""
    from agentrl.train import held_out

    played = held_out.evaluation_metrics

    def evaluation_metrics(rollouts, config, name):
        step = int(rollouts.trajectories[0].trajectory_id.removeprefix("eval")[:6])
        figures = played(rollouts, config, name)
        return figures | ({"eval/greedy/avg@1": values[step - 1]} if name == "greedy" else {})

    monkeypatch.setattr(held_out, "evaluation_metrics", evaluation_metrics)


def test_a_set_takes_from_eval_and_env_what_it_does_not_name():
    config = load_config(QUICKSTART, [*SMALL, "--eval.sets.other.env", "countdown"])
    sets = {name: each for name, (_, each) in config.evaluations().items()}
    assert list(sets) == ["long", "greedy", "other"]
    assert [each.eval.num_tasks for each in sets.values()] == [4, 4, 4]
    assert [each.eval.temperature for each in sets.values()] == [None, 0, None]
    assert sets["long"].env.config == config.env.config | {"digits": 4}
    assert sets["greedy"].env == config.env
    assert (sets["other"].env.id, sets["other"].env.config) == ("countdown", {})
    assert load_config(QUICKSTART).evaluations() == {"": ("", load_config(QUICKSTART))}
    again = config.to_json()
    again["model"]["path"] = config.model.path
    assert load_config(again) == config, "what is written down reads back"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--run.patience", "2"], "run.keep_best"),
        (["--run.keep_best", "eval/avg@1", "--run.eval_every", "0"], "run.eval_every = 0"),
        (["--run.keep_best", "eval/avg@2"], "use one of eval/avg@1, eval/pass@1"),
        (["--run.keep_best", "eval/avg@1", "--eval.sets.a.split", "test"], "eval/a/avg@1"),
        (["--eval.sets.a/b.split", "test"], "eval.sets.a/b"),
        (["--eval.sets.a.spilt", "test"], "eval.sets.a.spilt: unknown key"),
        (["--eval.sets.a.pass_k", "2"], "samples_per_task >= 2"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said.replace("/", r"\/")):
        load_config(QUICKSTART, overrides)


def test_a_set_without_its_split_is_refused_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="no split 'dev'"):
        run(tmp_path / "run", "--eval.sets.greedy.split", "dev")


@pytest.mark.slow
def test_a_run_evaluates_what_is_held_out_unless_told_not_to(tmp_path, capsys):
    few = [*("--rollout.groups_per_step", "1", "--rollout.group_size", "2")]
    few += ["--eval.num_tasks", "2", "--run.num_steps", "10", "--run.dir", str(tmp_path / "run")]
    rows = read_metrics(train(load_config(QUICKSTART, few)))
    assert [row["step"] for row in rows if "eval/avg@1" in row] == [10]
    said = "evaluates 2 tasks of split 'test' every 10 steps; --run.eval_every 0 turns it off"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], [10, 20, 30]),
        (["--run.num_steps", "300"], [30]),
        (["--run.num_steps", "9"], []),
        (["--run.num_steps", "9", "--run.keep_best", "eval/avg@1"], [9, 18, 27]),
        (["--run.num_steps", "9", "--eval.sets.a.temperature", "0"], [9, 18, 27]),
        (["--run.eval_every", "0"], []),
        (["--run.eval_every", "4"], [4, 8, 12, 16, 20, 24, 28]),
        (["--eval.split", "train"], []),
        (["--eval.split", "dev"], []),
    ],
)
async def test_when_evaluations_are_due(overrides, steps):
    config = load_config(QUICKSTART, ["--run.num_steps", "30", *overrides])

    async with aclosing(connect(None)) as env:
        held_out = HeldOut(config, (await default_interval(config, {"": env}, quiet=True)))
    assert [step for step in range(1, 31) if held_out.is_due(step, config)] == steps


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_the_run_ends_when_nothing_improves(
    tmp_path, monkeypatch, capsys
):
    scripted(monkeypatch, [0.1, 0.5, 0.2, 0.5, 0.3, 0.9, 0.9, 0.9])
    best = ["--run.keep_best", "eval/greedy/avg@1", "--run.patience", "3", "--run.num_steps", "8"]
    whole = run(tmp_path / "whole", *best)
    rows = read_metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5], "0.5 is not raised at 3, 4 and 5"
    assert all({"eval/long/avg@1", "eval/greedy/error_fraction"} <= row.keys() for row in rows)
    assert read_status(whole)["state"] == "finished"
    checkpoints = whole / "checkpoints"
    assert (checkpoints / "best").resolve().name == "step_000002"
    assert {path.name for path in checkpoints.iterdir()} == {"best", "step_000002", "step_000005"}
    assert load_checkpoint(checkpoints / "best").step == 2

    # Stopped at 3 and continued, it ends alike; continued once more, it does not train at all.
    parted = run(tmp_path / "parted", *best, "--run.num_steps", "3")
    (parted / "checkpoints" / "best").unlink()  # a kill before the link was made
    run(parted, *best, "--run.resume")
    assert untimed(read_metrics(parted)) == untimed(rows)
    assert (parted / "checkpoints" / "best").resolve().name == "step_000002"
    run(parted, *best, "--run.resume")
    assert untimed(read_metrics(parted)) == untimed(rows)


def test_the_best_is_forgotten_aloud_where_its_checkpoint_is_gone(tmp_path, caplog):
    config = load_config(QUICKSTART, ["--run.keep_best", "eval/avg@1"])
    state = HeldOut(config, 1)
    state.restore([{"step": 1, "eval/avg@1": 0.5}, {"step": 2, "eval/avg@1": 0.9}], 1, tmp_path)
    assert state.best is None
    assert "eval/avg@1 was best at step 1, whose checkpoint is gone" in caplog.text
    assert state.record(2, {"eval/avg@1": 0.1})


def test_patience_counts_evaluations_in_a_row():
    config = load_config(QUICKSTART, ["--run.keep_best", "eval/avg@1", "--run.patience", "2"])
    state = HeldOut(config, 1)
    seen = [
        (state.record(step, {"eval/avg@1": value}), state.reason_to_stop() is not None)
        for step, value in enumerate([0.2, 0.1, 0.3, 0.3], 1)
    ]
    assert seen == [(True, False), (False, False), (True, False), (False, False)]
    assert not state.record(5, {"reward/mean": 1.0}), (
        "a step without an evaluation counts for nothing"
    )
    assert not state.record(6, {"eval/avg@1": 0.2})
    assert "did not rise above 0.300, that of step 3, in 2 evaluations" in state.reason_to_stop()


def test_sets_of_several_environments_are_those_of_the_one_they_name():
    data = load_config(QUICKSTART).to_json()
    math = {"id": "math", "config": {"digits": 2}}
    data["env"] = [{**math, "name": "sums"}, {**math, "name": "long", "max_turns": 5}]
    assert list(load_config(data).evaluations()) == ["sums", "long"]
    data["eval"] = {"sets": {"a": {}, "b": {"env": "long", "config": {"digits": 3}}}}
    sets = load_config(data).evaluations()
    assert [(part, each.rollout.max_turns) for part, each in sets.values()] == [
        ("sums", 3),
        ("long", 5),
    ]
    assert (sets["b"][1].env.id, sets["b"][1].env.config) == ("math", {"digits": 3})
