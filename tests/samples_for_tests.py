"""Samples and trajectories of any tokens, for tests of the trainer."""

import numpy as np
from hypothesis import strategies as st

from agentrl.types import Group, Sample, StopReason, TokenRow, Trajectory, Turn

VOCAB_SIZE = 61
"""Ids of `forked_samples` are below it."""


def sample_of(token_ids, loss_mask, **fields) -> Sample:
    """Makes a one-turn sample with zeros for everything that `fields` does not set."""
    length = len(token_ids)
    known = {
        "token_ids": np.asarray(token_ids, np.int32),
        "loss_mask": np.asarray(loss_mask, np.uint8),
        "rollout_logprobs": np.zeros(length, np.float32),
        "policy_versions": np.zeros(length, np.int32),
        "turn_ids": np.zeros(length, np.int32),
        "trajectory_id": "t",
        "group_id": "g",
        "reward": 0.0,
        "turn_rewards": np.zeros(1, np.float32),
    }
    return Sample(**known | fields)


def trajectory_of(
    reward: float = 0.0, name: str = "t", group_id: str = "g", **fields
) -> Trajectory:
    """Makes a trajectory of one turn, which is a token of context and a sampled one."""
    known = {
        "branches": [TokenRow([1, 2], [0, 1], [0.0, -0.5], [-1, 0], [0, 0])],
        "turns": [Turn(0, 1, 1, "stop", "text", message=1)],
        "stop_reason": StopReason.TERMINATED,
    }
    return Trajectory(name, group_id, "e", "t", 0, reward=reward, **known | fields)


def group_of(number: int, *rewards: float) -> Group:
    """Makes the group of a step's number, with a member for each reward."""
    name = f"g{number:07d}"
    members = [trajectory_of(each, str(at), name) for at, each in enumerate(rewards)]
    return Group(name, "t", members)


@st.composite
def forked_samples(draw) -> list[Sample]:
    """Groups whose rows begin with a prompt, or with a part of a row before them: forks, rows that
    end where another goes on, the same row twice. Trained tokens may lie in what is shared."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for group in range(draw(st.integers(1, 3))):
        rows = [rng.integers(0, VOCAB_SIZE, draw(st.integers(1, 60)))]
        for _ in range(draw(st.integers(0, 5))):
            parent = rows[draw(st.integers(0, len(rows) - 1))]
            kept = parent[: draw(st.integers(0, len(parent)))]
            own = rng.integers(0, VOCAB_SIZE, draw(st.integers(not len(kept), 50)))
            rows.append(np.concatenate([kept, own]))
        for row in rows:
            mask = rng.random(len(row)) < 0.4
            mask[0] = False
            samples.append(sample_of(row, mask, group_id=str(group)))
    return [samples[index] for index in rng.permutation(len(samples))]
