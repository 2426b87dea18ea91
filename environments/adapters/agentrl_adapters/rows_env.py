"""The part that adapters of classes share whose tasks are rows of a file.

`NAME:TARGET` is an environment's id; a row has `prompt`, optionally `id` and `reference`, and the
columns that the other framework passes to its class, which become the task's metadata.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pydantic

from agentrl.env.base import EnvConfig, Environment
from agentrl.env.rows import read_rows
from agentrl.errors import DataError
from agentrl.types import Task
from agentrl_adapters.packages import to_json


class RowsConfig(EnvConfig):
    """Files with the tasks."""

    target: str = ""
    """What stands behind the colon of the id. Anyone who can set it decides what is imported."""
    tasks: str | None = None
    """File with the training tasks, `.jsonl` or `.parquet`."""
    test: str | None = None
    """File with the test tasks."""


class RowsEnvironment(Environment):
    """An environment whose tasks are rows of the configured files."""

    Config = RowsConfig
    target_key = "target"
    """The configuration's key for what stands behind the colon of the id."""

    @classmethod
    def for_target(cls, target: str) -> type[Environment]:
        """Returns the environment class for the id `NAME:TARGET`."""
        return class_for(cls, cls.target_key, target)

    @classmethod
    def load_shared(cls, config: Any) -> Any:
        return read_files(config)

    def splits(self) -> dict[str, int | None]:
        return {split: len(tasks) for split, tasks in self.shared.items()}

    def get(self, split: str, index: int) -> Task:
        return self.shared[split][index]


@functools.cache
def class_for(base: type[Environment], key: str, target: str) -> type[Environment]:
    """Returns the class whose configuration has `target` as its default for `key`."""
    defaults: dict[str, Any] = {key: (str, target)}
    config = pydantic.create_model(base.Config.__name__, __base__=base.Config, **defaults)
    members = {"Config": config, "__doc__": base.__doc__, "id": base.id}
    # The class is found again by this name: a server and its client name the module of the base.
    return type(base.__name__, (base,), members | {"__module__": base.__module__})


def read_files(config: Any) -> dict[str, list[Task]]:
    """Reads the tasks of the files `tasks` and `test`, by split."""
    files = {"train": config.tasks, "test": config.test}
    return {split: read_tasks(split, Path(name)) for split, name in files.items() if name}


def read_tasks(split: str, path: Path) -> list[Task]:
    """Reads one task per row.

    Raises:
        DataError: there are none, one has no prompt, or two have one id.
    """
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for number, (place, row) in enumerate(read_rows(path)):
        prompt = row.pop("prompt", None)
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(f"{place}: `prompt` is missing; give a string or messages")
        given = row.pop("id", None)
        identifier = f"{split}/{number}" if given is None else str(given)
        if identifier in seen:
            raise DataError(f"{place}: the id {identifier!r} was given to {seen[identifier]}")
        seen[identifier] = place
        reference: Any = to_json(row.pop("reference", None))
        metadata: Any = to_json(row)
        tasks.append(Task(identifier, prompt, reference, metadata))
    if not tasks:
        raise DataError(f"{path} has no rows")
    return tasks
