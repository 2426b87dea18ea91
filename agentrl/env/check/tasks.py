"""Checks tasks, tool specifications and messages."""

from __future__ import annotations

import inspect
import json
import random
import re
import time
from collections import Counter
from typing import Any

from fastapi.openapi.models import Schema
from pydantic import ValidationError

from agentrl.env import protocol
from agentrl.env.base import Environment
from agentrl.env.check.subject import CheckFailed, CheckSkipped, Subject, short, task_as_json
from agentrl.env.tools import rewards_of, tools_of
from agentrl.env.transport import Transport
from agentrl.errors import EnvError

READ_S = 2.0
"""Seconds for which rows of a split are read; thirty times that with `thorough`."""
ROWS_AT_ONCE = 50
HELD_OUT = 50
"""Most tasks of a test split that are searched for in a training split."""
MIN_HELD_OUT = 8
"""With fewer different tasks in a test split, some may equal training tasks by chance, so it is not
compared."""
_TRAIN = re.compile(r"(?i)train")
_TEST = re.compile(r"(?i)test|eval|valid|dev|held")
ENDLESS_ROWS = 1000
"""Rows that are read of an unlimited split, and at most of a training split that is searched."""


async def check_tasks(subject: Subject) -> str:
    """Tasks can be read in every split, have a prompt and a unique id, and are the same each time;
    test splits do not contain the tasks of training splits."""
    num_read = 0
    async with subject.transport() as transport:
        for split, size in subject.info.splits.items():
            if size == 0:
                raise CheckFailed(f"split '{split}' is empty", "leave empty splits out of splits()")
            num_read += await _read_split(subject, transport, split, size)
            if subject.environment is not None:
                for index in sorted({0, (size or 1_000_001) - 1}):
                    await _check_repeatable(subject, split, index)
    if not num_read:
        raise CheckSkipped("the environment has no splits: sessions bring their own tasks")
    if subject.environment is not None:
        await _check_held_out(subject)
    return f"{num_read} tasks of {len(subject.info.splits)} splits"


async def _check_held_out(subject: Subject) -> None:
    """Checks that the tasks of a test split are not those of a training split: at the same indices,
    or at any of the first `ENDLESS_ROWS` if the training split is finite."""
    splits = subject.info.splits
    pairs = [(a, b) for a in splits for b in splits if _TRAIN.search(a) and not _TRAIN.search(b)]
    for train, test in pairs:
        if not _TEST.search(test):
            continue
        size, deadline = splits[train], time.monotonic() + READ_S
        tests = await _contents(subject, test, min(splits[test] or HELD_OUT, HELD_OUT), deadline)
        if len(set(tests)) < MIN_HELD_OUT:
            continue
        count = HELD_OUT if size is None else min(size, ENDLESS_ROWS)
        trained = await _contents(subject, train, count, deadline)
        same = sum(one == other for one, other in zip(tests, trained, strict=False))
        if size is not None:
            same = max(same, sum(each in set(trained) for each in tests))
        if same >= 0.9 * min(len(tests), len(trained)):
            raise CheckFailed(
                f"{same} of {len(tests)} tasks of split '{test}' are tasks of '{train}' as well",
                "give each split its own tasks; otherwise an evaluation measures what the policy "
                "has memorised",
            )


async def _contents(subject: Subject, split: str, count: int, deadline: float) -> list[str]:
    """Returns up to `count` tasks of a split as text without their ids, until the deadline."""
    contents = []
    for index in range(count):
        task = await subject.task(protocol.TaskSpec(split, index))
        contents.append(repr(protocol.as_json([task.prompt, task.reference, task.metadata])))
        if time.monotonic() > deadline:
            break
    return contents


async def _read_split(subject: Subject, transport: Transport, split: str, size: int | None) -> int:
    """Reads rows of a split until time is up: both ends first, the rest in random order. Returns
    their number."""
    starts = list(range(0, size or ENDLESS_ROWS, ROWS_AT_ONCE))
    middle = starts[1:-1]
    random.Random(split).shuffle(middle)
    deadline = time.monotonic() + READ_S * (30 if subject.thorough else 1)
    ids: Counter[str] = Counter()
    for start in dict.fromkeys([starts[0], starts[-1], *middle]):
        rows = range(start, min(start + ROWS_AT_ONCE, size or ENDLESS_ROWS))
        for preview in await _previews(subject, transport, split, rows):
            ids[preview.id] += 1
            if not preview.prompt:
                raise CheckFailed(
                    f"task {preview.index} of split '{split}' has an empty prompt",
                    "give Task a text or messages as prompt",
                )
        if time.monotonic() > deadline:
            break
    task_id, count = ids.most_common(1)[0]
    if count > 1:
        raise CheckFailed(
            f"{count} tasks of split '{split}' have the id {task_id!r}",
            "give each task a unique id, such as its split and index: results are counted by id",
        )
    return ids.total()


async def _previews(
    subject: Subject, transport: Transport, split: str, rows: range
) -> list[protocol.TaskPreview]:
    """Reads rows of a split."""
    remedy = "get(split, index) must answer for every index below the split's size"
    try:
        timeout_s = subject.call_timeout_s("reset")
        reading = transport.tasks(subject.env_id, split, rows, subject.config, timeout_s)
        return await subject.limit(reading, "reset")
    except EnvError as error:
        if len(rows) == 1:
            message = f"task {rows.start} of split '{split}' cannot be read: {error}"
            raise CheckFailed(message, remedy) from error
        for index in rows:
            await _previews(subject, transport, split, range(index, index + 1))
        raise CheckFailed(
            f"tasks {rows.start} to {rows.stop - 1} of split '{split}' cannot be read together: "
            f"{error}",
            remedy,
        ) from error


async def _check_repeatable(subject: Subject, split: str, index: int) -> None:
    """Checks that new instances return the same task, reference included."""
    seen = []
    for _ in range(3):
        instance = subject.instance()
        task = await subject.limit(instance.call(instance.get, split, index), "reset")
        seen.append(task_as_json(task))
    for again in seen[1:]:
        if again != seen[0]:
            raise CheckFailed(
                f"task {index} of split '{split}' was {short(seen[0])} once and "
                f"{short(again)} another time",
                "derive a task only from (split, index), such as with "
                'random.Random(f"{split}/{index}")',
            )


async def check_tools(subject: Subject) -> str:
    """Tool specifications are accepted by OpenAI's API and vLLM, and a turn of plain text does not
    end an episode that a tool ends with a reward."""
    remedy = "rename it, or annotate its parameters with types that have a JSON schema"
    seen = set()
    for spec in subject.info.tools:
        function: dict[str, Any] = spec.get("function") or {}  # type: ignore[assignment]
        name = function.get("name", "")
        problem = None
        if spec.get("type") != "function":
            problem = f"type is {spec.get('type')!r}, not 'function'"
        elif not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            problem = "a name has 1 to 64 ASCII letters, digits, '_' and '-'"
        elif name in seen:
            problem = "two tools have this name"
        elif not isinstance(function.get("description", ""), str):
            problem = "its description is not a text"
        else:
            problem = _schema_problem(function.get("parameters"))
        if problem:
            raise CheckFailed(f"tool {name or spec!r}: {problem}", remedy)
        seen.add(name)
    if not seen:
        raise CheckSkipped("the environment offers no tools")
    if subject.environment is not None and (name := _ends_unannounced(subject.environment)):
        raise CheckFailed(
            f"a turn of plain text ends the episode without a reward: no tool is terminal, though "
            f"{name} calls self.finish()",
            f"define on_text(self, text), such as to return 'Call {name}.'; if every call of "
            f"{name} ends the episode, mark it @tool(terminal=True) instead",
        )
    return f"{len(seen)} tools: {', '.join(sorted(seen))}"


def _ends_unannounced(environment: type[Environment]) -> str | None:
    """Returns the name of a tool that calls `self.finish` although no tool is terminal, in an
    environment where text without a tool call ends the episode unrewarded; None if there is none.
    """
    tools = tools_of(environment)
    defaults = (environment.on_text, environment.step) == (Environment.on_text, Environment.step)
    if not defaults or rewards_of(environment) or any(tool.terminal for tool in tools.values()):
        return None
    for name in tools:
        code = inspect.unwrap(getattr(environment, name)).__code__
        if "finish" in code.co_names:
            return name
    return None


def _schema_problem(schema: Any) -> str | None:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return "its parameters are not an object schema"
    try:
        Schema.model_validate(schema)
        text = json.dumps(schema, allow_nan=False)
    except ValidationError as error:
        problem = error.errors()[0]
        steps = [str(step) for step in problem["loc"] if step != "Schema"]  # pydantic's own names
        where = ".".join(step for step in steps if "[" not in step)
        return f"its {where} is {short(problem['input'])}: {problem['msg']}"
    except (TypeError, ValueError) as error:
        return f"its parameters are not JSON: {error}"
    missing = set(schema.get("required", ())) - set(schema.get("properties", {}))
    if missing:
        return f"parameters are required but not in properties: {', '.join(sorted(missing))}"
    for name in re.findall(r'"\$ref": "(?:[^"]*/)?([^"]*)"', text):
        if name not in schema.get("$defs", {}):
            return f"its parameters refer to {name}, which is not in $defs"
    return None


async def check_schema(subject: Subject) -> str:
    """Prompts, observations and info are unchanged by encoding them as JSON and decoding them."""
    subject.local()
    remedy = "return texts, or messages of str keys and plain JSON values, with lists for tuples"
    num_values = 0
    for seed, spec in enumerate(subject.specs(4)):
        actions = await subject.moves(spec, seed)
        played = await subject.play_direct(spec, actions, seed)
        values: list[tuple[str, Any]] = [("the first prompt", played.first)]
        values += [
            (f"the {what} of step {number}", value)
            for number, result in enumerate(played.results)
            for what, value in (("observation", result.observation), ("info", result.info))
        ]
        for where, value in values:
            try:
                after = protocol.as_json(value)
            except TypeError:
                continue  # `episodes` reports it
            if not _same(value, after):
                raise CheckFailed(
                    f"{where} was {short(value)} and came out of JSON as {short(after)}", remedy
                )
            num_values += 1
    return f"{num_values} prompts, observations and infos"


def _same(before: Any, after: Any) -> bool:
    """Returns True if a value survived JSON, which turns tuples into lists and keys into texts."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(before[k], after[k]) for k in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return before == after and isinstance(before, tuple | set) == isinstance(after, tuple | set)
