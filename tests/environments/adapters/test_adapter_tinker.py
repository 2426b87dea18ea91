"""tinker-cookbook's own environments, played as they are."""

import asyncio
import json

import pytest

pytest.importorskip("tinker_cookbook", reason="needs tinker-cookbook: see `make test-adapters`")

from tinker_cookbook.eval.benchmarks.gsm8k import GSM8KMessageEnv

from agentrl.env.registry import resolve
from agentrl.errors import ConfigError

GSM8K = "tinker:tinker_cookbook.eval.benchmarks.gsm8k:GSM8KMessageEnv"
ARITHMETIC = "tinker:tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticEnv"
SEVERAL = """
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult

class Echo(MessageEnv):
    def __init__(self, word):
        self.word, self.said = word, [{"role": "user", "content": f"Say {word} twice."}]
    async def initial_observation(self):
        return list(self.said)
    async def step(self, message):
        self.said.append(message)
        done = len(self.said) > 3
        if not done:
            self.said.append({"role": "user", "content": "Again."})
        right = float(self.word in message["content"])
        return MessageStepResult(right / 2, done, [] if done else list(self.said), {"right": right})
"""


def rows(tmp_path, **row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return str(path)


@pytest.mark.parametrize("answer", ["so \\boxed{12}", "\\boxed{11}", "no idea"])
def test_a_message_env_rewards_as_it_does_itself(opened, tmp_path, answer):
    row = {"question": "What is 7 + 5?", "expected": "12", "system_prompt": "Box the answer."}
    bare = GSM8KMessageEnv(**row)
    env = opened(GSM8K, tasks=rows(tmp_path, **row))
    assert env.reset("train", 0) == asyncio.run(bare.initial_observation())
    expected = asyncio.run(bare.step({"role": "assistant", "content": answer}))
    result = env.step(answer)
    assert result.terminated and result.reward == expected.reward
    assert result.metrics["correct"] == expected.metrics["correct"]


def test_several_turns_show_what_is_new(opened, tmp_path):
    (tmp_path / "echo.py").write_text(SEVERAL)
    env = opened(f"tinker:{tmp_path}/echo.py:Echo", tasks=rows(tmp_path, word="yes"))
    assert env.reset("train", 0)[0]["content"] == "Say yes twice."
    first = env.step("yes")
    assert first.observation == [{"role": "user", "content": "Again."}]
    second = env.step("no")
    assert (first.reward, second.reward, second.terminated) == (0.5, 0.0, True)


def test_a_problem_env(opened, tmp_path):
    for answer, reward in (("It is 9.", 1.0), ("It is 8.", 0.0)):
        env = opened(ARITHMETIC, tasks=rows(tmp_path, x=4, y=5))
        assert env.reset("train", 0) == [{"role": "user", "content": "What is 4 + 5?"}]
        assert env.step(answer).reward == reward


def test_an_env_of_tokens_is_refused():
    environment = resolve("tinker:tinker_cookbook.rl.message_env:EnvFromMessageEnv")
    with pytest.raises(ConfigError, match="MessageEnv"):
        environment.load_shared(environment.Config())
