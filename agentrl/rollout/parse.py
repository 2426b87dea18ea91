"""Reading an assistant turn: text and tool calls, with a status instead of an exception.

The format is the one most open models are trained on (Hermes, Qwen): a JSON object between
`<tool_call>` and `</tool_call>`, any number of them, text around them allowed.
"""

from __future__ import annotations

import re

import msgspec

from agentrl.types import JSON, Action, Message, ParseStatus, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(_OPEN) + r"(.*?)" + re.escape(_CLOSE), re.DOTALL)


def parse_action(text: str, *, call_id_prefix: str) -> tuple[Action, ParseStatus]:
    """Split a turn's text into plain text and tool calls.

    One bad call spoils the turn: nothing of it is executed, because a half-executed turn is
    harder for a policy to learn from than a clear refusal. Its `parse_error` says what was wrong.

    Args:
        text: the decoded turn without its close token.
        call_id_prefix: call ids are `<prefix>-<index>`, so that they repeat with the seed.
    """
    if _OPEN not in text:
        return Action(text=text), "text"
    parts = _CALL.split(text)  # texts and, between them, the calls
    plain = "".join(parts[::2]).strip()
    if _OPEN in plain:
        return Action(text=text, parse_error=f"a {_OPEN} was never closed by {_CLOSE}"), "malformed"
    calls = []
    for index, body in enumerate(parts[1::2]):
        call = _parse_call(body, f"{call_id_prefix}-{index}")
        if isinstance(call, str):
            return Action(text=text, parse_error=f"tool call {index + 1}: {call}"), "malformed"
        calls.append(call)
    return Action(text=plain, tool_calls=tuple(calls)), "tool_calls"


def _parse_call(body: str, call_id: str) -> ToolCall | str:
    """The call, or what is wrong with it."""
    try:
        call = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"not valid JSON ({error})"
    if not isinstance(call, dict):
        return "not a JSON object"
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return 'no "name"'
    if not isinstance(arguments, dict):
        return '"arguments" is not a JSON object'
    return ToolCall(id=call_id, name=name, arguments=arguments)


def assistant_message(action: Action) -> Message:
    """The turn as a chat message, for records and for templates that are rendered whole."""
    message: Message = {"role": "assistant", "content": action.text}
    if action.tool_calls:
        calls: list[JSON] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in action.tool_calls
        ]
        message["tool_calls"] = calls
    return message
