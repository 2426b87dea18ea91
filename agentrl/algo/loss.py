"""Computes the loss of one micro-batch: ratio, surrogate, trust masks, KL, entropy, distillation.

The trainer calls, once per optimizer step on everything that step learns from,

    prepare(objective, batch)

and then for each micro-batch, with gradient,

    output = policy_loss(objective, batch.select(rows), logprobs)
    output.loss.backward()

A loss is a sum of `term * weight` with weights computed over the whole step, so the losses and
gradients of micro-batches and ranks add up to the same totals however the step is split.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algo.advantages import base_logprobs, compute_advantages, value_targets
from agentrl.algo.aggregate import StepTotals, loss_weights, trained_mask, weights_of
from agentrl.algo.batch import Batch, field_of, wide
from agentrl.algo.kl import kl_estimate
from agentrl.algo.metrics import Metric
from agentrl.algo.ratio import anchor_logprobs, old_logprobs, policy_log_ratio
from agentrl.algo.segments import row_mean
from agentrl.algo.surrogates import surrogate_loss
from agentrl.algo.trust import (
    STEP_WIDE,
    keep_mask,
    kl_cov_tokens,
    off_policy_scale,
    off_policy_weights,
    step_mask,
)
from agentrl.algo.user_functions import call

if TYPE_CHECKING:
    from agentrl.algo.objective import Objective


@dataclass(frozen=True, slots=True)
class LossOutput:
    """One micro-batch's share of the step's loss and metrics."""

    loss: Tensor
    """0-d, with gradient. The step's loss is the sum over its micro-batches."""
    metrics: dict[str, Metric]
    """Sums and counts, which `reduce_metrics` turns into numbers for any set of micro-batches."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Name of each trust mask -> (B, T) bool, true where the mask keeps the token. All step-wide
    masks have the same entry, `Batch.step_mask`."""


def prepare(
    objective: Objective,
    batch: Batch,
    *,
    kl_coef: float | None = None,
    totals: StepTotals | None = None,
    selection_logprobs: Tensor | None = None,
) -> Batch:
    """Computes what depends on the whole step, stores it in the batch and returns the batch.

    Sets `advantages`, `weights` and, if the objective has a critic, `returns`, unless they are set
    already: the advantages of several mini-batches are computed once, over all rollouts. Also sets
    `distill_weights`, `step_mask`, `kl_cov_mask` and `off_policy_scale` if the objective uses them.

    Args:
        batch: everything that one optimizer step learns from.
        kl_coef: replaces `objective.kl.coef` for a KL in the reward.
        totals: counts of the whole step, if the batch is only a share of it (see `loss_weights`).
        selection_logprobs: (B, T) log-probs by which `clip_cov` and `kl_cov` select tokens;
            `old_logprobs` by default.

    Raises:
        ValueError: the batch lacks a field that the objective needs.
    """
    mask = trained_mask(objective, batch)
    if batch.advantages is None:
        batch.advantages = compute_advantages(objective, batch, kl_coef=kl_coef)
    if batch.weights is None:
        batch.weights = loss_weights(objective, batch, totals)
    if objective.needs_critic and batch.returns is None:
        batch.returns = value_targets(objective, batch, kl_coef=kl_coef)
    if objective.distill.where == "loss":
        batch.distill_weights = weights_of(objective.distill.aggregate, batch, mask, totals)
    if any(spec.kind in STEP_WIDE for spec in objective.trust):
        batch.step_mask = step_mask(objective, batch, mask, selection_logprobs)
    if objective.surrogate.kind == "kl_cov" and objective.loss is None:
        fraction = objective.surrogate.fraction
        batch.kl_cov_mask = kl_cov_tokens(fraction, batch, mask, selection_logprobs)
    if objective.off_policy.normalize != "none" and objective.off_policy.level != "none":
        batch.off_policy_scale = off_policy_scale(objective.off_policy, batch, mask)
    return batch


def policy_loss(
    objective: Objective,
    batch: Batch,
    logprobs: Tensor,
    entropy: Tensor | None = None,
    *,
    kl_coef: float | None = None,
) -> LossOutput:
    """Computes the micro-batch's share of the step's loss.

    Args:
        batch: rows selected from a batch that went through `prepare`.
        logprobs: (B, T) live log-probs of the sampled tokens, with gradient; read only where the
            mask is non-zero.
        entropy: (B, T) live entropy in nats, with gradient. An entropy bonus needs it; otherwise it
            is only measured.
        kl_coef: replaces `objective.kl.coef` for a KL in the loss (adaptive coefficient).

    Raises:
        ValueError: the batch lacks a field that the objective needs, or was not prepared.
        ConfigError: `objective.loss` does not return one loss per token.
    """
    mask = trained_mask(objective, batch)
    advantages = field_of(batch, "advantages", "policy_loss (compute_advantages sets it)")
    weights = field_of(batch, "weights", "policy_loss (loss_weights sets it)")
    logprobs = torch.where(mask, wide(logprobs), 0)
    advantages = torch.where(mask, advantages, 0).to(logprobs.dtype)
    weights = weights.to(logprobs.dtype)
    old = torch.where(mask, old_logprobs(batch, logprobs), 0)
    anchor = torch.where(mask, anchor_logprobs(objective.ratio, batch, logprobs), 0)
    metrics: dict[str, Metric] = {}

    token_log_ratio = logprobs - anchor
    log_ratio = policy_log_ratio(objective.ratio, token_log_ratio, logprobs, mask, batch.turn_ids)
    if objective.ratio.mean_advantage:
        advantages = torch.where(mask, row_mean(advantages, mask), 0)
    if objective.loss is None:
        loss = surrogate_loss(
            objective.surrogate, log_ratio, logprobs, advantages, mask, batch.kl_cov_mask
        )
    else:
        given = {"logprobs": logprobs, "ratio": torch.exp(log_ratio), "old_logprobs": old}
        given |= {"advantages": advantages, "entropy": entropy}
        loss = call("objective.loss", objective.loss, batch, mask, given)

    kept, kept_by = mask, {}
    for number, spec in enumerate(objective.trust):
        if spec.kind in STEP_WIDE:
            keep = field_of(batch, "step_mask", f"the {spec.kind} mask (prepare sets it)")
        else:
            keep = keep_mask(spec, batch, mask, old, logprobs, advantages)
        repeated = sum(other.kind == spec.kind for other in objective.trust[:number])
        name = f"{spec.kind}_{repeated + 1}" if repeated else spec.kind
        metrics[f"policy/masked_{name}"] = _mean(mask & ~keep, mask)
        kept_by[name] = keep.expand_as(mask)  # a mask of whole rows has shape (B, 1)
        kept = kept & keep
    if objective.off_policy.level != "none":
        factor, raw = off_policy_weights(objective.off_policy, batch, old, mask)
        loss = loss * factor
        metrics["policy/off_policy_ratio_max"] = _max(raw, mask)
        low, high = objective.off_policy.low, objective.off_policy.high
        outside = (raw < (low or 0)) | (raw > (torch.inf if high is None else high))
        metrics["policy/off_policy_outside"] = _mean(outside, mask)
    policy = (torch.where(kept, loss, 0) * weights).sum()
    total = policy
    metrics["loss/policy"] = _sum(policy)

    if objective.kl.where == "loss":
        base = torch.where(mask, base_logprobs(objective.kl.base, batch), 0).to(logprobs.dtype)
        importance = None
        if objective.kl.gradient == "unbiased":
            bound = objective.ratio.log_clamp
            importance = torch.exp((logprobs - old).clamp(-bound, bound))
        kl = torch.where(mask, kl_estimate(objective.kl, logprobs, base, importance), 0)
        coef = objective.kl.coef if kl_coef is None else kl_coef
        penalty = coef * (kl * weights).sum()
        total = total + penalty
        metrics["loss/kl"] = _sum(penalty)
        metrics["policy/kl_ref"] = _mean(kl, mask)
    elif objective.kl.where == "reward":
        base = torch.where(mask, base_logprobs(objective.kl.base, batch), 0).to(logprobs.dtype)
        measured = kl_estimate(objective.kl, logprobs.detach(), base)
        metrics["policy/kl_ref"] = _mean(measured, mask)
    if entropy is not None:
        metrics["policy/entropy"] = _mean(entropy, mask)
    if objective.entropy.coef != 0:
        if entropy is None:
            raise ValueError("entropy.coef needs the live entropy; pass entropy to policy_loss")
        bonus = -objective.entropy.coef * (torch.where(mask, wide(entropy), 0) * weights).sum()
        total = total + bonus
        metrics["loss/entropy"] = _sum(bonus)
    if objective.distill.where == "loss":
        component = _distill_component(objective, batch, logprobs, anchor, mask)
        total = total + component
        metrics["loss/distill"] = _sum(component)

    metrics |= _policy_metrics(objective, batch, mask, kept, logprobs, old, log_ratio, advantages)
    return LossOutput(total, metrics, kept_by)


def _distill_component(
    objective: Objective, batch: Batch, logprobs: Tensor, anchor: Tensor, mask: Tensor
) -> Tensor:
    """Returns coef x the weighted sum of -sg[log teacher - log pi] pi / anchor, 0-d, over the
    tokens whose probability has not fallen by more than `max_drop` below the anchor's."""
    spec = objective.distill
    teacher = field_of(batch, "teacher_logprobs", "distill.where = 'loss'").to(logprobs.dtype)
    weights = field_of(batch, "distill_weights", "distill.where = 'loss' (prepare sets it)")
    gap = (torch.where(mask, teacher, 0) - logprobs).detach()
    bound = objective.ratio.log_clamp
    loss = -gap * torch.exp((logprobs - anchor).clamp(-bound, bound))
    kept = mask
    if spec.max_drop is not None:
        kept = mask & (torch.exp(logprobs.detach()) - torch.exp(anchor) >= -spec.max_drop)
    return spec.coef * (torch.where(kept, loss, 0) * weights.to(loss.dtype)).sum()


def value_loss(objective: Objective, batch: Batch, values: Tensor) -> LossOutput:
    """Computes the critic's loss, with the same token weights as the policy's.

    Args:
        batch: rows selected from a prepared batch. Its `values` are the predictions before the
            update, its `returns` the targets.
        values: (B, T) live predictions, with gradient.

    Raises:
        ValueError: the batch has no `values`, or was not prepared.
    """
    spec = objective.critic
    mask = trained_mask(objective, batch)
    values = torch.where(mask, wide(values), 0)
    old = torch.where(mask, field_of(batch, "values", "value_loss"), 0).to(values.dtype)
    target = torch.where(mask, field_of(batch, "returns", "value_loss (prepare sets it)"), 0)
    target = target.to(values.dtype)
    weights = field_of(batch, "weights", "value_loss (loss_weights sets it)").to(values.dtype)

    def error(prediction: Tensor) -> Tensor:
        if spec.loss == "huber":
            # Scaled so that small errors cost their square, like mse.
            return 2 * torch.nn.functional.huber_loss(
                prediction, target, reduction="none", delta=spec.huber_delta
            )
        return (prediction - target).square()

    loss = error(values)
    clipped = torch.zeros_like(mask)
    if spec.value_clip is not None:
        near = old + (values - old).clamp(-spec.value_clip, spec.value_clip)
        near_loss = error(near)
        clipped = near_loss > loss
        loss = torch.maximum(loss, near_loss)
    total = spec.factor * (torch.where(mask, loss, 0) * weights).sum()
    metrics = {
        "loss/value": _sum(total),
        "critic/clip_fraction": _mean(clipped, mask),
        "critic/value_mean": _mean(values, mask),
        "critic/return_mean": _mean(target, mask),
        "critic/squared_error": _mean((values - target).square(), mask),
    }
    return LossOutput(total, metrics)


# metrics ------------------------------------------------------------------------------------------


def _policy_metrics(
    objective: Objective,
    batch: Batch,
    mask: Tensor,
    kept: Tensor,
    logprobs: Tensor,
    old: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
) -> dict[str, Metric]:
    with torch.no_grad():
        ratio = torch.exp(log_ratio)
        moved = logprobs - old
        x = moved.clamp(-20, 20)
        sampled = torch.where(mask, batch.rollout_logprobs, 0).to(logprobs.dtype)
        # Compares the policy before the update: later updates of a batch move the live one.
        gap = old - sampled
        importance = torch.where(mask, torch.exp(gap.clamp(-20, 20)), 0).double()
        metrics = {
            "policy/ratio_max": _max(ratio, mask),
            "policy/kl_old_new": _mean(torch.exp(x) - 1 - x, mask),
            "policy/update_logprob_diff_max": _max(moved.abs(), mask),
            "policy/update_logprob_diff_mean": _mean(moved.abs(), mask),
            "policy/rollout_train_logprob_diff_max": _max(gap.abs(), mask),
            "policy/rollout_train_logprob_diff_mean": _mean(gap.abs(), mask),
            "policy/ess": Metric(
                "ess", (importance.sum(), importance.square().sum(), mask.sum().double())
            ),
            "policy/trained_fraction": _mean(kept, mask),
            "advantage/mean": _mean(advantages, mask),
            "advantage/abs_mean": _mean(advantages.abs(), mask),
            "advantage/max": _max(advantages, mask),
            "advantage/min": Metric("min", (torch.where(mask, advantages, torch.inf).amin(),))
            if mask.numel()
            else Metric("min", (float("inf"),)),
            "advantage/zero_fraction": _mean(advantages == 0, mask),
        }
        bounds = _clip_bounds(objective)
        if bounds is not None:
            low, high = bounds
            # Count only where clipping removes the gradient: above if A > 0, below if A < 0.
            metrics["policy/clip_fraction_high"] = _mean((ratio > high) & (advantages > 0), mask)
            metrics["policy/clip_fraction_low"] = _mean((ratio < low) & (advantages < 0), mask)
        return metrics


def _clip_bounds(objective: Objective) -> tuple[float, float] | None:
    spec = objective.surrogate
    if spec.kind == "clip":
        return 1 - spec.low, 1 + spec.high
    if spec.kind == "cispo":
        return spec.low, spec.high
    return None


def _sum(value: Tensor) -> Metric:
    return Metric("sum", (value.detach().double(),))


def _mean(values: Tensor, mask: Tensor) -> Metric:
    masked = torch.where(mask, values.detach().double(), 0)
    return Metric("mean", (masked.sum(), mask.sum().double()))


def _max(values: Tensor, mask: Tensor) -> Metric:
    if mask.numel() == 0:
        return Metric("max", (float("-inf"),))
    return Metric("max", (torch.where(mask, values.detach(), -torch.inf).amax(),))
