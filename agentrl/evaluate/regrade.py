"""`agentrl regrade`: grade an evaluation's episodes again, without playing them again."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl import runtime
from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError
from agentrl.evaluate.episodes import CONFIG_FILE, groups_of, read_evaluation
from agentrl.evaluate.measure import summarise
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.rollout.setup import scorer_of
from agentrl.types import JSON, Trajectory

RESULT_FILE = "regrade.json"


@dataclass(slots=True, frozen=True)
class Verdict:
    """The rewards of one episode by two gradings; None where one gave no reward."""

    trajectory_id: str
    task_id: str
    before: float | None
    after: float | None
    error: str | None
    """Why the new grading gave none."""


def regrade(
    config: RunConfig, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], list[Verdict]]:
    """Grades episodes with the reward functions of a configuration.

    Returns:
        The episodes with their new rewards, and both verdicts of each. The arguments stay as they
        are.

    Raises:
        ConfigError: the configuration names no reward functions, or adds them to the environment's
            reward, which was not kept apart.
    """
    score = scorer_of(config)
    if score is None:
        raise ConfigError(
            "name what to grade with: --reward.functions NAME,...; an environment's own rewards "
            "come from playing"
        )
    if config.reward.add_to_environment:
        raise ConfigError("reward.add_to_environment: the environment's part was not kept apart")
    graded = [copy.deepcopy(trajectory) for trajectory in trajectories]
    for trajectory in graded:
        if trajectory.error is not None and trajectory.error.stage == "grade":
            trajectory.error = None
        trajectory.reward = trajectory.metrics.get("reward", trajectory.reward)

    async def score_all() -> None:
        await asyncio.gather(*(score(group.trajectories) for group in groups_of(graded)))

    runtime.run(score_all())
    verdicts = [
        Verdict(
            old.trajectory_id,
            old.task_id,
            None if old.error else old.reward,
            None if new.error else new.reward,
            new.error.message if new.error else None,
        )
        for old, new in zip(trajectories, graded, strict=True)
    ]
    return graded, verdicts


def regrade_command(folder: Path, overrides: list[str], *, as_json: bool) -> int:
    """Runs `agentrl regrade`: grades, writes both averages and the changed verdicts, and prints
    them."""
    before, trajectories = read_evaluation(folder, images=True)
    config = load_config(folder / CONFIG_FILE, overrides)
    graded, verdicts = regrade(config, trajectories)
    changed = [each for each in verdicts if each.before != each.after]
    result: dict[str, JSON] = {
        "functions": list(config.reward.functions),
        "num_samples": len(verdicts),
        "before": _average(before, trajectories),
        "after": _average(config, graded),
        "changed": [asdict(each) for each in changed],
    }
    (folder / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        print(json.dumps(result))
        return 0
    for each in changed:
        why = f"  ({each.error})" if each.error else ""
        print(f"{each.trajectory_id}  {each.task_id}: {each.before} -> {each.after}{why}")
    print(
        f"{len(changed)} of {len(verdicts)} verdicts changed; average {result['before']} -> "
        f"{result['after']} ({folder / RESULT_FILE})"
    )
    return 0


def _average(config: RunConfig, trajectories: Sequence[Trajectory]) -> float | None:
    statistics = summarise(RolloutBatch(groups_of(trajectories), list(trajectories)), config)
    return statistics.average.value if statistics else None
