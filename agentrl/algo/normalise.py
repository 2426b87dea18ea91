"""Applies baseline, scale and whitening: statistics over groups of returns or of advantages.

U returns, of trajectories or of turns; N trained tokens, J trajectories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algo.segments import TokenIndex

if TYPE_CHECKING:
    from agentrl.algo.advantage_stages import Baseline, Scale, Whiten


def normalise(
    baseline: Baseline, scale: Scale, values: Tensor, groups: Tensor, lengths: Tensor
) -> Tensor:
    """Subtracts each group's baseline and divides by its scale.

    Args:
        values: (U,) float64 returns; nan is left out of every statistic.
        groups: (U,) int64 from 0 without gaps.
        lengths: (U,) trained tokens, the weights of `weighting = "token"`.

    Returns:
        (U,) float64; 0 for nan and, unless `baseline.kind = "none"`, in a group of one or without
        variance.
    """
    known = ~values.isnan()
    values = torch.where(known, values, 0)
    everything = torch.zeros_like(groups)
    shared = everything if baseline.key == "batch" else groups
    if baseline.kind == "none":
        centred = values
    elif baseline.kind == "second_best":
        centred = _lead_over_second(values, groups, known)
    else:
        weights = lengths.double() if baseline.weighting == "token" else torch.ones_like(values)
        centred = _centred(baseline, values, shared, torch.where(known, weights, 0))
    if baseline.kind != "none":
        centred = torch.where(has_variance(values, shared, known, baseline.tolerance), centred, 0)
    scaled = _scaled(scale, values, centred, groups, known)
    return torch.where(known, scaled, 0)


def _centred(baseline: Baseline, values: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    total, weight = _group_sum(weights * values, groups), _group_sum(weights, groups)
    if baseline.kind == "leave_one_out":
        total, weight = total - weights * values, weight - weights
    return values - torch.where(weight > 0, total / weight, 0)


def _lead_over_second(values: Tensor, groups: Tensor, known: Tensor) -> Tensor:
    """Returns each group's best value minus its second best, at the best; 0 elsewhere: (U,)."""
    order = torch.argsort(torch.where(known, values, -torch.inf), descending=True, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    value, group, counted = values[order], groups[order], known[order]
    first = torch.ones_like(counted)
    first[1:] = group[1:] != group[:-1]
    lead = torch.zeros_like(value)
    pair = first[:-1] & ~first[1:] & counted[1:]
    lead[:-1] = torch.where(pair, value[:-1] - value[1:], 0)
    return torch.zeros_like(values).index_copy(0, order, lead)


def has_variance(values: Tensor, groups: Tensor, known: Tensor, tolerance: float) -> Tensor:
    """Returns (U,) bool: true if the group's known values differ by more than the tolerance."""
    size = int(groups.max()) + 1 if len(groups) else 0
    highest = values.new_full((size,), -torch.inf)
    highest = highest.scatter_reduce(0, groups, torch.where(known, values, -torch.inf), "amax")
    lowest = values.new_full((size,), torch.inf)
    lowest = lowest.scatter_reduce(0, groups, torch.where(known, values, torch.inf), "amin")
    return ((highest - lowest) > tolerance)[groups]


def _scaled(scale: Scale, values: Tensor, centred: Tensor, groups: Tensor, known: Tensor) -> Tensor:
    if scale.kind == "none":
        return centred
    if scale.kind == "success_rate":
        rate = ((values != 0) & known).sum() / known.sum().clamp(min=1)
        return _divide(centred, rate)
    if scale.kind == "mean":
        counts = _group_sum(known.double(), groups).clamp(min=1)
        mean = _group_sum(values, groups) / counts
        return _divide(centred, mean)
    within = groups if scale.level == "group" else torch.zeros_like(groups)
    weights = known.double()
    source = centred
    if scale.of == "raw":
        count = _group_sum(weights, within).clamp(min=1)
        source = values - _group_sum(weights * values, within) / count
    var = _mean_square(source, within, weights, scale.ddof)
    return _divide(centred, _divisor(var, scale.eps, scale.eps_mode))


def _divide(values: Tensor, divisor: Tensor) -> Tensor:
    """Divides; 0 where the divisor is not positive."""
    positive = divisor > 0
    return torch.where(positive, values / torch.where(positive, divisor, 1), 0)


def _divisor(var: Tensor, eps: float, mode: str) -> Tensor:
    if mode == "sqrt":
        return (var + eps).sqrt()
    if mode == "max":
        return var.sqrt().clamp(min=eps)
    return var.sqrt() + eps


def _mean_square(centred: Tensor, groups: Tensor, weights: Tensor, ddof: int) -> Tensor:
    """Returns the mean square over each value's group, divided by n - ddof (at least 1): (U,)."""
    count = _group_sum(weights, groups)
    return _group_sum(weights * centred.square(), groups) / (count - ddof).clamp(min=1)


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Returns the sum over each value's group: (U,)."""
    size = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(size).index_add(0, groups, values)[groups]


def whiten(spec: Whiten, advantages: Tensor, tokens: TokenIndex, groups: Tensor) -> Tensor:
    """Normalises advantages over the step.

    Args:
        advantages: (N,) float64 at the trained tokens.
        groups: (J,) int64, each trajectory's group, from 0 without gaps.

    Returns:
        (N,) float64; 0 where the divisor is not positive.
    """
    if spec.mean == "none" and spec.std == "none":
        return advantages
    if spec.unit == "sequence":
        counts = tokens.lengths.double()
        zeros = torch.zeros_like(counts)
        values = zeros.index_add(0, tokens.trajectory, advantages) / counts.clamp(min=1)
        weights, group = (counts > 0).double(), groups
    else:
        values, weights = advantages, torch.ones_like(advantages)
        group = groups[tokens.trajectory]
    shift, divisor = torch.zeros_like(values), torch.ones_like(values)
    if spec.mean != "none":
        within = group if spec.mean == "group" else torch.zeros_like(group)
        total, count = _group_sum(weights * values, within), _group_sum(weights, within)
        if spec.leave_one_out:
            total, count = total - weights * values, count - weights
        shift = total / count.clamp(min=1)
    if spec.std != "none":
        within = group if spec.std == "group" else torch.zeros_like(group)
        var = _mean_square(values - shift, within, weights, spec.ddof)
        if spec.eps_mode == "max":
            divisor = var.clamp(min=spec.eps).sqrt()
        else:
            divisor = _divisor(var, spec.eps, spec.eps_mode)
    if spec.unit == "sequence":
        shift, divisor = shift[tokens.trajectory], divisor[tokens.trajectory]
    return _divide(advantages - shift, divisor)
