"""One episode of an agent: which row each of its calls continues.

An agent sends its whole history with every call, in its own words: without reasoning, with other
spaces in the JSON of a call, with None for an empty text. **A message that is sent again is
identified, never tokenised**: what is known by role, text, names and parsed arguments of calls is
the message that was sampled, and its ids are those in the row.

The longest known beginning of a history ends with a sampled turn. The call continues there:

    end of the row      the row goes on
    further back        a new row branches off; what it shares with the other is context
    other tools, or a   a new row, rendered whole; as the driver does where a template rewrites
    rewritten past      the past
    nothing is known    a dialogue of its own begins

So every sampled token stands in one row with mask 1, the one that it was sampled in. Assistant
messages that were not sampled here are context like any other.

Two parallel sub-agents below a planner, and a history that was compacted at the end:

    row 0   task  [plan]  ...results...  [answer]
    row 1   sub-task A  [turn]  tool  [turn]          begins a dialogue
    row 2   sub-task B  [turn]                        begins a dialogue
    row 3   summary of all that  [turn]               begins a dialogue
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from agentrl.images import content_text
from agentrl.inference.base import Generation
from agentrl.rollout.policy import Prompt, TokenPolicy
from agentrl.types import Action, Message, ToolSpec, Trajectory

_encode = msgspec.json.Encoder(order="sorted").encode
_THOUGHT = re.compile(r"^\s*<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)


@dataclass(slots=True, frozen=True)
class Place:
    """The place in the trajectory at which a call continues."""

    prompt: Prompt
    tools: list[ToolSpec]
    digest: bytes
    """Digest of the history."""
    tools_key: bytes
    request_id: str
    """A function of the history, and of how often it was asked to go on: a run that is repeated
    gives the same ids, in whatever order parallel calls arrive."""


class Recorder:
    """The rows of one episode, which may branch."""

    def __init__(self, trajectory: Trajectory, policy: TokenPolicy) -> None:
        self.trajectory, self.policy = trajectory, policy
        self._ends: dict[bytes, list[int]] = defaultdict(list)
        """Turns by the digest of the history that they end."""
        self._begins: dict[bytes, list[int]] = defaultdict(list)
        """Turns that call tools, by the digest of the history before them."""
        self._retold: dict[bytes, bytes] = {}
        """Digest of a history that ends with a sampled turn in other words -> in its own."""
        self._tools: list[bytes] = []
        """Digest of the tools that each turn was offered."""
        self._taken: set[str] = set()
        """Ids of requests that were answered or are under way."""

    def place(self, messages: Sequence[Message], tools: list[ToolSpec]) -> Place:
        """Finds the row that the history continues. Writes nothing.

        Raises:
            jinja2.TemplateError: the chat template does not render these messages.
        """
        tools_key = _digest(b"", tools)
        messages, digests = self._as_sampled(messages)
        known, parent, tools_changed = 0, None, False
        for number in range(len(messages), 0, -1):
            turns = self._ends.get(digests[number - 1], [])
            same = [turn for turn in turns if self._tools[turn] == tools_key]
            if same:
                known, parent = number, self._choose(same, messages[number - 1])
                tools_changed = False
                break
            if turns and parent is None:
                known, parent = number, self._choose(turns, messages[number - 1])
                tools_changed = True
        prompt = self.policy.prompt(
            self.trajectory, parent, list(messages[known:]), tools, tools_changed=tools_changed
        )
        digest = digests[-1] if digests else b""
        return Place(prompt, tools, digest, tools_key, self._request_id(digest + tools_key))

    def take(self, place: Place) -> None:
        """Reserves the request id of a place, so that no other call gets it."""
        self._taken.add(place.request_id)

    def give_back(self, place: Place) -> None:
        """Releases the request id of a failed request, so that the same request sent again samples
        the same turn."""
        self._taken.discard(place.request_id)

    def write(self, place: Place, generation: Generation, stop: Sequence[str] = ()) -> Action:
        """Appends the turn and returns the action that it holds.

        Args:
            stop: the agent's own stop strings; its answer ends before the first.
        """
        turn_id = len(self.trajectory.turns)
        action = self.policy.write(self.trajectory, place.prompt, generation, place.tools)
        turn = self.trajectory.turns[turn_id]
        said = self.trajectory.branches[turn.branch].messages[turn.message]
        digest = _digest(place.digest, identity(said))
        self._ends[digest].append(turn_id)
        self._tools.append(place.tools_key)
        if _calls(said):
            self._begins[place.digest].append(turn_id)
            # Some frameworks drop the text beside a call.
            self._retold[_digest(place.digest, _without_text(said))] = digest
        ends = [end for each in stop if (end := action.text.find(each)) >= 0]
        if ends:
            action = replace(action, text=action.text[: min(ends)])
            told: Message = {**said, "content": action.text}
            self._retold[_digest(place.digest, identity(told))] = digest
        return action

    def _as_sampled(self, messages: Sequence[Message]) -> tuple[list[Message], list[bytes]]:
        """Replaces messages that were sampled here by the sampled ones, and returns with them the
        digest of the history up to each."""
        found: list[Message] = []
        digests: list[bytes] = []
        digest, at = b"", 0
        while at < len(messages):
            block, num_read = [messages[at]], 1
            if _calls(messages[at]):
                turns = self._begins.get(digest, ())
                gathered = (self._gathered(turn, messages, at) for turn in turns)
                block, num_read = next(filter(None, gathered), (block, num_read))
            at += num_read
            for message in block:
                after = _digest(digest, identity(message))
                if after not in self._ends and _calls(message) and not message["content"]:
                    after = self._retold.get(_digest(digest, _without_text(message)), after)
                digest = self._retold.get(after, after)
                found.append(message)
                digests.append(digest)
        return found, digests

    def _gathered(
        self, turn_id: int, messages: Sequence[Message], at: int
    ) -> tuple[list[Message], int] | None:
        """Merges a turn's parallel calls and their answers, which the agent may send in pieces and
        in any order, into one message and its answers in the order of the calls.

        Args:
            at: position of the first call.

        Returns:
            The merged messages and how many messages they replace; None if the calls are not
            this turn's.
        """
        turn = self.trajectory.turns[turn_id]
        ids = _call_ids(self.trajectory.branches[turn.branch].messages[turn.message])
        if len(ids) < 2 or len(ids) != len(set(ids)):
            return None
        calls: dict[str, Any] = {}
        answers: dict[Any, Message] = {}
        texts: list[str] = []
        num_read = 0
        for message in messages[at:]:
            called = _call_ids(message) if message["role"] == "assistant" else []
            answered = message.get("tool_call_id") if message["role"] == "tool" else None
            if called and all(each in ids and each not in calls for each in called):
                calls |= zip(called, _calls(message), strict=True)
                texts.append(content_text(message["content"]))
            elif answered in calls and answered not in answers:
                answers[answered] = message
            else:
                break
            num_read += 1
        if calls.keys() != set(ids):
            return None
        whole: Message = {**messages[at], "content": "".join(texts)}
        whole["tool_calls"] = [calls[each] for each in ids]
        return [whole, *(answers[each] for each in ids if each in answers)], num_read

    def _choose(self, turns: list[int], said: Message) -> int:
        """Chooses among turns with the same text after the same history: the one whose calls have
        these ids and whose row can be continued."""

        def fits(turn_id: int) -> tuple[bool, bool]:
            turn = self.trajectory.turns[turn_id]
            row = self.trajectory.branches[turn.branch]
            own = row.messages[turn.message]
            return _call_ids(own) == _call_ids(said), turn.start + turn.num_tokens == len(row)

        return max(turns, key=fits)

    def _request_id(self, key: bytes) -> str:
        name = hashlib.blake2b(key, digest_size=6).hexdigest()
        sibling = 0
        while (request_id := f"{self.trajectory.trajectory_id}-{name}-{sibling}") in self._taken:
            sibling += 1
        return request_id


def identity(message: Message) -> Any:
    """Returns a value that is equal for messages that count as the same one.

    Reasoning, call ids and unknown keys make no difference.
    """
    role, text = message["role"], message["content"] or ""
    if role != "assistant":
        return role, text
    calls = [
        (call["function"]["name"], _plain(call["function"]["arguments"]))
        for call in _calls(message)
    ]
    # Some frameworks send thoughts back within the text.
    return role, _THOUGHT.sub("", content_text(text)).strip(), calls


def _without_text(message: Message) -> Any:
    """Returns the identity of a message that calls tools, with call ids and without its text."""
    role, _, calls = identity(message)
    return role, _call_ids(message), calls


def _plain(value: Any) -> Any:
    """Turns 1.0 into 1, because JavaScript writes both alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _calls(message: Message) -> list[Any]:
    return message.get("tool_calls") or []


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in _calls(message)]


def _digest(before: bytes, what: Any) -> bytes:
    return hashlib.blake2b(before + _encode(what), digest_size=16).digest()
