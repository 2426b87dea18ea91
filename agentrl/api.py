"""A run from Python: the same functions that the command line calls, which return data.

    from agentrl.api import load_config, train

    config = load_config({"model": {"path": "examples/quickstart/model"}, "run": {"num_steps": 5}})
    result = train(config)
    print([row["reward/mean"] for row in result.metrics])

They also work where an event loop runs already, as in a notebook; they block until they are done.
Importing this module loads no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config import CHANGEABLE, RunConfig, load_config
from agentrl.evaluate.episodes import Shard
from agentrl.evaluate.measure import summarise
from agentrl.evaluate.statistics import EvalStatistics
from agentrl.rollout.log import read_trajectories
from agentrl.rollout.metrics import error_codes, rollout_metrics
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.rollout.signals import read_signals
from agentrl.train.evaluate import Progress, play
from agentrl.types import JSON, Group, Trajectory
from agentrl.view.tracking import METRICS_FILE, MetricsWriter, read_metrics

if TYPE_CHECKING:
    from agentrl.train.callbacks import Callback

__all__ = [
    "CHANGEABLE",
    "Evaluation",
    "Rollouts",
    "RunConfig",
    "TrainingResult",
    "evaluate",
    "load_config",
    "read_metrics",
    "read_signals",
    "read_trajectories",
    "rollout",
    "train",
]


@dataclass(slots=True, frozen=True)
class TrainingResult:
    """The folder of a run and its metrics. Empty on ranks above 0 of several."""

    run_dir: Path
    """Metrics, trajectories, signals, checkpoints and the report lie here."""
    metrics: list[dict[str, Any]]
    """One per step, `step` first: the lines of `metrics.jsonl`."""
    checkpoint: Path | None
    """The newest, a folder that transformers and `evaluate` load."""


@dataclass(slots=True, frozen=True)
class Rollouts:
    """Episodes that were played."""

    groups: list[Group]
    """The trajectories by task."""
    trajectories: list[Trajectory]
    """Every trajectory, failed ones included."""
    metrics: dict[str, float]
    """`reward/mean` and the other metrics of rollouts (docs/metrics.md), by name."""


@dataclass(slots=True, frozen=True)
class Evaluation:
    """Episodes that were played to measure a policy."""

    groups: list[Group]
    """The trajectories by task."""
    trajectories: list[Trajectory]
    """Every trajectory, failed ones included."""
    statistics: EvalStatistics | None
    """avg@k and pass@k with confidence intervals; None where every sample failed."""

    def to_json(self) -> dict[str, JSON]:
        """Returns the estimates with their intervals, and the number of failed samples."""
        errors = error_codes(self.trajectories)
        record: dict[str, JSON] = {
            "num_tasks": len(self.groups),
            "num_samples": len(self.trajectories),
            "num_failed": sum(errors.values()),
            "errors": dict(errors),
            "first_error": next((t.error.message for t in self.trajectories if t.error), None),
        }
        if self.statistics is not None:
            record["confidence"] = self.statistics.confidence
            average = asdict(self.statistics.average)
            record[f"avg@{self.statistics.samples_per_task}"] = average
            for k, estimate in self.statistics.pass_at.items():
                record[f"pass@{k}"] = asdict(estimate)
            for k, estimate in self.statistics.all_of.items():
                if k > 1:  # of one sample both are the same
                    record[f"pass^{k}"] = asdict(estimate)
        return record


def train(
    config: RunConfig, *, callbacks: Sequence[Callback] = (), quiet: bool = False
) -> TrainingResult:
    """Trains a whole run, as `agentrl train` does.

    Args:
        config: made by `load_config` from a file or a dictionary. `run.resume` continues.
        callbacks: called with a `StepEnd` after every step. They see the step's metrics and
            trajectories, may log metrics of their own, change a key of `CHANGEABLE`, and stop the
            run.
        quiet: show no progress.

    Raises:
        AgentRLError: with the reason and the remedy. Everything saved before stays valid.
    """
    from agentrl.train import loop
    from agentrl.train.checkpoint import latest_checkpoint

    run_dir = loop.train(config, callbacks=callbacks, quiet=quiet)
    if run_dir == Path():  # a rank that followed another
        return TrainingResult(run_dir, [], None)
    return TrainingResult(run_dir, read_metrics(run_dir), latest_checkpoint(run_dir))


def evaluate(
    config: RunConfig,
    *,
    checkpoint: str | None = None,
    on_progress: Progress | None = None,
    out: Path | None = None,
    resume: bool = False,
    shard: Shard | None = None,
) -> Evaluation:
    """Measures a policy on the tasks of `[eval]`, as `agentrl eval` does.

    Args:
        checkpoint: a directory, or `latest` of the run directory; None: `model.path`, or the
            model that the servers of `[inference]` hold.
        on_progress: called with (episodes ended, episodes dispatched).
        out: a folder that gets every episode when it ends, and `eval.json`; None writes nothing.
        resume: play only episodes that are missing in the folder, or that failed for a reason that
            may have passed.
        shard: the part of the tasks that is played, into a folder of its own below `out`.

    Raises:
        AgentRLError: with the reason and the remedy.
    """
    played = play(config, checkpoint, on_progress, out=out, resume=resume, shard=shard)
    result = Evaluation(played.groups, played.trajectories, summarise(played, config))
    if out is not None:
        folder = out / str(shard) if shard else out
        (folder / "eval.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
    return result


def rollout(
    config: RunConfig,
    *,
    checkpoint: str | None = None,
    out: Path | str | None = None,
    on_progress: Progress | None = None,
    resume: bool = False,
) -> Rollouts:
    """Plays the tasks of `[eval]`, as `agentrl rollout` does.

    Args:
        checkpoint: see `evaluate`.
        out: a directory for configuration, metrics and trajectories; None writes nothing.
        on_progress: see `evaluate`.
        resume: play only episodes that are missing in `out`; see `evaluate`.

    Raises:
        ConfigError: `out` already holds rollouts, and `resume` is false or their configuration
            differs.
        AgentRLError: with the reason and the remedy.
    """
    started = time.perf_counter()
    folder = Path(out) if out is not None else None
    batch = play(config, checkpoint, on_progress, out=folder, resume=resume)
    played = measured(batch, time.perf_counter() - started)
    if folder is not None:
        if resume:
            (folder / METRICS_FILE).unlink(missing_ok=True)
        with MetricsWriter(folder) as writer:
            writer.write(0, played.metrics)
    return played


def measured(played: RolloutBatch, seconds: float) -> Rollouts:
    """Returns episodes with their metrics; `seconds` is the time that it took to play them."""
    num_tokens = sum(t.num_sampled_tokens for t in played.trajectories)
    metrics = rollout_metrics(played) | {
        "time/rollout_s": seconds,
        "rollout/tokens_per_s": num_tokens / seconds,
    }
    return Rollouts(played.groups, played.trajectories, metrics)
