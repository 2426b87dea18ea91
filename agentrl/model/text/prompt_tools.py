"""Tools for models whose chat template has no place for them: described in the system message.

The words are those of Hermes' and Qwen's templates, and calls are read in the `hermes` dialect:

    <tool_call>
    {"name": "search", "arguments": {"query": "x"}}
    </tool_call>

A tool's answer is a user's message, between `<tool_response>` tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agentrl.images import join_contents
from agentrl.types import ToolSpec

Render = Callable[[list[Any], list[ToolSpec], bool], str]
"""(messages, tools, whether a turn begins behind them) -> the template's text."""

_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_TRIED = "agentrl-dummy-system"


def with_prompted_tools(render: Render) -> Render:
    """Wraps a template: the tools are described in the system message instead of being passed to
    the template."""
    takes_system: list[bool] = []  # asked once, when a message is first rendered

    def rendered(messages: list[Any], tools: list[ToolSpec], generation_prompt: bool) -> str:
        if not takes_system:
            takes_system.append(_takes_system(render))
        written = _written(messages)
        if tools:
            lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            _describe(written, _SYSTEM.format(tools=lines), in_system=takes_system[0])
        return render(written, [], generation_prompt)

    return rendered


def _takes_system(render: Render) -> bool:
    from jinja2.exceptions import TemplateError

    messages = [{"role": "system", "content": _TRIED}, {"role": "user", "content": "x"}]
    try:
        return _TRIED in render(messages, [], True)
    except TemplateError:  # "System role not supported"
        return False


def _describe(messages: list[Any], description: str, *, in_system: bool) -> None:
    """Adds the description to the end of the system message, or before the first user's message."""
    first = messages[0] if messages else None
    if first is not None and first["role"] == "system":
        messages[0] = {**first, "content": join_contents([first["content"], description], "\n\n")}
    elif in_system:
        messages.insert(0, {"role": "system", "content": description})
    elif first is not None and first["role"] == "user":
        messages[0] = {**first, "content": join_contents([description, first["content"]], "\n\n")}
    else:
        messages.insert(0, {"role": "user", "content": description})


def _written(messages: list[Any]) -> list[Any]:
    """Returns the messages with calls as text of their turn, and the answers to one turn as one
    user's message."""
    written: list[Any] = []
    answering = False
    for message in messages:
        if message["role"] == "tool":
            answer = join_contents(
                ["<tool_response>", message["content"], "</tool_response>"], "\n"
            )
            if answering:
                answer = join_contents([written.pop()["content"], answer], "\n")
            written.append({"role": "user", "content": answer})
        elif calls := message.get("tool_calls"):
            said = [message["content"]] if message.get("content") else []
            content = "\n".join([*said, *map(_call, calls)])
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append({**rest, "content": content})
        else:
            written.append(message)
        answering = message["role"] == "tool"
    return written


def _call(call: Any) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
