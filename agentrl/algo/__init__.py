"""The objective: stages as plain functions on tensors, and presets as data.

    rewards -> credit -> baseline -> scale -> whiten => A[B,T]                 (no gradient)
    log-probs -> ratio -> surrogate x trust masks x off-policy weight + KL -> sum(loss * W)

`Objective` and `PRESETS` are plain configuration; importing them loads no torch. Every other name
here is imported from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.algo.advantages import (
        advantage_metrics as advantage_metrics,
    )
    from agentrl.algo.advantages import (
        compute_advantages as compute_advantages,
    )
    from agentrl.algo.advantages import (
        value_targets as value_targets,
    )
    from agentrl.algo.aggregate import StepTotals as StepTotals
    from agentrl.algo.aggregate import loss_weights as loss_weights
    from agentrl.algo.aggregate import step_totals as step_totals
    from agentrl.algo.batch import Batch as Batch
    from agentrl.algo.explain import describe as describe
    from agentrl.algo.filters import GroupDecision as GroupDecision
    from agentrl.algo.filters import filter_mean_range as filter_mean_range
    from agentrl.algo.filters import filter_zero_variance as filter_zero_variance
    from agentrl.algo.kl import KLController as KLController
    from agentrl.algo.loss import LossOutput as LossOutput
    from agentrl.algo.loss import policy_loss as policy_loss
    from agentrl.algo.loss import prepare as prepare
    from agentrl.algo.loss import value_loss as value_loss
    from agentrl.algo.metrics import Metric as Metric
    from agentrl.algo.metrics import merge_metrics as merge_metrics
    from agentrl.algo.metrics import reduce_metrics as reduce_metrics
    from agentrl.algo.objective import PRESETS as PRESETS
    from agentrl.algo.objective import Objective as Objective

_MODULE_OF = {
    "PRESETS": "objective",
    "Objective": "objective",
    "Batch": "batch",
    "GroupDecision": "filters",
    "filter_mean_range": "filters",
    "filter_zero_variance": "filters",
    "KLController": "kl",
    "LossOutput": "loss",
    "Metric": "metrics",
    "StepTotals": "aggregate",
    "advantage_metrics": "advantages",
    "compute_advantages": "advantages",
    "describe": "explain",
    "loss_weights": "aggregate",
    "merge_metrics": "metrics",
    "policy_loss": "loss",
    "prepare": "loss",
    "reduce_metrics": "metrics",
    "step_totals": "aggregate",
    "value_loss": "loss",
    "value_targets": "advantages",
}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULE_OF]
