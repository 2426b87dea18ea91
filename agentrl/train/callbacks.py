"""Functions of yours that a run calls after every step: to observe, log, steer or stop it.

    def halve_when_done(end: StepEnd) -> None:
        if end.metrics["reward/mean"] > 0.9:
            end.change("train.learning_rate", end.config.train.learning_rate / 2)

Every later checkpoint holds what a callback changed, so a resumed run keeps it. Callbacks are code
and no checkpoint holds them: pass them again when you resume the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.train.run import Run
from agentrl.types import JSON, Trajectory
from agentrl.view.display import Display


@dataclass(slots=True, frozen=True)
class StepEnd:
    """A step that has just ended, before its metrics are written and its checkpoint is saved."""

    step: int
    """From 1."""
    metrics: dict[str, float]
    """The metrics that the step's line of `metrics.jsonl` will hold (docs/metrics.md)."""
    trajectories: list[Trajectory]
    """Every episode that the step played, failed and filtered ones included."""
    _run: Run
    _interrupted: asyncio.Event
    _display: Display

    @property
    def run_dir(self) -> Path:
        """Returns the directory of metrics, trajectories and checkpoints."""
        return self._run.run_dir

    @property
    def config(self) -> RunConfig:
        """Returns the current configuration, with all changes so far."""
        return self._run.config

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics of your own to the step's line and to every tracker.

        Raises:
            ConfigError: the run itself writes a metric of this name.
        """
        if taken := sorted(self.metrics.keys() & metrics.keys()):
            raise ConfigError(
                f"{', '.join(taken)}: the run writes this metric; choose another name"
            )
        self.metrics.update({name: float(value) for name, value in metrics.items()})

    def change(self, key: str, value: JSON) -> None:
        """Changes a key from the next step on.

        Args:
            key: one of `agentrl.config.CHANGEABLE`, such as `train.learning_rate`.

        Raises:
            ConfigError: the key cannot change during this run, or not to this value.
        """
        self._run.change(key, value)
        self._display.note(f"after step {self.step}: {key} = {value}")

    def stop(self) -> None:
        """Saves and ends the run after this step, as Ctrl-C does; `run.resume` continues it."""
        self._interrupted.set()


Callback = Callable[[StepEnd], None]
"""Called in the run's own thread, so a slow callback delays the run. An exception ends the run;
`run.resume` then trains the steps since the newest checkpoint again."""
