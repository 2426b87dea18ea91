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

from agentrl.rollout.messages import RequestRefused, read_messages, read_tools
from agentrl.types import Action, Message, ToolSpec

_UNDERSTOOD = {
    "model",
    "messages",
    "tools",
    "stream",
    "stream_options",
    "n",
    "logit_bias",
    "continue_final_message",
    "chat_template",
    "documents",
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
    unread: tuple[str, ...] = ()
    """Keys of the request's messages, or about them, that have no effect."""
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
        for key in ("continue_final_message", "chat_template", "documents"):
            if body.get(key):
                raise RequestRefused(f"{key} is not served: the run's template writes the prompt")
        replaced = set(body) - _UNDERSTOOD
        if body.get("tool_choice") not in (None, "auto", "none"):
            replaced.add("tool_choice")
        tools, left_out = read_tools(body.get("tools"))
        unread: set[str] = set()
        stop = body.get("stop") or ()
        form = (body.get("response_format") or {}).get("type", "text")
        return Call(
            messages=read_messages(body.get("messages"), unread),
            tools=tools if body.get("tool_choice") != "none" else [],
            model=str(body.get("model") or "policy"),
            stream=bool(body.get("stream")),
            with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            replaced=tuple(sorted(key for key in replaced if body.get(key) is not None)),
            unenforced=(
                *(() if form == "text" else ("response_format",)),
                *(("parallel_tool_calls",) if body.get("parallel_tool_calls") is False else ()),
            ),
            unread=tuple(sorted(unread)),
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
