"""Compares tool calls with those that a row of the Berkeley Function Calling Leaderboard accepts.

    function = {"name": "geo.area", "parameters": {
        "type": "dict", "properties": {"base": {"type": "integer"}}, "required": ["base"]}}
    wanted = {"ground_truth": [{"geo.area": {"base": [10]}}]}
    bfcl("", wanted, metadata={"function": [function]}, turns=turns)

The rules are the leaderboard's own for single-turn calls with Python types ("AST"). Each wanted
call must be matched by a different call, in any order. Each argument must be one of the listed
values and have the type given in the function's description; an argument whose values include ""
may be left out. Strings are compared ignoring case and the characters ` ,./-_*^`. An empty
`ground_truth` means that no call may be made; `None` means that at least one must be. In the
agent's calls, function names have `_` in place of `.`. Calls that could not be parsed are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import GraderError
from agentrl.types import Message

TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
"""Type name in a function's description -> Python type that the argument must have."""

Call = tuple[str, Mapping[str, Any]]
"""Name and arguments."""


def bfcl(
    text: str,
    reference: dict[str, Any],
    *,
    metadata: dict[str, Any],
    turns: Sequence[list[Message]],
) -> float:
    """Returns 1.0 if the calls of the last turn match the row's wanted calls, else 0.0.

    Raises:
        GraderError: the row is not in the leaderboard's format.
    """
    said: Any = turns[-1][0].get("tool_calls", ()) if turns else ()
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in said]
    return float(not why_wrong(calls, metadata | reference))


def why_wrong(calls: Sequence[Call], row: Mapping[str, Any]) -> str:
    """Returns the first difference between the calls and the wanted ones, or "" if they match.

    Args:
        row: has `function`, a list of function descriptions, and `ground_truth`, the wanted calls.

    Raises:
        GraderError: the row is not in the leaderboard's format.
    """
    try:
        return _why_wrong(
            calls, row["ground_truth"], {each["name"]: each for each in row["function"]}
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GraderError(
            f"`function` or `ground_truth` is not in the leaderboard's format: {error!r}"
        ) from error


def offered_name(name: str) -> str:
    """Returns a function's name in the form that chat servers accept."""
    return name.replace(".", "_")


def _why_wrong(
    calls: Sequence[Call], wanted: Sequence[Mapping[str, Any]] | None, described: Mapping[str, Any]
) -> str:
    if wanted is None:
        return "" if calls else "no function was called"
    if len(calls) != len(wanted):
        return f"{len(calls)} calls instead of {len(wanted)}"
    left = list(calls)
    for each in wanted:
        ((name, accepted),) = each.items()
        reasons = [_mismatch(call, described[name], accepted) for call in left]
        if "" not in reasons:
            return f"{name}: {'; '.join(dict.fromkeys(reasons))}"
        left.pop(reasons.index(""))
    return ""


def _mismatch(call: Call, function: Mapping[str, Any], accepted: Mapping[str, list[Any]]) -> str:
    name, arguments = call
    parameters = function["parameters"]
    if name != offered_name(function["name"]):
        return f"{name} is called"
    needed = {*parameters.get("required", ())}
    needed |= {each for each, values in accepted.items() if "" not in values}
    if missing := needed - arguments.keys():
        return f"{', '.join(sorted(missing))} is missing"
    for each, value in arguments.items():
        if each not in parameters["properties"] or each not in accepted:
            return f"{each} is not wanted"
        if not _is_accepted(value, parameters["properties"][each], accepted[each]):
            return f"{each} is {value!r}"
    return ""


def _is_accepted(value: Any, described: Mapping[str, Any], accepted: list[Any]) -> bool:
    wanted = TYPES[described["type"]]
    inner = TYPES[described["items"]["type"]] if wanted is list else None
    known = _type_of(accepted)
    given: type = type(value)
    if wanted is float and given is int:
        given = float
    if given is not wanted:
        # The listed values need not have the described type: a string may name a variable.
        return given is known and value in accepted
    if inner and not any(_items_fit(value, each, inner) for each in accepted):
        return False
    if known not in (None, wanted):
        return value in accepted
    if wanted is dict:
        return any(_same_object(value, each) for each in accepted)
    if inner is dict:
        return any(
            len(value) == len(each) and all(map(_same_object, value, each)) for each in accepted
        )
    if wanted is list:
        return [_plain(each) for each in value] in [[*map(_plain, each)] for each in accepted]
    return _plain(value) in map(_plain, accepted)


def _type_of(accepted: list[Any]) -> type | None:
    """Returns the type of the first value other than ""; None if there is none."""
    return next((type(each) for each in accepted if each != ""), None)


def _items_fit(value: list[Any], accepted: Any, inner: type) -> bool:
    """Returns whether each item has the described type or that of the listed items.

    Any list fits an accepted value that is not a list, such as "".
    """
    if not isinstance(accepted, list):
        return True
    return all(type(each) in (inner, _type_of(accepted)) for each in value)


def _same_object(value: Any, accepted: Any) -> bool:
    """Returns whether each key of an object has one of the values that are listed for it."""
    if not isinstance(value, dict) or not isinstance(accepted, dict):
        return False
    left_out = accepted.keys() - value.keys()
    return (
        value.keys() <= accepted.keys()
        and all("" in accepted[key] for key in left_out)
        and all(_plain(each) in map(_plain, accepted[key]) for key, each in value.items())
    )


def _plain(value: Any) -> Any:
    """Lower-cases a string and drops the ignored characters; returns other values unchanged."""
    if not isinstance(value, str):
        return value
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
