"""Metrics that reduce exactly over micro-batches and ranks, because they stay sums until the end.

A micro-batch contributes parts, never an average: averages of averages depend on the split.
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
    """One number in parts.

    `sum`, `max` and `min` hold one part. `mean` holds (sum, count). `ess`, the effective sample
    size as a share of n, holds (sum of w, sum of w squared, n) and reads (sum w)^2 / (n sum w^2).
    Parts are floats or 0-d tensors; tensors are read (and a device waited for) only by `value`.
    """

    kind: Kind
    """How parts are added up and read."""
    parts: tuple[Tensor | float, ...]
    """As many numbers as the kind has."""

    def value(self) -> float | None:
        """The number; None where it is undefined (nothing was counted)."""
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
        """Both together.

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
        """The same metric with plain floats, to be sent to another process."""
        return Metric(self.kind, tuple(float(part) for part in self.parts))


def merge_metrics(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Add up the contributions of micro-batches, or of ranks, name by name."""
    merged: dict[str, Metric] = {}
    for contribution in metrics:
        for name, metric in contribution.items():
            merged[name] = merged[name].merged(metric) if name in merged else metric
    return merged


def reduce_metrics(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """The values of all contributions together; names without any count are left out."""
    values = {name: metric.value() for name, metric in merge_metrics(metrics).items()}
    return {name: value for name, value in values.items() if value is not None}
