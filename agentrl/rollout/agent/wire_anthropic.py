"""Anthropic's messages: `POST /v1/messages`.

A thread of the episode may be continued by the id of its last answer (`thread`), instead of sending
its messages again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import TypedDict

from agentrl.rollout.agent.wire import (
    Answer,
    Call,
    event,
    read_limit,
    require_shape,
    to_json,
)
from agentrl.rollout.messages import RequestRefused, read_messages, read_tools

_READ = {
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "stream",
    "metadata",
    "betas",
    "max_tokens",
    "stop_sequences",
    "output_config",
    "output_format",
    "thread",
}
_NOT_SERVED = ("mcp_servers", "container")
"""Keys by which a provider adds to what the model reads."""
_WITHOUT_EFFECT = ("context_management", "compaction")
"""Keys by which a provider shortens a long history: here the policy reads all that is sent."""
_KEPT = ("system", "tools")
"""What a thread keeps beside its messages, unless a request sends it again."""


class _Body(TypedDict, total=False):
    system: str | list[Any] | None
    messages: list[Any]
    tools: list[Any] | None
    tool_choice: dict[str, Any] | None
    stream: bool | None
    max_tokens: int | None
    stop_sequences: list[str] | None
    output_config: dict[str, Any] | None
    thread: dict[str, Any] | None


class AnthropicMessages:
    def __init__(self) -> None:
        self._threads: dict[str, dict[str, Any]] = {}
        """By the id of its last answer: the thread's messages, system text and tools."""

    def read(self, body: Mapping[str, Any]) -> Call:
        require_shape(body, _Body)
        for key in _NOT_SERVED:
            if body.get(key):
                raise RequestRefused(f"{key} is not served: the agent sends what the policy reads")
        if thread := body.get("thread"):
            body = self._continued(body, thread)
        choice = body.get("tool_choice") or {}
        chosen = choice.get("type", "auto")
        unread = {key for key in _WITHOUT_EFFECT if body.get(key)}
        others = set(body) - _READ - {*_WITHOUT_EFFECT}
        replaced = [key for key in sorted(others) if body[key] is not None]
        forms = {
            "output_format": body.get("output_format"),
            "output_config.format": (body.get("output_config") or {}).get("format"),
        }
        tools, left_out = read_tools([_as_tool(each) for each in body.get("tools") or ()])
        messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        for index, message in enumerate(body.get("messages") or ()):
            messages += _as_chat(message, f"messages[{index}]")
        if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            raise RequestRefused(
                "the last message is the assistant's: beginning the policy's answer is not served"
            )
        forms |= {
            "tool_choice.disable_parallel_tool_use": choice.get("disable_parallel_tool_use"),
            "tool_result.is_error": any(
                isinstance(message, dict) and message.pop("is_error", None) for message in messages
            ),
        }
        return Call(
            messages=read_messages(messages, unread),
            tools=tools if chosen != "none" else [],
            model=str(body.get("model") or "policy"),
            stream=bool(body.get("stream")),
            replaced=(*replaced, *(["tool_choice"] if chosen in ("any", "tool") else [])),
            unenforced=tuple(key for key, form in forms.items() if form),
            unread=tuple(sorted(unread)),
            left_out=left_out,
            max_tokens=read_limit(body, "max_tokens"),
            stop=tuple(each for each in body.get("stop_sequences") or () if each),
            source=body if thread else None,
        )

    def _continued(self, body: Mapping[str, Any], thread: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a request with all that its thread holds."""
        if thread.get("type") == "create":
            return dict(body)
        previous = thread.get("previous_message_id")
        if previous not in self._threads:
            raise RequestRefused(
                f"thread: this episode has no thread that ends in {previous!r}; send the whole "
                'history with {"type": "create"}',
                status=404,
                code="thread_not_found",
            )
        kept = self._threads[previous]
        messages = [*kept["messages"], *(body.get("messages") or ())]
        return {**kept, **body, "messages": messages}

    def reply(self, call: Call, answer: Answer) -> dict[str, Any]:
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
        told = {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": self._blocks(answer),
            "stop_reason": self._stop_reason(answer),
            "stop_sequence": None,
            "usage": usage,
        }
        if call.source is not None:
            messages = [*call.source["messages"], {"role": "assistant", "content": told["content"]}]
            kept = {key: call.source[key] for key in _KEPT if key in call.source}
            self._threads[told["id"]] = {**kept, "messages": messages}
        return told

    def events(self, call: Call, answer: Answer) -> Iterator[bytes]:
        def told(kind: str, **data: Any) -> bytes:
            return event({"type": kind, **data}, kind)

        whole = self.reply(call, answer)
        begun = {**whole, "content": [], "stop_reason": None}
        begun["usage"] = {**whole["usage"], "output_tokens": 0}
        yield told("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            if block["type"] == "tool_use":
                empty, delta = {**block, "input": {}}, {"partial_json": to_json(block["input"])}
                kind = "input_json_delta"
            else:
                key = block["type"]
                empty, delta, kind = {**block, key: ""}, {key: block[key]}, f"{key}_delta"
            yield told("content_block_start", index=index, content_block=empty)
            yield told("content_block_delta", index=index, delta={"type": kind, **delta})
            yield told("content_block_stop", index=index)
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield told("message_delta", delta=ended, usage=whole["usage"])
        yield told("message_stop")

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}
        kind = kinds.get(refused.status, "invalid_request_error")
        details = {"error_code": refused.code}  # by which the client's own library knows it
        told = {"type": kind, "message": str(refused), "code": refused.code, "details": details}
        return {"type": "error", "error": told}

    def _blocks(self, answer: Answer) -> list[dict[str, Any]]:
        action, blocks = answer.action, []
        if action.reasoning:
            blocks.append({"type": "thinking", "thinking": action.reasoning, "signature": ""})
        if action.text or not action.tool_calls:
            blocks.append({"type": "text", "text": action.text})
        for call in action.tool_calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
            blocks.append({**block, "input": call.arguments})
        return blocks

    def _stop_reason(self, answer: Answer) -> str:
        if answer.action.tool_calls:
            return "tool_use"
        return "max_tokens" if answer.cut else "end_turn"


def _as_tool(tool: Any) -> Any:
    """Converts a tool to the shape of chat completions; a provider's own tool is returned
    unchanged."""
    if not isinstance(tool, dict) or (tool.get("type") or "custom") != "custom":
        return tool
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _as_chat(message: Any, where: str) -> list[dict[str, Any]]:
    """Converts one message of blocks to chat messages: the answers of tools first, one message
    each."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]
    texts: list[Any] = []
    answers: list[dict[str, Any]] = []
    spoken: dict[str, Any] = {"role": message.get("role"), "content": texts}
    for block in message["content"]:
        match block:
            case {"type": "text" | "image"}:
                texts.append(block)
            case {"type": "thinking", "thinking": str(thought)}:
                spoken["reasoning"] = spoken.get("reasoning", "") + thought
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use"}:
                function = {"name": block.get("name"), "arguments": block.get("input")}
                call = {"id": block.get("id"), "function": function}
                spoken.setdefault("tool_calls", []).append(call)
            case {"type": "tool_result"}:
                told = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                told |= {"is_error": block.get("is_error")}
                answers.append({**told, "content": block.get("content")})
            case _:
                kind = block.get("type") if isinstance(block, dict) else type(block).__name__
                raise RequestRefused(f"{where}: a block of type {kind!r} is not served")
    has_more = texts or "tool_calls" in spoken or "reasoning" in spoken or not answers
    return [*answers, *([spoken] if has_more else [])]
