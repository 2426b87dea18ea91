"""Computes the policy-gradient loss of each token, before weights and averaging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algo.segments import row_mean, row_sum

if TYPE_CHECKING:
    from agentrl.algo.loss_stages import ClipSurrogate, GmpoSurrogate, Surrogate, VespoSurrogate


def surrogate_loss(
    spec: Surrogate,
    log_ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kl_cov_mask: Tensor | None = None,
) -> Tensor:
    """Computes the loss of each token, to be minimised.

    Args:
        log_ratio: (B, T) log pi - log anchor at the objective's level, clamped, with gradient.
        logprobs: (B, T) live log-probs, with gradient.
        advantages: (B, T), without gradient.
        mask: (B, T) bool, the trained tokens; values elsewhere are finite but meaningless.
        kl_cov_mask: (B, T) bool, the tokens that pay KL-Cov's penalty.

    Returns:
        (B, T), with gradient.

    Raises:
        ValueError: `kl_cov` without `kl_cov_mask`.
    """
    if spec.kind == "clip":
        return clip_loss(spec, torch.exp(log_ratio), advantages)
    if spec.kind == "cispo":
        ratio = torch.exp(log_ratio).detach()
        if spec.outside == "clamp":
            weight = ratio.clamp(spec.low, spec.high)
        else:
            weight = torch.where((ratio > spec.low) & (ratio < spec.high), ratio, 0)
        return -weight * advantages * logprobs
    if spec.kind == "sapo":
        tau = _either(advantages > 0, spec.tau_positive, spec.tau_negative, log_ratio)
        return -(4 / tau) * torch.sigmoid(tau * (torch.exp(log_ratio) - 1)) * advantages
    if spec.kind == "logprob":
        return -advantages * logprobs
    if spec.kind == "ratio":
        return -torch.exp(log_ratio) * advantages
    if spec.kind == "gmpo":
        return gmpo_loss(spec, log_ratio, advantages, mask)
    if spec.kind == "vespo":
        return vespo_loss(spec, log_ratio, logprobs, advantages, mask)
    if spec.kind == "dro":
        return -(advantages * logprobs - 0.5 * spec.beta * log_ratio.square())
    if spec.kind == "kl_cov":
        if kl_cov_mask is None:
            raise ValueError("surrogate 'kl_cov' selects tokens over the whole step; call prepare")
        plain = -torch.exp(log_ratio) * advantages
        return torch.where(kl_cov_mask, plain + spec.coef * log_ratio.abs(), plain)
    return torch.zeros_like(logprobs)


def clip_loss(spec: ClipSurrogate, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Computes PPO's clip (1707.06347, eq. 7), with dual clip (1912.09729, eq. 8) if `cap` is set:
    (B, T)."""
    clipped = ratio.clamp(1 - spec.low, 1 + spec.high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if spec.cap is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -spec.cap * advantages), loss)
    return loss


def gmpo_loss(spec: GmpoSurrogate, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Computes -A exp(row mean of log-ratios, clipped above if A >= 0 and below otherwise): (B, T)
    (2507.20673, eq. 4)."""
    sign = _either(advantages < 0, -1.0, 1.0, log_ratio)
    clipped = log_ratio.clamp(-spec.low, spec.high)
    one_sided = sign * torch.minimum(sign * log_ratio, sign * clipped)
    return -advantages * torch.exp(row_mean(one_sided, mask))


def vespo_loss(
    spec: VespoSurrogate, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """Computes -sg[phi(w)] A log pi: (B, T), w the product of the row's ratios, clamped to
    [1e-8, e^20]."""
    log_w = row_sum(log_ratio.detach(), mask).clamp(-18.420680743952367, 20.0)
    positive = advantages >= 0
    k = _either(positive, spec.k_positive, spec.k_negative, log_ratio)
    lam = _either(positive, spec.lam_positive, spec.lam_negative, log_ratio)
    log_phi = lam + k * log_w - lam * torch.exp(log_w)
    return -torch.exp(log_phi) * advantages * logprobs


def _either(condition: Tensor, value: float, otherwise: float, like: Tensor) -> Tensor:
    """Returns `value` where the condition holds, else `otherwise`, in the dtype of `like`:
    torch.where of two Python numbers would round to float32."""
    return torch.full_like(like, otherwise).masked_fill(condition, value)
