"""The signals of real steps, against a recomputation from the trajectories and the checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_loop import QUICKSTART, untimed
from transformers import AutoModelForCausalLM

from agentrl.algo import loss_weights
from agentrl.config import load_config
from agentrl.rollout import read_signals, read_trajectories
from agentrl.train.batch import make_batch
from agentrl.train.loop import train
from agentrl.types import Trajectory, samples_of
from agentrl.view.tracking import read_metrics, read_status

STEPS = 3


def run(run_dir: Path, *overrides: str) -> Path:
    small = [
        *("--rollout.groups_per_step", "3", "--rollout.group_size", "4", "--run.save_every", "1"),
        *("--run.num_steps", str(STEPS), "--run.dir", str(run_dir)),
    ]
    return train(load_config(QUICKSTART, [*small, *overrides]), quiet=True)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "grpo")


@pytest.fixture(scope="module")
def masked_ppo(tmp_path_factory) -> Path:
    """With a critic, several updates per step and a trust mask."""
    return run(
        *(tmp_path_factory.mktemp("runs") / "ppo", "--objective.preset", "ppo"),
        *("--train.num_epochs", "2", "--train.learning_rate", "3e-3"),
        *("--objective.trust", '[{kind = "dppo_kl", max_kl = 1e-6}]'),
    )


def trajectories(run_dir: Path, step: int) -> list[Trajectory]:
    return [t for _, t in read_trajectories(run_dir, steps=range(step, step + 1))]


def of_step(run_dir: Path, step: int, name: str) -> np.ndarray:
    rows = [row for rows in read_signals(run_dir, step).values() for row in rows]
    return np.concatenate([getattr(row, name)[row.trained] for row in rows])


@pytest.mark.parametrize("which", ["grpo", pytest.param("masked_ppo", marks=pytest.mark.slow)])
def test_they_average_to_the_metrics_of_their_step(which, request):
    run_dir = request.getfixturevalue(which)
    for metrics in read_metrics(run_dir):
        advantages = of_step(run_dir, metrics["step"], "advantages").astype(np.float64)
        assert advantages.mean() == pytest.approx(metrics["advantage/mean"], abs=1e-6)
        assert np.abs(advantages).mean() == pytest.approx(metrics["advantage/abs_mean"], abs=1e-6)
        played = trajectories(run_dir, metrics["step"])
        sampled = np.concatenate(
            [
                np.asarray(row.rollout_logprobs)[np.asarray(row.loss_mask, bool)]
                for t in played
                for row in t.branches
            ]
        )
        gap = np.abs(of_step(run_dir, metrics["step"], "old_logprobs") - sampled).max()
        assert gap == pytest.approx(metrics["policy/rollout_train_logprob_diff_max"], abs=1e-6)


def test_advantages_weights_and_log_probs_are_those_of_a_recomputation(grpo):
    config = load_config(grpo / "config.toml", [])
    played = trajectories(grpo, STEPS)
    signals = read_signals(grpo, STEPS)
    # The policy that step 3 began with. These trajectories are its own.
    model = AutoModelForCausalLM.from_pretrained(grpo / "checkpoints" / f"step_{STEPS - 1:06d}")
    samples = [sample for t in played for sample in samples_of(t)]
    batch = make_batch(samples, current_version=STEPS - 1)
    weights = loss_weights(config.objective, batch)
    place = {sample.trajectory_id: index for index, sample in enumerate(samples)}
    for trajectory in played:
        (of_row,) = signals[trajectory.trajectory_id]
        (row,) = trajectory.branches
        mask = np.asarray(row.loss_mask, bool)
        assert (of_row.trained == mask).all() and len(mask) == len(row)
        group = [t.reward for t in played if t.group_id == trajectory.group_id]
        expected = (trajectory.reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-4)
        assert of_row.advantages[mask] == pytest.approx(expected, abs=1e-3)
        assert np.isnan(of_row.advantages[~mask]).all()
        with torch.no_grad():
            logits = model(torch.tensor([row.token_ids])).logits[0].float()
        recomputed = logits.log_softmax(-1)[range(len(row) - 1), row.token_ids[1:]].numpy()
        assert of_row.old_logprobs[mask] == pytest.approx(recomputed[mask[1:]], abs=1e-4)
        assert of_row.logprobs[mask] == pytest.approx(recomputed[mask[1:]], abs=1e-4)
        expected = weights[place[trajectory.trajectory_id]][: mask.sum()].numpy()
        assert of_row.weights[mask] == pytest.approx(expected, rel=1e-6)


def test_values_ratios_and_trust_masks_are_there_where_the_objective_has_them(masked_ppo, grpo):
    metrics = read_metrics(masked_ppo)[-1]
    rows = [row for rows in read_signals(masked_ppo, STEPS).values() for row in rows]
    assert all(
        row.values is not None and np.isfinite(row.values[row.trained]).all() for row in rows
    )
    moved = of_step(masked_ppo, STEPS, "logprobs") - of_step(masked_ppo, STEPS, "old_logprobs")
    assert 0 < np.abs(moved).max() <= metrics["policy/update_logprob_diff_max"] + 1e-6
    kept = np.concatenate([row.kept["dppo_kl"][row.trained] for row in rows])
    assert 0 < kept.mean() < 1
    assert all(row.values is None for rows in read_signals(grpo, 1).values() for row in rows)


def test_they_change_nothing_and_can_be_switched_off(grpo, tmp_path):
    off = run(tmp_path / "off", "--track.signals", "0")
    assert not (off / "signals").exists()
    assert untimed(read_metrics(off)) == untimed(read_metrics(grpo))
    assert read_status(off)["state"] == "finished"
