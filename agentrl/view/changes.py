"""Finds where a curve fell for good: the change point of a noisy series."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SURE = 5.0
"""Standard errors that a fall must have. Every step of every run is asked, so few are too many."""
LEAST = 0.25
"""Share of the level before it that a fall must have."""


@dataclass(slots=True, frozen=True)
class Change:
    step: int
    """The first on the new level."""
    before: float
    after: float


def fall(
    points: Sequence[tuple[int, float]], *, noise: Sequence[float] = (), count: float = 1.0
) -> Change | None:
    """Returns the clearest fall that the curve has not recovered from, if there is any.

    Neighbouring windows of several lengths are compared at every step, so that a fall within one
    step is found, and one over a hundred.

    Args:
        points: (step, value) in their order.
        noise: standard deviation within each point; its error counts where the curve itself is too
            short to tell how noisy it is.
        count: values that a point is the mean of.
    """
    values = [value for _, value in points]
    best: tuple[float, int, float, float] | None = None
    for length in sorted({10, len(values) // 4, len(values) // 2}):
        for place in range(1, len(values)) if length else ():
            left = values[max(0, place - length) : place]
            right = values[place : place + length]
            before, after = statistics.fmean(left), statistics.fmean(right)
            drop = before - after
            if drop < LEAST * max(abs(before), abs(after)) or drop <= 0:
                continue
            within = list(noise[max(0, place - length) : place + length])
            error = _deviation(left, right, within, count)
            sure = drop / (error * math.sqrt(1 / len(left) + 1 / len(right)) + 1e-9)
            end = statistics.fmean(values[-min(length, len(values) - place) :])
            if sure >= SURE and end <= after + 0.5 * drop and (best is None or sure > best[0]):
                best = sure, place, before, after
    if best is None:
        return _slow_fall(points, noise, count)
    _, place, before, after = best
    return Change(points[place][0], before, after)


def _slow_fall(
    points: Sequence[tuple[int, float]], noise: Sequence[float], count: float
) -> Change | None:
    """Returns a fall that is spread over so many steps that no two neighbouring windows show it:
    from the best quarter of the curve to its last one."""
    values = [value for _, value in points]
    length = len(values) // 4
    if not length or not noise:
        return None
    means = [statistics.fmean(values[i : i + length]) for i in range(len(values) - length + 1)]
    start = max(range(len(means) - length), key=means.__getitem__)
    before, after = means[start], means[-1]
    left, right = values[start : start + length], values[-length:]
    within = [*noise[start : start + length], *noise[-length:]]
    error = _deviation(left, right, within, count) * math.sqrt(2 / length)
    drop = before - after
    if drop <= 0 or drop < max(LEAST * abs(before), SURE * error):
        return None
    middle = (before + after) / 2
    place = next(i for i in range(start + length, len(values)) if values[i] <= middle)
    return Change(points[place][0], before, after)


def _deviation(
    left: Sequence[float], right: Sequence[float], within: Sequence[float], count: float
) -> float:
    """Returns how far points scatter around their level: the curve's own scatter, but at least the
    error of the points' means, doubled because answers to one task are alike."""
    squares = [(value - statistics.fmean(part)) ** 2 for part in (left, right) for value in part]
    of_curve = math.sqrt(sum(squares) / max(1, len(squares) - 2))
    of_means = 2 * statistics.fmean(within) / math.sqrt(count) if within else 0.0
    if not within and len(squares) < 8:
        return math.inf
    return max(of_curve, of_means)
