"""Environments: what an author writes, how a process serves it, how a rollout plays it."""

from typing import TYPE_CHECKING

from agentrl.env.base import EnvConfig, Environment, Episode, Observation
from agentrl.env.registry import register, resolve
from agentrl.env.tools import reward, tool
from agentrl.types import Action, Message, StepResult, Task, ToolCall

if TYPE_CHECKING:
    from agentrl.env.client import connect, make

__all__ = [
    "Action",
    "EnvConfig",
    "Environment",
    "Episode",
    "Message",
    "Observation",
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


def __getattr__(name: str) -> object:
    if name in ("connect", "make"):  # they load the session manager, which authors do not need
        from agentrl.env import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
