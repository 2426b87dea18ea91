"""Tags and a note on a run: `notes.json` in its directory.

It is the only file that `agentrl view` writes; a trainer neither reads nor writes it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from agentrl.errors import DataError

NOTES_FILE = "notes.json"
MAX_TAGS, MAX_TAG_CHARS, MAX_NOTE_CHARS = 20, 40, 20_000


class Notes(msgspec.Struct):
    """The notes that a reader wrote about a run."""

    tags: list[str] = []
    note: str = ""


def read_notes(run_dir: Path) -> Notes:
    """Returns the notes on the run; empty notes if there are none.

    Raises:
        DataError: the file is damaged.
    """
    file = run_dir / NOTES_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Notes)
    except FileNotFoundError:
        return Notes()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}): correct it, or delete it") from None


def write_notes(run_dir: Path, notes: Notes) -> Notes:
    """Replaces the notes on the run atomically, and returns the notes as they were saved.

    Raises:
        DataError: a tag or the note is too long, the existing file is damaged, or it cannot be
            written.
    """
    kept = Notes(sorted({tag.strip() for tag in notes.tags} - {""}), notes.note.strip())
    if len(kept.tags) > MAX_TAGS or any(len(tag) > MAX_TAG_CHARS for tag in kept.tags):
        raise DataError(f"a run takes {MAX_TAGS} tags of up to {MAX_TAG_CHARS} characters")
    if len(kept.note) > MAX_NOTE_CHARS:
        raise DataError(f"a note takes up to {MAX_NOTE_CHARS} characters, not {len(kept.note)}")
    read_notes(run_dir)  # what cannot be read is not written over
    file = run_dir / NOTES_FILE
    temporary = run_dir / f".{NOTES_FILE}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as opened:
            opened.write(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, file)
    except (OSError, UnicodeEncodeError) as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{file} cannot be written: {error}") from None
    return kept
