"""Streams passages to search from JSONL, parquet, text and SQuAD files or folders."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.env.rows import ROW_SUFFIXES, read_rows
from agentrl.errors import DataError

logger = logging.getLogger("agentrl.search")

TEXT_SUFFIXES = (".txt", ".md")
TEXT_PASSAGE_CHARS = 1000
"""Paragraphs of a text file are joined into passages of up to this length."""


@dataclass(slots=True, frozen=True)
class Passage:
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The quoted title on a separate line, then the text, as in Search-R1's corpora."""
        return f'"{self.title}"\n{self.text}' if self.title else self.text


def read_corpus(path: Path) -> Iterator[Passage]:
    """Yields the passages of a file, or of all files in a folder, sorted by path.

    * `.jsonl` and `.parquet`: one passage per row, from `text` and an optional `title`, or from
      `contents` (a first line in quotes is the title). The id is `id` or `_id`, else file and row.
    * `.txt` and `.md`: paragraphs, joined up to 1,000 characters; the title is the file's name.
    * `.json`: SQuAD's layout, one passage per paragraph.

    Skips rows with an empty text and logs how many there were.

    Raises:
        DataError: a file cannot be read, a row has no column with a text, or there are no passages.
    """
    if path.is_dir():
        suffixes = (*ROW_SUFFIXES, *TEXT_SUFFIXES, ".json")
        files = sorted(file for file in path.rglob("*") if file.suffix in suffixes)
        root = path
    else:
        files, root = [path], path.parent
    number = num_empty = 0
    for file in files:
        for passage in _read_file(file, file.relative_to(root).as_posix()):
            if not passage.contents.strip():
                num_empty += 1
                continue
            number += 1
            yield passage
    if num_empty:
        logger.warning("corpus %s: skipped %d passages without text", path, num_empty)
    if not number:
        raise DataError(
            f"corpus {path} contains no passages; it has to be a .jsonl, .parquet, .txt or .md "
            "file, a SQuAD .json file, or a folder of such files"
        )


def squad_paragraphs(path: Path) -> Iterator[tuple[Passage, list[dict[str, Any]]]]:
    """Yields each paragraph of a file in SQuAD's layout as a passage, with its questions.

    Raises:
        DataError: the file cannot be read or is not in SQuAD's layout.
    """
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    try:
        for article in content["data"]:
            title = article["title"]
            for position, paragraph in enumerate(article["paragraphs"]):
                passage = Passage(
                    f"{title}/{position}", title.replace("_", " "), paragraph["context"]
                )
                yield passage, paragraph["qas"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not in SQuAD's layout (data, paragraphs, context, qas): {error!r}"
        ) from error


def _read_file(path: Path, name: str) -> Iterator[Passage]:
    if path.suffix == ".json":
        for passage, _ in squad_paragraphs(path):
            yield passage
    elif path.suffix in TEXT_SUFFIXES:
        yield from _text_passages(path, name)
    else:
        for number, (place, row) in enumerate(read_rows(path), start=1):
            yield _row_passage(row, place, f"{name}:{number}")


def _row_passage(row: dict[str, Any], place: str, default_id: str) -> Passage:
    given = row.get("id", row.get("_id"))
    passage_id = default_id if given is None else str(given)
    title = row.get("title") or ""
    text = row.get("text")
    if text is None:
        text = row.get("contents")
        if isinstance(text, str) and not title:
            title, text = split_contents(text)
    if not isinstance(text, str) or not isinstance(title, str):
        raise DataError(f"{place}: a passage needs a column 'text' or 'contents' with a string")
    return Passage(passage_id, title, text)


def split_contents(contents: str) -> tuple[str, str]:
    """Splits `"Title"\\ntext` into title and text; without a quoted first line the title is ""."""
    first, newline, rest = contents.partition("\n")
    if newline and len(first) > 2 and first.startswith('"') and first.endswith('"'):
        return first[1:-1], rest
    return "", contents


def _text_passages(path: Path, name: str) -> Iterator[Passage]:
    number, held = 0, ""
    for paragraph in _paragraphs(path):
        if held and len(held) + len(paragraph) > TEXT_PASSAGE_CHARS:
            number += 1
            yield Passage(f"{name}#{number}", path.stem, held)
            held = ""
        held = f"{held}\n\n{paragraph}" if held else paragraph
    if held:
        yield Passage(f"{name}#{number + 1}", path.stem, held)


def _paragraphs(path: Path) -> Iterator[str]:
    lines: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    lines.append(line.rstrip())
                elif lines:
                    yield "\n".join(lines)
                    lines = []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if lines:
        yield "\n".join(lines)
