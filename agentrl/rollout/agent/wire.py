"""The parts that all wires have in common, and OpenAI's chat completions.

A wire reads a request into a `Call`, whose messages have the shape that templates read, and writes
an `Answer` back, whole or as server-sent events. This module knows nothing of rows or tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from typing_extensions import TypedDict

from agentrl.errors import AgentRLError
from agentrl.images import (
    MAX_EPISODE_IMAGES,
    check_images,
    content_of_parts,
    content_parts,
    content_text,
    count_images,
)
from agentrl.types import Action, Content, Message, Role, ToolSpec

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_UNDERSTOOD = {
    "model",
    "messages",
    "tools",
    "stream",
    "stream_options",
    "n",
    "logit_bias",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "response_format",
    "functions",
    "function_call",
    "user",
    "metadata",
    "store",
    "parallel_tool_calls",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "modalities",
    "verbosity",
}
"""Keys of a chat completion that are read, refused, or change nothing about what is sampled."""


class RequestRefused(Exception):
    """A request that the endpoint does not serve; the message says why and what to do."""

    def __init__(self, message: str, *, status: int = 400, code: str = "unsupported") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(slots=True, frozen=True)
class Call:
    """One request for a turn."""

    messages: list[Message]
    tools: list[ToolSpec]
    model: str
    stream: bool = False
    with_usage: bool = False
    """A stream ends with the token counts."""
    replaced: tuple[str, ...] = ()
    """Sampling parameters of the caller, in whose place the run's are used."""
    unenforced: tuple[str, ...] = ()
    """Keys that ask for a form of the answer, which nothing enforces."""
    left_out: tuple[str, ...] = ()
    """Tools that the policy is not offered, because it cannot call them."""
    max_tokens: int | None = None
    """The caller's own limit of the turn; it only shortens."""
    stop: tuple[str, ...] = ()
    """The caller's own stop strings."""
    source: Any = None
    """What the wire needs to know of the request when it answers."""


@dataclass(slots=True, frozen=True)
class Answer:
    """One turn, as the agent is told of it."""

    id: str
    action: Action
    cut: bool
    """It was ended by the limit of tokens."""
    prompt_tokens: int
    sampled_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))


class Wire(Protocol):
    """A protocol that agents speak. Bodies are JSON; `events` are the frames of a stream.

    Each episode has its own instance, which may remember the answers that it gave.

    """

    def read(self, body: Mapping[str, Any]) -> Call:
        """Reads a request.

        Raises:
            RequestRefused: the body is malformed, or asks for something that is not served.
        """
        ...

    def reply(self, call: Call, answer: Answer) -> dict[str, Any]: ...

    def events(self, call: Call, answer: Answer) -> Iterator[bytes]: ...

    def error(self, refused: RequestRefused) -> dict[str, Any]: ...


class _Body(TypedDict, total=False):
    n: int | None
    stream: bool | None
    stream_options: dict[str, Any] | None
    tools: list[Any] | None
    tool_choice: str | dict[str, Any] | None
    max_tokens: int | None
    max_completion_tokens: int | None
    stop: str | list[str] | None
    response_format: dict[str, Any] | None


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    def read(self, body: Mapping[str, Any]) -> Call:
        require_shape(body, _Body)
        if (body.get("n") or 1) != 1:
            raise RequestRefused("n > 1 is not served: send the request as often as you need it")
        if body.get("logit_bias"):
            raise RequestRefused("logit_bias is not served: log-probabilities would not be exact")
        if body.get("functions") or body.get("function_call"):
            raise RequestRefused("functions were replaced by tools: send tools and tool_choice")
        replaced = set(body) - _UNDERSTOOD
        if body.get("tool_choice") not in (None, "auto", "none"):
            replaced.add("tool_choice")
        tools, left_out = read_tools(body.get("tools"))
        stop = body.get("stop") or ()
        form = (body.get("response_format") or {}).get("type", "text")
        return Call(
            messages=read_messages(body.get("messages")),
            tools=tools if body.get("tool_choice") != "none" else [],
            model=str(body.get("model") or "policy"),
            stream=bool(body.get("stream")),
            with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            replaced=tuple(sorted(key for key in replaced if body.get(key) is not None)),
            unenforced=() if form == "text" else ("response_format",),
            left_out=left_out,
            max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
            stop=(stop,) if isinstance(stop, str) else tuple(each for each in stop if each),
        )

    def reply(self, call: Call, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": self._message(answer.action),
            "logprobs": None,
            "finish_reason": self._finish_reason(answer),
        }
        head = self._head(call, answer, "chat.completion")
        return {**head, "choices": [choice], "usage": self._usage(answer)}

    def events(self, call: Call, answer: Answer) -> Iterator[bytes]:
        head = self._head(call, answer, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            return event({**head, "choices": [choice]})

        message = self._message(answer.action)
        calls = message.pop("tool_calls", [])
        yield chunk({"role": "assistant", "content": ""})
        if told := {key: message[key] for key in message if key != "role" and message[key]}:
            yield chunk(told)
        for index, each in enumerate(calls):
            name = {"name": each["function"]["name"], "arguments": ""}
            opened = {"index": index, "id": each["id"], "type": "function", "function": name}
            yield chunk({"tool_calls": [opened]})
            arguments = {"arguments": each["function"]["arguments"]}
            yield chunk({"tool_calls": [{"index": index, "function": arguments}]})
        yield chunk({}, self._finish_reason(answer))
        if call.with_usage:
            yield event({**head, "choices": [], "usage": self._usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        told = {"message": str(refused), "type": kind, "param": None, "code": refused.code}
        return {"error": told}

    def _head(self, call: Call, answer: Answer, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{answer.id}"
        return {"id": name, "object": kind, "created": answer.created, "model": call.model}

    def _message(self, action: Action) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": action.text}
        if action.reasoning:  # DeepSeek's name for it, and vLLM's
            message["reasoning_content"] = message["reasoning"] = action.reasoning
        if action.tool_calls:
            message["content"] = action.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": to_json(call.arguments)},
                }
                for call in action.tool_calls
            ]
        return message

    def _finish_reason(self, answer: Answer) -> Literal["tool_calls", "length", "stop"]:
        if answer.action.tool_calls:
            return "tool_calls"
        return "length" if answer.cut else "stop"

    def _usage(self, answer: Answer) -> dict[str, int]:
        return {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.sampled_tokens,
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        }


def event(data: Any, name: str | None = None) -> bytes:
    """Returns one server-sent event."""
    prefix = b"" if name is None else b"event: " + name.encode() + b"\n"
    return prefix + b"data: " + msgspec.json.encode(data) + b"\n\n"


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def require_shape(body: Mapping[str, Any], shape: type) -> None:
    """Checks the types of a body's values against the protocol's.

    Raises:
        RequestRefused: a value does not have the type that the protocol prescribes.
    """
    try:
        msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        raise RequestRefused(f"the body is malformed: {error}", code="invalid_request") from None


def read_limit(body: Mapping[str, Any], *keys: str) -> int | None:
    """Returns the first token limit that is set; None without any.

    Raises:
        RequestRefused: the limit is below 1.
    """
    for key in keys:
        if (limit := body.get(key)) is not None:
            if limit < 1:
                raise RequestRefused(f"{key} = {limit} leaves no token", code="invalid_request")
            return limit
    return None


def read_messages(value: Any) -> list[Message]:
    """Returns chat messages as templates read them: each text in one piece, images as data URLs,
    arguments as objects, and the name of the tool beside its answer.

    Raises:
        RequestRefused: a message is malformed, or holds something other than text and images.
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
        message: Message = {"role": _ROLES[role], "content": content_of(each, where)}
        num_images += count_images(message["content"])
        if num_images > MAX_EPISODE_IMAGES:
            raise RequestRefused(f"the call shows more than {MAX_EPISODE_IMAGES} images")
        if message["role"] == "assistant":
            if reasoning := each.get("reasoning") or each.get("reasoning_content"):
                message["reasoning"] = str(reasoning)
            if said := each.get("tool_calls"):
                if not isinstance(said, list):
                    raise RequestRefused(
                        f"{where}: tool_calls is not a list", code="invalid_messages"
                    )
                calls: list[Any] = [_tool_call(call, where) for call in said]
                message["tool_calls"] = calls
                names |= {call["id"]: call["function"]["name"] for call in calls}
        elif message["role"] == "tool":
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
    """Returns the address of an image in any of the three protocols.

    Raises:
        RequestRefused: the part has no address.
    """
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


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **function}}:
            arguments = read_arguments(function.get("arguments"), where)
            told = {"name": name, "arguments": arguments}
            return {"id": str(call.get("id") or ""), "type": "function", "function": told}
    raise RequestRefused(f"{where}: a call has a function with a name", code="invalid_messages")
