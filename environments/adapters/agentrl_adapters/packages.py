"""Helpers for the adapters: imports optional packages and converts values to JSON."""

from __future__ import annotations

import importlib
from types import ModuleType

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
    return orjson.loads(orjson.dumps(value, default=_plain, option=options))


def _plain(value: object) -> object:
    for convert in ("model_dump", "tolist", "item"):
        if callable(method := getattr(value, convert, None)):
            return method()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return repr(value)
