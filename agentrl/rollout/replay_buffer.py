"""Groups that are trained on once more, some steps after they were played: `rollout.replay_share`.

The content follows from the steps' groups alone. A checkpoint has only the ids of the groups;
their trajectories are in the run's log.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config import RolloutSection
from agentrl.errors import DataError
from agentrl.model.text.processor import Processor
from agentrl.rollout.recorded import recorded_batch, recorded_step
from agentrl.types import JSON, Group


class ReplayBuffer:
    """Keeps groups of the last steps, and returns those whose rewards differ most."""

    def __init__(self, rollout: RolloutSection) -> None:
        self._per_step = rollout.replay_share * rollout.groups_per_step
        self._max_age = rollout.replay_max_age
        self._held: list[tuple[int, Group]] = []
        """With the step that trained on each first, in the order of those."""

    def take(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """Returns the groups that a step trains on again, in the order in which they were played,
        and metrics.

        A group is returned once, and dropped when it is too old."""
        self._held = [each for each in self._held if step - each[0] <= self._max_age]
        count = int(self._per_step * step) - int(self._per_step * (step - 1))
        # Of equal ones the newest: its policy is nearest to the present one.
        order = sorted(range(len(self._held)), key=lambda i: (_variance(self._held[i][1]), i))
        chosen = sorted(order[len(order) - min(count, len(order)) :])
        taken = [self._held[i] for i in chosen]
        self._held = [each for i, each in enumerate(self._held) if i not in chosen]
        metrics: dict[str, float] = {"replay/groups": len(taken), "replay/held": len(self._held)}
        if taken:
            metrics["replay/age_mean"] = float(np.mean([step - first for first, _ in taken]))
        return [group for _, group in taken], metrics

    def add(self, step: int, groups: Iterable[Group]) -> None:
        """Keeps the groups that a step trained on for the first time, if their rewards differ."""
        self._held += [(step, group) for group in groups if _variance(group) > 0]

    def state(self) -> list[JSON]:
        """Returns the state for a checkpoint, which `restore` takes."""
        return [[step, group.group_id] for step, group in self._held]

    def restore(
        self, saved: Iterable[Any], run_dir: Path, processor: Processor | None = None
    ) -> None:
        """Restores the groups of a saved state from the run's log.

        Args:
            processor: of the model, where it takes images.

        Raises:
            ConfigError: the processor differs from the run's.
            DataError: the run's log lacks a group or an image.
        """
        held = [(int(step), str(group_id)) for step, group_id in saved]
        groups: dict[tuple[int, str], Group] = {}
        for step in sorted({step for step, _ in held}):
            played = recorded_step(run_dir, step, processor)
            groups |= {(step, group.group_id): group for group in recorded_batch(played).groups}
        if missing := [at for at in held if at not in groups]:
            raise DataError(
                f"{run_dir / 'trajectories'} has no group {missing[0][1]} of step {missing[0][0]}, "
                "which the checkpoint is to train on again; restore the files, or set "
                "rollout.replay_share = 0 and run.resume = 'force'"
            )
        self._held = [(at[0], groups[at]) for at in held]


def _variance(group: Group) -> float:
    rewards = [t.reward for t in group.trajectories if t.trainable]
    return float(np.var(rewards)) if rewards else 0.0
