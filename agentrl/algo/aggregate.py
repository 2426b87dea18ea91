"""Computes the weight of every token in the loss, once for the whole optimizer step.

Every term of the loss is `(term * weights).sum()`, so the losses of micro-batches and ranks add up
to the step's, and gradients do not depend on how the step is split. If a framework averages
gradients over ranks, multiply the loss by the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algo.batch import Batch, field_of, wide
from agentrl.algo.segments import trajectory_rows
from agentrl.algo.trust import known_masks

if TYPE_CHECKING:
    from agentrl.algo.advantage_stages import Reward
    from agentrl.algo.loss_stages import Aggregate
    from agentrl.algo.objective import Objective


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The counts in the denominators of the loss. Counts of disjoint shares of a step add up to the
    step's if no group, trajectory or local batch is spread over several shares."""

    tokens: float
    """Number of trained tokens."""
    sequences: float
    """Number of rows with a trained token; of all rows with `count_empty`."""
    groups: float
    """Number of groups that have such a row."""
    trajectories: float
    """Number of trajectories that have such a row."""
    local_batches: float
    """Number of local batches (`aggregate.local_rows`) that have such a row."""

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.groups + other.groups,
            self.trajectories + other.trajectories,
            self.local_batches + other.local_batches,
        )


def trained_mask(objective: Objective, batch: Batch) -> Tensor:
    """Returns (B, T) bool: the sampled tokens of the rows that take part in the loss.

    Rows without a reward, and truncated rows if `reward.truncated = "mask"`, count in neither the
    numerator nor the denominators.

    Raises:
        ValueError: the batch lacks a field that the objective needs for this.
    """
    mask = batch.loss_mask != 0
    if objective.reward.truncated == "mask":
        truncated = field_of(batch, "truncated", "reward.truncated = 'mask'")
        mask = mask & ~truncated.bool()[:, None]
    return mask & scored(objective.reward, batch)[:, None]


def scored(reward: Reward, batch: Batch) -> Tensor:
    """Returns (B,) bool: true if the row's trajectory has a reward.

    Raises:
        ValueError: `reward.weights` is set and the batch has no `reward_components`.
    """
    if reward.weights is None:
        return batch.rewards.isfinite()
    missing = field_of(batch, "reward_components", "reward.weights").isnan()
    return ~(missing.all(1) if reward.missing == "skip" else missing.any(1))


def step_totals(spec: Aggregate, batch: Batch, mask: Tensor) -> StepTotals:
    """Counts the batch's tokens, rows, groups, trajectories and local batches.

    Args:
        mask: (B, T) bool, the tokens that count.
    """
    counts = mask.sum(1)
    occupied = torch.ones_like(counts, dtype=torch.bool) if spec.count_empty else counts > 0
    of_row, _ = trajectory_rows(batch)
    return StepTotals(
        tokens=float(counts.sum()),
        sequences=float(occupied.sum()),
        groups=float(torch.unique(batch.group_ids[occupied]).numel()),
        trajectories=float(torch.unique(of_row[occupied]).numel()),
        local_batches=float(torch.unique(_local_batch(spec, batch)[occupied]).numel()),
    )


def loss_weights(objective: Objective, batch: Batch, totals: StepTotals | None = None) -> Tensor:
    """Computes the weight of every token in the loss.

    Args:
        batch: the whole optimizer step, or a share of it that holds whole groups.
        totals: the counts of the whole step, if the batch is a share of it.

    Returns:
        (B, T), 0 where nothing is trained; float64 if the log-probs are, else float32.

    Raises:
        ValueError: the batch lacks a field that the objective needs for this.
    """
    mask = trained_mask(objective, batch)
    if objective.aggregate.denominator == "kept":
        mask = mask & known_masks(objective, batch, mask)
    return weights_of(objective.aggregate, batch, mask, totals)


def weights_of(
    spec: Aggregate, batch: Batch, mask: Tensor, totals: StepTotals | None = None
) -> Tensor:
    """Returns the weights (B, T) that `spec` gives to the tokens of `mask` (B, T) bool; 0 at other
    tokens."""
    totals = totals or step_totals(spec, batch, mask)
    counts = mask.sum(1).double()  # (B,)
    if spec.kind == "token":
        per_row = torch.full_like(counts, 1 / max(totals.tokens, 1))
    elif spec.kind == "sequence_token_mean":
        per_row = 1 / (max(totals.sequences, 1) * counts.clamp(min=1))
    elif spec.kind == "sequence_token_sum":
        per_row = torch.full_like(counts, 1 / max(totals.sequences, 1))
    elif spec.kind == "constant":
        assert spec.max_tokens is not None  # Objective refuses it
        per_row = torch.full_like(counts, 1 / (max(totals.sequences, 1) * spec.max_tokens))
    elif spec.kind == "prompt":
        groups = torch.unique(batch.group_ids, return_inverse=True)[1]
        per_row = 1 / (max(totals.groups, 1) * _shared_count(counts, groups))
    elif spec.kind == "trajectory":
        of_row, _ = trajectory_rows(batch)
        per_row = 1 / (max(totals.trajectories, 1) * _shared_count(counts, of_row))
    elif spec.kind == "local":
        local = _local_batch(spec, batch)
        per_row = 1 / (max(totals.local_batches, 1) * _shared_count(counts, local))
    else:
        per_row = torch.ones_like(counts)
    dtype = wide(batch.rollout_logprobs).dtype
    return torch.where(mask, per_row.to(dtype)[:, None], 0)


def _local_batch(spec: Aggregate, batch: Batch) -> Tensor:
    """Returns the number of each row's local batch: (B,)."""
    rows = torch.arange(batch.num_rows, device=batch.loss_mask.device)
    return rows // (spec.local_rows or max(batch.num_rows, 1))


def _shared_count(counts: Tensor, ids: Tensor) -> Tensor:
    """Returns the sum of `counts` over all rows with the row's id, at least 1: (B,)."""
    sums = counts.new_zeros(int(ids.max()) + 1 if len(ids) else 0).index_add(0, ids, counts)
    return sums[ids].clamp(min=1)
