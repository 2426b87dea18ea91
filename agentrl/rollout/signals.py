"""Why each token got its gradient: what the trainer computed for it, one file per step.

`run_dir/signals/step_000012.msgpack.zst` begins with a table of its rows; then one record per row
holds its arrays over trained tokens. A background thread writes it to a temporary
name and renames it: the trainer neither waits for it nor fails with it.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
import numpy as np
import zstandard

from agentrl.errors import DataError
from agentrl.rollout.log import frame, read_frame, step_file, step_files

logger = logging.getLogger(__name__)

MAX_WAITING = 2
"""Steps that may wait to be written; a slower disk loses steps rather than time."""
ARRAYS = ("advantages", "old_logprobs", "logprobs", "weights", "values")


@dataclass(slots=True)
class RowSignals:
    """The values that the trainer computed for one row of a trajectory.

    Arrays have the row's length T and line up with its `token_ids`; where a token was not trained
    they are nan, and False.
    """

    trajectory_id: str
    row: int
    """Index of the row in the trajectory."""
    trained: np.ndarray
    """(T,) bool: took part in the loss."""
    advantages: np.ndarray  # (T,) float32
    old_logprobs: np.ndarray
    """(T,) float32 of the trainer, before the step's first update."""
    logprobs: np.ndarray
    """(T,) float32 of the trainer, at the last update that learned from the token."""
    weights: np.ndarray
    """(T,) float32: the token's share of the loss; those of an update add up as the objective's
    aggregation says."""
    values: np.ndarray | None = None
    """(T,) float32 of the critic, where there is one."""
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    """Trust mask -> (T,) bool: it let the token's loss through, at that last update."""


class SignalLog:
    """Writes signals in a background thread. A context manager: leaving it waits for the thread."""

    def __init__(self, run_dir: Path, *, share: float = 1.0, resume_step: int = 0) -> None:
        """
        Args:
            share: fraction of a step's groups whose signals are kept.
            resume_step: files of later steps are deleted; a resumed run trains those steps again.
        """
        self.share = share
        self._directory = run_dir / "signals"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentrl-signals")
        self._waiting: list[Future[None]] = []
        self._warned = False
        if self._directory.is_dir():
            for path, step in step_files(self._directory):
                if step > resume_step:
                    path.unlink()

    def keeps(self, group_id: str) -> bool:
        """Tells whether signals of this group are kept; the answer is the same in every run."""
        return zlib.crc32(group_id.encode()) < self.share * 2**32

    def write(self, step: int, make_rows: Callable[[], list[RowSignals]]) -> None:
        """Writes the rows that `make_rows` returns. Returns at once; all work is done in the log's
        thread."""
        self._waiting = [future for future in self._waiting if not future.done()]
        if len(self._waiting) >= MAX_WAITING:
            self._warn(f"signals of step {step} are left out: the disk is slower than training")
        else:
            self._waiting.append(self._thread.submit(self._write, step, make_rows))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def _write(self, step: int, make_rows: Callable[[], list[RowSignals]]) -> None:
        path = step_file(self._directory, step)
        partial = path.with_name(f".{path.name}.partial")
        try:
            self._directory.mkdir(exist_ok=True)
            partial.write_bytes(_to_bytes(make_rows()))
            os.replace(partial, path)
        except Exception as error:  # nobody awaits this thread's result
            self._warn(f"signals of step {step} are not saved: {error}")
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _warn(self, what: str) -> None:
        if not self._warned:
            logger.warning("%s (track.signals = 0 keeps none); said once", what)
        self._warned = True


def read_signals(run_dir: Path | str, step: int) -> dict[str, list[RowSignals]]:
    """Returns trajectory id -> the signals of its trained rows; their arrays line up with the rows
    of `read_trajectories`. Trajectories that were not trained on are left out.

    Raises:
        DataError: the step has none, or the file is damaged.
    """
    signals: dict[str, list[RowSignals]] = {}
    for row in _read(run_dir, step, None):
        signals.setdefault(row.trajectory_id, []).append(row)
    return signals


def read_row_signals(run_dir: Path | str, step: int, trajectory_id: str) -> list[RowSignals]:
    """Returns the signals of one trajectory, without reading the others'."""
    return _read(run_dir, step, trajectory_id)


def _read(run_dir: Path | str, step: int, wanted: str | None) -> list[RowSignals]:
    path = step_file(Path(run_dir) / "signals", step)
    rows = []
    with _opened(path, step) as file:
        table = _read_table(file, path)
        start = file.tell()
        for name, row, num_bytes, _, _ in table:
            if wanted in (None, name):
                file.seek(start)
                if (payload := read_frame(file, path)) is None:
                    raise DataError(f"{path}: cut at byte {start}")
                rows.append(_from_payload(payload, name, row))
            start += num_bytes
    return rows


def read_advantages(run_dir: Path | str, step: int) -> dict[str, float]:
    """Returns trajectory id -> mean advantage of its trained tokens, from the table alone.

    Raises:
        DataError: the step has none, or the file is damaged.
    """
    path, sums = step_file(Path(run_dir) / "signals", step), {}
    with _opened(path, step) as file:
        for name, _, _, num_trained, total in _read_table(file, path):
            count, so_far = sums.get(name, (0, 0.0))
            sums[name] = (count + num_trained, so_far + total)
    return {name: total / count for name, (count, total) in sums.items() if count}


_Table = msgspec.msgpack.Decoder(list[tuple[str, int, int, int, float]])
"""Trajectory id, row, bytes of its record, trained tokens and sum of their advantages, per row."""


def _opened(path: Path, step: int) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise DataError(f"{path}: no signals of step {step} were kept (track.signals)") from None


def _read_table(file: BinaryIO, path: Path) -> list[tuple[str, int, int, int, float]]:
    if (payload := read_frame(file, path)) is None:
        raise DataError(f"{path}: cut at its beginning")
    try:
        return _Table.decode(payload)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: not signals as this version writes them ({error})") from None


def _to_bytes(rows: Sequence[RowSignals]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1)
    table, records = [], []
    for row in rows:
        (positions,) = row.trained.nonzero()
        record = {
            "length": len(row.trained),
            "trained": np.packbits(row.trained).tobytes(),
            "arrays": {
                name: array[positions].astype("<f4", copy=False).tobytes()
                for name in ARRAYS
                if (array := getattr(row, name)) is not None
            },
            "kept": {
                name: np.packbits(kept[positions]).tobytes() for name, kept in row.kept.items()
            },
        }
        records.append(frame(compressor.compress(msgspec.msgpack.encode(record))))
        total = float(row.advantages[positions].sum(dtype=np.float64))
        table.append((row.trajectory_id, row.row, len(records[-1]), len(positions), total))
    return frame(msgspec.msgpack.encode(table)) + b"".join(records)


def _from_payload(payload: bytes, trajectory_id: str, row: int) -> RowSignals:
    record = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(payload))
    trained = _unpacked(record["trained"], record["length"])
    num_trained = int(trained.sum())
    arrays: dict[str, np.ndarray] = {}
    for name, data in record["arrays"].items():
        arrays[name] = np.full(len(trained), np.nan, np.float32)
        arrays[name][trained] = np.frombuffer(data, "<f4")
    kept = {}
    for name, data in record["kept"].items():
        kept[name] = np.zeros(len(trained), bool)
        kept[name][trained] = _unpacked(data, num_trained)
    return RowSignals(trajectory_id, row, trained, **arrays, kept=kept)


def _unpacked(data: bytes, length: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=length).astype(bool)
