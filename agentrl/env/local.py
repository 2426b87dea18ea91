"""`make`: an environment to try by hand in this process."""

from __future__ import annotations

from agentrl.env import registry
from agentrl.env.base import Environment, load_config
from agentrl.env.client import EnvSession, in_process
from agentrl.env.protocol import EnvInfo, make_error
from agentrl.env.sync import BlockingOwner, blocking
from agentrl.errors import ConfigError
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolCall


def make(environment: str | type[Environment], **config: JSON) -> LocalEnv:
    """Makes an environment to try by hand, in this process.

    env = make("math")
    messages = await env.reset("train", 0)      # or env.sync.reset("train", 0)
    result = await env.step("The answer is 4.")

    Args:
        environment: a class, or a name such as `math` or `path/to/env.py:Class`.
        config: values of the environment's configuration.

    Raises:
        ConfigError: there is no such environment, or the configuration is wrong.
    """
    found = registry.resolve(environment) if isinstance(environment, str) else environment
    if not isinstance(found, type):
        raise ConfigError(
            f"make takes a class or its name, such as make({type(found).__name__}), not an instance"
        )
    found = registry.with_id(found)
    load_config(found, config)
    return LocalEnv(found, config)


class LocalEnv:
    """An environment in this process that plays one episode at a time."""

    def __init__(self, environment: type[Environment], config: dict[str, JSON]) -> None:
        self._environment = environment
        self._config = config
        self._client = in_process(environment)
        self._session: EnvSession | None = None
        self._sync: SyncEnv | None = None

    @property
    def sync(self) -> SyncEnv:
        """The same environment without `await`. It plays its own episodes."""
        if self._sync is None:
            env = LocalEnv(self._environment, self._config)
            self._sync = SyncEnv(env, env.close)
        return self._sync

    async def info(self) -> EnvInfo:
        """Returns the splits, the tools and the schema of the configuration."""
        return await self._client.info(self._environment.id, self._config)

    async def reset(
        self,
        split: str | None = None,
        index: int = 0,
        *,
        task: Task | None = None,
        seed: int = 0,
    ) -> list[Message]:
        """Starts an episode and returns its first prompt. Ends the episode before it, if any.

        Args:
            split: by default the first one.
            task: a task of your own, instead of `split` and `index`.

        Raises:
            ConfigError: the environment has no tasks of its own, and no `task` is given.
            EnvError: there is no such task, or the environment failed.
        """
        if self._session is not None:
            await self._session.close()
        if split is None and task is None:
            split = next(iter((await self.info()).splits), None)
            if split is None:
                raise ConfigError(
                    f"environment '{self._environment.id}' has no tasks of its own: define "
                    "splits() and get(split, index), or bring one: reset(task=Task('id', 'prompt'))"
                )
        self._session = await self._client.session(
            self._environment.id,
            split=split,
            index=None if task else index,
            task=task,
            seed=seed,
            config=self._config,
        )
        return self._session.messages

    async def step(
        self, action: Action | str, *, timeout_s: float = 600.0, last: bool = False
    ) -> StepResult:
        """Takes a step. A string stands for a turn of plain text.

        Raises:
            EnvError: the episode is over or was never started, or the environment failed.
        """
        if self._session is None:
            raise make_error("episode_done", "call reset before step")
        action = Action(text=action) if isinstance(action, str) else action
        return await self._session.step(action, timeout_s=timeout_s, last=last)

    async def call(self, tool: str, /, **arguments: JSON) -> StepResult:
        """Takes a step that calls one tool."""
        return await self.step(Action(tool_calls=(ToolCall("call-0", tool, arguments),)))

    async def close(self) -> None:
        """Ends the episode, if there is one, and frees what the environment holds."""
        if self._sync is not None:
            self._sync.close()
        await self._client.aclose()


class SyncEnv(BlockingOwner):
    """A `LocalEnv` whose methods block instead of being awaited."""

    info = blocking(LocalEnv.info)
    reset = blocking(LocalEnv.reset)
    step = blocking(LocalEnv.step)
    call = blocking(LocalEnv.call)
