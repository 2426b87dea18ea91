"""`agentrl env play`: a person takes the agent's place for one episode.

Each line is an action. A tool's name alone asks for each of its arguments; a name with a JSON
object, such as `add {"number": 5}`, is a whole call. Anything else is text; if its line ends with a
backslash, it continues on the next line. `/quit` gives up.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentrl.env.client import EnvSession, connect
from agentrl.env.protocol import EnvInfo
from agentrl.errors import ConfigError
from agentrl.images import content_images, content_text
from agentrl.types import JSON, Action, Content, Message, StepResult, ToolCall, ToolSpec

STEP_TIMEOUT_S = 600.0
"""Seconds for a step."""
_QUIT = "/quit"
_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


class InputEnded(Exception):
    """The input ended, or the person gave up."""


async def _ask(console: Console, question: str) -> str:
    """Reads a line in a thread, so that the event loop can renew the session's lease meanwhile."""
    try:
        line = await asyncio.to_thread(console.input, question)
    except EOFError:
        raise InputEnded from None
    if line.strip() == _QUIT:
        raise InputEnded
    return line


async def play(
    env_id: str,
    *,
    url: str | None = None,
    token: str | None = None,
    split: str | None = None,
    index: int = 0,
    seed: int = 0,
    config: Mapping[str, JSON] | None = None,
    console: Console | None = None,
) -> float | None:
    """Plays one episode and returns its reward, or None if the person gave up.

    Args:
        env_id: a name for `agentrl.env.registry.resolve`, or with `url` an id of that server.
        split: by default the first.

    Raises:
        ConfigError: the environment has no tasks of its own.
        EnvError: the split or task does not exist, or the environment failed.
    """
    terminal = console or Console(highlight=False)
    async with connect(url, token=token) as client:
        info = await client.info(env_id, config)
        split = split or next(iter(info.splits), None)
        if split is None:
            raise ConfigError(f"environment '{info.id}' has no tasks of its own to play")
        session = await client.session(env_id, split=split, index=index, seed=seed, config=config)
        try:
            return await _episode(terminal, session, info)
        except InputEnded:
            terminal.print("\n[dim]given up[/dim]")
            return None
        finally:
            await session.close()


async def _episode(console: Console, session: EnvSession, info: EnvInfo) -> float:
    console.print(f"[bold]{escape(info.id)}[/bold], task {escape(session.task_id)}")
    _show_messages(console, session.messages)
    _show_tools(console, session.tools)
    console.print(
        f"[dim]type {'a tool, or text' if session.tools else 'text'}; end a line with \\ to "
        f"continue it; {_QUIT} gives up[/dim]"
    )
    total = 0.0
    for number in itertools.count(1):
        tools = session.tools
        action = await _ask_action(
            console, {_function(each)["name"]: each for each in tools}, number
        )
        result = await session.step(action, timeout_s=STEP_TIMEOUT_S)
        total += result.reward
        _show_messages(console, result.observation)
        if result.terminated or result.truncated:
            _show_end(console, result, total, number)
            break
        if result.reward:
            console.print(f"[dim]reward {result.reward:g}[/dim]")
        if session.tools != tools:
            _show_tools(console, session.tools)
    return total


async def _ask_action(console: Console, tools: Mapping[str, ToolSpec], number: int) -> Action:
    line = await _ask(console, f"\n[bold]turn {number}>[/bold] ")
    name, _, rest = line.strip().partition(" ")
    if name in tools and not rest:
        arguments = await _ask_arguments(console, _function(tools[name])["parameters"])
        return Action(tool_calls=(ToolCall(f"call-{number}", name, arguments),))
    if name in tools and rest.lstrip().startswith("{"):
        try:
            arguments = json.loads(rest)
        except ValueError as error:
            console.print(f"[red]not JSON: {escape(str(error))}[/red]")
            return await _ask_action(console, tools, number)
        return Action(tool_calls=(ToolCall(f"call-{number}", name, arguments),))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(await _ask(console, "[bold]...[/bold] "))
    return Action(text="\n".join(lines))


async def _ask_arguments(console: Console, schema: Mapping[str, Any]) -> dict[str, JSON]:
    arguments: dict[str, JSON] = {}
    required = schema.get("required", ())
    for name, each in schema.get("properties", {}).items():
        kind = kind_of(each)
        hint = kind if name in required else f"{kind}, empty for {_default(each)}"
        description = f"  {each['description']}" if each.get("description") else ""
        while True:
            line = await _ask(console, f"  [cyan]{escape(name)}[/] ({escape(hint)}){description}: ")
            if not line and name not in required:
                break
            try:
                arguments[name] = read_value(line, kind)
                break
            except ValueError as error:
                console.print(f"[red]{escape(str(error))}[/red]")
    return arguments


def kind_of(schema: Mapping[str, Any]) -> str:
    """Returns the JSON type of an argument, or its choices, to show to a person."""
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    options = [kind_of(each) for each in schema.get("anyOf", ())]
    return str(schema.get("type") or " or ".join(options) or "JSON")


def read_value(line: str, kind: str) -> JSON:
    """Returns the argument that a person typed.

    Raises:
        ValueError: it is not of that kind; the message says what is expected.
    """
    if kind == "string" or " | " in kind:
        return line
    try:
        return TypeAdapter(_TYPES.get(kind, Any)).validate_json(line, strict=True)
    except ValidationError:
        if "string" in kind or kind == "JSON":
            return line
        raise ValueError(f"'{line}' is not of type {kind}") from None


_TYPES = {"integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}


def _default(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema["default"]) if "default" in schema else "none"


def _function(spec: ToolSpec) -> dict[str, Any]:
    function: Any = spec["function"]
    return function


def _show_tools(console: Console, tools: list[ToolSpec]) -> None:
    if tools:
        console.print("\n[bold]tools[/bold]")
    for function in map(_function, tools):
        parameters = ", ".join(function["parameters"].get("properties", {}))
        summary = escape(function.get("description", "").partition("\n")[0])
        console.print(f"  [cyan]{escape(function['name'])}[/]({parameters})  {summary}")


def _show_messages(console: Console, messages: list[Message]) -> None:
    for message in messages:
        colour = _ROLES[message["role"]]
        console.print(f"\n[{colour}]{message['role']}[/]")
        console.print(Padding(Text(_shown(message["content"])), (0, 0, 0, 2)))


def _show_end(console: Console, result: StepResult, total: float, num_turns: int) -> None:
    how = "terminated" if result.terminated else "truncated"
    console.print(f"\n[bold]{how}[/bold] after {num_turns} turns: reward [bold]{total:g}[/bold]")
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in result.reward_components.items():
        table.add_row("  component", name, f"{value:g}")
    for name, value in result.metrics.items():
        table.add_row("  metric", name, f"{value:g}")
    for name, value in result.info.items():
        table.add_row("  info", name, json.dumps(value, ensure_ascii=False))
    if table.row_count:
        console.print(table)


def _shown(content: Content) -> str:
    """Returns the text of a message, with a line for each image that gives its size."""
    images = [f"[image, {each.width} x {each.height}]" for each in content_images(content)]
    return "\n".join(filter(None, [content_text(content), *images])) or "(empty)"
