"""A policy behind any OpenAI-compatible chat server, for evaluation only.

The server templates and tokenises, so there are no ids and no log-probabilities to learn from;
the trajectory holds messages, in a row without tokens, and rewards.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from agentrl.errors import InferenceError
from agentrl.inference.base import request_seed
from agentrl.model.text.table import Dialect
from agentrl.runtime import retry
from agentrl.types import (
    Action,
    Message,
    ParseStatus,
    TokenRow,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
    assistant_message,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI


logger = logging.getLogger(__name__)

RETRIED = {408, 409, 425, 429}
"""Statuses below 500 that may pass."""


@dataclass(slots=True)
class ChatPolicy:
    client: AsyncOpenAI
    """Does not retry by itself (`max_retries=0`)."""
    model: str
    max_turn_tokens: int
    dialect: Dialect
    """Reads what the server leaves in the text; most read reasoning and calls themselves."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams`; what is not in it is the server's own."""
    retry_for_s: float = 120.0
    """How long a request waits for a server that is down, busy or answers nonsense."""
    needs_usage: bool = False
    """An answer without token counts is an error: something limits the tokens."""
    _limit: str = "max_tokens"
    """The name of the limit of a turn, which is `max_completion_tokens` at some servers."""

    def read(
        self,
        trajectory: Trajectory,
        observation: list[Message],
        tools: list[ToolSpec],
        *,
        tools_changed: bool,
    ) -> bool:
        if not trajectory.branches:
            trajectory.branches.append(TokenRow())
        trajectory.branches[0].messages += observation
        return True

    async def act(self, trajectory: Trajectory, tools: list[ToolSpec]) -> Action:
        """Asks for a turn and appends it to the trajectory.

        Raises:
            InferenceError: the server refuses, or gave no answer within `retry_for_s`.
        """
        request_id = f"{trajectory.trajectory_id}-t{len(trajectory.turns):03d}"
        own = dict(self.sampling)
        seed = own.pop("seed", None)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_wire_message(message) for message in trajectory.messages],
            **({"tools": tools} if tools else {}),
            # Of a request alone, or all samples of a task would be the same.
            **({} if seed is None else {"seed": request_seed(seed, request_id)}),
            **own,
        }
        reply = await retry(
            lambda _: self._ask(body), timeout_s=self.retry_for_s, retry_after_s=_retry_after_s
        )
        # A server without a parser leaves reasoning and calls in the text.
        action, status = self.dialect.read_turn(reply.text, tools, turn_id=len(trajectory.turns))
        if reply.calls:
            action, status = _with_calls(action, reply.calls, len(trajectory.turns))
        if reply.reasoning:
            action = replace(action, reasoning=reply.reasoning)
        if reply.prompt_tokens:  # there are no tokens here to count them by
            before = trajectory.info.get("prompt_tokens")
            before = before if isinstance(before, int) else 0
            trajectory.info["prompt_tokens"] = reply.prompt_tokens + before
        said, turn_id = trajectory.branches[0].messages, len(trajectory.turns)
        said.append(assistant_message(action))
        trajectory.turns.append(
            Turn(
                branch=0,
                start=0,
                num_tokens=reply.sampled_tokens,
                finish_reason="length" if reply.cut else "stop",
                parse_status=status,
                message=len(said) - 1,
                parent=turn_id - 1 if turn_id else None,
            )
        )
        return action

    async def require_server(self) -> None:
        """Waits until a server answers anything, at most 10 s and `retry_for_s`: so no episode is
        played against none.

        Raises:
            InferenceError: nothing answers; names the URL.
        """
        import openai

        clock = asyncio.get_running_loop().time
        end = clock() + min(10.0, self.retry_for_s)
        while True:
            try:
                await self.client.get("/models", cast_to=httpx.Response, options={"timeout": 5.0})
            except openai.APIConnectionError as error:
                if clock() < end:
                    await asyncio.sleep(1.0)
                    continue
                said = f"no server answers ({error.__cause__ or error}); start it, or check the URL"
                raise _failure(self.client, said, error) from error
            except openai.OpenAIError:
                pass  # it answers; some have no list of models
            return

    async def _ask(self, body: dict[str, Any]) -> _Reply:
        import openai

        limited = {**body, self._limit: self.max_turn_tokens}
        try:
            answer = await self.client.post(
                "/chat/completions", body=limited, cast_to=httpx.Response
            )
        except openai.BadRequestError as error:
            if "max_completion_tokens" not in str(error) or self._limit != "max_tokens":
                raise _failure(self.client, str(error), error) from error
            self._limit = "max_completion_tokens"
            logger.warning("%s takes max_completion_tokens", self.client.base_url)
            return await self._ask(body)
        except openai.OpenAIError as error:
            raise _failure(self.client, str(error), error) from error
        try:
            reply = _read(answer.content)
        except _Nonsense as error:
            raise _failure(self.client, str(error), error) from error
        if self.needs_usage and not reply.sampled_tokens:
            raise InferenceError(
                f"{self.client.base_url}: the answers have no token counts (usage), so "
                "eval.max_total_tokens cannot be kept; leave it out"
            )
        return reply

    def reserve(self, num_episodes: int) -> None:
        """Does nothing: a server batches by itself."""

    def release(self, num_episodes: int = 1) -> None:
        """Does nothing: a server batches by itself."""

    async def aclose(self) -> None:
        await self.client.close()


class _Nonsense(Exception):
    """An answer with status 200 that holds no turn."""


@dataclass(slots=True, frozen=True)
class _Reply:
    text: str
    reasoning: str
    calls: list[Any]
    cut: bool
    prompt_tokens: int
    sampled_tokens: int


def _read(content: bytes) -> _Reply:
    """Reads the body of a completion."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise _Nonsense(f"the answer is not JSON: {content[:80]!r}") from None
    if not isinstance(body, dict):
        raise _Nonsense(f"the answer is {type(body).__name__}, not an object")
    if error := body.get("error"):
        raise _Nonsense(f"the answer is an error: {json.dumps(error)[:300]}")
    match body.get("choices"):
        case [{"message": dict(message)} as choice, *_]:
            pass
        case _:
            raise _Nonsense("the answer has no choice with a message")
    match choice.get("finish_reason"):
        case "error":
            raise _Nonsense("the answer ended by an error")
        case reason:
            pass
    calls = message.get("tool_calls") or []
    if function := message.get("function_call"):
        calls = [{"function": function}]
    texts, thoughts = _texts(message.get("content"))
    if message.get("content") is None and isinstance(message.get("refusal"), str):
        texts = message["refusal"]
    # Not in OpenAI's own replies: vLLM's name for it, and the one of DeepSeek and SGLang.
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return _Reply(
        text=_clean(texts),
        reasoning=_clean(reasoning if isinstance(reasoning, str) else thoughts),
        calls=calls if isinstance(calls, list) else [calls],
        cut=reason == "length",
        prompt_tokens=_count(usage.get("prompt_tokens")),
        sampled_tokens=_count(usage.get("completion_tokens")),
    )


def _texts(content: Any) -> tuple[str, str]:
    """Returns the text and the thoughts of a content, which some servers send in parts."""
    if isinstance(content, str):
        return content, ""
    texts, thoughts = [], []
    for part in content if isinstance(content, list) else ():
        match part:
            case {"type": "thinking", "thinking": inner}:
                thoughts.append(_texts(inner)[0])
            case {"text": str(text)}:
                texts.append(text)
            case _:
                pass
    return "".join(texts), "".join(thoughts)


def _clean(text: str) -> str:
    """Returns a text without lone surrogates, which no file and no server takes."""
    return text.encode("utf-8", "replace").decode()


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _failure(client: AsyncOpenAI, said: str, cause: Exception) -> InferenceError:
    error = InferenceError(f"{client.base_url}: {said[:500]}")
    error.__cause__ = cause
    return error


def _retry_after_s(error: Exception) -> float | None:
    """Returns the least pause that an error asks for; None: it is final."""
    import openai

    cause = error.__cause__
    if isinstance(cause, openai.APIConnectionError | _Nonsense):
        return 0.0
    if not isinstance(cause, openai.APIStatusError):
        return None
    if cause.code == "insufficient_quota" or (
        cause.status_code < 500 and cause.status_code not in RETRIED
    ):
        return None
    try:
        asked_s = float(cause.response.headers.get("retry-after", 0.0))
    except ValueError:  # a date
        return 1.0
    return max(0.0, asked_s) if math.isfinite(asked_s) else 0.0


def _with_calls(action: Action, calls: list[Any], turn_id: int) -> tuple[Action, ParseStatus]:
    """Returns the action with its calls, or with the reason why they cannot be read."""
    parsed: list[ToolCall] = []
    for index, call in enumerate(calls):
        try:
            name, arguments = _name_and_arguments(call)
        except ValueError as error:
            reason = f"tool call {index + 1}: {error}"
            return replace(action, tool_calls=(), parse_error=reason), "malformed"
        # A result names its call, so each needs an id of its own.
        given = call.get("id")
        is_new = isinstance(given, str) and given and all(each.id != given for each in parsed)
        call_id = str(given) if is_new else f"t{turn_id:04d}c{index:03d}"
        parsed.append(ToolCall(id=call_id, name=name, arguments=arguments))
    return replace(action, tool_calls=tuple(parsed), parse_error=None), "tool_calls"


def _name_and_arguments(call: Any) -> tuple[str, dict[str, Any]]:
    """Reads a call; raises ValueError for one that names no function or has no arguments."""
    match call:
        case {"function": {"name": str(name), **function}} if name:
            arguments = function.get("arguments") or {}
        case _:
            raise ValueError("no function with a name is called")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(_clean(arguments))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments are not a JSON object ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError("arguments are not a JSON object")
    return name, arguments


def _wire_message(message: Message) -> dict[str, Any]:
    """Returns the message with each call's arguments as a JSON string, as OpenAI's protocol wants
    them; templates want an object."""
    wire: dict[str, Any] = dict(message)
    if "tool_calls" in message:
        wire["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": msgspec.json.encode(call["function"]["arguments"]).decode(),
                },
            }
            for call in wire["tool_calls"]
        ]
    return wire
