"""The author's side: one class is an environment, in this process or behind a server.

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
once and one instance, which plays no episode itself, answers `splits` and `get` for all sessions.
Each session then has an instance of its own: `reset`, any number of `step`s, `close`. The framework
never runs two of those at once on one instance, and an instance lives for one episode.

Every method below may be `def` or `async def`, except `splits`, `get` and `offered_tools`, which
are `def`. Plain `def` methods run in a pool of threads, never on the event loop; `offered_tools`
alone runs on it. An `async def load_shared` makes what belongs to the event loop, as clients do.
"""

from __future__ import annotations

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
from agentrl.env.threads import WorkerPool, call_timeout, default_pool
from agentrl.env.tools import Tool, choose_tools, tools_of
from agentrl.env.values import describe, to_content, to_finite, to_observation
from agentrl.errors import AgentRLError, ConfigError, EnvError
from agentrl.types import JSON, Action, Content, Message, StepResult, Task, ToolCall, ToolSpec

Observation = str | list[Message] | None
"""What the agent is shown: a text (one user message), messages, or nothing."""

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
"""What a step returns."""

M = TypeVar("M", bound=Callable[..., Any])


def _quick(method: M) -> M:
    """Mark a `def` of the framework that cannot block, so that it needs no thread."""
    method.__agentrl_quick__ = True  # type: ignore[attr-defined]
    return method


class EnvConfig(BaseModel):
    """Base of an environment's nested `Config`: unknown keys are errors, and the docstring under a
    field is its description."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(slots=True)
class Episode:
    """The record of one session so far, which reward methods read."""

    task: Task
    """What is played."""
    seed: int
    """What `reset` was given: the same seed shows the same first observation."""
    messages: list[Message] = field(default_factory=list)
    """The first prompt, then each turn's assistant message and the observation it led to."""
    actions: list[Action] = field(default_factory=list)
    """One per turn."""
    reward: float = 0.0
    """Sum over the turns so far, without the `@reward` components."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to average over a training step under `env/<name>`."""
    info: dict[str, JSON] = field(default_factory=dict)
    """Kept with the trajectory; nothing learns from it."""
    last_turn: bool = False
    """The agent gets no turn after the one that is being answered. If that does not end the
    episode by itself, it ends truncated."""
    max_turns: int | None = None
    """Turns that the agent gets at most, where the caller says so, as a rollout does."""

    @property
    def num_turns(self) -> int:
        """Turns that the agent has taken."""
        return len(self.actions)

    @property
    def turns_left(self) -> int | None:
        """Turns that the agent has after those it took; None where nobody counts."""
        if self.last_turn:
            return 0
        return None if self.max_turns is None else max(self.max_turns - self.num_turns, 0)

    @property
    def last_text(self) -> str:
        """The agent's text of its last turn, outside tool calls."""
        return self.actions[-1].text if self.actions else ""


@dataclass(slots=True, frozen=True)
class Finish:
    """The arguments of `Environment.finish`."""

    reward: float
    info: dict[str, JSON]
    truncated: bool


class NoEpisodeError(RuntimeError):
    """The episode, or its task, was asked for before there is one."""


class Environment:
    """Base class of all environments."""

    id: ClassVar[str] = ""
    """Set by `@register`."""
    max_sessions: ClassVar[int] = 256
    """Live sessions a process accepts; set by `@register`."""
    Config: ClassVar[type[BaseModel]] = EnvConfig
    """Override with a nested `class Config(EnvConfig)`."""
    reset_timeout_s: ClassVar[float] = 120.0
    """Deadline of `reset`, and of `load_shared` before it, where the caller names none."""
    step_timeout_s: ClassVar[float] = 60.0
    """Deadline of a step where the caller names none. A step that passes it ends the session with
    `step_timeout`. An `async def` method is cancelled then; a `def` method goes on in its thread,
    because a thread cannot be stopped."""
    max_creating: ClassVar[int | None] = None
    """Sessions that may be in their `reset` at a time; further ones wait. For environments whose
    reset starts something heavy, such as a container. None: no bound of its own."""
    system_prompt: str | None = None
    """Put before the first prompt as a system message."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class whose instances could not be made or asked.

        Raises:
            ConfigError: it names the method and what to write instead.
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
                f"{cls.__name__}.__init__ does not take what every environment is made with: "
                "remove it, and set up an episode's state in reset(), settings in Config and what "
                "sessions share in load_shared()"
            ) from None

    def __init__(
        self, config: dict[str, JSON] | BaseModel | None = None, *, shared: object = _NOT_LOADED
    ) -> None:
        """Do not override; set up an episode's state in `reset`.

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
        """Load what all sessions of a configuration share (a dataset, an index, a model client).

        Runs once; its result is `self.shared` on every instance. A `def` runs in a thread, and its
        result must be safe to use from several threads. An `async def` runs on the event loop that
        plays the episodes, and its result is for `async def` methods.
        """
        return None

    @classmethod
    def close_shared(cls, shared: Any) -> Any:
        """Free what `load_shared` returned, when the process is done with this configuration."""

    def splits(self) -> Mapping[str, int | None]:
        """Names of the task sets and their sizes; None: tasks are generated without end."""
        return {}

    def get(self, split: str, index: int) -> Task:
        """Task `index` (from 0) of a split: the same arguments give the same task, always.

        Called on the instance that plays no episode, possibly from several threads at once, and
        about once for all episodes of a group, each of which has a copy. `split` is one of
        `splits()` and `index` within its size.
        """
        raise EnvError(f"{type(self).__name__} has splits but defines no get(split, index)")

    def offered_tools(self) -> Iterable[str | ToolSpec]:
        """Returns the tools of the agent's next turn, by default all `@tool` methods.

        A name stands for a `@tool` method. A whole specification (OpenAI's function format) stands
        for a tool that is known only at run time, as those of another server are: its calls go to
        `on_call`. One that bears the name of a `@tool` method describes that method.

        Asked after `reset` and after every turn, so it may look at `self.task` and at what the
        agent has done, and must be quick. It is asked on an instance without an episode, too, for
        what the environment says of itself: where it looks at `self.task`, or at what `reset`
        sets, the answer is all `@tool` methods.
        """
        return tools_of(type(self))

    @_quick
    def on_call(self, name: str, arguments: dict[str, JSON]) -> Any:
        """Run a tool that `offered_tools` described and return its result, as `@tool` methods do.

        May be `def` or `async def`. The arguments are the agent's, checked by nobody yet; what is
        raised is told to the agent.
        """
        raise ConfigError(
            f"{type(self).__name__}.offered_tools() describes '{name}', which is no @tool method: "
            "define on_call(self, name, arguments) to run it"
        )

    @_quick
    def reset(self, task: Task, *, seed: int) -> Observation | Awaitable[Observation]:
        """Start an episode and return its first prompt: a text or messages.

        `self.task`, `self.rng` and `self.metrics` are ready when it is called. By default the
        task's own prompt.
        """
        return task.prompt

    @_quick
    def step(self, action: Action) -> Answer | Awaitable[Answer]:
        """Answer one action; the default is `run_tools`.

        Free-form environments override it and return an observation, ending the episode with
        `self.finish`, or a whole `StepResult`. `@reward` components are added to the result that
        ends the episode either way.
        """
        return self.run_tools(action)

    @_quick
    def on_text(self, text: str) -> Observation | Awaitable[Observation]:
        """Answer a turn without tool calls: return an observation, or call `self.finish`.

        By default it ends the episode, unless the environment has a terminal tool: then the agent
        is told to use the tools. A tool that calls `self.finish` is not a terminal one: mark it
        `@tool(terminal=True)`, or define this method, or a turn of thinking ends the episode.
        """
        if any(each.terminal for each in self._tools.values()):
            return f"Call one of the tools: {', '.join(self._tools)}."
        self.finish()
        return None

    @_quick
    def close(self) -> Awaitable[None] | None:
        """Free what the session holds. Called once: when its episode ended or was given up.

        After a step that ran out of time it is called while a `def` method may still be running.
        """

    def oracle(self) -> Iterable[Action] | None:
        """The actions that solve this episode's task; None if the environment does not know them.

        The conformance check plays them, in the process it runs in: they must score 1. It can't
        be reached over the wire. Called after `reset`.
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
        """The record of the episode so far. Raises NoEpisodeError before `reset`."""
        if self._episode is None:
            raise NoEpisodeError(f"{type(self).__name__} has no episode before reset")
        return self._episode

    @property
    def task(self) -> Task:
        """The task that is played."""
        return self.episode.task

    @property
    def rng(self) -> random.Random:
        """The episode's random numbers; they follow from the seed alone."""
        if self._rng is None:  # made at its first use, for seeding takes a while
            self._rng = random.Random(0 if self._episode is None else self._episode.seed)
        return self._rng

    @property
    def metrics(self) -> dict[str, float]:
        """The episode's running totals, reported with every step; add your own.

        The framework counts `tool_calls`, `tool_errors` (a tool raised or ran out of time) and
        `invalid_calls` (unreadable, of an unknown tool, or with wrong arguments).
        """
        return self.episode.metrics

    def finish(
        self,
        reward: float | None = None,
        info: dict[str, JSON] | None = None,
        *,
        truncated: bool = False,
    ) -> None:
        """End the episode with this turn.

        Args:
            reward: added to the `@reward` components.
            info: reported with the last step.
            truncated: a limit of the environment cut the episode, not the task's own end.

        Raises:
            EnvError: the episode was finished before, or `reward` is not a finite number.
        """
        if self._finish is not None:
            raise EnvError(f"{type(self).__name__}.finish() was called twice in one episode")
        number = 0.0 if reward is None else to_finite(reward, "finish(reward=)")
        self._finish = Finish(number, dict(info or {}), truncated)

    async def run_tools(self, action: Action) -> Observation:
        """Run the action's tool calls in order; one tool message each. Text goes to `on_text`.

        Whatever the agent did wrong (an unreadable call, an unknown tool, arguments that do not
        validate) is answered, never raised. So is an exception of a tool, with its class and
        message, unless it is an error of agentrl's (`GraderError`, `DataError` ...): that ends the
        session.
        Calls after one that ended the episode are not run.
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
        """The first prompt as messages: what `reset` returned, after `system_prompt` if any."""
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
        """Call a `def` (in a worker thread) or `async def` function and wait for its result.

        Raises:
            TimeoutError: `timeout_s` passed. An `async def` was cancelled, a `def` abandoned.
        """
        calling = call_method(self._workers or default_pool(), method, *args, **kwargs)
        if timeout_s is None:
            return await calling
        async with call_timeout(timeout_s):
            return await calling

    @property
    def _tools(self) -> dict[str, Tool]:
        """The tools that the agent was offered for this turn, by name."""
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
        try:
            async with nullcontext() if tool.timeout_s is None else call_timeout(tool.timeout_s):
                returned, failure = await self._attempt(tool, method, arguments)
        except TimeoutError:
            if _how_to_call(getattr(method, "__func__", method)) != "await":
                raise make_error(
                    "step_timeout",
                    f"tool {tool.name} passed its timeout_s={tool.timeout_s:g} and goes on in its "
                    "thread; make it async, or give its blocking call a timeout",
                ) from None
            returned, failure = None, f"{tool.name} ran out of time ({tool.timeout_s:g} s)."
        if failure is not None:
            self._count("tool_errors")
            return failure
        if tool.terminal:
            if self._finish is None and returned is not None:
                returned = to_finite(returned, f"what the terminal tool {tool.name} returns")
            if self._finish is None:
                self.finish(returned)
            return ""
        return to_content(returned)

    async def _attempt(
        self, tool: Tool, method: Callable[..., Any], arguments: dict[str, Any]
    ) -> tuple[Any, str | None]:
        """Calls a tool. Returns its result, or None and what the agent is told of its failure."""
        try:
            return await self.call(method, **arguments), None
        except AgentRLError:
            raise
        except Exception as error:  # an answer to the agent by contract, see `run_tools`
            return None, f"{tool.name} failed: {describe(error, self.task)}"

    def _count(self, metric: str) -> None:
        self.metrics[metric] = self.metrics.get(metric, 0.0) + 1.0


async def call_method(
    workers: WorkerPool, method: Callable[..., Any], /, *args: object, **kwargs: object
) -> Any:
    """Call an author's method: a `def` in a thread of `workers`, an `async def` right here."""
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
    """Checks an attribute that an author's class defines.

    Raises:
        ConfigError: a method cannot be called as the framework calls it, a tool or reward bears
            the name of a method of all environments, or `Config` is not a pydantic model.
    """
    where = f"{class_name}.{name}"
    if hasattr(value, "__agentrl_tool__") or hasattr(value, "__agentrl_reward__"):
        if hasattr(Environment, name):
            raise ConfigError(f"{where}: every environment has a {name} of its own; rename yours")
    elif name in ("load_shared", "close_shared"):
        if inspect.isfunction(value):
            argument = "config" if name == "load_shared" else "shared"
            raise ConfigError(
                f"{where} runs before there are instances: write "
                f"`@classmethod` above `def {name}(cls, {argument})`"
            )
    elif name == "Config":
        if not (isinstance(value, type) and issubclass(value, BaseModel)):
            raise ConfigError(f"{where} must derive from EnvConfig: write class Config(EnvConfig)")
    elif name in _SIGNATURES and inspect.isfunction(value):
        as_written, args, kwargs = _SIGNATURES[name]
        try:
            inspect.signature(value).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{where}{inspect.signature(value)}: {error}; write def {as_written}"
            ) from None


def load_config(environment: type[Environment], config: dict[str, JSON] | BaseModel | None) -> Any:
    """The environment's `Config` with these values.

    Raises:
        ConfigError: an unknown key or a wrong value; it names the key.
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
    hint = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(known) or 'none'}"
    return f"there is no key '{key}'; {hint}"
