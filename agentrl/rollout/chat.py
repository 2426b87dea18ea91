"""A policy behind any OpenAI-compatible chat server, for evaluation only.

The server templates and tokenises, so there are no ids and no log-probabilities to learn from;
the trajectory holds messages, in a row without tokens, and rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.errors import InferenceError
from agentrl.inference.base import request_seed
from agentrl.model.text.table import Dialect
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


@dataclass(slots=True, frozen=True)
class ChatPolicy:
    client: AsyncOpenAI
    model: str
    max_turn_tokens: int
    temperature: float | None
    """None leaves it to the server."""
    dialect: Dialect
    """Reads what the server leaves in the text; most read reasoning and calls themselves."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `SamplingParams`; what is not in it is the server's own."""

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
        import openai

        messages: Any = [_wire_message(message) for message in trajectory.messages]
        offered: Any = tools or openai.omit
        own = dict(self.sampling)
        seed = own.pop("seed", None)
        request_id = f"{trajectory.trajectory_id}-t{len(trajectory.turns):03d}"
        try:
            completion = await self.client.chat.completions.create(
                model=self.model,
                messages=messages,
                tools=offered,
                temperature=openai.omit if self.temperature is None else self.temperature,
                max_tokens=self.max_turn_tokens,
                top_p=own.pop("top_p", openai.omit),
                # Of a request alone, or all samples of a task would be the same.
                seed=openai.omit if seed is None else request_seed(seed, request_id),
                extra_body=own or None,
            )
        except openai.OpenAIError as error:
            raise InferenceError(f"{self.client.base_url}: {error}") from error
        choice = completion.choices[0]
        text = choice.message.content or ""
        # Not in OpenAI's own replies: vLLM's name for it, and the one of DeepSeek and SGLang.
        told = choice.message.model_extra or {}
        reasoning = told.get("reasoning") or told.get("reasoning_content") or ""
        # A server without a parser leaves reasoning and calls in the text.
        action, status = self.dialect.read_turn(text, tools, turn_id=len(trajectory.turns))
        if choice.message.tool_calls:
            action, status = _with_calls(action, choice.message.tool_calls)
        if isinstance(reasoning, str) and reasoning:
            action = replace(action, reasoning=reasoning)
        if completion.usage:  # there are no tokens here to count them by
            before = trajectory.info.get("prompt_tokens")
            read = completion.usage.prompt_tokens
            trajectory.info["prompt_tokens"] = read + (before if isinstance(before, int) else 0)
        said, turn_id = trajectory.branches[0].messages, len(trajectory.turns)
        said.append(assistant_message(action))
        trajectory.turns.append(
            Turn(
                branch=0,
                start=0,
                num_tokens=completion.usage.completion_tokens if completion.usage else 0,
                finish_reason="length" if choice.finish_reason == "length" else "stop",
                parse_status=status,
                message=len(said) - 1,
                parent=turn_id - 1 if turn_id else None,
            )
        )
        return action

    def reserve(self, num_episodes: int) -> None:
        """Does nothing: a server batches by itself."""

    def release(self, num_episodes: int = 1) -> None:
        """Does nothing: a server batches by itself."""

    async def aclose(self) -> None:
        await self.client.close()


def _with_calls(action: Action, calls: list[Any]) -> tuple[Action, ParseStatus]:
    parsed = []
    for index, call in enumerate(calls):
        try:
            arguments = msgspec.json.decode(call.function.arguments or "{}")
        except msgspec.DecodeError as error:
            arguments = error
        if not isinstance(arguments, dict):
            reason = f"tool call {index + 1}: arguments are not a JSON object ({arguments})"
            return replace(action, tool_calls=(), parse_error=reason), "malformed"
        parsed.append(ToolCall(id=call.id, name=call.function.name, arguments=arguments))
    return replace(action, tool_calls=tuple(parsed), parse_error=None), "tool_calls"


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
