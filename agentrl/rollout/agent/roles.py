"""Decides which of an agent's calls are trained, and which the policy merely serves.

A rule of the run file decides, the first that matches. Without one, a call is served where it has
no tools and a system prompt that no call with tools has: agents ask so for titles and summaries,
which the task's reward says nothing about. In an episode without any tools every call is trained.

The tokens of a served call stay in their row as context, and its turn in the trajectory; only its
loss mask is 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.config import AgentRole
from agentrl.images import content_text
from agentrl.rollout.agent.recorder import Recorder
from agentrl.rollout.agent.tools import MAX_NOTED_CHARS
from agentrl.rollout.agent.wire import Answer, Call
from agentrl.rollout.chat import ChatPolicy
from agentrl.types import Trajectory

if TYPE_CHECKING:
    from openai import AsyncOpenAI


RETRY_S = 10.0
"""How long a call is tried again at another server; the agent waits meanwhile."""


@dataclass(slots=True, frozen=True)
class Asked:
    """The parts of a turn's call that its role depends on."""

    role: str | None
    """What a rule says; None where none matched."""
    system: str
    has_tools: bool
    rule: AgentRole | None = None


def asked_by(call: Call, headers: Mapping[str, str], rules: Sequence[AgentRole]) -> Asked:
    system = system_of(call)
    if not rules:
        return Asked(None, system, bool(call.tools))
    lines = "\n".join(f"{name}: {value}" for name, value in headers.items())
    texts = {"model": call.model, "system": system, "header": lines}
    for rule in rules:
        patterns = {name: getattr(rule, name) for name in texts}
        if all(
            pattern is None or re.search(pattern, texts[name], re.IGNORECASE | re.MULTILINE)
            for name, pattern in patterns.items()
        ):
            return Asked(rule.role, system, bool(call.tools), rule)
    return Asked(None, system, bool(call.tools))


def system_of(call: Call) -> str:
    """Returns the system prompt: the system messages before all others."""
    texts = []
    for message in call.messages:
        if message["role"] != "system":
            break
        texts.append(content_text(message["content"]))
    return "\n\n".join(texts)


class OtherServers:
    """The servers that rules name; they answer calls in place of the policy."""

    def __init__(self) -> None:
        self._clients: dict[str, AsyncOpenAI] = {}

    async def answer(self, call: Call, rule: AgentRole, recorder: Recorder) -> Answer:
        """Has another server answer the call.

        Raises:
            InferenceError: the server cannot be reached, or refuses.
        """
        url, policy = rule.url or "", recorder.policy
        if url not in self._clients:
            from openai import AsyncOpenAI

            key = os.environ.get(rule.api_key_variable, "none")
            self._clients[url] = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        own = policy.max_turn_tokens
        chat = ChatPolicy(
            client=self._clients[url],
            model=rule.served_model or call.model,
            max_turn_tokens=min(own, call.max_tokens or own),
            dialect=policy.renderer.dialect,
            retry_for_s=RETRY_S,
        )
        info = recorder.trajectory.info
        told: Any = info.setdefault("served_elsewhere", [])
        name = f"{recorder.trajectory.trajectory_id}-other-{len(told)}"
        noted = {"url": url, "model": chat.model, "text": ""}
        told.append(noted)
        dialogue = Trajectory(name, "", "", "", 0)
        chat.read(dialogue, call.messages, call.tools, tools_changed=False)
        action = await chat.act(dialogue, call.tools)
        (turn,) = dialogue.turns
        noted["text"] = action.text[:MAX_NOTED_CHARS]
        cut = turn.finish_reason == "length"
        return Answer(name, action, cut, prompt_tokens=0, sampled_tokens=turn.num_tokens)

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.close()


def served_turns(asked: Sequence[Asked]) -> list[int]:
    """Returns the positions of the turns of an episode that are not trained."""
    working = {each.system for each in asked if each.has_tools}
    return [
        turn
        for turn, each in enumerate(asked)
        if each.role == "served"
        or (each.role is None and working and not each.has_tools and each.system not in working)
    ]


def leave_untrained(trajectory: Trajectory, turns: Sequence[int]) -> None:
    """Sets the loss mask of the tokens sampled in these turns to 0, which makes them context."""
    for turn_id in turns:
        turn = trajectory.turns[turn_id]
        row, end = trajectory.branches[turn.branch], turn.start + turn.num_tokens
        if row.kept_ids:
            first = sum(row.loss_mask[: turn.start])
            del row.kept_ids[first : first + turn.num_tokens]
        row.loss_mask[turn.start : end] = [0] * turn.num_tokens
        row.rollout_logprobs[turn.start : end] = [0.0] * turn.num_tokens
        row.policy_versions[turn.start : end] = [-1] * turn.num_tokens
    if turns:
        trajectory.info["served_turns"] = list(turns)
