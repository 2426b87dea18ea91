"""`agentrl tasks`: finds evaluation tasks that also occur in training, and those that tell nothing.

Two prompts are the same when they have the same words in the same order, whatever their case,
punctuation and spacing. They are near when most of what is special in the one stands in the other:
of the runs of three words that few tasks have, so that a shared instruction or template does not
count.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl import runtime
from agentrl.config import RunConfig
from agentrl.env.client import EnvClient, connect
from agentrl.errors import ConfigError
from agentrl.evaluate.compare import mean_rewards, saturated
from agentrl.evaluate.episodes import read_evaluation
from agentrl.images import content_text
from agentrl.rollout.setup import split_size
from agentrl.types import Content, Message

_RUN = 3
"""Words in a run."""
_FEWEST = 5
"""Special runs that a prompt must have to be called near another."""
_PAGE = 100
SHOWN = 10


@dataclass(slots=True, frozen=True)
class Overlap:
    """The tasks of one split that also occur in another."""

    num_train: int
    num_test: int
    exact: dict[str, str]
    """Task of the evaluation -> the first of training with the same words."""
    near: dict[str, tuple[str, float]]
    """Task of the evaluation -> the nearest of training, and the share of its special runs that
    stand there."""
    repeated: dict[str, str] = field(default_factory=dict)
    """Task of the evaluation -> an earlier one of it with the same words."""
    num_short: int = 0
    """Tasks of the evaluation with too few special runs to be near another."""


def overlap(
    train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]], *, threshold: float = 0.8
) -> Overlap:
    """Finds the tasks of `test` that occur in `train`, exactly or nearly.

    Args:
        train, test: id and prompt of every task.
        threshold: from which share of its special runs on a task is near another.
    """
    first: dict[tuple[str, ...], str] = {}
    for task, text in train:
        first.setdefault(_words(text), task)
    own: dict[tuple[str, ...], str] = {}
    exact, repeated = {}, {}
    runs: dict[str, set[tuple[str, ...]]] = {}
    for task, text in test:
        words = _words(text)
        if words in own:
            repeated[task] = own[words]
        if words:  # the prompts of tasks that begin with an observation are all empty
            own.setdefault(words, task)
        if words and words in first:
            exact[task] = first[words]
        else:
            runs[task] = set(_runs(words))
    # Only runs of the evaluation are kept in memory: training may be far larger.
    count = Counter(run for each in runs.values() for run in each)
    for _, text in train:
        count.update(run for run in set(_runs(_words(text))) if run in count)
    common = max(20, (len(train) + len(test)) // 100)
    special = {task: {run for run in each if count[run] <= common} for task, each in runs.items()}
    owners: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for task, each in special.items():
        if len(each) >= _FEWEST:
            for run in each:
                owners[run].append(task)
    near: dict[str, tuple[str, float]] = {}
    for other, text in train:
        hits = Counter(task for run in set(_runs(_words(text))) for task in owners.get(run, ()))
        for task, number in hits.items():
            share = number / len(special[task])
            if share >= threshold and share > near.get(task, ("", 0.0))[1]:
                near[task] = (other, share)
    short = sum(len(each) < _FEWEST for each in special.values())
    return Overlap(len(train), len(test), exact, near, repeated, short)


def _words(text: str) -> tuple[str, ...]:
    # Signs between numbers tell tasks apart: 3 + 4 is not 3 - 4.
    return tuple(re.findall(r"\w+|[-+*/=<>^]", text.casefold()))


def _runs(words: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return (words[i : i + _RUN] for i in range(len(words) - _RUN + 1))


async def _read(config: RunConfig, most: int) -> list[list[tuple[str, str]]]:
    """Returns id and prompt of the tasks of both splits; warns if a split is not read whole."""
    env = config.env
    async with aclosing(connect(env.url or None, token=env.token)) as client:
        found = []
        for split in (env.split, config.eval.split):
            size = await split_size(client, config, split)
            wanted = min(most, size if size is not None else most)
            if size is None or wanted < size:
                of = "without end" if size is None else f"of {size:,}"
                print(f"split {split} {of}: its first {wanted:,} tasks are read", file=sys.stderr)
            found.append(await _tasks(client, config, split, wanted))
        return found


async def _tasks(
    client: EnvClient, config: RunConfig, split: str, size: int
) -> list[tuple[str, str]]:
    found = []
    for start in range(0, size, _PAGE):
        stop = min(start + _PAGE, size)
        page = await client.tasks(config.env.id, split, start, stop, config=config.env.config)
        found += [(task.id, _text(task.prompt)) for task in page]
    return found


def _text(prompt: str | list[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_shown(m["content"]) for m in prompt if m["role"] != "system")


def _shown(content: Content) -> str:
    """Returns the texts with one word for each image, so that one question about two pictures is
    two tasks."""
    if isinstance(content, str):
        return content
    return " ".join(content_text([part]) or _hash(part) for part in content)


def _hash(image: Any) -> str:
    return hashlib.sha256(json.dumps(image, sort_keys=True).encode()).hexdigest()


def tasks_command(
    config: RunConfig, folders: Sequence[Path], *, threshold: float, most: int, as_json: bool
) -> int:
    """Runs `agentrl tasks`: prints the tasks that occur in both splits, and the tasks of
    evaluations that every sample or none solves.

    Raises:
        ConfigError: both splits are one, or the threshold is not a share.
    """
    if config.env.split == config.eval.split:
        raise ConfigError(
            f"env.split and eval.split are both {config.env.split!r}: every task of the evaluation "
            "is trained on; set eval.split"
        )
    if not 0 < threshold <= 1:
        raise ConfigError(f"--threshold {threshold:g} is not a share: give one above 0, up to 1")
    played = [t for folder in folders for t in read_evaluation(folder)[1]]
    train, test = runtime.run(_read(config, most))
    found = overlap(train, test, threshold=threshold)
    means = mean_rewards(played)
    counted, all_solve, none_solves = saturated(played, config.eval.success_threshold)
    seen = found.exact.keys() | found.near.keys()
    in_both = [mean for task, mean in means.items() if task in seen]
    others = [mean for task, mean in means.items() if task not in seen]
    if as_json:
        record = asdict(found) | {"tasks_played": counted}
        print(json.dumps(record | {"all_solve": all_solve, "none_solves": none_solves}))
        return 0
    print(
        f"{config.env.id}: {found.num_test:,} tasks of {config.eval.split}, {found.num_train:,} of "
        f"{config.env.split}"
    )
    exact = [f"{task} = {other}" for task, other in found.exact.items()]
    near = [f"{task} ~ {other} ({share:.2f})" for task, (other, share) in found.near.items()]
    again = [f"{task} = {other}" for task, other in found.repeated.items()]
    _say("have the words of a task of training", exact)
    _say(f"are near one ({threshold:g} of their special runs of three words or more)", near)
    _say(f"stand in {config.eval.split} twice", again)
    if found.num_short:
        print(f"{found.num_short} are too short, or too much alike, to be near another")
    if folders:
        print(f"{counted} tasks were played, with {len(played)} samples")
        _say("are solved by every sample", all_solve)
        _say("are solved by none", none_solves)
    if in_both and others:
        print(
            f"mean reward of the {len(in_both)} that stand in training {_mean(in_both):.3f}, of "
            f"the {len(others)} others {_mean(others):.3f}"
        )
    return 0


def _say(what: str, found: Sequence[str]) -> None:
    named = ", ".join(found[:SHOWN])
    rest = f" and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
    print(f"{len(found)} {what}{': ' if found else ''}{named}{rest}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
