"""Marks methods as tools and rewards, and makes OpenAI function specifications of tools."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypeVar, get_type_hints, overload

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from agentrl.errors import ConfigError
from agentrl.types import JSON, ToolSpec

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True, frozen=True)
class ToolMark:
    """The arguments of `@tool`."""

    timeout_s: float | None
    terminal: bool


@dataclass(slots=True, frozen=True)
class RewardMark:
    """The arguments of `@reward`."""

    weight: float
    timeout_s: float | None


@overload
def tool(method: F, /) -> F: ...
@overload
def tool(*, timeout_s: float | None = None, terminal: bool = False) -> Callable[[F], F]: ...
def tool(method: Any = None, /, *, timeout_s: float | None = None, terminal: bool = False) -> Any:
    """Offers a method (`def` or `async def`) to the agent.

    The specification comes from the type annotations (`Annotated[int, Field(ge=1)]` works too) and
    the docstring, whose Google-style `Args:` section describes the parameters. Arguments are
    validated before the call. The return value becomes the content of the tool message: a string
    as it is, None as an empty string, an `agentrl.images.Image`, or a list of parts with an image,
    as an image, and anything else as JSON.

    Args:
        timeout_s: seconds for one call. If an `async def` takes longer, it is cancelled and the
            agent is told; a `def` continues in its thread, and the session ends with
            `step_timeout`.
        terminal: the call ends the episode. Its return value, a number or None, is added to the
            reward and is not shown to the agent.

    Raises:
        ConfigError: it does not stand directly above a method.
    """

    def mark(function: F) -> F:
        _check_marked(function, "@tool or @tool(terminal=True)")
        function.__agentrl_tool__ = ToolMark(timeout_s, terminal)  # type: ignore[attr-defined]
        return function

    return mark if method is None else mark(method)


@overload
def reward(method: F, /) -> F: ...
@overload
def reward(*, weight: float = 1.0, timeout_s: float | None = None) -> Callable[[F], F]: ...
def reward(method: Any = None, /, *, weight: float = 1.0, timeout_s: float | None = None) -> Any:
    """Makes a method (`def` or `async def`) a component of the reward.

    When the episode ends, the method is called once with the `Episode` and must return a finite
    number. The number is reported under the method's name and, times `weight`, added to the reward.
    If the method raises or takes longer than `timeout_s` seconds, the episode fails with a
    `GraderError` and has no reward; it does not count as a reward of 0.

    Raises:
        ConfigError: it does not stand directly above a method.
    """

    def mark(function: F) -> F:
        _check_marked(function, "@reward or @reward(weight=0.5)")
        function.__agentrl_reward__ = RewardMark(weight, timeout_s)  # type: ignore[attr-defined]
        return function

    return mark if method is None else mark(method)


def _check_marked(function: object, mark: str) -> None:
    if not inspect.isfunction(function):
        raise ConfigError(
            f"write {mark} directly above a `def` or `async def` with self, not on {function!r}"
        )


@dataclass(slots=True, frozen=True)
class Tool:
    """A tool as it is offered to the agent."""

    name: str
    spec: ToolSpec
    arguments: TypeAdapter[dict[str, Any]]
    """Validates the arguments of a call."""
    timeout_s: float | None = None
    terminal: bool = False
    is_method: bool = True
    """True: a call runs the method of this name. False: it runs `Environment.on_call`, which gets
    any arguments."""

    def validate(self, arguments: dict[str, JSON]) -> dict[str, Any] | str:
        """Returns the keyword arguments for the method, or a text that says what is wrong."""
        try:
            return self.arguments.validator.validate_python(arguments)
        except ValidationError as error:
            return "; ".join(
                f"{'.'.join(str(part) for part in problem['loc']) or 'arguments'}: "
                + _MESSAGES.get(problem["type"], problem["msg"])
                for problem in error.errors(include_url=False, include_context=False)
            )


_MESSAGES = {"missing": "this argument is required", "extra_forbidden": "there is no such argument"}


@functools.cache
def tools_of(environment: type) -> dict[str, Tool]:
    """Returns the tools of an environment class by name, inherited ones first.

    Raises:
        ConfigError: no specification can be made of a tool's signature.
    """
    return {
        name: _make_tool(environment, name, method.__agentrl_tool__)
        for name, method in _marked(environment, "__agentrl_tool__").items()
    }


def choose_tools(environment: type, offered: Iterable[str | ToolSpec]) -> dict[str, Tool]:
    """Returns the tools that `offered_tools` listed, by name.

    Raises:
        ConfigError: it listed something other than names of `@tool` methods and specifications.
    """
    methods = tools_of(environment)
    if offered is methods:  # the default
        return methods
    chosen: dict[str, Tool] = {}
    where = f"{environment.__name__}.offered_tools()"
    if isinstance(offered, str):
        raise ConfigError(f"{where} returned a str; return a list: ['{offered}']")
    for each in offered:
        if isinstance(each, str):
            if each not in methods:
                raise ConfigError(
                    f"{where} names '{each}', which is not a @tool method; the class has "
                    f"{', '.join(methods) or 'none'}"
                )
            chosen[each] = methods[each]
            continue
        function = each.get("function") if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise ConfigError(
                f"{where} lists {str(each)[:100]}; list the names of @tool methods, or "
                'specifications such as {"type": "function", "function": {"name": ..., '
                '"description": ..., "parameters": ...}}'
            )
        if name in methods:
            chosen[name] = replace(methods[name], spec=each)
        else:
            chosen[name] = Tool(name, each, _ANY_ARGUMENTS, is_method=False)
    return chosen


_ANY_ARGUMENTS: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


@functools.cache
def rewards_of(environment: type) -> dict[str, RewardMark]:
    """Returns the reward components of an environment class by name, inherited ones first."""
    marked = _marked(environment, "__agentrl_reward__")
    return {name: method.__agentrl_reward__ for name, method in marked.items()}


def _marked(environment: type, mark: str) -> dict[str, Any]:
    names = dict.fromkeys(name for base in reversed(environment.__mro__) for name in vars(base))
    methods = {name: getattr(environment, name) for name in names}
    return {name: method for name, method in methods.items() if hasattr(method, mark)}


def _make_tool(environment: type, name: str, mark: ToolMark) -> Tool:
    method = getattr(environment, name)
    where = f"tool {environment.__name__}.{name}"
    try:
        hints = get_type_hints(method, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"{where}: {error}; import it at the top of the module, or define it there"
        ) from error
    description, described = _read_docstring(method)
    fields: dict[str, Any] = {}
    defaults: dict[str, object] = {}
    parameters = list(inspect.signature(method).parameters.values())
    if isinstance(inspect.getattr_static(environment, name), staticmethod | classmethod):
        raise ConfigError(f"{where}: remove @staticmethod or @classmethod, and add self")
    if not parameters or (parameters[0].name in hints and parameters[0].name != "self"):
        raise ConfigError(f"{where}: its first parameter must be self")
    for parameter in parameters[1:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{where}: '{parameter}' cannot be passed by name; name each parameter"
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"{where}: parameter '{parameter.name}' needs a type annotation, such as "
                f"{parameter.name}: str"
            )
        if isinstance(parameter.default, FieldInfo):
            raise ConfigError(
                f"{where}: write `{parameter.name}: Annotated[type, Field(...)] = default`, "
                "the default outside the Field"
            )
        hint = hints[parameter.name]
        if parameter.default is not parameter.empty:
            hint = NotRequired[hint]
            defaults[parameter.name] = parameter.default
        fields[parameter.name] = hint
    make_type: Any = TypedDict  # type checkers know only its literal form
    arguments = make_type(name, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter = TypeAdapter(arguments)
        schema = _without_titles(adapter.json_schema())
    except PydanticUserError as error:
        raise ConfigError(
            f"{where}: its parameters have no JSON schema; annotate them with str, int, float, "
            "bool, list, dict, Literal, a TypedDict or a pydantic model "
            f"({str(error).partition('. ')[0]})"
        ) from error
    schema.setdefault("properties", {})
    for parameter_name, prop in schema["properties"].items():
        if parameter_name in described:
            prop.setdefault("description", described[parameter_name])
        if parameter_name in defaults:
            prop.setdefault("default", to_jsonable_python(defaults[parameter_name]))
    function = {"name": name, "description": description, "parameters": schema}
    return Tool(
        name, {"type": "function", "function": function}, adapter, mark.timeout_s, mark.terminal
    )


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Removes pydantic's generated titles, which only repeat names and cost prompt tokens."""
    schema.pop("title", None)
    for key in ("properties", "$defs"):
        for child in schema.get(key, {}).values():
            _without_titles(child)
    for key in ("items", "additionalProperties", "not"):
        if isinstance(schema.get(key), dict):
            _without_titles(schema[key])
    for key in ("anyOf", "allOf", "oneOf", "prefixItems"):
        for child in schema.get(key, ()):
            _without_titles(child)
    return schema


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")


def _read_docstring(method: Callable) -> tuple[str, dict[str, str]]:
    """Returns the text before the first section, and the entries of a Google-style `Args:`."""
    text, arguments, section = [], [], None
    for line in (inspect.getdoc(method) or "").splitlines():
        if match := _SECTION.match(line):
            section = match[1]
        elif section is None:
            text.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            arguments.append(line)
    described: dict[str, str] = {}
    current = None
    for line in textwrap.dedent("\n".join(arguments)).splitlines():
        entry = re.match(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$", line)
        if entry:
            current = entry[1]
            described[current] = entry[2]
        elif current and line.strip():
            described[current] = f"{described[current]} {line.strip()}".strip()
    return "\n".join(text).strip(), described
