"""Checks that the reference answer scores 1, that wrong ones do not, and that it stays secret."""

from __future__ import annotations

import dataclasses
import json
import re
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
from agentrl.types import JSON, Action, Task, ToolCall


async def check_canary(subject: Subject) -> str:
    """The reference answer never reaches the agent, whatever it tries."""
    num_texts, num_replaced = 0, 0
    subject.local()
    async with subject.transport() as transport:
        for seed, spec in enumerate(subject.specs(8 if subject.thorough else 3)):
            task = await subject.task(spec)
            actions = await subject.moves(spec, seed)
            tries = [actions, [Action(text="42")], [UNKNOWN_TOOL] * 2, [NO_OP] * 2]
            num_texts += await _look_for_reference(subject, transport, spec, seed, task, tries)
            # A made-up reference cannot occur by chance, so it can be searched for even if the
            # task's own is too short or common. Episodes with it fail in an environment that looks
            # something up by the reference; then only the task's own is tried.
            replaced = dataclasses.replace(task, reference=_canary(task.reference))
            if replaced.reference is not None and not _fails(
                await subject.play(transport, TaskSpec(inline=replaced), seed, actions)
            ):
                num = await _look_for_reference(subject, transport, spec, seed, replaced, tries)
                num_replaced += num
    if not num_texts + num_replaced:
        raise CheckSkipped("the references are too short or common to be searched for")
    return f"{num_texts + num_replaced} texts, {num_replaced} of them with a made-up reference"


async def _look_for_reference(
    subject: Subject,
    transport: Transport,
    spec: TaskSpec,
    seed: int,
    task: Task,
    tries: list[list[Action]],
) -> int:
    """Plays a task and searches for its reference in everything that the agent is shown.

    Args:
        tries: the actions of each episode to play.

    Returns:
        The number of texts searched; 0 if the reference cannot be searched for.

    Raises:
        CheckFailed: the reference was found.
    """
    needles = _needles(task.reference, task.prompt)
    if not needles:
        return 0
    num_texts = 0
    for actions in tries:
        own_words = [_plain(_said(action)) for action in actions]
        for event in await subject.play(transport, TaskSpec(inline=task), seed, actions):
            num_texts += 1
            shown = event.get("detail") or json.dumps(
                [event["observation"], event.get("tools")], ensure_ascii=False
            )
            for needle in needles:
                if needle in _plain(shown) and not any(needle in each for each in own_words):
                    raise CheckFailed(
                        f"{place(spec)}: the agent is shown the reference {short(needle)} in "
                        f"{short(shown[max(shown.find(needle) - 60, 0) :])}",
                        "leave the reference out of prompts, observations, tool "
                        "specifications and error messages",
                    )
    return num_texts


def _said(action: Action) -> str:
    """Returns the text and the tool arguments of an action as one text."""
    return action.text + json.dumps([call.arguments for call in action.tool_calls])


def _plain(text: str) -> str:
    """Returns the text in lower case, without whitespace and separators."""
    return re.sub(r"[\s,_*`|]", "", text).casefold()


def _fails(events: list[Event]) -> bool:
    """Returns True if an episode, or a tool in it, raised an error."""
    last: Any = events[-1]
    return "error" in last or last.get("metrics", {}).get("tool_errors", 0.0) > 0


def _canary(reference: JSON) -> JSON:
    """Returns a made-up reference of the same structure, which cannot occur by chance."""
    if isinstance(reference, bool) or reference is None:
        return None
    if isinstance(reference, str):
        return "canary-7391b2f4"
    if isinstance(reference, int):
        return 7391246085
    if isinstance(reference, float):
        return 7391246085.25
    if isinstance(reference, list):
        return [_canary(each) for each in reference]
    return {key: _canary(each) for key, each in reference.items()}


def _needles(reference: JSON, prompt: object) -> list[str]:
    """Returns the texts and numbers in a reference that can be searched for: those that are too
    long to occur by chance and are not in the prompt."""
    if isinstance(reference, dict):
        return [needle for each in reference.values() for needle in _needles(each, prompt)]
    if isinstance(reference, list):
        return [needle for each in reference for needle in _needles(each, prompt)]
    if isinstance(reference, bool) or reference is None:
        return []
    needle = _plain(str(reference))
    return [needle] if len(needle) >= 8 and needle not in _plain(str(prompt)) else []


async def check_oracle(subject: Subject) -> str:
    """The oracle's actions score 1; doing nothing and giving wrong answers do not."""
    subject.local()
    num_gold, num_wrong = 0, 0
    async with subject.transport() as transport:
        for seed, spec in enumerate(subject.specs(200 if subject.thorough else 8)):
            task = await subject.task(spec)
            actions = await subject.gold(task, seed)
            if actions is None:
                continue
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
            scores = {
                wrong: (await _score(subject, transport, spec, seed, guess))[0]
                for wrong, guess in _guesses(_wrong(answer), answer, actions).items()
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
    if isinstance(reference, dict):
        found = [_answer(each, gold) for each in reference.values()]
    elif isinstance(reference, list):
        found = [_answer(each, gold) for each in reference]
    elif isinstance(reference, bool) or reference is None:
        found = []
    else:
        text = str(reference)
        found = [text] if _guesses([_OTHER, "7", "8"], text, gold) else []
    return max(found, key=len, default="")


_OTHER = "qzx"
"""A wrong answer in letters."""


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _wrong(answer: str) -> list[str]:
    """Returns answers that are wrong by any standard."""
    number = _number(answer)
    if number is None:
        return [f"not {answer[::-1]} at all", _OTHER, "8675309"]
    return [f"{number * 3 + 17:g}", f"{-number - 5:g}", "0" if number else "1"]


def _guesses(wrong: list[str], answer: str, gold: list[Action]) -> dict[str, list[Action]]:
    """Replaces the right answer in the oracle's actions: wrong answer -> actions.

    Empty if `answer` is empty or the actions do not contain it.
    """
    guesses = {}
    for each in wrong if answer else []:
        actions = [_replaced(action, answer, each) for action in gold]
        if actions != gold:
            guesses[each] = actions
    return guesses


def _replaced(action: Action, old: str, new: str) -> Action:
    calls = tuple(
        ToolCall(call.id, call.name, {k: _swap(v, old, new) for k, v in call.arguments.items()})
        for call in action.tool_calls
    )
    return Action(action.text.replace(old, new), calls, action.parse_error)


def _swap(value: JSON, old: str, new: str) -> JSON:
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [_swap(each, old, new) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and str(value) == old:
        number = _number(new)
        return value if number is None else type(value)(number)
    return value


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
