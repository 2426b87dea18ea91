"""Prints the results of `agentrl eval` and `agentrl rollout`, which `agentrl.api` returns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentrl import api
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.evaluate.episodes import Shard
from agentrl.rollout.metrics import error_codes

MAX_FAILED = 0.1
"""The share of failed episodes up to which a command succeeds."""


def evaluate_command(
    config: RunConfig,
    *,
    checkpoint: str | None,
    out: Path | None,
    resume: bool,
    shard: str | None,
    as_json: bool,
) -> int:
    """Runs `agentrl eval`: evaluates, prints a table or JSON, and keeps the trajectories in `out`
    if given.

    Raises:
        ConfigError: `shard` cannot be read.
    """
    if resume and out is None:
        raise ConfigError("--resume continues the evaluation in a folder: give --out DIR")
    try:
        part = Shard.parse(shard) if shard else None
    except ValueError as error:
        raise ConfigError(f"--shard: {error}") from None
    with _progress("eval") as show:
        evaluation = api.evaluate(
            config, checkpoint=checkpoint, on_progress=show, out=out, resume=resume, shard=part
        )
    result: dict[str, Any] = evaluation.to_json()
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(config, result)
    if evaluation.statistics is None:
        return 1
    return _status(result["num_failed"], result["num_samples"])


def rollout_command(config: RunConfig, *, checkpoint: str | None, out: Path, resume: bool) -> int:
    """Runs `agentrl rollout`: plays episodes and keeps trajectories, metrics and a report.

    Raises:
        ConfigError: `out` already holds rollouts, and `resume` is false or their configuration
            differs.
    """
    with _progress("rollout") as show:
        played = api.rollout(
            config, checkpoint=checkpoint, out=out, on_progress=show, resume=resume
        )
    return conclude(out, played)


def conclude(out: Path, played: api.Rollouts) -> int:
    """Writes the report, prints a summary and returns the exit status."""
    from agentrl.view.report import report_run

    failed = [t.error for t in played.trajectories if t.error is not None]
    print(
        f"{len(played.trajectories)} episodes of {len(played.groups)} tasks in "
        f"{played.metrics['time/rollout_s']:.1f} s, reward {played.metrics['reward/mean']:.3f}, "
        f"{len(failed)} failed"
    )
    if failed:
        print(f"failed: {dict(error_codes(played.trajectories))}; first: {failed[0].message}")
    print(f"trajectories, metrics and report: {report_run(out)}")
    return _status(len(failed), len(played.trajectories))


def _status(num_failed: int, num_played: int) -> int:
    """Returns the exit status: 1 if so many episodes failed that the figures say little."""
    if num_failed <= MAX_FAILED * num_played:
        return 0
    print(
        f"{num_failed} of {num_played} episodes failed, more than {MAX_FAILED:.0%}: the figures "
        "are those of the others alone (status 1; --resume plays what failed again)",
        file=sys.stderr,
    )
    return 1


@contextmanager
def _progress(what: str) -> Iterator[api.Progress]:
    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def _print_table(config: RunConfig, result: dict) -> None:
    title = (
        f"{config.env.id}, split {config.eval.split}: {result['num_tasks']} tasks, "
        f"{result['num_samples']} samples, {result['num_failed']} failed"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "value", "95% interval (over tasks)"):
        table.add_column(heading)
    for name, entry in result.items():
        if "@" in name or "^" in name:
            shown = "-" if entry["low"] is None else f"{entry['low']:.3f} to {entry['high']:.3f}"
            table.add_row(name, f"{entry['value']:.3f}", shown)
    console = Console()
    console.print(table)
    if result["num_failed"]:
        console.print(f"failed: {result['errors']}; first: {result['first_error']}", markup=False)
