"""`agentrl env demonstrate`: writes an environment's solutions as dialogues for `agentrl sft`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson

from agentrl.env.base import Environment, call_method, load_config
from agentrl.env.episode import start_episode, take_turn
from agentrl.env.registry import resolve
from agentrl.env.threads import default_pool
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON

PAID = 1.0 - 1e-6
"""The least reward of a solution, which allows for rounding."""


async def demonstrate(
    env_id: str, config: dict[str, JSON], out: Path, *, split: str, num_tasks: int
) -> int:
    """Plays the oracle's actions on the first tasks of a split and writes a dialogue per line.

    Returns:
        The number of dialogues: `num_tasks`, or the size of the split if that is smaller.

    Raises:
        ConfigError: the environment has no such split or does not define `oracle`.
        EnvError: the oracle's actions do not earn 1.
    """
    environment = resolve(env_id)
    if environment.oracle is Environment.oracle:
        raise ConfigError(
            f"environment '{env_id}' does not know its solutions: define oracle(self), which "
            "returns the actions that solve self.task"
        )
    checked = load_config(environment, config)
    shared = await call_method(default_pool(), environment.load_shared, checked)
    try:
        splits = environment(checked, shared=shared).splits()
        if split not in splits:
            raise ConfigError(
                f"environment '{env_id}' has no split '{split}'; it has {', '.join(splits)}"
            )
        size = splits[split]
        num_tasks = num_tasks if size is None else min(num_tasks, size)
        with out.open("wb") as file:
            async for dialogue in _dialogues(environment, checked, shared, split, num_tasks):
                file.write(orjson.dumps(dialogue, option=orjson.OPT_APPEND_NEWLINE))
    finally:
        await call_method(default_pool(), environment.close_shared, shared)
    return num_tasks


async def _dialogues(
    environment: type[Environment], config: Any, shared: Any, split: str, num_tasks: int
) -> AsyncIterator[dict[str, Any]]:
    for index in range(num_tasks):
        instance = environment(config, shared=shared)
        task = await instance.call(instance.get, split, index)
        try:
            await start_episode(instance, task, seed=index)
            tools = [tool.spec for tool in instance._tools.values()]
            offered = await instance.call(instance.oracle)
            iterator, reward, ended = iter(offered or ()), 0.0, False
            # One by one, so that a generator can look at the episode between actions.
            while not ended and (action := await instance.call(next, iterator, None)) is not None:
                result = await take_turn(instance, action)
                reward += result.reward
                ended = result.terminated or result.truncated
        finally:
            await instance.call(instance.close)
        if reward < PAID:
            raise EnvError(
                f"task {task.id}: the actions of oracle() earn {reward:g}, not 1; correct them, "
                "the reference or the grader (agentrl env check)"
            )
        yield {"messages": instance.episode.messages, "tools": tools}
