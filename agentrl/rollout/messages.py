"""Reads messages and tools in OpenAI's form, as agents send them and as files hold them.

What templates read has one shape: each text in one piece, images as data URLs, the arguments of a
call as an object, and the name of the tool beside its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.errors import AgentRLError
from agentrl.images import (
    MAX_EPISODE_IMAGES,
    check_images,
    content_of_parts,
    content_parts,
    content_text,
    count_images,
)
from agentrl.types import Content, Message, Role, ToolSpec

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_REASONING = ("reasoning", "reasoning_content", "thinking")
_READ = {
    "role",
    "content",
    "name",
    "refusal",
    "tool_calls",
    "tool_call_id",
    "function_call",
    *_REASONING,
    # Of clients and providers: they name, mark or cache what is read.
    "id",
    "type",
    "status",
    "annotations",
    "cache_control",
    "is_error",
    "weight",
}


class RequestRefused(Exception):
    """A request that the endpoint does not serve; the message says why and what to do."""

    def __init__(self, message: str, *, status: int = 400, code: str = "unsupported") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def read_messages(value: Any, unread: set[str] | None = None) -> list[Message]:
    """Returns chat messages as templates read them: each text in one piece, images as data URLs,
    arguments as objects, and the name of the tool beside its answer. `function_call` of older logs
    is a tool call, and the role `function` its answer.

    Args:
        unread: receives the keys of messages that have a value here and no meaning.

    Raises:
        RequestRefused: a message is malformed, answers no call, or holds something other than text
            and images.
    """
    if not isinstance(value, list) or not value:
        raise RequestRefused("messages must be a list of at least one", code="invalid_messages")
    names: dict[str, str] = {}
    messages: list[Message] = []
    num_images = 0
    for index, each in enumerate(value):
        where = f"messages[{index}]"
        role = each.get("role") if isinstance(each, dict) else None
        if not isinstance(each, dict) or not isinstance(role, str) or role not in _ROLES:
            raise RequestRefused(
                f"{where}: a role is one of {', '.join(_ROLES)}", code="invalid_messages"
            )
        if each.get("audio") or each.get("prefix"):
            raise RequestRefused(f"{where}: audio, and answers begun by the agent, are not served")
        if unread is not None:
            unread |= {key for key in each.keys() - _READ if each[key] is not None}
        message: Message = {"role": _ROLES[role], "content": content_of(each, where)}
        num_images += count_images(message["content"])
        if num_images > MAX_EPISODE_IMAGES:
            raise RequestRefused(f"the call shows more than {MAX_EPISODE_IMAGES} images")
        if message["role"] == "assistant":
            if reasoning := next((each[key] for key in _REASONING if each.get(key)), None):
                message["reasoning"] = str(reasoning)
            if calls := _tool_calls(each, where):
                message["tool_calls"] = calls
                names |= {call["id"]: call["function"]["name"] for call in calls}
        elif message["role"] == "tool":
            if not names:
                raise RequestRefused(
                    f"{where}: the answer of a tool, and no message before it calls one: the "
                    "policy reads only what a request holds, so send the whole history",
                    code="invalid_messages",
                )
            message["tool_call_id"] = call_id = str(each.get("tool_call_id") or "")
            if name := each.get("name") or names.get(call_id):
                message["name"] = str(name)
        messages.append(message)
    return messages


def content_of(message: Mapping[str, Any], where: str) -> Content:
    """Returns the content as one text, or as texts and images; None becomes an empty text.

    Raises:
        RequestRefused: a part of it is neither text nor a usable image.
    """
    content = message.get("content")
    if content is None:
        content = message.get("refusal")
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list):
        raise RequestRefused(
            f"{where}: content is a text or a list of parts, not {type(content).__name__}",
            code="invalid_messages",
        )
    parts: list[dict[str, Any]] = []
    for part in content or ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in ("image_url", "input_image", "image") and isinstance(part, dict):
            parts.append({"type": "image_url", "image_url": {"url": _image_url(part, where)}})
        elif kind in ("text", "input_text", "output_text", "refusal"):
            text = str(part.get("text") or part.get("refusal") or "")
            parts.append({"type": "text", "text": text})
        else:
            raise RequestRefused(
                f"{where}: content of type {kind!r} is not served, only texts and images"
            )
    if not count_images(parts):
        return content_text(parts)
    if message.get("role") == "assistant":
        raise RequestRefused(f"{where}: the policy writes texts, so what it said shows no image")
    try:
        check_images([parts], where)
        # An image that is sent again is known by its content, however its URL is written.
        return content_of_parts(content_parts(parts))
    except AgentRLError as error:  # no usable image, or no Pillow
        raise RequestRefused(f"{where}: {error}", code="invalid_image") from None


def _image_url(part: Mapping[str, Any], where: str) -> str:
    """Returns the address of an image in any of the three protocols."""
    match part:
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)}:
            return url
        case {"source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return f"data:{kind};base64,{data}"
        case {"source": {"type": "url", "url": str(url)}}:
            return url
    raise RequestRefused(
        f"{where}: an image is sent whole, as a data URL or base64; no files are kept here",
        code="invalid_image",
    )


def read_tools(value: list[Any] | None) -> tuple[list[ToolSpec], tuple[str, ...]]:
    """Returns tools as chat templates take them, and the names of the provider's own tools, which
    the policy cannot call. A tool without parameters gets an empty schema.

    Raises:
        RequestRefused: a tool is malformed.
    """
    tools: list[ToolSpec] = []
    others: list[str] = []
    for index, tool in enumerate(value or []):
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if isinstance(tool, dict) and isinstance(kind, str) and kind != "function":
            name = tool.get("name")
            others.append(kind if name in (None, kind) else f"{kind} {name}")
            continue
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise RequestRefused(
                f"tools[{index}]: a function with a name is needed", code="invalid_tools"
            )
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise RequestRefused(
                f"tools[{index}] ({name}): parameters are not an object", code="invalid_tools"
            )
        tools.append({**tool, "function": {**function, "parameters": parameters}})
    return tools, tuple(others)


def read_arguments(value: Any, where: str) -> dict[str, Any]:
    """Returns a call's arguments, which most clients send as JSON text.

    Raises:
        RequestRefused: they are not a JSON object.
    """
    try:
        arguments = msgspec.json.decode(value or "{}") if isinstance(value, str) else value or {}
    except msgspec.DecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestRefused(
            f"{where}: the arguments of a call are no JSON object: {str(value)[:60]!r}",
            code="invalid_messages",
        )
    return arguments


def _tool_calls(message: Mapping[str, Any], where: str) -> list[Any]:
    """Returns the calls of an assistant's message."""
    calls = message.get("tool_calls") or []
    if function := message.get("function_call"):
        calls = [{"function": function}]
    if not isinstance(calls, list):
        raise RequestRefused(f"{where}: tool_calls is not a list", code="invalid_messages")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **function}}:
            arguments = read_arguments(function.get("arguments"), where)
            told = {"name": name, "arguments": arguments}
            return {"id": str(call.get("id") or ""), "type": "function", "function": told}
    raise RequestRefused(f"{where}: a call has a function with a name", code="invalid_messages")
