"""Reduces metrics exactly over micro-batches and ranks, by adding up sums and counts.

A micro-batch never contributes an average, because an average of averages depends on the split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["sum", "mean", "max", "min", "ess"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number as parts that can be merged.

    `sum`, `max` and `min` have one part. `mean` has (sum, count). `ess`, the effective sample size
    as a share of n, has (sum of w, sum of w squared, n) and the value (sum w)^2 / (n sum w^2).
    """

    kind: Kind
    """Decides how parts are merged and turned into a value."""
    parts: tuple[Tensor | float, ...]
    """Floats or 0-d tensors. Reading a tensor waits for its device, so only `value`, `to_floats`
    and merging a `max` or `min` do it."""

    def value(self) -> float | None:
        """Returns the number, or None if nothing was counted."""
        parts = [float(part) for part in self.parts]
        if self.kind == "mean":
            return parts[0] / parts[1] if parts[1] else None
        if self.kind == "ess":
            denominator = parts[2] * parts[1]
            return parts[0] ** 2 / denominator if denominator else None
        if self.kind in ("max", "min") and parts[0] in (float("inf"), float("-inf")):
            return None
        return parts[0]

    def merged(self, other: Metric) -> Metric:
        """Returns the metric of both contributions together.

        Raises:
            ValueError: they are of different kinds.
        """
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a {self.kind} metric with a {other.kind} metric")
        if self.kind in ("max", "min"):
            pick = max if self.kind == "max" else min
            return Metric(self.kind, (pick(float(self.parts[0]), float(other.parts[0])),))
        return Metric(
            self.kind, tuple(mine + its for mine, its in zip(self.parts, other.parts, strict=True))
        )

    def to_floats(self) -> Metric:
        """Returns the same metric with plain floats, to be sent to another process."""
        return Metric(self.kind, tuple(float(part) for part in self.parts))


def merge_metrics(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the contributions of micro-batches, or of ranks, name by name.

    Raises:
        ValueError: one name stands for metrics of different kinds.
    """
    merged: dict[str, Metric] = {}
    for contribution in metrics:
        for name, metric in contribution.items():
            merged[name] = merged[name].merged(metric) if name in merged else metric
    return merged


def reduce_metrics(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Returns name -> value over all contributions, without the names that counted nothing.

    Raises:
        ValueError: one name stands for metrics of different kinds.
    """
    values = {name: metric.value() for name, metric in merge_metrics(metrics).items()}
    return {name: value for name, value in values.items() if value is not None}
