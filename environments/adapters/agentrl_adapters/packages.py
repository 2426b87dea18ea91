"""Helpers for the adapters: imports optional packages and converts values to JSON."""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import Any

import orjson

from agentrl.errors import ConfigError
from agentrl.types import JSON


def import_package(module: str, extra: str) -> ModuleType:
    """Imports a framework's module.

    Raises:
        ConfigError: its package is not installed; the message names the extra to install.
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
    """Converts another framework's value to JSON.

    Arrays become lists, NaN and infinity become null, and other unsupported values their `repr`.
    """
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.loads(orjson.dumps(value, default=_plain, option=options))
    except TypeError:  # a key such as a tuple, an integer beyond 64 bits, a lone surrogate
        return _walk(value)


def _walk(value: Any) -> JSON:
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _walk(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return _walk(_plain(value))


def _plain(value: object) -> object:
    for convert in ("model_dump", "tolist", "item"):
        if callable(method := getattr(value, convert, None)):
            return method()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return repr(value)
