"""Computes log-ratios of tokens, turns or sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algo.batch import Batch, field_of
from agentrl.algo.segments import row_mean, turn_reduce

if TYPE_CHECKING:
    from agentrl.algo.loss_stages import Ratio


def old_logprobs(batch: Batch, logprobs: Tensor) -> Tensor:
    """Returns the trainer's log-probs before the update (B, T), without gradient. On the first use
    of a batch they are the live ones, so the ratio is 1."""
    if batch.old_logprobs is None:
        return logprobs.detach()
    return batch.old_logprobs.to(logprobs.dtype)


def anchor_logprobs(spec: Ratio, batch: Batch, logprobs: Tensor) -> Tensor:
    """Returns the log of the ratio's denominator (B, T), without gradient.

    Raises:
        ValueError: `anchor = "loglinear"` and the batch has no policy versions.
    """
    if spec.anchor == "rollout":
        return batch.rollout_logprobs.to(logprobs.dtype)
    if spec.anchor == "loglinear":
        return loglinear_logprobs(batch, logprobs)
    return old_logprobs(batch, logprobs)


def loglinear_logprobs(batch: Batch, logprobs: Tensor) -> Tensor:
    """Estimates the log-probs (B, T) of the policy one update before the live one, by interpolation
    in log space. Without gradient.

    With the live policy at version v + 1, the estimated one at v and the sampler at b:
    alpha = (v - b) / (v + 1 - b), log pi_old ~ log mu + alpha (log pi - log mu). Tokens sampled by
    the live version, or by an unknown one, have alpha 0, hence the sampler's own log-prob.

    Raises:
        ValueError: the batch has no `policy_versions` or no `current_version`.
    """
    versions = field_of(batch, "policy_versions", "ratio.anchor = 'loglinear'")
    if batch.current_version is None:
        raise ValueError("ratio.anchor = 'loglinear' needs Batch.current_version")
    gap = (batch.current_version - versions).to(logprobs.dtype)
    alpha = torch.where((gap > 0) & (versions >= 0), (gap - 1) / gap.clamp(min=1), 0)
    sampled = batch.rollout_logprobs.to(logprobs.dtype)
    return sampled + alpha * (logprobs.detach() - sampled)


def policy_log_ratio(
    spec: Ratio, token_log_ratio: Tensor, logprobs: Tensor, mask: Tensor, turn_ids: Tensor | None
) -> Tensor:
    """Computes the clamped log-ratio of the surrogate at `spec.level`.

    Args:
        token_log_ratio: (B, T) log pi - log anchor, with gradient.
        logprobs: (B, T) live log-probs, with gradient.
        mask: (B, T) bool, the trained tokens.
        turn_ids: (B, T) int64, for level `turn`. None: contiguous runs of the mask are the turns.

    Returns:
        (B, T), 0 where the mask is 0. At level `turn` or `sequence` it is the mean over the turn's
        or row's trained tokens (GSPO, 2507.18071, eq. 7; with `gradient = "token"` eq. 14).
    """
    log_ratio = torch.where(mask, token_log_ratio, 0)
    if spec.level == "sequence":
        log_ratio = torch.where(mask, row_mean(log_ratio, mask), 0)
    elif spec.level == "turn":
        log_ratio = turn_reduce(log_ratio, mask, turn_ids, "mean")
    if spec.level != "token" and spec.gradient == "token":
        own = torch.where(mask, logprobs - logprobs.detach(), 0)
        log_ratio = log_ratio.detach() + own
    return log_ratio.clamp(-spec.log_clamp, spec.log_clamp)
