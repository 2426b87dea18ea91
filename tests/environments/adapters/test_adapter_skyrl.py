"""SkyRL-gym's own environments, played as they are."""

import json

import pytest

pytest.importorskip("skyrl_gym", reason="needs skyrl-gym: see `make test-adapters`")

import skyrl_gym

from agentrl.env.registry import resolve
from agentrl.errors import ConfigError

PROMPT = [{"role": "user", "content": "What is 2 + 3? Answer after ####."}]
ROW = {
    "prompt": PROMPT,
    "data_source": "openai/gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "5"},
    "extra_info": {"max_turns": 3},
}


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    return str(path)


def test_one_turn(opened, rows):
    for answer, reward in (("so it is #### 5", 1.0), ("#### 4", 0.0), ("no idea", 0.0)):
        env = opened("skyrl:gsm8k", tasks=rows)
        assert env.reset("train", 0) == PROMPT
        result = env.step(answer)
        assert (result.reward, result.terminated, result.observation) == (reward, True, [])


def test_several_turns_as_the_class_itself_plays_them(opened, rows):
    answers = ["#### 4", "well", "#### 5"]
    bare = skyrl_gym.make("gsm8k_multi_turn", env_config=None, extras=ROW)
    bare.init(PROMPT)
    env = opened("skyrl:gsm8k_multi_turn", tasks=rows)
    env.reset("train", 0)
    for answer in answers:
        expected, result = bare.step(answer), env.step(answer)
        assert result.reward == expected["reward"] and result.terminated == expected["done"]
        assert result.observation == expected["observations"]
    assert result.metrics["steps"] == bare.get_metrics()["steps"]


def test_the_limit_of_turns_is_the_configuration_s_where_rows_have_none(opened, rows):
    env = opened("skyrl:gsm8k_multi_turn", tasks=rows, max_turns=1)
    env.reset("train", 0)
    assert env.step("#### 4").terminated


def test_a_class_of_ones_own_with_settings(opened, rows, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput\n"
        "class Own(BaseTextEnv):\n"
        "    def __init__(self, env_config, extras):\n"
        "        super().__init__()\n"
        "        self.word = env_config.word\n"
        "    def step(self, action):\n"
        "        right = float(self.word in action)\n"
        "        return BaseTextEnvStepOutput(\n"
        "            observations=[], reward=right, done=True, metadata={'seen': {1}})\n"
    )
    env = opened(f"skyrl:{path}:Own", tasks=rows, env_config={"word": "yes"})
    env.reset("train", 0)
    result = env.step("yes, it is")
    assert result.reward == 1.0 and result.info == {"seen": [1]}


def test_an_unknown_name_is_refused(rows):
    environment = resolve("skyrl:nothing")
    with pytest.raises(ConfigError, match="gsm8k"):
        environment.load_shared(environment.Config(tasks=rows))
