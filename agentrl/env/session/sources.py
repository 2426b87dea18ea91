"""Sources: what all sessions of one configuration of an environment share, loaded once."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.env import protocol
from agentrl.env.base import Environment, can_snapshot, load_config
from agentrl.env.protocol import EnvInfo, TaskPreview, TaskSpec, make_error
from agentrl.env.session.boundary import Background, guard, wait_for_end
from agentrl.env.threads import WorkerPool
from agentrl.env.tools import tools_of
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON, Task, ToolSpec

if TYPE_CHECKING:
    from agentrl.env.session.process import ProcessHost

logger = logging.getLogger("agentrl.env")

MAX_SOURCES = 64
"""Configurations kept loaded; the longest unused goes first."""
MAX_TASKS = 64
"""Tasks of a configuration kept for the other members of their groups."""
CLOSE_TIMEOUT_S = 30.0
"""Deadline of an environment's `close` and `close_shared`."""


@dataclass(slots=True, eq=False)
class Source:
    """One configuration of one environment."""

    environment: type[Environment]
    config: Any
    workers: WorkerPool
    loading: asyncio.Task[None] | None = None
    instance: Environment | None = None
    """Answers `splits` and `get` for all sessions, once loading is done; None if a process of its
    own does."""
    host: ProcessHost | None = None
    """With `isolation = "process"`."""
    splits: dict[str, int | None] = field(default_factory=dict)
    tools: list[ToolSpec] = field(default_factory=list)
    tasks: OrderedDict[tuple[str, int], asyncio.Future[Task]] = field(default_factory=OrderedDict)
    """The last tasks that were asked for, by split and index, for the other members of a group."""
    num_users: int = 0
    """Episodes and snapshots; a source in use is not dropped."""

    async def get(self, split: str, indices: Iterable[int]) -> list[Task]:
        """Tasks of a split, from the author's code."""
        if self.host is not None:
            return await self.host.get(split, indices)
        assert self.instance is not None
        instance = self.instance
        return await self.workers.run(lambda: [instance.get(split, index) for index in indices])

    def split_size(self, split: str) -> int | None:
        """Raises: EnvError: `invalid_request`, there is no such split."""
        if split not in self.splits:
            raise make_error(
                "invalid_request",
                f"environment '{self.environment.id}' has no split '{split}'; it has "
                f"{', '.join(self.splits) or 'none: send the task inline'}",
            )
        return self.splits[split]


class Sources:
    """The loaded configurations of a process."""

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
        self._sources: OrderedDict[tuple[type, str], Source] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sources)

    def environment(self, env_id: str) -> type[Environment]:
        """Raises: EnvError: `not_found`, there is none of that name, or its class is wrong."""
        try:
            environment = self._resolve(env_id)
            tools_of(environment)
            can_snapshot(environment)
        except ConfigError as error:
            raise make_error("not_found", str(error)) from error
        return environment

    async def load(
        self, environment: type[Environment], config: Mapping[str, JSON], timeout_s: float
    ) -> Source:
        """The source of a configuration, loaded; the first caller starts the loading.

        Raises:
            EnvError: `invalid_request` for a wrong configuration; `reset_timeout` (retryable, since
                the loading goes on) when it takes too long; or why the loading failed.
        """
        try:
            values = load_config(environment, {**self._config.get(environment.id, {}), **config})
        except ConfigError as error:
            raise make_error("invalid_request", str(error)) from error
        key = (environment, values.model_dump_json())
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = Source(environment, values, self._workers)
            loading = guard(self._load(source), environment.id, None)
            source.loading = self._background.spawn(loading)
            self._drop_unused()
        self._sources.move_to_end(key)
        assert source.loading is not None
        if not source.loading.done():
            await wait_for_end(source.loading, max(timeout_s, 0.001))
        if not source.loading.done():
            error = make_error(
                "reset_timeout", f"'{environment.id}' is still loading after {timeout_s:g} s"
            )
            error.retryable = True
            raise error
        if source.loading.exception() is not None and self._sources.get(key) is source:
            del self._sources[key]  # so that the next call tries again
        source.loading.result()
        return source

    async def info(
        self,
        environment: type[Environment],
        config: Mapping[str, JSON],
        timeout_s: float | None,
    ) -> EnvInfo:
        """What an environment is under a configuration, which this loads.

        Raises:
            EnvError: `reset_timeout`, retryable, if loading takes longer than `timeout_s` (by
                default the environment's `reset_timeout_s`): it goes on meanwhile.
        """
        source = await self.load(environment, config, timeout_s or environment.reset_timeout_s)
        return EnvInfo(
            id=environment.id,
            description=inspect.cleandoc(environment.__doc__ or ""),
            tools=source.tools,
            splits=source.splits,
            config_schema=environment.Config.model_json_schema(),
            max_sessions=environment.max_sessions,
            cancel_safe=environment.cancel_safe,
            capabilities=["snapshot"] if can_snapshot(environment) else [],
        )

    async def preview(
        self,
        environment: type[Environment],
        config: Mapping[str, JSON],
        split: str,
        start: int,
        stop: int,
    ) -> list[TaskPreview]:
        """Tasks `[start, stop)` of a split, without what would give their answers away."""
        timeout_s = environment.reset_timeout_s
        source = await self.load(environment, config, timeout_s)
        size = source.split_size(split)
        indices = range(start, stop if size is None else min(stop, size))
        tasks = await self.get(source, split, indices, timeout_s)
        previews = []
        for index, task in zip(indices, tasks, strict=True):
            prompt: Any = task.prompt
            previews.append(TaskPreview(index, task.id, prompt))
        return previews

    async def task(self, source: Source, spec: TaskSpec, timeout_s: float) -> Task:
        """The task that a request names, or brings along."""
        if spec.inline is not None:
            return protocol.from_inline(spec.inline)
        assert spec.split is not None and spec.index is not None  # TaskSpec checked it
        size = source.split_size(spec.split)
        if size is not None and spec.index >= size:
            raise make_error(
                "invalid_request",
                f"split '{spec.split}' of '{source.environment.id}' has {size} tasks, "
                f"so no index {spec.index}",
            )
        return await self._get_shared(source, spec.split, spec.index, timeout_s)

    async def _get_shared(self, source: Source, split: str, index: int, timeout_s: float) -> Task:
        """A task got once for all members of a group, who ask for it side by side.

        Only what was got is shared: whoever waited for a call that failed makes one of its own.
        """
        loop, key = asyncio.get_running_loop(), (split, index)
        deadline = loop.time() + timeout_s
        while (got := source.tasks.get(key)) is not None:
            if not got.done():
                await wait_for_end(got, max(deadline - loop.time(), 0.001))
            if not got.done():
                raise _late(source)
            if not got.cancelled():
                return got.result()
        got = source.tasks[key] = loop.create_future()
        if len(source.tasks) > MAX_TASKS:
            source.tasks.popitem(last=False)
        try:
            (task,) = await self.get(source, split, (index,), deadline - loop.time())
        except BaseException:
            if source.tasks.get(key) is got:
                del source.tasks[key]
            got.cancel()
            raise
        got.set_result(task)
        return task

    async def get(
        self, source: Source, split: str, indices: Iterable[int], timeout_s: float
    ) -> list[Task]:
        env_id = source.environment.id
        return await self._background.call(
            source.get(split, indices),
            timeout_s=timeout_s,
            late=lambda: _late(source),
            env_id=env_id,
        )

    async def aclose(self, timeout_s: float) -> None:
        """Close what is loaded, waiting for it until the deadline."""
        closing = [self._background.spawn(self._close(each)) for each in self._sources.values()]
        self._sources.clear()
        if closing:
            await asyncio.wait(closing, timeout=timeout_s)

    async def _load(self, source: Source) -> None:
        environment = source.environment
        if environment.isolation == "process":
            from agentrl.env.session.process import ProcessHost

            host = ProcessHost(environment, source.config)
            source.host = host
            try:
                source.splits, source.tools = await host.load()
            except BaseException:
                await host.aclose()
                raise
            return
        shared = await self._workers.run(environment.load_shared, source.config)
        instance = environment(source.config, shared=shared)
        # A wrong `offered_tools` is known before the first session.
        source.tools = [tool.spec for tool in instance._tools.values()]
        source.splits = dict(await self._workers.run(instance.splits))
        source.instance = instance

    def _drop_unused(self) -> None:
        unused = [
            key
            for key, source in self._sources.items()
            if source.num_users == 0 and source.loading is not None and source.loading.done()
        ]
        for key in unused[: max(len(self._sources) - MAX_SOURCES, 0)]:
            self._background.spawn(self._close(self._sources.pop(key)))

    async def _close(self, source: Source) -> None:
        env_id = source.environment.id
        if source.host is not None:
            closing = source.host.aclose()
        elif source.instance is not None:
            closing = self._workers.run(source.environment.close_shared, source.instance.shared)
        else:
            return
        try:
            await self._background.call(
                closing,
                timeout_s=CLOSE_TIMEOUT_S,
                late=lambda: make_error(
                    "env_error", f"close_shared() of '{env_id}' ran out of time"
                ),
                env_id=env_id,
            )
        except EnvError as error:
            logger.warning("%s", error)


def _late(source: Source) -> EnvError:
    return make_error("reset_timeout", f"get() of '{source.environment.id}' ran out of time")
