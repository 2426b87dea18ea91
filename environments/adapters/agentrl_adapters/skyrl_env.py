"""SkyRL-gym's environments, as they are: `skyrl:NAME`.

    agentrl train run.toml --env.id skyrl:gsm8k --env.config.tasks gsm8k/train.parquet

The rows are those of SkyRL's data sets: `prompt`, and columns such as `reward_spec` that the
environment gets as `extras`. NAME is an id of its registry, or `module:Class` of your own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pydantic import Field

from agentrl.env.registry import register
from agentrl.env.values import to_observation
from agentrl.errors import ConfigError
from agentrl.types import Action, Message, StepResult, Task
from agentrl.user_modules import load
from agentrl_adapters.packages import import_package, to_json
from agentrl_adapters.rows_env import RowsConfig, RowsEnvironment


class SkyRLConfig(RowsConfig):
    """Settings of the environment."""

    env_config: dict[str, Any] = Field(default={})
    """The environment's own settings, which SkyRL passes as `env_config`."""
    max_turns: int | None = Field(default=None, ge=1)
    """The environment's own limit of turns, which rows may set too; None leaves it."""


@register("skyrl")
class SkyRLEnvironment(RowsEnvironment):
    """An environment of SkyRL-gym, which reads the agent's text and rewards each turn."""

    Config = SkyRLConfig
    gym: Any = None

    @classmethod
    def load_shared(cls, config: SkyRLConfig) -> Any:
        _maker(config.target)
        return super().load_shared(config)

    def reset(self, task: Task, *, seed: int) -> list[Message]:
        extras = dict(task.metadata)
        if self.config.max_turns is not None:
            extras.setdefault("max_turns", self.config.max_turns)
        settings = import_package("omegaconf", "skyrl").OmegaConf.create(self.config.env_config)
        self.gym = _maker(self.config.target)(env_config=settings, extras=extras)
        first, _ = self.gym.init([dict(m) for m in to_observation(task.prompt, "the prompt")])
        return to_observation(list(first), "init()")

    def step(self, action: Action) -> StepResult:
        said = self.gym.step(action.text)
        done = bool(said["done"])
        metadata: Any = to_json(said.get("metadata") or {})
        if done:
            found = self.gym.get_metrics().items()
            self.metrics.update({k: float(v) for k, v in found if isinstance(v, int | float)})
        observation = to_observation(list(said["observations"]), "step()")
        return StepResult(observation, float(said["reward"]), terminated=done, info=metadata)

    def close(self) -> None:
        if self.gym is not None:
            self.gym.close()


def _maker(target: str) -> Callable[..., Any]:
    """Returns the function that makes an environment of a registered id, or a class."""
    gym = import_package("skyrl_gym", "skyrl")
    if ":" in target:
        found: Any = load(target)
        return found
    if target not in gym.envs.registration.registry:
        known = ", ".join(gym.envs.registration.registry)
        raise ConfigError(f"skyrl:{target}: SkyRL-gym has {known}; or name skyrl:module:Class")
    return functools.partial(gym.make, target)
