"""Word problems for a small model: one step in the head, or two steps with a calculator."""

import random
import re
import zlib
from typing import Annotated

from pydantic import Field

from agentrl.env import Action, EnvConfig, Environment, Task, ToolCall, tool
from agentrl_math.calculator import calculate, show

NAMES = ("Ana", "Ben", "Chen", "Dina", "Emil", "Fay", "Gita", "Hugo", "Ines", "Jon")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
ONE_STEP = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have?", "{a}+{b}"),
    ("{name} has {c} {things} and gives away {b}. How many {things} are left?", "{c}-{b}"),
    ("{name} has {d} bags with {e} {things} each. How many {things} are there?", "{d}*{e}"),
    ("There are {a} {things} here and {b} there. How many {things} are there in all?", "{a}+{b}"),
    ("{name} needs {c} {things} and has {b}. How many {things} are missing?", "{c}-{b}"),
)
TWO_STEPS = (
    (
        "{name} has {a} boxes with {b} {things} each and gives away {d}. How many are left?",
        ("{a}*{b}", "{first}-{d}"),
    ),
    (
        "{name} has {c} {things}, sells {b} of them and then buys {d} more. How many are there?",
        ("{c}-{b}", "{first}+{d}"),
    ),
    (
        "{name} puts {a} red and {b} blue {things} into each of {e} bags. How many is that?",
        ("{a}+{b}", "{first}*{e}"),
    ),
)


class WordProblems(Environment):
    class Config(EnvConfig):
        tools: bool = False
        """Two steps with a calculator in place of one step without."""

    def splits(self):
        return {"train": None, "test": 200}

    def get(self, split, index):
        """A problem belongs to one split by its own checksum, so the two share none."""
        draw = random.Random(f"{split}/{index}")
        while True:
            prompt, steps = self.make_problem(draw)
            if (zlib.crc32(prompt.encode()) % 10 == 0) == (split == "test"):
                break
        answer = show(calculate(steps[-1]))
        return Task(f"{split}/{index}", prompt, reference=answer, metadata={"steps": steps})

    def make_problem(self, draw):
        """The text of a problem, and the expressions that solve it, one after the other."""
        most = 99 if self.config.tools else 30
        a, b = draw.randint(11, most), draw.randint(3, most)
        numbers = {"a": a, "b": b, "c": a + b, "d": draw.randint(2, 9), "e": draw.randint(3, 9)}
        words = numbers | {"name": draw.choice(NAMES), "things": draw.choice(THINGS)}
        if not self.config.tools:
            text, expression = draw.choice(ONE_STEP)
            return text.format(**words), [expression.format(**words)]
        text, (first, second) = draw.choice(TWO_STEPS)
        first = first.format(**words)
        return text.format(**words), [first, second.format(first=show(calculate(first)), **words)]

    def offered_tools(self):
        return ["calculator"] if self.config.tools else []

    @tool
    def calculator(self, expression: Annotated[str, Field(description="for example 12*7")]) -> str:
        """Calculate an expression."""
        return show(calculate(expression))

    def on_text(self, text):
        """A turn without a call is the answer: the last number that it names."""
        numbers = re.findall(r"-?\d+", text)
        self.finish(reward=float(bool(numbers) and numbers[-1] == self.task.reference))

    def oracle(self):
        if self.config.tools:
            for number, step in enumerate(self.task.metadata["steps"]):
                call = ToolCall(f"call-{number}", "calculator", {"expression": step})
                yield Action(tool_calls=(call,))
        yield Action(text=f"The answer is {self.task.reference}.")
