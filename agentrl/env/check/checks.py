"""The checks. The first paragraph of each docstring is what it asserts, as the report shows it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import os
import re
import sys
import threading
import time
import traceback
import tracemalloc
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentrl.env import protocol
from agentrl.env.base import Environment
from agentrl.env.check.container import check_container
from agentrl.env.check.subject import (
    MAX_TURNS,
    CheckFailed,
    CheckSkipped,
    Event,
    Subject,
    Wire,
    is_over,
    play_direct,
    step_event,
    with_reference,
)
from agentrl.env.protocol import ResetRequest, StepRequest, TaskSpec
from agentrl.env.tools import rewards_of
from agentrl.errors import EnvError
from agentrl.types import JSON, Action, StepResult, ToolCall

MAX_BLOCK_S = 0.05
MAX_GROWTH_BYTES = 4096
"""Per episode, which is 4 MB for a thousand of them."""
MEMORY_TIME_S = 10.0
"""The memory check stops after this long, with fewer episodes; thirty times that when thorough."""
MIN_MEMORY_EPISODES = 50
"""Fewer say nothing about growth: connections and caches that fill once outweigh it."""
LEAK_ROUNDS = 3
NO_OP = Action(text="")
UNKNOWN_TOOL = Action(tool_calls=(ToolCall("call-x", "no_such_tool", {"x": 1}),))


# Tasks and descriptions


async def check_tasks(subject: Subject) -> str:
    """Tasks can be read at both ends of every split, have a prompt, and are the same each time."""
    num_read = 0
    async with subject.wire() as wire:
        for split, size in subject.info.splits.items():
            if size == 0:
                raise CheckFailed(f"split '{split}' is empty", "leave empty splits out of splits()")
            ends = {0, size - 1 if size is not None else 1_000_000}
            for index in sorted(ends):
                try:
                    first = (await wire.preview(split, index, index + 1))[0]
                    second = (await wire.preview(split, index, index + 1))[0]
                except EnvError as error:
                    raise CheckFailed(
                        f"task {index} of split '{split}' cannot be read: {error}",
                        "get(split, index) must answer for every index below the split's size",
                    ) from error
                if not first.prompt:
                    raise CheckFailed(
                        f"task {index} of split '{split}' has an empty prompt",
                        "give Task a text or messages as prompt",
                    )
                again = [msgspec.to_builtins(second)]
                if subject.environment is not None:
                    again += [await _fresh_task(subject, split, index) for _ in range(2)]
                    first_task = await _fresh_task(subject, split, index)
                else:
                    first_task = again[0]
                if msgspec.to_builtins(first) != again[0] or again[1:] not in (
                    [],
                    [first_task] * 2,
                ):
                    raise CheckFailed(
                        f"task {index} of split '{split}' was {_short(first_task)} once and "
                        f"{_short(again[-1])} another time",
                        "derive a task from (split, index) alone, such as "
                        'random.Random(f"{split}/{index}")',
                    )
                num_read += 1
    if not num_read:
        raise CheckSkipped("the environment has no splits: sessions bring their own tasks")
    return f"{num_read} tasks of {len(subject.info.splits)} splits, read again and again"


async def _fresh_task(subject: Subject, split: str, index: int) -> JSON:
    """A task from a new source, as JSON."""
    instance = subject.instance()
    task = await instance.call(instance.get, split, index)
    return protocol.as_json(msgspec.to_builtins(protocol.to_task_spec(task).inline))


async def check_tools(subject: Subject) -> str:
    """Tool specifications are functions that OpenAI's API and vLLM accept."""
    remedy = "rename it, or annotate its parameters with types that have a JSON schema"
    seen = set()
    for spec in subject.info.tools:
        function: dict[str, Any] = spec.get("function") or {}
        name = function.get("name", "")
        problem = None
        if spec.get("type") != "function":
            problem = f"type is {spec.get('type')!r}, not 'function'"
        elif not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            problem = "a name may hold 1 to 64 letters of ASCII, digits, '_' and '-'"
        elif name in seen:
            problem = "there are two of this name"
        elif not isinstance(function.get("description", ""), str):
            problem = "its description is no text"
        else:
            problem = _schema_problem(function.get("parameters"), name)
        if problem:
            raise CheckFailed(f"tool {name or spec!r}: {problem}", remedy)
        seen.add(name)
    if not seen:
        raise CheckSkipped("the environment offers no tools")
    return f"{len(seen)} tools: {', '.join(sorted(seen))}"


_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}


def _schema_problem(schema: Any, name: str) -> str | None:
    """What is wrong with the parameters of a function, None if nothing is."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return "its parameters are no object schema"
    properties = schema.get("properties", {})
    missing = set(schema.get("required", ())) - set(properties)
    if missing:
        return f"required but not described: {', '.join(sorted(missing))}"
    definitions = schema.get("$defs", {})

    def look(node: Any, where: str) -> str | None:
        if isinstance(node, bool):
            return None
        if not isinstance(node, dict):
            return f"{where} is no schema"
        if "$ref" in node and node["$ref"].rpartition("/")[2] not in definitions:
            return f"{where} refers to {node['$ref']}, which is not there"
        kinds = node.get("type", [])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind not in _TYPES:
                return f"{where} has the unknown type '{kind}'"
        children = [(f"{where}.{key}", each) for key, each in node.get("properties", {}).items()]
        children += [(f"{where}[]", node["items"])] if "items" in node else []
        for key in ("anyOf", "oneOf", "allOf"):
            children += [(where, each) for each in node.get(key, ())]
        return next((found for path, each in children if (found := look(each, path))), None)

    for place, each in [*definitions.items(), (name, schema)]:
        if problem := look(each, place):
            return problem
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"its parameters are not JSON: {error}"
    return None


async def check_schema(subject: Subject) -> str:
    """Prompts, observations and info come out of JSON as the environment gave them."""
    subject.local()
    remedy = "return texts, or messages of str keys and plain JSON values: lists, not tuples"
    num_values = 0
    for seed, spec in enumerate(subject.specs(4)):
        actions = await subject.moves(spec, seed)
        try:
            first, results = await play_direct(
                subject.instance(), await subject.task(spec), actions, seed
            )
        except EnvError:
            continue  # what went wrong is for other checks to say
        values = [("the first prompt", first)]
        values += [
            (f"the {what} of step {number}", value)
            for number, result in enumerate(results)
            for what, value in (("observation", result.observation), ("info", result.info))
        ]
        for where, value in values:
            try:
                after = protocol.as_json(value)
            except TypeError:
                continue  # check_info
            if not _same(value, after):
                raise CheckFailed(
                    f"{where} was {_short(value)} and came out of JSON as {_short(after)}", remedy
                )
            num_values += 1
    return f"{num_values} prompts, observations and infos"


def _same(before: Any, after: Any) -> bool:
    """Equal, and of the same types: JSON makes a list of a tuple and a text of a number key."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(before[k], after[k]) for k in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return before == after and isinstance(before, tuple | set) == isinstance(after, tuple | set)


# Episodes


async def check_episodes(subject: Subject) -> str:
    """Episodes can be played to their end, without an error of the environment or its grader."""
    num_turns, specs = 0, subject.specs(32 if subject.thorough else 6)
    async with subject.wire() as wire:
        for seed, spec in enumerate(specs):
            events = await subject.play(wire, spec, seed)
            num_turns += len(events) - 1
            for number, event in enumerate(events):
                if "error" in event and _belongs_to(event) == "episodes":
                    raise CheckFailed(
                        f"{_place(spec)}, {'reset' if not number else f'step {number - 1}'}: "
                        f"{event['error']}: {event['detail']}",
                        "the server's log has the trace; an error that the agent caused should "
                        "be an observation",
                    )
            if not is_over(events[-1]):
                raise CheckFailed(
                    f"{_place(spec)} had not ended after its last turn ({len(events) - 1})",
                    "a turn with `last` must terminate or truncate the episode",
                )
    return f"{len(specs)} episodes of {num_turns} turns"


def _belongs_to(event: Event) -> str:
    """Which check reports an error, so that one mistake is reported once."""
    if "finite" in event["detail"] or "JSON cannot carry" in event["detail"]:
        return "finite"
    return "info" if "Encoding objects" in event["detail"] else "episodes"


async def check_bad_actions(subject: Subject) -> str:
    """What an agent can do wrong (no text, an unknown tool, wrong arguments, an unreadable call,
    odd characters) is answered, never an error."""
    bad = [
        NO_OP,
        UNKNOWN_TOOL,
        Action(parse_error="expected ',' at character 12", text="<tool_call>{"),
        Action(text="\ud83d \x00 \u202e" + "x" * 20_000),
        Action(tool_calls=(ToolCall("a", "no_such_tool", {}), ToolCall("b", "", {}))),
    ]
    for spec in subject.info.tools:
        function: Any = spec["function"]
        bad.append(Action(tool_calls=(ToolCall("c", function["name"], {"no_such_argument": []}),)))
        names = function["parameters"].get("properties", {})
        wrong: dict[str, JSON] = {name: {"not": "this"} for name in names}
        bad.append(Action(tool_calls=(ToolCall("d", function["name"], wrong),)))
    async with subject.wire() as wire:
        for number, action in enumerate(bad):
            spec = subject.specs(len(bad))[number]
            event = (await subject.play(wire, spec, actions=[action]))[-1]
            if "error" in event and _belongs_to(event) == "episodes":
                raise CheckFailed(
                    f"{_describe(action)} was answered by {event['error']}: {event['detail']}",
                    "answer with an observation that says what was wrong; run_tools does",
                )
    return f"{len(bad)} bad actions"


async def check_finite(subject: Subject) -> str:
    """Rewards, components and metrics are finite numbers, and NaN is an error rather than null."""
    num_numbers = 0
    async with subject.wire() as wire:
        for seed, spec in enumerate(subject.specs(8)):
            for actions in (await subject.moves(spec, seed), [NO_OP], [Action(text="42")]):
                for event in await subject.play(wire, spec, seed, actions):
                    if "error" in event:
                        if _belongs_to(event) == "finite":
                            raise CheckFailed(
                                f"{_place(spec)}: {event['detail']}",
                                "guard the division or logarithm it comes from; a grader that "
                                "cannot tell should raise GraderError",
                            )
                        continue
                    numbers = [event.get("reward", 0.0), *event.get("metrics", {}).values()]
                    numbers += event.get("reward_components", {}).values()
                    num_numbers += len(numbers)
                    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
                        raise CheckFailed(
                            f"{_place(spec)} was answered with {_short(numbers)}",
                            "the server lets numbers through that are not finite",
                        )
    if subject.environment is not None:
        for field in ("reward", "reward_components", "metrics"):
            value: Any = math.nan if field == "reward" else {"x": math.nan}

            async def step(self: Environment, action: Action, field=field, value=value) -> Any:
                return StepResult([], terminated=True, **{field: value})

            async with subject.wire(subject.variant(step=step)) as wire:
                event = (await subject.play(wire, subject.specs(1)[0], actions=[NO_OP]))[-1]
                if "error" not in event:
                    raise CheckFailed(
                        f"a NaN in {field} was answered by {_short(event)}",
                        "the session manager must refuse numbers that are not finite",
                    )
    return f"{num_numbers} numbers; NaN refused"


async def check_info(subject: Subject) -> str:
    """Info is JSON, and metrics are a flat table of numbers."""
    num_infos = 0
    async with subject.wire() as wire:
        for seed, spec in enumerate(subject.specs(6)):
            for actions in (await subject.moves(spec, seed), [NO_OP]):
                for event in await subject.play(wire, spec, seed, actions):
                    if "error" in event and _belongs_to(event) == "info":
                        raise CheckFailed(
                            f"{_place(spec)}: {event['detail']}",
                            "put only None, bool, numbers, str, list and dict into info",
                        )
                    num_infos += "info" in event
    return f"{num_infos} steps' info and metrics"


async def check_determinism(subject: Subject) -> str:
    """The same task and seed give the same first prompt: alone, in a group, and between resets of
    other sessions."""
    remedy = "draw from self.rng, which follows from the seed, and from nothing else"
    seeds = range(8 if subject.thorough else 3)
    cases = [(spec, seed) for spec in subject.specs(3) for seed in seeds]
    cases = cases[: max(subject.info.max_sessions // 2, 1)]

    async def prompts(wire: Wire, spec: TaskSpec, seed: int, count: int = 1) -> list[Any]:
        opened = await wire.create(subject.request(spec, seed, count=count))
        ids.extend(each.id for each in opened)
        return [each.observation for each in opened]

    async def close_all(wire: Wire) -> None:
        while ids:
            await wire.delete(ids.pop())

    ids: list[str] = []
    group_size = min(2, subject.info.max_sessions)
    async with subject.wire() as wire:
        alone = []
        for spec, seed in cases:
            alone += await prompts(wire, spec, seed)
            await close_all(wire)
        try:
            together = [await prompts(wire, *case, count=group_size) for case in cases[::-1]]
            await close_all(wire)
            at_once = await asyncio.gather(*(prompts(wire, *case) for case in cases))
        finally:
            await close_all(wire)
    for (spec, seed), before, group, later in zip(
        cases, alone, together[::-1], at_once, strict=True
    ):
        for now in (*group, *later):
            if now != before:
                raise CheckFailed(
                    f"{_place(spec)} with seed {seed} began with {_short(before)} and another "
                    f"time with {_short(now)}",
                    remedy,
                )
    return f"{len(cases)} pairs of task and seed, four times each"


async def check_isolation(subject: Subject) -> str:
    """Eight sessions that are played at once go as each goes alone."""
    count = min(8, subject.info.max_sessions)
    cases = [(spec, seed) for seed, spec in enumerate(subject.specs(count))]
    async with subject.wire() as wire:
        moves = [await subject.moves(spec, seed) for spec, seed in cases]
        alone = [
            await subject.play(wire, spec, seed, actions)
            for (spec, seed), actions in zip(cases, moves, strict=True)
        ]
        again = await subject.play(wire, *cases[0], moves[0])
        if again != alone[0]:
            raise CheckSkipped(
                f"an episode that is played twice goes differently ({_difference(alone[0], again)})"
                ", so that others' influence cannot be told from chance"
            )
        opened = await asyncio.gather(
            *(wire.create(subject.request(spec, seed)) for spec, seed in cases)
        )
        ids = [sessions[0].id for sessions in opened]
        together: list[list[Event]] = [
            [{"observation": sessions[0].observation}] for sessions in opened
        ]

        async def turn(position: int, number: int) -> None:
            events, actions = together[position], moves[position]
            if number < len(actions) and not is_over(events[-1]):
                last = number + 1 == len(actions)
                events.append(await step_event(wire, ids[position], number, actions[number], last))

        try:
            for number in range(max(map(len, moves))):
                await asyncio.gather(*(turn(position, number) for position in range(len(cases))))
        finally:
            for each in ids:
                await wire.delete(each)
    for (spec, seed), before, now in zip(cases, alone, together, strict=True):
        if before != now:
            raise CheckFailed(
                f"{_place(spec)} with seed {seed} went differently beside others: "
                f"{_difference(before, now)}",
                "keep an episode's state on self, set in reset; not on the class, the module or "
                "self.shared",
            )
    return f"{count} sessions, {sum(map(len, together)) - count} turns"


# The protocol's promises


async def check_conflicts(subject: Subject) -> str:
    """A step of a wrong index, another body, an ended or a closed session is refused with the
    right code, and nothing runs."""
    spec = subject.specs(1)[0]
    variant, calls = _counted(subject)
    actions = await subject.moves(spec)
    other = Action(text="another body")
    async with subject.wire(variant) as wire:
        request = subject.request(spec)
        key = uuid.uuid4().hex
        session = (await wire.create(request, key))[0].id
        same = (await wire.create(request, key))[0].id
        if same != session:
            raise CheckFailed(
                "a repeated creation with its Idempotency-Key opened a second session",
                "the server must return the sessions it opened for that key",
            )
        changed = subject.request(spec, request.seed + 1)
        await _expect("idempotency_conflict", wire.create(changed, key), "the key came again")
        await _expect("not_found", _step(wire, "no-such-session", 0, other), "an unknown session")
        await _expect("step_conflict", _step(wire, session, 3, other), "a step from the future")
        done = 0
        for number, action in enumerate(actions):
            event = await step_event(wire, session, number, action, last=number + 1 == len(actions))
            if "error" in event:
                raise CheckSkipped(f"the episode fails: {event['detail']}")
            done += 1
            for index in range(done):
                await _expect(
                    "step_conflict",
                    _step(wire, session, index, other),
                    f"at step {done}, step {index} with another body",
                )
            if is_over(event):
                break
        await _expect("episode_done", _step(wire, session, done, other), "a step after the end")
        await wire.delete(session)
        await _expect("session_expired", _step(wire, session, done, other), "a closed session")
        if calls and len(calls) != done:
            raise CheckFailed(
                f"{done} steps were taken but the environment's step ran {len(calls)} times",
                "a refused step must not reach the environment",
            )
    return f"{done * (done + 1) // 2 + 6} wrong calls over {done} steps"


async def _step(wire: Wire, session: str, index: int, action: Action) -> protocol.StepReply:
    return await wire.step(session, StepRequest(index, protocol.to_wire_action(action), 30.0))


async def _expect(code: str, call: Awaitable[Any], what: str) -> None:
    remedy = "the server breaks the protocol: see the wire calls in docs/environments.md"
    try:
        reply = await call
    except EnvError as error:
        if error.code != code:
            raise CheckFailed(
                f"{what} was refused as {error.code} ({error}), not {code}", remedy
            ) from error
        return
    raise CheckFailed(f"{what} was answered by {_short(msgspec.to_builtins(reply))}", remedy)


def _counted(subject: Subject) -> tuple[type[Environment] | None, list[int]]:
    """A variant whose steps are counted in the list; nothing to count behind a URL."""
    calls: list[int] = []
    if subject.environment is None:
        return None, calls
    original: Callable[..., Any] = subject.environment.step

    async def step(self: Environment, action: Action) -> Any:
        calls.append(1)
        return await self.call(original.__get__(self), action)

    return subject.variant(step=step), calls


async def check_replay(subject: Subject) -> str:
    """A step that is asked for again, at once or later, gives the same reply and has no second
    effect."""
    num_steps = 0
    for seed, spec in enumerate(subject.specs(3)):
        variant, calls = _counted(subject)
        actions = await subject.moves(spec, seed)
        taken = 0
        async with subject.wire(variant) as wire:
            session = (await wire.create(subject.request(spec, seed)))[0].id
            for number, action in enumerate(actions):
                last = number + 1 == len(actions)
                replies = await asyncio.gather(
                    *(step_event(wire, session, number, action, last) for _ in range(3))
                )
                replies.append(await step_event(wire, session, number, action, last))
                taken += 1
                first, *others = [{**each, "replayed": None} for each in replies]
                fresh = [each for each in replies if each.get("replayed") is False]
                if any(each != first for each in others) or len(fresh) > 1:
                    other = next(each for each in replies[1:] if each != replies[0])
                    raise CheckFailed(
                        f"{_place(spec)}, step {number}, asked for four times, was answered by "
                        f"{_short(replies[0])} and {_short(other)}",
                        "the server must keep the last reply of a session and repeat it",
                    )
                if is_over(first):
                    break
            await wire.delete(session)
        num_steps += taken
        if variant is not None and len(calls) != taken:
            raise CheckFailed(
                f"{taken} steps, each asked for four times, ran {len(calls)} times",
                "the server must run a step once, however often it is asked for",
            )
    return f"{num_steps} steps, asked for four times each"


async def check_reset(subject: Subject) -> str:
    """Another episode in the same session begins and goes as one in a new session, a repeated
    reset does nothing, and the step index only grows."""
    remedy = "the server breaks the protocol: see the wire calls in docs/environments.md"
    num_resets = 0
    async with subject.wire() as wire:
        for seed, spec in enumerate(subject.specs(3)):
            actions = await subject.moves(spec, seed + 1)
            alone = await subject.play(wire, spec, seed + 1, actions)
            second = await subject.play(wire, spec, seed + 1, actions)
            if second[0] != alone[0]:
                raise CheckSkipped("the first prompt differs from session to session anyway")
            repeatable = second == alone
            session = (await wire.create(subject.request(spec, seed)))[0].id
            step = 0
            # Once after the episode's first step, and once after its end.
            for stop_after in (1, len(actions)):
                for number, action in enumerate(actions[:stop_after]):
                    event = await step_event(wire, session, step, action, number + 1 == stop_after)
                    if "error" in event:
                        raise CheckSkipped(f"the episode fails: {event['detail']}")
                    step += 1
                    if is_over(event):
                        break
                request = ResetRequest(step, seed=seed + 1)
                reply, again = [await wire.reset(session, request) for _ in range(2)]
                num_resets += 1
                if reply.observation != alone[0]["observation"] or reply.step != step + 1:
                    raise CheckFailed(
                        f"{_place(spec)}, reset at step {step}, began at step {reply.step} with "
                        f"{_short(reply.observation)}, a new session with "
                        f"{_short(alone[0]['observation'])}",
                        remedy,
                    )
                if (again.step, again.observation) != (reply.step, reply.observation):
                    raise CheckFailed(
                        f"{_place(spec)}: a repeated reset answered with step {again.step}", remedy
                    )
                step = reply.step
            events = [alone[0]]
            for number, action in enumerate(actions):
                last = number + 1 == len(actions)
                events.append(await step_event(wire, session, step + number, action, last))
                if is_over(events[-1]):
                    break
            await wire.delete(session)
            strip = [[{**event, "step": 0} for event in each] for each in (alone, events)]
            if repeatable and strip[0] != strip[1]:
                raise CheckFailed(
                    f"{_place(spec)} went differently after a reset: {_difference(*strip)}",
                    "keep an episode's state on self; every episode has an instance of its own",
                )
    return f"{num_resets} resets"


async def check_deadline(subject: Subject) -> str:
    """A step that does not return is answered with step_timeout at its deadline, the session takes
    no other step, and its slot becomes free."""
    deadline, margin = 0.25, 1.0
    spec = subject.specs(1)[0]
    remedy = "nothing in step may hold up the event loop: await, or make the method a plain def"

    async def timed(wire: Wire, action: Action, timeout_s: float, stage: str) -> Event:
        session = (await wire.create(subject.request(spec)))[0].id
        started = time.monotonic()
        event = await step_event(wire, session, 0, action, timeout_s=timeout_s)
        seconds = time.monotonic() - started
        if seconds > timeout_s + margin:
            raise CheckFailed(
                f"{stage}: a step with a deadline of {timeout_s:g} s was answered after "
                f"{seconds:.2f} s ({event.get('error', 'as if nothing were wrong')})",
                remedy,
            )
        if event.get("error") == "step_timeout" and not subject.info.cancel_safe:
            for index in (0, 1):
                second = await step_event(wire, session, index, Action(text="go on"))
                if "error" not in second:
                    raise CheckFailed(
                        f"{stage}: the session took a step after step_timeout: {_short(second)}",
                        "the server must end a session whose step ran out of time",
                    )
        await wire.delete(session)
        return event

    looked_at = []
    async with subject.wire() as wire:
        for action in await subject.moves(spec):
            await timed(wire, action, deadline, "the environment's own step")
    looked_at.append("own steps")
    if subject.environment is not None:
        release = threading.Event()
        seconds = deadline + margin + 2.0

        async def hang(self: Environment, action: Action) -> None:
            await asyncio.sleep(seconds)

        def block(self: Environment, action: Action) -> None:
            release.wait(seconds)

        for stage, step in (("an async step that hangs", hang), ("a def step that hangs", block)):
            variant = subject.variant(step=step, cancel_safe=False)
            async with subject.wire(variant) as wire:
                event = await timed(wire, NO_OP, deadline, stage)
                if step is block:
                    release.set()
                if event.get("error") != "step_timeout":
                    raise CheckFailed(f"{stage} was answered by {_short(event)}", remedy)
                if not await _until(lambda: wire.num_live(), 0, 5.0):
                    raise CheckFailed(
                        f"{stage}: its session still counts as live 5 s later",
                        "close() must return after a step that ran out of time",
                    )
            looked_at.append(stage)
    return f"{deadline:g} s: {', '.join(looked_at)}"


async def check_event_loop(subject: Subject) -> str:
    """Nothing of an episode holds up the event loop for more than 50 ms, during which all other
    sessions would stand still."""
    subject.local()
    if getattr(subject.environment, "isolation", "thread") == "process":
        raise CheckSkipped("its sessions have processes, and so event loops, of their own")
    worst = 0.0
    cases = [(spec, seed) for seed, spec in enumerate(subject.specs(4))]
    async with subject.wire() as wire:
        moves = [await subject.moves(spec, seed) for spec, seed in cases]
        await subject.play(wire, *cases[0], moves[0])  # what is slow only once, like an import
        for (spec, seed), actions in zip(cases, moves, strict=True):
            # A busy machine delays now and then; code that blocks does so every time.
            block, culprit = math.inf, ""
            for attempt in range(8):
                with _watch_loop() as watch:
                    await subject.play(wire, spec, seed, actions)
                    await subject.play(wire, spec, seed, [NO_OP])
                    await asyncio.sleep(0.02)  # its close
                if watch.worst < block:
                    block, culprit = watch.worst, watch.where
                if block < MAX_BLOCK_S:
                    break
                await asyncio.sleep(0.1 * attempt)
            else:
                raise CheckFailed(
                    f"{_place(spec)}: the event loop stood still for {block * 1000:.0f} ms"
                    + culprit,
                    "make that method a plain def (it runs in a thread then), or await an async "
                    "library",
                )
            worst = max(worst, block)
    return f"at most {worst * 1000:.0f} ms in {len(cases)} tasks' episodes"


class _Watch:
    """How long an event loop was held up, and where the code stood then."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.worst = 0.0
        self.where = ""
        self._loop = loop
        self._thread = threading.get_ident()
        self._beat = time.monotonic()
        self._stop = threading.Event()
        self._handle = loop.call_soon(self._tick)
        self._watcher = threading.Thread(target=self._look, name="agentrl-env-worker-watch")
        self._watcher.start()

    def stop(self) -> None:
        self._tick()
        self._handle.cancel()
        self._stop.set()
        self._watcher.join()

    def _tick(self) -> None:
        self.worst = max(self.worst, time.monotonic() - self._beat - 0.005)
        self._beat = time.monotonic()
        self._handle = self._loop.call_later(0.005, self._tick)

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            if time.monotonic() - self._beat > 0.75 * MAX_BLOCK_S:
                frame = sys._current_frames().get(self._thread)
                stack = traceback.extract_stack(frame)
                package = str(Path(__file__).parents[1])
                own = [each for each in stack if not each.filename.startswith(package)]
                if frame is not None and own and not own[-1].filename.endswith("selectors.py"):
                    self.where = f" near {Path(own[-1].filename).name}:{own[-1].lineno}"


@contextlib.contextmanager
def _watch_loop() -> Iterator[_Watch]:
    watch = _Watch(asyncio.get_running_loop())
    try:
        yield watch
    finally:
        watch.stop()


# What is left behind


async def check_lease(subject: Subject) -> str:
    """A session that nobody calls is closed when its lease is over, its environment with it, and
    answers session_expired."""
    spec = subject.specs(1)[0]
    closed: list[str] = []
    variant = None
    if subject.environment is not None:
        original: Callable[..., Any] = subject.environment.close

        async def close(self: Environment) -> None:
            await self.call(original.__get__(self))
            closed.append(self.task.id)

        variant = subject.variant(close=close)
    async with subject.wire(variant) as wire:
        before = await wire.num_live()
        session = (await wire.create(subject.request(spec, lease_s=0.3)))[0].id
        await asyncio.sleep(0.5)  # the count may fall meanwhile because other sessions end
        if not await _until(lambda: wire.num_live(), before, 8.0):
            raise CheckFailed(
                "8 s after a lease of 0.3 s the session still has its slot",
                "close() must return, whatever state the episode is in",
            )
        await _expect("session_expired", _step(wire, session, 0, NO_OP), "an expired session")
    if variant is not None and not closed:
        raise CheckFailed(
            "the lease was over but the environment's close() did not run to its end",
            "close() must not raise, also before the first step",
        )
    return "a lease of 0.3 s"


async def check_leaks(subject: Subject) -> str:
    """Clients that disappear in the middle of a step leave no session, thread, process or open
    file behind."""
    spec = subject.specs(1)[0]
    action = (await subject.moves(spec))[0]
    count = min(8, subject.info.max_sessions)

    async def disappear(wire: Wire) -> None:
        opened = await asyncio.gather(
            *(wire.create(subject.request(spec, seed, lease_s=0.5)) for seed in range(count))
        )
        steps = [
            asyncio.ensure_future(step_event(wire, sessions[0].id, 0, action))
            for sessions in opened
        ]
        await asyncio.sleep(0)
        for step in steps[::2]:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)

    async def run() -> None:
        async with subject.wire() as wire:
            before = await wire.num_live()
            await disappear(wire)
            if not await _until(lambda: wire.num_live(), before, 15.0):
                raise CheckFailed(
                    f"{await wire.num_live() - before} of {count} sessions are live 15 s after "
                    "their client went away",
                    "close() must return",
                )

    await run()  # what is started once and kept, such as a thread
    if subject.environment is None:
        return f"{count} sessions"
    # A pool, of connections or of warm containers, grows until it is as large as episodes at a time
    # ever need; a leak grows in every round.
    left = ""
    for _ in range(LEAK_ROUNDS):
        gc.collect()
        before = _resources()
        await run()
        deadline = time.monotonic() + 3.0
        while (left := _left(before)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            gc.collect()
        if not left:
            return f"{count} sessions; {', '.join(sorted(before))} as before"
    raise CheckFailed(
        f"each time, {count} sessions whose client went away left {left}",
        "end and close in close() what reset or a step started and opened",
    )


def _resources() -> dict[str, dict[str, str]]:
    """Threads, and where /proc tells children and open files of this process, by identity."""
    threads = {
        str(each.ident): each.name
        for each in threading.enumerate()
        if not each.name.startswith("agentrl-env-worker")
    }
    found = {"threads": threads}
    proc = Path("/proc/self")
    if proc.exists():
        children, files = {}, {}
        for listing in proc.glob("task/*/children"):
            with contextlib.suppress(OSError):
                for pid in listing.read_text().split():
                    children[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        for link in proc.glob("fd/*"):
            with contextlib.suppress(OSError):
                files[f"{link.name} {os.readlink(link)}"] = os.readlink(link)
        found |= {"processes": children, "open files": files}
    return found


def _left(before: dict[str, dict[str, str]]) -> str:
    """What is there now in greater number than before, in words; empty if nothing is."""
    parts = []
    for kind, now in _resources().items():
        new = [name for key, name in now.items() if key not in before[kind]]
        growth = len(now) - len(before[kind])
        if growth > 0 and new:
            parts.append(f"{growth} {kind} more ({_short(sorted(new)[0])})")
    return ", ".join(parts)


async def check_memory(subject: Subject) -> str:
    """A thousand episodes do not make the process grow."""
    subject.local()
    count, limit_s = 1000, MEMORY_TIME_S * (30 if subject.thorough else 1)
    specs = subject.specs(8)
    moves = [await subject.moves(spec) for spec in specs]
    async with subject.wire() as wire:

        async def play(count: int, until: float) -> int:
            for number in range(count):
                if time.monotonic() > until:
                    return number
                await subject.play(wire, specs[number % 8], 0, moves[number % 8])
            return count

        def used() -> tracemalloc.Snapshot:
            gc.collect()
            own = (tracemalloc.Filter(False, tracemalloc.__file__),)
            return tracemalloc.take_snapshot().filter_traces(own)

        started = time.monotonic()
        was_tracing = tracemalloc.is_tracing()
        if not was_tracing:
            tracemalloc.start()
        try:
            warm = await play(count // 4, started + limit_s / 3)
            before = used()
            played = await play(count - warm, started + limit_s)
            await asyncio.sleep(0.1)  # the last ones' close
            growth = used().compare_to(before, "lineno")
        finally:
            if not was_tracing:
                tracemalloc.stop()
    if played < MIN_MEMORY_EPISODES:
        raise CheckSkipped(f"only {warm + played} episodes in {limit_s:g} s; use --thorough")
    per_episode = sum(each.size_diff for each in growth) / played
    if per_episode > MAX_GROWTH_BYTES:
        first = max(growth, key=lambda each: each.size_diff)
        place = first.traceback[0]
        raise CheckFailed(
            f"{per_episode:,.0f} bytes more per episode over {played} episodes, most of them "
            f"from {Path(place.filename).name}:{place.lineno}",
            "keep an episode's data on self; what the class, the module or self.shared collect "
            "needs a bound",
        )
    return f"{per_episode:+,.0f} bytes per episode over {warm + played} episodes"


# Answers


async def check_canary(subject: Subject) -> str:
    """The reference answer never reaches the agent, whatever it tries."""
    remedy = "leave the reference out of prompts, observations and error messages"
    num_texts, replaced = 0, 0
    subject.local()
    specs = subject.specs(8 if subject.thorough else 3)
    async with subject.wire() as wire:
        for seed, spec in enumerate(specs):
            task = await subject.task(spec)
            for reference in (_canary(task.reference), task.reference):
                needles = _needles(reference, task.prompt if reference is task.reference else "")
                if not needles:
                    continue
                inline = protocol.to_task_spec(with_reference(task, reference))
                tries = [await subject.moves(spec, seed), [Action(text="42")], [UNKNOWN_TOOL] * 2]
                tries += [[NO_OP] * 2]
                for actions in tries:
                    said = {_text(action) for action in actions}
                    for event in await subject.play(wire, inline, seed, actions):
                        if "error" in event:
                            shown = event["detail"]
                        else:
                            shown = json.dumps(event["observation"], ensure_ascii=False)
                        num_texts += 1
                        replaced += reference is not task.reference
                        for needle in needles:
                            if needle in shown and not any(needle in each for each in said):
                                raise CheckFailed(
                                    f"{_place(spec)}: the reference {_short(needle)} stands in "
                                    f"{_short(shown)}",
                                    remedy,
                                )
    if not num_texts:
        raise CheckSkipped("tasks have no reference that can be told from other text")
    return f"{num_texts} texts, {replaced} of them with a reference of the kit's own"


def _canary(reference: JSON) -> JSON:
    """A reference of the same kind that cannot come up by chance."""
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
    """What to search for: texts and numbers too long to be there by chance, and not in the
    prompt."""
    if isinstance(reference, dict):
        return [needle for each in reference.values() for needle in _needles(each, prompt)]
    if isinstance(reference, list):
        return [needle for each in reference for needle in _needles(each, prompt)]
    if isinstance(reference, bool) or reference is None:
        return []
    needle = str(reference).strip()
    return [needle] if len(needle) >= 8 and needle not in str(prompt) else []


async def check_oracle(subject: Subject) -> str:
    """The gold answer scores 1, and doing nothing does not."""
    subject.local()
    num_gold = 0
    async with subject.wire() as wire:
        for seed, spec in enumerate(subject.specs(200 if subject.thorough else 8)):
            actions = await subject.gold(await subject.task(spec), seed)
            if actions is None:
                continue
            gold = await _score(subject, wire, spec, seed, actions)
            if gold is None or gold < 1.0 - 1e-6:
                raise CheckFailed(
                    f"{_place(spec)}: the oracle's {len(actions)} actions score "
                    f"{'nothing' if gold is None else f'{gold:g}'}, not 1",
                    "correct the grader, the reference or oracle()",
                )
            nothing = await _score(subject, wire, spec, seed, [NO_OP] * MAX_TURNS)
            if nothing is not None and nothing >= 1.0 - 1e-6:
                raise CheckFailed(
                    f"{_place(spec)}: an agent that says nothing scores {nothing:g}",
                    "a grader must not take silence for an answer",
                )
            num_gold += 1
    if not num_gold:
        raise CheckSkipped("the environment has no oracle(self) that returns the right actions")
    return f"{num_gold} tasks' gold answers, and as many empty ones"


async def _score(
    subject: Subject, wire: Wire, spec: TaskSpec, seed: int, actions: list[Action]
) -> float | None:
    """The episode's reward without the components that only punish; None if it failed."""
    events = await subject.play(wire, spec, seed, actions)
    if "error" in events[-1]:
        return None
    score = sum(event.get("reward", 0.0) for event in events)
    for name, mark in rewards_of(subject.local()).items():
        if mark.weight < 0:
            score -= mark.weight * events[-1]["reward_components"].get(name, 0.0)
    return score


async def check_snapshot(subject: Subject) -> str:
    """An episode that goes on from a snapshot goes as it would have gone on without."""
    if "snapshot" not in getattr(subject.info, "capabilities", ()):
        raise CheckSkipped("the environment defines no snapshot and restore")
    num_forks = 0
    async with subject.wire() as wire:
        for seed, spec in enumerate(subject.specs(3)):
            actions = await subject.moves(spec, seed)
            for cut in range(len(actions)):
                opened = (await wire.create(subject.request(spec, seed)))[0]
                events = [
                    await step_event(wire, opened.id, number, action)
                    for number, action in enumerate(actions[:cut])
                ]
                if any(map(is_over, events)):
                    await wire.delete(opened.id)
                    break
                name = await wire.snapshot(opened.id, cut)
                rest = await _go_on(wire, opened.id, cut, actions)
                await wire.delete(opened.id)
                request = protocol.CreateRequest(
                    env=subject.env_id, from_snapshot=name, lease_s=60.0
                )
                fork = (await wire.create(request))[0]
                forked = await _go_on(wire, fork.id, fork.step, actions, first=cut)
                await wire.delete(fork.id)
                num_forks += 1
                for number, (one, other) in enumerate(zip(rest, forked, strict=True)):
                    if {**one, "step": 0} != {**other, "step": 0}:
                        raise CheckFailed(
                            f"{_place(spec)}: after a snapshot at step {cut}, step {cut + number} "
                            f"went differently in the fork: {_difference([one], [other])}",
                            "snapshot() must hold, and restore() set, everything that reset and "
                            "step keep on self",
                        )
    return f"{num_forks} snapshots, each gone on from twice"


async def _go_on(
    wire: Wire, session: str, step: int, actions: list[Action], first: int | None = None
) -> list[Event]:
    """Play `actions[first:]`, the session being at `step`."""
    events: list[Event] = []
    for number, action in enumerate(actions[step if first is None else first :]):
        events.append(await step_event(wire, session, step + number, action))
        if is_over(events[-1]):
            break
    return events


# Words for reports


def _short(value: object, limit: int = 160) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _place(spec: TaskSpec) -> str:
    return f"task {spec.split}/{spec.index}"


def _describe(action: Action) -> str:
    if action.parse_error:
        return "an unreadable tool call"
    if action.tool_calls:
        return "a call of " + _short(
            f"{action.tool_calls[0].name or '(no name)'}({action.tool_calls[0].arguments})"
        )
    return f"the text {_short(ascii(action.text), 40)}"


def _text(action: Action) -> str:
    return action.text + json.dumps([call.arguments for call in action.tool_calls])


def _difference(before: list[Event], now: list[Event]) -> str:
    for number, (one, other) in enumerate(zip(before, now, strict=False)):
        for key in one:
            if one[key] != other.get(key):
                return f"{key} of reply {number} was {_short(one[key], 80)} and then " + _short(
                    other.get(key, other), 80
                )
    return f"{len(before)} replies and then {len(now)}"


async def _until(read: Callable[[], Awaitable[int]], value: int, timeout_s: float) -> bool:
    """Wait until the number has come down to the value."""
    deadline = time.monotonic() + timeout_s
    while await read() > value:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


CHECKS: dict[str, Callable[[Subject], Awaitable[str]]] = {
    "tasks": check_tasks,
    "tools": check_tools,
    "schema": check_schema,
    "episodes": check_episodes,
    "bad_actions": check_bad_actions,
    "finite": check_finite,
    "info": check_info,
    "determinism": check_determinism,
    "isolation": check_isolation,
    "conflicts": check_conflicts,
    "replay": check_replay,
    "reset": check_reset,
    "deadline": check_deadline,
    "event_loop": check_event_loop,
    "lease": check_lease,
    "leaks": check_leaks,
    "memory": check_memory,
    "canary": check_canary,
    "oracle": check_oracle,
    "snapshot": check_snapshot,
    "container": check_container,
}
