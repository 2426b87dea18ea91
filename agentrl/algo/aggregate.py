"""Aggregation as a weight per token, computed once over the whole optimizer step.

Every term of the loss is `(term * weights).sum()`, so the losses of micro-batches and ranks add up
to the step's and gradients do not depend on the split. Where a framework averages gradients over
ranks, multiply the loss by the number of ranks.
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
    """The counts that denominators need. Counts of disjoint shares of a step add up to the step's,
    as long as no group, trajectory or local batch is spread over two shares."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Rows with a trained token; with `count_empty` all rows."""
    groups: float
    """Groups with such a row."""
    trajectories: float
    """Trajectories with such a row."""
    local_batches: float
    """Local batches (`aggregate.local_rows`) with such a row."""

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.groups + other.groups,
            self.trajectories + other.trajectories,
            self.local_batches + other.local_batches,
        )


def trained_mask(objective: Objective, batch: Batch) -> Tensor:
    """(B, T) bool: sampled tokens of rows that take part in the loss.

    Rows whose reward could not be scored, and truncated rows under `reward.truncated = "mask"`,
    take part in neither numerator nor denominators.
    """
    mask = batch.loss_mask != 0
    if objective.reward.truncated == "mask":
        truncated = field_of(batch, "truncated", "reward.truncated = 'mask'")
        mask = mask & ~truncated.bool()[:, None]
    return mask & scored(objective.reward, batch)[:, None]


def scored(reward: Reward, batch: Batch) -> Tensor:
    """(B,) bool: whether the row's trajectory has a reward."""
    if reward.weights is None:
        return batch.rewards.isfinite()
    missing = field_of(batch, "reward_components", "reward.weights").isnan()
    return ~(missing.all(1) if reward.missing == "skip" else missing.any(1))


def step_totals(spec: Aggregate, batch: Batch, mask: Tensor) -> StepTotals:
    """The counts of this batch.

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
    """The weight of every token in the loss, 0 where nothing is trained.

    Args:
        batch: the whole optimizer step, or a share of it that holds whole groups.
        totals: the counts of the whole step where the batch is a share of it.

    Returns:
        (B, T) float32 or wider.
    """
    mask = trained_mask(objective, batch)
    if objective.aggregate.denominator == "kept":
        mask = mask & known_masks(objective, batch, mask)
    return weights_of(objective.aggregate, batch, mask, totals)


def weights_of(
    spec: Aggregate, batch: Batch, mask: Tensor, totals: StepTotals | None = None
) -> Tensor:
    """(B, T) weights of one `Aggregate` over the tokens of `mask` (B, T) bool."""
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
    """(B,) number of the local batch each row belongs to."""
    rows = torch.arange(batch.num_rows, device=batch.loss_mask.device)
    return rows // (spec.local_rows or max(batch.num_rows, 1))


def _shared_count(counts: Tensor, ids: Tensor) -> Tensor:
    """(B,) trained tokens of all rows that share the row's id, at least 1."""
    sums = counts.new_zeros(int(ids.max()) + 1 if len(ids) else 0).index_add(0, ids, counts)
    return sums[ids].clamp(min=1)
