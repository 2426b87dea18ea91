"""Importing what a configuration names: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from agentrl.errors import AgentRLError, ConfigError, first_line

files: dict[str, Path] = {}
"""By name, the modules that were imported from a file."""


def load(reference: str) -> object:
    """Returns the object that a reference names. The working directory is searched last, and a
    file's own directory is searched for its imports, so that a project there needs no installation.

    Raises:
        ConfigError: the reference has another form, or the file, module or object does not exist.
    """
    where, _, name = reference.rpartition(":")
    if not where or not name:
        raise ConfigError(
            f"'{reference}' names nothing that can be imported; write 'package.module:name' or "
            "'path/to/file.py:name'"
        )
    module = _from_file(where) if where.endswith(".py") else _by_name(where)
    if not hasattr(module, name):
        own = [each for each, value in vars(module).items() if isinstance(value, type)]
        close = difflib.get_close_matches(name, own, 1)
        meant = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"{where} has no '{name}'{meant}")
    return getattr(module, name)


def _by_name(name: str) -> ModuleType:
    if "" not in sys.path:
        _search_last(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"module {name} needs '{error.name}', which is not installed") from (
                error
            )
        raise ConfigError(f"no module named '{name}' can be imported") from error


def _search_last(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _from_file(name: str) -> ModuleType:
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    # The name carries the path, so that two files of one name do not replace each other.
    module_name = f"agentrl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _search_last(str(path.parent))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
    files[module_name] = path
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, ModuleNotFoundError):
            raise ConfigError(f"{path} needs '{error.name}', which is not installed") from error
        if isinstance(error, SyntaxError):
            raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
        if isinstance(error, Exception) and not isinstance(error, AgentRLError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(
                f"{path} cannot be imported: {last.filename}, line {last.lineno}: {said}"
            ) from error
        raise
    return module
