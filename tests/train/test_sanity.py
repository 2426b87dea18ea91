"""A run learns from its rewards and from nothing else.

What must hold on any trainer: where rewards say nothing the reward does not rise, where they say
the opposite it falls, and how a step is cut into micro-batches shows only where rounding does. That
the same seed repeats bit for bit stands in `test_loop.py`, for killed runs in
`test_kill_and_resume.py`; docs/learning.md has the same runs without a fault, which rise by 0.4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from agentrl.config import load_config
from agentrl.rollout import read_trajectories
from agentrl.train.loop import train
from agentrl.view.tracking import read_metrics

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
NUM_STEPS = 30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(run_dir, *overrides):
    fixed = {"run.dir": run_dir, "run.num_steps": NUM_STEPS, "track.signals": 0}
    arguments = [part for key, value in fixed.items() for part in (f"--{key}", str(value))]
    return train(load_config(QUICKSTART, [*arguments, *overrides]), quiet=True)


def rewards(run_dir):
    return np.asarray([line["reward/mean"] for line in read_metrics(run_dir)])


def of_another(rewards, group_ids):
    """The reward above the group's mean, of rewards that other members of the group got."""
    generator = torch.Generator().manual_seed(int(rewards.sum()) + 1)
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = (group_ids == group).nonzero().flatten()
        given = rewards[members[torch.randperm(len(members), generator=generator)]]
        advantages[members] = given - given.mean()
    return advantages


def test_rewards_dealt_to_other_members_of_the_group_teach_nothing(tmp_path):
    advantage = f"{Path(__file__).resolve()}:of_another"
    curve = rewards(run(tmp_path / "run", "--objective.advantage", advantage))
    print(f"rewards shuffled within groups: {curve[:5].mean():.3f} -> {curve[-5:].mean():.3f}")
    assert curve[-5:].mean() - curve[:5].mean() < 0.15


def test_rewards_of_the_opposite_sign_unteach(tmp_path):
    curve = rewards(run(tmp_path / "run", "--objective.reward.scale", "-1"))
    print(f"sign flipped: {curve[:5].mean():.3f} -> {curve[-5:].mean():.3f}")
    assert curve[-5:].mean() < 0.15 < 0.3 < curve[:5].mean()


def test_the_token_budget_shows_only_where_rounding_does(tmp_path):
    """Micro-batches of 256 or of 8,192 tokens: the same trajectories, until one differs by the
    rounding of a probability; until then the same weights but for rounding."""
    runs = [
        run(tmp_path / budget, "--train.token_budget", budget, "--run.save_every", "5",
            "--run.keep_checkpoints", "5", "--run.num_steps", "6")
        for budget in ("256", "8192")
    ]  # fmt: skip
    played = [
        [(step, t.branches[0].arrays()["token_ids"].tobytes()) for step, t in read_trajectories(r)]
        for r in runs
    ]
    equal = [one == other for one, other in zip(*played, strict=True)]
    same_until = len(equal) if all(equal) else equal.index(False)
    first_step = played[0][same_until - 1][0]
    weights = [load_file(r / "checkpoints" / "step_000005" / "model.safetensors") for r in runs]
    start = load_file(runs[0] / "checkpoints" / "step_000000" / "model.safetensors")
    moved = np.sqrt(sum(np.square(weights[0][n] - start[n]).sum() for n in start))
    apart = np.sqrt(sum(np.square(weights[0][n] - weights[1][n]).sum() for n in start))
    print(f"same trajectories until step {first_step}; weights apart by {apart / moved:.1e}")
    assert same_until >= 5 * 64
    assert apart / moved < 1e-4
