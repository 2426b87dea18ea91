"""A taskset of verifiers, as it is: `verifiers:PACKAGE`.

    agentrl train run.toml --env.id verifiers:my-taskset --env.config.settings '{"num_tasks": 100}'

The policy plays the package's tasks without a harness and in no box: a prompt, a text, then the
task's own `@metric`, `@reward` and judges on verifiers' trace of the conversation. Tasksets with
tools, containers or an `Env` of their own need verifiers' harness: they are refused here, and
played as an agent (docs/agents.md). The package must be installed; nothing is downloaded.
"""

from __future__ import annotations

import itertools
from typing import Any

from pydantic import Field

from agentrl.env.base import EnvConfig, Environment
from agentrl.env.registry import register
from agentrl.errors import ConfigError, GraderError
from agentrl.types import Task
from agentrl_adapters.packages import import_package, to_json
from agentrl_adapters.rows_env import class_for


class VerifiersConfig(EnvConfig):
    """Settings of the taskset."""

    taskset: str = ""
    """The installed taskset's id. Anyone who can set it decides what is imported."""
    settings: dict[str, Any] = Field(default={})
    """The taskset's own configuration."""
    max_tasks: int = Field(default=100_000, ge=1)
    """Tasks that are read of a taskset without an end."""
    num_test: int = Field(default=0, ge=0)
    """Tasks at the end that become the split `test`."""


@register("verifiers")
class VerifiersEnvironment(Environment):
    """A taskset of verifiers whose tasks are answered by one text."""

    Config = VerifiersConfig

    @classmethod
    def for_target(cls, target: str) -> type[Environment]:
        """Returns the environment class for the id `verifiers:TASKSET`."""
        return class_for(cls, "taskset", target)

    @classmethod
    def load_shared(cls, config: VerifiersConfig) -> dict[str, list[Any]]:
        loaders = import_package("verifiers.v1.utils.loaders", "verifiers")
        generic = import_package("verifiers.v1.utils.generic", "verifiers")
        v1 = import_package("verifiers.v1", "verifiers")
        try:
            made = loaders.taskset_class(config.taskset)
            own = generic.concrete_type(made, v1.TasksetConfig, origin=v1.Taskset)
            settings = {"id": config.taskset} | config.settings
            taskset = made((own or v1.TasksetConfig).model_validate(settings))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"verifiers:{config.taskset}: {error}") from error
        task = made.task_type()
        if (
            loaders.environment_class(config.taskset) is not loaders.SingleAgentEnv
            or task.NEEDS_CONTAINER
            or made.toolsets(taskset.config)
            or task.toolsets(taskset.config.task)
        ):
            raise ConfigError(
                f"verifiers:{config.taskset} has tools, a container or an Env of its own, which "
                "verifiers' harness serves; play it as an agent (docs/agents.md)"
            )
        tasks = list(itertools.islice(iter(taskset), config.max_tasks))
        cut = len(tasks) - config.num_test
        return {"train": tasks[:cut]} | ({"test": tasks[cut:]} if config.num_test else {})

    def splits(self) -> dict[str, int | None]:
        return {split: len(tasks) for split, tasks in self.shared.items()}

    def get(self, split: str, index: int) -> Task:
        data = self.shared[split][index].data
        prompt: list[Any] = []
        if data.system_prompt:
            prompt.append({"role": "system", "content": data.system_prompt})
        if isinstance(data.prompt, str):
            prompt.append({"role": "user", "content": data.prompt})
        else:
            prompt += [{"role": m.role, "content": m.content} for m in data.prompt or ()]
        place: Any = to_json({"split": split, "index": index})
        return Task(data.id or f"{split}/{index}", prompt, metadata=place)

    async def on_text(self, text: str) -> None:
        v1 = import_package("verifiers.v1", "verifiers")
        graph = import_package("verifiers.v1.graph", "verifiers")
        types = import_package("verifiers.v1.types", "verifiers")
        trace_module = import_package("verifiers.v1.trace", "verifiers")
        place: Any = self.task.metadata
        task = self.shared[place["split"]][place["index"]]
        said = {"system": types.SystemMessage, "user": types.UserMessage}
        said["assistant"] = types.AssistantMessage
        asked: Any = self.task.prompt
        messages = [said[m["role"]](content=m["content"]) for m in asked]
        nodes = [
            graph.MessageNode(message=message, parent=index - 1 if index else None)
            for index, message in enumerate([*messages, types.AssistantMessage(content=text)])
        ]
        nodes[-1].sampled = True
        trace = v1.Trace(
            task=trace_module.TraceTask(type=type(task).__name__, data=task.data),
            agent=trace_module.AgentInfo(config=v1.AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
        )
        try:
            await task.score(trace)
        except Exception as error:
            raise GraderError(f"verifiers:{self.config.taskset}: {error}") from error
        if None in trace.rewards.values():
            raise GraderError(f"verifiers:{self.config.taskset}: a reward needs verifiers' box")
        self.metrics.update({k: v for k, v in trace.metrics.items() if v is not None})
        parts: Any = {name: part.value for name, part in trace.rewards.items()}
        self.finish(trace.reward, {"rewards": parts})
