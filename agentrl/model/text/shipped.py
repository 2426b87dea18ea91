"""A dialect from the response template that a checkpoint ships, read by transformers' parser."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from agentrl.errors import ConfigError
from agentrl.model.text.calls import json_calls
from agentrl.model.text.table import Dialect, Split

_END = "\0"
_REASONING = ("thinking", "reasoning", "reasoning_content")


def from_response_template(template: dict[str, Any]) -> Dialect:
    """Makes a dialect from a response template.

    Raises:
        ConfigError: transformers does not take the template.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        loaded = load_response_template(template)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"the tokenizer's response_template cannot be used ({error}); correct it in its "
            "tokenizer_config.json, or name another rollout.dialect"
        ) from error
    return Dialect(
        "response_template",
        "whatever ships one in its tokenizer_config.json",
        json_calls,
        think=None,
        split=partial(_split, template=loaded),
    )


def _split(text: str, prompt_end: str, *, template: Any) -> Split:
    from transformers.utils.chat_parsing import ResponseParser

    parts = Split()
    has_anchor = template.start_anchor_re.search(prompt_end) is not None
    parser = ResponseParser(template, prefix=prompt_end if has_anchor else "")
    try:
        # transformers closes what is open at the end of a turn, and holds back a delimiter that
        # might go on. With a character behind it, only what was never closed is left to the end.
        events = parser.feed(text + _END)
        _, last = parser.finalize()
    except (ValueError, KeyError) as error:  # what a region held is not what the template expects
        return Split(text=[text], problem=f"tool call: {str(error).splitlines()[0]}")
    unclosed = [each["field"] for each in last if each["type"] == "region_close"]
    if "tool_calls" in unclosed:
        return Split(text=[text], problem="a tool call was never closed")
    for event in [*events, *last]:
        if event["type"] != "region_close":
            continue
        value = event["value"]
        if event["field"] in _REASONING:
            parts.reasoning.append(value.rstrip(_END))
        elif event["field"] == "tool_calls":
            for call in value if isinstance(value, list) else [value]:
                parts.calls.append(json.dumps(call.get("function", call), ensure_ascii=False))
        elif event["field"] == "content":
            parts.text.append(value.rstrip(_END).rstrip())
    return parts
