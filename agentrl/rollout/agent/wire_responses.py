"""OpenAI's responses: `POST /v1/responses`.

Earlier answers of the episode may be referred to by id (`previous_response_id`, `item_reference`)
instead of being sent again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypedDict

from agentrl.rollout.agent.wire import (
    Answer,
    Call,
    ChatCompletions,
    event,
    read_limit,
    require_shape,
    to_json,
)
from agentrl.rollout.messages import RequestRefused, read_messages, read_tools

_READ = {
    "input",
    "instructions",
    "model",
    "tools",
    "tool_choice",
    "stream",
    "store",
    "include",
    "metadata",
    "parallel_tool_calls",
    "user",
    "prompt_cache_key",
    "stream_options",
    "previous_response_id",
    "conversation",
    "prompt",
    "background",
    "service_tier",
    "text",
    "truncation",
    "max_output_tokens",
    "client_metadata",
}


class _Body(TypedDict, total=False):
    input: str | list[Any]
    instructions: str | None
    tools: list[Any] | None
    tool_choice: str | dict[str, Any] | None
    stream: bool | None
    store: bool | None
    previous_response_id: str | None
    text: dict[str, Any] | None
    max_output_tokens: int | None


@dataclass(slots=True, frozen=True)
class _Named:
    """The agent's own name of a tool: templates have one name where this protocol has two."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """It takes a text, which templates see as an object with the only key `input`."""


@dataclass(slots=True, frozen=True)
class _Source:
    items: list[Any]
    """The whole input, without `instructions`."""
    names: dict[str, _Named]
    stored: bool


class Responses:
    def __init__(self) -> None:
        self._items: dict[str, tuple[str, Any]] = {}
        """By its id: each item that was answered, and the turn that it is of."""
        self._dialogues: dict[str, list[Any]] = {}
        """By the response's id: all items up to its end."""

    def read(self, body: Mapping[str, Any]) -> Call:
        require_shape(body, _Body)
        for key in ("conversation", "prompt", "background"):
            if body.get(key):
                raise RequestRefused(f"{key} is not served: send the history as input")
        items = body.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list):
            raise RequestRefused("input must be a text or a list", code="invalid_input")
        items = [
            self._referred(item, f"input[{index}]") if _kind(item) == "item_reference" else item
            for index, item in enumerate(items)
        ]
        if (previous := body.get("previous_response_id")) is not None:
            if previous not in self._dialogues:
                raise RequestRefused(
                    f"previous_response_id: this episode has no response {previous!r} that was "
                    "stored; send the whole history as input",
                    code="previous_response_not_found",
                )
            items = [*self._dialogues[previous], *items]
        instructions = body.get("instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        replaced = [key for key in sorted(set(body) - _READ) if body[key] is not None]
        if body.get("tool_choice") not in (None, "auto", "none"):
            replaced.append("tool_choice")
        names: dict[str, _Named] = {}
        tools, left_out = read_tools(_as_tools(body.get("tools") or [], names))
        form = (body.get("text") or {}).get("format") or {}
        is_text = isinstance(form, dict) and form.get("type", "text") == "text"
        return Call(
            messages=read_messages([*system, *self._as_chat(items)]),
            tools=tools if body.get("tool_choice") != "none" else [],
            model=str(body.get("model") or "policy"),
            stream=bool(body.get("stream")),
            replaced=tuple(replaced),
            unenforced=(
                *(() if is_text else ("text.format",)),
                *(("parallel_tool_calls",) if body.get("parallel_tool_calls") is False else ()),
            ),
            left_out=left_out,
            max_tokens=read_limit(body, "max_output_tokens"),
            source=_Source(items, names, stored=body.get("store") is not False),
        )

    def reply(self, call: Call, answer: Answer) -> dict[str, Any]:
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        }
        told = {
            **self._head(call, answer, "incomplete" if answer.cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
            "output": self._output(call, answer),
            "usage": usage,
        }
        if isinstance(call.source, _Source) and call.source.stored:
            self._dialogues[told["id"]] = [*call.source.items, *told["output"]]
        return told

    def events(self, call: Call, answer: Answer) -> Iterator[bytes]:
        number = -1

        def told(kind: str, **data: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number, **data}, kind)

        begun = self._head(call, answer, "in_progress") | {"output": [], "usage": None}
        yield told("response.created", response=begun)
        yield told("response.in_progress", response=begun)
        for index, item in enumerate(self._output(call, answer)):
            where = {"item_id": item["id"], "output_index": index}
            empty = {
                "message": {"content": []},
                "function_call": {"arguments": ""},
                "custom_tool_call": {"input": ""},
                "reasoning": {"content": []},
            }[item["type"]]
            opened = {**item, **empty, "status": "in_progress"}
            yield told("response.output_item.added", output_index=index, item=opened)
            if item["type"] == "message":
                (part,) = item["content"]
                where["content_index"] = 0
                none = {**part, "text": ""}
                yield told("response.content_part.added", **where, part=none)
                text = {"logprobs": [], **where}
                yield told("response.output_text.delta", delta=part["text"], **text)
                yield told("response.output_text.done", text=part["text"], **text)
                yield told("response.content_part.done", **where, part=part)
            elif item["type"] == "function_call":
                arguments, name = item["arguments"], item["name"]
                yield told("response.function_call_arguments.delta", delta=arguments, **where)
                yield told(
                    "response.function_call_arguments.done", arguments=arguments, name=name, **where
                )
            elif item["type"] == "custom_tool_call":
                text = item["input"]
                yield told("response.custom_tool_call_input.delta", delta=text, **where)
                yield told("response.custom_tool_call_input.done", input=text, **where)
            yield told("response.output_item.done", output_index=index, item=item)
        whole = self.reply(call, answer)
        yield told(f"response.{whole['status']}", response=whole)

    def error(self, refused: RequestRefused) -> dict[str, Any]:
        return ChatCompletions().error(refused)

    def _head(self, call: Call, answer: Answer, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "model": call.model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def _output(self, call: Call, answer: Answer) -> list[dict[str, Any]]:
        action, items = answer.action, []
        names = call.source.names if isinstance(call.source, _Source) else {}
        if action.reasoning:
            thought = {"type": "reasoning_text", "text": action.reasoning}
            items.append(
                {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": [thought]}
            )
        if action.text or not action.tool_calls:
            text = {"type": "output_text", "text": action.text, "annotations": [], "logprobs": []}
            message = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant"}
            items.append({**message, "content": [text], "status": "completed"})
        for each in action.tool_calls:
            known = names.get(each.name, _Named(each.name))
            item: dict[str, Any] = {
                "id": f"{'ctc' if known.is_custom else 'fc'}_{answer.id}_{each.id}",
                "call_id": each.id,
                "name": known.name,
                "status": "completed",
            }
            if known.namespace is not None:
                item["namespace"] = known.namespace
            if known.is_custom:
                said = each.arguments.get("input")
                text = said if isinstance(said, str) else to_json(each.arguments)
                item |= {"type": "custom_tool_call", "input": text}
            else:
                item |= {"type": "function_call", "arguments": to_json(each.arguments)}
            items.append(item)
        self._items |= {item["id"]: (answer.id, item) for item in items}
        return items

    def _referred(self, item: Any, where: str) -> Any:
        """Returns the earlier output that an `item_reference` names."""
        name = item.get("id")
        if not isinstance(name, str) or name not in self._items:
            raise RequestRefused(
                f"{where}: this episode has no item {name!r}; send it as a whole",
                code="item_not_found",
            )
        return self._items[name][1]

    def _as_chat(self, items: list[Any]) -> list[Any]:
        """Converts items to chat messages: everything that the assistant did in one turn is one
        message.

        Where ids do not say which turn an item is of, a turn has one text, which ends it unless
        calls follow, and thinks before it does anything else.
        """
        messages: list[Any] = []
        turn: dict[str, Any] | None = None
        turn_id = ""
        for index, item in enumerate(items):
            where, kind = f"input[{index}]", _kind(item)
            is_call = kind in ("function_call", "custom_tool_call")
            said = kind == "message" and item.get("role") == "assistant"
            if is_call or said or kind == "reasoning":
                name = item.get("id")
                own, _ = self._items.get(name, ("", None)) if isinstance(name, str) else ("", None)
                if turn is not None and own and turn_id:
                    is_new = own != turn_id
                elif turn is not None:
                    acted = turn["content"] is not None or bool(turn["tool_calls"])
                    is_new = acted if kind == "reasoning" else said and turn["content"] is not None
                else:
                    is_new = True
                if turn is None or is_new:
                    turn = {"role": "assistant", "content": None, "tool_calls": []}
                    messages.append(turn)
                    turn_id = ""
                turn_id = turn_id or own
                if is_call:
                    turn["tool_calls"].append(_read_call(item, kind))
                elif said:
                    turn["content"] = item.get("content") or ""
                elif thought := _thought(item):
                    turn["reasoning"] = turn.get("reasoning", "") + thought
                continue
            turn = None
            if kind in ("function_call_output", "custom_tool_call_output"):
                called, output = item.get("call_id"), item.get("output")
                messages.append({"role": "tool", "tool_call_id": called, "content": output})
            elif kind == "message":
                messages.append(item)
            else:
                raise RequestRefused(f"{where}: an item of type {kind!r} is not served")
        return messages


def _kind(item: Any) -> Any:
    return (item.get("type") or "message") if isinstance(item, dict) else None


def _thought(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary")
    parts = parts if isinstance(parts, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _flat(namespace: Any, name: Any) -> Any:
    """Returns the single name under which the policy sees a tool of a namespace."""
    if not isinstance(namespace, str) or not isinstance(name, str) or name.startswith(namespace):
        return name
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


def _as_tools(
    tools: list[Any], names: dict[str, _Named], namespace: str | None = None
) -> list[Any]:
    """Converts tools to the shape of chat completions; tools of namespaces join the others.

    Args:
        names: filled with the tools that have another name in the agent's protocol.
    """
    result: list[Any] = []
    for tool in tools:
        match tool:
            case {"type": "namespace", "name": str(name), "tools": list(inner)}:
                result += _as_tools(inner, names, name)
            case {"type": "function" | "custom" as kind, "name": str(name)}:
                flat = _flat(namespace, name)
                if kind == "custom" or namespace is not None:
                    names[flat] = _Named(name, namespace, kind == "custom")
                function = {"name": flat}
                if tool.get("description") is not None:
                    function["description"] = tool["description"]
                parameters = _CUSTOM if kind == "custom" else tool.get("parameters")
                if parameters is not None:
                    function["parameters"] = parameters
                result.append({"type": "function", "function": function})
            case _:
                result.append(tool)
    return result


_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _read_call(item: dict[str, Any], kind: Any) -> dict[str, Any]:
    given = {"input": item.get("input")} if kind == "custom_tool_call" else item.get("arguments")
    function = {"name": _flat(item.get("namespace"), item.get("name")), "arguments": given}
    return {"id": item.get("call_id"), "function": function}
