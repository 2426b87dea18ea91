"""`agentrl data`: writes public data sets as the JSONL files that environments read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from agentrl.cli.app import make_app
from agentrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from agentrl.env.data_sets import DataSet

app = make_app("data", "Download public data sets as files to train on.")


def get(
    name: str,
    out: Path,
    *,
    splits: Iterable[str] = (),
    limit: int | None = None,
    mirror: Path | None = None,
) -> list[Path]:
    """Writes a data set's splits to a folder and returns the paths of the files.

    A file that is there already is kept, and said to be. A file appears only when it is complete,
    so a repeated call writes only what is missing.

    Args:
        name: one of `DATA_SETS`.
        splits: splits to write, such as `train`; empty writes all.
        limit: maximum number of rows per split.
        mirror: see `load_hub`.

    Raises:
        ConfigError: there is no such name or split, or a package is missing.
        DataError: the data set cannot be read, or lacks a column.
    """
    from agentrl.env.data_sets import DATA_SETS, load_hub

    if name not in DATA_SETS:
        raise ConfigError(f"there is no data set '{name}'; use one of: {', '.join(DATA_SETS)}")
    data_set = DATA_SETS[name]
    wanted = list(splits) or list(data_set.splits)
    if unknown := sorted(set(wanted) - set(data_set.splits)):
        has = ", ".join(data_set.splits)
        raise ConfigError(f"{name} has no split {', '.join(unknown)}; it has: {has}")
    paths = {split: out / f"{split}.jsonl" for split in wanted}
    missing = [split for split in wanted if not paths[split].exists()]
    for path in sorted({*paths.values()} - {paths[split] for split in missing}):
        print(f"{path} is there already and is kept; remove it to have it written again")
    loaded: Mapping[str, Any] = {}
    if missing:
        out.mkdir(parents=True, exist_ok=True)
        loaded = load_hub(data_set.hub, data_set.subset, mirror=mirror)
    for split in missing:
        rows = islice(_split_of(loaded, data_set.splits[split], name), limit)
        path = paths[split]
        partial = path.with_name(path.name + ".part")
        _write(partial, (_row(each, data_set, name) for each in rows), split)
        os.replace(partial, path)
    return [*paths.values()]


def _split_of(loaded: Mapping[str, Any], split: str, name: str) -> Iterable[dict[str, Any]]:
    # Without a dataset card, `datasets` calls the split dev `validation`.
    found = [each for each in (split, "validation" if split == "dev" else split) if each in loaded]
    if not found:
        raise DataError(f"{name}: there is no split '{split}'; there are {', '.join(loaded)}")
    return loaded[found[0]]


def _row(row: dict[str, Any], data_set: DataSet, name: str) -> dict[str, Any]:
    if not data_set.columns:
        return row
    if absent := sorted({*data_set.columns.values(), *data_set.answer} - row.keys()):
        raise DataError(
            f"{name}: a row has no column {', '.join(absent)}, only {', '.join(row)}; is it from "
            f"{data_set.hub}{f', subset {data_set.subset}' if data_set.subset else ''}?"
        )
    written = {column: row[origin] for column, origin in data_set.columns.items()}
    if data_set.answer:
        written["answer"] = json.dumps({column: row[column] for column in data_set.answer})
    return written


def _write(path: Path, rows: Iterable[dict[str, Any]], split: str) -> None:
    import orjson
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,} rows"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress, path.open("wb") as file:
        for row in progress.track(rows, description=split):
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        if not file.tell():
            raise DataError(f"split {split} contains no rows")
        file.flush()
        os.fsync(file.fileno())


@app.command(name="get")
def get_command(
    name: str,
    /,
    *,
    out: Path | None = None,
    split: tuple[str, ...] = (),
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
) -> int:
    """Write a data set as JSONL.

    Loads a data set from the Hugging Face Hub or from a local copy, and writes the columns that its
    environment reads, one file per split. Files that are there already are kept.

    Args:
        name: Name of a data set; `agentrl data list` shows them.
        out: Folder to write to; data/NAME if not given.
        split: Split to write, such as train or test; repeatable; all if not given.
        limit: Write only the first N rows of each split.
        from_: Local copy of the data set's repository, or a folder with one file per split, to use
            instead of the hub.
    """
    from agentrl.env.data_sets import DATA_SETS

    folder = out or Path("data") / name
    paths = get(name, folder, splits=split, limit=limit, mirror=from_)
    for path in paths:
        with path.open("rb") as file:
            print(f"{path}: {sum(1 for _ in file):,} rows")
    data_set = DATA_SETS[name]
    if data_set.environment == "swebench":
        print(f"next: agentrl swebench doctor --dataset {paths[0]}; then pull, then validate")
    else:
        print(f"next: {' '.join(data_set.keys(folder))}")
    return 0


@app.command(name="list")
def list_data_sets() -> int:
    """List the data sets that `agentrl data get` knows.

    Prints each data set's name, environment, splits and repository.
    """
    from agentrl.env.data_sets import DATA_SETS

    print(f"{'name':23} {'environment':11} {'splits':12} rows of")
    for name, each in DATA_SETS.items():
        repository = f"{each.hub} {each.subset or ''}"
        print(f"{name:23} {each.environment:11} {', '.join(each.splits):12} {repository}".rstrip())
    return 0
