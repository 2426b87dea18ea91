"""`agentrl env demonstrate`: an environment's solutions as dialogues that sft reads."""

import json
from pathlib import Path

from agentrl.cli.main import main

WORDS = f"{Path(__file__).parents[2] / 'examples' / 'smollm2' / 'words.py'}:WordProblems"
WRONG = """
from agentrl.env import Action, Environment, Task

class Silent(Environment):
    def splits(self):
        return {"train": 3}

    def get(self, split, index):
        return Task(f"{split}/{index}", "say yes", reference="yes")

    def on_text(self, text):
        self.finish(reward=float(text == self.task.reference))

class Wrong(Silent):
    def oracle(self):
        return [Action(text="no")]
"""


def test_a_dialogue_holds_the_calls_their_answers_and_the_tools(tmp_path, capsys):
    out = tmp_path / "demos.jsonl"
    command = ["env", "demonstrate", WORDS, "--out", str(out), "--config", "tools=true"]
    assert main([*command, "--tasks", "4"]) == 0
    assert "4 dialogues" in capsys.readouterr().out
    dialogues = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(dialogues) == 4
    for dialogue in dialogues:
        roles = [message["role"] for message in dialogue["messages"]]
        assert roles == ["user", *["assistant", "tool"] * 2, "assistant"]
        assert [tool["function"]["name"] for tool in dialogue["tools"]] == ["calculator"]
        last_call, answer = dialogue["messages"][-2:]
        assert answer["content"] == f"The answer is {last_call['content']}."


def test_what_cannot_be_demonstrated_is_said(tmp_path, capsys):
    module = tmp_path / "silent.py"
    module.write_text(WRONG)
    out = ["--out", str(tmp_path / "demos.jsonl")]
    assert main(["env", "demonstrate", f"{module}:Silent", *out]) != 0
    assert "define oracle(self)" in capsys.readouterr().err
    assert main(["env", "demonstrate", f"{module}:Wrong", *out]) != 0
    assert "the actions of oracle() earn 0, not 1" in capsys.readouterr().err
    assert main(["env", "demonstrate", WORDS, "--split", "dev", *out]) != 0
    assert "it has train, test" in capsys.readouterr().err
