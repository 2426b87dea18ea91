"""Tables and curves of docs/learning.md, made of the results of `learning.py` and nothing else."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from learning_rows import ROOT, ROWS, Arm, Row

DOCS = ROOT / "docs"
RESULTS = DOCS / "learning" / "results.json"
WINDOW = 5
"""Steps over which a reward is averaged."""

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Arm -> seed -> what its run left."""


def digest(result: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes one run for the report; `made` says how the run was made."""
    if all(isinstance(value, dict) for value in result.values()):  # of train_step.py
        return dict(result)
    kept: dict[str, Any] = {key: result[key] for key in ("made", "peak_mib") if key in result}
    kept |= {
        key: [None if value is None else float(f"{value:.9g}") for value in values]
        for key, values in result.items()
        if key != "cpu_s" and isinstance(values, list)
    }
    if "cpu_s" in result:  # the first steps hold what is done once
        stamps = result["cpu_s"]
        kept["cpu_s_per_step"] = round((stamps[-1] - stamps[4]) / (len(stamps) - 5), 4)
    return kept


def curves(arm: str, results: Results) -> np.ndarray:
    """(seeds, steps) of the reward; of episodes that were solved, where a run counts those."""
    runs = results[arm].values()
    return np.asarray([run.get("env/solved", run.get("reward")) for run in runs], float)


def smooth(curve: np.ndarray) -> np.ndarray:
    """Mean of the last `WINDOW` steps, fewer at the beginning."""
    summed = np.cumsum(np.insert(curve, 0, 0, axis=-1), axis=-1)
    steps = np.arange(1, curve.shape[-1] + 1)
    first = np.maximum(steps - WINDOW, 0)
    return (summed[..., steps] - summed[..., first]) / (steps - first)


def samples_to_goal(row: Row, curve: np.ndarray) -> float:
    """Returns the samples until one seed's smoothed reward reaches the goal, else nan."""
    reached = np.flatnonzero(smooth(curve) >= row.goal)
    return float("nan") if not len(reached) else float(reached[0] + 1) * row.samples_per_step


def spread(values: np.ndarray, digits: int = 3) -> str:
    """Mean over the seeds and standard deviation (divided by n - 1)."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def to_goal(row: Row, arm: str, results: Results) -> str:
    samples = np.asarray([samples_to_goal(row, curve) for curve in curves(arm, results)])
    if np.isnan(samples).all():
        return "-"
    reached = samples[~np.isnan(samples)]
    missing = f" ({len(samples) - len(reached)} never)" if len(reached) < len(samples) else ""
    return f"{reached.mean():,.0f}{missing}"


def cpu(arm: str, results: Results) -> np.ndarray:
    """Seconds per step of each seed. What else the machine does adds to them: the least counts."""
    return np.asarray([run["cpu_s_per_step"] for run in results[arm].values()])


def trl_table(row: Row, results: Results) -> str:
    arms = present(row, results)
    smoothed = {arm.name: smooth(curves(arm.name, results)) for arm in arms}
    ours = smoothed["agentrl"]
    lines = []
    for step in range(10, ours.shape[1] + 1, 10):
        cells = [f"{step} ({step * row.samples_per_step:,})"]
        cells += [spread(smoothed[arm.name][:, step - 1]) for arm in arms]
        lines.append(cells)
    lines.append([f"samples to {row.goal}", *(to_goal(row, arm.name, results) for arm in arms)])
    lines.append(["CPU s per step", *(f"{cpu(arm.name, results).min():.3f}" for arm in arms)])
    ratios = ["1"]
    for arm in arms[1:]:
        by_seed = sorted(cpu(arm.name, results) / cpu("agentrl", results))
        least = cpu(arm.name, results).min() / cpu("agentrl", results).min()
        ratios.append(f"{least:.2f} (by seed {by_seed[0]:.2f} to {by_seed[-1]:.2f})")
    lines.append(["times agentrl's", *ratios])
    return table(["step (samples)", *(arm.about for arm in arms)], lines)


def replay_table(row: Row, results: Results) -> str:
    lines = []
    for arm in present(row, results):
        (run,) = results[arm.name].values()
        theirs, ours = np.asarray(run["grad_norm"]), np.asarray(run["grad_norm_agentrl"])
        assert (ours > 0).all(), f"{arm.name}: a step without gradient compares nothing"
        norms, apart = np.abs(theirs - ours) / ours, np.asarray(run["update_difference"])
        weighted, entries = run["weighted_update_difference"], run["gradient_difference"]
        lines.append(
            [
                arm.about,
                str(len(apart)),
                f"{np.median(norms):.1e}, {norms.max():.1e}",
                f"{entries[0]:.1e}, {max(entries):.1e}",
                f"{apart[0]:.1e}, {apart[1:].max():.1e}",
                f"{weighted[0]:.1e}, {max(weighted[1:]):.1e}",
                f"{np.mean(run['clipped']):.1%}",
            ]
        )
    head = ["", "steps", "gradient norm: median, largest", "gradient: first, largest"]
    head += ["update: first, largest later", "weighted: first, largest later", "clipped tokens"]
    return table(head, lines)


VARIANTS = {
    "packed": "agentrl, packed rows",
    "shared": "agentrl, shared prefixes too (the default)",
    "trl": "TRL's AsyncGRPOTrainer, shared prefixes",
    "padded": "transformers, padded",
    "padded_sorted": "transformers, padded after sorting by length",
}


def packing_table(row: Row, results: Results) -> str:
    lines = []
    for arm in present(row, results):
        (batches,) = results[arm.name].values()
        for batch, figures in batches.items():
            if batch == "made":
                continue
            prompts = batch.partition("prompts=")[2]
            drawn = f"{prompts}, heavy-tailed"
            if prompts.endswith("u"):
                drawn = f"{prompts.removesuffix('u')}, uniform"
            for variant in [name for name in VARIANTS if name in figures]:
                one = figures[variant]
                seconds = min(one["seconds"])
                ratio = seconds / min(figures["shared"]["seconds"])
                lines.append(
                    [
                        "24 to 160" if prompts == "0" else drawn,
                        VARIANTS[variant],
                        f"{one['num_tokens']:,}",
                        f"{seconds:.2f}",
                        f"{ratio:.2f}",
                        f"{one['memory_mib']:,.0f}",
                        f"{one['gradient_difference']:.1e}",
                    ]
                )
    head = ["prompt tokens", "", "tokens computed", "CPU s", "of shared", "MiB", "gradient"]
    return table(head, lines)


ENDS = (f"first {WINDOW} steps", f"last {WINDOW} steps", "samples to {goal}")
CURVE_COLUMNS = ("seeds", "steps", *ENDS, "CPU s per step")
STALENESS_COLUMNS = ("seeds", "mean staleness", *ENDS)
REAL_COLUMNS = ("seeds", "steps", *ENDS, "held out, at the end", "CPU s per step", "peak GiB")


def curve_table(row: Row, results: Results, columns: Sequence[str] = CURVE_COLUMNS) -> str:
    lines = []
    for arm in present(row, results):
        values, runs = curves(arm.name, results), list(results[arm.name].values())

        def known(key: str, runs: Sequence[Mapping[str, Any]] = runs) -> list[list[float]]:
            """Returns the metric's values by step, of each run that has it."""
            return [[v for v in run[key] if v is not None] for run in runs if key in run]

        ends = (values[:, :WINDOW].mean(1), values[:, -WINDOW:].mean(1))
        cells = dict(zip(ENDS, (*map(spread, ends), to_goal(row, arm.name, results)), strict=True))
        cells |= {"seeds": str(len(values)), "steps": str(values.shape[1])}
        digits = 1 if "peak GiB" in columns else 2
        cells["CPU s per step"] = f"{cpu(arm.name, results).min():.{digits}f}"
        if "mean staleness" in columns:
            stale = [run[-WINDOW:] for run in known("rollout/staleness_mean")]
            cells["mean staleness"] = f"{np.mean(stale):.2f}"
        if "peak GiB" in columns:
            held_out = [run[-1] for run in known("eval/avg@1")]
            cells["held out, at the end"] = spread(np.asarray(held_out)) if held_out else "-"
            peak = max(run.get("peak_mib", 0) for run in runs) / 1024
            cells["peak GiB"] = f"{peak:.1f}" if peak else "-"
        name = arm.about or f"`{arm.name}`"
        if explained := known("critic/explained_variance"):
            mean = np.mean([v for run in explained for v in run[-WINDOW:]])
            name += f" (explained variance of the critic {mean:.2f})"
        lines.append([name, *(cells[column] for column in columns)])
    return table(["", *(column.format(goal=row.goal) for column in columns)], lines)


def present(row: Row, results: Results) -> list[Arm]:
    return [arm for arm in row.arms if arm.name in results]


def shows(row: Row, results: Results) -> bool:
    """Returns whether enough of a row was run to compare: two arms, if it has two."""
    return len(present(row, results)) >= min(2, len(row.arms))


TABLES: dict[str, Callable[[Row, Results], str]] = {
    "trl": trl_table,
    "replay": replay_table,
    "packing": packing_table,
    "staleness": partial(curve_table, columns=STALENESS_COLUMNS),
    "real": partial(curve_table, columns=REAL_COLUMNS),
    "tools": partial(curve_table, columns=REAL_COLUMNS),
}


def recorded(row: Row, results: Results) -> str:
    """When the runs of a row were made, and of which commits of this repository."""
    made = [run["made"] for arm in present(row, results) for run in results[arm.name].values()]
    days = sorted({each["date"] for each in made})
    commits = sorted({(each["date"], each["commit"]) for each in made})
    names = ", ".join(dict.fromkeys(commit for _, commit in commits))
    return f"Recorded on {' and '.join(days)}, commits {names}."


def tables(results: Results) -> dict[str, str]:
    """Row -> its table, of the rows of which enough was run to compare."""
    return {
        name: f"{TABLES.get(name, curve_table)(row, results)}\n\n{recorded(row, results)}"
        for name, row in ROWS.items()
        if shows(row, results)
    }


def pages(results: Results) -> dict[Path, str]:
    """Renders the files that the results change: docs/learning.md and its curves."""
    text = (DOCS / "learning.md").read_text()
    for name, made in tables(results).items():
        begin, end = f"<!-- table: {name}, made by benchmarks/learning.py -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if found:
            text = f"{before}{begin}\n{made}\n\n{end}{rest.partition(end)[2]}"
    made = {DOCS / "learning.md": text}
    for name, row in ROWS.items():
        if shows(row, results) and name not in ("replay", "packing"):
            made[RESULTS.parent / f"{name}.svg"] = chart(row, results)
    return made


COLOURS = [
    *("#3b82f6", "#d9670b", "#10946f", "#a855f7", "#e11d48"),
    *("#8a7a00", "#64748b", "#0891b2", "#be5bb0", "#4d7c0f"),
]
"""Each readable on white and on black, as pages are light or dark by their own switch."""


def chart(row: Row, results: Results) -> str:
    """Smoothed curves over the samples, mean over the seeds, with a band of one deviation."""
    arms = present(row, results)[: len(COLOURS)]
    left, top, width, height = 44, 12 + 17 * len(arms), 600, 240
    longest = max(curves(arm.name, results).shape[1] for arm in arms)

    def place(step: float, value: float) -> str:
        return f"{left + width * step / longest:.1f},{top + height * (1 - value):.1f}"

    parts = []
    for value in (0, 0.2, 0.4, 0.6, 0.8, 1):
        x, y = place(0, value).split(",")
        parts.append(f'<path d="M{x} {y}h{width}" stroke="#80808055"/>')
        parts.append(f'<text x="{left - 6}" y="{float(y) + 4}" text-anchor="end">{value}</text>')
    for step in range(0, longest + 1, 10):
        x = place(step, 0).split(",")[0]
        shown = f"{step * row.samples_per_step:,}"
        parts.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{shown}</text>')
    middle = left + width / 2
    parts.append(f'<text x="{middle}" y="{top + height + 36}" text-anchor="middle">samples</text>')
    for number, (arm, colour) in enumerate(zip(arms, COLOURS, strict=False)):
        values = smooth(curves(arm.name, results))
        mean = values.mean(0)
        steps = range(1, len(mean) + 1)
        if len(values) > 1:
            deviation = values.std(0, ddof=1)
            edges = [np.clip(mean + sign * deviation, 0, 1) for sign in (1, -1)]
            upper, lower = ([*map(place, steps, edge)] for edge in edges)
            around = " ".join(upper + lower[::-1])
            parts.append(f'<polygon points="{around}" fill="{colour}" opacity="0.13"/>')
        line = " ".join(map(place, steps, mean))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        name = html.escape((arm.about or arm.name).replace("`", ""))
        y = 14 + 17 * number
        parts.append(f'<path d="M{left} {y - 4}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{left + 24}" y="{y}">{name}</text>')
    size = f"{left + width + 24} {top + height + 44}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="#7d838c">\n'
        f"<title>{html.escape(row.title)}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )
