"""Estimates the divergence of the policy from a base policy, and adapts its coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from agentrl.algo.loss_stages import Kl


def kl_estimate(
    spec: Kl, logprobs: Tensor, base_logprobs: Tensor, importance_ratio: Tensor | None = None
) -> Tensor:
    """Estimates KL(policy, base) per token, with the gradient that `spec.gradient` selects.

    Source: Schulman, "Approximating KL divergence" (k1, k2, k3). The value's own gradient is that
    of KL(policy, base) for k2 and that of KL(base, policy) for k3; `straight_through`, `unbiased`
    (DeepSeek-V3.2) and `score` give any value the gradient of KL(policy, base).

    Args:
        logprobs: the policy's, of any shape, with gradient in the loss.
        base_logprobs: of the same shape, without gradient.
        importance_ratio: of the same shape, live pi / pi_old; required by `unbiased`.

    Returns:
        The estimate in nats, of the same shape.

    Raises:
        ValueError: `unbiased` without `importance_ratio`.
    """
    value = _weighted_value(spec, logprobs, base_logprobs, importance_ratio)
    if spec.gradient == "straight_through":
        # Not clamped, so that tokens far from the base are pulled back hardest.
        k2 = 0.5 * (logprobs - base_logprobs).square()
        return k2 - k2.detach() + value.detach()
    return value


def _weighted_value(
    spec: Kl, logprobs: Tensor, base_logprobs: Tensor, importance_ratio: Tensor | None
) -> Tensor:
    x = logprobs - base_logprobs
    if spec.clamp_in is not None:
        x = x.clamp(-spec.clamp_in, spec.clamp_in)
    if spec.kind == "k1":
        value = x
    elif spec.kind == "abs":
        value = x.abs()
    elif spec.kind == "k2":
        value = 0.5 * x.square()
    elif spec.kind == "half_chi2":
        value = 0.5 * (torch.exp(x) - 1).square()
    else:
        value = torch.exp(-x) - 1 + x
    if spec.gradient == "unbiased":
        if importance_ratio is None:
            raise ValueError("kl.gradient = 'unbiased' needs the live ratio to the old policy")
        value = importance_ratio * value
    if spec.gradient == "score":
        value = torch.exp(logprobs - logprobs.detach()) * value
    bound = 10.0 if spec.kind == "low_var_kl" and spec.clamp_out is None else spec.clamp_out
    if bound is not None:
        value = value.clamp(-bound, bound)
    return value


@dataclass(frozen=True, slots=True)
class KLController:
    """Adapts the KL coefficient to a target. Frozen: `updated` returns a new controller.

    Ziegler et al. (1909.08593), section 2.2: the coefficient is multiplied by
    1 + clip(kl / target - 1, -0.2, 0.2) * trajectories / horizon.
    """

    coef: float
    """The coefficient to use now."""
    target: float | None = None
    """Mean KL to approach, in nats per token; None keeps the coefficient fixed."""
    horizon: int = 10_000
    """Number of trajectories over which the coefficient adapts."""

    @staticmethod
    def of(spec: Kl) -> KLController:
        """Returns a controller with the settings of `objective.kl`."""
        return KLController(spec.coef, spec.target, spec.horizon)

    def updated(self, mean_kl: float, num_trajectories: int) -> KLController:
        """Returns the controller after a step of `num_trajectories` with a mean KL of `mean_kl`
        nats per token."""
        if self.target is None:
            return self
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        factor = 1 + error * num_trajectories / self.horizon
        return KLController(self.coef * factor, self.target, self.horizon)

    def state_dict(self) -> dict[str, float]:
        """Returns the state that a checkpoint keeps."""
        return {"coef": self.coef}

    def loaded(self, state: dict[str, float]) -> KLController:
        """Returns this controller with the coefficient of a checkpoint's state."""
        return KLController(float(state["coef"]), self.target, self.horizon)
