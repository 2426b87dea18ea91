"""Functions of a user's own that a run calls after every step: to look, to log, to steer, to stop.

    def halve_when_done(end: StepEnd) -> None:
        if end.metrics["reward/mean"] > 0.9:
            end.change("train.learning_rate", end.config.train.learning_rate / 2)

What a callback changes is in every later checkpoint, so that a resumed run goes on with it. The
callbacks themselves are code, which no checkpoint holds: whoever resumes the run gives them again.
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
    """A step that has just ended: its metrics are not yet written, its checkpoint not yet saved."""

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
        """The folder of metrics, trajectories and checkpoints."""
        return self._run.run_dir

    @property
    def config(self) -> RunConfig:
        """The configuration as it is now, with all changes so far."""
        return self._run.config

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add numbers of your own to the step's line, and to every tracker.

        Raises:
            ConfigError: the run itself writes a metric of this name.
        """
        if taken := sorted(self.metrics.keys() & metrics.keys()):
            raise ConfigError(
                f"{', '.join(taken)}: the run writes this metric; choose another name"
            )
        self.metrics.update({name: float(value) for name, value in metrics.items()})

    def change(self, key: str, value: JSON) -> None:
        """Give a key another value from the next step on.

        Args:
            key: one of `agentrl.config.CHANGEABLE`, such as `train.learning_rate`.

        Raises:
            ConfigError: the key cannot change during this run, or not to this value.
        """
        self._run.change(key, value)
        self._display.note(f"after step {self.step}: {key} = {value}")

    def stop(self) -> None:
        """End the run after this step, saved as by Ctrl-C; `run.resume` continues it."""
        self._interrupted.set()


Callback = Callable[[StepEnd], None]
"""Called in the run's own thread, so that one which takes long holds the run up. What it raises
ends the run; `run.resume` then trains the steps since the newest checkpoint again."""
