"""Environments that look sound and are not, in table LISTED and UNLISTED, and unusual ones that are
sound, in UNUSUAL. `agentrl env check` tells them apart."""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import itertools
import json
import os
import random
import sqlite3
import sys
import tempfile
import threading
import time
from typing import Literal

import numpy
from broken_envs import Good

from agentrl.env import Action, EnvConfig, Environment, Secret, Task, ToolCall, reward, tool
from agentrl.env.tools import tools_of
from agentrl.errors import EnvError

LISTED: list[type[Environment]] = []
UNLISTED: list[type[Environment]] = []
UNUSUAL: list[type[Environment]] = []


def listed(cls):
    LISTED.append(cls)
    return cls


def unlisted(cls):
    UNLISTED.append(cls)
    return cls


def unusual(cls):
    UNUSUAL.append(cls)
    return cls


# State that sessions share

_lock = threading.Lock()
_file = f"{os.environ.get('ODD_ENVS', '/tmp')}/odd-envs-{os.getuid()}"


@listed
class CountsWithAnIterator(Good):
    numbers = itertools.count()

    @tool
    def add(self, number: int) -> str:
        return f"Call {next(self.numbers)}."


@listed
class SharesWhatLoadSharedConnected(Good):
    @classmethod
    def load_shared(cls, config):
        database = sqlite3.connect(":memory:", check_same_thread=False)
        database.execute("CREATE TABLE seen (task TEXT)")
        return database

    @tool
    def add(self, number: int) -> str:
        with _lock:
            self.shared.execute("INSERT INTO seen VALUES (?)", (self.task.id,))
            return f"{self.shared.execute('SELECT count(*) FROM seen').fetchone()[0]} seen."


@unlisted
class MutableDefault(Good):
    def note(self, number, seen=[]):  # noqa: B006
        seen.append(number)
        return len(seen)

    @tool
    def add(self, number: int) -> str:
        return f"{self.note(number)} numbers so far."


class _Store:
    def __init__(self):
        self.value = 0


_store = _Store()


@unlisted
class KeepsStateInAnObject(Good):
    @tool
    def add(self, number: int) -> str:
        _store.value += number + 1
        return f"The total is {_store.value}."


# Tasks


@listed
class TasksFromHashes(Good):
    def get(self, split, index):
        rng = random.Random(hash(f"{split}/{index}"))
        return Task(f"{split}/{index}", "Find it.", reference=f"word-{rng.randrange(10**9)}")


@unlisted
class PromptFromASet(Good):
    def reset(self, task, *, seed):
        names = {"ann", "bob", "cid", "dora", "emil"}
        return f"{super().reset(task, seed=seed)} Ask {', '.join(names)}."


@listed
class TestIsTrain(Good):
    def get(self, split, index):
        task = super().get("train", index)
        return Task(f"{split}/{index}", task.prompt, task.reference)


@listed
class TestIsPartOfTrain(Good):
    def splits(self):
        return {"train": 60, "test": 20}

    def get(self, split, index):
        task = super().get("train", index if split == "train" else 59 - 2 * index)
        return Task(f"{split}/{index}", task.prompt, task.reference)


@unlisted
class ValidationIsTrainTurnedRound(Good):
    def splits(self):
        return {"training": 30, "validation": 30}

    def get(self, split, index):
        task = super().get("train", index if split == "training" else 29 - index)
        return Task(f"{split}/{index}", task.prompt, task.reference)


@unlisted
class NoPromptForSome(Good):
    def get(self, split, index):
        task = super().get(split, index)
        return Task(task.id, "" if index == 11 else task.prompt, task.reference)


# The reference


@listed
class ReferenceInADescription(Good):
    def offered_tools(self):
        spec = json.loads(json.dumps(tools_of(type(self))["answer"].spec))
        spec["function"]["description"] = f"Give the word, such as {self.task.reference}."
        return ["add", spec]


@listed
class ReferenceInAnEnum(Good):
    def offered_tools(self):
        spec = json.loads(json.dumps(tools_of(type(self))["answer"].spec))
        spec["function"]["parameters"]["properties"]["word"]["enum"] = [
            "word-00000000",
            self.task.reference,
        ]
        return ["add", spec]


def tells(how, name):
    """An environment that tells its reference in some form when it is asked without a tool."""

    def on_text(self, text):
        return f"No. Look at {how(self.task.reference)} again."

    return type(name, (Good,), {"on_text": on_text, "__module__": __name__})


ReferenceInCapitals = listed(tells(str.upper, "ReferenceInCapitals"))
ReferenceSpaced = unlisted(tells(" ".join, "ReferenceSpaced"))


@unlisted
class ReferenceInALaterSpecification(Good):
    """Only once the agent has used a tool."""

    def offered_tools(self):
        if not self.episode.num_turns:
            return ["add", "answer"]
        spec = json.loads(json.dumps(tools_of(type(self))["add"].spec))
        spec["function"]["description"] = f"Not {self.task.reference.title()}."
        return [spec, "answer"]


# Graders


@unlisted
class PaysForNothing(Good):
    @reward(weight=1.0)
    def polite(self, episode) -> float:
        return 1.0


# The process


@listed
class Prints(Good):
    @tool
    def add(self, number: int) -> str:
        print("adding", number)
        return super().add(number)


def changes(how, name):
    """An environment whose reset does something to its process."""

    async def reset(self, task, *, seed):
        how()
        return Good.reset(self, task, seed=seed)

    return type(name, (Good,), {"reset": reset, "__module__": __name__})


SeedsRandom = listed(changes(lambda: random.seed(7), "SeedsRandom"))
SeedsNumpy = unlisted(changes(lambda: numpy.random.seed(7), "SeedsNumpy"))
SwallowsOutput = unlisted(
    changes(lambda: setattr(sys, "stdout", open(os.devnull, "w")), "SwallowsOutput")  # noqa: SIM115
)


# Code that hangs


@listed
class WaitsInReset(Good):
    async def reset(self, task, *, seed):
        await asyncio.Event().wait()


@listed
class BlocksTheLoop(Good):
    @tool
    async def add(self, number: int) -> str:
        threading.Event().wait()
        return "never"


@unlisted
class HangsInGet(Good):
    def get(self, split, index):
        if index == 3:
            threading.Event().wait()
        return super().get(split, index)


# What else goes wrong


@unlisted
class EndsOnlyByATool(Environment):
    def splits(self):
        return {"train": 40}

    def get(self, split, index):
        return Task(str(index), f"Say {index}.", reference=index)

    @tool
    def answer(self, number: int) -> None:
        self.finish(float(number == self.task.reference))


@unlisted
class ReturnsASet(Good):
    @tool
    def add(self, number: int) -> object:
        return object()


@unlisted
class ExitsOnOddAnswers(Good):
    def on_text(self, text):
        sys.exit("the agent said nothing") if not text else None
        return "Call a tool."


@unlisted
class ClosesTwice(Good):
    def reset(self, task, *, seed):
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        return super().reset(task, seed=seed)

    def close(self):
        self.file.close()
        self.file.write(b"bye")


@unlisted
class DividesByNothing(Good):
    @reward(weight=0.1)
    def brevity(self, episode) -> float:
        return 1 / len(episode.last_text.split()) if episode.last_text else float("inf")


@unlisted
class PromptDependsOnTheClock(Good):
    def reset(self, task, *, seed):
        return f"{super().reset(task, seed=seed)} It is {time.time()}."


# Unusual, and sound


@unusual
class Hedged(Good):
    """Text alone; the last number counts."""

    def get(self, split, index):
        number = 40 + index + 10_000 * (split == "test")
        return Task(f"{split}/{index}", f"What is {number} + 2?", reference=number + 2)

    def on_text(self, text):
        last = (text.split() or [""])[-1].strip(".")
        self.finish(float(last == str(self.task.reference)))

    def offered_tools(self):
        return []

    def oracle(self):
        return [Action(text=f"I would say {self.task.reference}")]


@unusual
class Choices(Good):
    """A choice may be given by its letter."""

    def get(self, split, index):
        task = super().get(split, index)
        prompt = f"{task.prompt} It is one of the {split} words."
        return Task(task.id, prompt, reference=f"{'ABCD'[index % 4]}. answer {index}")

    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.finish(float(word.split(".")[0].strip() == self.task.reference[0]))


@unusual
class Tolerant(Good):
    """A float within a hundredth."""

    def get(self, split, index):
        value = index * 1.37 + (500.25 if split == "test" else 0.125)
        return Task(f"{split}/{index}", f"Give {value:.3f}.", reference=value)

    @tool(terminal=True)
    def answer(self, word: float) -> float:
        return float(abs(word - self.task.reference) < 0.01)


@unusual
class UsesGlobalRandomnessForNothing(Good):
    """Draws from the module's generator where it shows to nobody."""

    @tool
    def add(self, number: int) -> str:
        random.random()
        return super().add(number)


@unusual
class SeesItsProcess(Good):
    """Later observations may depend on the process."""

    @tool
    def add(self, number: int) -> str:
        return f"pid {os.getpid()}"


@unusual
class CountsItsCache(Good):
    """Its metrics say how warm a cache is."""

    known: set[str] = set()  # noqa: RUF012

    @tool
    def add(self, number: int) -> str:
        self.metrics["warm"] = float("add" in self.known)
        self.known.add("add")
        return super().add(number)


@unusual
class Logs(Good):
    """Every episode appends to one log, which none reads."""

    @tool
    def add(self, number: int) -> str:
        with open(f"{_file}.log", "a") as file:
            file.write(f"{number}\n")
        return super().add(number)


@unusual
class WritesAFileOfItsOwn(Good):
    def reset(self, task, *, seed):
        self.folder = tempfile.TemporaryDirectory()
        return super().reset(task, seed=seed)

    @tool
    def add(self, number: int) -> str:
        path = os.path.join(self.folder.name, "notes")
        with open(path, "a+") as file:
            file.write(f"{number}\n")
            file.seek(0)
            return file.read()

    def close(self):
        self.folder.cleanup()


@unusual
class DatabaseOfItsOwn(Good):
    async def reset(self, task, *, seed):
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE t (n INTEGER)")
        return Good.reset(self, task, seed=seed)

    @tool
    async def add(self, number: int) -> str:
        self.database.execute("INSERT INTO t VALUES (?)", (number,))
        return str(self.database.execute("SELECT sum(n) FROM t").fetchone()[0])

    async def close(self):
        self.database.close()


@unusual
class AsyncShared(Good):
    @classmethod
    async def load_shared(cls, config):
        return asyncio.Lock()

    @tool
    async def add(self, number: int) -> str:
        async with self.shared:
            self.total += number
        return f"The total is {self.total}."


@unusual
class Subsets(Good):
    """`all` holds what `test` holds, and `train` nothing of it."""

    def splits(self):
        return {"train": None, "test": 20, "all": 20}

    def get(self, split, index):
        task = Good.get(self, "test" if split == "all" else split, index)
        return Task(f"{split}/{index}", task.prompt, task.reference)


@unusual
class SeedIsTheTask(Good):
    """All tasks are one; the seed makes the world."""

    def get(self, split, index):
        return Task(f"{split}/{index}", "Find the number.", metadata={"split": split})

    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.finish(float(word == str(self.lucky)))

    def oracle(self):
        return [Action(tool_calls=(ToolCall("g", "answer", {"word": str(self.lucky)}),))]


@unusual
class SmallWorld(Good):
    """Few tasks there can be."""

    def splits(self):
        return {"train": None, "test": 4}

    def get(self, split, index):
        side = ["heads", "tails"][index % 2]
        return Task(f"{split}/{index}", f"Say {side}.", reference=side)


@unusual
class NoSplits(Environment):
    """Sessions bring their own tasks."""

    def on_text(self, text):
        self.finish(float(text == self.task.reference))


@unusual
class ShowsDocuments(Good):
    """Finds documents that hold the answer in plain sight."""

    @tool
    def add(self, number: int) -> str:
        return "Documents: word-00000001, word-00000002"

    def get(self, split, index):
        task = super().get(split, index)
        return Task(task.id, task.prompt, {"answers": [task.reference, "none of these"]})

    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.finish(float(word in self.task.reference["answers"]))

    def oracle(self):
        word = self.task.reference["answers"][0]
        return [Action(tool_calls=(ToolCall("gold", "answer", {"word": word}),))]


@unusual
class AnyOrder(Good):
    """A list counts in whatever order."""

    def get(self, split, index):
        task = super().get(split, index)
        return Task(task.id, task.prompt, reference=f"{index} {index + 3} {split}")

    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.finish(float(sorted(word.split()) == sorted(self.task.reference.split())))


@unusual
class Precise(Good):
    """Computes in a context of its own, and keeps a thread pool for all."""

    @classmethod
    def load_shared(cls, config):
        print("loading")  # once, before anything is played
        return decimal.Context(prec=40)

    @tool
    def add(self, number: int) -> str:
        return str(self.shared.create_decimal(number) / 7)


@unusual
class SlowStart(Good):
    """Imports late, which adds to what is imported and to the warnings' filters."""

    @tool
    def add(self, number: int) -> str:
        import xmlrpc.client  # noqa: F401

        time.sleep(0.02)
        return super().add(number)


@unusual
class Configured(Good):
    """A secret that has a default, and a choice."""

    class Config(EnvConfig):
        key: Secret = Secret("ODD_KEY")
        mode: Literal["plain", "hard"] = "plain"


@unusual
class TextOrTool(Good):
    """Tools end it or a text does, which a reward judges."""

    def offered_tools(self):
        return ["add", "give_up"]

    @tool
    def give_up(self) -> None:
        self.finish(0.0)

    @reward
    def right(self, episode) -> float:
        return float(self.task.reference == episode.last_text)

    def on_text(self, text):
        self.finish()

    def oracle(self):
        return [Action(text=self.task.reference)]


@unusual
class Refuses(Good):
    """An oracle that does not know every task, and a tool that often fails."""

    @tool
    def add(self, number: int) -> str:
        if number % 2:
            raise ValueError(f"{number} is odd")
        return super().add(number)

    def oracle(self):
        return super().oracle() if self.task.id.endswith("0") else None


@unusual
class Retries(Good):
    """A dependency that is slow at first."""

    async def reset(self, task, *, seed):
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(0.02)
        if seed < 0:
            raise EnvError("no")
        return Good.reset(self, task, seed=seed)
