"""Checks that the reference answer scores 1, that wrong ones do not, and that it stays secret."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentrl.env.check.episodes import NO_OP, UNKNOWN_TOOL
from agentrl.env.check.subject import (
    MAX_TURNS,
    CheckFailed,
    CheckSkipped,
    Event,
    Subject,
    place,
    short,
)
from agentrl.env.protocol import TaskSpec
from agentrl.env.tools import rewards_of
from agentrl.env.transport import Transport
from agentrl.types import JSON, Action


async def check_canary(subject: Subject) -> str:
    """The reference answer never reaches the agent, whatever it tries."""
    num_texts = 0
    subject.local()
    async with subject.transport() as transport:
        for seed, spec in enumerate(subject.specs(8 if subject.thorough else 3)):
            task = await subject.task(spec)
            actions = await subject.moves(spec, seed)
            tries = [actions, [Action(text="42")], [UNKNOWN_TOOL] * 2, [NO_OP] * 2]
            # A made-up reference cannot occur by chance, so it can be searched for even if the
            # task's own is too short or common. Episodes with it fail in an environment that looks
            # something up by the reference; then only the task's own is tried.
            made_up = replace(task, reference=_mapped(task.reference, _made_up))
            if _fails(await subject.play(transport, TaskSpec(inline=made_up), seed, actions)):
                made_up = task
            for each in (task, made_up):
                needles = _needles(each.reference, each.prompt)
                for attempt in tries if needles else ():
                    events = await subject.play(transport, TaskSpec(inline=each), seed, attempt)
                    _search(needles, attempt, events, place(spec))
                    num_texts += len(events)
    if not num_texts:
        raise CheckSkipped("the references are too short or common to be searched for")
    return f"{num_texts} texts"


def _search(needles: list[str], actions: list[Action], events: list[Event], where: str) -> None:
    """Searches for a reference in all that the agent is shown but did not say itself."""
    said = [
        _plain(each.text + json.dumps([call.arguments for call in each.tool_calls]))
        for each in actions
    ]
    for event in events:
        shown = event.get("detail") or json.dumps(
            [event["observation"], event.get("tools")], ensure_ascii=False
        )
        for needle in needles:
            if needle in _plain(shown) and not any(needle in each for each in said):
                raise CheckFailed(
                    f"{where}: the agent is shown the reference {short(needle)} in "
                    f"{short(shown[max(shown.find(needle) - 60, 0) :])}",
                    "leave the reference out of prompts, observations, tool specifications and "
                    "error messages",
                )


def _plain(text: str) -> str:
    return re.sub(r"[\s,_*`|]", "", text).casefold()


def _fails(events: list[Event]) -> bool:
    last: Any = events[-1]
    return "error" in last or last.get("metrics", {}).get("tool_errors", 0.0) > 0


def _leaves(value: JSON) -> list[str | int | float]:
    """Returns the texts and numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [] if isinstance(value, bool) or value is None else [value]


def _mapped(value: JSON, change: Callable[[Any], JSON]) -> JSON:
    """Returns a JSON value with each text and number in it replaced by what `change` returns."""
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return value if isinstance(value, bool) or value is None else change(value)


def _made_up(value: str | int | float) -> JSON:
    """Returns a value of the same type that cannot occur by chance."""
    if isinstance(value, str):
        return "canary-7391b2f4"
    return 7391246085 if isinstance(value, int) else 7391246085.25


def _needles(reference: JSON, prompt: object) -> list[str]:
    """Returns the texts and numbers in a reference that can be searched for: those that are too
    long to occur by chance and are not in the prompt."""
    needles = [_plain(str(leaf)) for leaf in _leaves(reference)]
    return [each for each in needles if len(each) >= 8 and each not in _plain(str(prompt))]


async def check_oracle(subject: Subject) -> str:
    """The oracle's actions score 1; doing nothing and giving wrong answers do not."""
    subject.local()
    num_gold, num_wrong = 0, 0
    async with subject.transport() as transport:
        for seed, spec in enumerate(subject.specs(200 if subject.thorough else 8)):
            actions = await subject.gold(spec, seed)
            if not actions:
                continue
            task = await subject.task(spec)
            gold, failure = await _score(subject, transport, spec, seed, actions)
            if gold < 1.0 - 1e-6:
                raise CheckFailed(
                    f"{place(spec)}: the oracle's {len(actions)} actions score "
                    f"{f'{gold:g}, not 1' if failure is None else f'nothing: {failure}'}",
                    "correct the grader, the reference or oracle()",
                    cause=failure,
                )
            nothing, _ = await _score(subject, transport, spec, seed, [NO_OP] * MAX_TURNS)
            if nothing >= 1.0 - 1e-6:
                raise CheckFailed(
                    f"{place(spec)}: an agent that says nothing scores {nothing:g}",
                    "the grader must not reward an empty answer",
                )
            answer = _answer(task.reference, actions)
            guesses = {wrong: _said_instead(actions, answer, wrong) for wrong in _wrong(answer)}
            scores = {
                wrong: (await _score(subject, transport, spec, seed, guess))[0]
                for wrong, guess in guesses.items()
                if guess is not None
            }
            if scores and min(scores.values()) >= 1.0 - 1e-6:
                raise CheckFailed(
                    f"{place(spec)}: the wrong answers {', '.join(scores)} score 1 each",
                    "the grader must compare the answer with task.reference",
                )
            num_gold += 1
            num_wrong += len(scores)
    if not num_gold:
        raise CheckSkipped("the environment has no oracle(self) that returns the right actions")
    return f"right and empty answers to {num_gold} tasks, and {num_wrong} wrong answers"


def _answer(reference: JSON, gold: list[Action]) -> str:
    """Returns the longest value in the reference that the oracle's actions contain, as text; empty
    if they contain none."""
    said = [
        leaf
        for leaf in map(str, _leaves(reference))
        if any(_said_instead(gold, leaf, wrong) for wrong in (_OTHER, "7", "8"))
    ]
    return max(said, key=len, default="")


_OTHER = "qzx"
"""A wrong answer in letters."""


def _wrong(answer: str) -> list[str]:
    if not answer:
        return []
    try:
        number = float(answer.replace(",", ""))
    except ValueError:
        return [f"not {answer[::-1]} at all", _OTHER, "8675309"]
    return [f"{number * 3 + 17:g}", f"{-number - 5:g}", "0" if number else "1"]


def _said_instead(gold: list[Action], answer: str, wrong: str) -> list[Action] | None:
    """Returns the actions with another answer; None if they do not contain the right one, or the
    other has no place in them, as letters have none in a number."""

    def swapped(value: Any) -> JSON:
        if isinstance(value, str):
            return value.replace(answer, wrong)
        return type(value)(float(wrong)) if str(value) == answer else value

    try:
        actions = [
            Action(
                each.text.replace(answer, wrong),
                tuple(
                    replace(call, arguments=_mapped(call.arguments, swapped))
                    for call in each.tool_calls
                ),
                each.parse_error,
            )
            for each in gold
        ]
    except ValueError:
        return None
    return None if actions == gold else actions


async def _score(
    subject: Subject, transport: Transport, spec: TaskSpec, seed: int, actions: list[Action]
) -> tuple[float, str | None]:
    """Plays an episode and returns (score, None), or (0, the error) if the episode failed.

    The score is the sum of the rewards without the components of negative weight.
    """
    events = await subject.play(transport, spec, seed, actions)
    if "error" in events[-1]:
        return 0.0, events[-1]["detail"]
    score = sum(event.get("reward", 0.0) for event in events)
    for name, mark in rewards_of(subject.local()).items():
        if mark.weight < 0:
            score -= mark.weight * events[-1]["reward_components"].get(name, 0.0)
    return score, None
