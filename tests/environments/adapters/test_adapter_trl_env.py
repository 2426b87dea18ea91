"""A class for TRL's `environment_factory` is played alike by TRL's trainer and by agentrl."""

import json

import pytest

pytest.importorskip("trl", reason="needs trl: see `make test-adapters`")

import trl
from datasets import Dataset
from test_adapter_trl import Scripted, call, make_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.env.registry import resolve
from agentrl.errors import ConfigError
from agentrl.types import Action, ToolCall

SOURCE = '''
class Counter:
    """Written for TRL: its examples' shape."""

    def reset(self, target, **row):
        self.target, self.value, self.calls = target, row.get("start", 0), 0
        return f" Reach {target} from {self.value}."

    def increment(self, step: int) -> int:
        """
        Adds to the counter.

        Args:
            step: How much to add.

        Returns:
            The new value.
        """
        self.calls += 1
        self.value += step
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.target) - 0.1 * self.calls
'''
ROWS = [
    {"prompt": [{"role": "user", "content": "Count."}], "target": 3, "start": 1},
    {"prompt": [{"role": "user", "content": "Count."}], "target": 5, "start": 1},
]


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "counter.py"
    path.write_text(SOURCE)
    return f"{path}:Counter"


class Twice(Scripted):
    """Adds 2 once, then answers."""

    def reply(self, number, text):
        if "<tool_response>" not in text:
            return call("increment", step=2)
        return "done<|im_end|>"


def by_trl(target, tmp_path):
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    from agentrl.user_modules import load

    trainer = Twice(
        model=Qwen3ForCausalLM(config),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_steps=1,
            max_completion_length=256, report_to="none", save_strategy="no", logging_steps=1,
            use_cpu=True, bf16=False, gradient_checkpointing=False, shuffle_dataset=False,
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(ROWS),
        environment_factory=load(target),
    )  # fmt: skip
    trainer.seen = []
    trainer.train()
    return trainer.seen, list(trainer._logs["rewards"]["Counter"])


def test_trl_and_agentrl_play_it_alike(opened, target, tmp_path):
    seen, rewards = by_trl(target, tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    mine = []
    for index in range(2):
        env = opened(f"trl:{target}", tasks=str(rows))
        (prompt,) = env.reset("train", index)
        assert any(prompt["content"] in text for text in seen)
        result = env.step(Action(tool_calls=(ToolCall("1", "increment", {"step": 2}),)))
        assert result.observation[0]["content"] == "3"
        mine += [env.step("done").reward] * 2
    assert mine == pytest.approx(rewards) and mine[0] != mine[2]


def test_the_tools_are_those_that_trl_shows(opened, target, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[0]) + "\n")
    environment = resolve(f"trl:{target}")
    (tool,) = environment(environment.Config(tasks=str(rows))).offered_tools()
    assert tool["function"]["name"] == "increment"
    assert tool["function"]["parameters"]["required"] == ["step"]
    env = opened(f"trl:{target}", tasks=str(rows))
    env.reset("train", 0)
    wrong = env.step(Action(tool_calls=(ToolCall("1", "increment", {"step": "two"}),)))
    assert wrong.metrics["tool_errors"] == 1 and not wrong.terminated


def test_a_class_without_reset_is_refused(tmp_path):
    (tmp_path / "none.py").write_text("class Nothing:\n    pass\n")
    environment = resolve(f"trl:{tmp_path}/none.py:Nothing")
    with pytest.raises(ConfigError, match="reset"):
        environment.load_shared(environment.Config())
