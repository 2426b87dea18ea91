"""The parts that the terminal display and the report share: the metrics that matter, the format of
numbers, and curves as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

KEY_METRICS: dict[str, str] = {
    "reward/mean": "reward",
    "policy/rollout_train_logprob_diff_mean": "mismatch",
    "rollout/error_fraction": "errors",
    "rollout/truncated_fraction": "truncated",
    "train/tokens_per_s": "tokens/s",
}
"""Metric -> short name, most telling first. Those that a run does not have are skipped."""

REWARD = "reward/mean"


LARGEST = 1e300
"""Sums and differences of numbers beyond this overflow, so they are shown as this."""


def held_out(metrics: Mapping[str, object]) -> dict[str, float]:
    """Returns the mean rewards of a step's evaluations, by "held-out" or "held-out NAME"."""
    found = {}
    for key, value in metrics.items():
        match = re.fullmatch(r"eval/(?:(.+)/)?avg@\d+", key)
        if match and (reward := number(value)) is not None:
            found["held-out" if match[1] is None else f"held-out {match[1]}"] = reward
    return found


def number(value: object) -> float | None:
    """Returns `value` as a finite float within `LARGEST`, or None for a metric that is missing,
    null or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return float(max(-LARGEST, min(LARGEST, value)))


def series(metrics: Sequence[Mapping[str, object]], key: str) -> list[tuple[int, float]]:
    """Returns (step, value) for every line of metrics.jsonl with a finite `key`."""
    points = []
    for row in metrics:
        value, step = number(row.get(key)), row.get("step")
        if value is not None and isinstance(step, int):
            points.append((step, value))
    return points


def short_number(value: float) -> str:
    """Formats a number with at most 4 significant digits in 7 to 9 characters: 0.4375, -0.0021,
    1.2e-06, 12.4k."""
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        return f"{value:.1e}"
    if size < 10:
        return f"{value:.4f}".rstrip("0").rstrip(".") if size < 1 else f"{value:.3g}"
    if size < 1000:
        return f"{value:.3g}" if size < 100 else f"{value:.0f}"
    for unit, scale in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if size < 999.5 * scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.1e}"


def duration(seconds: float) -> str:
    """Formats seconds as 12 s, 3:07 (minutes:seconds) or 2:03:07."""
    whole = max(0, round(seconds))
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{secs:02d}"
    return f"{minutes}:{secs:02d}" if minutes else f"{secs} s"


def nice_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Returns about `target` round numbers (1, 2 or 5 times a power of ten) that span [low,
    high]."""
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, 1e-300):
        # Flat, or not to be told apart from it.
        low, high = low - max(0.5, 1e-6 * largest), high + max(0.5, 1e-6 * largest)
    raw = (high - low) / max(1, target - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def binned(values: Sequence[float], num_bins: int) -> list[float]:
    """Averages neighbouring values into at most `num_bins` bins of nearly equal size."""
    if len(values) <= num_bins:
        return list(values)
    edges = [round(index * len(values) / num_bins) for index in range(num_bins + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def text_plot(
    points: Sequence[tuple[int, float]], *, width: int, height: int, ascii_only: bool = False
) -> list[str]:
    """Draws a line plot of (step, value) as `height` lines of text plus an axis, `width` columns
    wide.

    Braille characters give 2 x 4 dots per character; with `ascii_only` one star per character.
    Returns [] without two points.
    """
    if len(points) < 2 or height < 2:
        return []
    values = [value for _, value in points]
    ticks = _row_ticks(min(values), max(values), height)
    low, high = ticks[0], ticks[-1]
    every = (height - 1) // (len(ticks) - 1)
    labels = {height - 1 - every * index: short_number(tick) for index, tick in enumerate(ticks)}
    margin = max(len(label) for label in labels.values())
    columns = max(2, width - margin - 2)
    across, down = (1, 1) if ascii_only else (2, 4)
    dots = _line_dots(values, low, high, columns * across, height * down)
    corner, side, flat = ("+", "|", "-") if ascii_only else ("└", "┤", "─")
    lines = []
    for row in range(height):
        cells = "".join(_cell(dots, row, column, ascii_only) for column in range(columns))
        edge = side if row in labels or ascii_only else "│"
        lines.append(f"{labels.get(row, ''):>{margin}} {edge}{cells}".rstrip())
    first, last = str(points[0][0]), f"step {points[-1][0]}"
    lines.append(f"{'':>{margin}} {corner}{flat * columns}")
    lines.append(f"{'':>{margin}}  {first}{last:>{columns - len(first)}}")
    return lines


def _row_ticks(low: float, high: float, height: int) -> list[float]:
    """Returns the tightest axis of round numbers that spans [low, high] with a whole number of
    `height` rows between two ticks, so that the rows between two labels are always the same."""
    best: list[float] = []
    for target in range(2, height // 2 + 2):
        ticks = nice_ticks(low, high, target)
        step = ticks[1] - ticks[0]
        while len(ticks) < height and (height - 1) % (len(ticks) - 1):
            ticks.append(ticks[-1] + step)
        if len(ticks) <= height and (not best or ticks[-1] - ticks[0] <= best[-1] - best[0]):
            best = ticks
    if best:
        return best
    ticks = nice_ticks(low, high, 2)
    return [ticks[0], ticks[-1]]


def _line_dots(
    values: Sequence[float], low: float, high: float, columns: int, rows: int
) -> set[tuple[int, int]]:
    """Returns (column, row) of every dot of the connected line; row 0 is on top."""
    values = binned(values, columns)
    places = [
        (
            round(index * (columns - 1) / (len(values) - 1)),
            round((high - value) / (high - low) * (rows - 1)),
        )
        for index, value in enumerate(values)
    ]
    dots = set(places)
    for (x0, y0), (x1, y1) in pairwise(places):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(length + 1):
            dots.add((round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length)))
    return dots


def _cell(dots: set[tuple[int, int]], row: int, column: int, ascii_only: bool) -> str:
    if ascii_only:
        return "*" if (column, row) in dots else " "
    # The bits of a braille pattern, by (column, row) within its 2 x 4 dots.
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    pattern = sum(
        bits[x][y] for x in (0, 1) for y in range(4) if (2 * column + x, 4 * row + y) in dots
    )
    return chr(0x2800 + pattern) if pattern else " "
