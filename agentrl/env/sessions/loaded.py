"""Loads environments once per configuration, for all sessions that use it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.base import Environment, call_method, load_config
from agentrl.env.episode import tools_before_reset
from agentrl.env.protocol import TaskPreview, TaskSpec, encode, make_error
from agentrl.env.sessions.boundary import Background, cancelled_itself, guard, to_env_error
from agentrl.env.threads import WorkerPool
from agentrl.env.tools import tools_of
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON, Task, ToolSpec

MAX_LOADED = 64
"""Configurations kept loaded. Beyond that, the one that was not used for longest is dropped."""
MAX_TASKS = 64
"""Tasks kept per configuration, for the other members of their groups."""


@dataclass(slots=True, eq=False)
class LoadedEnvironment:
    """Holds what all sessions of one configuration of an environment share."""

    environment: type[Environment]
    config: Any
    workers: WorkerPool
    adopted: tuple[Any, ...] = ()
    """What somebody else loaded and closes, as the only item."""
    loading: asyncio.Task[None] | None = None
    instance: Environment | None = None
    """The instance whose `splits` and `get` answer for all sessions; None until it is loaded."""
    splits: dict[str, int | None] = field(default_factory=dict)
    """Split -> number of tasks; None: unlimited."""
    tools: list[ToolSpec] = field(default_factory=list)
    """Tools offered before the first reset, when no task is known."""
    tasks: OrderedDict[tuple[str, int], asyncio.Future[Task]] = field(default_factory=OrderedDict)
    """(split, index) -> the last `MAX_TASKS` tasks, for the other members of their groups."""
    fingerprint: str = ""
    """Differs if the configuration, the splits or the tools do."""
    num_users: int = 0
    """Sessions that use it; above 0 it is not dropped."""

    async def load(self) -> None:
        """Calls `load_shared` and makes the instance that answers for all sessions.

        Raises:
            ConfigError: the class's `__init__` does not call that of `Environment`.
            EnvError: `splits` returned something else than a mapping of names to sizes.
        """
        if self.adopted:
            shared = self.adopted[0]
        else:
            shared = await call_method(self.workers, self.environment.load_shared, self.config)
        instance = self.environment(self.config, shared=shared)
        if not hasattr(instance, "_shared"):
            raise ConfigError(
                f"{self.environment.__name__}.__init__ does not call super().__init__: remove this "
                "__init__, and set up the state of an episode in reset()"
            )
        self.tools = tools_before_reset(instance)
        self.splits = _checked_splits(self.environment, await self.workers.run(instance.splits))
        seen = encode([self.config.model_dump(mode="json"), self.splits, self.tools])
        self.fingerprint = hashlib.sha256(seen).hexdigest()[:16]
        self.instance = instance

    async def get(self, split: str, indices: Iterable[int]) -> list[Task]:
        """Returns tasks of a split, from the author's `get`.

        Raises:
            EnvError: `get` returned something else than a Task.
        """
        assert self.instance is not None
        get = self.instance.get
        tasks = await self.workers.run(lambda: [get(split, index) for index in indices])
        for task in tasks:
            if not isinstance(task, Task):
                raise EnvError(
                    f"get() of '{self.environment.id}' returned {type(task).__name__}, not a Task"
                )
        return tasks

    def make_instance(self) -> Environment:
        """Returns a fresh instance for one session."""
        assert self.instance is not None
        instance = self.environment(self.config, shared=self.instance.shared)
        instance._workers = self.workers
        return instance

    async def close(self) -> None:
        """Calls `close_shared`, if loading succeeded here."""
        if self.instance is not None and not self.adopted:
            close_shared = self.environment.close_shared
            await call_method(self.workers, close_shared, self.instance.shared)

    def split_size(self, split: str) -> int | None:
        """Returns the number of tasks of a split; None: unlimited.

        Raises:
            EnvError: `invalid_request`: there is no such split.
        """
        if split not in self.splits:
            raise make_error(
                "invalid_request",
                f"environment '{self.environment.id}' has no split '{split}'; it has "
                f"{', '.join(self.splits) or 'none: send the task inline'}",
            )
        return self.splits[split]


def _checked_splits(environment: type[Environment], splits: Any) -> dict[str, int | None]:
    if not isinstance(splits, Mapping) or not all(
        isinstance(name, str) and (size is None or (isinstance(size, int) and size >= 0))
        for name, size in splits.items()
    ):
        raise EnvError(
            f"{environment.__name__}.splits() returned {str(splits)[:100]}; return a dict of each "
            'split\'s size, such as {"train": 100}, with None for an unlimited one'
        )
    return dict(splits)


class LoadedEnvironments:
    """Holds the loaded environments of a process."""

    def __init__(
        self,
        resolve: Callable[[str], type[Environment]],
        config: Mapping[str, Mapping[str, JSON]],
        workers: WorkerPool,
        background: Background,
    ) -> None:
        self._resolve = resolve
        self._config = config
        self._workers = workers
        self._background = background
        self._loaded: OrderedDict[tuple[type, str], LoadedEnvironment] = OrderedDict()
        self._adopted: dict[tuple[type, str], tuple[object]] = {}

    def adopt(
        self, environment: type[Environment], config: Mapping[str, JSON], shared: object
    ) -> None:
        """Makes sessions with this configuration use what its `load_shared` returned elsewhere."""
        key = (environment, load_config(environment, dict(config)).model_dump_json())
        self._adopted[key] = (shared,)

    def __len__(self) -> int:
        return len(self._loaded)

    def find(self, env_id: str) -> type[Environment]:
        """Returns the class of an environment.

        Raises:
            EnvError: `not_found`: there is no environment of that id, or its class is wrong.
        """
        try:
            environment = self._resolve(env_id)
            tools_of(environment)
        except ConfigError as error:
            raise make_error("not_found", str(error)) from error
        return environment

    async def load(
        self, environment: type[Environment], config: Mapping[str, JSON], timeout_s: float
    ) -> LoadedEnvironment:
        """Returns a loaded configuration; the first caller starts the loading.

        Raises:
            EnvError: `invalid_request`: the configuration is wrong; `reset_timeout`, retryable:
                loading takes longer than `timeout_s` and goes on in the background; or the error
                that the loading failed with.
        """
        try:
            values = load_config(environment, {**self._config.get(environment.id, {}), **config})
        except ConfigError as error:
            raise make_error("invalid_request", str(error)) from error
        except BaseException as error:  # a validator of the author
            raise to_env_error(error, environment.id) from error
        key = (environment, values.model_dump_json())
        loaded = self._loaded.get(key)
        if loaded is None:
            adopted = self._adopted.get(key, ())
            loaded = LoadedEnvironment(environment, values, self._workers, adopted)
            self._loaded[key] = loaded
            loaded.loading = self._background.spawn(guard(loaded.load(), environment.id))
            self._drop_unused()
        self._loaded.move_to_end(key)
        assert loaded.loading is not None
        await asyncio.wait((loaded.loading,), timeout=max(timeout_s, 0.001))
        if not loaded.loading.done():
            error = make_error(
                "reset_timeout", f"'{environment.id}' is still loading after {timeout_s:g} s"
            )
            error.retryable = True
            raise error
        try:
            loaded.loading.result()
        except BaseException as error:
            if self._loaded.get(key) is loaded:
                del self._loaded[key]  # so that the next call loads again
            if isinstance(error, asyncio.CancelledError):
                raise cancelled_itself(environment.id) from None
            raise
        return loaded

    async def preview(
        self, env_id: str, split: str, rows: range, config: Mapping[str, JSON]
    ) -> list[TaskPreview]:
        """Returns the ids and prompts of tasks of a split, without their reference answers.

        Raises:
            EnvError: as `find` and `load` do; `invalid_request`: there is no such split;
                `reset_timeout`: `get` took too long; or what `get` raised.
        """
        environment = self.find(env_id)
        timeout_s = environment.reset_timeout_s
        loaded = await self.load(environment, config, timeout_s)
        size = loaded.split_size(split)
        indices = rows if size is None else rows[: max(size - rows.start, 0)]
        try:
            async with asyncio.timeout(timeout_s):
                tasks = await self._get(loaded, split, indices)
        except TimeoutError:
            raise make_error(
                "reset_timeout", f"get() of '{environment.id}' ran out of time"
            ) from None
        return [
            TaskPreview(index, task.id, task.prompt)
            for index, task in zip(indices, tasks, strict=True)
        ]

    async def task(self, loaded: LoadedEnvironment, spec: TaskSpec) -> Task:
        """Returns the task that a request names or contains.

        The members of a group ask for the same task at the same time, so `get` is called once for
        all of them. Failures are not shared: after one, the next waiting caller calls `get` itself.

        Raises:
            EnvError: `invalid_request`: there is no such split or index; or what `get` raised.
        """
        if spec.inline is not None:
            return spec.inline
        assert spec.split is not None and spec.index is not None  # TaskSpec checked it
        size = loaded.split_size(spec.split)
        if size is not None and spec.index >= size:
            raise make_error(
                "invalid_request",
                f"split '{spec.split}' of '{loaded.environment.id}' has {size} tasks, "
                f"so there is no index {spec.index}",
            )
        key = (spec.split, spec.index)
        while (got := loaded.tasks.get(key)) is not None:
            await asyncio.wait((got,))
            if not got.cancelled():
                return got.result()
        got = loaded.tasks[key] = asyncio.get_running_loop().create_future()
        if len(loaded.tasks) > MAX_TASKS:
            loaded.tasks.popitem(last=False)
        try:
            (task,) = await self._get(loaded, spec.split, (spec.index,))
        except BaseException:
            if loaded.tasks.get(key) is got:
                del loaded.tasks[key]
            got.cancel()
            raise
        got.set_result(task)
        return task

    async def _get(
        self, loaded: LoadedEnvironment, split: str, indices: Iterable[int]
    ) -> list[Task]:
        return await self._background.call(loaded.get(split, indices), loaded.environment.id)

    async def aclose(self, timeout_s: float) -> None:
        """Closes all loaded environments, waiting for them at most `timeout_s`."""
        closing = [self._background.spawn(self._close(each)) for each in self._loaded.values()]
        self._loaded.clear()
        if closing:
            await asyncio.wait(closing, timeout=timeout_s)

    def _drop_unused(self) -> None:
        unused = [
            key
            for key, loaded in self._loaded.items()
            if loaded.num_users == 0 and loaded.loading is not None and loaded.loading.done()
        ]
        for key in unused[: max(len(self._loaded) - MAX_LOADED, 0)]:
            self._background.spawn(self._close(self._loaded.pop(key)))

    async def _close(self, loaded: LoadedEnvironment) -> None:
        await self._background.close(loaded.close(), "close_shared()", loaded.environment.id)
