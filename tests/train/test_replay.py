"""Learning from what a run recorded: its updates repeated, and its best trajectories."""

import shutil
from pathlib import Path

import pytest
from samples_for_tests import group_of
from test_loop import QUICKSTART, SMALL, tensors_of, untimed
from transformers import AutoModelForCausalLM

from agentrl.cli.main import main
from agentrl.config import RolloutSection, load_config
from agentrl.errors import ConfigError, DataError
from agentrl.rollout import read_trajectories
from agentrl.rollout.recorded import best_trajectories
from agentrl.rollout.replay_buffer import ReplayBuffer
from agentrl.train.loop import train
from agentrl.view.tracking import read_metrics

EXAMPLE = QUICKSTART.parents[1] / "mixture" / "run.toml"


def run(file: Path, run_dir: Path, *overrides: str) -> Path:
    config = load_config(
        file, [*SMALL, "--run.eval_every", "0", "--run.dir", str(run_dir), *overrides]
    )
    return train(config, quiet=True)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return run(QUICKSTART, tmp_path_factory.mktemp("recorded") / "run")


def same_but_for_time(a: Path, b: Path) -> bool:
    return untimed(read_metrics(a)) == untimed(read_metrics(b))


def test_a_replay_repeats_every_update_bit_for_bit(recorded, tmp_path, monkeypatch):
    from agentrl.env.client import EnvClient

    async def refuse(self, *_, **__):
        raise AssertionError("a replay asks no environment")

    monkeypatch.setattr(EnvClient, "info", refuse)
    monkeypatch.setattr(EnvClient, "session", refuse)
    again = run(QUICKSTART, tmp_path / "again", "--run.replay", str(recorded))
    assert tensors_of(again, 3) == tensors_of(recorded, 3)
    assert same_but_for_time(again, recorded)


@pytest.mark.slow
def test_a_mixture_with_filters_is_replayed_too(tmp_path):
    settings = ["--rollout.keep", "zero_variance", "--rollout.max_waves", "2"]
    first = run(EXAMPLE, tmp_path / "first", *settings)
    assert sum(row["rollout/dropped_groups"] for row in read_metrics(first))
    again = run(EXAMPLE, tmp_path / "again", *settings, "--run.replay", str(first))
    assert tensors_of(again, 3) == tensors_of(first, 3)
    assert same_but_for_time(again, first)


def test_what_cannot_be_replayed_is_refused(recorded, tmp_path):
    replay = ["--run.replay", str(recorded)]
    with pytest.raises(DataError, match=r"no trajectories of step 4; set run.num_steps = 3"):
        run(QUICKSTART, tmp_path / "longer", *replay, "--run.num_steps", "4")
    for key, value in {
        "objective.baseline.kind": "given",
        "run.eval_every": "1",
        "rollout.top_p": "0.9",
        "train.router_replay": "true",
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


AGAIN = [
    *("--rollout.replay_share", "0.5", "--rollout.replay_max_age", "2"),
    *("--objective.off_policy.level", "token", "--run.num_steps", "5"),
]


def test_the_groups_that_differ_most_are_given_back_once_and_none_that_is_old():
    buffer = ReplayBuffer(RolloutSection(groups_per_step=3, replay_share=0.5, replay_max_age=2))
    taken = []
    for step in range(1, 9):
        again, metrics = buffer.take(step)
        taken.append([g.group_id for g in again])
        assert metrics["replay/groups"] == len(again)
        rewards = ((1, 1), (0, 1), (0, 0.5))
        buffer.add(step, [group_of(10 * step + at, *each) for at, each in enumerate(rewards)])
    numbers = [[int(name[1:]) for name in names] for names in taken]
    assert numbers[:4] == [[], [11, 12], [21], [31, 32]]
    assert sum(map(len, taken)) == int(1.5 * 8) - 1, "one was due before there was any"
    given = [name for names in taken for name in names]
    assert len(set(given)) == len(given) and not any(name.endswith("0") for name in given)
    for step in range(9, 12):
        last, metrics = buffer.take(step)
    assert not last and metrics["replay/held"] == 0, "too old"


def test_a_run_that_trains_again_resumes_bit_for_bit(tmp_path):
    whole = run(QUICKSTART, tmp_path / "whole", *AGAIN, "--run.keep_checkpoints", "9")
    rows = read_metrics(whole)
    assert sum(row["replay/groups"] for row in rows) > 0
    assert max(row["rollout/staleness_max"] for row in rows) in (1, 2)
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    for step in (4, 5):  # as if killed in step 4
        shutil.rmtree(killed / "checkpoints" / f"step_{step:06d}")
    run(QUICKSTART, killed, *AGAIN, "--run.keep_checkpoints", "9", "--run.resume")
    assert tensors_of(killed, 5) == tensors_of(whole, 5)
    assert same_but_for_time(killed, whole)
    again = run(QUICKSTART, tmp_path / "again", *AGAIN, "--run.replay", str(whole))
    assert same_but_for_time(again, whole)


def test_training_again_without_importance_weights_is_refused():
    truncated = ("--rollout.top_p", "0.9", "--rollout.truncated_sampling", "correct")
    for keys, expected in {
        ("--rollout.replay_share", "0.5"): "has no importance weights; set objective.off_policy",
        (*AGAIN, "--track.log_trajectories", "false"): "reads the run's log",
        (*AGAIN, *truncated): "runs record",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            load_config(QUICKSTART, [*keys])


def test_a_log_without_a_group_that_is_held_is_named(recorded):
    buffer = ReplayBuffer(RolloutSection(replay_share=0.5))
    with pytest.raises(DataError, match="has no group g9999999 of step 2"):
        buffer.restore([[2, "g9999999"]], recorded)
