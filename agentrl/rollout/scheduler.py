"""Schedules episodes: tasks in a seeded order, groups of G, filters with refill.

The order of tasks depends on the seed and the data position only, so a resumed run continues with
the task that an uninterrupted one would have taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import numpy as np

from agentrl.env.client import EnvClient
from agentrl.errors import DataError
from agentrl.rollout.driver import AgentPlayer, Episode, Limits, Progress, play, play_agent
from agentrl.rollout.policy import Policy, TokenPolicy
from agentrl.types import JSON, Group, Trajectory

Room = contextlib.AbstractAsyncContextManager[Any, Any]
"""What an episode holds while it is played, such as a semaphore."""
KeepGroup = Callable[[Group], str | None]
"""Returns None to keep a group, or the reason for which it is dropped."""


class Log(Protocol):
    """Keeps episodes that ended; `rollout.episodes.EpisodeLog`."""

    done: dict[str, Trajectory]

    def add(self, trajectories: list[Trajectory]) -> None: ...


Score = Callable[[list[Trajectory]], Awaitable[None]]
"""Rewards the trajectories of one group in place, errors included."""


class TaskSampler(Protocol):
    """Chooses tasks by the rewards that they earned; `rollout.sampler.Sampler`."""

    def choose(self, position: int) -> None: ...

    def index_at(self, position: int) -> int: ...

    def take_in(self, groups: Mapping[int, list[Trajectory]]) -> dict[str, float]: ...

    def state(self) -> dict[str, JSON]: ...

    def restore(self, saved: Mapping[str, Any], outstanding: Iterable[int]) -> None: ...


@dataclass(slots=True)
class TaskSource:
    """The task indices of one split, in a new seeded order in each epoch."""

    split: str
    size: int | None
    """Number of tasks; None for a generator without end, whose index is the position itself."""
    seed: int
    position: int = 0
    """Tasks handed out since the start of the run; saved in checkpoints."""
    shuffle: bool = True
    returned: deque[int] = field(default_factory=deque)
    """Positions that were handed out and came back unused; handed out again before new ones."""
    sampler: TaskSampler | None = None
    """Chooses the task of every position; None goes through the epochs."""

    def take(self) -> int:
        """Returns the next position."""
        if self.returned:
            return self.returned.popleft()
        position, self.position = self.position, self.position + 1
        if self.sampler is not None:
            self.sampler.choose(position)
        return position

    def index_at(self, position: int) -> int:
        """Returns the index of the task at a position."""
        if self.sampler is not None:
            return self.sampler.index_at(position)
        if self.size is None:
            return position
        if self.size < 1:
            raise DataError(f"split {self.split!r} is empty; name another with env.split")
        epoch, offset = divmod(position, self.size)
        if not self.shuffle:
            return offset
        return int(_epoch_order(self.seed, epoch, self.size)[offset])


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


@dataclass(slots=True)
class RolloutBatch:
    """The result of one call of `collect`."""

    groups: list[Group]
    """Groups that passed the filter, in dispatch order."""
    trajectories: list[Trajectory]
    """Every trajectory that was dispatched, dropped groups included, in dispatch order."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Filtered groups by reason."""
    num_restarts: int = 0
    """Episodes that were started over because their environment was lost, since the last batch."""
    num_left_out: int = 0
    """Episodes that were not played because of `max_total_tokens`."""


def mark_dropped(group: Group, reason: str) -> None:
    """Notes in a group's trajectories, and so in their log, why no step trains on it."""
    for trajectory in group.trajectories:
        trajectory.info["dropped"] = reason


def stable_seed(*parts: JSON) -> int:
    """Returns a 31-bit seed computed from the parts, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(eq=False)
class GroupScheduler:
    """Plays groups of episodes, at most `max_concurrent` episodes at a time.

    Never plays more episodes at a time than all servers of the environment have sessions for,
    because an episode that waited for a session would spend its own deadlines waiting. Runs that
    share servers have to divide the sessions among them through `rollout.max_concurrent`."""

    policy: Policy
    env: EnvClient
    source: TaskSource
    _: KW_ONLY
    env_id: str
    env_config: dict[str, JSON]
    group_size: int
    max_concurrent: int
    limits: Limits
    seed: int
    id_prefix: str = ""
    score: Score | None = None
    """Awaited for every group when its episodes have ended, before any filter."""
    capacity: Room | None = None
    """Shared by schedulers that play at the same time; an episode holds one unit while it is
    played. None if no other scheduler plays."""
    agents: AgentPlayer | None = None
    """Play the episodes, and call a `TokenPolicy`; None: the policy plays itself."""
    live: dict[str, Progress] = field(default_factory=dict, init=False)
    """Episodes that are being played, by trajectory id."""
    last_end: float = field(default_factory=time.monotonic, init=False)
    """When an episode last ended."""
    _num_restarts: int = field(default=0, init=False)

    async def collect(
        self,
        num_groups: int,
        *,
        keep: KeepGroup | None = None,
        max_waves: int = 1,
        on_progress: Callable[[int, int], None] | None = None,
        log: Log | None = None,
        takes: Callable[[int], bool] = lambda position: True,
        max_total_tokens: int | None = None,
    ) -> RolloutBatch:
        """Plays groups until `num_groups` passed the filter.

        Args:
            keep: the filter; None keeps every group.
            max_waves: how often dropped groups are replaced by new ones, the first play included.
                With 1 a batch may come back smaller.
            on_progress: called with (episodes ended, episodes dispatched).
            log: episodes in it are not played again; new ones are added to it.
            takes: tells whether the task at a position is played; others count as played.
            max_total_tokens: once so many tokens were sampled, those of `log` and what open
                episodes are expected to take included, no further group is begun.
        """
        batch = RolloutBatch([], [])
        for _ in range(max_waves):
            positions = [self.source.take() for _ in range(num_groups - len(batch.groups))]
            episodes = [
                episode
                for position in positions
                if takes(position)
                for episode in self.group_at(position)
            ]
            trajectories = await self._play_all(
                episodes,
                self.policy,
                on_progress,
                num_before=len(batch.trajectories),
                log=log,
                max_total_tokens=max_total_tokens,
            )
            batch.trajectories += trajectories
            batch.num_left_out += len(episodes) - len(trajectories)
            groups = [
                Group(members[0].group_id, members[0].task_id, members)
                for start in range(0, len(trajectories), self.group_size)
                if (members := trajectories[start : start + self.group_size])
            ]
            for group in groups:
                reason = keep(group) if keep else None
                if reason is None:
                    batch.groups.append(group)
                else:
                    mark_dropped(group, reason)
                    batch.dropped[reason] += 1
            if len(batch.groups) >= num_groups:
                break
        batch.num_restarts = self.take_restarts()
        return batch

    async def replay(
        self, groups: Iterable[Group], policy: Policy, *, id_prefix: str
    ) -> list[Trajectory]:
        """Plays the task of each group of this scheduler once more, with another policy.

        Args:
            id_prefix: begins the ids of the new trajectories, each a group of one.

        Returns:
            One scored trajectory per group, in their order.
        """
        episodes = [
            episode
            for group in groups
            for episode in self.group_at(
                self.position_of(group.group_id), size=1, id_prefix=id_prefix
            )
        ]
        return await self._play_all(episodes, policy)

    def position_of(self, group_id: str) -> int:
        """Returns the data position of a group of this scheduler."""
        return int(group_id.removeprefix(f"{self.id_prefix}g"))

    def take_restarts(self) -> int:
        """Returns the number of episodes started over since the last call."""
        count, self._num_restarts = self._num_restarts, 0
        return count

    def group_at(
        self, position: int, *, size: int | None = None, id_prefix: str | None = None
    ) -> list[Episode]:
        """Returns the episodes of the group at a data position: `size` of them, by default
        `group_size`."""
        index = self.source.index_at(position)
        group_id = f"{self.id_prefix if id_prefix is None else id_prefix}g{position:07d}"
        return [
            Episode(
                trajectory_id=f"{group_id}-m{member:03d}",
                group_id=group_id,
                env_id=self.env_id,
                split=self.source.split,
                index=index,
                seed=stable_seed(self.seed, self.source.split, position),
                env_config=self.env_config,
            )
            for member in range(self.group_size if size is None else size)
        ]

    async def play(
        self,
        episode: Episode,
        record: Callable[[Trajectory], None],
        policy: Policy | None = None,
    ) -> None:
        """Plays one episode and calls `record` exactly once, even when cancelled."""
        now = self.live[episode.trajectory_id] = Progress(episode.trajectory_id)

        def ended(trajectory: Trajectory) -> None:
            del self.live[episode.trajectory_id]
            self.last_end = time.monotonic()
            self._num_restarts += now.num_restarts
            record(trajectory)

        policy = policy or self.policy
        if self.agents is None:
            await play(episode, policy, self.env, self.limits, ended, now)
        else:
            assert isinstance(policy, TokenPolicy)
            await play_agent(episode, self.agents, policy, self.env, self.limits, ended, now)

    def stalled_for_s(self) -> float:
        """Returns the seconds since any episode last ended or moved to its next stage."""
        newest = max((now.since for now in self.live.values()), default=0.0)
        return time.monotonic() - max(newest, self.last_end)

    async def _play_all(
        self,
        episodes: list[Episode],
        policy: Policy,
        on_progress: Callable[[int, int], None] | None = None,
        num_before: int = 0,
        log: Log | None = None,
        max_total_tokens: int | None = None,
    ) -> list[Trajectory]:
        """Plays the episodes, and scores each group when its last episode ends.

        Returns:
            The trajectories in the order of `episodes`, whatever order they ended in; without those
            that `max_total_tokens` left out.
        """
        ended = {
            e.trajectory_id: log.done[e.trajectory_id]
            for e in episodes
            if log and e.trajectory_id in log.done
        }
        waiting = deque(e for e in episodes if e.trajectory_id not in ended)
        missing = Counter(episode.group_id for episode in waiting)
        scoring: list[asyncio.Task[None]] = []
        begun = {trajectory.group_id for trajectory in ended.values()}
        num_tokens = sum(trajectory.num_sampled_tokens for trajectory in ended.values())
        num_open = 0

        def may_begin() -> bool:
            # An open episode is expected to take as many tokens as those that ended.
            each = num_tokens / len(ended) if num_tokens else policy.max_turn_tokens
            expected = num_tokens + num_open * each
            within = max_total_tokens is None or expected < max_total_tokens
            return bool(waiting) and (within or waiting[0].group_id in begun)

        def record(trajectory: Trajectory) -> None:
            nonlocal num_tokens
            num_tokens += trajectory.num_sampled_tokens
            ended[trajectory.trajectory_id] = trajectory
            if on_progress:
                on_progress(num_before + len(ended), num_before + len(episodes))
            missing[trajectory.group_id] -= 1
            if self.score is not None and not missing[trajectory.group_id]:
                cancelled = trajectory.error is not None and trajectory.error.code == "cancelled"
                if not cancelled:
                    scoring.append(asyncio.create_task(conclude(trajectory.group_id)))
            elif self.score is None and log is not None:
                log.add([trajectory])

        async def conclude(group_id: str) -> None:
            assert self.score is not None
            group = [ended[e.trajectory_id] for e in episodes if e.group_id == group_id]
            await self.score(group)
            if log is not None:
                log.add(group)

        async def worker() -> None:
            nonlocal num_open
            # A worker's reservation at the engine passes from one episode to the next, so that
            # the engine's batches depend on which episodes are alive and not on when they came.
            try:
                while may_begin():
                    async with self.capacity or contextlib.nullcontext():
                        if may_begin():
                            begun.add(waiting[0].group_id)
                            num_open += 1
                            await self.play(waiting.popleft(), record, policy)
                            num_open -= 1
            finally:
                policy.release()

        if not waiting:
            return [ended[episode.trajectory_id] for episode in episodes]
        num_sessions = (await self.env.info(self.env_id, self.env_config)).max_sessions
        num_workers = min(self.max_concurrent, num_sessions, len(waiting))
        policy.reserve(num_workers)
        self.last_end = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_workers):
                    tasks.create_task(worker())
            await asyncio.gather(*scoring)
        finally:
            for task in scoring:
                task.cancel()
        return [ended[e.trajectory_id] for e in episodes if e.trajectory_id in ended]
