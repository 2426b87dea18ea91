"""Keeps the episodes of an evaluation on disk, so that a killed one continues where it stopped.

`DIR/config.toml` is the configuration; `DIR/trajectories/` holds the episodes in the order in which
they ended and, once all have, in the order of the tasks. A shard has its own folder,
`DIR/shard_2_of_3/`; opening `DIR` with `resume` finds the episodes of all shards.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError, DataError
from agentrl.images import IMAGES_FOLDER, ImageStore
from agentrl.rollout.log import (
    INDEX_FILE,
    TrajectoryLog,
    cut_torn_record,
    read_trajectories,
    step_file,
    step_files,
)
from agentrl.runtime import write_whole
from agentrl.types import Group, Trajectory

CONFIG_FILE = "config.toml"
SUITE_FILE = "played.toml"
"""What a suite plays, in the folder of its cells, `MODEL/BENCHMARK`."""
# Of a task or its grader: playing it again would fail again.
_FAILED_FOR_GOOD = {"env_error", "grader_error", "no_reference"}
# What may differ when an evaluation goes on: where things run, how patiently, and how much of it.
_MAY_DIFFER = {
    "run": {
        "name",
        "dir",
        "resume",
        "stall_timeout_s",
        "eval_every",
        "keep_best",
        "patience",
        "num_steps",
        "save_every",
        "keep_checkpoints",
    },
    "env": {"url", "token"},
    "inference": {"urls", "token", "python", "num_servers", "args", "weights_dir"},
    "rollout": {"max_concurrent", "turn_timeout_s", "step_timeout_s", "episode_timeout_s"},
    "eval": {"num_tasks", "max_total_tokens", "pass_k", "success_threshold", "sets"},
    "track": {"sinks"},
}


@dataclass(slots=True, frozen=True)
class Shard:
    """Every `count`-th task, starting with task `number`; both are counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads `2/3`.

        Raises:
            ValueError: the text does not have this form, or the number is above the count.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{text!r} is not a shard: write 1/3, 2/3 and 3/3 for three of them")
        return cls(int(found[1]), int(found[2]))

    def has(self, position: int) -> bool:
        """Tells whether a task belongs to this shard."""
        return position % self.count == self.number - 1

    def __str__(self) -> str:
        return f"shard_{self.number}_of_{self.count}"


class EpisodeLog:
    """The episodes that an evaluation has played so far, and the log to which it adds more."""

    def __init__(
        self, folder: Path, config: RunConfig, *, resume: bool = False, shard: Shard | None = None
    ) -> None:
        """Opens a folder, and makes it if it is missing.

        Args:
            config: the evaluation's; `model.path` is the checkpoint that plays.
            resume: continue with the episodes in the folder.

        Raises:
            ConfigError: the folder holds an evaluation and `resume` is false, or that evaluation
                has another configuration; or the folder cannot be written.
            DataError: a record is damaged.
        """
        self.done: dict[str, Trajectory] = {}
        """Episodes that need not be played again, by trajectory id."""
        self.num_again = 0
        """Episodes that failed for a reason that may have passed, and are played again."""
        self._whole_groups = bool(config.reward.functions)
        self._size = config.eval.samples_per_task
        self.folder = folder / str(shard) if shard else folder
        if (self.folder / CONFIG_FILE).exists():
            if not resume:
                raise ConfigError(
                    f"{self.folder} already holds an evaluation: continue it with --resume, or "
                    "choose another --out"
                )
            _require_same(self.folder / CONFIG_FILE, config)
            log = self.folder / "trajectories"
            if log.is_dir() and any(step for _, step in step_files(log)):
                raise ConfigError(f"{self.folder} holds a training run: choose another --out")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / CONFIG_FILE, config.to_toml().encode())
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror}") from error
        folders = [self.folder] if shard else [folder, *sorted(folder.glob("shard_*_of_*"))]
        self._log = TrajectoryLog(self.folder)
        for each in folders:
            if each != self.folder:
                _require_same(each / CONFIG_FILE, config)
                self._log.images.take_over(ImageStore(each / IMAGES_FOLDER))
            self._take_over(each)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Appends finished episodes; episodes that ended because this process was stopped are left
        out."""
        ended = [t for t in trajectories if t.error is None or t.error.code != "cancelled"]
        if ended:
            self._log.append(0, ended)

    def finish(self, trajectories: list[Trajectory]) -> None:
        """Rewrites the log in this order, with each episode once. A kill leaves either the old log
        or the new one."""
        directory = self.folder / "trajectories"
        scratch = self.folder / ".finished"
        shutil.rmtree(scratch, ignore_errors=True)
        TrajectoryLog(scratch, images=self._log.images).append(0, trajectories)
        # Without an index it is made from the records, so it goes first and comes last.
        (directory / INDEX_FILE).unlink(missing_ok=True)
        os.replace(step_file(scratch / "trajectories", 0), step_file(directory, 0))
        os.replace(scratch / "trajectories" / INDEX_FILE, directory / INDEX_FILE)
        shutil.rmtree(scratch)

    def _take_over(self, folder: Path) -> None:
        if not (folder / "trajectories").is_dir():
            return
        for path, _ in step_files(folder / "trajectories"):
            cut_torn_record(path)
        groups: dict[str, list[Trajectory]] = defaultdict(list)
        newest = {t.trajectory_id: t for _, t in read_trajectories(folder)}  # the last one counts
        for trajectory in newest.values():
            if plays_again(trajectory):
                self.num_again += 1
            else:
                groups[trajectory.group_id].append(trajectory)
        for members in groups.values():
            # Reward functions compare the members of a group, so it is scored as a whole.
            if not self._whole_groups or len(members) == self._size:
                self.done |= {t.trajectory_id: t for t in members}


def plays_again(trajectory: Trajectory) -> bool:
    """Tells whether an episode failed for a reason that may have passed."""
    return trajectory.error is not None and trajectory.error.code not in _FAILED_FOR_GOOD


def read_evaluation(folder: Path, *, images: bool = False) -> tuple[RunConfig, list[Trajectory]]:
    """Reads the configuration and the episodes of an evaluation's folder.

    Args:
        images: as `read_trajectories`.

    Raises:
        DataError: the folder holds no evaluation, or a record is damaged.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise DataError(f"{folder}: no {CONFIG_FILE}; name a folder of agentrl eval --out")
    # Of several episodes with the same id, the last one counts.
    episodes = {
        trajectory.trajectory_id: trajectory
        for each in (folder, *sorted(folder.glob("shard_*_of_*")))
        if (each / "trajectories").is_dir()
        for _, trajectory in read_trajectories(each, images=images)
    }
    return load_config(folder / CONFIG_FILE, []), [*episodes.values()]


def _require_same(file: Path, config: RunConfig) -> None:
    """Checks that the folder's evaluation has this configuration."""
    before, now = load_config(file, []).to_json(), config.to_json()
    other = [
        f"{section}.{key}"
        for section, keys in now.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if key not in _MAY_DIFFER.get(section, ()) and value != value_at(before, section, key)
    ]
    if other:
        raise ConfigError(
            f"{file.parent} holds another evaluation; {', '.join(other)} differ: evaluate into "
            "another --out"
        )


def value_at(config: Mapping[str, Any], section: str, key: str) -> Any:
    """Returns the value of a key in a configuration's tables; None where it has none."""
    table = config.get(section)
    return table.get(key) if isinstance(table, dict) else None


def groups_of(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Returns the groups of trajectories, in the order of their first ones."""
    groups: dict[str, Group] = {}
    for each in trajectories:
        group = groups.setdefault(each.group_id, Group(each.group_id, each.task_id, []))
        group.trajectories.append(each)
    return [*groups.values()]
