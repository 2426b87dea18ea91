"""Chooses the task that a group plays, where `rollout.sampler` is not "uniform".

A sampler is a function that gets a `Choice` and returns the index of a task; "difficulty" and
"staged" are two of them. A choice depends on the groups that steps have taken and on its position,
never on what is still being played. A resumed run therefore draws the same tasks as an undisturbed
one.
"""

from __future__ import annotations

import json
import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from agentrl import user_modules
from agentrl.config import RolloutSection
from agentrl.errors import ConfigError, TrainingError
from agentrl.rollout.scheduler import stable_seed
from agentrl.types import JSON, Trajectory

RECENT = 64
"""The number of newest groups that a sampler remembers in their order."""
NEWEST = 0.5
"""The share of a task's newest group in its rate."""
ENOUGH = 16
"""Groups of a pool that must have been played before the next pool opens."""


@dataclass(slots=True, frozen=True)
class Played:
    """The rewards that groups of one task have earned."""

    count: int
    """Groups that steps have taken, dropped ones included."""
    rate: float
    """Running mean of their rewards, within 0 and 1; the newest group counts half."""


@dataclass(slots=True, frozen=True)
class Choice:
    """The information that a sampler gets when it chooses a task."""

    position: int
    """Groups that were asked for before, since the run began."""
    size: int | None
    """Tasks of the split, whose indices begin at 0; None for a generator without end."""
    played: Mapping[int, Played]
    """The tasks of which a step had a group, by index."""
    waiting: Collection[int]
    """Indices of tasks that were chosen and whose group no step has reported yet."""
    recent: Collection[tuple[int, float]]
    """Index and mean reward (within 0 and 1) of the last groups, oldest first."""
    memory: dict[str, JSON]
    """The sampler's own memory, kept from call to call and in checkpoints."""
    rng: np.random.Generator
    """Depends on the seed and the position alone."""
    options: RolloutSection
    """`[rollout]` of this environment."""

    def fresh(self) -> int | None:
        """Returns a random task that was never chosen; None if all were."""
        if self.size is None:
            return max((*self.played, *self.waiting), default=-1) + 1
        is_new = np.ones(self.size, bool)
        is_new[[*self.played, *self.waiting]] = False
        return self.any_of(np.flatnonzero(is_new))

    def any_of(self, indices: Iterable[int]) -> int | None:
        """Returns one of these at random, preferably one that is not waiting; None if there are
        none."""
        all_of = [int(index) for index in indices]
        found = [index for index in all_of if index not in self.waiting] or all_of
        return found[self.rng.integers(len(found))] if found else None


SampleTask = Callable[[Choice], int]


def difficulty(choice: Choice) -> int:
    """Draws tasks with a success rate near `sampler_target`, and some fresh and some passed
    ones."""
    options, played = choice.options, choice.played
    passed = sorted(i for i, task in played.items() if task.rate >= options.sampler_passed)
    between = sorted(i for i in played.keys() - set(passed) if i not in choice.waiting)
    kind = choice.rng.random()
    index = None
    if kind < options.sampler_fresh or not between:
        index = choice.fresh()
    elif kind < options.sampler_fresh + options.sampler_retired:
        index = choice.any_of(passed)
    if index is None and between:
        target = options.sampler_target
        gaps = np.asarray([abs(played[i].rate - target) for i in between])
        # Not quite 0 at the far end: a task that nobody could do is tried again at times.
        weights = (1 - gaps / max(target, 1 - target)) ** 2 + 0.01
        index = between[choice.rng.choice(len(between), p=weights / weights.sum())]
    if index is None:
        index = choice.any_of(passed or range(choice.size or 1))
    assert index is not None
    return index


def staged(choice: Choice) -> int:
    """Draws tasks from one pool after the other, and sometimes from earlier pools.

    The next pool opens when the last groups of the current pool earned `sampler_passed` on average.
    """
    options = choice.options
    assert choice.size is not None
    edges = [0, *options.sampler_stages, choice.size]
    opened: Any = choice.memory.get("stage", 0)
    # With run.resume = "force" the run may have had more pools.
    stage = choice.memory["stage"] = min(opened, len(edges) - 2)
    first, last = edges[stage], edges[stage + 1]
    earned = [reward for index, reward in choice.recent if first <= index < last][-ENOUGH:]
    is_passed = len(earned) == ENOUGH and sum(earned) >= ENOUGH * options.sampler_passed
    if is_passed and stage + 2 < len(edges):
        stage = choice.memory["stage"] = stage + 1
        first, last = edges[stage], edges[stage + 1]
    if first and choice.rng.random() < options.sampler_retired:
        first, last = 0, first
    index = choice.any_of(range(first, last))
    assert index is not None
    return index


class Sampler:
    """Chooses a task for every position of one environment, and remembers the rewards of its
    groups."""

    def __init__(
        self, name: str, choose: SampleTask, size: int | None, seed: int, options: RolloutSection
    ) -> None:
        self._name, self._choose = name, choose
        self._size, self._seed, self._options = size, seed, options
        self._chosen: dict[int, int] = {}
        """Position -> index, of groups that no step has reported yet."""
        self._played: dict[int, Played] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._memory: dict[str, JSON] = {}

    def choose(self, position: int) -> None:
        """Draws a task for a position, unless it has one already.

        Raises:
            TrainingError: the function did not return the index of a task.
        """
        if position in self._chosen:
            return
        choice = Choice(
            position,
            self._size,
            self._played,
            Counter(self._chosen.values()),
            self._recent,
            self._memory,
            np.random.default_rng(stable_seed(self._seed, "sampler", position)),
            self._options,
        )
        answer = self._choose(choice)
        try:
            index = operator.index(answer)
        except TypeError:
            index = -1
        if isinstance(answer, bool) or not 0 <= index < (self._size or float("inf")):
            last = "" if self._size is None else f" to {self._size - 1}"
            raise TrainingError(
                f"rollout.sampler: {self._name} returned {answer!r} for position {position}; "
                f"return the index of a task, a whole number from 0{last}"
            )
        self._chosen[position] = index

    def index_at(self, position: int) -> int:
        return self._chosen[position]

    def take_in(self, groups: Mapping[int, list[Trajectory]]) -> dict[str, float]:
        """Records the rewards of a step's groups and returns metrics.

        Args:
            groups: all groups that the step played, by position.
        """
        num_again = 0
        for position, trajectories in groups.items():
            index = self._chosen.pop(position)
            before = self._played.get(index)
            num_again += before is not None
            rewards = [t.reward for t in trajectories if t.trainable]
            if not rewards:
                continue
            mean = min(1.0, max(0.0, sum(rewards) / len(rewards)))
            rate = mean if before is None else before.rate + NEWEST * (mean - before.rate)
            self._played[index] = Played(before.count + 1 if before else 1, rate)
            self._recent.append((index, mean))
        rates = [task.rate for task in self._played.values()]
        metrics = {
            "sampler/tasks": len(rates),
            "sampler/repeated_fraction": num_again / max(1, len(groups)),
        }
        if rates:
            metrics["sampler/rate_mean"] = float(np.mean(rates))
            passed = [rate >= self._options.sampler_passed for rate in rates]
            metrics["sampler/passed_fraction"] = float(np.mean(passed))
        if self._name == "staged":
            metrics["sampler/stage"] = int(self._memory.get("stage", 0))  # pyright: ignore
        return metrics

    def state(self) -> dict[str, JSON]:
        """Returns the state for a checkpoint, which `restore` takes.

        Raises:
            TrainingError: the function's state cannot be written as JSON.
        """
        try:
            memory = json.loads(json.dumps(self._memory, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"rollout.sampler: {self._name} keeps in its memory what no checkpoint can hold "
                f"({error}); keep texts, finite numbers, lists and tables"
            ) from error
        return {
            "chosen": [[*pair] for pair in self._chosen.items()],
            "played": [[i, task.count, task.rate] for i, task in self._played.items()],
            "recent": [[*pair] for pair in self._recent],
            "memory": memory,
        }

    def restore(self, saved: Mapping[str, Any], outstanding: Iterable[int]) -> None:
        """Restores a saved state.

        Args:
            outstanding: positions that are played again, which in async runs includes groups
                that were dropped before a step reported them.
        """
        # With run.resume = "force" the run may have had a longer split, or no sampler.
        end = float("inf") if self._size is None else self._size
        self._chosen = {position: i for position, i in saved.get("chosen", []) if i < end}
        played = saved.get("played", [])
        self._played = {i: Played(count, rate) for i, count, rate in played if i < end}
        self._recent = deque((tuple(pair) for pair in saved.get("recent", [])), maxlen=RECENT)
        self._memory = json.loads(json.dumps(saved.get("memory", {})))
        for position in outstanding:
            self.choose(position)


def make_sampler(options: RolloutSection, size: int | None, seed: int) -> Sampler | None:
    """Makes the sampler of one environment; None if tasks are played in a seeded order.

    Args:
        size: number of tasks in the split.

    Raises:
        ConfigError: the function is not found, or the pools do not fit the split.
    """
    name = options.sampler
    if name == "uniform":
        return None
    if name == "staged":
        last = options.sampler_stages[-1]
        if size is None or last >= size:
            has = "is without end" if size is None else f"has {size} tasks"
            raise ConfigError(
                f"rollout.sampler = 'staged' needs a split of more than {last} tasks "
                f"(rollout.sampler_stages), and this one {has}"
            )
    own = {"difficulty": difficulty, "staged": staged}
    choose = own[name] if name in own else user_modules.load(name)
    if not callable(choose):
        raise ConfigError(f"rollout.sampler: {name} is not a function")
    return Sampler(name, cast("SampleTask", choose), size, seed, options)
