"""Holds the environment under check: a class in this process, or an environment behind a URL.

Checks play it through a transport, as a client does. In this process every check has its own
session manager, which reuses what `load_shared` returned. Some checks call the author's methods
directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentrl.env import protocol, registry
from agentrl.env.base import Environment, call_method, load_config
from agentrl.env.episode import start_episode, take_turn
from agentrl.env.protocol import CreateRequest, EnvInfo, StepRequest, TaskSpec
from agentrl.env.sessions.manager import SessionManager
from agentrl.env.threads import default_pool
from agentrl.env.tools import tools_of
from agentrl.env.transport import Http, InProcess, Transport
from agentrl.env.values import short
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolCall

T = TypeVar("T")

LEASE_S = 120.0
CALL_TIMEOUT_S = 15.0
"""Seconds after which a reset or step counts as hung, unless the class sets `reset_timeout_s` or
`step_timeout_s`; ten times that with `thorough`."""
OPEN_TIMEOUT_S = 120.0
"""Seconds that a server may take to describe its environments."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that `close` may take."""
MAX_TURNS = 5
"""Turns of an episode for which there is no oracle."""


class CheckFailed(Exception):
    """A check failed; `str()` is what it saw."""

    def __init__(self, observed: str, remedy: str, *, cause: str | None = None) -> None:
        """
        Args:
            observed: what the check saw.
            remedy: what the author can do.
            cause: the cause, such as an exception's message, if it differs from `observed`. A later
                check that fails for the same cause only refers to the first.
        """
        super().__init__(observed)
        self.remedy = remedy
        self.cause = cause or observed


class CheckSkipped(Exception):
    """A check does not apply; `str()` is the reason."""


@dataclass(slots=True)
class Direct:
    """An episode that was played without a session: what the author's methods returned."""

    first: list[Message] = field(default_factory=list)
    """The first prompt."""
    actions: list[Action] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    close_problem: str = ""
    """What was wrong with `close`; empty if nothing was."""


Event = dict[str, Any]
"""A reply in an episode as JSON, or `{"error": code, "status": ..., "detail": ...}`."""


@dataclass(slots=True)
class Subject:
    """The environment under check; `load_subject` makes it."""

    env_id: str
    """The environment's id."""
    config: dict[str, JSON]
    """Values of its configuration."""
    info: EnvInfo
    """Its description: splits, tools, schema."""
    environment: type[Environment] | None = None
    """Its class; None if it is behind `url`."""
    shared: object = None
    """What its `load_shared` returned."""
    url: str | None = None
    """URL of the server that it is behind."""
    token: str | None = None
    """The server's token."""
    thorough: bool = False
    """Check with more episodes and longer limits."""
    folder: str = field(default_factory=os.getcwd)
    """The working directory after loading."""
    variables: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    """The environment variables after loading."""
    close_hangs: bool = False
    """True once a check has found that `close` hangs; later checks do not wait for it."""
    hangs: bool = False
    """True once a reset or step did not return; then no further episodes are played."""
    fresh: asyncio.Task[Any] | None = None
    """Plays in two fresh processes; see `agentrl.env.check.fresh`."""
    _tasks: dict[tuple[str, int], Task] = field(default_factory=dict)
    _moves: dict[tuple[str | None, int | None, int], list[Action]] = field(default_factory=dict)

    async def aclose(self) -> None:
        """Calls `close_shared` with what `load_shared` returned."""
        if self.environment is not None:
            await call_method(default_pool(), self.environment.close_shared, self.shared)

    def call_timeout_s(self, kind: str) -> float:
        """Returns the seconds that a `reset` or `step` may take."""
        name = f"{kind}_timeout_s"
        of_class = getattr(self.environment or Environment, name)
        if of_class != getattr(Environment, name):
            return of_class
        return CALL_TIMEOUT_S * (10 if self.thorough else 1)

    async def limit(self, awaitable: Awaitable[T], kind: str) -> T:
        """Waits for a call of the author's code and returns its result.

        Raises:
            CheckFailed: it did not return in time.
        """
        running = asyncio.ensure_future(awaitable)
        seconds = self.call_timeout_s(kind)
        await asyncio.wait({running}, timeout=seconds)
        if running.done():
            return running.result()
        running.cancel()
        running.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise self.hung("a step" if kind == "step" else "reset or get", seconds)

    def hung(self, what: str, seconds: float) -> CheckFailed:
        """Returns the failure of a call that did not return, and has no further episode played."""
        self.hangs = True
        return CheckFailed(
            f"{what} had not returned after {seconds:g} s",
            "find the call that hangs with `agentrl env play`, and give it a time limit; if it "
            "needs this long, set reset_timeout_s or step_timeout_s of the class",
        )

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[Transport]:
        """Yields a transport to the environment, and closes it afterwards."""
        if self.url is not None:
            http = Http(self.url, self.token)
            try:
                yield http
            finally:
                await http.aclose()
            return
        environment = self.local()
        manager = SessionManager(lambda _: environment)
        manager.environments.adopt(environment, self.config, self.shared)
        try:
            yield InProcess(manager)
        finally:
            await manager.aclose(0.05 if self.close_hangs else CLOSE_TIMEOUT_S)

    def local(self) -> type[Environment]:
        """Returns the class.

        Raises:
            CheckSkipped: the environment is behind a URL.
        """
        if self.environment is None:
            raise CheckSkipped("needs the class, which is not available behind a URL")
        return self.environment

    def specs(self, count: int) -> list[TaskSpec]:
        """Returns `count` tasks from all splits in turn, repeated if there are fewer.

        Raises:
            CheckSkipped: the environment has no tasks of its own.
        """
        sizes = {split: size for split, size in self.info.splits.items() if size != 0}
        if not sizes:
            raise CheckSkipped("the environment has no splits: sessions bring their own tasks")
        names = list(sizes)
        specs = []
        for number in range(count):
            split = names[number % len(names)]
            specs.append(TaskSpec(split, (number // len(names)) % (sizes[split] or count)))
        return specs

    async def task(self, spec: TaskSpec) -> Task:
        """Returns the whole task, reference included, from the author's `get`.

        Raises:
            CheckSkipped: the environment is behind a URL.
            CheckFailed: `get` did not return in time.
        """
        assert spec.split is not None and spec.index is not None
        key = (spec.split, spec.index)
        if key not in self._tasks:
            instance = self.instance()
            task = await self.limit(instance.call(instance.get, *key), "reset")
            task_as_json(task)
            self._tasks[key] = task
        return self._tasks[key]

    def instance(self) -> Environment:
        """Returns an instance without a session.

        Raises:
            CheckSkipped: the environment is behind a URL.
        """
        return self.local()(self.config, shared=self.shared)

    async def moves(self, spec: TaskSpec, seed: int = 0) -> list[Action]:
        """Returns the actions that checks play on a task, the same every time.

        They are two random calls of tools that do not end the episode, then the oracle's actions;
        without an oracle, or behind a URL, they are random calls, or plain texts without tools.
        """
        key = (spec.split, spec.index, seed)
        if key not in self._moves:
            self._moves[key] = await self._find_moves(spec, seed)
        return list(self._moves[key])

    async def _find_moves(self, spec: TaskSpec, seed: int) -> list[Action]:
        rng = random.Random(f"{spec.split}/{spec.index}/{seed}")
        if self.environment is None:
            return sample_calls(self.info.tools, rng, MAX_TURNS)
        terminal = {name for name, tool in tools_of(self.environment).items() if tool.terminal}
        going_on = [spec for spec in self.info.tools if tool_name(spec) not in terminal]
        ending = [spec for spec in self.info.tools if tool_name(spec) in terminal]
        first = sample_calls(going_on, rng, 2) if going_on else []
        if gold := await self.gold(spec, seed):
            return [*first, *gold]
        return [*first, *sample_calls(ending or going_on, rng, 1 if ending else MAX_TURNS - 2)]

    async def gold(self, spec: TaskSpec, seed: int) -> list[Action]:
        """Returns the actions of the environment's oracle; none if it has no oracle.

        They are played as the oracle yields them, because it may look at the episode in between.
        """
        if self.local().oracle is Environment.oracle:
            return []
        return (await self.play_direct(spec, None, seed)).actions

    async def play(
        self,
        transport: Transport,
        spec: TaskSpec,
        seed: int = 0,
        actions: list[Action] | None = None,
        *,
        truncate: bool = True,
        opened_too: asyncio.Barrier | None = None,
    ) -> list[Event]:
        """Plays one episode in its own session, which is closed afterwards.

        Args:
            actions: None: `moves`.
            truncate: the last action is the agent's last turn.
            opened_too: waited for before the first action, so that others are open by then.

        Returns:
            The first event and one per action; an error is the last event.

        Raises:
            CheckFailed: a reset or step did not return in time.
        """
        actions = await self.moves(spec, seed) if actions is None else actions
        reset_s, step_s = self.call_timeout_s("reset"), self.call_timeout_s("step")
        create = CreateRequest(
            self.env_id, spec, seed, self.config, lease_s=LEASE_S, timeout_s=reset_s
        )
        events: list[Event] = []
        session = None
        try:
            try:
                key = secrets.token_hex(16)
                created = await transport.create(create, key, reset_s + CLOSE_TIMEOUT_S)
                (session,) = created.sessions
            finally:
                if opened_too is not None:
                    await opened_too.wait()
            events.append({"observation": session.observation, "tools": session.tools})
            for number, action in enumerate(actions):
                last = truncate and number + 1 == len(actions)
                request = StepRequest(number, action, step_s, last)
                reply = await transport.step(session.id, request, step_s + CLOSE_TIMEOUT_S)
                events.append(protocol.as_json(reply))
                if is_over(events[-1]):
                    break
        except EnvError as error:
            if error.code == "reset_timeout":
                raise self.hung("reset", reset_s) from None
            if error.code == "step_timeout" and "its timeout_s" not in str(error):
                raise self.hung("a step", step_s) from None
            events.append({"error": error.code, "status": error.status, "detail": str(error)})
        finally:
            if session is not None:
                await transport.delete(session.id, CLOSE_TIMEOUT_S)
        return events

    async def play_direct(
        self, spec: TaskSpec, actions: list[Action] | None, seed: int = 0
    ) -> Direct:
        """Plays an episode on an instance without a session, until a method raises.

        Args:
            actions: None: those of the oracle.

        Returns:
            What the author's methods returned.

        Raises:
            CheckFailed: a method did not return in time.
        """
        instance = self.instance()
        played = Direct()
        with contextlib.suppress(EnvError):  # checks that play in sessions report it
            task = await self.task(spec)
            played.first = await self.limit(start_episode(instance, task, seed), "reset")
            offered = actions
            if offered is None:
                offered = await self.limit(instance.call(instance.oracle), "step")
            iterator = iter(offered or ())
            while (action := await instance.call(next, iterator, None)) is not None:
                played.actions.append(action)
                last = actions is not None and len(played.actions) == len(actions)
                turn = take_turn(instance, action, last=last)
                played.results.append(await self.limit(turn, "step"))
                if played.results[-1].terminated or played.results[-1].truncated:
                    break
        played.close_problem = await self.close(instance)
        return played

    async def close(self, instance: Environment) -> str:
        """Closes an instance and returns what was wrong, for `check_close` to report."""
        hangs = f"had not returned after {CLOSE_TIMEOUT_S:g} s"
        if self.close_hangs:
            return hangs
        closing = asyncio.ensure_future(instance.call(instance.close))
        await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        if not closing.done():
            closing.cancel()
            self.close_hangs = True
            return hangs
        error = closing.exception()
        return f"raised {type(error).__name__}: {error}" if error else ""


def task_as_json(task: Any) -> JSON:
    """Returns what `get` returned as JSON.

    Raises:
        CheckFailed: it is no task, or a part of it is not JSON.
    """
    if not isinstance(task, Task):
        name = type(task).__name__
        raise CheckFailed(
            f"get() returned {name}, not a Task", "return Task(id, prompt, reference)"
        )
    parts = {"prompt": task.prompt, "reference": task.reference}
    parts |= {f"metadata[{key!r}]": value for key, value in task.metadata.items()}
    for name, value in parts.items():
        try:
            protocol.as_json(value)
        except TypeError as error:
            raise CheckFailed(
                f"{name} of task {task.id!r} is {short(value)}: {error}",
                "put only None, bool, numbers, str, list and dict into a task",
                cause=str(error),
            ) from None
    return protocol.as_json(task)


def place(spec: TaskSpec) -> str:
    """Returns the name of a task in reports."""
    return f"task {spec.split}/{spec.index}"


def tool_name(spec: Mapping[str, Any]) -> str:
    return spec["function"]["name"]


def is_over(event: Event) -> bool:
    """Returns True if the event ends the episode."""
    return "error" in event or event.get("terminated", False) or event.get("truncated", False)


# Tool calls for environments that have no oracle

_TEXTS = ("42", "I do not know.", "Let me think about it.\n\n#### 7")
_WORDS = ("1", "2", "abc", "hello")


def sample_calls(
    tools: Sequence[Mapping[str, Any]], rng: random.Random, count: int
) -> list[Action]:
    """Returns `count` actions, each a call of a random tool; plain texts if there are no tools."""
    if not tools:
        return [Action(text=rng.choice(_TEXTS)) for _ in range(count)]
    actions = []
    for number in range(count):
        function = rng.choice(tools)["function"]
        schema = function["parameters"]
        arguments = sample_value(schema, rng, schema.get("$defs", {}))
        call = ToolCall(f"call-{number}", function["name"], arguments)  # type: ignore[arg-type]
        actions.append(Action(tool_calls=(call,)))
    return actions


def sample_value(schema: Mapping[str, Any], rng: random.Random, definitions: Mapping) -> JSON:
    """Draws a value that fits the schema, as far as it uses the common keywords.

    Args:
        definitions: the schema's `$defs`.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return sample_value(definitions.get(name, {}), rng, definitions)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return sample_value(rng.choice(schema[key]), rng, definitions)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind in ("integer", "number"):
        return _sample_number(schema, rng, kind)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if kind == "array":
        count = max(schema.get("minItems", 0), min(2, schema.get("maxItems", 2)))
        return [sample_value(schema.get("items", {}), rng, definitions) for _ in range(count)]
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: sample_value(each, rng, definitions)
            for name, each in schema.get("properties", {}).items()
            if name in required or rng.random() < 0.5
        }
    text = rng.choice(_WORDS).ljust(schema.get("minLength", 0), "x")
    return text[: schema.get("maxLength", len(text))]


def _sample_number(schema: Mapping[str, Any], rng: random.Random, kind: str) -> JSON:
    low = schema.get("minimum", schema.get("exclusiveMinimum", None))
    high = schema.get("maximum", schema.get("exclusiveMaximum", None))
    low = (0 if high is None else high - 10) if low is None else low
    high = low + 10 if high is None else high
    low, high = low + ("exclusiveMinimum" in schema), high - ("exclusiveMaximum" in schema)
    if kind == "number":
        return low + (high - low) * rng.random()
    step = int(schema.get("multipleOf", 1))
    return rng.randint(-(-int(low) // step), int(high) // step) * step


async def load_subject(
    target: str | type[Environment],
    *,
    config: Mapping[str, JSON] | None = None,
    env_id: str | None = None,
    token: str | None = None,
    thorough: bool = False,
) -> Subject:
    """Loads the environment to check. Use it on one event loop, and close it at the end.

    Args:
        target: a class, a name for `agentrl.env.registry.resolve`, or the URL of a server.
        config: values of its configuration.
        env_id: the environment on the server; needed if that serves several.
        token: the server's token; None: from the variable AGENTRL_ENV_TOKEN.
        thorough: check with more episodes and longer limits.

    Raises:
        ConfigError: it cannot be found, or its configuration is wrong.
        EnvError: the server does not answer or refuses.
        Exception: whatever the class's `load_shared` raised.
    """
    values = dict(config or {})
    if isinstance(target, str) and urlsplit(target).scheme in ("http", "https"):
        token = token or os.environ.get(protocol.TOKEN_VARIABLE)
        http = Http(target, token)
        try:
            served = await http.environments(OPEN_TIMEOUT_S)
            if env_id is None and len(served) != 1:
                names = ", ".join(served)
                raise ConfigError(f"{target} serves {names}: say which one with --env ID")
            if env_id is not None and env_id not in served:
                raise ConfigError(f"{target} serves {', '.join(served)}, and no '{env_id}'")
            found_id = env_id or served[0]
            info = await http.info(found_id, values, OPEN_TIMEOUT_S)
        finally:
            await http.aclose()
        return Subject(found_id, values, info, url=target, token=token, thorough=thorough)
    found = registry.resolve(target) if isinstance(target, str) else registry.with_id(target)
    loaded = load_config(found, values)
    shared = await call_method(default_pool(), found.load_shared, loaded)
    subject = Subject(
        found.id,
        values,
        info=None,  # type: ignore[arg-type]  # set in the next lines
        environment=found,
        shared=shared,
        thorough=thorough,
    )
    async with subject.transport() as transport:
        subject.info = await transport.info(found.id, values, OPEN_TIMEOUT_S)
    return subject
