"""Turns trajectories into the tensors of one step."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from agentrl.algo import Batch, Objective, filter_zero_variance
from agentrl.errors import ConfigError
from agentrl.types import Group, Sample, Trajectory, environment_of, samples_of

logger = logging.getLogger(__name__)


def trainable_samples(groups: Sequence[Group]) -> list[Sample]:
    """Returns the samples of the trajectories that ended without an error, in dispatch order.

    A trajectory that failed (environment, grader, engine, deadline) has no reward, so it is left
    out of its group's baseline and of the gradient.
    """
    return [
        sample
        for group in groups
        for trajectory in group.trajectories
        if trajectory.trainable
        for sample in samples_of(trajectory)
    ]


def make_batch(
    samples: Sequence[Sample],
    *,
    current_version: int,
    weighted: Iterable[str] = (),
    states: Mapping[str, Sequence[int]] | None = None,
    greedy_rewards: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Makes the samples a batch: B rows, T columns, one column per *trained* token, left-aligned.

    Tokens of prompts and observations have no column. The objective goes by mask and turn ids, so
    leaving them out only saves memory.

    Args:
        samples: at least one.
        current_version: version of the policy that is about to be updated.
        weighted: reward components that get a column even if no sample reports them.
        states: trajectory id -> the state in which each of its turns began (`turn_states`).
        greedy_rewards: group id -> the reward of a greedy answer to its task.
        device: device of the tensors.
    """
    num_rows, width = len(samples), max(sample.num_trained for sample in samples)
    num_turns = max(len(sample.turn_rewards) for sample in samples)
    reported = {name for sample in samples for name in sample.reward_components}
    names = sorted(reported.union(weighted))
    mask = np.zeros((num_rows, width), bool)
    logprobs = np.zeros((num_rows, width), np.float32)
    token_ids = np.zeros((num_rows, width), np.int64)
    turn_ids = np.zeros((num_rows, width), np.int64)
    versions = np.zeros((num_rows, width), np.int64)
    turn_rewards = np.zeros((num_rows, num_turns), np.float32)
    state_ids = np.zeros((num_rows, num_turns), np.int64)
    components = np.full((num_rows, len(names)), np.nan, np.float32)
    for row, sample in enumerate(samples):
        trained = np.flatnonzero(sample.loss_mask)
        columns = slice(0, len(trained))
        mask[row, columns] = True
        logprobs[row, columns] = sample.rollout_logprobs[trained]
        token_ids[row, columns] = sample.token_ids[trained]
        turn_ids[row, columns] = sample.turn_ids[trained]
        versions[row, columns] = sample.policy_versions[trained]
        turn_rewards[row, : len(sample.turn_rewards)] = sample.turn_rewards
        if states is not None:
            turns = states[sample.trajectory_id]
            state_ids[row, : len(turns)] = turns
        for column, name in enumerate(names):
            components[row, column] = sample.reward_components.get(name, np.nan)
    baselines = None
    if greedy_rewards is not None:
        baselines = torch.tensor([greedy_rewards[sample.group_id] for sample in samples])
    environments = [environment_of(sample.group_id) for sample in samples]
    return Batch(
        loss_mask=torch.from_numpy(mask),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        group_ids=_numbered([sample.group_id for sample in samples]),
        trajectory_ids=_numbered([sample.trajectory_id for sample in samples]),
        env_ids=_numbered(environments) if any(environments) else None,
        env_names=list(dict.fromkeys(environments)),
        rollout_logprobs=torch.from_numpy(logprobs),
        token_ids=torch.from_numpy(token_ids),
        turn_ids=torch.from_numpy(turn_ids),
        policy_versions=torch.from_numpy(versions),
        current_version=current_version,
        turn_rewards=torch.from_numpy(turn_rewards),
        reward_components=torch.from_numpy(components) if names else None,
        reward_names=names,
        state_ids=None if states is None else torch.from_numpy(state_ids),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        baselines=baselines,
    ).to(device)


def all_kept_are_known(samples: Sequence[Sample]) -> bool:
    """Tells whether every sample names the ids from which its tokens were drawn (`kept_ids`), as
    truncated sampling needs. If one does not, `kept_ids` of all are removed, so that all samples
    are treated alike."""
    if all(sample.kept_ids is not None for sample in samples):
        return True
    for sample in samples:
        sample.kept_ids = None
    _warn_of_unknown_ids()
    return False


@functools.cache
def _warn_of_unknown_ids() -> None:
    logger.warning(
        "rollout.truncated_sampling: the engine does not say which ids it kept, so the old "
        "log-probabilities are the trainer's own, of the whole distribution. Nothing then corrects "
        "for the tokens that were left out, for staleness or for the engine's rounding, and "
        "policy/rollout_train_logprob_diff_* cannot show them. Start vLLM servers with "
        "--return-sampling-mask to have the kept ids reported"
    )


def turn_states(trajectory: Trajectory) -> list[int]:
    """Hashes the messages that the environment sent before each turn: GiGPO's anchor states.

    Only roles and contents count, because call ids number the turns and would make equal states
    differ.

    Returns:
        A 63-bit number for each turn.
    """
    states = []
    for turn in trajectory.turns:
        begin = 0 if turn.parent is None else trajectory.turns[turn.parent].message + 1
        read = trajectory.branches[turn.branch].messages[begin : turn.message]
        text = json.dumps([[m["role"], m["content"]] for m in read])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        states.append(int.from_bytes(digest, "big") >> 1)
    return states


def require_components(objective: Objective, batch: Batch) -> None:
    """Checks `objective.reward.weights` against the reward components that a batch reports.

    Raises:
        ConfigError: a reported component has no weight, or the first batch reports none of the
            components that have one.
    """
    weights = objective.reward.weights
    if weights is None or batch.reward_components is None:
        return
    known = ~batch.reward_components.isnan().all(0)
    reported = [name for name, is_known in zip(batch.reward_names, known, strict=True) if is_known]
    shown = f"the environment's reward components are {', '.join(reported) or 'none'}"
    if batch.current_version == 0 and not weights.keys() & set(reported):
        raise ConfigError(
            f"objective.reward.weights names {', '.join(weights)}, but {shown}; name those, or "
            "remove reward.weights"
        )
    if ignored := [name for name in reported if name not in weights]:
        raise ConfigError(
            f"objective.reward.weights has no weight for {', '.join(ignored)}, and {shown}; give "
            "it one, 0 to ignore it"
        )


def zero_variance(group: Group) -> str | None:
    """Returns the reason to drop a group whose rewards are all equal, or that has nothing to train
    on; None for other groups."""
    return filter_zero_variance([t.reward for t in group.trajectories if t.trainable]).reason


def _numbered(names: Sequence[str]) -> torch.Tensor:
    """Returns a number for each name, (len(names),) int64, counted in order of first occurrence."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])
