"""Rows of JSONL and parquet files, one at a time: task files, and corpora of millions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agentrl.data.hub import how_to_get
from agentrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from agentrl.types import JSON

ROW_SUFFIXES = (".jsonl", ".parquet")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a `.jsonl` or `.parquet` file, with its place as text (`FILE, line 3`).

    Raises:
        ConfigError: a parquet file, and pyarrow is not installed.
        DataError: the file or one of its rows can't be read.
    """
    if not path.is_file():
        raise DataError(
            f"file {path} does not exist; the path is relative to {Path.cwd()}{how_to_get(path)}"
        )
    if path.suffix == ".jsonl":
        yield from _jsonl_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise DataError(f"file {path} must end in .jsonl or .parquet")


def metadata_of(row: dict[str, Any], metadata_key: str | None, where: str) -> dict[str, JSON]:
    """Returns what a row's column holds about its task: an object, or the JSON text of one.

    Raises:
        DataError: the column is not there or holds something else; says where.
    """
    if metadata_key is None:
        return {}
    if metadata_key not in row:
        raise DataError(
            f"{where}: there is no column '{metadata_key}'; set metadata_key to one of: "
            f"{', '.join(row) or 'none'}"
        )
    metadata = row[metadata_key]
    if isinstance(metadata, str):
        try:
            metadata = orjson.loads(metadata)
        except orjson.JSONDecodeError as error:
            raise DataError(
                f"{where}: column '{metadata_key}' is a text but not JSON ({error})"
            ) from error
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: column '{metadata_key}' must be an object or its JSON text")
    return metadata


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not JSON ({error}); every line must be one JSON object"
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, line {number}: a {type(row).__name__}; every line must be one JSON "
                    "object"
                )
            yield f"{path}, line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("parquet files need pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (ValueError, OSError) as error:  # pyarrow's own errors derive from these
        raise DataError(f"{path} can't be read as parquet: {error}") from error
