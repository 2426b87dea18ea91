"""Helpers for all adapters: imports of packages that may be missing, and JSON."""

from __future__ import annotations

import importlib
from types import ModuleType

import orjson

from agentrl.errors import ConfigError
from agentrl.types import JSON


def import_package(module: str, extra: str) -> ModuleType:
    """Import a framework's module.

    Raises:
        ConfigError: it is not installed; names the extra that brings it.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"the {extra} adapter needs the package {package}: pip install 'agentrl-gym[{extra}]'"
        ) from error


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
