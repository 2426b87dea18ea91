"""`agentrl data`: writes public data sets as the JSONL files that environments read."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.env.data_sets import DATA_SETS, DataSet, load_hub
from agentrl.errors import ConfigError, DataError

SUMS = "SHA256SUMS"
"""File with the checksums, in sha256sum's format. A comment above each describes the file."""

Written = dict[str, tuple[str, str]]
"""File name -> (SHA-256 checksum, description of the content)."""


def get(
    name: str,
    out: Path,
    *,
    splits: Iterable[str] = (),
    limit: int | None = None,
    mirror: Path | None = None,
) -> list[Path]:
    """Writes a data set's splits to a folder and returns the paths of the files.

    Files from an earlier call are kept if they are unchanged and have the same content. A file
    appears only when it is complete, so after an interruption, a repeated call writes only what is
    missing.

    Args:
        name: one of `DATA_SETS`.
        splits: splits to write, such as `train`; empty writes all.
        limit: maximum number of rows per split.
        mirror: see `load_hub`.

    Raises:
        ConfigError: there is no such name or split, or a package is missing.
        DataError: the data set cannot be read or lacks a column, or the folder has a file of the
            same name that this command did not write.
    """
    if name not in DATA_SETS:
        raise ConfigError(f"there is no data set '{name}'; use one of: {', '.join(DATA_SETS)}")
    data_set = DATA_SETS[name]
    wanted = list(splits) or list(data_set.splits)
    if unknown := sorted(set(wanted) - set(data_set.splits)):
        has = ", ".join(data_set.splits)
        raise ConfigError(f"{name} has no split {', '.join(unknown)}; it has: {has}")
    written = _read_sums(out)
    holds = {split: _holds(data_set, split, limit) for split in wanted}
    missing = [split for split in wanted if not _is_there(out, split, holds[split], written)]
    loaded: Mapping[str, Any] = {}
    if missing:
        out.mkdir(parents=True, exist_ok=True)
        loaded = load_hub(data_set.hub, data_set.subset, mirror=mirror)
    for split in missing:
        rows = islice(_split_of(loaded, data_set.splits[split], name), limit)
        path = out / f"{split}.jsonl"
        partial = path.with_name(path.name + ".part")
        digest = _write(partial, (_row(each, data_set, name) for each in rows), split)
        written[path.name] = (digest, holds[split])
        _write_sums(out, written)  # first, so that every file of this command has a checksum
        os.replace(partial, path)
    return [out / f"{split}.jsonl" for split in wanted]


def _holds(data_set: DataSet, split: str, limit: int | None) -> str:
    words = (data_set.hub, data_set.subset, data_set.splits[split], limit and f"first {limit} rows")
    return " ".join(str(word) for word in words if word)


def _is_there(out: Path, split: str, holds: str, written: Written) -> bool:
    """Returns whether the file is already there with this content.

    Raises:
        DataError: the file was not written by this command, or has been changed.
    """
    path = out / f"{split}.jsonl"
    if not path.exists():
        return False
    digest, held = written.get(path.name, ("", ""))
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == digest:
            return held == holds
    raise DataError(
        f"{path} already exists, but does not match {out / SUMS}, so this command did not write "
        "it or it was changed; remove or rename it, or choose another --out"
    )


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


def _write(path: Path, rows: Iterable[dict[str, Any]], split: str) -> str:
    """Writes rows with a progress bar and returns the file's SHA-256 checksum."""
    import orjson
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,} rows"),
        TimeElapsedColumn(),
    )
    digest = hashlib.sha256()
    with Progress(*columns, console=Console(stderr=True)) as progress, path.open("wb") as file:
        for row in progress.track(rows, description=split):
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
            digest.update(line)
            file.write(line)
        if not file.tell():
            raise DataError(f"split {split} contains no rows")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _read_sums(out: Path) -> Written:
    written: Written = {}
    holds = ""
    path = out / SUMS
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.startswith("# "):
            holds = line[2:]
        elif len(parts := line.split("  ", 1)) == 2:
            written[parts[1]] = (parts[0], holds)
    return written


def _write_sums(out: Path, written: Written) -> None:
    lines = (f"# {holds}\n{digest}  {name}\n" for name, (digest, holds) in sorted(written.items()))
    partial = out / f"{SUMS}.part"
    partial.write_text("".join(lines))
    os.replace(partial, out / SUMS)


def add_data_commands(commands: argparse._SubParsersAction) -> None:
    """Adds `data` and its subcommands, each with a `handler` that returns an exit status."""
    data = commands.add_parser("data", help="download public data sets as files to train on")
    subcommands = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = subcommands.add_parser(
        "get",
        help="write a data set as JSONL",
        description="Load a data set from the Hugging Face Hub or from a local copy and write the "
        "columns that its environment reads, one file per split, with "
        f"checksums in {SUMS}. A repeated call writes only what is missing. `agentrl data list` "
        "lists the data sets.",
    )
    command.add_argument("name", metavar="NAME", help=f"one of: {', '.join(DATA_SETS)}")
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: data/NAME)"
    )
    command.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="SPLIT",
        help="split to write, such as train or test; may be repeated (default: all)",
    )
    command.add_argument(
        "--limit", type=_positive, metavar="N", help="write only the first N rows of each split"
    )
    command.add_argument(
        "--from",
        dest="mirror",
        type=Path,
        metavar="DIR",
        help="local copy of the data set's repository, or a folder with one file per split, to use "
        "instead of the hub",
    )
    command.set_defaults(handler=_get)
    listing = subcommands.add_parser(
        "list",
        help="list the data sets that `agentrl data get` knows",
        description="Print each data set's name, environment, splits and repository.",
    )
    listing.set_defaults(handler=_list)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of rows")
    return int(text)


def _get(arguments: argparse.Namespace) -> int:
    out = arguments.out or Path("data") / arguments.name
    paths = get(
        arguments.name,
        out,
        splits=arguments.split,
        limit=arguments.limit,
        mirror=arguments.mirror,
    )
    for path in paths:
        with path.open("rb") as file:
            print(f"{path}: {sum(1 for _ in file):,} rows")
    print(f"check: cd {out} && sha256sum -c {SUMS}")
    data_set = DATA_SETS[arguments.name]
    if data_set.environment == "swebench":
        print(f"next: agentrl swebench data get {paths[0]} --out {out}/instances.jsonl")
    else:
        print(f"next: {' '.join(data_set.keys(out))}")
    return 0


def _list(_: argparse.Namespace) -> int:
    print(f"{'name':23} {'environment':11} {'splits':12} rows of")
    for name, each in DATA_SETS.items():
        repository = f"{each.hub} {each.subset or ''}"
        print(f"{name:23} {each.environment:11} {', '.join(each.splits):12} {repository}".rstrip())
    return 0
