"""Rows in the form of BFCL's package, from `agentrl data get` to the reward of a call."""

import asyncio
import json

import pytest

from agentrl.data.command import get
from agentrl.data.hub import DATA_SETS
from agentrl.env import make
from agentrl.env.episode import start_episode, take_turn
from agentrl.errors import ConfigError, DataError
from agentrl.types import Action, ToolCall
from agentrl_adapters.bfcl_env import BfclConfig, BfclEnvironment

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


def test_tools_are_described_as_the_leaderboard_does(source):
    environment = BfclEnvironment({"source": str(source)})
    asyncio.run(start_episode(environment, environment.get("simple_python", 0), seed=0))
    (tool,) = environment.offered_tools()
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


def test_its_own_answers_are_right(source):
    async def solve(split):
        environment = BfclEnvironment({"source": str(source)})
        await start_episode(environment, environment.get(split, 0), seed=0)
        (action,) = environment.oracle()
        assert bool(action.tool_calls) != split.endswith("irrelevance")
        return (await take_turn(environment, action)).reward

    assert [asyncio.run(solve(split)) for split in CATEGORIES] == [1.0] * len(CATEGORIES)


def test_the_reference_is_reported_where_it_is_asked_for(source):
    result = play(source, "parallel", report_reference=True)
    assert result.info["reference"] == {"ground_truth": WANTED}
    assert result.info["metadata"] == {"category": "parallel", "function": [FUNCTION]}


def test_what_cannot_be_judged_is_refused_in_words(package, source, tmp_path):
    said = "judged by parsers of these languages"
    with pytest.raises(ConfigError, match=f"bfcl has no split simple_java; .*{said}"):
        get("bfcl", tmp_path / "out", splits=["simple_java"], mirror=package)
    with pytest.raises(DataError, match=r"cannot be read as rows of BFCL: FileNotFoundError"):
        get("bfcl", tmp_path / "out", mirror=tmp_path)
    good = json.loads((source / "simple_python.jsonl").read_text())
    odd_type = FUNCTION | {"parameters": {"type": "dict", "properties": {"a": {"type": "String"}}}}
    for change, message in [
        ({"id": "simple_javascript_3"}, said),
        ({"function": [odd_type]}, "not a single-turn row of BFCL: KeyError.'String'"),
        ({"question": good["question"] * 2}, "not a single-turn row of BFCL"),
        ({"ground_truth": [["cd(folder='x')"]]}, "not a single-turn row of BFCL"),
    ]:
        file = tmp_path / "one.jsonl"
        file.write_text(json.dumps(good | change))
        with pytest.raises(DataError, match=f"one.jsonl, line 1: .*{message}"):
            BfclEnvironment.load_shared(BfclConfig(source=str(file)))
    file.write_text(json.dumps(row("multiple")))
    with pytest.raises(DataError, match="missing column ground_truth; `agentrl data get bfcl`"):
        BfclEnvironment.load_shared(BfclConfig(source=str(file)))


def test_without_the_package_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps bfcl-eval; or unpack"):
        get("bfcl", tmp_path / "out")
