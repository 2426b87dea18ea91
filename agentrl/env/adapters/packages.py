"""What adapters share: a package that may be missing, tools known only at run time, JSON."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import orjson
from pydantic import TypeAdapter

from agentrl.env.tools import Tool
from agentrl.errors import ConfigError
from agentrl.types import JSON, ToolSpec

_ANY_ARGUMENTS: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


def import_package(module: str, extra: str) -> ModuleType:
    """Import a framework's module.

    Raises:
        ConfigError: it is not installed; names the extra that brings it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"the {extra} adapter needs the package {package}: pip install 'agentrl[{extra}]'"
        ) from error


def tools_from_specs(specs: Iterable[ToolSpec]) -> dict[str, Tool]:
    """Tools that another framework describes, and runs and validates by itself."""
    tools: dict[str, Tool] = {}
    for spec in specs:
        function: Any = spec["function"]
        tools[function["name"]] = Tool(function["name"], spec, _ANY_ARGUMENTS, None, False)
    return tools


def to_json(value: object) -> JSON:
    """A value of another framework as JSON: arrays as lists, NaN and infinity as null, what JSON
    cannot carry as its `repr`."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.loads(orjson.dumps(value, default=_plain, option=options))


def _plain(value: object) -> object:
    for convert in ("model_dump", "tolist", "item"):
        if callable(method := getattr(value, convert, None)):
            return method()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return repr(value)
