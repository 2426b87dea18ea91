"""Groups of trajectories, sorted and filtered by their index entries."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from annotated_types import Ge, Interval
from pydantic import BaseModel

from agentrl.errors import DataError
from agentrl.images import shown_text
from agentrl.rollout.log import TrajectoryEntry, read_trajectory
from agentrl.rollout.signals import read_advantages
from agentrl.view.curves import number
from agentrl.view.runs import RunFiles

TEXT_SEARCH_S = 0.2
"""How long one request may read trajectories for a text; the next goes on where it stopped."""

SHOWN: dict[str, Callable[[TrajectoryEntry], bool]] = {
    "failed": lambda entry: entry.error is not None,
    "malformed": lambda entry: entry.malformed > 0,
    "tool_errors": lambda entry: entry.tool_errors > 0,
    "truncated": lambda entry: entry.truncated,
}
"""The filters of a trajectory by the names that `show` takes."""


class Group(msgspec.Struct, gc=False):
    """The entries of one group, and the values by which it is sorted."""

    step: int
    entries: list[TrajectoryEntry]

    def rewards(self) -> list[float]:
        return [value for e in self.entries if (value := number(e.reward)) is not None]

    def mean(self, otherwise: float = math.nan) -> float:
        rewards = self.rewards()
        return math.fsum(rewards) / len(rewards) if rewards else otherwise

    def zero_variance(self) -> bool:
        rewards = self.rewards()
        return len(rewards) > 1 and max(rewards) - min(rewards) <= 1e-9

    def largest_advantage(self) -> float:
        """Returns the largest distance of a reward from the group's mean, in standard deviations,
        which is GRPO's advantage; 0 for a group of equal rewards and one that was dropped."""
        rewards = self.rewards()
        if len(rewards) < 2 or self.zero_variance() or self.entries[0].dropped:
            return 0.0
        mean = self.mean()
        largest = max(abs(reward - mean) for reward in rewards)
        # Divided first: a reward of 1e300 has no square.
        return math.sqrt(len(rewards)) / math.hypot(*((r - mean) / largest for r in rewards))


SHOWN_GROUPS: dict[str, Callable[[Group], bool]] = {
    "all": lambda group: True,
    "zero_variance": Group.zero_variance,
    "mixed": lambda group: not group.zero_variance(),
    "dropped": lambda group: bool(group.entries[0].dropped),
}
"""The filters of a whole group by the names that `show` takes."""

SORTS: dict[str, Callable[[Group], Any]] = {
    "advantage": lambda group: (-round(group.largest_advantage(), 6), -group.step),
    "newest": lambda group: -group.step,
    "oldest": lambda group: group.step,
    "worst": lambda group: group.mean(math.inf),
    "best": lambda group: -group.mean(-math.inf),
    "longest": lambda group: -max(entry.tokens for entry in group.entries),
    "surprising": lambda group: min(entry.lowest_logprob or 0.0 for entry in group.entries),
    "malformed": lambda group: -sum(entry.malformed for entry in group.entries),
}


Count = Annotated[int, Ge(0)]


class Query(BaseModel, frozen=True):
    """The filter and the order of groups, as a page asks for them. Empty fields do not filter."""

    step: int | None = None
    sort: str = "advantage"
    show: str = "all"
    error: str = ""
    task: str = ""
    """A part of the task's name."""
    task_id: str = ""
    """The whole of it."""
    text: str = ""
    offset: Count = 0
    limit: Annotated[int, Interval(ge=1, le=100)] = 20
    searched: Count = 0
    """Groups that a search for `text` has behind it."""
    pick: str = ""
    """Trajectories to export whatever else is asked, by step and offset: `3.0,3.412`."""

    def picked(self) -> set[tuple[int, int]]:
        """Returns the steps and offsets of `pick`.

        Raises:
            DataError: it holds something else.
        """
        try:
            pairs = [tuple(map(int, each.split("."))) for each in self.pick.split(",") if each]
            return {(step, offset) for step, offset in pairs}
        except ValueError:
            raise DataError(
                f"pick={self.pick}: steps and offsets are expected, such as 3.0,3.412"
            ) from None


def find_groups(run: RunFiles, query: Query) -> dict[str, Any]:
    """Returns a page of the groups with a trajectory that matches the query, with all their
    members.

    Raises:
        DataError: the query names an unknown sort or filter.
    """
    everything = grouped(run)
    matches = _matcher(query)
    found = _found(everything, query)
    searched = len(found)
    if query.text:
        shown, searched = _with_text(run, found, query)
    else:
        shown = found[query.offset : query.offset + query.limit]
    advantages = {step: _advantages(run, step) for step in {group.step for group in shown}}
    return {
        "groups": [_described(group, matches, advantages[group.step]) for group in shown],
        "num_found": len(found),
        "num_groups": len(everything),
        "searched": searched,
        "errors": sorted(_CACHE[run.id].errors),
    }


def _found(everything: Sequence[Group], query: Query) -> list[Group]:
    """Returns the groups that match the query except for its text, in the query's order."""
    if query.sort not in SORTS or query.show not in SHOWN | SHOWN_GROUPS:
        raise DataError(f"no such sort or filter: {query.sort}, {query.show}")
    matches = _matcher(query)
    wanted = SHOWN_GROUPS.get(query.show, lambda group: True)
    found = [
        group
        for group in everything
        if (query.step is None or group.step == query.step)
        and (matches is None or any(map(matches, group.entries)))
        and wanted(group)
    ]
    return sorted(found, key=SORTS[query.sort])


def wanted_entries(run: RunFiles, query: Query) -> Iterator[TrajectoryEntry]:
    """Yields the trajectories that were picked, or else every trajectory that matches the query, in
    the order of their groups.

    Raises:
        DataError: the query names an unknown sort or filter, or `pick` cannot be read.
    """
    if chosen := query.picked():
        yield from (entry for entry in run.entries() if (entry.step, entry.offset) in chosen)
        return
    matches, text = _matcher(query), query.text.lower()
    for group in _found(grouped(run), query):
        for entry in group.entries:
            if (matches is None or matches(entry)) and (not text or _says(run, entry, text)):
                yield entry


MOST_TASKS = 50


def compare_tasks(first: RunFiles, second: RunFiles) -> dict[str, Any]:
    """Returns the tasks that both runs played, in decreasing order of the difference between their
    mean rewards, and their number."""
    means = []
    for run in (first, second):
        rewards: dict[str, list[float]] = defaultdict(list)
        for group in grouped(run):
            rewards[group.entries[0].task_id] += group.rewards()
        means.append({task: math.fsum(r) / len(r) for task, r in rewards.items() if r})
    both = means[0].keys() & means[1].keys()
    tasks = [{"task_id": t, "first": means[0][t], "second": means[1][t]} for t in sorted(both)]
    tasks.sort(key=lambda task: -abs(task["second"] - task["first"]))
    return {"num_tasks": len(tasks), "tasks": tasks[:MOST_TASKS]}


def grouped(run: RunFiles) -> list[Group]:
    """Returns the run's groups so far, in the order of their first trajectory."""
    with run.lock:
        entries = run.entries()
        cached = _CACHE.get(run.id)
        if cached is None or cached.generation != run.index_generation:
            cached = _CACHE[run.id] = _Grouped(run.index_generation)
        for entry in entries[cached.num_entries :]:
            key = (entry.step, entry.group_id)
            if key in cached.groups:
                cached.groups[key].entries.append(entry)
            else:
                cached.groups[key] = Group(entry.step, [entry])
            if entry.error is not None:
                cached.errors.add(entry.error)
        cached.num_entries = len(entries)
        return list(cached.groups.values())


@dataclass(slots=True)
class _Grouped:
    """The groups of trajectories that were read earlier, kept so that they are not grouped
    again."""

    generation: int
    """The generation of the run's index."""
    num_entries: int = 0
    groups: dict[tuple[int, str], Group] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)


_CACHE: dict[str, _Grouped] = {}
"""By the run's id."""


def _matcher(query: Query) -> Callable[[TrajectoryEntry], bool] | None:
    """Returns the test that a trajectory has to pass; None if every trajectory passes."""
    asked = SHOWN.get(query.show)
    error, task, task_id = query.error, query.task.lower(), query.task_id
    if not error and not task and not task_id:
        return asked
    return lambda entry: (
        (asked is None or asked(entry))
        and (not error or entry.error == error)
        and (not task or task in entry.task_id.lower())
        and (not task_id or task_id == entry.task_id)
    )


def _with_text(run: RunFiles, found: Sequence[Group], query: Query) -> tuple[list[Group], int]:
    """Returns the groups among `found[searched:]` that contain the text, and how far the search
    came."""
    started, text = time.monotonic(), query.text.lower()
    shown: list[Group] = []
    searched = query.searched
    while searched < len(found) and len(shown) < query.limit:
        group = found[searched]
        searched += 1
        if any(text in entry.preview.lower() or _says(run, entry, text) for entry in group.entries):
            shown.append(group)
        if time.monotonic() - started > TEXT_SEARCH_S:
            break
    return shown, searched


def _says(run: RunFiles, entry: TrajectoryEntry, text: str) -> bool:
    trajectory, _ = read_trajectory(run.path, entry.step, entry.offset)
    return any(
        text in f"{shown_text(message.get('content'))}{message.get('tool_calls') or ''}".lower()
        for row in trajectory.branches
        for message in row.messages
    )


def _advantages(run: RunFiles, step: int) -> dict[str, float]:
    try:
        return read_advantages(run.path, step)
    except DataError:  # a step whose signals were not kept
        return {}


def _described(
    group: Group, matches: Callable[[TrajectoryEntry], bool] | None, advantages: dict[str, float]
) -> dict[str, Any]:
    rewards = group.rewards()
    first, mean = group.entries[0], group.mean(0.0)
    # What teaches most comes first, as among groups.
    members = sorted(group.entries, key=lambda e: -round(_apart(e, mean), 9))
    return {
        "step": group.step,
        "group_id": first.group_id,
        "task_id": first.task_id,
        "mean": None if not rewards else group.mean(),
        "zero_variance": group.zero_variance(),
        "dropped": first.dropped,
        "members": [
            {
                **member_of(entry),
                "advantage": number(advantages.get(entry.trajectory_id)),
                "matches": matches is None or matches(entry),
            }
            for entry in members
        ],
    }


def _apart(entry: TrajectoryEntry, mean: float) -> float:
    reward = number(entry.reward)
    return 0.0 if reward is None else abs(reward - mean)


def member_of(entry: TrajectoryEntry) -> dict[str, Any]:
    """Returns an index entry as JSON for a page; values that are not finite become null."""
    return {
        name: value if not isinstance(value, float) or math.isfinite(value) else None
        for name, value in msgspec.structs.asdict(entry).items()
        if name != "length"
    }
