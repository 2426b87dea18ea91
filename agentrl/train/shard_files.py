"""Checkpoints of sharded networks: every rank writes and reads its own part, and none holds it all.

    step_000020/model/shard-00001-model-00001-of-00001.safetensors      of rank 0
    step_000020/model/shard-00002-model-00001-of-00001.safetensors      of rank 1, and so on

torch's distributed checkpoint knows which part of which tensor lies where, so any number of ranks
can read what any other number wrote, and what one process wrote whole. Its files here are
safetensors, nothing in them is unpickled. It would read around a file that is missing, leaving a
hole: the manifest is compared before.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import load, save  # pyright: ignore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from agentrl.train import ranks
from agentrl.types import JSON

_SHARD_NAME = re.compile(r"shard-(\d+)-.*\.safetensors")


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, JSON]:
    """Write this rank's part of the tensors into the folder; every rank calls it.

    Returns:
        Every rank's files with their sha256 and size, as the manifest lists them.

    Raises:
        OSError: on every rank, naming the one whose disk refused.
    """
    try:
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=ranks.saving_group(),
            no_dist=ranks.size() == 1,
        )
    except CheckpointException as error:
        reasons = [f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()]
        raise OSError("; ".join(reasons)) from error
    own = [
        path
        for path in sorted(folder.iterdir())
        if (match := _SHARD_NAME.fullmatch(path.name)) and int(match[1]) == ranks.rank() + 1
    ]
    entries: dict[str, JSON] = {}
    for each in together(lambda: {f"{folder.name}/{path.name}": entry_of(path) for path in own}):
        entries |= each
    return entries


def read_shards(
    folder: Path,
    targets: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    names: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """Read the tensors of a folder in place, of each the part that this rank holds; every rank
    calls it.

    Args:
        targets: gets the saved tensors, without data, by name. It returns what they are read into,
            of the same shape and dtype; a sharded one receives this rank's shard. What it leaves
            out is not read.
        names: of the files to read; all by default.

    Returns:
        The targets, and the tensors without data of what was not read.
    """
    reader = _Reader(folder, names)
    saved = {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")  # pyright: ignore
        for name, each in reader.read_metadata().state_dict_metadata.items()
    }
    read = dict(targets(saved))
    with warnings.catch_warnings():
        # That there is one process, which is what it is told.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            dict(read),
            storage_reader=reader,
            process_group=ranks.host_group(),
            no_dist=ranks.size() == 1,
        )
    return saved | read


class _Reader(HuggingFaceStorageReader):
    def __init__(self, folder: Path, names: Iterable[str] | None) -> None:
        super().__init__(str(folder))
        if names is not None:
            self.fs = _Listing([str(folder / name) for name in names])


class _Listing(FileSystem):
    """A folder of which these files alone are seen."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self._paths = paths

    def ls(self, path: str | os.PathLike) -> list[str]:
        return self._paths


def together(work: Callable[[], Any]) -> list[Any]:
    """Do a part of a save on every rank; every rank's result, which is JSON, on each.

    Raises:
        OSError: on every rank, naming those whose disk refused.
    """
    result, problem = None, None
    try:
        result = work()
    except (OSError, SafetensorError) as error:
        problem = str(error)
    outcomes: list[Any] = ranks.gather([result, problem], ranks.saving_group())
    problems = [f"rank {rank}: {each[1]}" for rank, each in enumerate(outcomes) if each[1]]
    if problems:
        raise OSError("; ".join(problems))
    return [each[0] for each in outcomes]


def entry_of(path: Path) -> dict[str, JSON]:
    """A file's entry in the manifest, once it is forced to disk."""
    force_to_disk(path)
    return {"sha256": sha256(path), "size": path.stat().st_size}


def force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
