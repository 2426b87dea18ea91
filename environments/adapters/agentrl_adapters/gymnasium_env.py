"""Gymnasium environments whose actions a model can write: `Discrete`, `Text` and plain arrays.

    agentrl env serve gymnasium --config id=FrozenLake-v1 --config observe=render
    agentrl env serve gymnasium --config id=FrozenLake-v1 --config observe=picture

One action is one Gymnasium step. A Gymnasium environment has seeds instead of tasks: the seed of
its `reset` is derived from the task's id and the session's seed, so `train` and `test` get
different seeds. In your own tasks, set the metadata `seed` and `options` to choose them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

import numpy
from pydantic import Field

from agentrl.env.base import EnvConfig, Environment
from agentrl.env.registry import register
from agentrl.env.tools import tool
from agentrl.env.values import to_content, to_observation
from agentrl.errors import ConfigError, EnvError
from agentrl.images import Image, image_part, join_contents, read_picture
from agentrl.types import JSON, Action, Content, Message, StepResult, Task, ToolSpec
from agentrl_adapters.packages import import_package, to_json


class GymnasiumConfig(EnvConfig):
    """Settings of the environment, its observations and its actions."""

    id: str = "FrozenLake-v1"
    """The id passed to `gymnasium.make`. `module:Name-v0` imports a module first, so anyone who can
    set this can import any installed module."""
    kwargs: dict[str, Any] = Field(default={})
    """Further arguments of `gymnasium.make`."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps until the episode is truncated; None uses the environment's registered limit."""
    observe: Literal["value", "render", "pixels", "picture"] = "value"
    """What the agent is shown. `value`: the observation, as JSON unless it is a string. `render`:
    the text that `render_mode="ansi"` draws. `pixels`: the observation as an image; it has to be
    uint8 of shape (H, W), (H, W, 1) or (H, W, 3). `picture`: the image that
    `render_mode="rgb_array"` draws. Images need Pillow (the extra `images`)."""
    actions: Literal["tool", "text"] = "tool"
    """Whether the agent acts with the tool `act` or with its text."""
    action_tag: str | None = "action"
    """For `text`: the action is in the last `<action>...</action>`; None: it is the whole text."""
    action_names: list[str] = Field(default=[])
    """Names for the numbers of a Discrete action space, in order."""
    instruction: str | None = None
    """Beginning of the prompt; None explains how to act, based on the action space."""


@dataclass(frozen=True)
class Actions:
    """The action space and how a model writes its members."""

    space: Any
    names: tuple[str, ...]
    schema: dict[str, JSON]
    help: str

    def read(self, written: object) -> Any:
        """Converts what the agent wrote to a member of the space.

        Raises:
            ValueError: it is not a member; the message says what would be.
        """
        if isinstance(written, str) and written.strip() in self.names:
            written = int(self.space.start) + self.names.index(written.strip())
        try:
            action = self._convert(written)
            valid = self.space.contains(action)
        except (TypeError, ValueError, OverflowError):
            action, valid = None, False
        if not valid:
            raise ValueError(f"{str(written)[:100]!r} is no action: give {self.help}")
        return action

    def _convert(self, written: Any) -> Any:
        kind = type(self.space).__name__
        if kind == "Text":
            return written
        if kind == "Discrete" and isinstance(written, bool | float):
            raise TypeError("not a whole number")
        if kind == "Discrete":
            return numpy.asarray(int(written), self.space.dtype)[()]
        values = numpy.asarray(json.loads(written) if isinstance(written, str) else written)
        if values.dtype.kind not in ("biuf" if kind == "MultiBinary" else "iuf"):
            raise TypeError("no array of numbers")
        action = values.astype(self.space.dtype)
        if numpy.issubdtype(action.dtype, numpy.integer) and (action != values).any():
            raise ValueError("not whole numbers of this size")
        return action


def read_actions(space: Any, names: list[str]) -> Actions:
    """Returns how a model writes the members of an action space.

    Raises:
        ConfigError: a model cannot write them, or `names` does not match the space.
    """
    kind = type(space).__name__
    if names and (kind != "Discrete" or len(names) != space.n):
        raise ConfigError(
            f"action_names has {len(names)} names, but the action space is {space}; give one name "
            "per action of a Discrete space"
        )
    if kind == "Discrete":
        low, high = int(space.start), int(space.start + space.n - 1)
        if names:
            schema: dict[str, JSON] = {"type": "string", "enum": list(names)}
            return Actions(space, tuple(names), schema, f"one of {', '.join(names)}")
        schema = {"type": "integer", "minimum": low, "maximum": high}
        return Actions(space, (), schema, f"a whole number from {low} to {high}")
    if kind == "Text":
        schema = {"type": "string", "maxLength": space.max_length}
        return Actions(space, (), schema, f"a text of at most {space.max_length} characters")
    if kind in ("Box", "MultiBinary", "MultiDiscrete"):
        help = f"numbers as a JSON array of shape {list(space.shape)}, a member of {space}"
        return Actions(space, (), {"type": "array"}, help)
    raise ConfigError(
        f"a model cannot write members of the action space {space}; wrap the environment so that "
        "the space is Discrete, Text, Box, MultiBinary or MultiDiscrete"
    )


_RENDER_MODES = {"render": "ansi", "picture": "rgb_array"}


def _is_picture(dtype: Any, shape: Any) -> bool:
    return (
        dtype == numpy.uint8
        and shape is not None
        and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3)))
    )


def _as_image(values: Any) -> Image:
    pixels = numpy.asarray(values)
    if not _is_picture(pixels.dtype, pixels.shape):
        raise EnvError(
            f"the environment's image is {pixels.dtype} of shape {list(pixels.shape)}; it has to "
            "be uint8 of shape height x width x 3"
        )
    return read_picture(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


@register("gymnasium")
class GymnasiumEnvironment(Environment):
    """A Gymnasium environment in which the agent acts with a tool or by text."""

    Config = GymnasiumConfig
    gym: Any = None

    @classmethod
    def load_shared(cls, config: GymnasiumConfig) -> Actions:
        """Reads the action space from a temporary instance of the environment."""
        gym = cls._make(config)
        try:
            return read_actions(gym.action_space, config.action_names)
        finally:
            gym.close()

    @staticmethod
    def _make(config: GymnasiumConfig) -> Any:
        gymnasium = import_package("gymnasium", "gymnasium")
        arguments: dict[str, Any] = dict(config.kwargs)
        if config.max_steps is not None:
            arguments["max_episode_steps"] = config.max_steps
        if (mode := _RENDER_MODES.get(config.observe)) is not None:
            arguments["render_mode"] = mode
        try:
            made = gymnasium.make(config.id, **arguments)
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError, ValueError) as error:
            raise ConfigError(f"gymnasium.make({config.id!r}) failed: {error}") from error
        modes = made.metadata.get("render_modes") or []
        if mode is not None and mode not in modes:
            made.close()
            raise ConfigError(
                f"observe = {config.observe!r} needs a drawing in the mode {mode!r}, but "
                f"{config.id} draws in {', '.join(modes) or 'none'}; set observe to another value"
            )
        space = made.observation_space
        if config.observe == "pixels" and not _is_picture(space.dtype, space.shape):
            made.close()
            raise ConfigError(
                f'observe = "pixels", but the observations of {config.id} are {space} instead of '
                'uint8 of shape height x width x 3; set observe = "picture" or "value"'
            )
        return made

    def splits(self) -> dict[str, int | None]:
        return {"train": None, "test": 1000}

    def get(self, split: str, index: int) -> Task:
        if self.config.instruction is not None:
            return Task(f"{split}/{index}", self.config.instruction)
        tag = self.config.action_tag
        how = f"Act by calling the tool act with {self.shared.help}."
        if self.config.actions == "text":
            where = f" between <{tag}> and </{tag}>" if tag else " and nothing else"
            how = f"In every turn write your action{where}: {self.shared.help}."
        return Task(f"{split}/{index}", how)

    def offered_tools(self) -> list[ToolSpec]:
        if self.config.actions != "tool":
            return []
        parameters = {"properties": {"action": self.shared.schema}, "required": ["action"]}
        parameters |= {"type": "object", "additionalProperties": False}
        function = {"name": "act", "description": "Take one step.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def reset(self, task: Task, *, seed: int) -> list[Message]:
        if self.gym is not None:
            self.gym.close()
        self.gym = self._make(self.config)
        reset_seed: Any = task.metadata.get("seed")
        if reset_seed is None:
            reset_seed = random.Random(f"{task.id} {seed}").randrange(2**31)
        first, _ = self.gym.reset(seed=reset_seed, options=task.metadata.get("options"))
        messages = [message.copy() for message in to_observation(task.prompt, "the task's prompt")]
        last = messages[-1]
        last["content"] = join_contents([last["content"], self._show(first)], "\n\n")
        return messages

    async def step(self, action: Action) -> StepResult:
        self._result = StepResult([])
        observation = await self.run_tools(action)
        self._result.observation = to_observation(observation, "run_tools()")
        return self._result

    def on_text(self, text: str) -> str | list[Message]:
        if self.config.actions == "tool":
            return f"Call the tool act with {self.shared.help}."
        if tag := self.config.action_tag:
            _, opened, rest = text.rpartition(f"<{tag}>")
            written, closed, _ = rest.partition(f"</{tag}>")
            if not (opened and closed):
                return self._refuse(f"Write your action between <{tag}> and </{tag}>.")
            text = written
        return [{"role": "user", "content": self.act(text)}]

    @tool
    def act(self, action: Any) -> Content:
        try:
            member = self.shared.read(action)
        except ValueError as error:
            return self._refuse(str(error))
        observation, reward, terminated, truncated, info = self.gym.step(member)
        self._result.reward += float(reward)
        self._result.info |= to_json(info)  # type: ignore[operator]
        if terminated or truncated:
            self._result.terminated, self._result.truncated = bool(terminated), bool(truncated)
            self.finish(truncated=not terminated)
        return self._show(observation)

    def close(self) -> None:
        if self.gym is not None:
            self.gym.close()

    def _show(self, observation: Any) -> Content:
        if self.config.observe == "render":
            return str(self.gym.render())
        if self.config.observe == "picture":
            observation = self.gym.render()
        if self.config.observe in ("picture", "pixels"):
            return [image_part(_as_image(observation))]
        return observation if isinstance(observation, str) else to_content(to_json(observation))

    def _refuse(self, reason: str) -> str:
        self.metrics["invalid_calls"] = self.metrics.get("invalid_calls", 0.0) + 1.0
        return reason
