"""Instances: opening them for new episodes, and closing them, each in its slot."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from agentrl.env import protocol
from agentrl.env.base import Environment
from agentrl.env.protocol import CreateRequest, SnapshotReply, make_error
from agentrl.env.session.admission import Admission
from agentrl.env.session.boundary import Background, guard
from agentrl.env.session.runner import Runner, make_runner
from agentrl.env.session.snapshots import Snapshot, Snapshots
from agentrl.env.session.sources import CLOSE_TIMEOUT_S, Source, Sources
from agentrl.env.session.stats import Stats, count
from agentrl.errors import EnvError
from agentrl.types import Task

logger = logging.getLogger("agentrl.env")


@dataclass(slots=True, eq=False)
class Instance:
    """An instance of an environment and its episode."""

    session_id: str
    source: Source
    runner: Runner
    task: Task
    seed: int
    first: list[dict[str, Any]] = field(default_factory=list)
    """The first prompt; of a fork, all messages up to it."""
    first_step: int = 0
    """The index a new session begins at; of a fork, the snapshot's."""
    reward: float = 0.0
    turns: int = 0
    started: float = field(default_factory=time.monotonic)
    running: asyncio.Task[Any] | None = None
    """The last call into the instance."""
    before: asyncio.Task[Any] | None = None
    """A call that may still run though nobody waits for it: a snapshot, or a step that ran out of
    time in a `cancel_safe` environment. The next call waits until it has stopped."""
    retired: bool = False
    """It was, or is being, closed."""

    @property
    def environment(self) -> type[Environment]:
        return self.source.environment


class Instances:
    """Opens and closes them for a session manager."""

    def __init__(
        self,
        background: Background,
        admission: Admission,
        sources: Sources,
        snapshots: Snapshots,
        stats: Stats,
        prefix: str,
    ) -> None:
        """
        Args:
            prefix: what session ids begin with.
        """
        self._background = background
        self._admission = admission
        self._sources = sources
        self._snapshots = snapshots
        self._stats = stats
        self._prefix = prefix

    async def open_group(
        self, environment: type[Environment], request: CreateRequest, timeout_s: float
    ) -> list[Instance]:
        """All instances that a request asks for, reset or restored, or none.

        Raises:
            EnvError: admission refused, the request is wrong, or the environment failed.
        """
        snapshot = None
        if request.from_snapshot is not None:
            snapshot = self._snapshots.get(request.from_snapshot)
            if snapshot.source.environment is not environment:
                raise make_error(
                    "invalid_request",
                    f"the snapshot is of '{snapshot.source.environment.id}', not '{request.env}'",
                )
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        with self._admission.breaker(environment).watch(environment, timeout_s):
            await self._admission.acquire(environment, request.count, timeout_s)
            source, opening = None, []
            try:
                if snapshot is not None:
                    source, task, seed = snapshot.source, snapshot.task, snapshot.seed
                    source.num_users += 1  # a source in use is not dropped
                else:
                    assert request.task is not None  # CreateRequest checked it
                    config = request.config
                    source = await self._sources.load(environment, config, deadline - clock())
                    source.num_users += 1
                    task = await self._sources.task(source, request.task, deadline - clock())
                    seed = request.seed
                for _ in range(request.count):
                    session_id = self._prefix + secrets.token_urlsafe(16)
                    opening.append(
                        self._open(session_id, source, task, seed, deadline - clock(), snapshot)
                    )
                if len(opening) == 1:  # as nearly always: it needs no task of its own
                    return [await opening[0]]
                tasks = [self._background.spawn(each) for each in opening]
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                if source is not None:
                    source.num_users -= 1
                if not opening:  # else each takes care of its own slot
                    self._admission.release(environment, request.count)
            instances = [each for each in outcomes if isinstance(each, Instance)]
            for failure in outcomes:
                if isinstance(failure, BaseException):
                    for instance in instances:
                        self.retire(instance, "group_failed", failure)
                    raise failure
            return instances

    async def reopen(
        self, old: Instance, task: protocol.TaskSpec | None, seed: int | None, timeout_s: float
    ) -> Instance:
        """Replace an instance by a fresh one for another episode of its session.

        Raises:
            EnvError: as `open_group`; whether `old` was retired tells how far it came.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        environment = old.environment
        with self._admission.breaker(environment).watch(environment, timeout_s):
            new = old.task
            if task is not None:
                new = await self._sources.task(old.source, task, timeout_s)
            old.source.num_users += 1
            try:
                self.retire(old, "abandoned")
                # It gives its slot back once it is closed, and this session is the next to get one.
                await self._admission.acquire(environment, 1, deadline - clock(), first=True)
                return await self._open(
                    old.session_id,
                    old.source,
                    new,
                    old.seed if seed is None else seed,
                    deadline - clock(),
                )
            finally:
                old.source.num_users -= 1

    async def _open(
        self,
        session_id: str,
        source: Source,
        task: Task,
        seed: int,
        timeout_s: float,
        snapshot: Snapshot | None = None,
    ) -> Instance:
        """A fresh instance, reset or restored. The caller has taken its slot, which is given back
        when the instance is closed."""
        environment = source.environment
        deadline = asyncio.get_running_loop().time() + timeout_s
        source.num_users += 1
        instance = None
        try:
            async with self._admission.creating(environment, timeout_s):
                making = self._call(
                    make_runner(source), environment, task, deadline, at_once=source.host is None
                )
                runner = await making
                instance = Instance(session_id, source, runner, task, seed)
                if snapshot is not None:
                    first, at_once = runner.restore(snapshot.blob), False
                    instance.first_step = snapshot.step
                    instance.reward, instance.turns = snapshot.reward, snapshot.turns
                else:
                    first, at_once = runner.start(task, seed), runner.starts_at_once
                instance.first = await self._call(
                    _as_json(first), environment, task, deadline, at_once=at_once
                )
        except BaseException as error:
            if instance is None:
                source.num_users -= 1
                self._admission.release(environment)
            else:
                code = error.code if isinstance(error, EnvError) else "abandoned"
                if code == "reset_timeout":
                    instance.runner.kill()
                self.retire(instance, code, error)
            raise
        count(self._stats.opened, environment.id)
        return instance

    async def _call(
        self,
        awaitable: Awaitable[Any],
        environment: type[Environment],
        task: Task,
        deadline: float,
        *,
        at_once: bool,
    ) -> Any:
        """Await an author's code until the deadline; what is over at once needs no watching."""
        if at_once:
            return await guard(awaitable, environment.id, task)
        return await self._background.call(
            awaitable,
            timeout_s=deadline - asyncio.get_running_loop().time(),
            late=lambda: make_error(
                "reset_timeout", f"reset of '{environment.id}' ran out of time"
            ),
            env_id=environment.id,
            task=task,
        )

    def begin_snapshot(self, instance: Instance) -> asyncio.Task[bytes]:
        """Start a snapshot; the next call into the instance waits for its end."""
        call = guard(instance.runner.snapshot(), instance.environment.id, instance.task)
        instance.before = instance.running = task = self._background.spawn(call)
        return task

    def keep_snapshot(
        self, instance: Instance, step: int, blob: bytes, lease_s: float
    ) -> SnapshotReply:
        """
        Raises:
            EnvError: `at_capacity` or `payload_too_large`.
        """
        reply = self._snapshots.add(
            self._prefix + secrets.token_urlsafe(16),
            instance.source,
            instance.task,
            instance.seed,
            step,
            instance.turns,
            instance.reward,
            blob,
            lease_s,
        )
        self._stats.snapshots += 1
        return reply

    def retire(self, instance: Instance, outcome: str, error: BaseException | None = None) -> None:
        """Write the episode's log line and close the instance, once."""
        if instance.retired:
            return
        instance.retired = True
        if logger.isEnabledFor(logging.INFO):
            self._log_end(instance, outcome, error)
        count(self._stats.closed, (instance.environment.id, outcome))
        if instance.runner.closes_at_once:
            # Not yet: the step that ends the episode is still running, or a reset in place has to
            # get into the queue for this slot first.
            asyncio.get_running_loop().call_soon(self._close_at_once, instance)
        else:
            self._background.spawn(self._close(instance))

    def _log_end(self, instance: Instance, outcome: str, error: BaseException | None) -> None:
        record = {
            "event": "episode",
            "env": instance.environment.id,
            "session": instance.session_id[: len(self._prefix) + 8],
            "task": instance.task.id,
            "seed": instance.seed,
            "turns": instance.turns,
            "reward": instance.reward,
            "outcome": outcome,
            "seconds": round(time.monotonic() - instance.started, 3),
        }
        if error is not None:
            record["error"] = str(error)
        logger.info(json.dumps(record))

    def _close_at_once(self, instance: Instance) -> None:
        if instance.running is None or instance.running.done():
            self._free(instance)
        else:
            self._background.spawn(self._close(instance))

    async def _close(self, instance: Instance) -> None:
        env_id = instance.environment.id
        try:
            if instance.running is not None and not instance.running.done():
                await asyncio.wait({instance.running}, timeout=CLOSE_TIMEOUT_S)
            await self._background.call(
                instance.runner.close(),
                timeout_s=CLOSE_TIMEOUT_S,
                late=lambda: make_error("env_error", f"close() of '{env_id}' ran out of time"),
                env_id=env_id,
            )
        except EnvError as error:
            logger.warning("%s", error)
        finally:
            self._free(instance)

    def _free(self, instance: Instance) -> None:
        instance.runner.kill()
        instance.source.num_users -= 1
        self._admission.release(instance.environment)


async def _as_json(messages: Awaitable[Any]) -> list[dict[str, Any]]:
    """Copy a prompt as the wire would, so that nobody can change it afterwards."""
    return protocol.as_json(await messages)
