"""Computes masks that leave tokens out of the policy gradient, and detached off-policy weights.

A token is trained only if all masks keep it. Dropped tokens still count in the loss's denominators
unless `aggregate.denominator = "kept"`. There are three kinds of masks, by what they need:

    live       log-probs of the forward pass with gradient: opsm, dppo_tv, dppo_kl
    known      values stored in the row: ratio, veto, gibberish, staleness
    step-wide  values stored in all rows of the step (`prepare`): m2, clip_cov, top_entropy
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algo.batch import Batch, field_of, wide
from agentrl.algo.segments import row_mean, row_sum, turn_reduce
from agentrl.algo.trust_stages import (
    ClipCovMask,
    DppoKlMask,
    DppoTvMask,
    GibberishMask,
    M2Mask,
    OpsmMask,
    RatioMask,
    StalenessMask,
    TrustMask,
    VetoMask,
)

if TYPE_CHECKING:
    from agentrl.algo.loss_stages import OffPolicy
    from agentrl.algo.objective import Objective

_LOG_CLAMP = 20.0
STEP_WIDE = ("m2", "clip_cov", "top_entropy")


def keep_mask(
    spec: TrustMask,
    batch: Batch,
    mask: Tensor,
    old: Tensor | None,
    logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Tensor:
    """Returns the tokens that a live or known mask keeps: bool (B, T), or (B, 1) for whole rows.

    Args:
        mask: (B, T) bool, the trained tokens.
        old: (B, T) log-probs before the update; gibberish and staleness do without them.
        logprobs: (B, T) live log-probs, detached here; required by live masks.
        advantages: (B, T), required by live masks.

    Raises:
        ValueError: the batch lacks a field that the mask needs, or `old` is missing.
    """
    if isinstance(spec, StalenessMask):
        return staleness_mask(spec, batch)
    if isinstance(spec, GibberishMask):
        return gibberish_mask(spec, batch, mask)
    if old is None:
        old = field_of(batch, "old_logprobs", "aggregate.denominator = 'kept'")
    if isinstance(spec, RatioMask | VetoMask):
        gap = wide(old) - wide(batch.rollout_logprobs).to(wide(old).dtype)
        if spec.kind == "ratio":
            return ratio_mask(spec, gap, mask, batch.turn_ids)
        return veto_mask(spec, gap, mask)
    assert isinstance(spec, OpsmMask | DppoTvMask | DppoKlMask), f"{spec.kind} needs the whole step"
    assert logprobs is not None and advantages is not None
    live = logprobs.detach()
    anchor = (batch.rollout_logprobs if spec.anchor == "rollout" else old).to(live.dtype)
    if spec.kind == "opsm":
        return opsm_mask(spec, live, anchor, advantages, mask)
    if spec.kind == "dppo_tv":
        return dppo_tv_mask(spec, live, anchor, advantages)
    return dppo_kl_mask(spec, live, anchor, advantages)


def known_masks(objective: Objective, batch: Batch, mask: Tensor) -> Tensor:
    """Returns (B, T) bool: tokens of `mask` that all masks keep, for `denominator = "kept"`.

    Raises:
        ValueError: the batch lacks a field that a mask needs.
    """
    kept = mask
    if any(spec.kind in STEP_WIDE for spec in objective.trust):
        kept = kept & step_mask(objective, batch, mask)
    for spec in objective.trust:
        if spec.kind not in STEP_WIDE:
            kept = kept & keep_mask(spec, batch, mask, batch.old_logprobs)
    return kept


def opsm_mask(
    spec: OpsmMask, logprobs: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2): in rows that moved away from the anchor, drops
    the tokens with A < 0. Returns (B, T) bool."""
    moved = row_mean(anchor - logprobs, mask) > spec.max_kl
    return ~((advantages < 0) & moved)


def dppo_tv_mask(spec: DppoTvMask, logprobs: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    """Binary total variation (2602.04879): keeps tokens whose change of probability, pi - anchor,
    is within the bounds. Returns (B, T) bool."""
    change = torch.exp(logprobs) - torch.exp(anchor)
    high = torch.inf if spec.high is None else spec.high
    low = torch.inf if spec.low is None else spec.low
    if spec.side == "both":
        return (change <= high) & (change >= -low)
    return torch.where(advantages > 0, change <= high, change >= -low)


def dppo_kl_mask(spec: DppoKlMask, logprobs: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    """Binary KL(q, p), q the anchor's probability and p the live one (2602.04879): drops tokens
    beyond the bound whose advantage moves them further away. Returns (B, T) bool."""
    p, q = torch.exp(logprobs), torch.exp(anchor)
    # Avoids 0 log 0 = nan where a probability rounds to 0 or 1.
    tiny = 1e-8
    kl = q * torch.log((q + tiny) / (p + tiny))
    kl = kl + (1 - q) * torch.log(((1 - q).clamp(min=0) + tiny) / ((1 - p).clamp(min=0) + tiny))
    away = torch.where(advantages > 0, p > q, p < q)
    return ~(away & (kl > spec.max_kl))


def ratio_mask(
    spec: RatioMask, gap: Tensor, mask: Tensor, turn_ids: Tensor | None = None
) -> Tensor:
    """Keeps tokens whose mismatch statistic lies within [low, high].

    Args:
        gap: (B, T) log pi_old - log mu.
        mask: (B, T) bool, the trained tokens.
        turn_ids: (B, T) int64, for level `turn`.

    Returns:
        Bool, (B, T), or (B, 1) at level `sequence`.
    """
    x = gap.clamp(-_LOG_CLAMP, _LOG_CLAMP)
    if spec.statistic == "ratio":
        statistic = _over(spec, x, mask, turn_ids).clamp(-_LOG_CLAMP, _LOG_CLAMP)
        low = -math.inf if not spec.low else math.log(spec.low)
        high = math.inf if spec.high is None else math.log(spec.high) if spec.high else -math.inf
        return (statistic >= low) & (statistic <= high)
    if spec.statistic == "abs":
        value = x.abs()
    elif spec.statistic == "k2":
        value = 0.5 * x.square()
    else:
        value = torch.exp(x) - 1 - x
    statistic = _over(spec, value, mask, turn_ids)
    kept = statistic >= (spec.low or 0)
    return kept if spec.high is None else kept & (statistic <= spec.high)


def _over(spec: RatioMask, values: Tensor, mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """Returns each token's statistic over its token or turn (B, T), or over its row (B, 1)."""
    if spec.level == "token":
        return values
    if spec.level == "turn":
        return turn_reduce(values, mask, turn_ids, spec.over)
    if spec.over == "max" and mask.shape[1] > 0:
        highest = torch.where(mask, values, -torch.inf).amax(1, keepdim=True)
        return torch.where(mask.any(1, keepdim=True), highest, 0)
    return (row_mean if spec.over == "mean" else row_sum)(values, mask)


def veto_mask(spec: VetoMask, gap: Tensor, mask: Tensor) -> Tensor:
    """Returns (B, 1) bool: keeps rows in which every trained token's ratio is in [low, high]."""
    outside = gap < (math.log(spec.low) if spec.low > 0 else -math.inf)
    if spec.high is not None:
        outside = outside | (gap > math.log(spec.high))
    return ~(outside & mask).any(1, keepdim=True)


def gibberish_mask(spec: GibberishMask, batch: Batch, mask: Tensor) -> Tensor:
    """Returns (B, 1) bool: drops rows with a rare token that the sampler found all but impossible.

    Raises:
        ValueError: the batch has no `token_ids`.
    """
    ids = field_of(batch, "token_ids", "the gibberish mask")
    odd = (ids >= spec.min_token_id) & (batch.rollout_logprobs < spec.max_logprob)
    return ~(odd & mask).any(1, keepdim=True)


def staleness_mask(spec: StalenessMask, batch: Batch) -> Tensor:
    """Returns (B, T) bool: keeps tokens sampled at most `max_gap` versions before the current one.

    Raises:
        ValueError: the batch has no `policy_versions` or no `current_version`.
    """
    versions = field_of(batch, "policy_versions", "the staleness mask")
    if batch.current_version is None:
        raise ValueError("the staleness mask needs Batch.current_version")
    return batch.current_version - versions <= spec.max_gap


# step-wide ----------------------------------------------------------------------------------------


def step_mask(
    objective: Objective, batch: Batch, mask: Tensor, logprobs: Tensor | None = None
) -> Tensor:
    """Returns (B, T) bool: the tokens of `mask` that all step-wide masks keep.

    Args:
        batch: the whole optimizer step.
        mask: (B, T) bool, the trained tokens.
        logprobs: (B, T) log-probs by which `clip_cov` selects; `old_logprobs` by default.

    Raises:
        ValueError: the batch lacks a field that a mask needs.
    """
    kept = mask.clone()
    for spec in objective.trust:
        if spec.kind == "m2":
            kept &= m2_mask(spec, batch, mask)
        elif spec.kind == "top_entropy":
            entropy = field_of(batch, "old_entropy", "the top_entropy mask")
            if mask.any():
                # Sorted here because torch.quantile refuses more than 2^24 elements.
                values = entropy[mask].double().sort().values
                threshold = _quantile_of_sorted(values, spec.quantile)
                kept &= entropy >= threshold
        elif spec.kind == "clip_cov":
            kept &= ~clip_cov_tokens(spec, batch, mask, logprobs)
    return kept


def _quantile_of_sorted(values: Tensor, quantile: float) -> Tensor:
    """Returns the linearly interpolated quantile (0-d) of values (N,) in ascending order."""
    at = quantile * (len(values) - 1)
    below, above = math.floor(at), math.ceil(at)
    return values[below] + (at - below) * (values[above] - values[below])


def m2_mask(spec: M2Mask, batch: Batch, mask: Tensor) -> Tensor:
    """Keeps as many trained tokens, smallest (log mu - log pi_old)^2 first, as have a mean of it
    below the bound, and at least one (2510.01161, algorithm 1). Returns (B, T) bool."""
    old = field_of(batch, "old_logprobs", "the m2 mask")
    squares = (wide(old).double() - batch.rollout_logprobs.double()).square()[mask]
    if len(squares) == 0:
        return mask
    ordered, order = squares.sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # Running means of ascending values ascend, so the kept tokens are a prefix.
    num_kept = max(int((means < spec.max_second_moment).sum()), 1)
    chosen = torch.zeros_like(squares, dtype=torch.bool)
    chosen[order[:num_kept]] = True
    kept = torch.zeros_like(mask)
    kept[mask] = chosen
    return kept


def covariances(batch: Batch, mask: Tensor, logprobs: Tensor | None) -> Tensor:
    """Returns (A - mean A)(log pi - mean log pi) at the trained tokens in row order, float64 (N,)
    (2505.22617, eq. 9). Means are over the step's trained tokens.

    Raises:
        ValueError: the batch has no `advantages`, or no `old_logprobs` to stand in for `logprobs`.
    """
    advantages = field_of(batch, "advantages", "a covariance").double()[mask]
    if logprobs is None:
        logprobs = field_of(batch, "old_logprobs", "a covariance")
    policy = logprobs.double()[mask]
    return (advantages - advantages.mean()) * (policy - policy.mean())


def clip_cov_tokens(
    spec: ClipCovMask, batch: Batch, mask: Tensor, logprobs: Tensor | None = None
) -> Tensor:
    """Returns (B, T) bool: the tokens that Clip-Cov drops."""
    cov = covariances(batch, mask, logprobs)
    inside = (cov >= spec.low) & (cov <= spec.high)
    cov = torch.where(inside, cov, -torch.inf)
    most = min(int(spec.fraction * len(cov)), int(inside.sum()))
    return _largest(cov, most, mask)


def kl_cov_tokens(
    fraction: float, batch: Batch, mask: Tensor, logprobs: Tensor | None = None
) -> Tensor:
    """Returns (B, T) bool: the tokens that pay KL-Cov's penalty, at least one."""
    cov = covariances(batch, mask, logprobs)
    most = min(max(int(fraction * len(cov)), 1), len(cov))
    return _largest(cov, most, mask)


def _largest(values: Tensor, count: int, mask: Tensor) -> Tensor:
    """Returns (B, T) bool, true at the `count` largest of the packed values (N,). Among equal
    values the earlier position is chosen."""
    chosen = torch.zeros_like(values, dtype=torch.bool)
    chosen[values.argsort(descending=True, stable=True)[:count]] = True
    result = torch.zeros_like(mask)
    result[mask] = chosen
    return result


# off-policy weights -------------------------------------------------------------------------------


def off_policy_weights(
    spec: OffPolicy, batch: Batch, old: Tensor, mask: Tensor, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns (weights, unbounded ratios), both (B, T) and without gradient; where the mask is 0
    they are 1 and 0.

    Args:
        old: (B, T) log-probs before the update.
        mask: (B, T) bool, the trained tokens.
        scaled: divides the weights by the step's mean weight if `normalize` asks for it.

    Raises:
        ValueError: the weights are to be scaled and the batch was not prepared.
    """
    gap = torch.where(mask, (wide(old) - batch.rollout_logprobs.to(wide(old).dtype)).detach(), 0)
    if spec.level == "sequence_product":
        gap = row_sum(gap, mask).expand_as(gap)
    elif spec.level == "sequence_geometric":
        gap = row_mean(gap, mask).expand_as(gap)
    elif spec.level == "turn":
        gap = turn_reduce(gap, mask, batch.turn_ids, "mean")
    ratio = torch.exp(gap.clamp(-_LOG_CLAMP, _LOG_CLAMP))
    low = 0.0 if spec.low is None else spec.low
    high = torch.inf if spec.high is None else spec.high
    if spec.outside == "clamp":
        weights = ratio.clamp(low, high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0)
    if spec.normalize != "none" and scaled:
        scale = field_of(batch, "off_policy_scale", "off_policy.normalize (call prepare)")
        weights = weights * scale.to(weights.dtype)[:, None]
    return torch.where(mask, weights, 1), torch.where(mask, ratio, 0)


def off_policy_scale(spec: OffPolicy, batch: Batch, mask: Tensor) -> Tensor:
    """Returns 1 / the step's mean weight, float64, repeated to (B,).

    The mean is over trained tokens or, with `normalize = "sequence"`, over the means of the rows
    that have any.

    Raises:
        ValueError: the batch has no `old_logprobs`.
    """
    old = field_of(batch, "old_logprobs", "off_policy.normalize")
    weights, _ = off_policy_weights(spec, batch, old, mask, scaled=False)
    weights = weights.double()
    if spec.normalize == "token":
        mean = torch.where(mask, weights, 0).sum() / mask.sum().clamp(min=1)
    else:
        occupied = mask.any(1)
        mean = row_mean(weights, mask)[:, 0].sum() / occupied.sum().clamp(min=1)
    return (1 / torch.where(mean > 0, mean, 1)).expand(mask.shape[0]).clone()
