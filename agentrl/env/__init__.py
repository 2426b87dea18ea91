"""Environments: the base class, tools and rewards for authors, and the client that plays them.

Each name is loaded when it is first used, so that importing this package costs almost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.env.base import EnvConfig, Environment, Episode, Observation
    from agentrl.env.client import EnvClient, EnvSession, connect
    from agentrl.env.local import make
    from agentrl.env.registry import register, resolve
    from agentrl.env.secret import Secret
    from agentrl.env.tools import reward, tool
    from agentrl.types import Action, Message, StepResult, Task, ToolCall

__all__ = [
    "Action",
    "EnvClient",
    "EnvConfig",
    "EnvSession",
    "Environment",
    "Episode",
    "Message",
    "Observation",
    "Secret",
    "StepResult",
    "Task",
    "ToolCall",
    "connect",
    "make",
    "register",
    "resolve",
    "reward",
    "tool",
]

_MODULES = {
    "agentrl.env.base": ("EnvConfig", "Environment", "Episode", "Observation"),
    "agentrl.env.client": ("EnvClient", "EnvSession", "connect"),
    "agentrl.env.local": ("make",),
    "agentrl.env.registry": ("register", "resolve"),
    "agentrl.env.secret": ("Secret",),
    "agentrl.env.tools": ("reward", "tool"),
    "agentrl.types": ("Action", "Message", "StepResult", "Task", "ToolCall"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
