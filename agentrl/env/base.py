"""The base class of environments. The same class runs in this process or behind a server.

    @register("adder")
    class Adder(Environment):
        def splits(self):
            return {"train": None}

        def get(self, split, index):
            return Task(f"{split}/{index}", f"What is {index} + 1?", reference=index + 1)

        @tool(terminal=True)
        def answer(self, number: int) -> float:
            return float(number == self.task.reference)

Lifecycle. For every distinct configuration of a class in a process, `load_shared(config)` runs
once, and one instance that plays no episode answers `splits` and `get` for all sessions. Each
session has its own instance, which lives for one episode: `reset`, any number of `step`s, `close`.
The framework never runs two of those at once on one instance.

Every method below may be `def` or `async def`, except `splits`, `get` and `offered_tools`, which
must be `def`. Plain `def` methods run in a pool of threads, except `offered_tools`, which runs on
the event loop. Make objects that belong to the event loop, such as HTTP clients, in an
`async def load_shared`.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.env.protocol import make_error
from agentrl.env.threads import WorkerPool, default_pool
from agentrl.env.tools import Tool, choose_tools, rewards_of, tools_of
from agentrl.env.values import describe, to_content, to_finite, to_observation
from agentrl.errors import AgentRLError, ConfigError, EnvError, GraderError
from agentrl.types import JSON, Action, Content, Message, StepResult, Task, ToolCall, ToolSpec

Observation = str | list[Message] | None
"""Content shown to the agent: a text (one user message), messages, or nothing."""

_NOT_LOADED = object()
_DEF_ONLY = ("splits", "get", "offered_tools")
_SIGNATURES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "splits": ("splits(self)", (None,), {}),
    "get": ("get(self, split, index)", (None, "", 0), {}),
    "offered_tools": ("offered_tools(self)", (None,), {}),
    "on_call": ("on_call(self, name, arguments)", (None,), {"name": "", "arguments": {}}),
    "reset": ("reset(self, task, *, seed)", (None, None), {"seed": 0}),
    "step": ("step(self, action)", (None, None), {}),
    "on_text": ("on_text(self, text)", (None, ""), {}),
    "close": ("close(self)", (None,), {}),
    "oracle": ("oracle(self)", (None,), {}),
}
"""Methods that an author defines: how to write each, and the arguments it is called with."""

Answer = StepResult | Observation
"""The return value of `Environment.step`."""

M = TypeVar("M", bound=Callable[..., Any])


def _quick(method: M) -> M:
    """Marks a `def` of the framework that cannot block, so that it is called without a thread."""
    method.__agentrl_quick__ = True  # type: ignore[attr-defined]
    return method


class EnvConfig(BaseModel):
    """Base of an environment's nested `Config`. Unknown keys are errors, and the docstring under a
    field becomes its description."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(slots=True)
class Episode:
    """The record of one session so far, which reward methods read."""

    task: Task
    """The task that is played."""
    seed: int
    """The seed that `reset` was given; the same task and seed give the same first prompt."""
    messages: list[Message] = field(default_factory=list)
    """The first prompt, then each turn's assistant message and the observation that followed."""
    actions: list[Action] = field(default_factory=list)
    """One per turn."""
    reward: float = 0.0
    """Sum over the turns so far, without the `@reward` components."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to average over a training step under `env/<name>`."""
    info: dict[str, JSON] = field(default_factory=dict)
    """Recorded with the trajectory; nothing learns from it."""
    last_turn: bool = False
    """Whether the agent gets no turn after the one that is being answered. An episode that the
    environment does not end in that turn is truncated."""
    max_turns: int | None = None
    """The most turns that the agent gets, if the caller gave a limit, as a rollout does."""

    @property
    def num_turns(self) -> int:
        """Number of turns that the agent has taken."""
        return len(self.actions)

    @property
    def turns_left(self) -> int | None:
        """Number of turns that the agent still gets; None if the caller gave no limit."""
        if self.last_turn:
            return 0
        return None if self.max_turns is None else max(self.max_turns - self.num_turns, 0)

    @property
    def last_text(self) -> str:
        """The text of the agent's last turn, without its tool calls; empty before the first."""
        return self.actions[-1].text if self.actions else ""


@dataclass(slots=True, frozen=True)
class Finish:
    """The arguments of `Environment.finish`."""

    reward: float
    info: dict[str, JSON]
    truncated: bool


class NoEpisodeError(RuntimeError):
    """The episode, or something of it such as its task, was read before `reset`."""


class Environment:
    """Base class of all environments."""

    id: ClassVar[str] = ""
    """Set by `@register`."""
    max_sessions: ClassVar[int] = 256
    """The most live sessions of this environment in one process. Set by `@register`."""
    Config: ClassVar[type[BaseModel]] = EnvConfig
    """Override with a nested `class Config(EnvConfig)`."""
    reset_timeout_s: ClassVar[float] = 120.0
    """Seconds for `load_shared` and `reset` together, unless the caller sets a deadline."""
    step_timeout_s: ClassVar[float] = 60.0
    """Seconds for a step, unless the caller sets a deadline. A step that takes longer ends the
    session with `step_timeout`. An `async def` method is then cancelled; a `def` method continues
    in its thread, because a thread cannot be stopped."""
    max_creating: ClassVar[int | None] = None
    """The most sessions that may be in `reset` at a time; further ones wait. Set it if `reset`
    starts something heavy, such as a container. None: no limit."""
    system_prompt: str | None = None
    """Put before the first prompt as a system message, unless that begins with one."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Checks the definition of a subclass.

        Raises:
            ConfigError: an attribute is not as the framework needs it. The message names it and
                says what to write instead.
        """
        super().__init_subclass__(**options)
        for name in _DEF_ONLY:
            if inspect.iscoroutinefunction(getattr(cls, name)):
                raise ConfigError(
                    f"{cls.__name__}.{name} is `async def`: make it `def`, and load what it needs "
                    "in load_shared, which may be `async def`"
                )
        for name, value in vars(cls).items():
            _check_definition(cls.__name__, name, value)
        try:
            inspect.signature(cls.__init__).bind(None, {}, shared=None)
        except TypeError:
            raise ConfigError(
                f"{cls.__name__}.__init__ does not take the arguments that the framework passes: "
                "remove it, and set up an episode's state in reset(), settings in Config, and what "
                "sessions share in load_shared()"
            ) from None

    def __init__(
        self, config: dict[str, JSON] | BaseModel | None = None, *, shared: object = _NOT_LOADED
    ) -> None:
        """Makes an instance. Do not override it; set up an episode's state in `reset`.

        Raises:
            ConfigError: `config` has unknown keys or wrong values.
        """
        self.config: Any = load_config(type(self), config)
        self._shared = shared
        self._episode: Episode | None = None
        self._finish: Finish | None = None
        self._rng: random.Random | None = None
        self._offered: dict[str, Tool] | None = None
        self._workers: WorkerPool | None = None

    # What an author defines

    @classmethod
    def load_shared(cls, config: Any) -> Any:
        """Loads what all sessions of a configuration share (a dataset, an index, a model client).

        Runs once; its result is `self.shared` on every instance. A `def` runs in a thread, and its
        result must be safe to use from several threads. An `async def` runs on the event loop that
        plays the episodes; use its result in `async def` methods.
        """
        return None

    @classmethod
    def close_shared(cls, shared: Any) -> Any:
        """Frees what `load_shared` returned, when the process no longer needs it."""

    def splits(self) -> Mapping[str, int | None]:
        """Returns the size of each task set by its name; None: unlimited, generated on demand."""
        return {}

    def get(self, split: str, index: int) -> Task:
        """Returns task `index` (from 0) of a split; the same arguments must give the same task.

        Called on the instance that plays no episode, possibly from several threads at once. The
        episodes of a group may share one call; each gets its own copy of the task. `split` is a
        key of `splits()`, and `index` is below its size.
        """
        raise EnvError(f"{type(self).__name__} has splits but defines no get(split, index)")

    def offered_tools(self) -> Iterable[str | ToolSpec]:
        """Returns the tools for the agent's next turn, by default all `@tool` methods.

        Each is either the name of a `@tool` method, or a whole specification in OpenAI's function
        format. Calls of a specified tool go to `on_call`, for tools that are known only at run
        time, such as those of another server. A specification with the name of a `@tool` method
        replaces the specification of that method.

        Called after `reset` and after every turn, so it may depend on `self.task` and on what the
        agent has done, and must be fast. It is also called on an instance without an episode, to
        describe the environment. If it then fails because `self.task`, or an attribute that
        `reset` sets, does not exist yet, all `@tool` methods are listed.
        """
        return tools_of(type(self))

    @_quick
    def on_call(self, name: str, arguments: dict[str, JSON]) -> Any:
        """Runs a tool that `offered_tools` specified, and returns its result as a `@tool` would.

        May be `def` or `async def`. The agent's arguments have not been validated. An exception is
        reported to the agent, as for `@tool` methods.
        """
        raise ConfigError(
            f"{type(self).__name__}.offered_tools() describes '{name}', which is not a @tool "
            "method: define on_call(self, name, arguments) to run it"
        )

    @_quick
    def reset(self, task: Task, *, seed: int) -> Observation | Awaitable[Observation]:
        """Starts an episode and returns its first prompt, a text or messages.

        `self.task`, `self.rng` and `self.metrics` are ready when it is called. By default it
        returns the task's prompt.
        """
        return task.prompt

    @_quick
    def step(self, action: Action) -> Answer | Awaitable[Answer]:
        """Answers one action, by default with `run_tools`.

        An override returns either an observation, and ends the episode with `self.finish`, or a
        whole `StepResult`. In both cases the `@reward` components are added to the result that
        ends the episode.
        """
        return self.run_tools(action)

    @_quick
    def on_text(self, text: str) -> Observation | Awaitable[Observation]:
        """Answers a turn without tool calls: returns an observation, or calls `self.finish`.

        By default it ends the episode, unless the agent has a terminal tool: then the agent is
        told to use the tools. A tool that calls `self.finish` does not count as terminal. If you
        have one, mark it `@tool(terminal=True)` or define this method; otherwise a turn of plain
        text ends the episode.
        """
        if any(each.terminal for each in self._tools.values()):
            return f"Call one of the tools: {', '.join(self._tools)}."
        self.finish()
        return None

    @_quick
    def close(self) -> Awaitable[None] | None:
        """Frees what the session holds. Called once, when its episode has ended or was given up.

        After a step that timed out, a `def` method may still be running when it is called.
        """

    def oracle(self) -> Iterable[Action] | None:
        """Returns the actions that solve this episode's task, or None if they are not known.

        Called after `reset`. It may be a generator that looks at the episode between actions.
        `agentrl env check` verifies that they score 1, and `agentrl env demonstrate` writes them
        as dialogues. It cannot be called over HTTP.
        """
        return None

    # What an author uses

    @property
    def shared(self) -> Any:
        """The value that `load_shared` returned."""
        if self._shared is _NOT_LOADED:  # an instance made by hand, as in an author's unit test
            if inspect.iscoroutinefunction(type(self).load_shared):
                name = type(self).__name__
                raise ConfigError(
                    f"{name}.load_shared is `async def`, which an instance made by hand cannot "
                    f"await: make it as {name}(config, shared=await {name}.load_shared(config))"
                )
            self._shared = type(self).load_shared(self.config)
        return self._shared

    @property
    def episode(self) -> Episode:
        """The record of the episode so far.

        Raises:
            NoEpisodeError: there is no episode before `reset`.
        """
        if self._episode is None:
            raise NoEpisodeError(f"{type(self).__name__} has no episode before reset")
        return self._episode

    @property
    def task(self) -> Task:
        """The task of the episode; raises NoEpisodeError before `reset`."""
        return self.episode.task

    @property
    def rng(self) -> random.Random:
        """The episode's random number generator, seeded with the episode's seed."""
        if self._rng is None:  # made when first used, because seeding is slow
            self._rng = random.Random(0 if self._episode is None else self._episode.seed)
        return self._rng

    @property
    def metrics(self) -> dict[str, float]:
        """The episode's metrics by name, reported with every step; add your own.

        The framework counts `tool_calls`, `tool_errors` (a tool raised or timed out) and
        `invalid_calls` (unreadable, of an unknown tool, or with wrong arguments).
        """
        return self.episode.metrics

    def finish(
        self,
        reward: float | None = 0.0,
        info: dict[str, JSON] | None = None,
        *,
        truncated: bool = False,
    ) -> None:
        """Ends the episode with this turn.

        Args:
            reward: added to the `@reward` components. None, such as from a grader that gave no
                verdict, is no reward of 0: it is allowed only beside `@reward` components.
            info: reported with the last step.
            truncated: whether a limit of the environment ended the episode, not the task itself.

        Raises:
            EnvError: the episode was finished before, or `reward` is not a finite number.
            GraderError: `reward` is None and the class has no `@reward` method.
        """
        if self._finish is not None:
            raise EnvError(f"{type(self).__name__}.finish() was called twice in one episode")
        if reward is None and not rewards_of(type(self)):
            raise GraderError(
                f"{type(self).__name__}.finish(None): the episode has no reward; give a number, or "
                "raise GraderError if the answer cannot be graded"
            )
        number = 0.0 if reward is None else to_finite(reward, "finish(reward=)")
        self._finish = Finish(number, dict(info or {}), truncated)

    async def run_tools(self, action: Action) -> Observation:
        """Runs the action's tool calls in order and returns one tool message for each.

        An action without calls goes to `on_text`. Mistakes of the agent (an unreadable call, an
        unknown tool, invalid arguments) are answered, never raised. An exception of a tool is
        answered with its class and message, unless it is an `AgentRLError` (`GraderError`,
        `DataError` ...), which ends the session. Calls after one that ended the episode are not
        run.
        """
        if action.parse_error is not None:
            self._count("invalid_calls")
            return f"Your tool call could not be read: {action.parse_error}."
        if not action.tool_calls:
            return await self.call(self.on_text, action.text)
        messages: list[Message] = []
        for call in action.tool_calls:
            if self._finish is None:
                content = await self._run_tool(call)
            else:
                content = "Not run: the episode had ended."
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            )
        return messages

    def to_messages(self, first: Observation) -> list[Message]:
        """Converts what `reset` returned to messages, with `system_prompt` before them if set."""
        messages = to_observation(first, "reset()")
        if self.system_prompt and not (messages and messages[0]["role"] == "system"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    async def call(
        self,
        method: Callable[..., Any],
        /,
        *args: object,
        timeout_s: float | None = None,
        **kwargs: object,
    ) -> Any:
        """Calls a `def` (in a worker thread) or `async def` function and returns its result.

        Raises:
            TimeoutError: it took longer than `timeout_s` seconds. An `async def` was cancelled; a
                `def` continues in its thread.
        """
        calling = call_method(self._workers or default_pool(), method, *args, **kwargs)
        if timeout_s is None:
            return await calling
        async with asyncio.timeout(timeout_s):
            return await calling

    @property
    def _tools(self) -> dict[str, Tool]:
        """The tools that were offered to the agent for this turn, by name."""
        if self._offered is None:
            self._offered = choose_tools(type(self), self.offered_tools())
        return self._offered

    async def _run_tool(self, call: ToolCall) -> Content:
        tool = self._tools.get(call.name)
        if tool is None:
            self._count("invalid_calls")
            names = ", ".join(self._tools) or "none"
            return f"There is no tool '{call.name}'. The tools are: {names}."
        arguments = tool.validate(call.arguments)
        if isinstance(arguments, str):
            self._count("invalid_calls")
            return f"Wrong arguments for {tool.name}: {arguments}."
        self._count("tool_calls")
        method = getattr(self, tool.name) if tool.is_method else self.on_call
        if not tool.is_method:
            arguments = {"name": tool.name, "arguments": arguments}
        returned = failure = None
        try:
            async with nullcontext() if tool.timeout_s is None else asyncio.timeout(tool.timeout_s):
                try:
                    returned = await self.call(method, **arguments)
                except AgentRLError:
                    raise
                except Exception as error:  # answered to the agent, as `run_tools` promises
                    failure = f"{tool.name} failed: {describe(error, self.task)}"
        except TimeoutError:
            if _how_to_call(getattr(method, "__func__", method)) != "await":
                raise make_error(
                    "step_timeout",
                    f"tool {tool.name} took longer than its timeout_s={tool.timeout_s:g} and "
                    "continues in its thread; make it `async def`, or give its blocking call a "
                    "timeout",
                ) from None
            failure = f"{tool.name} ran out of time ({tool.timeout_s:g} s)."
        if failure is not None:
            self._count("tool_errors")
            return failure
        if tool.terminal:
            if self._finish is None and returned is not None:
                returned = to_finite(returned, f"the result of terminal tool {tool.name}")
            if self._finish is None:
                self.finish(0.0 if returned is None else returned)
            return ""
        return to_content(returned)

    def _count(self, metric: str) -> None:
        metrics = self.episode.metrics
        metrics[metric] = metrics.get(metric, 0.0) + 1.0


async def call_method(
    workers: WorkerPool, method: Callable[..., Any], /, *args: object, **kwargs: object
) -> Any:
    """Calls an author's method, a `def` in a thread of `workers`, and returns its result."""
    how = _how_to_call(getattr(method, "__func__", method))
    if how == "thread":
        return await workers.run(method, *args, **kwargs)
    returned = method(*args, **kwargs)
    return await returned if inspect.isawaitable(returned) else returned


@functools.lru_cache(maxsize=1024)
def _how_to_call(function: Callable[..., Any]) -> Literal["await", "quick", "thread"]:
    if hasattr(function, "__agentrl_quick__"):
        return "quick"
    return "await" if inspect.iscoroutinefunction(function) else "thread"


def _check_definition(class_name: str, name: str, value: object) -> None:
    """Checks an attribute that an author's class defines."""
    where = f"{class_name}.{name}"
    if hasattr(value, "__agentrl_tool__") or hasattr(value, "__agentrl_reward__"):
        if hasattr(Environment, name):
            raise ConfigError(f"{where} would replace Environment.{name}; rename it")
        if hasattr(value, "__agentrl_reward__"):
            _check_signature(where, value, f"{name}(self, episode)", (None, None), {})
    elif name in ("load_shared", "close_shared"):
        if inspect.isfunction(value):
            argument = "config" if name == "load_shared" else "shared"
            raise ConfigError(
                f"{where} is called on the class: write `@classmethod` above "
                f"`def {name}(cls, {argument})`"
            )
    elif name == "Config":
        if not (isinstance(value, type) and issubclass(value, BaseModel)):
            raise ConfigError(f"{where} must derive from EnvConfig: write class Config(EnvConfig)")
    elif name in _SIGNATURES and inspect.isfunction(value):
        _check_signature(where, value, *_SIGNATURES[name])


def _check_signature(
    where: str, method: Any, as_written: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    signature = inspect.signature(method)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{where}{signature}: {error}; write def {as_written}") from None


def load_config(environment: type[Environment], config: dict[str, JSON] | BaseModel | None) -> Any:
    """Returns the environment's `Config` with these values.

    Raises:
        ConfigError: a key is unknown or its value is wrong; the message names the key.
    """
    if isinstance(config, environment.Config):
        return config
    values = config.model_dump() if isinstance(config, BaseModel) else (config or {})
    try:
        return environment.Config.model_validate(values)
    except ValidationError as error:
        known = list(environment.Config.model_fields)
        problems = "; ".join(_problem(problem, known) for problem in error.errors())
        raise ConfigError(
            f"configuration of environment {environment.id or environment.__name__}: {problems}"
        ) from error


def _problem(problem: Mapping[str, Any], known: list[str]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden" or len(problem["loc"]) > 1:
        message = " ".join(str(problem["msg"]).split())
        return f"{key}: {message}" if key else message
    near = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known) or 'none'}"
    return f"there is no key '{key}'; {hint}"
