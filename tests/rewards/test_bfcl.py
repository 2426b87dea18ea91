"""Calls judged as the Berkeley Function Calling Leaderboard judges them, on rows made by hand."""

import pytest

from agentrl.errors import GraderError
from agentrl_rewards.bfcl import why_wrong
from agentrl_rewards.runner import RewardInput, RewardRunner

TYPES = {
    "count": {"type": "integer"},
    "rate": {"type": "float"},
    "place": {"type": "string"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "sizes": {"type": "tuple", "items": {"type": "float"}},
    "range": {"type": "dict", "properties": {"low": {"type": "integer"}}},
    "stops": {"type": "array", "items": {"type": "dict"}},
    "key": {"type": "any"},
}
FUNCTIONS = [
    {"name": "map.find", "parameters": {"type": "dict", "properties": TYPES, "required": []}},
    {"name": "rest", "parameters": {"type": "dict", "properties": {}, "required": []}},
]


def wrong(wanted, *calls):
    return why_wrong(calls, {"function": FUNCTIONS, "ground_truth": wanted})


@pytest.mark.parametrize(
    ("name", "accepted", "right", "not_right"),
    [
        ("count", [3, 4], [3, 4], [5, 3.0, "3", True, None, [3]]),
        ("rate", [3.0, 0.5], [3, 3.0, 0.5], ["3.0", 2, 10**400]),
        ("place", ["San Jose, CA"], ["san jose CA", "San-Jose,CA", "SanJoseCA"], ["San Jose", 3]),
        ("place", ["it's"], ['It"s'], ["its"]),
        ("exact", [True], [True], [False, 1, "true"]),
        ("tags", [["a b", "c"]], [["AB", "C"]], [["c", "a b"], ["a b"], "a b", ["a b", 1], []]),
        ("sizes", [[1.0, 2.0]], [[1.0, 2.0]], [[2.0, 1.0], [1, 2], ["1.0", "2.0"]]),
        ("sizes", [[1, 2]], [[1, 2], [1.0, 2.0]], [[1, 3]]),
        # A listed value of another type: the name of a variable, or what `any` is given.
        ("tags", ["names"], ["names"], ["Names", "other", ["names"]]),
        ("key", [7, "x"], [7, "x"], ["X", "7", 8]),
        # Where the argument may be left out, types of items are not looked at, and True is 1.
        ("sizes", [[1]], [[1]], [[True]]),
        ("sizes", [[1], ""], [[1], [True]], [["1"]]),
        # "" is what an argument may be left out for, and an empty list is as good.
        ("tags", [["a"], ""], [["a"], []], [["b"], ""]),
        (
            "range",
            [{"low": [1, 2], "unit": ["Km", ""]}],
            [{"low": 1}, {"low": 2, "unit": "km"}],
            [{}, {"low": 3}, {"low": 1, "unit": "mile"}, {"low": 1, "high": 2}, [1]],
        ),
        (
            "stops",
            [[{"at": ["Oslo"]}, {"at": ["Bergen"]}]],
            [[{"at": "oslo"}, {"at": "bergen"}]],
            [[{"at": "bergen"}, {"at": "oslo"}], [{"at": "oslo"}], ["oslo", "bergen"]],
        ),
    ],
)
def test_values_and_types(name, accepted, right, not_right):
    wanted = [{"map.find": {name: accepted}}]
    assert [wrong(wanted, ("map_find", {name: value})) for value in right] == [""] * len(right)
    assert all(wrong(wanted, ("map_find", {name: value})) for value in not_right)


def test_arguments_and_names():
    wanted = [{"map.find": {"place": ["Oslo"], "count": [1, ""]}}]
    assert wrong(wanted, ("map_find", {"place": "Oslo"})) == ""
    assert "place is missing" in wrong(wanted, ("map_find", {"count": 1}))
    assert "rate is not wanted" in wrong(wanted, ("map_find", {"place": "Oslo", "rate": 1.0}))
    assert "map.find is called" in wrong(wanted, ("map.find", {"place": "Oslo"}))
    assert "rest is called" in wrong(wanted, ("rest", {}))
    must = FUNCTIONS[0]["parameters"] | {"required": ["count"]}
    row = {"function": [FUNCTIONS[0] | {"parameters": must}], "ground_truth": wanted}
    assert "count is missing" in why_wrong([("map_find", {"place": "Oslo"})], row)


def test_calls_in_any_order_and_no_more():
    wanted = [{"map.find": {"count": [1, 2]}}, {"map.find": {"count": [1]}}, {"rest": {}}]
    one, two, rest = ("map_find", {"count": 1}), ("map_find", {"count": 2}), ("rest", {})
    assert wrong(wanted, rest, two, one) == ""
    assert wrong(wanted, one, one, rest) == ""
    # As there, the first wanted call takes the first call that fits, though another would do.
    assert wrong(wanted, one, two, rest)
    assert wrong(wanted, two, two, rest)
    assert "2 calls instead of 3" in wrong(wanted, one, rest)
    assert "4 calls instead of 3" in wrong(wanted, rest, two, one, one)


def test_no_call_or_some_call():
    assert (wrong([]), wrong(None, ("rest", {}))) == ("", "")
    assert wrong([], ("rest", {})) and wrong(None)


async def test_a_run_file_names_it():
    said = {"role": "assistant", "content": "", "tool_calls": []}
    call = {"id": "0", "type": "function", "function": {"name": "rest", "arguments": {}}}
    for calls, score in [([call], 1.0), ([call] * 2, 0.0), ([], 0.0)]:
        answer = RewardInput(
            "",
            {"ground_truth": [{"rest": {}}]},
            metadata={"function": FUNCTIONS},
            turns=[[said | {"tool_calls": calls}]],
        )
        assert (await RewardRunner(["bfcl"]).score(answer)).reward == score


@pytest.mark.parametrize("row", [{}, {"function": FUNCTIONS, "ground_truth": [{"other": {}}]}, "x"])
def test_a_row_of_another_form_is_an_error(row):
    with pytest.raises(GraderError, match="leaderboard"):
        why_wrong([("rest", {})], row)
