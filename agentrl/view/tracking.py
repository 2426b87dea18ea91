"""Metrics of a run: one JSON object per optimizer step in `metrics.jsonl`, and optional trackers.

    {"step": 12, "reward/mean": 0.4375, "train/loss": -0.0021, ...}

The file is the record: floats round-trip exactly, every line reaches the disk whole before the next
step starts, and a resumed run continues it as if it had never been interrupted. TensorBoard, wandb
and trackio are copies of it for the eye.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, Self, SupportsFloat

from agentrl.errors import ConfigError, DataError
from agentrl.runtime import write_whole
from agentrl.types import JSON

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
NUM_NON_FINITE = "log/num_non_finite"
"""Key that counts the values of a line that were NaN or infinite; absent when there were none."""

SinkName = Literal["tensorboard", "wandb", "trackio"]


@dataclass(slots=True, frozen=True)
class Sink:
    """A tracker that gets a copy of the metrics."""

    log: Callable[[int, Mapping[str, float]], object]
    """Called with a step and its finite metrics."""
    close: Callable[[], object]


class MetricsWriter:
    """Appends to `run_dir/metrics.jsonl` and to every sink. A context manager.

    Args:
        run_dir: created if missing.
        sinks: names of trackers.
        resume_step: continue a run whose checkpoint is of this step: later lines, and a last line
            that a kill cut short, are removed first. None starts a new file.
        name, project: how the run is called in wandb and trackio.
        config: the run's configuration, shown there.

    Raises:
        ConfigError: a sink's package is not installed, or a new run finds an old file.
    """

    def __init__(
        self,
        run_dir: str | Path,
        sinks: Iterable[SinkName] = (),
        resume_step: int | None = None,
        *,
        name: str | None = None,
        project: str = "agentrl",
        config: Mapping[str, JSON] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.path = self.run_dir / METRICS_FILE
        if resume_step is not None:
            _truncate(self.path, resume_step)
        elif self.path.exists() and self.path.stat().st_size:
            raise ConfigError(
                f"{self.path} already holds the metrics of a run; continue it with --resume, or "
                "choose another --run.dir"
            )
        about = name or self.run_dir.name, project, dict(config or {})
        self._sinks = [_open_sink(sink, self.run_dir, resume_step, *about) for sink in sinks]
        self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Appends one step. Values are numbers, or anything `float()` takes such as 0-d arrays.

        JSON has no NaN and no infinity: such a value becomes null and is counted under
        `log/num_non_finite`; sinks do not receive it.
        """
        line: dict[str, JSON] = {"step": step}
        num_non_finite = 0
        for key, value in metrics.items():
            number = value if type(value) is int else float(value)
            if math.isfinite(number):
                line[key] = number
            else:
                line[key] = None
                num_non_finite += 1
        if num_non_finite:
            line[NUM_NON_FINITE] = num_non_finite
        # One unbuffered write: a kill leaves a whole line or, at worst, a last one without its
        # newline, which readers drop.
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        os.fsync(self._file.fileno())
        finite: dict[str, float] = {
            key: value
            for key, value in line.items()
            if key != "step" and isinstance(value, int | float)
        }
        for sink in self._sinks:
            sink.log(step, finite)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


STATUS_FILE = "status.json"


class RunStatus:
    """Records in `run_dir/status.json` whether the run is being trained, and how it ended.

    A killed process cannot update the file, so a running process holds a lock on it, which the
    system releases when the process dies and which `read_status` tests."""

    def __init__(self, run_dir: Path, *, num_steps: int, step: int = 0) -> None:
        self._path, self._num_steps = run_dir / STATUS_FILE, num_steps
        self.step = step
        """The last that was finished; whoever trains sets it."""
        self.ended_early = False
        """Whether the run is over before its last step, because evaluations stopped improving."""

    def __enter__(self) -> Self:
        self._file = self._path.open("a+b")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_SH)
        self._say("training")
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        is_over = self.ended_early or self.step >= self._num_steps
        state = "finished" if is_over else "stopped"
        failed = isinstance(error, Exception)
        self._say("failed" if failed else state, str(error) if failed else "")
        self._file.close()

    def _say(self, state: str, message: str = "") -> None:
        # In place: a renamed file would be another one than the one that is locked.
        said = {"state": state, "message": message[:2000], "time": time.time()}
        with suppress(OSError):  # a full disk must not end a run that nobody looks at
            self._file.truncate(0)
            self._file.write(json.dumps(said).encode())
            self._file.flush()


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """Returns the status of a run. `state`: training, dead (it was killed), finished, stopped,
    failed, or unknown if the run wrote no status; `message`: why it failed; `time`: since when, in
    seconds since 1970."""
    path = Path(run_dir) / STATUS_FILE
    unknown = {"state": "unknown", "message": "", "time": None}
    try:
        with path.open("rb") as file:
            said = json.loads(file.read() or b"{}")
            if not isinstance(said, dict) or said.get("state") != "training":
                return unknown | said if isinstance(said, dict) else unknown
            try:
                # Those who train hold it shared, so that asking never keeps one from beginning.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return unknown | said
            return unknown | said | {"state": "dead", "time": _last_sign(Path(run_dir))}
    except (OSError, ValueError):
        return unknown


def _last_sign(run_dir: Path) -> float:
    """Returns when a run last wrote a file."""
    names = (STATUS_FILE, METRICS_FILE, "trajectories/index.jsonl")
    return max(p.stat().st_mtime for name in names if (p := run_dir / name).exists())


SOFTWARE_FILE = "software.jsonl"


def write_software(run_dir: Path, step: int, device: Mapping[str, JSON]) -> None:
    """Appends what trains the steps after `step`: packages with their versions, Python, the system
    and `device`. `agentrl compare` names what differs between two runs."""
    packages = {each.name: each.version for each in distributions()}
    said = {
        "step": step,
        "python": platform.python_version(),
        "system": platform.platform(),
        **device,
        **{f"package {name}": packages[name] for name in sorted(packages)},
    }
    with (run_dir / SOFTWARE_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(said) + "\n")


def read_software(run_dir: Path) -> dict[str, JSON]:
    """Returns what trained a run, by name: that of its newest start; {} if it did not say."""
    try:
        lines = (run_dir / SOFTWARE_FILE).read_text(encoding="utf-8").splitlines()
        said = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return {key: value for key, value in said.items() if key != "step"}


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of `run_dir/metrics.jsonl` in order: `step` (int) and numbers, null as
    None.

    A last line without its newline (the run was killed, or is just writing it) is left out.

    Raises:
        DataError: the file is missing, or a line is not a metrics object; names the line.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: is {run_dir} a run directory?") from None
    return parse_metrics(path, content)


def parse_metrics(path: Path, content: bytes) -> list[dict[str, Any]]:
    return [
        parse_metrics_line(f"{path}:{number}", line)
        for number, line in enumerate(content.split(b"\n")[:-1], start=1)
    ]


def parse_metrics_line(place: str, line: bytes) -> dict[str, Any]:
    """Parses one line of metrics.jsonl.

    Raises:
        DataError: it is not a metrics object; names the place.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError(f"{place} is not a metrics line: it has no integer 'step'")
    return row


def _truncate(path: Path, resume_step: int) -> None:
    """Keeps the lines of steps up to `resume_step`, byte for byte, in one atomic replacement."""
    if not path.exists():
        logger.warning("%s is missing: the metrics up to step %d are lost", path, resume_step)
        return
    content = path.read_bytes()
    rows = parse_metrics(path, content)
    kept = [
        line
        for line, row in zip(content.split(b"\n"), rows, strict=False)
        if row["step"] <= resume_step
    ]
    new = b"".join(line + b"\n" for line in kept)
    if new == content:
        return
    write_whole(path, new)


def _open_sink(
    sink: SinkName,
    run_dir: Path,
    resume_step: int | None,
    name: str,
    project: str,
    config: dict[str, JSON],
) -> Sink:
    if sink not in ("tensorboard", "wandb", "trackio"):
        raise ConfigError(
            f"track.sinks: unknown sink {sink!r}; there are 'tensorboard', 'wandb' and 'trackio'"
        )
    try:
        if sink == "tensorboard":
            return _tensorboard(run_dir, resume_step)
        if sink == "wandb":
            return _wandb(run_dir, resume_step, name, project, config)
        return _trackio(resume_step, name, project, config)
    except ImportError as error:
        raise ConfigError(
            f"track.sinks: {sink} is not installed ({error}); run pip install 'agentrl-gym[track]'"
        ) from error


def _tensorboard(run_dir: Path, resume_step: int | None) -> Sink:
    """Opens event files in `run_dir/tensorboard`; look at them with `tensorboard --logdir`."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step tells TensorBoard to hide what the killed run wrote after the checkpoint.
    purge_step = None if resume_step is None else resume_step + 1
    writer = SummaryWriter(run_dir / "tensorboard", purge_step=purge_step)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return Sink(log, writer.close)


def _wandb(
    run_dir: Path, resume_step: int | None, name: str, project: str, config: dict[str, JSON]
) -> Sink:
    """Opens a wandb run whose identity is kept in `run_dir/wandb_id`, so that resuming continues
    it.

    Every setting of wandb's own (WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY, ...) holds. Only when no
    mode is set and nobody is logged in, it runs offline instead of asking on the terminal; `wandb
    sync` uploads it later.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    id_file = run_dir / "wandb_id"
    if resume_step is None or not id_file.exists():
        id_file.write_text(secrets.token_hex(8))
    is_set = "WANDB_MODE" in os.environ or wandb.api.api_key is not None
    run = wandb.init(
        project=project,
        name=name,
        id=id_file.read_text().strip(),
        dir=str(run_dir),
        config=config,
        resume="allow",
        mode=None if is_set else "offline",
    )
    # wandb's own step may not go back, which a resumed run does; its plots can use any key.
    run.define_metric("*", step_metric="step")
    return Sink(lambda step, metrics: run.log({"step": step, **metrics}), run.finish)


def _trackio(resume_step: int | None, name: str, project: str, config: dict[str, JSON]) -> Sink:
    """Opens a trackio run, kept where trackio keeps its data (TRACKIO_DIR)."""
    import trackio  # pyright: ignore[reportMissingImports]

    resume = "never" if resume_step is None else "allow"
    run = trackio.init(project=project, name=name, config=config, resume=resume)
    return Sink(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)
