"""Passages on disk, read by row number or by id through memory maps.

Two files are append-only: `passages.bin` has one JSON array `[id, title, text]` after the other,
and `ends.u64` the position after each. `ids-N.u64` maps ids to row numbers for the first N
passages: N sorted 64-bit hashes of ids, then the N row numbers in the same order. `index.json` says
how many passages are valid. Bytes beyond them are from an interrupted addition, and the next
addition truncates them.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from array import array
from pathlib import Path

import msgspec
import numpy as np

from agentrl.errors import DataError
from agentrl_search.corpus import Passage

PASSAGES, ENDS = "passages.bin", "ends.u64"
_decode = msgspec.json.Decoder(tuple[str, str, str]).decode
_encode = msgspec.json.Encoder().encode


class StoreWriter:
    """Appends passages to a directory that already contains `num_passages`."""

    def __init__(self, directory: Path, num_passages: int) -> None:
        self._directory = directory
        self._first = num_passages
        self._hashes = array("Q")
        self._next_check = 1024
        ends = directory / ENDS
        self._end = 0
        if num_passages:
            self._end = int(np.memmap(ends, "<u8", "r")[num_passages - 1])
        self._passages = _open_at(directory / PASSAGES, self._end)
        self._ends = _open_at(ends, num_passages * 8)

    @property
    def num_passages(self) -> int:
        return self._first + len(self._hashes)

    def add(self, passage: Passage) -> int:
        """Appends a passage and returns its row number.

        Raises:
            DataError: two passages have the same id. This is checked whenever the number of new
                passages has doubled, to fail early at about twice the cost of a single check.
        """
        if len(self._hashes) == self._next_check:
            self._next_check *= 2
            self._flush()
            self._sorted_ids()
        row = self.num_passages
        record = _encode((passage.id, passage.title, passage.text))
        self._passages.write(record)
        self._end += len(record)
        self._ends.write(self._end.to_bytes(8, "little"))
        self._hashes.append(_hash(passage.id))
        return row

    def commit(self) -> None:
        """Writes everything to disk.

        Raises:
            DataError: two passages have the same id.
        """
        self._flush()
        for file in (self._passages, self._ends):
            os.fsync(file.fileno())
        hashes, rows = self._sorted_ids()
        path = self._directory / _ids_name(self.num_passages)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            hashes.astype("<u8", copy=False).tofile(file)
            rows.astype("<u8", copy=False).tofile(file)
            os.fsync(file.fileno())
        partial.replace(path)

    def close(self) -> None:
        # commit() has reported data that could not be written.
        for file in (self._passages, self._ends):
            with contextlib.suppress(OSError):
                file.close()

    def _flush(self) -> None:
        self._passages.flush()
        self._ends.flush()

    def _sorted_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sorted hashes and their row numbers; raises DataError for repeated ids."""
        hashes = np.array(self._hashes, np.uint64)
        rows = np.arange(self._first, self.num_passages, dtype=np.uint64)
        if self._first:
            old = np.fromfile(self._directory / _ids_name(self._first), "<u8").reshape(2, -1)
            hashes, rows = np.concatenate((old[0], hashes)), np.concatenate((old[1], rows))
        order = np.argsort(hashes, kind="stable")
        hashes, rows = hashes[order], rows[order]
        self._refuse_repeated_ids(hashes, rows)
        return hashes, rows

    def _refuse_repeated_ids(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        if not same.size:
            return
        ends = np.memmap(self._directory / ENDS, "<u8", "r")
        with (self._directory / PASSAGES).open("rb") as file:
            for position in same:
                ids = []
                for row in rows[position : position + 2]:
                    start = int(ends[row - 1]) if row else 0
                    file.seek(start)
                    ids.append(_decode(file.read(int(ends[row]) - start))[0])
                if ids[0] == ids[1]:
                    raise DataError(
                        f"two passages have the id '{ids[0]}'; ids have to be unique in a corpus"
                    )


class PassageStore:
    """Reads the files that `StoreWriter` writes. Thread-safe."""

    def __init__(self, directory: Path, num_passages: int) -> None:
        """
        Raises:
            DataError: a file is missing or too short.
        """
        self._num_passages = num_passages
        try:
            self._ends = np.memmap(directory / ENDS, "<u8", "r")[:num_passages]
            ids = np.memmap(directory / _ids_name(num_passages), "<u8", "r")
            self._hashes, self._rows = ids.reshape(2, num_passages)
            with (directory / PASSAGES).open("rb") as file:
                self._passages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DataError(f"index {directory} is damaged ({error}); rebuild it") from error
        if len(self._ends) < num_passages or len(self._passages) < self._ends[-1]:
            raise DataError(f"index {directory} is damaged (a file is too short); rebuild it")

    def __len__(self) -> int:
        return self._num_passages

    def read(self, row: int) -> Passage:
        """Returns the passage with this row number, counting from 0."""
        start = int(self._ends[row - 1]) if row else 0
        return Passage(*_decode(self._passages[start : int(self._ends[row])]))

    def find(self, passage_id: str) -> Passage | None:
        wanted = np.uint64(_hash(passage_id))
        position = int(np.searchsorted(self._hashes, wanted))
        while position < self._num_passages and self._hashes[position] == wanted:
            passage = self.read(int(self._rows[position]))
            if passage.id == passage_id:
                return passage
            position += 1
        return None

    def close(self) -> None:
        self._passages.close()


def remove_old_ids(directory: Path, num_passages: int) -> None:
    """Deletes the id tables of earlier states of the index."""
    for path in directory.glob("ids-*.u64"):
        if path.name != _ids_name(num_passages):
            path.unlink()


def _ids_name(num_passages: int) -> str:
    return f"ids-{num_passages}.u64"


def _hash(passage_id: str) -> int:
    digest = hashlib.blake2b(passage_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _open_at(path: Path, size: int):
    """Opens a file for appending after its first `size` bytes and truncates the rest."""
    file = path.open("r+b" if path.exists() else "w+b", buffering=1 << 20)
    file.truncate(size)
    file.seek(size)
    return file
