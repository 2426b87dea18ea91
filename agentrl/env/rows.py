"""Reads the rows of JSONL and parquet files one at a time, so that files may be large.

Numbers are what the file says: integers of any size are exact, a float of 32 bits is its shortest
decimal, a decimal is a number, and NaN and infinity are missing values.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agentrl.env.data_sets import how_to_get
from agentrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from agentrl.types import JSON

ROW_SUFFIXES = (".jsonl", ".parquet")
_LARGE_INTEGER = re.compile(rb"[0-9]{19}")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields `(place, row)` for each row of a `.jsonl` or `.parquet` file.

    The place is a text for error messages, such as `FILE, line 3`.

    Raises:
        ConfigError: it is a parquet file, but pyarrow is not installed.
        DataError: the file or one of its rows cannot be read.
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
        raise DataError(f"file {path} is neither .jsonl nor .parquet; convert or rename it")


def public_of(row: dict[str, Any], names: Sequence[str], where: str) -> dict[str, JSON]:
    """Returns the columns of a row that whoever plays the episode may see.

    Args:
        names: of the columns; not that of the reference.
        where: place of the row, for error messages.

    Raises:
        DataError: a column is missing.
    """
    if missing := [name for name in names if name not in row]:
        raise DataError(
            f"{where}: there is no column '{missing[0]}'; public_keys may name: "
            f"{', '.join(row) or 'none'}"
        )
    return {name: row[name] for name in names}


def metadata_of(row: dict[str, Any], metadata_key: str | None, where: str) -> dict[str, JSON]:
    """Returns the object in a row's metadata column, which may also be JSON text.

    Args:
        metadata_key: name of the column; None returns {}.
        where: place of the row, for error messages.

    Raises:
        DataError: the column is missing or is not an object.
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
            metadata = _loads(metadata.encode())
        except ValueError as error:
            raise DataError(
                f"{where}: column '{metadata_key}' is a string but not valid JSON ({error})"
            ) from error
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: column '{metadata_key}' has to be an object or its JSON text")
    return metadata


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # which Windows' editors write
            if not line.strip():
                continue
            try:
                row = _loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: not JSON ({error}); every line has to be a JSON object"
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, line {number}: a {type(row).__name__}; every line has to be a JSON "
                    "object"
                )
            yield f"{path}, line {number}", row


def _loads(text: bytes) -> Any:
    """Parses JSON. The fast parser makes a float of an integer beyond 64 bits."""
    if _LARGE_INTEGER.search(text) is None:
        return orjson.loads(text)
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _plain(value: Any, kind: Any) -> Any:
    """Converts a value of an arrow column of type `kind`, as the module's docstring says."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(str(kind.to_pandas_dtype()(value))) if kind.bit_width < 64 else value
    if isinstance(value, Decimal):
        if not value.is_finite():
            return None
        if value == value.to_integral_value():
            return int(value)
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_plain(each, kind.value_type) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each, kind.field(name).type) for name, each in value.items()}
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("parquet files need pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                kinds = {field.name: field.type for field in batch.schema}
                for row in batch.to_pylist():
                    number += 1
                    row = {name: _plain(value, kinds[name]) for name, value in row.items()}
                    yield f"{path}, row {number}", row
    except (ValueError, OSError) as error:  # pyarrow's own errors derive from these
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
