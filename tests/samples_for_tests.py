"""Samples of any tokens, for tests of the trainer."""

import numpy as np

from agentrl.types import Sample


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
