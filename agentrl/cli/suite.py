"""`agentrl suite`: several benchmarks with several models, in one command and one table.

Every cell is a folder as `agentrl eval --out` makes it, so a killed suite continues where it
stopped, and `agentrl regrade` and `agentrl compare` read any of them.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import api
from agentrl.config import RunConfig, load_config, load_tables
from agentrl.errors import ConfigError, DataError
from agentrl.evaluate.compare import compare
from agentrl.evaluate.episodes import CONFIG_FILE, SUITE_FILE, plays_again, read_evaluation
from agentrl.evaluate.statistics import Estimate
from agentrl.types import JSON, Trajectory


@dataclass(slots=True, frozen=True)
class Suite:
    """The contents of a suite file."""

    models: list[str]
    benchmarks: list[str]
    cells: dict[tuple[str, str], RunConfig]
    """Configuration by model and benchmark."""


def load_suite(path: Path) -> Suite:
    """Reads a suite file; docs/evaluation.md describes its keys.

    Raises:
        ConfigError: it cannot be read, or the configuration of a cell is wrong; names the cell.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    if unknown := sorted(data.keys() - {"run", "model", "benchmark"}):
        raise ConfigError(
            f"{path}: unknown key {unknown[0]}; a suite has run, [[model]] and [[benchmark]]"
        )
    shared: dict[str, Any] = {}
    if "run" in data:
        run = path.parent / str(data["run"])
        shared = load_config(run, []).to_json(exclude_none=True)
    models, benchmarks = _tables(path, data, "model"), _tables(path, data, "benchmark")
    cells = {}
    for model, of_model in models.items():
        for benchmark, of_benchmark in benchmarks.items():
            tables = [shared, _keys(of_model), _keys(of_benchmark)]
            id_ = of_benchmark.get("env", {}).get("id")
            if id_ is not None and id_ != shared.get("env", {}).get("id"):
                tables[0] = {key: table for key, table in shared.items() if key != "env"}
            source = f"{path}: model {model}, benchmark {benchmark}"
            cells[model, benchmark] = load_tables(tables, source, beside=path)
    return Suite(list(models), list(benchmarks), cells)


def _tables(path: Path, data: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    tables = data.get(kind)
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{path}: it has no [[{kind}]]; give at least one, with a name")
    named: dict[str, dict[str, Any]] = {}
    for table in tables:
        name = str(table.get("name", ""))
        if not re.fullmatch(r"(?![.]+$)[\w.-]+", name):
            raise ConfigError(
                f"{path}: [[{kind}]] name = {name!r}; names are of letters, digits, '.', '-' and "
                "'_'"
            )
        if name in named:
            raise ConfigError(f"{path}: two [[{kind}]] are named {name!r}")
        named[name] = table
    return named


def _keys(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "name"}


def play_suite(suite: Suite, out: Path) -> dict[str, JSON]:
    """Plays the episodes that `out` does not hold yet, and returns the result of every cell.

    Raises:
        ConfigError: `out` holds a cell of another configuration.
        AgentRLError: see `agentrl.api.evaluate`.
    """
    played: dict[tuple[str, str], list[Trajectory]] = {}
    cells: list[JSON] = []
    for number, ((model, benchmark), config) in enumerate(suite.cells.items(), 1):
        folder = out / model / benchmark
        said = f"{number}/{len(suite.cells)} {model}, {benchmark}"
        trajectories = _kept(folder, config)
        if trajectories is None:
            print(f"{said}: playing", file=sys.stderr, flush=True)
            resume = (folder / CONFIG_FILE).exists()
            trajectories = api.evaluate(config, out=folder, resume=resume).trajectories
        else:
            print(f"{said}: kept", file=sys.stderr, flush=True)
        played[model, benchmark] = trajectories
        result = json.loads((folder / "eval.json").read_text())
        cells.append(
            {"model": model, "benchmark": benchmark, "folder": str(folder), **result}
            | _spent(trajectories)
        )
    return {
        "models": list(suite.models),
        "benchmarks": list(suite.benchmarks),
        "cells": cells,
        "comparisons": _comparisons(suite, played),
    }


def _kept(folder: Path, config: RunConfig) -> list[Trajectory] | None:
    """Returns the episodes of a cell if it is complete under this configuration; else None."""
    if not (folder / "eval.json").is_file() or not (folder / CONFIG_FILE).is_file():
        return None
    before, trajectories = read_evaluation(folder)
    if before.to_json() != config.to_json() or any(plays_again(t) for t in trajectories):
        return None
    return trajectories


def _spent(trajectories: Sequence[Trajectory]) -> dict[str, JSON]:
    return {
        "tokens_read": sum(t.num_read_tokens for t in trajectories),
        "tokens_sampled": sum(t.num_sampled_tokens for t in trajectories),
        "seconds": sum(t.total_s for t in trajectories),
    }


def _comparisons(suite: Suite, played: Mapping[tuple[str, str], list[Trajectory]]) -> list[JSON]:
    """Compares every model with the first, task by task."""
    rows: list[dict[str, Any]] = []
    first = suite.models[0]
    for benchmark in suite.benchmarks:
        for model in suite.models[1:]:
            try:
                paired, _ = compare(played[first, benchmark], played[model, benchmark])
            except DataError:
                continue  # fewer than two tasks with a reward in both
            figures = {name: getattr(paired, name) for name in ("low", "high", "p_value")}
            rows.append(
                {"benchmark": benchmark, "model": model, "against": first, "shown": str(paired)}
                | {"difference": paired.value, **figures}
            )
    return list(rows)


# tables -------------------------------------------------------------------------------------------


def figure_of(cell: Mapping[str, Any]) -> tuple[str, Estimate | None]:
    """Returns the name of a cell's first figure, and the figure; None if every sample failed."""
    for name, value in cell.items():
        if name.startswith("avg@"):
            return name, Estimate(**value)
    return "avg@k", None


def as_markdown(result: Mapping[str, Any]) -> str:
    """Returns the result as tables in Markdown."""
    cells = {(cell["model"], cell["benchmark"]): cell for cell in result["cells"]}
    scores = [
        {"model": model}
        | {
            f"{name} ({figure_of(cells[result['models'][0], name])[0]})": _score(cells[model, name])
            for name in result["benchmarks"]
        }
        for model in result["models"]
    ]
    compared = [
        {
            "benchmark": row["benchmark"],
            "models": f"{row['model']} - {row['against']}",
            "difference": row["shown"],
            "p": f"{row['p_value']:.3g}",
        }
        for row in result["comparisons"]
    ]
    spent = [
        {
            "model": cell["model"],
            "benchmark": cell["benchmark"],
            "samples": cell["num_samples"],
            "failed": cell["num_failed"],
            "tokens read": f"{cell['tokens_read']:,.0f}",
            "tokens sampled": f"{cell['tokens_sampled']:,.0f}",
            "s per episode": f"{cell['seconds'] / max(cell['num_samples'], 1):.2f}",
        }
        for cell in result["cells"]
    ]
    tables = {
        "Mean reward, 95% interval over tasks": scores,
        "Differences, task by task; p of a permutation test": compared,
        "Spent": spent,
    }
    return "\n".join(_table(title, rows) for title, rows in tables.items() if rows)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    written = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    lines = [f"| {' | '.join(map(str, row))} |\n" for row in written]
    return f"{title}\n\n{''.join(lines)}"


def _score(cell: Mapping[str, Any]) -> str:
    _, estimate = figure_of(cell)
    if estimate is None:
        return "all failed"
    return str(estimate) + (f" ({cell['num_failed']} failed)" if cell["num_failed"] else "")


def suite_command(path: Path, out: Path, *, as_json: bool) -> int:
    """Runs `agentrl suite`: plays the missing episodes, writes the tables, prints them, and returns
    the exit status."""
    suite = load_suite(path)
    out.mkdir(parents=True, exist_ok=True)
    (out / SUITE_FILE).write_bytes(path.read_bytes())
    result = play_suite(suite, out)
    text = json.dumps(result, indent=2) + "\n"
    (out / "suite.json").write_text(text, "utf-8")
    (out / "suite.md").write_text(as_markdown(result), "utf-8")
    print(text if as_json else as_markdown(result), end="")
    cells: Any = result["cells"]
    return 0 if all(figure_of(cell)[1] is not None for cell in cells) else 1
