"""Procedural tasks of reasoning-gym, graded by their datasets.

    agentrl env serve reasoning-gym --config datasets=leg_counting --config train_size=5000

Task `i` of a split comes from dataset `i % n` of the `n` configured ones. `train` is generated from
`seed` and `test` from a seed far away from it.

Some of the package's graders pass the agent's answer to Python's `eval` or to sympy's parser, which
also evaluates it, so an answer can run code in this process. Those datasets are refused unless
`trust_answers` is set.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from agentrl.env.base import EnvConfig, Environment, Episode
from agentrl.env.registry import register
from agentrl.env.tools import reward, tool
from agentrl.errors import ConfigError, DataError
from agentrl.types import Action, Task, ToolCall
from agentrl_adapters.packages import import_package, to_json

logger = logging.getLogger("agentrl.adapters")

_TEST_SEED_OFFSET = 2**30
"""Most datasets seed task `i` with `seed + i`, so datasets with close seeds share tasks."""
MAX_ENTRIES = 256
"""Tasks that are kept after they were generated."""
_NONSENSE = ("nan", "inf", "qzx", "-8675309")
"""Answers that no grader may pay for, unless they are a task's own answer."""
_EVALUATING = re.compile(r"\b(?:eval|exec|parse_expr|sympify|parse_latex)\b(?=\()")


class ReasoningGymConfig(EnvConfig):
    """Settings of the datasets, their sizes and how the agent answers."""

    datasets: str | list[str] | dict[str, dict[str, Any]] = "leg_counting"
    """A dataset's name, a list of names, or a table from names to the datasets' settings."""
    train_size: int = Field(default=10_000, ge=1, lt=_TEST_SEED_OFFSET)
    """Number of tasks in the `train` split, over all datasets."""
    test_size: int = Field(default=200, ge=1, lt=_TEST_SEED_OFFSET)
    """Number of tasks in the `test` split, over all datasets."""
    seed: int = Field(default=0, ge=0, lt=_TEST_SEED_OFFSET)
    answer: Literal["tags", "tool"] = "tags"
    """`tags`: the answer is in the last `<answer>...</answer>`. `tool`: the agent passes it to the
    tool `answer`."""
    instruction: str | None = None
    """Text put below every question; None explains how to give the answer."""
    trust_answers: bool = False
    """Allow datasets whose grader evaluates the answer as code."""


@dataclass
class Datasets:
    """The datasets of each split, in the configured order."""

    names: list[str]
    by_split: dict[str, list[Any]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while generating tasks, because some generators use the process-wide random state."""

    _entries: OrderedDict[tuple[str, int], dict[str, Any]] = field(default_factory=OrderedDict)
    """The last tasks, for the other members of their groups."""

    def entry(self, split: str, index: int) -> tuple[str, Any, dict[str, Any]]:
        """Returns a task's dataset name, dataset and entry, which is the caller's own."""
        which, row = index % len(self.names), index // len(self.names)
        dataset = self.by_split[split][which]
        with self.lock:
            entry = self._entries.get((split, index))
            if entry is None:
                entry = self._entries[split, index] = dataset[row]
                if len(self._entries) > MAX_ENTRIES:
                    self._entries.popitem(last=False)
        return self.names[which], dataset, copy.deepcopy(entry)


@register("reasoning-gym", max_sessions=4096)
class ReasoningGymEnvironment(Environment):
    """Procedural reasoning tasks with one answer, scored from 0 to 1 by their dataset's grader."""

    Config = ReasoningGymConfig

    @classmethod
    def load_shared(cls, config: ReasoningGymConfig) -> Datasets:
        """Makes the datasets.

        Raises:
            ConfigError: there is no dataset of that name, it rejects its settings, its tasks
                change from call to call, or its grader evaluates answers and `trust_answers` is
                off.
        """
        package = import_package("reasoning_gym", "reasoning-gym")
        settings = config.datasets
        if isinstance(settings, str):
            settings = [settings]
        if isinstance(settings, list):
            settings = {name: {} for name in settings}
        if not settings:
            raise ConfigError("datasets is empty; name at least one")
        starts = {"train": (config.seed, config.train_size)}
        starts["test"] = (config.seed + _TEST_SEED_OFFSET, config.test_size)
        by_split: dict[str, list[Any]] = {}
        for split, (seed, size) in starts.items():
            own_size = -(-size // len(settings))
            by_split[split] = [
                _make_dataset(package, name, {"seed": seed, "size": own_size} | own)
                for name, own in settings.items()
            ]
        for name, dataset in zip(settings, by_split["train"], strict=True):
            if dataset[0]["question"] != dataset[0]["question"]:
                raise ConfigError(
                    f"reasoning-gym's dataset '{name}' returns a different task each time it is "
                    "asked for the same one, so it cannot be graded; remove it from datasets"
                )
            called = "" if config.trust_answers else evaluates_answers(dataset)
            if called:
                raise ConfigError(
                    f"the grader of reasoning-gym's dataset '{name}' may run the agent's answer as "
                    f"code ({called}); remove it from datasets, or set trust_answers where that "
                    "is harmless"
                )
            if paid := pays_for_nonsense(dataset):
                raise ConfigError(
                    f"the grader of reasoning-gym's dataset '{name}' pays for the answer "
                    f"{paid!r}; remove it from datasets"
                )
        return Datasets(list(settings), by_split)

    def splits(self) -> dict[str, int]:
        return {"train": self.config.train_size, "test": self.config.test_size}

    def get(self, split: str, index: int) -> Task:
        name, _, entry = self.shared.entry(split, index)
        how = self.config.instruction
        if how is None and self.config.answer == "tags":
            how = "Write the final answer, and nothing else, between <answer> and </answer>."
        elif how is None:
            how = "Give the final answer, and nothing else, to the tool answer."
        prompt = f"{entry['question']}\n\n{how}" if how else entry["question"]
        place = {"dataset": name, "split": split, "index": index}
        return Task(f"{split}/{index}", prompt, to_json(entry["answer"]), place)

    def offered_tools(self) -> list[str]:
        return ["answer"] if self.config.answer == "tool" else []

    def reset(self, task: Task, *, seed: int) -> Any:
        split, index = task.metadata.get("split"), task.metadata.get("index")
        sizes = self.splits()
        if split not in sizes or not isinstance(index, int) or not 0 <= index < sizes[split]:
            raise DataError(
                f"task {task.id} is not a reasoning-gym task: its metadata needs a valid `split` "
                "and `index`"
            )
        self._dataset, self._entry = self.shared.entry(split, index)[1:]
        self._answer: str | None = None
        return task.prompt

    @tool(terminal=True)
    async def answer(self, text: str) -> None:
        """Give the final answer."""
        self._answer = text

    async def on_text(self, text: str) -> str | None:
        if self.config.answer == "tool":
            return "Give the final answer to the tool answer."
        rest, closed, _ = text.rpartition("</answer>")
        _, opened, written = rest.rpartition("<answer>")
        if opened and closed:
            self._answer = written.strip()
        self.finish(info={"answer": self._answer})
        return None

    def oracle(self) -> list[Action]:
        answer = str(self._entry["answer"])
        if self.config.answer == "tags":
            return [Action(text=f"<answer>{answer}</answer>")]
        return [Action(tool_calls=(ToolCall("call-0", "answer", {"text": answer}),))]

    @reward(timeout_s=30.0)
    def score(self, episode: Episode) -> float:
        """Returns the dataset's score of the answer; 0 without an answer or if it is unreadable."""
        if self._answer is None:
            return 0.0
        try:
            return float(self._dataset.score_answer(self._answer, self._entry))
        # For a malformed answer, the package's graders raise whatever their parsing raises. If
        # grading the dataset's own answer fails as well, the grader is broken and the error is
        # raised.
        except Exception as error:
            self._dataset.score_answer(str(self._entry["answer"]), self._entry)
            self.metrics["unreadable_answer"] = 1.0
            logger.info("reasoning-gym cannot read the answer %.80r: %r", self._answer, error)
            return 0.0


def _make_dataset(package: Any, name: str, settings: dict[str, Any]) -> Any:
    try:
        return package.create_dataset(name, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym's dataset '{name}': {error}") from error


def pays_for_nonsense(dataset: Any) -> str:
    """Returns nonsense that scores 1 in one of the first tasks; "" if there is none."""
    for row in range(min(3, len(dataset))):
        entry = dataset[row]
        for answer in _NONSENSE:
            if answer == str(entry["answer"]):
                continue
            with contextlib.suppress(Exception):  # graders raise whatever their parsing raises
                if dataset.score_answer(answer, entry) >= 0.99:
                    return answer
    return ""


def evaluates_answers(dataset: Any) -> str:
    """Returns the calls in a dataset's grader that evaluate code, joined by commas.

    Searches the source of `score_answer` and of the functions of its module that it calls,
    whatever their arguments. Returns "" if there are none.
    """
    module = vars(inspect.getmodule(type(dataset)))
    read: dict[str, str] = {}
    waiting = {"score_answer"}
    while waiting:
        name = waiting.pop()
        function = getattr(type(dataset), name, None) or module.get(name)
        read[name] = inspect.getsource(function) if inspect.isfunction(function) else ""
        waiting |= set(re.findall(r"(\w+)\(", read[name])) - read.keys()
    return ", ".join(sorted({call for text in read.values() for call in _EVALUATING.findall(text)}))
