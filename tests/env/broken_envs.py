"""For each check of the conformance kit something that is broken in just that way, and its twin
without the mistake."""

from __future__ import annotations

import asyncio
import random
import subprocess
import threading
import time
import zlib
from pathlib import Path

import msgspec

from agentrl.env import Action, Environment, Task, ToolCall, tool
from agentrl.env.protocol import StepReply, encode
from agentrl.env.session.manager import SessionManager
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

    def snapshot(self):
        return {"total": self.total, "lucky": self.lucky}

    def restore(self, blob):
        self.total, self.lucky, self.answered = blob["total"], blob["lucky"], False


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


class ThreadOutlivesTheSession(Good):
    def reset(self, task, *, seed):
        self.stop = threading.Event()
        threading.Thread(target=self.stop.wait, args=(60,), name="watcher", daemon=True).start()
        return super().reset(task, seed=seed)

    def close(self):
        if self.answered:
            self.stop.set()


class ProcessOutlivesTheSession(Good):
    def reset(self, task, *, seed):
        self.process = subprocess.Popen(["sleep", "30"])
        return super().reset(task, seed=seed)

    def close(self):
        if self.answered:
            self.process.kill()
            self.process.wait()


class RemembersEveryEpisode(Good):
    history: list[str] = []  # noqa: RUF012

    @tool(terminal=True)
    def answer(self, word: str) -> None:
        self.history.append(word.ljust(10_000))
        super().answer(word)


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


class RestoresHalf(Good):
    def restore(self, blob):
        self.total, self.lucky, self.answered = 0, blob["lucky"], False


# Broken servers


class AcceptsThePast(SessionManager):
    """Answers a step of an index that is over, whatever its body, as if it had run."""

    async def step(self, session_id, request):
        if request.step < self.status(session_id).step:
            try:
                return await super().step(session_id, request)
            except EnvError:
                return encode(StepReply(request.step + 1, [], 0.0, False, False, {}, {}, {}))
        return await super().step(session_id, request)


class RunsRepeatedStepsAgain(SessionManager):
    """Takes a repeated request for a new step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._extra, self._last, self._turns = {}, {}, asyncio.Lock()

    async def step(self, session_id, request):
        async with self._turns:
            again = self._last.get(session_id) == request
            self._extra[session_id] = self._extra.get(session_id, 0) + again
            self._last[session_id] = request
            index = request.step + self._extra[session_id]
            return await super().step(session_id, msgspec.structs.replace(request, step=index))


class ForgetsTheSeedOfAReset(SessionManager):
    async def reset(self, session_id, request):
        return await super().reset(session_id, msgspec.structs.replace(request, seed=None))


class IgnoresDeadlines(SessionManager):
    async def step(self, session_id, request):
        return await super().step(session_id, msgspec.structs.replace(request, timeout_s=None))


BROKEN: dict[str, list[type]] = {
    "tasks": [LastTaskMissing, TaskOfTheMoment],
    "tools": [ToolNameWithUmlaut],
    "schema": [TupleInMessage, NumberAsInfoKey],
    "episodes": [ToolLosesItsBackend],
    "bad_actions": [ExpectsToolCalls],
    "finite": [MeanOfNothing],
    "info": [PathInInfo],
    "determinism": [GlobalRandomness],
    "isolation": [StateOnTheClass],
    "conflicts": [AcceptsThePast],
    "replay": [RunsRepeatedStepsAgain],
    "reset": [ForgetsTheSeedOfAReset],
    "deadline": [IgnoresDeadlines],
    "event_loop": [SleepsOnTheLoop],
    "lease": [CloseNeedsAStep],
    "leaks": [ThreadOutlivesTheSession, ProcessOutlivesTheSession],
    "memory": [RemembersEveryEpisode],
    "canary": [TellsTheAnswer, TellsTheAnswerInAnError],
    "oracle": [GoldIsWrong, SilenceIsGolden],
    "snapshot": [RestoresHalf],
}
