"""Shows how an agent's calls would be recorded, for `agentrl doctor RUN.toml --play N`.

The agent plays scripted episodes against the real endpoint: no model samples, a script gives the
policy's turns. An agent that sends back the messages it got makes one row of tokens per dialogue;
each further row is explained by the first message that came back changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from logging.handlers import BufferingHandler
from typing import Any

from pydantic import BaseModel

from agentrl.cli.doctor_servers import Finding
from agentrl.config import AgentSection, RunConfig
from agentrl.env import Environment, Task
from agentrl.env.client import connect
from agentrl.inference.base import Generation
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.recorder import identity
from agentrl.rollout.agent.runner import Agents, make_agents
from agentrl.rollout.driver import Episode, Limits, play_agent
from agentrl.rollout.policy import Prompt, TokenPolicy, num_equal
from agentrl.types import Message, ShownImage, ToolSpec, Trajectory

PROMPT = "What is 6 times 7?"
ANSWER = "The answer is 42."
_LAST = (ANSWER, "", 0)
SCRIPTS: dict[str, Sequence[tuple[str, str, int]]] = {
    "answers at once": (_LAST,),
    "calls a tool three times": (
        ("Let me look.", "First I look.", 1),
        ("", "", 1),
        ("  Once more: \n", "", 1),
        _LAST,
    ),
    "calls two tools at once": (("Both.", "Two at once.", 2), ("", "", 2), _LAST),
}
"""The policy's turns in a dialogue: text, reasoning, and number of calls. If the agent offers no
tools, the policy answers."""
SECONDS = 120.0
"""Longest time of a scripted episode."""
SHOWN_CHARS = 30
_FIRST_MESSAGES = (
    "keep the messages in front of the first turn as they are: a time or an id in them makes each "
    "call a row of its own, which costs its whole prompt"
)
ADVICE = {
    "system": _FIRST_MESSAGES,
    "user": _FIRST_MESSAGES,
    "assistant": "send the policy's messages back as they came",
    "tool": "send a tool's answer in the same words in every call",
}
"""What to change, by the role of the message that came back changed."""


class OneTask(Environment):
    """An environment with the check's prompt as its only task; no answer has a reward."""

    class Config(BaseModel):
        prompt: str

    def splits(self):
        return {"check": 1}

    def get(self, split: str, index: int) -> Task:
        return Task("check", self.config.prompt)

    async def on_text(self, text: str) -> None:
        self.finish(reward=0.0, info={"answer": text})


@dataclass(slots=True)
class Played:
    """The result of one script."""

    script: str
    trajectory: Trajectory
    notes: list[str]
    """The endpoint's log: refusals, tools left out, parameters that are not used."""
    new_rows: dict[str, str]
    """Why each row but those of the first call and of sub-agents began, and what to change."""
    num_dialogues: int

    @property
    def is_clean(self) -> bool:
        refused = self.trajectory.info.get("refused_calls")
        return self.trajectory.error is None and not self.new_rows and not refused

    @property
    def answer(self) -> Any:
        """The agent's answer, if it came so far."""
        return self.trajectory.info.get("answer")


@dataclass(slots=True, frozen=True)
class _Scripted(TokenPolicy):
    """A policy whose turns are those of a script; it has no engine."""

    turns: Sequence[tuple[str, str, int]] = ()
    asked: dict[bytes, tuple[list[Message], list[ToolSpec], bool]] = field(default_factory=dict)
    """By the prompt's ids: its messages, the tools, and whether those are others than before."""

    def prompt(
        self,
        trajectory: Trajectory,
        parent: int | None,
        observation: list[Message],
        tools: list[ToolSpec],
        *,
        tools_changed: bool = False,
    ) -> Prompt:
        # Named: a class with slots is made anew, so `super()` alone finds the one before.
        prompt = TokenPolicy.prompt(
            self, trajectory, parent, observation, tools, tools_changed=tools_changed
        )
        self.asked[_key(prompt.token_ids)] = (prompt.messages, tools, tools_changed)
        return prompt

    async def sample(
        self, request_id: str, prompt_ids: list[int], images: Sequence[ShownImage] = ()
    ) -> Generation:
        messages, tools, _ = self.asked[_key(prompt_ids)]
        taken = sum(message["role"] == "assistant" for message in messages)
        text, reasoning, num_calls = self.turns[min(taken, len(self.turns) - 1)]
        if num_calls and not tools:
            text, reasoning, num_calls = _LAST
        message: Message = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning"] = reasoning
        if num_calls:
            message["tool_calls"] = [
                _call(tools[number % len(tools)], f"call{taken:03d}{number:02d}")
                for number in range(num_calls)
            ]
        ids = self.renderer.assistant_turn(message)[: self.max_turn_tokens]
        stopped = ids[-1] in self.renderer.stop_token_ids
        return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop" if stopped else "length")


async def check(
    agents: Agents, renderer: Renderer, *, prompt: str, timeout_s: float
) -> list[Played]:
    """Plays every script, one after the other."""
    log, logger = BufferingHandler(1 << 20), logging.getLogger("agentrl.rollout")
    logger.addHandler(log)
    propagates, logger.propagate = logger.propagate, False
    env, id_ = connect(), f"{__name__}:OneTask"
    limits = Limits(64, timeout_s, timeout_s, timeout_s)
    no_engine: Any = None
    played = []
    try:
        await agents.start()
        for number, (name, turns) in enumerate(SCRIPTS.items()):
            episode = Episode(f"check-{number}", "check", id_, "check", 0, 0, {"prompt": prompt})
            policy = _Scripted(no_engine, renderer, 4096, 1 << 20, turns=turns)
            ended: list[Trajectory] = []
            await play_agent(episode, agents, policy, env, limits, ended.append)
            notes = [record.getMessage() for record in log.buffer]
            log.flush()  # empties it
            played.append(Played(name, ended[0], notes, *explained(ended[0], policy)))
    finally:
        logger.removeHandler(log)
        logger.propagate = propagates
        await agents.aclose()
        await env.aclose()
    return played


def explained(trajectory: Trajectory, policy: _Scripted) -> tuple[dict[str, str], int]:
    """Returns why rows began that should not have, with what to change, and the number of
    dialogues."""
    reasons, num_dialogues = {}, 0
    begun: set[int] = set()
    histories: list[list[Message]] = []
    for number, turn in enumerate(trajectory.turns):
        row = trajectory.branches[turn.branch]
        messages = row.messages[: turn.message]
        if turn.branch not in begun:
            begun.add(turn.branch)
            _, _, tools_changed = policy.asked[_key(row.token_ids[: turn.start])]
            why, advice = None, ""
            if turn.parent is not None and tools_changed:
                why = "its tools differ from the previous call's, or their order does"
                advice = "offer the same tools in the same order in every call of a dialogue"
            elif turn.parent is not None and turn.parent < number - 1:
                why = f"it goes on behind call {turn.parent + 1} a second time"
            elif turn.parent is not None:
                why = "the chat template writes earlier turns otherwise"
            elif histories:
                why, advice = _first_difference(messages, histories)
            if why is None:
                num_dialogues += 1
            else:
                reasons[f"call {number + 1} begins a new row: {why}"] = advice
        histories.append(row.messages[: turn.message + 1])
    return reasons, num_dialogues


def _first_difference(
    messages: list[Message], histories: list[list[Message]]
) -> tuple[str | None, str]:
    """Returns where a history departs from the most similar one before it, None if it is another
    dialogue; and what to change."""
    known = [identity(message) for message in messages]

    def num_common(history: list[Message]) -> int:
        return num_equal(known, [identity(message) for message in history])

    before = max(histories, key=num_common)
    at = num_common(before)
    if not any(message["role"] == "assistant" for message in messages):
        return ("it asks for its first turn again" if at == len(messages) else None), ""
    if at == len(messages):
        retried = "a turn that is asked for again is a row of its own: retry less"
        return f"it sends only the first {at} messages of an earlier history", retried
    if at == len(before):
        return f"behind message {at - 1} it goes on after a turn that was not the newest", ""
    sent, had = messages[at], before[at]
    texts = [str(identity(each)[1]) for each in (had, sent)]
    if at == 0 and SequenceMatcher(None, *texts, autojunk=False).quick_ratio() < 0.9:
        return None, ""
    where, advice = f"message {at} ({had['role']})", ADVICE.get(had["role"], "")
    if sent["role"] != had["role"]:
        return f"{where} came back as one of {sent['role']}", advice
    if texts[0] != texts[1]:
        return f"{where} came back with another text: {_shown(*texts)}", advice
    calls = [str(identity(each)[2]) for each in (had, sent)]
    return f"{where} came back with other calls: {_shown(*calls)}", advice


def _shown(had: str, sent: str) -> str:
    at = num_equal(had, sent)
    window = slice(max(0, at - SHOWN_CHARS // 2), at + SHOWN_CHARS)
    return f"{had[window]!r} is {sent[window]!r} at character {at}"


def report(played: Sequence[Played], section: AgentSection) -> str:
    """Returns the lines to show."""
    lines = []
    for each in played:
        trajectory = each.trajectory
        calls, rows = len(trajectory.turns), len(trajectory.branches)
        lines.append(f"{each.script}: {calls} calls, {rows} rows, {each.num_dialogues} dialogues")
        lines += [f"  {line}" for line in each.new_rows]
        if trajectory.error is not None:
            lines.append(f"  it failed: {trajectory.error.message}")
        refused: Any = trajectory.info.get("refused_calls", {})
        lines += [f"  refused {count} times: {told}" for told, count in refused.items()]
        served: Any = trajectory.info.get("served_turns")
        if served:
            lines.append(f"  served and not trained: {len(served)} calls")
        if each.answer is not None:
            lines.append(f"  it answers {str(each.answer)[:60]!r}")
    notes = dict.fromkeys(note for each in played for note in each.notes)
    advice = dict.fromkeys(_advice(played, section))
    if notes:
        lines += ["", "The endpoint's log:", *(f"  {note}" for note in notes)]
    if advice:
        lines += ["", "What to set or change:", *(f"  {each}" for each in advice)]
    return "\n".join(lines)


def _advice(played: Sequence[Played], section: AgentSection) -> Iterator[str]:
    for each in played:
        trajectory = each.trajectory
        yield from filter(None, each.new_rows.values())
        if trajectory.info.get("served_turns"):
            yield "to train calls that are served, give them a rule in [[agent.roles]]"
        graded_line = bool(section.command) and section.answer == "last_line"
        if graded_line and trajectory.error is None and each.answer != ANSWER:
            yield (
                "the last line that the command prints is not what the policy said: set "
                'agent.answer = "policy"'
            )
        if any("is left out" in note for note in each.notes):
            yield (
                "switch off the tools that are left out, or give the agent functions in their place"
            )
        if trajectory.error is not None and not trajectory.turns:
            yield (
                "the agent has to call the URL and the key that it is given (OPENAI_BASE_URL, "
                "OPENAI_API_KEY; {base_url} and {api_key} in a command)"
            )
    rows = [row for each in played for row in each.trajectory.branches]
    if played and not any(m.get("tool_calls") for row in rows for m in row.messages):
        yield (
            "no call of a tool came back: the agent offers none, so what it does beyond text was "
            "not tried"
        )


def _call(tool: ToolSpec, call_id: str) -> Any:
    function: Any = tool["function"]
    schemas = function.get("parameters", {}).get("properties") or {}
    arguments = {name: _value(schema) for name, schema in schemas.items()}
    told = {"name": function["name"], "arguments": arguments}
    return {"id": call_id, "type": "function", "function": told}


def _value(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return "x"
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    known = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    return known.get(str(schema.get("type")), "x")


def _key(ids: list[int]) -> bytes:
    return repr(ids).encode()


def agent_findings(config: RunConfig) -> Iterator[Finding]:
    """Lets the run's agent play the scripts. Its tools are called, with made-up arguments.

    Raises:
        ConfigError: the agent, or the model's tokenizer, cannot be found.
    """
    from agentrl.rollout.setup import load_renderer  # takes seconds

    renderer = load_renderer(config, config.model.path)
    agents = make_agents(config.agent, max_concurrent=1)
    timeout_s = min(config.rollout.episode_timeout_s, SECONDS)
    played = asyncio.run(check(agents, renderer, prompt=PROMPT, timeout_s=timeout_s))
    clean = all(each.is_clean for each in played)
    said = "one row per dialogue, nothing refused" if clean else "its calls become further rows"
    yield "ok" if clean else "fix", "agent", f"{said}\n{report(played, config.agent)}"
