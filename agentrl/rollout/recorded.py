"""Reads a run's groups as if they were played again (`run.replay`), and its best trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import DataError
from agentrl.images import IMAGES_FOLDER, ImageStore
from agentrl.model.text.processor import Processor, restore_pixels
from agentrl.rollout.log import read_trajectories, step_file
from agentrl.rollout.mixture import Mixture, Quotas
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.types import JSON, Group, Trajectory, environment_of


class RecordedMixture(Mixture):
    """Gives each step the groups that the same step of another run had, in the same order."""

    def __init__(self, run_dir: Path, num_steps: int, names: list[str]) -> None:
        """
        Args:
            names: of the environments; empty if the run has one without a name.

        Raises:
            DataError: the run recorded fewer steps.
        """
        super().__init__([], Quotas([], 0), None)
        self._run_dir = run_dir
        self._names = names
        self.processor: Processor | None = None
        """Of the model, where it takes images."""
        missing = [
            step
            for step in range(1, num_steps + 1)
            if not step_file(run_dir / "trajectories", step).exists()
        ]
        if missing:
            raise DataError(
                f"run.replay: {run_dir} has no trajectories of step {missing[0]}; set "
                f"run.num_steps = {missing[0] - 1} or name another run"
            )

    async def collect(
        self, step: int, on_progress: Callable[[int, int], None]
    ) -> dict[str, RolloutBatch]:
        """Reads the step's trajectories."""
        played = recorded_step(self._run_dir, step, self.processor)
        on_progress(len(played), len(played))
        return {name: recorded_batch(part) for name, part in self._by_environment(played).items()}

    def _by_environment(self, played: list[Trajectory]) -> dict[str, list[Trajectory]]:
        parts: dict[str, list[Trajectory]] = {}
        for trajectory in played:
            name = environment_of(trajectory.group_id) if self._names else ""
            parts.setdefault(name, []).append(trajectory)
        if unknown := sorted(parts.keys() - set(self._names or [""])):
            raise DataError(
                f"run.replay: {self._run_dir} has groups of {', '.join(unknown)}, which no [[env]] "
                "of this run file is named"
            )
        return parts

    def stalled_for_s(self) -> float:
        return 0.0

    def data_position(self) -> dict[str, JSON]:
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Does nothing: a replay depends on the step's number alone."""


def recorded_step(run_dir: Path, step: int, processor: Processor | None) -> list[Trajectory]:
    """Returns the trajectories of a step as they were when the run trained on them.

    Raises:
        ConfigError: see `restore_pixels`.
        DataError: a record is damaged, or an image is missing.
    """
    steps = range(step, step + 1)
    played = [t for _, t in read_trajectories(run_dir, steps=steps, images=True)]
    restore_pixels(played, ImageStore(run_dir / IMAGES_FOLDER), processor)
    return played


def recorded_batch(trajectories: list[Trajectory]) -> RolloutBatch:
    """Groups the trajectories of a step as they were when the run trained on them."""
    members: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.group_id, []).append(trajectory)
    batch = RolloutBatch([], trajectories)
    for group_id, group in members.items():
        group = sorted(group, key=lambda trajectory: trajectory.trajectory_id)
        if reason := group[0].info.get("dropped"):
            batch.dropped[str(reason)] += 1
        else:
            batch.groups.append(Group(group_id, group[0].task_id, group))
    return batch


def best_trajectories(run_dir: Path, count: int, lowest_reward: float) -> list[Trajectory]:
    """Returns the `count` trajectories with the highest rewards of every task, none below
    `lowest_reward`.

    Of equal ones, the one that was played first counts.

    Raises:
        DataError: the run recorded no such trajectory.
    """
    tasks: dict[tuple[str, str], list[Trajectory]] = {}
    num_seen = 0
    for _, trajectory in read_trajectories(run_dir):
        num_seen += 1
        if trajectory.trainable and trajectory.reward >= lowest_reward:
            best = tasks.setdefault((trajectory.env_id, trajectory.task_id), [])
            best.append(trajectory)
            best.sort(key=lambda each: -each.reward)
            del best[count:]
    if not tasks:
        raise DataError(
            f"{run_dir}: none of its {num_seen} trajectories has a reward of {lowest_reward:g} or "
            "more; lower --min-reward"
        )
    return [trajectory for best in tasks.values() for trajectory in best]
