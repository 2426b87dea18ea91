"""Decides which groups are worth training on, by their rewards alone. No torch.

Dynamic sampling (DAPO, 2503.14476) drops groups whose advantage is zero anyway and lets others
take their place, so that every step has the same number of informative groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The decision to train on a group or to drop it."""

    keep: bool
    """True if the step learns from the group."""
    reason: str | None = None
    """Reason for dropping it, the suffix of the metric `group/dropped/<reason>`; None if kept."""


def filter_zero_variance(rewards: Sequence[float], tolerance: float = 1e-6) -> GroupDecision:
    """Drops a group whose scored rewards are all equal within the tolerance.

    A reward of nan is not scored. A group with fewer than two scored rewards is dropped too.
    """
    known = [reward for reward in rewards if not math.isnan(reward)]
    if not known:
        return GroupDecision(False, "unscored")
    if len(known) == 1:
        return GroupDecision(False, "single")
    if max(known) - min(known) > tolerance:
        return GroupDecision(True)
    return GroupDecision(False, "zero_variance")
