"""A class written for TRL's `environment_factory`, as it is: `trl:module:Class`.

    agentrl train run.toml --env.id trl:my_env.py:Wordle --env.config.tasks rows.jsonl
    agentrl train run.toml --env.id trl --env.config.tasks rows.jsonl    # prompts alone

Each row of the file goes to `reset(**row)`, whose text is appended to the row's prompt, and the
public methods are the agent's tools, with the schema that TRL derives for them. A turn without a
call ends the episode. The reward is `get_reward()`; a class without it needs `[reward]` functions
in the run file. TRL itself is not needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.env.base import Observation
from agentrl.env.registry import register
from agentrl.env.values import to_content, to_observation
from agentrl.errors import ConfigError
from agentrl.images import join_contents
from agentrl.types import JSON, Action, Content, Message, Task, ToolSpec
from agentrl.user_modules import load
from agentrl_adapters.packages import import_package, to_json
from agentrl_adapters.rows_env import RowsEnvironment
from agentrl_rewards.foreign import REFERENCE_NAMES


@register("trl")
class TrlClassEnvironment(RowsEnvironment):
    """A class that TRL's GRPOTrainer can take as its `environment_factory`."""

    instance: Any = None

    @classmethod
    def load_shared(cls, config: Any) -> Any:
        if config.target:
            _class_of(config.target)
        return super().load_shared(config)

    def offered_tools(self) -> list[ToolSpec]:
        if not self.config.target:
            return []
        schema_of = import_package("transformers.utils", "train").get_json_schema
        return [schema_of(method) for _, method in self._tool_methods()]

    def _tool_methods(self) -> Iterator[tuple[str, Any]]:
        made = _class_of(self.config.target)
        for name, _ in inspect.getmembers(made, inspect.isfunction):
            if not name.startswith("_") and name not in ("reset", "get_reward"):
                yield name, getattr(self.instance or made(), name)

    async def reset(self, task: Task, *, seed: int) -> list[Message]:
        messages = [message.copy() for message in to_observation(task.prompt, "the task's prompt")]
        if not self.config.target:
            return messages
        self.instance = _class_of(self.config.target)()
        row = {"prompt": messages, **task.metadata}
        if task.reference is not None:
            row.setdefault("reference", task.reference)
        if said := await self._run("reset", row):
            last = messages[-1]
            last["content"] = join_contents([last["content"], to_content(said)], "")
        return messages

    async def on_call(self, name: str, arguments: dict[str, JSON]) -> Content:
        said = await self._run(name, arguments)
        return said if isinstance(said, str) else to_content(to_json(said))

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> Any:
        method = getattr(self.instance, name)
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        return await self.call(self._in_a_thread, method, arguments)

    def _in_a_thread(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        return method(**arguments)

    async def step(self, action: Action) -> Observation:
        observation = await self.run_tools(action)
        if self.episode.last_turn and self._finish is None:
            await self._score("", truncated=True)
        return observation

    async def on_text(self, text: str) -> None:
        await self._score(text, truncated=False)

    async def _score(self, text: str, *, truncated: bool) -> None:
        scores = hasattr(self.instance, "get_reward")
        reward = await self._run("get_reward", {}) if scores else 0.0
        columns = {"reference": self.task.reference} | self.task.metadata
        named = (columns[name] for name in REFERENCE_NAMES if columns.get(name) is not None)
        info: dict[str, JSON] = {"reference": next(named, None), "metadata": self.task.metadata}
        self.finish(reward, info | {"answer": text}, truncated=truncated)

    async def close(self) -> None:
        if hasattr(self.instance, "close"):
            await self._run("close", {})


def _class_of(target: str) -> Any:
    """Returns the class, or the function that makes an instance."""
    made: Any = load(target)
    if not callable(getattr(made, "reset", None)):
        raise ConfigError(f"trl:{target} has no method reset; TRL needs one, and so does agentrl")
    return made
