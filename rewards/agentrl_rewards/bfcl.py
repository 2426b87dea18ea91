"""Tool calls: are they those that a row of the Berkeley Function Calling Leaderboard accepts?

    function = {"name": "geo.area", "parameters": {
        "type": "dict", "properties": {"base": {"type": "integer"}}, "required": ["base"]}}
    wanted = {"ground_truth": [{"geo.area": {"base": [10]}}]}
    bfcl("", wanted, metadata={"function": [function]}, turns=turns)

The rule is the leaderboard's own for calls of one turn with Python's types ("AST"). Every wanted
call needs a call of its own, in any order. Every argument is one of the listed values, of the type
that the function's description names; one whose values include "" may be left out. Texts are
compared without case and the characters ` ,./-_*^`. With no wanted calls, none may be made; `None`
in their place asks for some call. Names have `_` for `.`, as the agent was offered them. A call
that could not be read counts as none.
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
"""Names of types in the descriptions of functions -> the type that an argument must have."""

Call = tuple[str, Mapping[str, Any]]
"""Name and arguments."""


def bfcl(
    text: str,
    reference: dict[str, Any],
    *,
    metadata: dict[str, Any],
    turns: Sequence[list[Message]],
) -> float:
    """Returns 1.0 when the calls of the last turn are those of the row, else 0.0.

    Raises:
        GraderError: the row is not in the leaderboard's form.
    """
    said: Any = turns[-1][0].get("tool_calls", ()) if turns else ()
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in said]
    return float(not why_wrong(calls, metadata | reference))


def why_wrong(calls: Sequence[Call], row: Mapping[str, Any]) -> str:
    """Returns what is wrong with the calls, and "" where nothing is.

    Args:
        row: its `function`, descriptions, and its `ground_truth`, the wanted calls.

    Raises:
        GraderError: the row is not in the leaderboard's form.
    """
    try:
        return _why_wrong(
            calls, row["ground_truth"], {each["name"]: each for each in row["function"]}
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GraderError(
            f"function and ground_truth are not those of a row of the leaderboard: {error!r}"
        ) from error


def offered_name(name: str) -> str:
    """Returns a function's name as chat servers take it."""
    return name.replace(".", "_")


def _why_wrong(
    calls: Sequence[Call], wanted: Sequence[Mapping[str, Any]] | None, described: Mapping[str, Any]
) -> str:
    if wanted is None:
        return "" if calls else "no function is called"
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
        # The listed values need not have the described type: a text may name a variable.
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
    """Returns the type of the first listed value; None where the argument may only be left out."""
    return next((type(each) for each in accepted if each != ""), None)


def _items_fit(value: list[Any], accepted: Any, inner: type) -> bool:
    """Tells whether the items have a type that is described or listed; "" fits any list."""
    if not isinstance(accepted, list):
        return True
    return all(type(each) in (inner, _type_of(accepted)) for each in value)


def _same_object(value: Any, accepted: Any) -> bool:
    """Tells whether each key of an object has one of the values that are listed for it."""
    if not isinstance(value, dict) or not isinstance(accepted, dict):
        return False
    left_out = accepted.keys() - value.keys()
    return (
        value.keys() <= accepted.keys()
        and all("" in accepted[key] for key in left_out)
        and all(_plain(each) in map(_plain, accepted[key]) for key, each in value.items())
    )


def _plain(value: Any) -> Any:
    """Returns a text without case and the characters that do not count, and all else as it is."""
    if not isinstance(value, str):
        return value
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
