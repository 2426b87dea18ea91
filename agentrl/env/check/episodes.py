"""Checks that episodes can be played, repeated, and played beside others."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from agentrl.env.base import Environment
from agentrl.env.check.fresh import FreshRun, fresh_runs
from agentrl.env.check.subject import (
    CheckFailed,
    CheckSkipped,
    Event,
    Subject,
    is_over,
    place,
    sample_calls,
    sample_value,
    short,
)
from agentrl.env.tools import rewards_of
from agentrl.images import content_text
from agentrl.types import JSON, Action, ToolCall

NO_OP = Action(text="")
UNKNOWN_TOOL = Action(tool_calls=(ToolCall("call-x", "no_such_tool", {"x": 1}),))
RARE_TEXTS = ("", "0", "-1", "1e400", "inf", "nan", "½", "9" * 400, "1/0", "No.", "\N{MINUS SIGN}7")
"""Answers on which a grader's arithmetic may fail."""
_NUMBERS = (0, -1, 10**18, 1e300, -0.5)
RARE: dict[Any, Sequence[JSON]] = {"string": RARE_TEXTS, "integer": _NUMBERS, "number": _NUMBERS}
"""Unusual values by the type of an argument."""
MAX_LENGTH = 20
"""Turns after which an episode should have ended."""
CALLS_PER_TOOL = 5
"""How often each tool is called."""


def _describe(action: Action) -> str:
    if action.parse_error:
        return "an unreadable tool call"
    if action.tool_calls:
        call = action.tool_calls[0]
        return "a call of " + short(f"{call.name or '(no name)'}({call.arguments})")
    return f"the text {short(ascii(action.text), 40)}"


def _difference(before: list[Event], now: list[Event]) -> str:
    for number, (one, other) in enumerate(zip(before, now, strict=False)):
        for key in one:
            if one[key] != other.get(key):
                return f"{key} of reply {number} was {short(one[key], 80)} and then " + short(
                    other.get(key, other), 80
                )
    return f"{len(before)} replies and then {len(now)}"


async def check_close(subject: Subject) -> str:
    """close() returns within 5 s and raises nothing: before the first step, after one, and after
    the end of the episode."""
    subject.local()
    spec = subject.specs(1)[0]
    actions = await subject.moves(spec)
    for what, played in (
        ("before the first step", []),
        ("after one step", actions[:1]),
        ("after the last step", actions),
    ):
        if problem := (await subject.play_direct(spec, played)).close_problem:
            raise CheckFailed(
                f"close() {what} {problem}",
                "close() must return in every state of an episode: set what it uses in reset(), "
                "and limit the time of whatever it waits for",
                cause=problem,
            )
    return "before the first step, after one, and after the end"


async def check_episodes(subject: Subject) -> str:
    """Episodes can be played to their end without an error of the environment or its grader."""
    num_turns, specs = 0, subject.specs(32 if subject.thorough else 8)
    async with subject.transport() as transport:
        for seed, spec in enumerate(specs):
            events = await subject.play(transport, spec, seed)
            num_turns += len(events) - 1
            for number, event in enumerate(events):
                where = f"{place(spec)}, {'reset' if not number else f'step {number - 1}'}"
                _require_sound(event, where)
            if not is_over(events[-1]):
                raise CheckFailed(
                    f"{place(spec)} had not ended after its last turn ({len(events) - 1})",
                    "a server must terminate or truncate the episode on a turn with `last`; update "
                    "it",
                )
    return f"{len(specs)} episodes of {num_turns} turns"


def _require_sound(event: Event, where: str) -> None:
    """Requires an event to be no error and to have finite numbers."""
    if "error" in event:
        raise CheckFailed(
            f"{where}: {event['error']}: {event['detail']}",
            "return an error that the agent caused as an observation, raise GraderError if an "
            "answer cannot be graded, and put only JSON into info; the server's log has the "
            "traceback",
            cause=event["detail"],
        )
    numbers = [event.get("reward", 0.0), *event.get("metrics", {}).values()]
    numbers += event.get("reward_components", {}).values()
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
        remedy = "the server should refuse numbers that are not finite; update it"
        raise CheckFailed(f"{where} was answered with {short(numbers)}", remedy)


async def check_ends(subject: Subject) -> str:
    """An episode ends by itself, or pays on the way."""
    if subject.environment is not None and rewards_of(subject.environment):
        raise CheckSkipped("reward methods grade an episode that the agent's last turn ends")
    async with subject.transport() as transport:
        for seed, spec in enumerate(subject.specs(4)):
            rng = random.Random(seed)
            actions = await subject.moves(spec, seed)
            while len(actions) < MAX_LENGTH:
                actions += sample_calls(subject.info.tools, rng, 1) + sample_calls([], rng, 1)
            events = await subject.play(transport, spec, seed, actions, truncate=False)
            if is_over(events[-1]):
                return f"after {len(events) - 1} turns"
            if any(event.get("reward") for event in events):
                return f"pays on the way, and goes on after {len(events) - 1} turns"
    raise CheckFailed(
        f"no episode had ended or paid after {MAX_LENGTH} turns",
        "call self.finish(reward) where the task is over, in a tool, on_text() or step(), or "
        "return a StepResult with terminated=True; an oracle(self) shows how the task is solved",
    )


async def check_tool_calls(subject: Subject) -> str:
    """Every tool works for some arguments that fit its schema."""
    if not subject.info.tools:
        raise CheckSkipped("the environment offers no tools")
    answers: dict[str, list[str]] = defaultdict(list)
    works = set()
    async with subject.transport() as transport:
        for number, spec in enumerate(subject.specs(CALLS_PER_TOOL)):
            played = [await subject.moves(spec, number)]
            rng = random.Random(number)
            played += [sample_calls([tool], rng, 1) for tool in subject.info.tools]
            for actions in played:
                events = await subject.play(transport, spec, number, actions)
                failures = 0.0
                for action, event in zip(actions, events[1:], strict=False):
                    for call in action.tool_calls[:1]:
                        now = event.get("metrics", {}).get("tool_errors", 0.0)
                        if "error" in event or now == failures:
                            works.add(call.name)  # `episodes` reports errors of other kinds
                        else:
                            answers[call.name] += [
                                content_text(m["content"]) for m in event["observation"]
                            ]
                        failures = now
    for name, texts in answers.items():
        same = len(texts) >= CALLS_PER_TOOL and len(set(texts)) == 1
        is_bug = any(f" failed: {kind}:" in texts[0] for kind in _BUGS)
        if name not in works and (same or is_bug):
            raise CheckFailed(
                f"all {len(texts)} calls of {name} failed, one of them with: {short(texts[0])}",
                "mend the tool (`agentrl env play` calls it alone), or describe in its docstring "
                "and parameter types which arguments it takes",
            )
    return f"{len(subject.info.tools)} tools, called {CALLS_PER_TOOL} times each"


_BUGS = ("NameError", "AttributeError", "TypeError", "ImportError", "ModuleNotFoundError")
_BUGS += (
    "KeyError",
    "IndexError",
    "ZeroDivisionError",
    "NotImplementedError",
    "UnboundLocalError",
    "AssertionError",
)
"""Exceptions that are a bug of the tool, whatever its arguments are."""


async def check_bad_actions(subject: Subject) -> str:
    """An agent's mistakes (no text, an unknown tool, wrong arguments, an unreadable call, odd
    characters) and unusual answers get an observation or a finite reward, never an error."""
    bad = [
        NO_OP,
        UNKNOWN_TOOL,
        Action(parse_error="expected ',' at character 12", text="<tool_call>{"),
        Action(text="\ud83d \x00 \u202e" + "x" * 20_000),
        Action(tool_calls=(ToolCall("a", "no_such_tool", {}), ToolCall("b", "", {}))),
    ]
    bad += [Action(text=text) for text in RARE_TEXTS]
    for spec in subject.info.tools:
        function: Any = spec["function"]
        schema = function["parameters"]
        usual: Any = sample_value(schema, random.Random(0), schema.get("$defs", {}))
        wrong: list[dict[str, JSON]] = [{"no_such_argument": []}]
        wrong.append({name: {"not": "this"} for name in schema.get("properties", {})})
        for name, each in schema.get("properties", {}).items():
            wrong += [usual | {name: value} for value in RARE.get(each.get("type"), ())]
        bad += [Action(tool_calls=(ToolCall("c", function["name"], each),)) for each in wrong]
    specs = subject.specs(8)
    async with subject.transport() as transport:
        for number, action in enumerate(bad):
            spec = specs[number % len(specs)]
            event = (await subject.play(transport, spec, actions=[action]))[-1]
            _require_sound(event, f"{place(spec)}, {_describe(action)}")
    return f"{len(bad)} bad actions"


async def check_determinism(subject: Subject) -> str:
    """The same task and seed give the same first prompt: alone, beside other sessions, and in
    another process; the tasks are the same in another process too."""
    seeds = range(8 if subject.thorough else 3)
    cases = [(spec, seed) for spec in subject.specs(3) for seed in seeds]
    cases = cases[: subject.info.max_sessions]

    async with subject.transport() as transport:

        async def prompt(spec: Any, seed: int, opened: asyncio.Barrier | None = None) -> Any:
            (event,) = await subject.play(transport, spec, seed, [], opened_too=opened)
            _require_sound(event, place(spec))
            return event["observation"]

        first = [await prompt(*case) for case in cases]
        again = [await prompt(*case) for case in cases[::-1]][::-1]
        barrier = asyncio.Barrier(len(cases))
        at_once = await asyncio.gather(*(prompt(*case, barrier) for case in cases))
    for (spec, seed), before, *later in zip(cases, first, again, at_once, strict=True):
        for now in later:
            if now != before:
                if changed := await _shared_state_that_changes(subject):
                    raise CheckFailed(*changed)
                raise CheckFailed(
                    f"{place(spec)} with seed {seed} began with {short(before)} once and with "
                    f"{short(now)} another time",
                    "draw random numbers only from self.rng, which is seeded",
                )
    runs = await fresh_runs(subject)
    if runs is not None:
        _compare_processes(*runs)
    return f"{len(cases)} pairs of task and seed, three times each"


def _compare_processes(one: FreshRun, other: FreshRun) -> None:
    pairs = [(f"task {name}", task, other.tasks[name]) for name, task in one.tasks.items()]
    for number, (before, now) in enumerate(zip(one.first, other.first, strict=True)):
        pairs.append((f"the first prompt of episode {number}", before[0], now[0]))
    for what, before, now in pairs:
        if before != now:
            raise CheckFailed(
                f"{what} is {short(before)} in one process and {short(now)} in another",
                "do not use hash() of a str, the order of a set or an unseeded generator; "
                'random.Random(f"{split}/{index}"), zlib.crc32() and sorted() give the same result '
                "in every process",
            )


async def check_isolation(subject: Subject) -> str:
    """Up to eight sessions played at once go exactly as they do alone, and leave nothing behind
    that changes a later episode."""
    count = min(8, subject.info.max_sessions)
    cases = [(spec, seed) for seed, spec in enumerate(subject.specs(count))]
    async with subject.transport() as transport:
        moves = [await subject.moves(spec, seed) for spec, seed in cases]
        alone = [
            await subject.play(transport, spec, seed, actions)
            for (spec, seed), actions in zip(cases, moves, strict=True)
        ]
        for (spec, _), events in zip(cases, alone, strict=True):
            _require_sound(events[0], place(spec))
        again = await subject.play(transport, *cases[0], moves[0])
        if again != alone[0]:
            seen = _difference(alone[0], again)
            if changed := await _shared_state_that_changes(subject):
                raise CheckFailed(f"{changed[0]}; {seen}", changed[1], cause=changed[0])
            await _check_fresh(subject)
            raise CheckSkipped(
                f"an episode played twice goes differently ({seen}), although no shared state has "
                "changed, so the influence of other sessions cannot be told from chance"
            )
        opened = asyncio.Barrier(count)
        together = await asyncio.gather(
            *(
                subject.play(transport, spec, seed, actions, opened_too=opened)
                for (spec, seed), actions in zip(cases, moves, strict=True)
            )
        )
    for (spec, seed), before, now in zip(cases, alone, together, strict=True):
        if before != now:
            raise CheckFailed(
                f"{place(spec)} with seed {seed} went differently beside others: "
                f"{_difference(before, now)}",
                _KEEP_ON_SELF,
            )
    await _check_fresh(subject)
    return f"{count} sessions, {sum(map(len, together)) - count} turns"


async def _check_fresh(subject: Subject) -> None:
    """Raises CheckFailed if an episode goes differently after others have been played, although it
    always goes the same as the first of its process."""
    runs = await fresh_runs(subject)
    if runs is None:
        return
    one, other = runs
    if one.first[0] == other.first[0] and one.again != one.first[0]:
        raise CheckFailed(
            "an episode that goes the same in every fresh process goes differently after other "
            f"episodes: {_difference(one.first[0], one.again)}",
            _KEEP_ON_SELF + ", nor in a connection, an iterator or a closure that they hold",
        )


_KEEP_ON_SELF = (
    "keep an episode's state on self and set it in reset(), not on the class, the module or "
    "self.shared"
)


async def _shared_state_that_changes(subject: Subject) -> tuple[str, str] | None:
    """Plays an episode twice and returns a message about what it changed on the class, its module
    or `self.shared`, and the remedy; None if it changed nothing."""
    if subject.environment is None:
        return None
    spec = subject.specs(1)[0]
    actions = await subject.moves(spec)
    before = _shared_state(subject)
    for _ in range(2):
        await subject.play_direct(spec, actions)
    for name, value in _shared_state(subject).items():
        if before.get(name) != value:
            return (
                f"an episode changes {name}, which all sessions share "
                f"(from {short(before.get(name, 'nothing'), 60)} to {short(value, 60)})",
                _KEEP_ON_SELF,
            )
    return None


def _shared_state(subject: Subject) -> dict[str, str]:
    owners: dict[str, Any] = {}
    for cls in subject.local().__mro__:
        if cls is Environment:
            break
        owners[cls.__name__] = vars(cls)
        module = sys.modules.get(cls.__module__)
        if module is not None:
            owners[cls.__module__] = vars(module)
    owners["self.shared"] = getattr(subject.shared, "__dict__", {"": subject.shared})
    return {
        f"{owner}.{name}".rstrip("."): _text_of(value)
        for owner, members in owners.items()
        for name, value in list(members.items())
        if not name.startswith("__") and isinstance(value, _STATE)
    }


_STATE = (bool, int, float, str, list, dict, set, tuple, type(None), random.Random)


def _text_of(value: Any) -> str:
    text = repr(value.getstate() if isinstance(value, random.Random) else value)
    return text if len(text) < 1000 else f"{text[:100]}... ({len(text)} characters, {hash(text)})"
