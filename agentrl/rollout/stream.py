"""Groups played ahead of the trainer, never further ahead than the staleness bound allows.

    source -> slots, one per group -> episodes -> finished groups -> next_batch

**Staleness** of a token at training step s is s - 1 minus the version that sampled it: the weights
which step s starts from have version s - 1. A trajectory counts by its oldest token.

The bound holds by construction. With B groups per step and the policy at version v, at most
(v + 1 + S) * B groups have ever been dispatched, so a group dispatched at version v is among the
first (v + 1 + S) * B and, taken in order, is trained at step v + 1 + S at the latest. Batches take
whatever is ready, but wait for **due** groups: those that the next step would find too old. At
most B groups are due at a time, because S * B fewer were dispatched before their version's end.
So nothing is thrown away for its age, and long episodes are trained as often as short ones.

`oversample` groups more than that may be in flight. Then a batch waits for no group, and groups
that would be too old for the next step are cancelled as a whole and their tasks played again later.
That is faster where episodes differ much, and it trains fewer of the long ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.rollout.driver import Episode
from agentrl.rollout.scheduler import GroupScheduler, KeepGroup, RolloutBatch, mark_dropped
from agentrl.types import Group, StopReason, Trajectory, TrajectoryError


@dataclass(slots=True)
class _Slot:
    """One group from its dispatch until a batch takes it. Its replacements keep its place in the
    order."""

    number: int
    position: int
    """Position of its task in the source."""
    version: int
    """Policy version at dispatch: no token of the group is older."""
    wave: int = 1
    trajectories: list[Trajectory] = field(default_factory=list)
    """All that ended, those of dropped groups included."""
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_positions: list[int] = field(default_factory=list)
    """Positions of tasks whose groups were dropped; no step has recorded them until a batch takes
    the slot."""
    group: Group | None = None
    task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self.task is not None and self.task.done()


class GroupStream:
    """Keeps episodes in flight while the trainer works, and cuts batches of whole groups."""

    def __init__(
        self,
        scheduler: GroupScheduler,
        *,
        groups_per_step: int | Callable[[int], int],
        num_steps: int,
        max_staleness: int,
        version: int = 0,
        keep: KeepGroup | None = None,
        max_waves: int = 1,
        oversample: int = 0,
        min_group_size: int | None = None,
        straggler_timeout_s: float | None = None,
    ) -> None:
        """
        Args:
            scheduler: plays the episodes; its `capacity` bounds how many at a time.
            groups_per_step: a number, or a function of the step's number that may return 0.
            num_steps: number of batches that will be taken; nothing is played beyond them.
            version: the policy's version at the start.
            keep: the filter; a dropped group is replaced at once, `max_waves` - 1 times.
            oversample: groups in flight beyond what the bound needs.
            min_group_size: a group of which so many members ended waits `straggler_timeout_s` for
                the others, then they are cancelled. None waits for all.
        """
        if scheduler.capacity is None:
            raise ValueError("GroupStream needs a scheduler with a capacity")
        self.version = version
        self.num_dispatched = 0
        """Episodes begun; each ends in exactly one record."""
        self.num_ended: Counter[str] = Counter()
        """Episodes ended, by stop reason."""
        self._scheduler = scheduler
        self._capacity = scheduler.capacity
        self._groups_of = (
            groups_per_step if callable(groups_per_step) else lambda _: groups_per_step
        )
        self._max_staleness = max_staleness
        self._last_version = version + num_steps
        self._num_allowed = 0
        """Groups of all steps up to `_allowed_step`; `_oversample` more may be dispatched."""
        self._allowed_step = version
        self._keep = keep
        self._max_waves = max_waves
        self._oversample = oversample
        self._min_group_size = min_group_size
        self._straggler_timeout_s = straggler_timeout_s
        self._slots: dict[int, _Slot] = {}
        """Dispatched and not yet taken, by number."""
        self._num_slots = 0
        """Dispatched so far, less those that were cancelled."""
        self._next_number = 0
        self._chosen: list[_Slot] = []
        """What the next batch takes, once it is ready."""
        self._changed = asyncio.Event()

    async def next_batch(
        self, on_progress: Callable[[int, int], None] | None = None
    ) -> RolloutBatch:
        """Waits for the groups of the next training step and returns them in dispatch order, none
        staler than the bound.

        Args:
            on_progress: called with (groups ready, groups per step).
        """
        await self.wait_for_batch(on_progress)
        return self.take_batch()

    async def wait_for_batch(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Waits until `take_batch` has a batch. If cancelled, every group stays in the stream."""
        self._dispatch()
        wanted = self._groups_of(self.version + 1)
        while True:
            self._raise_errors()
            if (chosen := self._cut(wanted)) is not None:
                break
            if on_progress:
                ready = sum(slot.done for slot in self._slots.values())
                on_progress(min(ready, wanted), wanted)
            self._changed.clear()
            await self._changed.wait()
        await self._cancel_too_old(chosen)
        self._chosen = chosen

    def take_batch(self) -> RolloutBatch:
        """Returns the batch that `wait_for_batch` waited for."""
        batch = RolloutBatch([], [])
        for slot in self._chosen:
            del self._slots[slot.number]
            batch.trajectories += slot.trajectories
            batch.dropped += slot.dropped
            if slot.group is None:
                continue
            if self._staleness(slot.group) > self._max_staleness:
                # Only a server that labels its tokens with another version than it was told.
                mark_dropped(slot.group, "stale")
                batch.dropped["stale"] += 1
            else:
                batch.groups.append(slot.group)
        self._chosen = []
        batch.num_restarts = self._scheduler.take_restarts()
        return batch

    def advance(self, version: int) -> None:
        """Sets the policy's new version, after which more groups may be dispatched."""
        self.version = version
        self._dispatch()

    def outstanding(self) -> list[int]:
        """Returns the positions of tasks that no batch has taken yet; a resumed run plays them
        again."""
        slots = self._slots.values()
        played = [at for slot in slots for at in (*slot.dropped_positions, slot.position)]
        return [*played, *self._scheduler.source.returned]

    async def aclose(self) -> None:
        """Cancels the episodes in flight. Every episode that began has its record after this."""
        await self._cancel(list(self._slots.values()))

    def _dispatch(self) -> None:
        newest = min(self.version + 1 + self._max_staleness, self._last_version)
        while self._allowed_step < newest:
            self._allowed_step += 1
            self._num_allowed += self._groups_of(self._allowed_step)
        while self._num_slots < self._num_allowed + self._oversample:
            slot = _Slot(self._next_number, self._scheduler.source.take(), self.version)
            self._next_number += 1
            self._num_slots += 1
            self._slots[slot.number] = slot
            slot.task = asyncio.create_task(self._play_slot(slot))
            slot.task.add_done_callback(lambda _: self._changed.set())

    def _cut(self, wanted: int) -> list[_Slot] | None:
        """Returns the slots of the next batch; None while they are not ready."""
        done = [slot for slot in self._slots.values() if slot.done]
        if len(done) < wanted:
            return None
        due = [slot for slot in self._slots.values() if self._is_due(slot)]
        if not self._oversample and not all(slot.done for slot in due):
            return None
        in_order = sorted(done, key=lambda slot: (not self._is_due(slot), slot.number))
        return sorted(in_order[:wanted], key=lambda slot: slot.number)

    def _is_due(self, slot: _Slot) -> bool:
        """Tells whether the step after the next would find the group too old."""
        return self.version - slot.version >= self._max_staleness

    def _staleness(self, group: Group) -> int:
        versions = (trajectory.oldest_version for trajectory in group.trajectories)
        return self.version - min((v for v in versions if v is not None), default=self.version)

    async def _cancel_too_old(self, chosen: list[_Slot]) -> None:
        """Cancels the groups, left behind by a cut with over-sampling, that the next step could not
        train on."""
        taken = {slot.number for slot in chosen}
        left = [slot for slot in self._slots.values() if slot.number not in taken]
        too_old = [slot for slot in left if self._is_due(slot)]
        await self._cancel(too_old)
        self._num_slots -= len(too_old)
        for slot in too_old:
            del self._slots[slot.number]
            self._scheduler.source.returned += [*slot.dropped_positions, slot.position]

    async def _cancel(self, slots: list[_Slot]) -> None:
        tasks = [slot.task for slot in slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _raise_errors(self) -> None:
        """Raises the error of a slot's task: failed rollouts are data, so the setup is broken."""
        for slot in self._slots.values():
            if slot.task is not None and slot.task.done() and not slot.task.cancelled():
                slot.task.result()

    async def _play_slot(self, slot: _Slot) -> None:
        scheduler = self._scheduler
        while True:
            members = await self._play_group(scheduler.group_at(slot.position), slot)
            group = Group(members[0].group_id, members[0].task_id, members)
            if scheduler.score is not None:
                await scheduler.score(members)
            reason = self._keep(group) if self._keep else None
            if reason is None:
                slot.group = group
                return
            mark_dropped(group, reason)
            slot.dropped[reason] += 1
            if slot.wave == self._max_waves:
                return
            slot.wave += 1
            slot.dropped_positions.append(slot.position)
            slot.position, slot.version = scheduler.source.take(), self.version

    async def _play_group(self, episodes: list[Episode], slot: _Slot) -> list[Trajectory]:
        """Plays one group and returns its trajectories in member order, with stragglers cut."""
        ended: dict[str, Trajectory] = {}

        def record(trajectory: Trajectory) -> None:
            ended[trajectory.trajectory_id] = trajectory
            slot.trajectories.append(trajectory)
            self.num_ended[str(trajectory.stop_reason)] += 1

        num_begun = 0
        all_begun = asyncio.Event()

        async def member(episode: Episode) -> None:
            nonlocal num_begun
            async with self._capacity:
                self.num_dispatched += 1
                num_begun += 1
                if num_begun == len(episodes):
                    all_begun.set()
                await self._scheduler.play(episode, record)

        tasks = [asyncio.create_task(member(episode)) for episode in episodes]
        try:
            await self._without_stragglers(tasks, all_begun)
        finally:
            late = [task for task in tasks if not task.done()]
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for task in tasks:
            if not task.cancelled():
                task.result()
        for trajectory in ended.values():
            if trajectory.stop_reason is StopReason.CANCELLED:
                trajectory.error = TrajectoryError(
                    trajectory.error.stage if trajectory.error else "generate",
                    "straggler",
                    f"{self._min_group_size} members of its group ended "
                    f"{self._straggler_timeout_s} s (rollout.stragglers) earlier",
                )
        return [
            ended[episode.trajectory_id] for episode in episodes if episode.trajectory_id in ended
        ]

    async def _without_stragglers(
        self, tasks: list[asyncio.Task[None]], all_begun: asyncio.Event
    ) -> None:
        """Waits until all members have ended, or the deadline for the last ones has passed."""
        pending = set(tasks)
        if self._min_group_size is None or self._straggler_timeout_s is None:
            await asyncio.wait(pending)
            return
        while len(tasks) - len(pending) < self._min_group_size:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        # An episode that waits for capacity is late through no fault of its own.
        await all_begun.wait()
        if pending:
            await asyncio.wait(pending, timeout=self._straggler_timeout_s)
