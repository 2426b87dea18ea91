"""agentrl: a Gym for language-model agents and the trainer that learns from it.

    import agentrl

    env = agentrl.make("math").sync
    result = agentrl.train(agentrl.load_config("run.toml"))

The names below are loaded when they are first used, so importing this package loads no torch and
costs almost nothing. The rest lies in `agentrl.api` (runs from Python), `agentrl.env`
(environments), `agentrl.algo` (objectives) and `agentrl.train` (the trainer).
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.api import load_config, train
    from agentrl.env import (
        Action,
        EnvConfig,
        Environment,
        StepResult,
        Task,
        ToolCall,
        connect,
        make,
        register,
        reward,
        tool,
    )

__all__ = [
    "Action",
    "EnvConfig",
    "Environment",
    "StepResult",
    "Task",
    "ToolCall",
    "connect",
    "load_config",
    "make",
    "register",
    "reward",
    "tool",
    "train",
]

try:
    __version__ = version("agentrl-gym")
except PackageNotFoundError:  # a directory on PYTHONPATH
    __version__ = "unknown"


class _TrainPackage(ModuleType):
    """The package `agentrl.train`, which can be called like `agentrl.api.train`.

    Importing any module of the package makes Python set the attribute `agentrl.train` to the
    package, so a function of that name would be replaced.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains a run and returns its `TrainingResult`; see `agentrl.api.train`."""
        from agentrl.api import train

        return train(*args, **kwargs)


import_module("agentrl.train")  # its __init__ is empty
sys.modules["agentrl.train"].__class__ = _TrainPackage


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "agentrl.api" if name == "load_config" else "agentrl.env"
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
