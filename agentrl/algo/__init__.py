"""Computes the objective: stages as plain functions on tensors, and presets as data.

    rewards -> credit -> baseline -> scale -> whiten => A[B,T]                 (no gradient)
    log-probs -> ratio -> surrogate x trust masks x off-policy weight + KL -> sum(loss * W)

`Objective` and `PRESETS` are plain configuration: importing them does not load torch. Every name
here is imported from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.algo.advantages import advantage_metrics, compute_advantages, value_targets
    from agentrl.algo.aggregate import StepTotals, loss_weights, step_totals
    from agentrl.algo.batch import Batch
    from agentrl.algo.filters import GroupDecision, filter_zero_variance
    from agentrl.algo.kl import KLController
    from agentrl.algo.loss import LossOutput, policy_loss, prepare, value_loss
    from agentrl.algo.metrics import Metric, merge_metrics, reduce_metrics
    from agentrl.algo.objective import PRESETS, Objective

__all__ = [
    "PRESETS",
    "Batch",
    "GroupDecision",
    "KLController",
    "LossOutput",
    "Metric",
    "Objective",
    "StepTotals",
    "advantage_metrics",
    "compute_advantages",
    "filter_zero_variance",
    "loss_weights",
    "merge_metrics",
    "policy_loss",
    "prepare",
    "reduce_metrics",
    "step_totals",
    "value_loss",
    "value_targets",
]

_NAMES_OF_MODULE = {
    "advantages": ("advantage_metrics", "compute_advantages", "value_targets"),
    "aggregate": ("StepTotals", "loss_weights", "step_totals"),
    "batch": ("Batch",),
    "filters": ("GroupDecision", "filter_zero_variance"),
    "kl": ("KLController",),
    "loss": ("LossOutput", "policy_loss", "prepare", "value_loss"),
    "metrics": ("Metric", "merge_metrics", "reduce_metrics"),
    "objective": ("PRESETS", "Objective"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
