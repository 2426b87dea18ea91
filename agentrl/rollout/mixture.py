"""Divides the groups of a step among a run's environments, and plays them.

Each environment has its own scheduler and, if rollouts play ahead, its own stream, so groups never
mix and one slow environment does not keep the others from playing ahead. How many
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

    Each group of a step goes to the environment that is owed most. The fraction of a group that is
    left is carried to the next step, so an environment gets its share over several steps even if
    that is less than a group per step."""

    def __init__(self, weights: Sequence[Weight], groups_per_step: int) -> None:
        self._weights = weights
        self._groups_per_step = groups_per_step
        self._owed = [0.0] * len(weights)
        self._steps: list[list[int]] = []

    def __call__(self, step: int) -> list[int]:
        """Returns the number of groups of each environment in a step; steps count from 1."""
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
    """Reserves capacity for an episode first in its environment and then in the whole run, so that
    an episode waiting for a full environment takes none from others."""

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
    """Plays the groups of a step, each environment's quota of them."""

    def __init__(self, parts: list[Part], quotas: Quotas, keep: KeepGroup | None) -> None:
        self.parts = parts
        self.quotas = quotas
        self._keep = keep

    def start(self, config: RunConfig, last_step: int) -> None:
        """Starts to play ahead, if the engine allows it."""
        rollout = config.rollout
        least, straggler_timeout_s = rollout.stragglers or (None, None)
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
                min_group_size=least,
                straggler_timeout_s=straggler_timeout_s,
            )
            part.stream.advance(last_step)

    async def collect(
        self, step: int, on_progress: Callable[[int, int], None]
    ) -> dict[str, RolloutBatch]:
        """Returns the groups of a step by environment. If cancelled, streams keep their groups."""
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
        """Gives the rewards of a step's groups to the samplers, and returns the samplers'
        metrics."""
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
        """Tells the streams the new version of the policy, which lets them play further ahead."""
        for part in self.parts:
            if part.stream is not None:
                part.stream.advance(version)

    @property
    def plays_ahead(self) -> bool:
        return any(part.stream is not None for part in self.parts)

    @property
    def live(self) -> dict[str, Progress]:
        """Returns the episodes in progress, by trajectory id."""
        return {id_: now for part in self.parts for id_, now in part.scheduler.live.items()}

    def stalled_for_s(self) -> float:
        """Returns the seconds since any episode last ended or moved to its next stage."""
        return min(part.scheduler.stalled_for_s() for part in self.parts)

    def data_position(self) -> dict[str, JSON]:
        """Returns, for each environment, the position of its task source, the tasks that were
        handed out but not yet trained on, and the state of its sampler."""
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
        """Restores the state that `data_position` returned."""
        for part in self.parts:
            of_part = saved[part.name] if part.name else saved
            source = part.scheduler.source
            source.position = of_part["position"]
            source.returned.clear()
            source.returned.extend(of_part.get("returned", []))
            if source.sampler is not None:
                source.sampler.restore(of_part.get("sampler", {}), source.returned)

    async def aclose(self) -> None:
        """Cancels the episodes in flight. Every episode that began has its record after this."""
        for part in self.parts:
            if part.stream is not None:
                await part.stream.aclose()


def merged(batches: Mapping[str, RolloutBatch]) -> RolloutBatch:
    """Joins the batches of all environments into one."""
    whole = RolloutBatch([], [])
    for batch in batches.values():
        whole.groups += batch.groups
        whole.trajectories += batch.trajectories
        whole.dropped.update(batch.dropped)
        whole.num_restarts += batch.num_restarts
    return whole


def environment_metrics(batches: Mapping[str, RolloutBatch]) -> dict[str, float]:
    """Computes `rollout_metrics` for every named environment, under `env/NAME/`."""
    return {
        f"env/{name}/{key.removeprefix('env/')}": value
        for name, batch in batches.items()
        if name and batch.trajectories
        for key, value in rollout_metrics(batch).items()
    }
