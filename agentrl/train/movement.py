"""Measures how far an update moves the weights, from the moments that AdamW keeps anyway."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.model import ranks

SAMPLE = 2**18
"""Number of evenly spaced entries of a tensor that are read, about: reading all would cost time."""


@torch.no_grad()
def relative_update(optimizer: torch.optim.Optimizer) -> float | None:
    """Estimates the norm of AdamW's last update over the norm of the weights, over all ranks.

    None if the optimizer keeps its moments in another form, or all weights are 0.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    shared = torch.zeros(2, dtype=torch.float64)
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for weight in group["params"]:
            state = optimizer.state.get(weight)
            if not state:
                continue  # the weight has had no gradient yet
            if "exp_avg" not in state:
                return None
            num_updates = float(state["step"])
            mean = _sampled(state["exp_avg"]) / (1 - beta1**num_updates)
            square = _sampled(state["exp_avg_sq"]) / (1 - beta2**num_updates)
            values = _sampled(weight)
            moved = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * values
            pair = torch.stack([moved.square().sum() * group["lr"] ** 2, values.square().sum()])
            scale = _local(weight).numel() / max(1, values.numel()) / _copies(weight)
            (shared if isinstance(weight, DTensor) else sums).add_(pair.double().cpu() * scale)
    # Each rank knows only its part of the sums over shards.
    parts: list[Any] = ranks.gather(shared.tolist())
    moved_by, size = (
        a + sum(b) for a, b in zip(sums.tolist(), zip(*parts, strict=True), strict=True)
    )
    return math.sqrt(moved_by / size) if size else None


def _copies(weight: Tensor) -> int:
    """Returns how many ranks hold the same part of a shared weight."""
    if not isinstance(weight, DTensor):
        return 1
    mesh, placements = weight.device_mesh, weight.placements
    parts = [mesh.size(dim) for dim, each in enumerate(placements) if not each.is_replicate()]
    return ranks.size() // math.prod(parts)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sampled(tensor: Tensor) -> Tensor:
    flat = _local(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].float()
