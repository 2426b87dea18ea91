"""For each check of the conformance kit something that is broken in just that way, and its twin
without the mistake."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
import zlib
from pathlib import Path

from agentrl.env import Action, Environment, Task, ToolCall, tool
from agentrl.errors import EnvError


class Good(Environment):
    """Add numbers, then say the task's word."""

    def splits(self):
        return {"train": None, "test": 20}

    def get(self, split, index):
        word = f"word-{zlib.crc32(f'{split}/{index}'.encode()):08x}"
        return Task(f"{split}/{index}", f"Find the word of task {index}.", reference=word)

    def reset(self, task, *, seed):
        self.total = 0
        self.lucky = self.rng.randint(1, 1_000_000)
        self.answered = False
        return f"{task.prompt} Your lucky number is {self.lucky}."

    @tool
    def add(self, number: int) -> str:
        """Add to the total."""
        self.total += number
        return f"The total is {self.total}, the lucky number {self.lucky}."

    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.answered = True
        self.finish(float(word == self.task.reference), info={"total": self.total})

    def oracle(self):
        return [Action(tool_calls=(ToolCall("gold", "answer", {"word": self.task.reference}),))]


# Broken environments


class LastTaskMissing(Good):
    def get(self, split, index):
        return super().get(split, list(range(19))[index] if split == "test" else index)


class TaskOfTheMoment(Good):
    def get(self, split, index):
        task = super().get(split, index)
        return Task(task.id, task.prompt, task.reference, {"made_at": time.time()})


class ToolNameWithUmlaut(Good):
    @tool
    def prüfe(self, text: str) -> str:
        return text


class TupleInMessage(Good):
    def reset(self, task, *, seed):
        text = super().reset(task, seed=seed)
        return [{"role": "user", "content": text, "span": (0, len(text))}]


class NumberAsInfoKey(Good):
    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.finish(float(word == self.task.reference), info={"attempts": {1: word}})


class ToolLosesItsBackend(Good):
    @tool
    def add(self, number: int) -> str:
        raise EnvError("the calculator's server is gone")


class ExpectsToolCalls(Good):
    async def step(self, action):
        if action.parse_error is None and action.tool_calls[0].name == "add":
            return await self.run_tools(action)
        return await self.run_tools(action)


class MeanOfNothing(Good):
    def on_text(self, text):
        self.metrics["mean"] = float("nan")
        return "Call a tool."


class PathInInfo(Good):
    def on_text(self, text):
        self.finish(0.0, info={"log": Path("episode.log")})


class GlobalRandomness(Good):
    def reset(self, task, *, seed):
        super().reset(task, seed=seed)
        self.lucky = random.randint(1, 1_000_000)
        return f"{task.prompt} Your lucky number is {self.lucky}."


class StateOnTheClass(Good):
    current = ""

    def reset(self, task, *, seed):
        StateOnTheClass.current = task.id
        return super().reset(task, seed=seed)

    @tool
    def add(self, number: int) -> str:
        return f"{number} is noted for {StateOnTheClass.current}."


class SleepsOnTheLoop(Good):
    @tool
    async def add(self, number: int) -> str:
        time.sleep(0.09)
        return "That took a while."


class CloseNeedsAStep(Good):
    def reset(self, task, *, seed):
        self.connection = None
        return super().reset(task, seed=seed)

    @tool
    def add(self, number: int) -> str:
        self.connection = "open"
        return super().add(number)

    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.connection = "open"
        super().answer(word)

    def close(self):
        assert self.connection is not None


class TellsTheAnswer(Good):
    def on_text(self, text):
        return f"No, it is {self.task.reference}."


class TellsTheAnswerInAnError(Good):
    @tool
    def add(self, number: int) -> list[str]:
        return [f"expected {self.task.reference}", str(number)]


class GoldIsWrong(Good):
    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.finish(float(word.upper() == self.task.reference))


class SilenceIsGolden(Good):
    def on_text(self, text):
        self.finish(1.0)


class EmptyRow(Good):
    def get(self, split, index):
        return Task(f"{split}/{index}", {}[index]) if index == 7 else super().get(split, index)


class OneIdForTwo(Good):
    def get(self, split, index):
        task = super().get(split, index)
        return Task(f"{split}/{index // 2}", task.prompt, task.reference)


class CloseHangs(Good):
    def close(self):
        threading.Event().wait(60)


class ToolNeverWorks(Good):
    @tool
    def add(self, number: int) -> str:
        return self.table[number]  # which nobody made


class BackendIsDown(Good):
    @tool
    def add(self, number: int) -> str:
        raise ConnectionError("no route to the calculator")


class RewardIsText(Good):
    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.answered = True
        self.finish("1.0")


class InfiniteForNothing(Good):
    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.answered = True
        right = word == self.task.reference
        self.finish(float(right) if word else float("inf"))


class CountsOnTheClass(Good):
    count = 0

    @tool
    def add(self, number: int) -> str:
        CountsOnTheClass.count += 1
        return f"Call {CountsOnTheClass.count}."


class AnyWordIsRight(Good):
    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.answered = True
        self.finish(float(bool(word)))


class ChangesDirectory(Good):
    def reset(self, task, *, seed):
        os.chdir("/")
        return super().reset(task, seed=seed)


class SetsAVariable(Good):
    def reset(self, task, *, seed):
        os.environ["EPISODE_SEED"] = str(time.monotonic())
        return super().reset(task, seed=seed)


# Code that a check cannot stop from inside its process


class EndsTheProcess(Good):
    @tool
    def add(self, number: int) -> str:
        os._exit(3)


class SwallowsCancellation(Good):
    @tool
    async def add(self, number: int) -> str:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


class BlocksForEver(Good):
    @tool
    async def add(self, number: int) -> str:
        while True:
            time.sleep(1)


# Not broken, though it may look so


class LooksUpTheReference(Good):
    """Its table knows the references of its own tasks and no others."""

    @tool
    def add(self, number: int) -> str:
        known = {super(LooksUpTheReference, self).get("train", i).reference for i in range(50)}
        known |= {super(LooksUpTheReference, self).get("test", i).reference for i in range(20)}
        if self.task.reference not in known:
            raise KeyError(self.task.reference)
        return super().add(number)


class ForgetsToFinish(Environment):
    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(f"{split}/{index}", f"Say {index}.", reference=str(index))

    def on_text(self, text):
        self.right = text == self.task.reference
        return "Thanks."


BROKEN: dict[str, list[type[Environment]]] = {
    "tasks": [LastTaskMissing, TaskOfTheMoment, EmptyRow, OneIdForTwo],
    "tools": [ToolNameWithUmlaut],
    "close": [CloseNeedsAStep, CloseHangs],
    "schema": [TupleInMessage, NumberAsInfoKey],
    "episodes": [ToolLosesItsBackend, RewardIsText],
    "tool_calls": [ToolNeverWorks, BackendIsDown],
    "bad_actions": [ExpectsToolCalls, MeanOfNothing, InfiniteForNothing, PathInInfo],
    "ends": [ForgetsToFinish],
    "determinism": [GlobalRandomness],
    "isolation": [StateOnTheClass, CountsOnTheClass],
    "event_loop": [SleepsOnTheLoop],
    "globals": [ChangesDirectory, SetsAVariable],
    "canary": [TellsTheAnswer, TellsTheAnswerInAnError],
    "oracle": [GoldIsWrong, SilenceIsGolden, AnyWordIsRight],
}
