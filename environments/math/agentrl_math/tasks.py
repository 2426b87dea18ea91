"""Sources of math tasks: generated arithmetic, JSONL or parquet files, Hugging Face datasets.

A task set has `splits()` and `get(split, index)`; the same arguments always give the same task.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl.env.data_sets import DATA_SETS, how_to_get, load_hub
from agentrl.env.rows import ROW_SUFFIXES, metadata_of, public_of, read_rows
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task
from agentrl_rewards.math import MAX_REFERENCE_CHARS, extract_answer

SAMPLE_FILE = Path(__file__).with_name("sample.jsonl")
DEFAULT_SUBSETS = {each.hub: each.subset for each in DATA_SETS.values()}


class TaskSet(Protocol):
    def splits(self) -> dict[str, int | None]: ...

    def get(self, split: str, index: int) -> Task: ...


@dataclass(slots=True, frozen=True)
class Arithmetic:
    """Sums, differences and products of two whole numbers, such as `347*28=?`, made on demand.

    Task `index` of a split is drawn with a generator seeded with (seed, split, index). A problem's
    split depends only on the problem itself, so `train` and `test` never share one, whatever the
    seed and the sizes; a+b and b+a count as the same problem.
    """

    operators: str
    min_digits: int
    max_digits: int
    num_tasks: int | None
    num_test_tasks: int
    seed: int

    def splits(self) -> dict[str, int | None]:
        return {"train": self.num_tasks, "test": self.num_test_tasks}

    def get(self, split: str, index: int) -> Task:
        rng = random.Random(f"{self.seed}/{split}/{index}")
        while True:
            left, operator, right = self._draw(rng)
            if is_test_problem(left, operator, right) == (split == "test"):
                break
        value = {"+": left + right, "-": left - right, "*": left * right}[operator]
        digits = max(len(str(left)), len(str(right)))
        return Task(
            id=f"{split}/{index}",
            prompt=f"{left}{operator}{right}=?",
            reference=str(value),
            metadata={"operator": operator, "digits": digits},
        )

    def _draw(self, rng: random.Random) -> tuple[int, str, int]:
        left, right = (self._draw_number(rng) for _ in range(2))
        return left, rng.choice(self.operators), right

    def _draw_number(self, rng: random.Random) -> int:
        digits = rng.randint(self.min_digits, self.max_digits)
        return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def is_test_problem(left: int, operator: str, right: int) -> bool:
    """Returns whether a problem belongs to `test`: one in ten, by a checksum of the problem."""
    if operator in "+*":
        left, right = sorted((left, right))
    return zlib.crc32(f"{left}{operator}{right}".encode()) % 10 == 0


@dataclass(slots=True, frozen=True)
class Rows:
    """Tasks read from files or a Hugging Face dataset, in their original order."""

    tasks: dict[str, list[Task]]

    def splits(self) -> dict[str, int | None]:
        return {split: len(tasks) for split, tasks in self.tasks.items()}

    def get(self, split: str, index: int) -> Task:
        return self.tasks[split][index]


@dataclass(slots=True, frozen=True)
class Keys:
    """Names of the columns with the question, the reference, the metadata and what is public."""

    input_key: str
    label_key: str
    metadata_key: str | None
    public_keys: tuple[str, ...] = ()


def load_rows(source: str | dict[str, str], subset: str | None, keys: Keys) -> Rows:
    """Loads all tasks of a source.

    Args:
        source: `sample`; a `.jsonl` or `.parquet` file (split `train`); a folder of such files,
            one split per file name (`train.jsonl`, `test-00000-of-00002.parquet`); a dictionary
            from split to file; or a Hugging Face dataset name, `owner/name`.
        subset: configuration of a Hugging Face dataset.

    Raises:
        ConfigError: `source` is none of these, or a package it needs is not installed.
        DataError: a file or dataset cannot be read or is empty, or a row lacks a column; the
            message names the file and the line.
    """
    if source == "sample":
        return Rows({"train": _read_file(SAMPLE_FILE, "train", keys)})
    if isinstance(source, dict):
        if not source:
            raise ConfigError("source: name at least one split, as in {train = 'train.jsonl'}")
        return Rows({split: _read_file(Path(name), split, keys) for split, name in source.items()})
    path = Path(source).expanduser()
    if source and path.is_dir():
        return _read_folder(path, keys)
    if path.suffix in ROW_SUFFIXES:
        return Rows({"train": _read_file(path, "train", keys)})
    if how := how_to_get(path):
        raise DataError(f"folder {path} does not exist{how}")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return _read_hub(source, subset or DEFAULT_SUBSETS.get(source), keys)
    raise ConfigError(
        f"source '{source}' is neither 'arithmetic' nor 'sample', nor an existing folder, nor a "
        ".jsonl or .parquet file, nor a Hugging Face dataset name such as openai/gsm8k"
    )


def _read_folder(folder: Path, keys: Keys) -> Rows:
    tasks: dict[str, list[Task]] = {}
    suffixes: dict[str, str] = {}
    files = (path for path in sorted(folder.iterdir()) if path.suffix in ROW_SUFFIXES)
    for path in files:
        split = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
        if suffixes.setdefault(split, path.suffix) != path.suffix:
            raise DataError(
                f"{folder} has split '{split}' as .jsonl and as .parquet; remove one of them"
            )
        tasks[split] = tasks.get(split, [])
        tasks[split] += _read_file(path, split, keys, first_index=len(tasks[split]))
    if not tasks:
        raise DataError(f"folder {folder} contains no .jsonl or .parquet file such as train.jsonl")
    return Rows(tasks)


def _read_file(path: Path, split: str, keys: Keys, first_index: int = 0) -> list[Task]:
    path = path.expanduser()
    return _to_tasks(read_rows(path), str(path), split, keys, first_index)


def _read_hub(name: str, subset: str | None, keys: Keys) -> Rows:
    loaded = load_hub(name, subset)
    tasks = {}
    for split, rows in loaded.items():
        where = f"Hugging Face dataset {name}, split {split}"
        placed = ((f"{where}, row {number}", row) for number, row in enumerate(rows, start=1))
        tasks[split] = _to_tasks(placed, where, split, keys)
    return Rows(tasks)


def _to_tasks(
    rows: Iterable[tuple[str, dict[str, Any]]],
    where: str,
    split: str,
    keys: Keys,
    first_index: int = 0,
) -> list[Task]:
    tasks = [
        Task(
            id=f"{split}/{index}",
            prompt=_prompt(row, place, keys),
            reference=_reference(row, place, keys),
            metadata=metadata_of(row, keys.metadata_key, place),
            public=public_of(row, keys.public_keys, place),
        )
        for index, (place, row) in enumerate(rows, start=first_index)
    ]
    if not tasks:
        raise DataError(f"{where} contains no tasks")
    return tasks


def _column(row: dict[str, Any], key: str, option: str, where: str) -> Any:
    if row.get(key) is None:
        problem = f"column '{key}' is empty" if key in row else f"there is no column '{key}'"
        raise DataError(f"{where}: {problem}; set {option} to one of: {', '.join(row) or 'none'}")
    return row[key]


def _prompt(row: dict[str, Any], where: str, keys: Keys) -> Any:
    prompt = _column(row, keys.input_key, "input_key", where)
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
        for message in prompt
    )
    if is_chat and prompt and prompt[-1]["role"] == "user":
        return [{"role": message["role"], "content": message["content"]} for message in prompt]
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    raise DataError(
        f"{where}: column '{keys.input_key}' has to be a string, or chat messages that end with "
        f"the user's, not {str(prompt)[:80]!r}"
    )


def _reference(row: dict[str, Any], where: str, keys: Keys) -> str:
    label = _column(row, keys.label_key, "label_key", where)
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(
            f"{where}: column '{keys.label_key}' has to be a string or a number, not "
            f"{str(label)[:80]!r}"
        )
    reference = extract_answer(str(label)) or str(label).strip()
    if not 0 < len(reference) <= MAX_REFERENCE_CHARS:
        raise DataError(
            f"{where}: column '{keys.label_key}' has to contain a final answer (bare, after #### "
            f"or in \\boxed{{}}) of at most {MAX_REFERENCE_CHARS} characters"
        )
    return reference
