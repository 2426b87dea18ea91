"""Rows in the form of BFCL's package, from `agentrl data get` to the reward of a call."""

import json

import pytest

from agentrl.data import get
from agentrl.env import make
from agentrl.env.hub import DATA_SETS
from agentrl.errors import ConfigError, DataError, EnvError
from agentrl.types import Action, ToolCall
from agentrl_adapters.bfcl_env import BfclEnvironment

FUNCTION = {
    "name": "geo.area",
    "description": "Area.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "float", "description": "Of it."},
            "sides": {"type": "tuple", "items": {"type": "float"}},
            "how": {"type": "dict", "properties": {"unit": {"type": "any"}}},
        },
        "required": ["base"],
    },
}
WANTED = [{"geo.area": {"base": [10, 10.0], "how": [{"unit": ["m", "metre"]}, ""], "sides": [""]}}]
CATEGORIES = tuple(DATA_SETS["bfcl"].splits)


def row(category):
    question = [[{"role": "user", "content": f"What of {category}?"}]]
    return {"id": f"{category}_0", "question": question, "function": [FUNCTION]}


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "data"
    (folder / "possible_answer").mkdir(parents=True)
    for category in CATEGORIES:
        name = f"BFCL_v4_{category}.json"
        (folder / name).write_text(json.dumps(row(category)) + "\n")
        if not category.endswith("relevance"):
            answer = {"id": f"{category}_0", "ground_truth": WANTED}
            (folder / "possible_answer" / name).write_text(json.dumps(answer) + "\n")
    return folder


@pytest.fixture
def source(package, tmp_path):
    get("bfcl", tmp_path / "rows", mirror=package)
    return tmp_path / "rows"


def play(source, split, *calls, **config):
    env = make(BfclEnvironment, source=str(source), **config).sync
    try:
        asked = env.reset(split, 0)
        assert asked == [{"role": "user", "content": f"What of {split}?"}]
        named = (ToolCall(str(index), *call) for index, call in enumerate(calls))
        return env.step(Action(tool_calls=tuple(named)))
    finally:
        env.close()


def test_what_is_written_is_played_and_its_own_answers_are_right(source):
    environment = BfclEnvironment({"source": str(source)})
    assert environment.splits() == dict.fromkeys(sorted(CATEGORIES), 1)
    right = ("geo_area", {"base": 10, "how": {"unit": "M"}})
    for split in CATEGORIES:
        none, some = (play(source, split, *calls).reward for calls in ([], [right]))
        assert (none, some) == ((1.0, 0.0) if split.endswith("irrelevance") else (0.0, 1.0))
    result = play(source, "multiple", ("geo_area", {"base": 11}))
    assert (result.reward, result.terminated) == (0.0, True)
    assert result.info == {"wrong": "geo.area: base is 11"}
    assert play(source, "live_relevance", ("geo_area", {"base": 11})).reward == 1.0


def test_the_conformance_check_finds_the_oracle_right(source):
    async def oracle(split):
        env = make(BfclEnvironment, source=str(source))
        ...


def test_tools_are_described_as_the_leaderboard_does(source):
    env = make(BfclEnvironment, source=str(source)).sync
    env.reset("simple_python", 0)
    (tool,) = env.tools
    env.close()
    assert tool["function"] == {
        "name": "geo_area",
        "description": "Area. Note that the provided function is in Python 3 syntax.",
        "parameters": {
            "type": "object",
            "properties": {
                "base": {
                    "type": "number",
                    "format": "float",
                    "description": "Of it. This is a float type value.",
                },
                "sides": {"type": "array", "items": {"type": "number"}},
                "how": {"type": "object", "properties": {"unit": {"type": "string"}}},
            },
            "required": ["base"],
        },
    }
