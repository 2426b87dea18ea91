"""`agentrl compare`: compares two evaluations of the same tasks, with the difference's interval."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from agentrl.errors import ConfigError, DataError
from agentrl.evaluate.episodes import read_evaluation
from agentrl.evaluate.statistics import PairedDifference, paired_difference
from agentrl.types import Trajectory


def compare(
    first: Sequence[Trajectory], second: Sequence[Trajectory]
) -> tuple[PairedDifference, dict[str, tuple[float, float]]]:
    """Compares the mean rewards of the tasks that both evaluations have.

    Returns:
        The difference, second less first, and both means of each task.

    Raises:
        DataError: they have fewer than two tasks in common.
    """
    left, right = mean_rewards(first), mean_rewards(second)
    shared = {task: (left[task], right[task]) for task in left if task in right}
    if len(shared) < 2:
        raise DataError(
            f"the evaluations have {len(shared)} tasks in common: a comparison needs the same "
            "tasks in both (eval.split, eval.num_tasks, env.config)"
        )
    return paired_difference(list(shared.values())), shared


def compare_command(
    first: Path, second: Path, *, as_json: bool, wanted: float | None = None
) -> int:
    """Runs `agentrl compare`: prints the difference and the tasks that changed most and, with
    `wanted`, the number of tasks needed to find a difference of that size.

    Raises:
        ConfigError: `wanted` is not a difference that can be found.
    """
    if wanted is not None and (wanted == 0 or not math.isfinite(wanted)):
        raise ConfigError(
            f"--difference {wanted:g}: no number of tasks finds that; give one like 0.02"
        )
    (_, one), (_, other) = read_evaluation(first), read_evaluation(second)
    difference, tasks = compare(one, other)
    needed = None if wanted is None else difference.tasks_for(wanted)
    if as_json:
        told = {} if needed is None else {"tasks_needed": needed}
        print(json.dumps(asdict(difference) | told | {"tasks": tasks}))
        return 0
    print(f"A = {first}, B = {second}: {difference.num_tasks} tasks in both")
    print(f"A {difference.first:.3f}, B {difference.second:.3f}")
    if all(a == b for a, b in tasks.values()):
        print("every task has the same mean reward in both: nothing says how much they vary")
        return 0
    print(f"B - A {difference}, p = {difference.p_value:.3g} (signs of the tasks' differences)")
    if difference.num_tasks < 8:
        print("fewer than eight tasks: only a difference in nearly all of them would be found")
    else:
        print(
            f"a difference of {difference.detectable:.3f} is found in four of five evaluations of "
            "this many tasks; one of half that size needs four times as many"
        )
    if needed is not None:
        print(f"one of {wanted:g} needs {needed:,} tasks like these")
    left_out = len(mean_rewards(one)) + len(mean_rewards(other)) - 2 * difference.num_tasks
    if left_out:
        print(f"{left_out} tasks that only one of them has are left out")
    for name, sign in (("B", 1), ("A", -1)):
        gains = sorted(
            ((sign * (b - a), task, a, b) for task, (a, b) in tasks.items()), reverse=True
        )
        shown = [f"{task} ({a:.2f}, {b:.2f})" for gain, task, a, b in gains[:5] if gain > 0]
        if shown:
            print(f"{name} is better at {', '.join(shown)}")
    return 0


def mean_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean reward of every task over its samples that have one."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.scored:
            rewards[trajectory.task_id].append(trajectory.reward)
    return {task: sum(values) / len(values) for task, values in sorted(rewards.items())}
