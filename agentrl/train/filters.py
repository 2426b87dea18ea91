"""Chooses the groups that a step trains on: applies the filters of `rollout.keep` in order."""

from __future__ import annotations

import re

from agentrl import user_modules
from agentrl.config import RolloutSection
from agentrl.errors import ConfigError, TrainingError
from agentrl.rollout.scheduler import KeepGroup
from agentrl.train.batch import zero_variance
from agentrl.types import Group


def filters_of(rollout: RolloutSection) -> KeepGroup | None:
    """Returns all filters of a run as one function; None if there are none.

    The first filter that drops a group gives the reason.

    Raises:
        ConfigError: `rollout.keep` names something that cannot be imported or is not a function.
    """
    filters = [
        zero_variance if name == "zero_variance" else _user_filter(name) for name in rollout.keep
    ]

    def first_reason(group: Group) -> str | None:
        return next((reason for keep in filters if (reason := keep(group)) is not None), None)

    return first_reason if filters else None


def _user_filter(name: str) -> KeepGroup:
    function = user_modules.load(name)
    if not callable(function):
        raise ConfigError(f"rollout.keep: {name} is not a function")

    def reason_of(group: Group) -> str | None:
        answer = function(group)
        keep, reason = answer if isinstance(answer, tuple) else (answer, name.rpartition(":")[2])
        if not isinstance(keep, bool) or not re.fullmatch(r"[\w.-]+", str(reason)):
            raise TrainingError(
                f"rollout.keep: {name} returned {answer!r}; return True or False, or a pair of one "
                "and a reason in one word, such as (False, 'too_long')"
            )
        return None if keep else str(reason)

    return reason_of
