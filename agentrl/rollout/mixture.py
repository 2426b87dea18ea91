"""The environments of a run: how many groups of a step are of each, and what plays them.

Each environment has a scheduler of its own and, with rollouts that play ahead, a stream of its own,
so groups never mix and one slow environment does not keep the others from playing ahead. How many
groups of a step are of which environment follows from the weights and the step's number alone, so a
resumed run goes on as an undisturbed one would. A run with one environment is a mixture of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config import RunConfig, weight_at
from agentrl.rollout.driver import Progress
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.scheduler import GroupScheduler, KeepGroup, RolloutBatch
from agentrl.rollout.stream import GroupStream
from agentrl.types import JSON, Trajectory

Weight = float | list[tuple[int, float]]


class Quotas:
    """Divides the groups of a step among the environments, by largest remainder.

    The groups of a step are given one by one to the environment that is owed most. What it is owed
    beyond whole groups is carried to the next step, so that also a share of less than a group per
    step is kept, over several steps.
    """

    def __init__(self, weights: Sequence[Weight], groups_per_step: int) -> None:
        self._weights = weights
        self._groups_per_step = groups_per_step
        self._owed = [0.0] * len(weights)
        self._steps: list[list[int]] = []

    def __call__(self, step: int) -> list[int]:
        """The groups of each environment in a step, counted from 1."""
        while len(self._steps) < step:
            self._steps.append(self._next(len(self._steps) + 1))
        return self._steps[step - 1]

    def _next(self, step: int) -> list[int]:
        weights = [weight_at(weight, step) for weight in self._weights]
        for i, weight in enumerate(weights):
            self._owed[i] += self._groups_per_step * weight / sum(weights)
        given = [0] * len(weights)
        for _ in range(self._groups_per_step):
            # A weight of 0 is meant: what is still owed then waits.
            most = max(
                (i for i, weight in enumerate(weights) if weight), key=self._owed.__getitem__
            )
            given[most] += 1
            self._owed[most] -= 1
        return given


class Capacity:
    """Room for an episode in its environment first and then in the whole run, so that one which
    waits for a session of a full environment takes no room from others."""

    def __init__(self, own: asyncio.Semaphore, shared: asyncio.Semaphore) -> None:
        self._own, self._shared = own, shared

    async def __aenter__(self) -> None:
        await self._own.acquire()
        try:
            await self._shared.acquire()
        except BaseException:
            self._own.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._shared.release()
        self._own.release()


@dataclass(slots=True)
class Part:
    """One environment of a run."""

    name: str
    """Empty where the run has one environment only."""
    config: RunConfig
    """The configuration of a run that plays this environment alone."""
    scheduler: GroupScheduler
    stream: GroupStream | None = None
    """Plays ahead of the trainer; None with the embedded engine, which plays when it is asked."""


class Mixture:
    """Plays the groups of a step, of every environment its quota."""

    def __init__(self, parts: list[Part], quotas: Quotas, keep: KeepGroup | None) -> None:
        self.parts = parts
        self.quotas = quotas
        self._keep = keep

    def start(self, config: RunConfig, last_step: int) -> None:
        """Begin to play ahead, where the engine allows it."""
        rollout = config.rollout
        for number, part in enumerate(self.parts):
            if part.scheduler.capacity is None:
                continue
            part.stream = GroupStream(
                part.scheduler,
                groups_per_step=lambda step, number=number: self.quotas(step)[number],
                num_steps=config.run.num_steps - last_step,
                max_staleness=rollout.max_staleness,
                version=last_step,
                keep=self._keep,
                max_waves=rollout.max_waves,
                oversample=rollout.oversample_groups,
                min_group_size=rollout.min_group_size,
                straggler_timeout_s=rollout.straggler_timeout_s,
            )
            part.stream.advance(last_step)

    async def collect(
        self, step: int, on_progress: Callable[[int, int], None]
    ) -> dict[str, RolloutBatch]:
        """The groups of a step by environment. Cancelled, streams have all that they had."""
        batches: dict[str, RolloutBatch] = {}
        for part, quota in zip(self.parts, self.quotas(step), strict=True):
            if part.stream is not None:
                await part.stream.wait_for_batch(on_progress)
            else:
                batches[part.name] = await part.scheduler.collect(
                    quota,
                    keep=self._keep,
                    max_waves=part.config.rollout.max_waves,
                    on_progress=on_progress,
                )
        for part in self.parts:
            if part.stream is not None:
                batches[part.name] = part.stream.take_batch()
        return batches

    def take_in(self, batches: Mapping[str, RolloutBatch]) -> dict[str, float]:
        """Let samplers learn what a step's groups earned; returns their metrics."""
        metrics: dict[str, float] = {}
        for part in self.parts:
            scheduler = part.scheduler
            if scheduler.source.sampler is None:
                continue
            groups: dict[int, list[Trajectory]] = {}
            for trajectory in batches[part.name].trajectories:
                position = scheduler.position_of(trajectory.group_id)
                groups.setdefault(position, []).append(trajectory)
            told = scheduler.source.sampler.take_in(groups)
            prefix = f"env/{part.name}/" if part.name else ""
            metrics |= {f"{prefix}{key}": value for key, value in told.items()}
        return metrics

    def advance(self, version: int) -> None:
        """The policy has new weights: the streams may play further ahead."""
        for part in self.parts:
            if part.stream is not None:
                part.stream.advance(version)

    @property
    def plays_ahead(self) -> bool:
        return any(part.stream is not None for part in self.parts)

    @property
    def live(self) -> dict[str, Progress]:
        """Episodes that are being played, by trajectory id."""
        return {id_: now for part in self.parts for id_, now in part.scheduler.live.items()}

    def stalled_for_s(self) -> float:
        """Seconds since any episode ended or went on to its next stage."""
        return min(part.scheduler.stalled_for_s() for part in self.parts)

    def data_position(self) -> dict[str, JSON]:
        """Returns the position of each task source, the tasks that it handed out and that no step
        has trained on, and the state of its sampler."""
        positions: dict[str, JSON] = {}
        for part in self.parts:
            source = part.scheduler.source
            returned: list[JSON] = []
            returned += source.returned if part.stream is None else part.stream.outstanding()
            position: dict[str, JSON] = {"position": source.position, "returned": returned}
            if source.sampler is not None:
                position["sampler"] = source.sampler.state()
            positions[part.name] = position
        alone = positions.get("")
        return alone if isinstance(alone, dict) else positions

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where `data_position` was taken."""
        for part in self.parts:
            of_part = saved[part.name] if part.name else saved
            source = part.scheduler.source
            source.position = of_part["position"]
            source.returned.clear()
            source.returned.extend(of_part.get("returned", []))
            if source.sampler is not None:
                source.sampler.restore(of_part.get("sampler", {}), source.returned)

    async def aclose(self) -> None:
        """Cancel what is in flight; every episode begun has its record after this."""
        for part in self.parts:
            if part.stream is not None:
                await part.stream.aclose()


def merged(batches: Mapping[str, RolloutBatch]) -> RolloutBatch:
    """The batches of all environments as one."""
    whole = RolloutBatch([], [])
    for batch in batches.values():
        whole.groups += batch.groups
        whole.trajectories += batch.trajectories
        whole.dropped.update(batch.dropped)
        whole.num_restarts += batch.num_restarts
    return whole


def environment_metrics(batches: Mapping[str, RolloutBatch]) -> dict[str, float]:
    """`env/NAME/...` of every environment with a name: what `rollout_metrics` says of its batch."""
    return {
        f"env/{name}/{key.removeprefix('env/')}": value
        for name, batch in batches.items()
        if name and batch.trajectories
        for key, value in rollout_metrics(batch).items()
    }
