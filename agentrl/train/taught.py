"""Compares two checkpoints on the same tasks and seeds, to show what the steps between taught.

Both policies draw with the same random numbers, so what differs between the two is the weights.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from statistics import fmean
from typing import Any

from agentrl.config import RunConfig
from agentrl.env.client import connect
from agentrl.errors import DataError
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import TaskSource
from agentrl.rollout.setup import make_scheduler, scorer_of, split_size
from agentrl.types import Group, Trajectory


async def played_again(
    config: RunConfig, policy: TokenPolicy, name: str, groups: Sequence[Group], samples: int
) -> list[Trajectory]:
    """Plays the tasks of an environment's groups again, `samples` times each.

    Raises:
        DataError: a sampler chose the tasks, by rewards that are not known any more.
    """
    if config.rollout.sampler != "uniform":
        raise DataError(
            f"rollout.sampler = {config.rollout.sampler!r} chose the tasks of this step by rewards "
            "of that time, so they cannot be found again"
        )
    async with aclosing(connect(config.env.url or None, token=config.env.token)) as env:
        size = await split_size(env, config, config.env.split)
        source = TaskSource(config.env.split, size, config.run.seed)
        scheduler = make_scheduler(
            config, policy, env, source, group_size=1, score=scorer_of(config), name=name
        )
        return [
            trajectory
            for sample in range(samples)
            for trajectory in await scheduler.replay(groups, policy, id_prefix=f"taught{sample}-")
        ]


def behaviours(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns how a policy behaved, by name: shares of its trajectories, and means over them."""
    found: dict[str, float] = defaultdict(float)
    share = 1 / max(1, len(trajectories))
    for each in trajectories:
        first = _first_turn(each)
        found[f"first turn: {first}"] += share
        found["reward"] += share * (each.reward if each.scored else 0.0)
        found["tokens sampled"] += share * each.num_sampled_tokens
        found["turns"] += share * len(each.turns)
        found["cut by a limit"] += share * each.truncated
        found["failed"] += share * (each.error is not None)
    return dict(found)


def _first_turn(trajectory: Trajectory) -> str:
    if not trajectory.turns:
        return "none"
    turn = trajectory.turns[0]
    if turn.parse_status == "malformed":
        return "a call that cannot be read"
    calls: Any = trajectory.branches[turn.branch].messages[turn.message].get("tool_calls") or []
    return f"calls {calls[0]['function']['name']}" if calls else "answers in text"


def moved(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> dict[str, Any]:
    """Compares two plays of the same tasks, trajectory by trajectory, as JSON."""
    one, other = behaviours(before), behaviours(after)
    rows = [(name, one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}]
    pairs = list(zip(before, after, strict=True))
    changed = fmean(a.messages != b.messages for a, b in pairs) if pairs else 0.0
    tasks: Mapping[str, Counter[str]] = {"gained": Counter(), "lost": Counter()}
    for a, b in pairs:
        if a.scored and b.scored and a.reward != b.reward:
            tasks["gained" if b.reward > a.reward else "lost"][a.task_id] += 1
    return {
        "count": len(pairs),
        "changed": changed,
        # What moved most, relative to its size, comes first.
        "rows": sorted(rows, key=lambda row: -abs(row[2] - row[1]) / max(row[1], row[2], 1e-9)),
        **{name: counts.most_common(8) for name, counts in tasks.items()},
    }
