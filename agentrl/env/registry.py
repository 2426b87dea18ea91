"""Finds environments by registered id, entry point, `module:Class` or `path/to/env.py:Class`."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from agentrl import user_modules
from agentrl.env.base import Environment
from agentrl.errors import ConfigError

E = TypeVar("E", bound=type[Environment])

ENTRY_POINT_GROUP = "agentrl.environments"
_registered: dict[str, type[Environment]] = {}


def register(id: str, *, max_sessions: int = 256) -> Callable[[E], E]:
    """Gives an environment class its id and its limit of sessions.

    Args:
        id: letters, digits, `-`, `_` and `.`; it is part of URLs and metric names.
        max_sessions: the most live sessions in one process; more are refused as `at_capacity`.

    Raises:
        ConfigError: the id is malformed or belongs to another class.
    """
    if not isinstance(id, str):
        raise ConfigError('write @register("my-env") with an id, not @register alone')
    if not id or not id.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"environment id '{id}' may hold letters, digits, '-', '_' and '.' only")

    def add(environment: E) -> E:
        other = _registered.get(id)
        if other is not None and _name(other) != _name(environment):
            raise ConfigError(
                f"environment id '{id}' is taken by {_name(other)}; choose another for "
                f"{_name(environment)}"
            )
        environment.id = id
        environment.max_sessions = max_sessions
        _registered[id] = environment
        return environment

    return add


def resolve(name: str) -> type[Environment]:
    """Returns the class for a registered id, an installed entry point, or `module:Class`.

    If the class of the entry point `ID` has a method `for_target`, then `ID:TARGET` is the class
    that this method makes of the target, as for `mcp:URL`. A class without `@register` gets its
    own name as id.

    Raises:
        ConfigError: nothing has that name, or its module cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    adapter, _, target = name.partition(":")
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry_point.name == name:
            return _load(name, entry_point.value)
        if entry_point.name == adapter:
            environment = _load(adapter, entry_point.value)
            if hasattr(environment, "for_target"):
                return environment.for_target(target)  # type: ignore[attr-defined]
    if ":" in name:
        return _load(name, name)
    if name.endswith(".py") and Path(name).is_file():
        source = Path(name).read_text(errors="replace")
        found = re.search(r"^class (\w+)", source, re.MULTILINE)
        first = found[1] if found else "Class"
        raise ConfigError(f"{name} is a file: name the class in it, as in {name}:{first}")
    raise ConfigError(
        f"no environment '{name}'; known are {', '.join(available()) or 'none'}. Name a class of "
        "your own as module:Class or path/to/env.py:Class"
    )


class Served:
    """The environments of a server. It finds no others."""

    def __init__(self, environments: Iterable[str | type[Environment]]) -> None:
        """Finds the classes of the environments that are given by name.

        Raises:
            ConfigError: `resolve` does not know a name, or two environments have the same id.
        """
        self._by_id: dict[str, type[Environment]] = {}
        self._by_name: dict[str, type[Environment]] = {}
        for each in environments:
            environment = resolve(each) if isinstance(each, str) else with_id(each)
            if self._by_id.setdefault(environment.id, environment) is not environment:
                raise ConfigError(f"two environments have the id '{environment.id}'")
            self._by_name[_name(environment)] = environment
            if isinstance(each, str):
                self._by_name[_absolute(each)] = environment

    @property
    def ids(self) -> list[str]:
        return list(self._by_id)

    def resolve(self, name: str) -> type[Environment]:
        """Returns the environment of an id, of the name that it was given by, or of `module:Class`.

        If that name was a path to a file, any other path to the file works too.

        Raises:
            ConfigError: the server does not have it.
        """
        environment = self._by_id.get(name) or self._by_name.get(_absolute(name))
        if environment is None:
            raise ConfigError(
                f"no environment '{name}' here; this server has {', '.join(self._by_id)}"
            )
        return environment


def _absolute(name: str) -> str:
    """Makes the path in `path/to/env.py:Class` absolute; returns other names unchanged."""
    file_name, _, class_name = name.rpartition(":")
    return f"{Path(file_name).resolve()}:{class_name}" if file_name.endswith(".py") else name


def available() -> dict[str, str]:
    """Returns the `module:Class` of every registered or installed id. Imports no environment."""
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    known = {entry_point.name: entry_point.value for entry_point in entry_points}
    known |= {id: _name(environment) for id, environment in _registered.items()}
    return dict(sorted(known.items()))


def _load(name: str, target: str) -> type[Environment]:
    module_name, _, class_name = target.rpartition(":")
    environment = user_modules.load(target)
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        raise ConfigError(
            f"'{class_name}' of {module_name} is not an Environment class; write "
            f"class {class_name}(Environment)"
        )
    return with_id(environment, class_name if name == target else name)


def with_id(environment: type[Environment], id: str | None = None) -> type[Environment]:
    """Returns the class, with `id` or else its name as its id unless `@register` gave it one."""
    if "id" not in vars(environment):  # an inherited id belongs to the base class
        environment.id = id or environment.__name__
    return environment


def _name(environment: type) -> str:
    return f"{environment.__module__}:{environment.__qualname__}"
