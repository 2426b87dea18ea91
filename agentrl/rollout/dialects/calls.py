"""Readers of tool calls: the text between a dialect's delimiters -> the calls in it.

Every reader takes all of its text or refuses it: what stands between two calls is white space or a
reason to refuse. `Unreadable` says why in words that the policy can learn from.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from agentrl.types import JSON, ToolSpec


class Unreadable(Exception):
    """Why a call cannot be read."""


class Call(NamedTuple):
    name: str
    arguments: dict[str, JSON]
    id: str | None = None
    """As the policy wrote it; None in dialects whose calls carry none."""


_FIRST_OBJECT = json.JSONDecoder()
_LITERALS = {"true": True, "false": False, "null": None}


def json_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    """`{"name": ..., "arguments": {...}}`, or a list of them. `parameters` is another name for
    `arguments`, and an id is kept. Cohere says `tool_name` and `tool_call_id`."""
    value = _json(text)
    items = value if isinstance(value, list) else [value]
    if not items:
        raise Unreadable("an empty list of calls")
    return [_call_of_json(item) for item in items]


def keyed_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    """Apertus': a JSON list of `{name: {argument: value}}`."""
    items = _json(text)
    if not isinstance(items, list) or not items:
        raise Unreadable("not a JSON list of calls")
    calls = []
    for item in items:
        if not isinstance(item, dict) or len(item) != 1:
            raise Unreadable("a call is written {name: {argument: value}}")
        ((name, arguments),) = item.items()
        calls.append(Call(_name(name), _object(arguments, "the arguments are not an object")))
    return calls


def json_sequence(text: str, tools: list[ToolSpec]) -> list[Call]:
    """Llama's: objects as in `json_calls`, one behind the other with `;` or white space between."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    calls = []
    while text:
        try:
            _, end = _FIRST_OBJECT.raw_decode(text)
        except (ValueError, RecursionError):
            end = len(text)  # the reader below says what is wrong with it
        calls += json_calls(text[:end], tools)
        text = text[end:].lstrip("; \n\t")
    if not calls:
        raise Unreadable("no call behind <|python_tag|>")
    return calls


def framed_calls(text: str, tools: list[ToolSpec], *, pattern: re.Pattern[str]) -> list[Call]:
    """Name and JSON arguments in a frame of markers. The pattern's groups are `name`, `arguments`
    and, where the frame carries it, `id`."""
    return [
        Call(
            match["name"].strip(),
            _object(_json(match["arguments"]), "the arguments are not a JSON object"),
            match.groupdict().get("id"),
        )
        for match in _all(pattern, text)
    ]


def xml_calls(
    text: str,
    tools: list[ToolSpec],
    *,
    pattern: re.Pattern[str],
    parameter: re.Pattern[str],
    openers: tuple[str, ...],
    trim_newlines: bool = False,
) -> list[Call]:
    """Parameters as tags whose text carries no type: the tool's schema says which it is.

    A text that is not of the declared type stays a text, for the environment to answer. `pattern`
    has the groups `name` and `parameters`; `parameter` has `key` and `value`, and `string` where
    the tag itself says whether the value is one.

    Args:
        openers: what opens a call or a parameter. Inside a key or a value it says that the one
            before was never closed, and its value would be another's.
        trim_newlines: a value stands on lines of its own.
    """
    calls = []
    for match in _all(pattern, text):
        name, arguments = match["name"].strip(), {}
        properties = _properties(name, tools)
        for found in _all(parameter, match["parameters"], may_be_empty=True):
            key, value = found["key"].strip(), found["value"]
            if opened := next((each for each in openers if each in key or each in value), None):
                raise Unreadable(f"parameter {key[:60]!r} was not closed before {opened!r}")
            if key in arguments:
                raise Unreadable(f"parameter {key!r} is given twice")
            if trim_newlines:
                value = value.removeprefix("\n").removesuffix("\n")
            schema = properties.get(key)
            if (said := found.groupdict().get("string")) is not None:
                schema = {"type": "string"} if said == "true" else {}
            arguments[key] = _typed(value, schema if isinstance(schema, dict) else {})
        calls.append(Call(name, arguments))
    return calls


def pythonic_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    """Python calls with keyword arguments: `[a(x=1), b()]`, or one call a line. Values are
    literals, of Python or of JSON."""
    text = text.strip()
    text = text.removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # a policy's odd escapes are its own
            lines = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"not a Python call ({error})") from None
    values = [line.value if isinstance(line, ast.Expr) else None for line in lines]
    if len(values) == 1 and isinstance(values[0], ast.List):
        values = list(values[0].elts)
    if not values:
        raise Unreadable("no call")
    return [_call_of_python(value) for value in values]


def gemma_calls(text: str, tools: list[ToolSpec], *, quote: str = '<|"|>') -> list[Call]:
    """Gemma's `call:name{key:value}`: JSON with bare keys and a mark for quotes."""
    name, brace, body = text.strip().removeprefix("call:").partition("{")
    if not brace or not text.strip().startswith("call:"):
        raise Unreadable("a call is written call:name{key:value}")

    def quoted(match: re.Match[str]) -> str:
        return json.dumps(match[2] if match[1] is None else match[1])

    mark = re.escape(quote)
    pattern = rf"{mark}(.*?){mark}|([A-Za-z_][\w.-]*)(?=\s*:)"
    arguments = _json(brace + re.sub(pattern, quoted, body, flags=re.DOTALL))
    return [Call(_name(name.strip()), _object(arguments, "the arguments are not an object"))]


def _json(text: str) -> JSON:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Unreadable(f"not valid JSON ({error})") from None


def _call_of_json(value: JSON) -> Call:
    call = _object(value, "not a JSON object")
    arguments = call.get("arguments", call.get("parameters", {}))
    call_id = call.get("id", call.get("tool_call_id"))
    return Call(
        _name(call.get("name", call.get("tool_name"))),
        _object(arguments, '"arguments" is not a JSON object'),
        call_id if isinstance(call_id, str) else None,
    )


def _call_of_python(node: ast.expr | None) -> Call:
    if not isinstance(node, ast.Call):
        raise Unreadable("not a Python call")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Unreadable("arguments are given by name: tool(key=value)")
    return Call(ast.unparse(node.func), {str(k.arg): _literal(k.value) for k in node.keywords})


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _LITERALS:
            return _LITERALS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else _literal(key) for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise Unreadable("a key is not a string")
            return dict(zip(names, map(_literal, values), strict=True))
    try:
        value = ast.literal_eval(node)
    except (ValueError, RecursionError):
        raise Unreadable(f"{ast.unparse(node)} is not a literal value") from None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise Unreadable(f"{ast.unparse(node)} is no value of JSON")


def _all(
    pattern: re.Pattern[str], text: str, *, may_be_empty: bool = False
) -> Iterator[re.Match[str]]:
    """The matches that fill the text, with white space between them."""
    position, found = 0, False
    for match in pattern.finditer(text):
        _require_space(text[position : match.start()])
        found, position = True, match.end()
        yield match
    _require_space(text[position:])
    if not (found or may_be_empty):
        raise Unreadable("no call between the markers")


def _require_space(text: str) -> None:
    if text := text.strip():
        raise Unreadable(f"{text[:60]!r} is not part of a call")


def _name(value: JSON) -> str:
    if not isinstance(value, str) or not value:
        raise Unreadable('no "name"')
    return value


def _object(value: JSON, reason: str) -> dict[str, JSON]:
    if not isinstance(value, dict):
        raise Unreadable(reason)
    return value


def _properties(name: str, tools: list[ToolSpec]) -> dict[str, Any]:
    """JSON schemas of a tool's parameters, as far as it has any."""
    for tool in tools:
        match tool.get("function"):
            case {"name": str(known), "parameters": {"properties": dict(properties)}} if (
                known == name
            ):
                return properties
    return {}


def _typed(text: str, schema: dict[str, Any]) -> JSON:
    """The text as the schema's type. Without one: the JSON value that it spells, else the text."""
    types = _types(schema)
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    if isinstance(value, str) or (types and not any(_is_a(value, each) for each in types)):
        return text  # a string is written as it is, quotes and all
    return value


def _types(schema: dict[str, Any]) -> set[str]:
    declared = schema.get("type", [])
    types = {declared} if isinstance(declared, str) else set(declared)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(choice)
    return types


def _is_a(value: JSON, kind: str) -> bool:
    match kind:
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case "null":
            return value is None
    return isinstance(value, str)
