"""The trajectory log: one append-only compressed file per training step, and an index of them all.

`run_dir/trajectories/step_000012.msgpack.zst` holds one record per trajectory: a little-endian
header of two uint32 (length and CRC-32 of the payload), then a zstd frame of MessagePack. A file
cut by a kill loses at most its last record. Everything comes back as it was: arrays are stored as
raw little-endian bytes, integers beyond 64 bits as an extension. Images of messages lie in
`run_dir/images/`, each once; a record has their hashes.

`run_dir/trajectories/index.jsonl` has one `TrajectoryEntry` per line, appended after the record, so
that a hundred thousand trajectories can be listed and searched without reading them
(`agentrl.rollout.index`).
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import zstandard

from agentrl.errors import DataError
from agentrl.images import IMAGES_FOLDER, ImageStore, shown_text
from agentrl.types import (
    RowArrays,
    ShownImage,
    StopReason,
    TokenRow,
    Trajectory,
    TrajectoryError,
    Turn,
)

INDEX_FILE = "index.jsonl"
PREVIEW_CHARS = 160
_HEADER = struct.Struct("<II")
_INTEGER, _TEXT = 1, 2
"""Codes of MessagePack extensions: a signed little-endian integer, and UTF-8 with surrogates."""
_DTYPES = {
    "token_ids": "<i4",
    "loss_mask": "|u1",
    "rollout_logprobs": "<f4",
    "policy_versions": "<i4",
    "turn_ids": "<i4",
}


class TrajectoryEntry(msgspec.Struct, gc=False):
    """The index entry of one trajectory."""

    step: int
    offset: int
    """Byte of its record in the step's file."""
    length: int
    """Bytes of the record, header included."""
    trajectory_id: str
    group_id: str
    task_id: str
    reward: float | None
    """None where it has none: it failed, or the reward is not finite."""
    reward_components: dict[str, float | None]
    stop_reason: str
    error: str | None
    """The error's code."""
    truncated: bool
    turns: int
    malformed: int
    """Turns whose tool call could not be read."""
    tool_errors: float
    tokens: int
    """Sampled."""
    oldest_version: int | None
    newest_version: int | None
    lowest_logprob: float | None
    """Log-probability of the policy's most surprising token, at sampling."""
    preview: str
    """The beginning of what was said last."""
    env_id: str = ""
    """Empty in the index of an older run."""
    dropped: str = ""
    """Why no step trained on its group; empty where one did."""
    cut_turns: int = 0
    """Turns that were cut at `rollout.max_turn_tokens`; 0 in the index of an older run."""


def entry_of(trajectory: Trajectory, *, step: int, offset: int, length: int) -> TrajectoryEntry:
    sampled = [
        (logprob, version)
        for row in trajectory.branches
        for logprob, version in zip(row.rollout_logprobs, row.policy_versions, strict=True)
        if version >= 0
    ]
    said = (shown_text(message.get("content")) for message in reversed(trajectory.messages))
    return TrajectoryEntry(
        step=step,
        offset=offset,
        length=length,
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        task_id=trajectory.task_id,
        reward=trajectory.reward if trajectory.error is None else None,
        reward_components=dict(trajectory.reward_components),
        stop_reason=str(trajectory.stop_reason or "running"),
        error=trajectory.error.code if trajectory.error else None,
        truncated=trajectory.truncated,
        turns=len(trajectory.turns),
        malformed=sum(turn.parse_status == "malformed" for turn in trajectory.turns),
        tool_errors=trajectory.metrics.get("tool_errors", 0.0),
        tokens=trajectory.num_sampled_tokens,
        oldest_version=min((version for _, version in sampled), default=None),
        newest_version=max((version for _, version in sampled), default=None),
        lowest_logprob=min((logprob for logprob, _ in sampled), default=None),
        preview=_utf8(next((text for text in said if text.strip()), "")[:PREVIEW_CHARS]),
        env_id=trajectory.env_id,
        dropped=str(trajectory.info.get("dropped", "")),
        cut_turns=sum(turn.finish_reason == "length" for turn in trajectory.turns),
    )


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()


class TrajectoryLog:
    """Appends trajectories to a run directory, one file per step."""

    def __init__(
        self, run_dir: Path, *, resume_step: int = 0, images: ImageStore | None = None
    ) -> None:
        """
        Args:
            resume_step: last step whose trajectories are kept. Later files are deleted, because
                a resumed run plays those steps again.
            images: where the trajectories' images are kept; None: the run's own store.
        """
        self.directory = run_dir / "trajectories"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.images = images or ImageStore(run_dir / IMAGES_FOLDER)
        self._compressor = zstandard.ZstdCompressor(level=3)
        for path, step in step_files(self.directory):
            if step > resume_step:
                path.unlink()
        index = self.directory / INDEX_FILE
        if index.exists():
            lines = index.read_bytes().splitlines(keepends=True)
            # Of a damaged line, what it stood for is read from its record.
            kept = [
                line for line in lines if line.endswith(b"\n") and 0 <= _step(line) <= resume_step
            ]
            partial = self.directory / f".{INDEX_FILE}.partial"
            partial.write_bytes(b"".join(kept))
            os.replace(partial, index)

    def append(self, step: int, trajectories: list[Trajectory]) -> None:
        """Writes the records in one call, so that a kill damages at most one of them."""
        known: dict[str, str] = {}
        trajectories = [self._with_hashes(trajectory, known) for trajectory in trajectories]
        frames = [
            frame(self._compressor.compress(_encode(_to_record(trajectory))))
            for trajectory in trajectories
        ]
        with open(step_file(self.directory, step), "ab") as file:
            offset = file.tell()
            file.write(b"".join(frames))
        lines = []
        for trajectory, record in zip(trajectories, frames, strict=True):
            entry = entry_of(trajectory, step=step, offset=offset, length=len(record))
            lines.append(msgspec.json.encode(entry) + b"\n")
            offset += len(record)
        with open(self.directory / INDEX_FILE, "ab") as file:
            file.write(b"".join(lines))

    def _with_hashes(self, trajectory: Trajectory, known: dict[str, str]) -> Trajectory:
        with_hashes = self.images.with_hashes
        rows = trajectory.branches
        rows = [replace(row, messages=with_hashes(row.messages, known)) for row in rows]
        return replace(trajectory, branches=rows)


def _step(line: bytes) -> int:
    """Returns the step in a line of the index; -1 if the line is damaged."""
    try:
        return msgspec.json.decode(line, type=TrajectoryEntry).step
    except msgspec.MsgspecError:
        return -1


def read_trajectories(
    run_dir: Path | str, *, steps: range | None = None, images: bool = False
) -> Iterator[tuple[int, Trajectory]]:
    """Yields `(step, trajectory)` in the order in which they were written.

    Args:
        images: put the images themselves into messages, in place of their hashes.

    Raises:
        DataError: a record in the middle of a file is damaged, an image is missing, or there is no
            log. An incomplete record at a file's end, left by a kill, is skipped.
    """
    directory = Path(run_dir) / "trajectories"
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; is {run_dir} a run directory?")
    store, known = ImageStore(Path(run_dir) / IMAGES_FOLDER), {}
    for path, step in step_files(directory):
        if steps is None or step in steps:
            for _, _, trajectory in read_records(path):
                for row in trajectory.branches if images else ():
                    row.messages = store.with_bytes(row.messages, known)
                yield step, trajectory


def read_records(path: Path, start: int = 0) -> Iterator[tuple[int, int, Trajectory]]:
    """Yields (offset, length, trajectory) for every whole record of a step's file, starting at byte
    `start`.

    Raises:
        DataError: a record is damaged.
    """
    for offset, length, record in _records(path, start):
        yield offset, length, _from_record(record)


def read_trajectory(
    run_dir: Path | str, step: int, offset: int
) -> tuple[Trajectory, list[RowArrays]]:
    """Reads the trajectory at this step and offset. Its rows are empty, and their tokens are
    returned as arrays: as lists, a million tokens take a second and 200 MB.

    Raises:
        DataError: there is no record at that offset.
    """
    path = step_file(Path(run_dir) / "trajectories", step)
    try:
        record = next(record for _, _, record in _records(path, offset))
    except (StopIteration, FileNotFoundError):
        raise DataError(f"{path}: no trajectory at byte {offset}") from None
    arrays: list[Any] = []
    for row in record["branches"]:
        arrays.append({name: np.frombuffer(row[name], dtype) for name, dtype in _DTYPES.items()})
        row |= dict.fromkeys(_DTYPES, b"")
    return _from_record(record), arrays


def _records(path: Path, start: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    decompressor = zstandard.ZstdDecompressor()
    with path.open("rb") as file:
        file.seek(start)
        while (payload := read_frame(file, path)) is not None:
            length = _HEADER.size + len(payload)
            record = msgspec.msgpack.decode(
                decompressor.decompress(payload), ext_hook=_read_extension
            )
            yield file.tell() - length, length, record


def cut_torn_record(path: Path) -> None:
    """Truncates a file after its last whole record, so that others can be appended.

    Raises:
        DataError: a record is damaged.
    """
    with path.open("rb+") as file:
        end = 0
        while read_frame(file, path) is not None:
            end = file.tell()
        file.truncate(end)


def frame(payload: bytes) -> bytes:
    """Returns a payload behind its header."""
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def read_frame(file: BinaryIO, path: Path) -> bytes | None:
    """Returns the payload at the file's position; None at the end of the file or at a record that a
    kill cut short.

    Raises:
        DataError: the payload does not match its checksum.
    """
    position = file.tell()
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    length, crc = _HEADER.unpack(header)
    payload = file.read(length)
    if len(payload) < length:
        return None
    if zlib.crc32(payload) != crc:
        raise DataError(f"{path}: damaged record at byte {position}")
    return payload


def step_file(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}.msgpack.zst"


def step_files(directory: Path) -> list[tuple[Path, int]]:
    """Returns (file, step) for all steps, in order."""
    named = (
        (path, re.fullmatch(r"step_(\d+)\.msgpack\.zst", path.name)) for path in directory.iterdir()
    )
    return sorted(((path, int(match[1])) for path, match in named if match), key=lambda x: x[1])


def _to_record(trajectory: Trajectory) -> dict[str, Any]:
    record = asdict(replace(trajectory, branches=[]))
    record["branches"] = [
        {
            **{name: np.asarray(a, _DTYPES[name]).tobytes() for name, a in row.arrays().items()},
            "branch_of": row.branch_of,
            "fork_at": row.fork_at,
            "messages": row.messages,
            # Without pixels, which are made again of the images in the messages.
            "images": [
                (each.sha256, each.start, each.end, each.pixels_sha256) for each in row.images
            ],
        }
        for row in trajectory.branches
    ]
    return record


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(record)
    except (OverflowError, UnicodeEncodeError):
        return msgspec.msgpack.encode(_with_extensions(record))


def _with_extensions(value: Any) -> Any:
    """Replaces what MessagePack has no form for: integers beyond 64 bits, and texts with half of a
    surrogate pair."""
    match value:
        case dict():
            return {_with_extensions(k): _with_extensions(v) for k, v in value.items()}
        case list() | tuple():
            return [_with_extensions(each) for each in value]
        case int() if not -(2**63) <= value < 2**64:
            size = value.bit_length() // 8 + 1
            return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(size, "little", signed=True))
        case str() if any("\ud800" <= char <= "\udfff" for char in value):
            return msgspec.msgpack.Ext(_TEXT, value.encode("utf-8", "surrogatepass"))
    return value


def _read_extension(code: int, data: memoryview) -> object:
    if code == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    return bytes(data).decode("utf-8", "surrogatepass")


def _with_messages_in_rows(record: dict[str, Any]) -> dict[str, Any]:
    """Converts a record of agentrl 0.1, whose trajectories had one dialogue, to today's form."""
    messages = record.pop("messages")
    for row in record["branches"]:
        row["messages"] = messages
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    # A prompt may hold assistant messages of its own (worked examples): the turns are the last.
    surplus = max(0, len(said) - len(record["turns"]))
    for number, (turn, message) in enumerate(zip(record["turns"], said[surplus:], strict=False)):
        turn |= {"message": message, "parent": number - 1 if number else None}
    return record


def _from_record(record: dict[str, Any]) -> Trajectory:
    if "messages" in record:
        record = _with_messages_in_rows(record)
    branches = [
        TokenRow(
            **{name: np.frombuffer(row[name], dtype).tolist() for name, dtype in _DTYPES.items()},
            branch_of=row["branch_of"],
            fork_at=row["fork_at"],
            messages=row["messages"],
            images=[
                ShownImage(sha256, start, end, {}, pixels)
                for sha256, start, end, pixels in row.get("images", ())
            ],
        )
        for row in record.pop("branches")
    ]
    turns = [Turn(**turn) for turn in record.pop("turns")]
    error = record.pop("error")
    return Trajectory(
        **{**record, "stop_reason": StopReason(record["stop_reason"])},
        branches=branches,
        turns=turns,
        error=TrajectoryError(**error) if error else None,
    )
