"""Run directories as `agentrl view` reads them: files that may grow while they are looked at."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.config.sections import ModelSection
from agentrl.errors import DataError
from agentrl.evaluate.episodes import SUITE_FILE, value_at
from agentrl.rollout.index import TrajectoryIndex
from agentrl.rollout.log import TrajectoryEntry
from agentrl.view import glossary
from agentrl.view.curves import REWARD, binned, held_out, number, series
from agentrl.view.tracking import METRICS_FILE, STATUS_FILE, parse_metrics_line, read_status

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""
SPARKLINE_POINTS = 60
ZERO_WHEN_ABSENT = (
    "error/",
    "group/dropped/",
    "rollout/staleness_fraction/",
    "log/num_non_finite",
)


class RunFiles:
    """One run directory. Methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.id = hashlib.blake2b(str(self.path).encode(), digest_size=5).hexdigest()
        """Names the run in a page's address: inert, and the same from day to day."""
        self.lock = threading.RLock()
        self.metrics_generation = 0
        """Counts how often the metrics began anew, because a resumed run took some back."""
        self._metrics: list[dict[str, Any]] = []
        self._keys: dict[str, None] = {}
        self._position = self._inode = self._num_lines = 0
        self._damaged: list[str] = []
        self._index = TrajectoryIndex(self.path)

    @property
    def cell(self) -> tuple[str, str] | None:
        """Model and benchmark, if this is an evaluation of a suite."""
        in_suite = (self.path.parent.parent / SUITE_FILE).exists()
        return (self.path.parent.name, self.path.name) if in_suite else None

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl so far; [] before the first.

        A damaged line is left out, and `lacks` names it.

        Raises:
            DataError: no line can be read.
        """
        file = self.path / METRICS_FILE
        with self.lock:
            try:
                opened = file.open("rb")
            except FileNotFoundError:
                self._begin_anew(0)
                return []
            with opened:
                status = os.fstat(opened.fileno())
                # A resumed run puts another file in the place of the one that went further.
                if status.st_ino != self._inode or status.st_size < self._position:
                    self._begin_anew(status.st_ino)
                opened.seek(self._position)
                appended = opened.read()
            whole = appended[: appended.rfind(b"\n") + 1]
            self._position += len(whole)
            for line in whole.split(b"\n")[:-1]:
                self._num_lines += 1
                try:
                    row = parse_metrics_line(f"{file}:{self._num_lines}", line)
                except DataError as error:
                    self._damaged.append(str(error))
                    continue
                self._metrics.append(row)
                self._keys |= dict.fromkeys(key for key in row if key != "step")
            if self._damaged and not self._metrics:
                raise DataError(self._damaged[0])
            return self._metrics

    def _begin_anew(self, inode: int) -> None:
        if self._position:
            self.metrics_generation += 1
        self._metrics, self._keys, self._damaged = [], {}, []
        self._position, self._num_lines, self._inode = 0, 0, inode

    def entries(self) -> list[TrajectoryEntry]:
        """Returns the entries of all trajectories so far."""
        with self.lock:
            return self._index.refresh()

    @property
    def index_generation(self) -> int:
        return self._index.generation

    def config_text(self) -> str:
        file = self.path / "config.toml"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def config(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.config_text())
        except tomllib.TOMLDecodeError:  # its text is shown anyway
            return {}

    def decode(self) -> Decode | None:
        """Returns the decode function of the newest checkpoint's tokenizer, or of the model's; None
        without one."""
        files = sorted(self.path.glob("checkpoints/step_*/tokenizer.json"))
        model = self.config().get("model", {}).get("path")
        if not files and isinstance(model, str):
            files = list(Path(model).glob("tokenizer.json"))
        return _decoder(files[-1], files[-1].stat().st_mtime_ns) if files else None

    def meanings(self) -> dict[str, str]:
        """Returns the documented meaning of each of the run's metrics."""
        self.metrics()
        found = {key: glossary.meaning(key) for key in self._keys}
        return {key: text for key, text in found.items() if text is not None}

    def lacks(self) -> list[str]:
        """Returns the files that this run does not have, and the pages that show less
        without them."""
        self.metrics()
        lacks = [f"a damaged line is left out: {line}" for line in self._damaged[:5]]
        if len(self._damaged) > 5:
            lacks.append(f"and {len(self._damaged) - 5} more lines of metrics.jsonl")
        if not (self.path / METRICS_FILE).exists():
            lacks.append("no metrics.jsonl yet: there are no curves")
        if not (self.path / "trajectories").is_dir():
            lacks.append("no trajectories (track.log_trajectories): groups cannot be shown")
        elif self.entries() and not self._index.has_lines:
            lacks.append("no index of its trajectories (an older run): it was read whole")
        if self._index.num_damaged:
            lacks.append(
                f"{self._index.num_damaged} damaged lines in the index of its trajectories: what "
                "they stood for was read from the records"
            )
        if not (self.path / "signals").is_dir() and self.metrics():
            lacks.append(
                "no signals (track.signals = 0, or an older run): no token's advantage, ratio or "
                "mask can be shown"
            )
        if not (self.path / STATUS_FILE).exists():
            lacks.append(
                "no status (an older run, or `agentrl rollout`): whether it runs is a guess"
            )
        if self.decode() is None and (self.path / "trajectories").is_dir():
            lacks.append("no tokenizer within reach: tokens are shown as ids")
        return lacks

    def summary(self) -> dict[str, Any]:
        """Returns the run's row in the table of runs."""
        config, metrics = self.config(), self.metrics()
        num_steps = value_at(config, "run", "num_steps")
        status = read_status(self.path)
        step = metrics[-1]["step"] if metrics else 0
        if status["state"] == "unknown" and num_steps is not None and step >= num_steps:
            status["state"] = "finished"
        rewards = series(metrics, REWARD)
        evaluated = [value for row in metrics for value in [*held_out(row).values()][:1]]
        return {
            "id": self.id,
            "name": "/".join(self.cell or [self.path.name]),
            "path": str(self.path),
            **{key: status[key] for key in ("state", "message", "time")},
            "step": step,
            "num_steps": num_steps,
            "env": value_at(config, "env", "id"),
            "model": value_at(config, "model", "path"),
            "preset": _objective(config),
            "rewards": binned([value for _, value in rewards], SPARKLINE_POINTS),
            "reward": number(metrics[-1].get(REWARD)) if metrics else None,
            "held_out": evaluated[-1] if evaluated else None,
            "written": _modified(self.path / METRICS_FILE),
            "tokens": sum(number(row.get("rollout/tokens")) or 0 for row in metrics),
        }

    def details(self) -> dict[str, Any]:
        """Returns the data that the page of one run shows besides its curves."""
        return {
            **self.summary(),
            "lacks": self.lacks(),
            "config": flat(self.config()),
            "changed": self.changed(),
            "config_text": self.config_text(),
            "num_trajectories": len(self.entries()),
        }

    def changed(self) -> dict[str, str]:
        """Returns the keys whose value is not the default, with their values as JSON."""
        defaults = flat(RunConfig(model=ModelSection(path="-")).to_json(exclude_none=True))
        return {
            key: value for key, value in flat(self.config()).items() if defaults.get(key) != value
        }

    def curves(self, after: int = 0) -> dict[str, Any]:
        """Returns the lines of the metrics from number `after` on, as columns.

        A key that a line lacks is null there, which leaves a gap, except for counts, where it is 0.
        """
        rows = self.metrics()
        new = rows[after:]
        return {
            "generation": self.metrics_generation,
            "num_rows": len(rows),
            "steps": [row["step"] for row in new],
            "series": {key: [_value(row, key) for row in new] for key in self._keys},
        }


class Runs:
    """The run directories under some paths; every request finds new ones."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._runs: dict[Path, RunFiles] = {}
        self._lock = threading.Lock()

    def all(self) -> list[RunFiles]:
        """Returns all runs, the newest first."""
        with self._lock:
            found = [path.resolve() for path in _run_dirs(self._paths)]
            for path in found:
                self._runs.setdefault(path, RunFiles(path))
            runs = [self._runs[path] for path in dict.fromkeys(found)]
        return sorted(runs, key=lambda run: _modified(run.path / "config.toml") or 0, reverse=True)

    def get(self, run_id: str) -> RunFiles:
        """Returns the run with this id.

        Raises:
            DataError: no run has this id, or the run was deleted.
        """
        known = [run for run in self._runs.values() if run.id == run_id]
        for run in known or [run for run in self.all() if run.id == run_id]:
            if run.path.is_dir():
                return run
            raise DataError(f"{run.path} is gone: the run was deleted or moved")
        raise DataError("no such run; it may have been deleted or moved")


def _run_dirs(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if _is_run(path):
            yield path
        elif path.is_dir():
            # A project's folder holds its runs in runs/.
            for folder in (path, path / "runs"):
                for child in sorted(folder.iterdir()) if folder.is_dir() else ():
                    if _is_run(child):
                        yield child
                    elif (child / SUITE_FILE).exists():
                        yield from _cells(child)
            if (path / SUITE_FILE).exists():
                yield from _cells(path)


def _cells(suite: Path) -> Iterable[Path]:
    return sorted(path for path in suite.glob("*/*") if path.is_dir() and _is_run(path))


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (METRICS_FILE, "config.toml", "trajectories"))


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the dotted keys of a configuration with their values as JSON."""
    result: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = json.dumps(value, default=str, ensure_ascii=False)
    return result


@lru_cache(maxsize=8)
def _decoder(file: Path, _modified_ns: int) -> Decode | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _objective(config: dict[str, Any]) -> str | None:
    """Returns the preset and the functions of the user's own that replace parts of it."""
    values = {key: value_at(config, "objective", key) for key in ("advantage", "loss")}
    own = [f"own {key}" for key, value in values.items() if value not in (None, "none")]
    preset = value_at(config, "objective", "preset")
    return ", ".join(filter(None, [preset, *own])) or None


def _modified(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _value(row: dict[str, Any], key: str) -> float | None:
    """Returns the value rounded to six digits, which is as much as a curve shows."""
    if key not in row and _absent_is_zero(row, key):
        return 0.0
    value = number(row.get(key))
    return None if value is None else float(f"{value:.6g}")


def _absent_is_zero(row: dict[str, Any], key: str) -> bool:
    """Tells whether a metric missing from a line is 0: counts are written only when there was
    something to count.

    `env/` metrics are averages over trajectories in which a missing value counts as 0, so they are
    0 wherever there were trajectories."""
    if key.startswith("env/"):
        return number(row.get(REWARD)) is not None
    return key.startswith(ZERO_WHEN_ABSENT)
