"""Evaluations side by side: the figures of each, and every task's samples in several of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from agentrl.errors import DataError
from agentrl.evaluate.episodes import value_at
from agentrl.rollout.log import TrajectoryEntry
from agentrl.view.curves import number
from agentrl.view.groups import grouped
from agentrl.view.runs import RunFiles

PAGE = 100
"""Tasks in an answer."""


def list_evaluations(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Returns the runs that hold an evaluation's result, each with its first figure. The oldest
    come first, which is also the order within a suite.

    Raises:
        DataError: a result cannot be read.
    """
    found = [_described(run) for run in reversed(runs) if (run.path / "eval.json").exists()]
    places = [tuple(each[key] for key in ("suite", "model", "benchmark")) for each in found]
    for each, place in zip(found, places, strict=True):
        if places.count(place) > 1:  # a table has one cell for a model and a benchmark
            each["model"] = each["path"]
    return found


def _described(run: RunFiles) -> dict[str, Any]:
    file = run.path / "eval.json"
    try:
        result = json.loads(file.read_bytes())
        figure = next((name for name in result if name.startswith("avg@")), "avg@k")
        estimate = result.get(figure) or {}  # none where every sample failed
        counts = {name: int(result[name]) for name in ("num_tasks", "num_failed")}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is damaged: {error!r}") from None
    env, split = (value_at(run.config(), *key) for key in (("env", "id"), ("eval", "split")))
    model, benchmark = run.cell or (run.path.name, f"{env}, {split}")
    return {
        "id": run.id,
        "path": str(run.path),
        "suite": run.path.parent.parent.name if run.cell else "",
        "model": model,
        "benchmark": benchmark,
        "figure": figure,
        **{name: number(estimate.get(name)) for name in ("value", "low", "high")},
        **counts,
    }


Row = list[list[TrajectoryEntry]]
"""The samples of one task in each evaluation."""

SHOWN: dict[str, Callable[[list[float | None]], bool]] = {
    "all": lambda shares: True,
    "differ": lambda shares: len({share for share in shares if share is not None}) > 1,
    "first": lambda shares: _right(shares[0]) and not _right(shares[-1]),
    "last": lambda shares: _right(shares[-1]) and not _right(shares[0]),
    "all_solve": lambda shares: all(share == 1.0 for share in shares),
    "none_solves": lambda shares: all(share == 0.0 for share in shares),
    "failed": lambda shares: None in shares,
}
"""What may be asked of a task, by the shares of its samples that solve it; None where no sample has
a reward. Right is who solves it in more than half of its samples."""


def matrix(runs: Sequence[RunFiles], show: str, offset: int) -> dict[str, Any]:
    """Returns a page of the tasks of several evaluations, with every sample of each.

    Raises:
        DataError: the filter does not exist, or no evaluation is named.
    """
    if show not in SHOWN or not runs:
        raise DataError(f"no such filter, or no evaluation: {show}")
    tasks: dict[str, Row] = {}
    for place, run in enumerate(runs):
        for group in grouped(run):
            row = tasks.setdefault(group.entries[0].task_id, [[] for _ in runs])
            row[place] += group.entries
    thresholds = [_threshold(run) for run in runs]
    found = []
    for task, row in tasks.items():
        if not all(row):
            continue  # only some of them played it
        shares = [_share(cell, least) for cell, least in zip(row, thresholds, strict=True)]
        if SHOWN[show](shares):
            found.append((task, row, shares))
    return {
        "num_tasks": len(tasks),
        "num_shared": sum(all(row) for row in tasks.values()),
        "num_found": len(found),
        "tasks": [
            {
                "task_id": task,
                "shares": shares,
                "samples": [
                    [_sample(each, least) for each in sorted(cell, key=attrgetter("trajectory_id"))]
                    for cell, least in zip(row, thresholds, strict=True)
                ],
            }
            for task, row, shares in found[offset : offset + PAGE]
        ],
    }


def _sample(entry: TrajectoryEntry, threshold: float) -> dict[str, Any]:
    reward = number(entry.reward)
    return {
        "step": entry.step,
        "offset": entry.offset,
        "reward": reward,
        "error": entry.error,
        "solved": reward is not None and reward >= threshold,
    }


def _share(cell: Sequence[TrajectoryEntry], threshold: float) -> float | None:
    rewards = [value for entry in cell if (value := number(entry.reward)) is not None]
    return sum(value >= threshold for value in rewards) / len(rewards) if rewards else None


def _right(share: float | None) -> bool:
    return share is not None and share > 0.5


def _threshold(run: RunFiles) -> float:
    told = value_at(run.config(), "eval", "success_threshold")
    return float(told) if isinstance(told, int | float) else 1.0
