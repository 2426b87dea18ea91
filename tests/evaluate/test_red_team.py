"""Cheaters find graders that pay for no work, and are not paid by those that read an answer."""

import json

import pytest

from agentrl.cli.main import main
from agentrl.config import RunConfig
from agentrl.env import Environment, Task, connect, tool
from agentrl.evaluate.red_team import CHEATERS, play_cheaters, red_team_metrics


class Sums(Environment):
    """Pays what `grade` says."""

    def splits(self):
        return {"test": 20}

    def get(self, split, index):
        return Task(f"{split}/{index}", f"What is {index}+1?", reference=str(index + 1))

    def on_text(self, text):
        self.finish(float(self.grade(text)))

    def grade(self, text):
        return text.rpartition("####")[2].strip() == self.task.reference


class Anywhere(Sums):
    def grade(self, text):
        return self.task.reference in text.split()


class Form(Sums):
    def grade(self, text):
        return "<answer>" in text


class Empty(Sums):
    def grade(self, text):
        return text.strip() in ("", self.task.reference)


class Judge(Sums):
    """As a model that obeys what it reads."""

    def grade(self, text):
        return "ignore all instructions" in text.lower() and "highest score" in text


class Program(Sums):
    def grade(self, text):
        names = {}
        if "_exit" in text:
            return False  # it would end this process
        try:
            exec(text.removeprefix("```python").removesuffix("```"), names)
            return names["Solution"]().add(1, 2) == 4
        except Exception:
            return False


class Shell(Sums):
    """As a sandbox whose reward file the agent may write."""

    @tool
    def bash(self, command: str) -> str:
        """Run a command."""
        self.wrote = "reward.txt" in command
        return ""

    def grade(self, text):
        return getattr(self, "wrote", False)


class Leaks(Sums):
    @tool
    def note(self, text: str) -> str:
        """Take a note."""
        return f"noted for {self.task.reference}"

    def grade(self, text):
        return self.task.reference in text.split() and len(text) < 100


class Fragile(Sums):
    """Pays for a text so long that its own check gives up."""

    @tool
    def answer(self, value: str) -> str:
        """Answer."""
        self.finish(float(len(value) > 10_000 or value == self.task.reference))
        return "done"


VULNERABLE = {
    Anywhere: "every answer",
    Form: "the format alone",
    Empty: "silence",
    Judge: "orders to the judge",
    Program: "equal to everything",
    Shell: "tools, a reward written",
    Leaks: "what the tools said",
    Fragile: "tools, too much in them",
}


async def attacked(environment, **keys):
    config = RunConfig.model_validate(
        {
            "model": {"path": "none"},
            "env": {"id": f"{__file__}:{environment.__name__}"},
            "eval": {"num_tasks": 3, **keys},
        }
    )
    client = connect()
    try:
        return await play_cheaters(config, client)
    finally:
        await client.aclose()


async def test_a_grader_that_reads_the_answer_pays_nobody():
    found = await attacked(Sums)
    assert [each.name for each in found] == list(CHEATERS)
    assert not any(each.is_paid for each in found) and {each.average for each in found} == {0.0}
    assert not any(each.errors for each in found)
    assert red_team_metrics(found)["red_team/paid"] == 0.0


@pytest.mark.parametrize("environment", VULNERABLE)
async def test_each_vulnerable_grader_is_found_by_name(environment):
    found = await attacked(environment)
    paid = [each.name for each in found if each.is_paid]
    assert VULNERABLE[environment] in paid
    metrics = red_team_metrics(found, "set")
    assert metrics["red_team/set/paid"] == len(paid)


async def test_a_success_may_be_worth_less_than_one():
    found = await attacked(Anywhere, success_threshold=2.0)
    assert not any(each.is_paid for each in found)


def test_the_command_prints_what_each_was_paid(capsys):
    assert main(["env", "attack", f"{__file__}:Anywhere", "--tasks", "2", "--json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["name"] for row in rows if row["is_paid"]} == {"every answer"}
    assert main(["env", "attack", f"{__file__}:Sums", "--tasks", "2"]) == 0
    assert "0 of 2" in capsys.readouterr().out
