"""Formats tasks, actions and differences for the reports of checks."""

from __future__ import annotations

import json

from agentrl.env.check.subject import Event
from agentrl.env.protocol import TaskSpec
from agentrl.types import Action


def short(value: object, limit: int = 160) -> str:
    """Returns a value as text of at most `limit` characters, plus an ellipsis if it was cut."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def place(spec: TaskSpec) -> str:
    """Returns the name of a task in reports."""
    return f"task {spec.split}/{spec.index}"


def describe(action: Action) -> str:
    """Returns a short description of an action."""
    if action.parse_error:
        return "an unreadable tool call"
    if action.tool_calls:
        call = action.tool_calls[0]
        return "a call of " + short(f"{call.name or '(no name)'}({call.arguments})")
    return f"the text {short(ascii(action.text), 40)}"


def said(action: Action) -> str:
    """Returns the text and the tool arguments of an action as one text."""
    return action.text + json.dumps([call.arguments for call in action.tool_calls])


def difference(before: list[Event], now: list[Event]) -> str:
    """Describes the first difference between two episodes."""
    for number, (one, other) in enumerate(zip(before, now, strict=False)):
        for key in one:
            if one[key] != other.get(key):
                return f"{key} of reply {number} was {short(one[key], 80)} and then " + short(
                    other.get(key, other), 80
                )
    return f"{len(before)} replies and then {len(now)}"


def which_check(event: Event) -> str:
    """Returns the name of the check that reports an error, so that no other check does."""
    detail = event["detail"]
    if any(words in detail for words in ("finite", "JSON cannot carry", "must be a number")):
        return "finite"
    return "info" if "not JSON serializable" in detail else "episodes"
