"""Draws tool calls from JSON schemas, for environments that have no oracle."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.types import JSON, Action, ToolCall

TEXTS = ("42", "I do not know.", "Let me think about it.\n\n#### 7")
WORDS = ("1", "2", "abc", "hello")


def sample_calls(
    tools: Sequence[Mapping[str, Any]], rng: random.Random, count: int
) -> list[Action]:
    """Returns `count` actions, each a call of a random tool; plain texts if there are no tools."""
    if not tools:
        return [Action(text=rng.choice(TEXTS)) for _ in range(count)]
    actions = []
    for number in range(count):
        function = rng.choice(tools)["function"]
        schema = function["parameters"]
        arguments = sample_value(schema, rng, schema.get("$defs", {}))
        call = ToolCall(f"call-{number}", function["name"], arguments)  # type: ignore[arg-type]
        actions.append(Action(tool_calls=(call,)))
    return actions


def rare_calls(tools: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[Action]:
    """Returns calls of each tool with unusual values for each text and number argument in turn."""
    actions = []
    numbers: list[JSON] = [0, -1, 10**18, 1e300, -0.5]
    for tool in tools:
        function = tool["function"]
        schema = function["parameters"]
        definitions = schema.get("$defs", {})
        usual = sample_value(schema, random.Random(0), definitions)
        for name, each in schema.get("properties", {}).items():
            kind = each.get("type")
            rare = list(texts) if kind == "string" else numbers if kind in _NUMBERS else []
            for number, value in enumerate(rare):
                arguments = {**usual, name: value}  # type: ignore[dict-item]
                call = ToolCall(f"call-{number}", function["name"], arguments)
                actions.append(Action(tool_calls=(call,)))
    return actions


_NUMBERS = ("integer", "number")


def sample_value(schema: Mapping[str, Any], rng: random.Random, definitions: Mapping) -> JSON:
    """Draws a value that fits the schema, as far as it uses the common keywords.

    Args:
        definitions: the schema's `$defs`.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return sample_value(definitions.get(name, {}), rng, definitions)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return sample_value(rng.choice(schema[key]), rng, definitions)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind in ("integer", "number"):
        return _sample_number(schema, rng, kind)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if kind == "array":
        count = max(schema.get("minItems", 0), min(2, schema.get("maxItems", 2)))
        return [sample_value(schema.get("items", {}), rng, definitions) for _ in range(count)]
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: sample_value(each, rng, definitions)
            for name, each in schema.get("properties", {}).items()
            if name in required or rng.random() < 0.5
        }
    text = rng.choice(WORDS).ljust(schema.get("minLength", 0), "x")
    return text[: schema.get("maxLength", len(text))]


def _sample_number(schema: Mapping[str, Any], rng: random.Random, kind: str) -> JSON:
    low = schema.get("minimum", schema.get("exclusiveMinimum", None))
    high = schema.get("maximum", schema.get("exclusiveMaximum", None))
    low = (0 if high is None else high - 10) if low is None else low
    high = low + 10 if high is None else high
    low, high = low + ("exclusiveMinimum" in schema), high - ("exclusiveMaximum" in schema)
    if kind == "number":
        return low + (high - low) * rng.random()
    step = int(schema.get("multipleOf", 1))
    return rng.randint(-(-int(low) // step), int(high) // step) * step
