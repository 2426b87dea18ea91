"""The index of a run's trajectories, followed while it grows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.rollout.log import (
    INDEX_FILE,
    TrajectoryEntry,
    entry_of,
    read_records,
    step_file,
    step_files,
)


class TrajectoryIndex:
    """The index entries of a run's trajectories, in the order in which they were written.

    If a record has no entry in the file (the run was killed between the two writes, the line is
    damaged, or the run is older than the index), the entry is made from the record."""

    def __init__(self, run_dir: Path | str) -> None:
        self.directory = Path(run_dir) / "trajectories"
        self.entries: list[TrajectoryEntry] = []
        self.generation = 0
        """Counts how often the entries began anew, because a resumed run took some back."""
        self.num_damaged = 0
        """Lines of the index that could not be read."""
        self._decoder = msgspec.json.Decoder(TrajectoryEntry)
        self._forget()

    def refresh(self) -> list[TrajectoryEntry]:
        """Reads the entries that were appended since the last call, and returns all entries.

        Raises:
            DataError: a record that has no line is damaged.
        """
        if not self.directory.is_dir():
            self._forget()
            return self.entries
        index = self.directory / INDEX_FILE
        if index.exists():
            self._read_lines(index)
        # With an index only the newest file can have records without a line.
        files = step_files(self.directory)
        for path, step in files[-1:] if self._num_lines and self._complete else files:
            if path.stat().st_size > self._ends.get(step, 0):
                self._add_from_records(path, step)
        self._complete = True
        return self.entries

    @property
    def has_lines(self) -> bool:
        """True if any entry came from the index file; False if all were read from records."""
        return self._num_lines > 0

    def _forget(self) -> None:
        self.entries = []
        self.generation += 1
        self._inode = self._position = self._num_lines = self.num_damaged = 0
        self._complete = False
        self._ends: dict[int, int] = {}

    def _read_lines(self, index: Path) -> None:
        with index.open("rb") as file:
            status = index.stat()
            if status.st_ino != self._inode or status.st_size < self._position:
                self._forget()
                self._inode = status.st_ino
            file.seek(self._position)
            appended = file.read()
        whole = appended[: appended.rfind(b"\n") + 1]
        self._position += len(whole)
        try:
            entries = self._decoder.decode_lines(whole)
        except msgspec.MsgspecError:
            entries = [entry for line in whole.splitlines() if (entry := self._entry(line))]
            self._complete = False  # a damaged line leaves a gap in any file
        self._num_lines += len(entries)
        for entry in entries:
            end = self._ends.get(entry.step, 0)
            if entry.offset > end:
                self._add_from_records(step_file(self.directory, entry.step), entry.step, entry)
            if entry.offset >= end:
                self._add(entry)

    def _entry(self, line: bytes) -> TrajectoryEntry | None:
        try:
            return self._decoder.decode(line)
        except msgspec.MsgspecError:
            self.num_damaged += 1
            return None

    def _add_from_records(
        self, path: Path, step: int, until: TrajectoryEntry | None = None
    ) -> None:
        """Adds entries for the records after the last known one, up to `until`."""
        if not path.exists():
            return
        for offset, length, trajectory in read_records(path, self._ends.get(step, 0)):
            if until is not None and offset >= until.offset:
                return
            self._add(entry_of(trajectory, step=step, offset=offset, length=length))

    def _add(self, entry: TrajectoryEntry) -> None:
        self.entries.append(entry)
        self._ends[entry.step] = entry.offset + entry.length
