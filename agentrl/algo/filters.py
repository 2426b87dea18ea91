"""Which groups are worth training on: pure functions of a group's rewards. No torch.

Dynamic sampling (DAPO, 2503.14476) drops groups whose advantage is zero anyway and lets others
take their place, so that every step has the same number of informative groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The decision whether a group is trained on."""

    keep: bool
    """Whether the step learns from the group."""
    reason: str | None = None
    """Why the group was dropped, as the suffix of a metric: `group/dropped/<reason>`."""


def filter_zero_variance(rewards: Sequence[float], tolerance: float = 1e-6) -> GroupDecision:
    """Drop a group whose scored rewards are all equal within the tolerance.

    Rewards that are nan are not scored. A group needs two scored rewards to compare.
    """
    known = [reward for reward in rewards if not math.isnan(reward)]
    if not known:
        return GroupDecision(False, "unscored")
    if len(known) == 1:
        return GroupDecision(False, "single")
    if max(known) - min(known) > tolerance:
        return GroupDecision(True)
    return GroupDecision(False, "zero_variance")
