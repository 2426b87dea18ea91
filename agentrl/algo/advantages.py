"""Computes advantages: reward -> credit -> baseline -> scale -> whiten, once per step, no gradient.

Statistics are taken over trajectories (however many rows they have) or over their turns, called
units here. Groups are identified by id and may have any size. A group of one, or one whose returns
are all equal within the tolerance, has advantage exactly 0. Trajectories without a reward enter no
statistic. Everything is computed in float64 and returned in float32, or in float64 if the log-probs
are.

B rows, T columns, J trajectories, N trained tokens, U units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algo.aggregate import scored, trained_mask
from agentrl.algo.batch import Batch, field_of, wide
from agentrl.algo.kl import kl_estimate
from agentrl.algo.metrics import Metric
from agentrl.algo.normalise import has_variance, normalise, whiten
from agentrl.algo.segments import TokenIndex, index_tokens, suffix_sum, trajectory_rows
from agentrl.algo.user_functions import call

if TYPE_CHECKING:
    from agentrl.algo.advantage_stages import GigpoCredit, Overlong, Reward
    from agentrl.algo.objective import Objective


def compute_advantages(
    objective: Objective, batch: Batch, *, kl_coef: float | None = None
) -> Tensor:
    """Computes the advantage of every trained token.

    Args:
        batch: the whole optimizer step, over which group and batch statistics are taken.
        kl_coef: replaces `objective.kl.coef` for a KL in the reward (adaptive coefficient).

    Returns:
        (B, T), 0 where nothing is trained; float64 if the log-probs are, else float32.

    Raises:
        ValueError: the batch lacks a field that the objective needs (`Objective.needs`).
        ConfigError: `objective.advantage` does not return advantages.
    """
    if objective.statistics == "environment" and batch.env_ids is not None:
        whole = torch.zeros_like(wide(batch.rollout_logprobs))
        for env in batch.env_ids.unique():
            rows = (batch.env_ids == env).nonzero().squeeze(1)
            part = batch.select(rows)
            part.env_ids = None
            whole[rows] = compute_advantages(objective, part, kl_coef=kl_coef)
        return whole
    with torch.no_grad():
        tokens = index_tokens(batch, trained_mask(objective, batch))
        rewards = trajectory_rewards(objective.reward, batch, tokens)  # (J,)
        kl = _kl_in_reward(objective, batch, tokens, kl_coef)  # (N,)
        credit = objective.credit
        if objective.advantage is not None:
            advantages = _own_advantages(objective.advantage, batch, tokens, rewards) - kl
        elif credit.kind == "gae":
            advantages, _ = gae(objective, batch, tokens, rewards, kl)
        elif credit.kind == "token":
            advantages = _returns_to_go(objective, batch, tokens, rewards, kl)
        elif credit.kind == "turn":
            advantages = _turn_advantages(objective, batch, tokens, rewards)[tokens.unit] - kl
        elif credit.kind == "gigpo":
            advantages = _gigpo(objective, credit, batch, tokens, rewards)[tokens.unit] - kl
        else:
            outcome = _outcome_advantages(objective, batch, tokens, rewards)
            advantages = outcome[tokens.trajectory] - kl
        if objective.distill.where == "advantage":
            advantages = advantages - distill_penalty(objective, batch, tokens)
        groups = _groups_of_trajectories(batch, tokens)
        advantages = whiten(objective.whiten, advantages, tokens, groups)
        return tokens.scatter(advantages).to(wide(batch.rollout_logprobs).dtype)


def value_targets(objective: Objective, batch: Batch, *, kl_coef: float | None = None) -> Tensor:
    """Computes the critic's targets, lambda-returns: (B, T), 0 where nothing is trained.

    Raises:
        ValueError: the objective has no critic, or the batch no `values`.
    """
    if objective.credit.kind != "gae":
        raise ValueError("only credit.kind = 'gae' has a critic to train")
    with torch.no_grad():
        tokens = index_tokens(batch, trained_mask(objective, batch))
        rewards = trajectory_rewards(objective.reward, batch, tokens)
        kl = _kl_in_reward(objective, batch, tokens, kl_coef)
        _, returns = gae(objective, batch, tokens, rewards, kl)
        return tokens.scatter(returns).to(wide(batch.rollout_logprobs).dtype)


def _own_advantages(reference: str, batch: Batch, tokens: TokenIndex, rewards: Tensor) -> Tensor:
    """Calls `objective.advantage` on the rows whose trajectory has a reward. Returns (N,)."""
    per_row = rewards[tokens.trajectory_of_row].to(wide(batch.rollout_logprobs).dtype)
    known = (~per_row.isnan()).nonzero().squeeze(1)
    mask = tokens.scatter(torch.ones_like(tokens.position)) != 0
    given = {"rewards": per_row[known], "old_logprobs": _sampled_logprobs(batch)[known]}
    key = "objective.advantage"
    result = call(key, reference, batch.select(known), mask[known], given).double()
    whole = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    whole[known] = result if result.dim() == 2 else result[:, None].expand(-1, mask.shape[1])
    return tokens.compress(whole)


# rewards ------------------------------------------------------------------------------------------


def trajectory_rewards(spec: Reward, batch: Batch, tokens: TokenIndex) -> Tensor:
    """Returns each trajectory's shaped reward, float64 (J,), nan where it has none.

    Raises:
        ValueError: rows of one trajectory have different rewards, or the reward's components do not
            match `spec.weights`.
    """
    if spec.weights is None or spec.combine == "normalize_then_sum":
        rewards = batch.rewards.double()
    else:
        rewards = (reward_columns(spec, batch).nan_to_num(0.0)).sum(1)
    rewards = torch.where(scored(spec, batch), rewards, torch.nan)
    one_per_trajectory = rewards[tokens.row_of]
    same = one_per_trajectory[tokens.trajectory_of_row]
    if not ((same == rewards) | (same.isnan() & rewards.isnan())).all():
        raise ValueError("rows that share a trajectory must have the same reward")
    return shape_rewards(spec, one_per_trajectory, batch, tokens)


def shape_rewards(spec: Reward, rewards: Tensor, batch: Batch, tokens: TokenIndex) -> Tensor:
    """Scales and clips rewards (J,), sets those of truncated trajectories to 0 if
    `spec.truncated = "zero"`, and applies the penalty for long trajectories. Returns (J,)."""
    rewards = rewards * spec.scale + spec.bias
    if spec.clip is not None:
        rewards = rewards.clamp(-spec.clip, spec.clip)
    if spec.truncated == "zero":
        truncated = field_of(batch, "truncated", "reward.truncated = 'zero'")[tokens.row_of]
        rewards = torch.where(truncated.bool() & ~rewards.isnan(), 0, rewards)
    if spec.overlong is not None:
        sampled = (batch.loss_mask != 0).sum(1)
        lengths = torch.zeros_like(tokens.lengths).index_add(0, tokens.trajectory_of_row, sampled)
        rewards = rewards + overlong_penalty(spec.overlong, lengths)
    return rewards


def overlong_penalty(spec: Overlong, lengths: Tensor) -> Tensor:
    """Computes DAPO's soft penalty for long trajectories (2503.14476, eq. 13).

    Args:
        lengths: (J,) sampled tokens; tool tokens do not count.

    Returns:
        (J,) float64 in [-factor, 0]; less than -factor beyond `max_tokens` if `cap` is false.
    """
    start = spec.max_tokens - spec.buffer_tokens
    excess = ((lengths.double() - start) / spec.buffer_tokens).clamp(min=0)
    return -spec.factor * (excess.clamp(max=1) if spec.cap else excess)


def reward_columns(spec: Reward, batch: Batch) -> Tensor:
    """Returns the weighted components in the order of `spec.weights`, float64 (B, K), nan where
    one is missing.

    Raises:
        ValueError: `spec.weights` and the environment's components have different names.
    """
    components = field_of(batch, "reward_components", "reward.weights").double()
    names, weights = list(batch.reward_names), spec.weights or {}
    if unknown := [name for name in weights if name not in names]:
        raise ValueError(
            f"reward.weights names {', '.join(unknown)}, but the environment's reward components "
            f"are {', '.join(names) or 'none'}"
        )
    if ignored := [name for name in names if name not in weights]:
        raise ValueError(
            f"reward component {', '.join(ignored)} has no weight; add it to reward.weights, with "
            "0 to ignore it"
        )
    columns = [components[:, names.index(name)] * weight for name, weight in weights.items()]
    return torch.stack(columns, 1)


def _kl_in_reward(
    objective: Objective, batch: Batch, tokens: TokenIndex, kl_coef: float | None
) -> Tensor:
    """Returns the KL penalty that is subtracted from each trained token's reward: (N,)."""
    spec = objective.kl
    if spec.where != "reward":
        return torch.zeros(len(tokens.position), dtype=torch.float64, device=tokens.position.device)
    policy = tokens.compress(_sampled_logprobs(batch)).double()
    base = tokens.compress(base_logprobs(spec.base, batch)).double()
    return (spec.coef if kl_coef is None else kl_coef) * kl_estimate(spec, policy, base)


def base_logprobs(name: str, batch: Batch) -> Tensor:
    """Returns the log-probs (B, T) of the policy that `kl.base` names.

    Raises:
        ValueError: the batch does not have them.
    """
    if name == "rollout":
        return batch.rollout_logprobs
    return field_of(batch, f"{name}_logprobs", f"kl.base = '{name}'")


def _sampled_logprobs(batch: Batch) -> Tensor:
    """Returns the log-probs before the update (B, T): the trainer's if known, else the engine's."""
    return batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs


def distill_penalty(objective: Objective, batch: Batch, tokens: TokenIndex) -> Tensor:
    """Returns coef * sum_k discount^k (log pi - log teacher) over this and later tokens: (N,)."""
    teacher = field_of(batch, "teacher_logprobs", "distill.where = 'advantage'")
    gap = tokens.compress(_sampled_logprobs(batch)).double() - tokens.compress(teacher).double()
    spec = objective.distill
    return spec.coef * tokens.unpad(suffix_sum(tokens.pad(gap), spec.discount))


# credit -------------------------------------------------------------------------------------------


def turn_rewards(spec: Reward, batch: Batch, tokens: TokenIndex, rewards: Tensor) -> Tensor:
    """Returns the reward of each turn: (U,).

    What the turns' own rewards leave of the trajectory's reward (the outcome, a penalty, the reward
    of a turn without tokens) is added to its last turn.
    """
    last = tokens.last_token_of_unit()
    owner = tokens.trajectory[last]  # (U,)
    placed = torch.zeros(len(last), dtype=torch.float64, device=last.device)
    if batch.turn_rewards is not None:
        by_turn = batch.turn_rewards.double()
        placed = by_turn[tokens.row_of[owner], tokens.turn[last]] * spec.scale
    totals = torch.zeros_like(rewards).index_add(0, owner, placed)
    final = tokens.unit[tokens.last_token()]  # the last turn of each trajectory with tokens
    residual = (rewards - totals)[owner[final]]
    return placed.index_add(0, final, residual)


def token_rewards(
    reward_at: str, spec: Reward, batch: Batch, tokens: TokenIndex, rewards: Tensor
) -> Tensor:
    """Returns each trained token's reward (N,), 0 except on the last token of a turn or, with
    `reward_at = "end"`, of the trajectory."""
    placed = torch.zeros(len(tokens.position), dtype=torch.float64, device=rewards.device)
    if reward_at == "end":
        last = tokens.last_token()
        return placed.index_copy(0, last, rewards[tokens.trajectory[last]])
    per_turn = turn_rewards(spec, batch, tokens, rewards)
    return placed.index_copy(0, tokens.last_token_of_unit(), per_turn)


def turn_returns(gamma: float, per_turn: Tensor, tokens: TokenIndex) -> Tensor:
    """Returns the sum of this and later turns' rewards, discounted by gamma per turn: (U,)."""
    owner = tokens.trajectory[tokens.first_token_of_unit()]
    counts = torch.bincount(owner, minlength=tokens.num_trajectories)
    number = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    padded = per_turn.new_zeros(len(counts), int(counts.max()) if len(counts) else 0)
    padded[owner, number] = per_turn
    return suffix_sum(padded, gamma)[owner, number]


def gae(
    objective: Objective, batch: Batch, tokens: TokenIndex, rewards: Tensor, kl: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes generalised advantage estimates, over trained tokens alone: other tokens have no
    value and cost no discount.

    Source: 1506.02438, eq. 16; separate and length-adaptive lambdas from 2504.05118.

    Returns:
        The advantages (N,) and the critic's targets (N,).
    """
    spec = objective.credit
    assert spec.kind == "gae"
    values = tokens.compress(field_of(batch, "values", "credit.kind = 'gae'")).double()
    reward = token_rewards(spec.reward_at, objective.reward, batch, tokens, rewards) - kl
    padded = tokens.pad(values)
    following = torch.zeros_like(padded)
    following[:, :-1] = padded[:, 1:]
    delta = tokens.pad(reward) + spec.gamma * following - padded
    lam: float | Tensor = spec.lam
    if spec.length_alpha > 0:
        lengths = tokens.lengths.double().clamp(min=1)
        lam = (1 - 1 / (spec.length_alpha * lengths)).clamp(min=0)[:, None]
    advantages = suffix_sum(delta, spec.gamma * lam)
    lam_value = lam if spec.lam_value is None else spec.lam_value
    returns = suffix_sum(delta, spec.gamma * lam_value) + padded
    return tokens.unpad(advantages), tokens.unpad(returns)


def _returns_to_go(
    objective: Objective, batch: Batch, tokens: TokenIndex, rewards: Tensor, kl: Tensor
) -> Tensor:
    """(N,) discounted rewards-to-go minus the baseline."""
    spec = objective.credit
    assert spec.kind == "token"
    reward = token_rewards(spec.reward_at, objective.reward, batch, tokens, rewards) - kl
    returns = tokens.unpad(suffix_sum(tokens.pad(reward), spec.gamma))
    if objective.baseline.kind == "given":
        given = field_of(batch, "baselines", "baseline.kind = 'given'").double()
        return returns - given[tokens.row_of][tokens.trajectory]
    if objective.baseline.kind == "optimal_token":
        return _optimal_token(batch, tokens, returns)
    return returns


def _optimal_token(batch: Batch, tokens: TokenIndex, returns: Tensor) -> Tensor:
    """Minus, per rank of trained token, sum(G W) / sum(W) over the group, W the running sum of
    1 - 2 pi + sum pi^2: the expected squared norm of the score so far. Where only one trajectory
    of the group is that long, there is nothing to average and the baseline is 0."""
    squares = field_of(batch, "sum_squared_probs", "baseline.kind = 'optimal_token'")
    prob = torch.exp(tokens.compress(_sampled_logprobs(batch)).double())
    energy = tokens.pad(1 - 2 * prob + tokens.compress(squares).double()).cumsum(1)
    groups = _groups_of_trajectories(batch, tokens)
    longest = energy.shape[1]
    cell = groups[tokens.trajectory] * longest + tokens.rank  # (N,)
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    zeros = returns.new_zeros(num_groups * longest)
    weight = tokens.unpad(energy)
    weighted = zeros.index_add(0, cell, returns * weight)
    total = zeros.index_add(0, cell, weight)
    shared = zeros.index_add(0, cell, torch.ones_like(returns))
    baseline = torch.where(shared > 1, weighted / (total + 1e-8), 0)
    sizes = torch.bincount(groups, minlength=num_groups)
    return torch.where(sizes[groups[tokens.trajectory]] > 1, returns - baseline[cell], 0)


def _outcome_advantages(
    objective: Objective, batch: Batch, tokens: TokenIndex, rewards: Tensor
) -> Tensor:
    """Returns each trajectory's advantage: (J,), 0 where it has no reward."""
    groups = _groups_of_trajectories(batch, tokens)
    lengths = tokens.lengths
    if objective.reward.combine == "sum":
        if objective.baseline.kind == "given":
            given = field_of(batch, "baselines", "baseline.kind = 'given'").double()
            return (rewards - given[tokens.row_of]).nan_to_num(0.0)
        return normalise(objective.baseline, objective.scale, rewards, groups, lengths)
    total = torch.zeros_like(rewards)
    for name, weight in (objective.reward.weights or {}).items():
        alone = objective.reward.model_copy(update={"weights": {name: 1.0}})
        names = list(batch.reward_names)
        if name not in names:
            reward_columns(objective.reward, batch)  # raises with the names
        column = field_of(batch, "reward_components", "reward.weights")[:, names.index(name)]
        shaped = shape_rewards(alone, column.double()[tokens.row_of], batch, tokens)
        total += weight * normalise(objective.baseline, objective.scale, shaped, groups, lengths)
    return torch.where(rewards.isnan(), 0, total)


def _turn_advantages(
    objective: Objective, batch: Batch, tokens: TokenIndex, rewards: Tensor
) -> Tensor:
    """Returns each turn's advantage, from its discounted return: (U,)."""
    assert objective.credit.kind == "turn"
    per_turn = turn_rewards(objective.reward, batch, tokens, rewards)
    returns = turn_returns(objective.credit.gamma, per_turn, tokens)
    first = tokens.first_token_of_unit()
    owner = tokens.trajectory[first]
    if objective.baseline.kind == "given":
        given = field_of(batch, "baselines", "baseline.kind = 'given'").double()
        return returns - given[tokens.row_of][owner]
    groups = _groups_of_trajectories(batch, tokens)[owner]
    if objective.baseline.key == "group_turn":
        turn = tokens.turn[first]
        groups = groups * (int(turn.max()) + 1 if len(turn) else 1) + turn
        groups = torch.unique(groups, return_inverse=True)[1]
    counts = torch.bincount(tokens.unit, minlength=len(owner))
    return normalise(objective.baseline, objective.scale, returns, groups, counts)


def _gigpo(
    objective: Objective, spec: GigpoCredit, batch: Batch, tokens: TokenIndex, rewards: Tensor
) -> Tensor:
    """Returns the weighted sum of episode and step advantages (2505.10978, eq. 8): (U,)."""
    episode = _outcome_advantages(objective, batch, tokens, rewards)
    per_turn = turn_rewards(objective.reward, batch, tokens, rewards)
    returns = turn_returns(spec.gamma, per_turn, tokens)
    first = tokens.first_token_of_unit()
    owner = tokens.trajectory[first]
    states = field_of(batch, "state_ids", "credit.kind = 'gigpo'")
    keys = torch.stack(
        [
            _groups_of_trajectories(batch, tokens)[owner],
            states[tokens.row_of[owner], tokens.turn[first]],
        ]
    )
    anchors = torch.unique(keys, dim=1, return_inverse=True)[1]
    counts = torch.bincount(tokens.unit, minlength=len(owner))
    step = normalise(objective.baseline, objective.scale, returns, anchors, counts)
    return spec.episode_weight * episode[owner] + spec.step_weight * step


def _groups_of_trajectories(batch: Batch, tokens: TokenIndex) -> Tensor:
    """Returns each trajectory's group as a number from 0 without gaps: int64 (J,)."""
    return torch.unique(batch.group_ids[tokens.row_of], return_inverse=True)[1]


# metrics ------------------------------------------------------------------------------------------


def advantage_metrics(objective: Objective, batch: Batch) -> dict[str, Metric]:
    """Returns the share of groups without variance, and of trajectories without a reward.

    Args:
        batch: the whole step, or a share of it that holds whole groups.
    """
    with torch.no_grad():
        _, row_of = trajectory_rows(batch)
        groups = torch.unique(batch.group_ids[row_of], return_inverse=True)[1]
        known = scored(objective.reward, batch)[row_of]
        rewards = batch.rewards.double()[row_of]
        if objective.reward.weights is not None:
            rewards = reward_columns(objective.reward, batch).nan_to_num(0.0).sum(1)[row_of]
        rewards = torch.where(known, rewards, 0)
        varied = has_variance(rewards, groups, known, objective.baseline.tolerance)
        num_groups = int(groups.max()) + 1 if len(groups) else 0
        with_variance = torch.unique(groups[varied]).numel()
        return {
            "group/zero_variance_fraction": Metric(
                "mean", (num_groups - with_variance, num_groups)
            ),
            "reward/unscored_fraction": Metric("mean", ((~known).sum(), len(known))),
        }
