"""Shows a run while it runs: a live panel on a terminal, one line per step in a log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, Self

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.view.curves import (
    KEY_METRICS,
    REWARD,
    duration,
    held_out,
    number,
    series,
    short_number,
    text_plot,
)
from agentrl.view.escape import plain

UNITS = {"rollout": "episodes", "train": "micro-batches", "eval": "episodes"}
"""What a phase counts."""

RECENT_STEPS_FOR_ETA = 20


def loading(what: str, *, quiet: bool = False) -> AbstractContextManager[object]:
    """Shows a moving line on a terminal while something loads; elsewhere shows nothing."""
    console = Console(stderr=True)
    return nullcontext() if quiet or not console.is_terminal else console.status(plain(what))


class Display:
    """Shows progress between `with` and its end; methods may be called from any thread.

    On a terminal a panel is redrawn in place; anything printed or logged meanwhile appears above
    it. Elsewhere every step is one line. At the end the reward curve is drawn.

    Args:
        total_steps: step numbers run from 1 to this; a resumed run starts later.
        title: the run's name.
        quiet: print nothing at all.
        earlier: lines of metrics.jsonl of what a resumed run did before.
        file: default standard output.
    """

    def __init__(
        self,
        total_steps: int,
        title: str = "agentrl",
        quiet: bool = False,
        *,
        earlier: Sequence[Mapping[str, Any]] = (),
        file: IO[str] | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.title = plain(title)
        self.quiet = quiet
        self.console = Console(file=file, highlight=False)
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._moved_handlers: list[tuple[logging.StreamHandler, Any]] = []
        self._started = time.monotonic()
        self._step_ends: list[float] = []
        self._step = max((row["step"] for row in earlier), default=0)
        self._phase: tuple[str, int, int] | None = None
        self._metrics: dict[str, float] = {}
        self._rewards = series(earlier, REWARD)
        self._held_out: dict[str, list[tuple[int, float]]] = {}
        for row in earlier:
            self._add_held_out(row["step"], row)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if not self.quiet and self.console.is_terminal:
            self._live = Live(
                self, console=self.console, refresh_per_second=4, transient=True, screen=False
            )
            self._live.start()
            self._move_log_handlers()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._live is not None:
            for handler, stream in self._moved_handlers:
                handler.setStream(stream)
            self._live.stop()
            self._live = None
        if not self.quiet and (kind is None or self._step_ends):
            self._print_summary()

    def phase(self, name: str, done: int, total: int) -> None:
        """Shows that the run is in phase `name`, such as `rollout`, and did `done` of `total`."""
        with self._lock:
            self._phase = (name, done, total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows that step number `step` (from 1) is finished."""
        values = {key: value for key in metrics if (value := number(metrics[key])) is not None}
        with self._lock:
            now = time.monotonic()
            before = self._step_ends[-1] if self._step_ends else self._started
            self._step_ends.append(now)
            self._step = step
            self._phase = None
            self._metrics = values
            if REWARD in values:
                self._rewards.append((step, values[REWARD]))
            self._add_held_out(step, values)
        if not self.quiet and self._live is None:
            self.console.print(self._log_line(step, values, now - before), soft_wrap=True)

    def _add_held_out(self, step: int, metrics: Mapping[str, Any]) -> None:
        for label, reward in held_out(metrics).items():
            self._held_out.setdefault(label, []).append((step, reward))

    def note(self, line: str) -> None:
        """Prints a line that stays: a warning, or where something was written."""
        if not self.quiet:
            self.console.print(Text(plain(line)), soft_wrap=True)

    # ------------------------------------------------------------------ the panel on a terminal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the panel, several times a second."""
        with self._lock:
            parts = [self._progress(), *self._curve(options.max_width - 6, console.height)]
            if self._metrics:
                parts.append(self._numbers(options.max_width - 6))
        yield Panel(
            Group(*parts),
            title=Text(
                self.title,
                style="bold",
                no_wrap=True,
                overflow="ellipsis" if self._unicode() else "crop",
            ),
            title_align="left",
            border_style="dim",
            box=box.ROUNDED if self._unicode() else box.ASCII,
            # Room for the ^C that a terminal writes behind it: in the next line it would make the
            # panel's own place wrong by one, and a border would stay.
            width=options.max_width - 2,
        )

    def _progress(self) -> Table:
        elapsed = time.monotonic() - self._started
        left = self._seconds_left()
        times = f"{duration(elapsed)} elapsed"
        times += f", {duration(left)} left" if left is not None else ""
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True, min_width=10)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(
            Text(f"step {self._step}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(1, self.total_steps), completed=self._step),
            Text(times),
        )
        if self._phase is None:
            grid.add_row(Text(""), Text(""), Text(""))
        else:
            name, done, total = self._phase
            counted = f"{done}/{total} {UNITS.get(name, '')}".rstrip() if total > 1 else ""
            grid.add_row(
                Text(name, style="cyan"),
                ProgressBar(total=max(1, total), completed=done, complete_style="cyan")
                if total > 1
                else Text("..."),
                Text(counted),
            )
        return grid

    def _curve(self, width: int, terminal_height: int) -> list[Text]:
        # One row more than a multiple of the usual tick counts: see _row_ticks.
        height = 9 if terminal_height >= 24 else 5
        lines = text_plot(self._rewards, width=width, height=height, ascii_only=not self._unicode())
        if terminal_height < 14:
            return []
        if not lines:
            return [Text("the reward curve appears after two steps", style="dim")]
        return [Text("reward", style="bold green"), *[Text(line, style="green") for line in lines]]

    def _numbers(self, width: int) -> Table:
        newest = {label: points[-1][1] for label, points in self._held_out.items()}
        cells = [
            Text.assemble((f"{label} ", "dim"), (short_number(value), "bold"))
            for label, value in _numbers_of(self._metrics, newest).items()
        ]
        widest = max(cell.cell_len for cell in cells) if cells else 1
        per_row = max(1, min(len(cells), (width + 3) // (widest + 3)))
        grid = Table.grid(padding=(0, 3))
        for start in range(0, len(cells), per_row):
            grid.add_row(*cells[start : start + per_row])
        return grid

    def _seconds_left(self) -> float | None:
        ends = [self._started, *self._step_ends][-RECENT_STEPS_FOR_ETA - 1 :]
        if len(ends) < 2:
            return None
        per_step = (ends[-1] - ends[0]) / (len(ends) - 1)
        running = time.monotonic() - ends[-1]
        return max(0.0, per_step * (self.total_steps - self._step) - running)

    def _move_log_handlers(self) -> None:
        """Redirects log handlers to the console, so that log lines do not break the panel.

        rich redirects sys.stdout and sys.stderr while it draws, but an earlier handler keeps the
        real stream."""
        real = (sys.__stdout__, sys.__stderr__)
        loggers = [logging.getLogger(), logging.getLogger("agentrl")]
        for handler in [handler for logger in loggers for handler in logger.handlers]:
            if not isinstance(handler, logging.StreamHandler):
                continue
            stream = handler.stream
            if stream is not None and stream in real:
                self._moved_handlers.append((handler, stream))
                handler.setStream(sys.stdout if stream is sys.__stdout__ else sys.stderr)

    # ------------------------------------------------------------------ lines

    def _log_line(self, step: int, values: Mapping[str, float], seconds: float) -> Text:
        numbers = [
            f"{label} {short_number(value)}"
            for label, value in _numbers_of(values, held_out(values)).items()
        ]
        left = self._seconds_left()
        times = f"{seconds:.1f} s" + (f", {duration(left)} left" if left else "")
        return Text("  ".join([f"step {step}/{self.total_steps}", *numbers, f"({times})"]))

    def _print_summary(self) -> None:
        width = min(self.console.width, 100) if self.console.is_terminal else 80
        lines = text_plot(self._rewards, width=width, height=9, ascii_only=not self._unicode())
        if lines:
            for label, points in {"reward": self._rewards, **self._held_out}.items():
                self.console.print(Text(_course(label, points)), soft_wrap=True)
            for line in lines:
                self.console.print(Text(line, style="green"), soft_wrap=True)
        elapsed = duration(time.monotonic() - self._started)
        done = len(self._step_ends)
        self.console.print(
            Text(f"{done} step{'' if done == 1 else 's'} in {elapsed}"), soft_wrap=True
        )

    def _unicode(self) -> bool:
        return (self.console.encoding or "").lower().startswith("utf")


def _numbers_of(metrics: Mapping[str, float], evaluated: Mapping[str, float]) -> dict[str, float]:
    """Returns what a line and the panel show of a step, by short name, in their order."""
    of_step = {label: metrics[key] for key, label in KEY_METRICS.items() if key in metrics}
    reward = of_step.pop(KEY_METRICS[REWARD], None)
    return ({} if reward is None else {KEY_METRICS[REWARD]: reward}) | dict(evaluated) | of_step


def _course(label: str, points: Sequence[tuple[int, float]]) -> str:
    (first_step, first), (last_step, last) = points[0], points[-1]
    best_step, best = max(points, key=lambda point: point[1])
    return (
        f"{label}: {short_number(first)} at step {first_step}, {short_number(last)} at step "
        f"{last_step}, {short_number(best)} at best (step {best_step})"
    )
