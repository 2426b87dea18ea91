"""Readers of tool calls: the text between a dialect's delimiters -> the calls in it.

Every reader reads all of its text or refuses it: anything but white space between two calls is a
reason to refuse. The message of `Unreadable` is written for the policy to learn from.
"""

from __future__ import annotations

import ast
import functools
import json
import logging
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from agentrl.runtime import parse_expression, parse_python
from agentrl.types import JSON, ToolSpec

logger = logging.getLogger(__name__)


class Unreadable(Exception):
    """Why a call cannot be read."""


class Call(NamedTuple):
    name: str
    arguments: dict[str, JSON]
    id: str | None = None
    """As the policy wrote it; None in dialects whose calls carry none."""


MAX_DEPTH = 100
"""The most elements inside each other."""
_FIRST_OBJECT = json.JSONDecoder()
_TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
    "any": object,
}
# Schemas made by hand have Python's names.
_TYPES |= {"int": int, "float": (int, float), "bool": bool, "dict": dict, "list": list}
"""Type of JSON Schema -> Python's; any other is that of a string."""
_EMPTY: dict[str, JSON] = {"array": [], "object": {}, "string": ""}
_LITERALS = {"true": True, "false": False, "null": None}


def json_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    """Reads `{"name": ..., "arguments": {...}}`, or a list of them. `parameters` is another name
    for `arguments`, and an id is kept. Cohere says `tool_name` and `tool_call_id`."""
    value = _json(text)
    items = value if isinstance(value, list) else [value]
    if not items:
        raise Unreadable("an empty list of calls")
    return [_call_of_json(item) for item in items]


def keyed_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    """Reads Apertus' calls: a JSON list of `{name: {argument: value}}`."""
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
    """Reads Llama's calls: objects as in `json_calls`, with `;` or white space between them."""
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
    """Reads a name and JSON arguments in a frame of markers. The pattern's groups are `name`,
    `arguments` and, where the frame carries it, `id`."""
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
    escaped: bool = False,
) -> list[Call]:
    """Reads parameters written as tags whose text has no type; the tool's schema gives it.

    A value that does not fit the declared type stays a text, which the environment rejects.
    `pattern` has the groups `name` and `parameters`; `parameter` has `key` and `value`, and
    `string` where the tag itself says whether the value is a string (`true`, or `string` as its
    type).

    Args:
        openers: what opens a call or a parameter. Inside a key or a value it says that the one
            before was never closed, and its value would be another's.
        trim_newlines: a value stands on lines of its own.
        escaped: `&` and `"` stand escaped in names and keys.
    """

    def named(text: str) -> str:
        return text.replace("&quot;", '"').replace("&amp;", "&") if escaped else text.strip()

    calls = []
    for match in _all(pattern, text):
        name, arguments = named(match["name"]), {}
        parameters = _parameters(name, tools)
        properties = _table(parameters.get("properties"))
        for found in _all(parameter, match["parameters"], may_be_empty=True):
            key, value = named(found["key"]), found["value"]
            if opened := next((each for each in openers if each in key or each in value), None):
                raise Unreadable(f"parameter {key[:60]!r} was not closed before {opened!r}")
            if key in arguments:
                raise Unreadable(f"parameter {key!r} is given twice")
            if trim_newlines and len(value) > 1 and value[0] == value[-1] == "\n":
                value = value[1:-1]
            schema = properties.get(key, True)
            if (said := found.groupdict().get("string")) is not None:
                schema = {"type": "string"} if said in ("true", "string") else True
            arguments[key] = _typed(value, schema, parameters)
        calls.append(Call(name, arguments))
    return calls


_Element = tuple[str, list[Any], str]
"""Name, children and text."""


def element_calls(
    text: str, tools: list[ToolSpec], *, pattern: re.Pattern[str], mark: str
) -> list[Call]:
    """Reads MiniMax M3's calls: each tag is behind a mark, a parameter is an element of its name,
    an object has elements inside, and a list has elements `item`. Texts take the schema's type."""
    calls = []
    for match in _all(pattern, text):
        parameters = {"type": "object", **_parameters(match["name"], tools)}
        arguments = _of_element(_element(match["parameters"], mark), parameters, parameters, 0)
        calls.append(Call(match["name"].strip(), _object(arguments, "no parameters")))
    return calls


def _element(text: str, mark: str) -> _Element:
    before, *pieces = text.split(mark)
    _require_space(before)
    open_ones: list[_Element] = [("", [], "")]
    for piece in pieces:
        tag = re.match(r"<(/?)([^<>/]+)>", piece)
        if not tag:
            raise Unreadable(f"{piece[:60]!r} is not a tag")
        behind = piece[tag.end() :]
        if not tag[1]:
            open_ones.append((tag[2], [], behind))
            continue
        name, children, said = open_ones.pop()
        if name != tag[2] or not open_ones:
            raise Unreadable(f"</{tag[2]}> closes nothing")
        _require_space(behind)
        if children:
            _require_space(said)
        open_ones[-1][1].append((name, children, said))
    if len(open_ones) > 1:
        raise Unreadable(f"parameter {open_ones[-1][0][:60]!r} was not closed")
    return open_ones[0]


def _of_element(element: _Element, schema: Any, root: dict[str, Any], depth: int) -> JSON:
    _, children, said = element
    if depth > MAX_DEPTH:
        raise Unreadable(f"elements inside {MAX_DEPTH} others")
    kinds = {kind for kind, value in _EMPTY.items() if _fits(value, schema, root)}
    is_empty = said == "" and kinds & {"array", "object"} and "string" not in kinds
    if not children and depth and not is_empty:
        return _typed(said, schema, root)
    inner = _with_parts(schema, root)
    if all(child[0] == "item" for child in children) and (
        "array" in kinds and (children or "string" not in kinds)
    ):
        return [_of_element(child, inner.get("items", True), root, depth + 1) for child in children]
    properties, value = _table(inner.get("properties")), {}
    for child in children:
        if child[0] in value:
            raise Unreadable(f"parameter {child[0]!r} is given twice")
        value[child[0]] = _of_element(child, properties.get(child[0], True), root, depth + 1)
    return value


def pythonic_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    """Reads Python calls with keyword arguments: `[a(x=1), b()]`, or one call a line. Values are
    literals, of Python or of JSON."""
    text = text.strip()
    text = text.removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # a policy's odd escapes are its own
            lines = parse_python(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"not a Python call ({error})") from None
    values = [line.value if isinstance(line, ast.Expr) else None for line in lines]
    if len(values) == 1 and isinstance(values[0], ast.List):
        values = list(values[0].elts)
    if not values:
        raise Unreadable("no call")
    return [_call_of_python(value) for value in values]


def gemma_calls(text: str, tools: list[ToolSpec], *, quote: str = '<|"|>') -> list[Call]:
    """Reads Gemma's `call:name{key:value}`: JSON with bare keys and a mark for quotes."""
    name, brace, body = text.strip().removeprefix("call:").partition("{")
    if not brace or not text.strip().startswith("call:"):
        raise Unreadable("a call is written call:name{key:value}")

    def quoted(match: re.Match[str]) -> str:
        if match["python"]:  # the family's template prints values as Python does
            return json.dumps(ast.literal_eval(match["python"]))
        return json.dumps(match["key"] if match["text"] is None else match["text"])

    mark = re.escape(quote)
    pattern = (
        rf"{mark}(?P<text>.*?){mark}|(?P<key>[A-Za-z_][\w.-]*)(?=\s*:)"
        r"|\b(?P<python>None|True|False)\b"
    )
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
    raise Unreadable(f"{ast.unparse(node)} is not a JSON value")


def _all(
    pattern: re.Pattern[str], text: str, *, may_be_empty: bool = False
) -> Iterator[re.Match[str]]:
    """Yields the matches that fill the text, with only white space between them."""
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


def _parameters(name: str, tools: list[ToolSpec]) -> dict[str, Any]:
    """Returns the JSON schema of a tool's parameters; {} where it has none."""
    for tool in tools:
        match tool.get("function"):
            case {"name": str(known), "parameters": dict(parameters)} if known == name:
                return parameters
    return {}


def _typed(text: str, schema: Any, root: dict[str, Any]) -> JSON:
    """Returns the JSON value that a text spells, or Python's form of one, if the schema takes it;
    else the text: a string is written as it is, quotes and all.

    Args:
        root: the tool's parameters, in which the schema's references are looked up.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = _python_value(text.strip())
    return text if isinstance(value, str) or not _fits(value, schema, root) else value


def _python_value(text: str) -> JSON:
    """Returns the list, object, truth value or None that a text spells in Python; else the text.
    Templates that write values as they are print them so."""
    if text not in ("True", "False", "None") and text[:1] not in ("[", "{"):
        return text
    try:
        with warnings.catch_warnings(action="ignore"):
            return _literal(parse_expression(text).body)
    except (Unreadable, SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _fits(value: JSON, schema: Any, root: dict[str, Any], depth: int = 0) -> bool:
    """Tells whether a value is of a kind that a schema declares, whatever is inside of it.

    Keywords without a value count as absent: files made of tables fill them with null. A reference
    that leads nowhere fits nothing, so that the text stays.
    """
    if not isinstance(schema, dict):
        return schema is not False
    if isinstance(schema.get("$ref"), str):
        target = _referred(schema["$ref"], root) if depth < MAX_DEPTH else None
        return target is not None and _fits(value, target, root, depth + 1)
    if value is None and schema.get("nullable"):
        return True
    if isinstance(choices := schema.get("enum"), list) and not _is_one_of(value, choices):
        return False
    if schema.get("const") is not None and not _is_one_of(value, [schema["const"]]):
        return False
    declared = schema.get("type")
    kinds = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if kinds and not any(
        _is_a(value, kind) if isinstance(kind, str) else _fits(value, kind, root, depth + 1)
        for kind in kinds
    ):
        return False
    for keyword, needed in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if parts := schema.get(keyword):
            if not isinstance(parts, list) or depth == MAX_DEPTH:
                return False
            if not needed(_fits(value, part, root, depth + 1) for part in parts):
                return False
    return True


def _referred(reference: str, root: dict[str, Any]) -> Any:
    """Returns the schema that a reference within the parameters names; None if there is none."""
    found: Any = root
    start, *steps = reference.split("/")
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    if start != "#" or found is None:
        _say_unresolved(reference)
        return None
    return found


@functools.cache
def _say_unresolved(reference: str) -> None:
    logger.warning(
        "a tool's schema refers to %s, which its parameters do not hold: such arguments stay texts",
        reference,
    )


def _with_parts(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Returns the first schema with properties or items, among this one and its alternatives."""
    waiting, seen = [schema], 0
    while waiting and seen < MAX_DEPTH:
        each, seen = waiting.pop(0), seen + 1
        if not isinstance(each, dict):
            continue
        if each.get("properties") or each.get("items"):
            return each
        if isinstance(each.get("$ref"), str):
            waiting.append(_referred(each["$ref"], root))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(parts := each.get(keyword), list):
                waiting += parts
    return {}


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_one_of(value: JSON, choices: list[Any]) -> bool:
    """Tells whether a value is among others; 1 and True are two values."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in choices
    )


def _is_a(value: JSON, kind: str) -> bool:
    types = _TYPES.get(kind, str)
    return types in (bool, object) if isinstance(value, bool) else isinstance(value, types)
