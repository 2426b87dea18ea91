"""Sessions: the life of episodes in one process, whoever calls, in-process or over HTTP.

This is the environment side's boundary. An author's exception, whatever it is, is caught here and
nowhere else, recorded in the episode's log line and turned into a problem code. The rules:

* **Exactly once.** A step names the index the session is at. The same index with the same action
  gets the same reply again (`replayed`), waiting for it if it is still running; the same index with
  another action, or any other index, is a `step_conflict`.
* **Deadlines are enforced**, not advised: the caller has its answer at the deadline, whether or not
  the author's code reacts to being cancelled. A step that ran out of time is `step_timeout` and
  the session takes no other, unless the environment is `cancel_safe`: then it counts as not taken.
* **Leases.** Every call renews; a running step holds the lease; an expired session is closed and
  answers `session_expired`. A live session is never reaped.
* **Never a fresh environment by surprise.** A step after the end is `episode_done`.
* **Bounded.** More live sessions than an environment's or the process's limit are `at_capacity`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.env import protocol
from agentrl.env.base import Environment, describe, load_config
from agentrl.env.episode import start_episode, take_turn
from agentrl.env.protocol import (
    CreateReply,
    CreateRequest,
    EnvInfo,
    SessionReply,
    SessionStatus,
    StepReply,
    StepRequest,
    TaskPreview,
    TaskSpec,
    make_error,
)
from agentrl.env.tools import tools_of
from agentrl.env.workers import WorkerPool
from agentrl.errors import AgentRLError, ConfigError, DataError, EnvError
from agentrl.types import JSON, Action, Task

logger = logging.getLogger("agentrl.env")

T = TypeVar("T")

DEFAULT_LEASE_S = 300.0
MAX_TIMEOUT_S = 6 * 3600.0
CLOSE_TIMEOUT_S = 30.0
"""Deadline of an environment's `close`."""
_MAX_SOURCES = 64
"""Configurations kept loaded; the longest unused goes first."""
_MAX_TOMBSTONES = 16_384


@dataclass(slots=True, eq=False)
class _Source:
    """One configuration of one environment: what its sessions share."""

    environment: type[Environment]
    config: Any
    loading: asyncio.Task[None] | None = None
    instance: Environment | None = None
    """Answers `splits` and `get` for all sessions; there once loading is done."""
    splits: dict[str, int | None] = field(default_factory=dict)
    num_sessions: int = 0


@dataclass(slots=True, eq=False)
class _Creation:
    request: CreateRequest
    task: asyncio.Task[CreateReply]


@dataclass(slots=True, eq=False)
class _Turn:
    index: int
    action: Action
    last: bool
    previous: _Turn | None
    """The turn before, while this one runs."""
    waiters: list[asyncio.Future[bytes]] = field(default_factory=list)
    """One for each caller that waits, so that a caller who goes away disturbs no other."""
    outcome: bytes | EnvError | None = None
    """The encoded reply, or why there is none; None while the step runs."""
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Session:
    id: str
    source: _Source
    environment: Environment
    task: Task
    seed: int
    lease_s: float
    expires: float
    """On the event loop's clock."""
    first: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    status: str = "live"
    turn: _Turn | None = None
    """The step that runs, or the last that ran."""
    stuck: asyncio.Task[None] | None = None
    """A step that ran out of time in a `cancel_safe` environment; the next one waits until it has
    stopped."""
    started: float = field(default_factory=time.monotonic)
    reward: float = 0.0
    key: str | None = None
    """The Idempotency-Key it was opened with."""
    retired: bool = False
    """Its environment was, or is being, closed."""

    @property
    def busy(self) -> bool:
        return self.turn is not None and self.turn.outcome is None


class SessionManager:
    """All sessions of a process. Used from one event loop."""

    def __init__(
        self,
        resolve: Callable[[str], type[Environment]],
        *,
        max_sessions: int | None = None,
        worker_threads: int = 32,
        config: Mapping[str, Mapping[str, JSON]] | None = None,
    ) -> None:
        """
        Args:
            resolve: finds the class of an environment id, or raises ConfigError.
            max_sessions: live sessions over all environments; None leaves it to each
                environment's own limit.
            worker_threads: threads for plain `def` methods of all sessions together.
            config: by environment id, what every session's configuration starts from.
        """
        self.workers = WorkerPool(worker_threads, max_abandoned=worker_threads)
        self.draining = False
        self._resolve = resolve
        self._max_sessions = max_sessions
        self._config = config or {}
        self._sources: OrderedDict[tuple[type, str], _Source] = OrderedDict()
        self._sessions: dict[str, _Session] = {}
        self._live: dict[str, int] = {}
        """Slots in use, by environment id; a slot is free again once its environment is closed."""
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._creations: dict[str, _Creation] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._reaper: asyncio.Task[None] | None = None

    @property
    def num_live(self) -> int:
        return sum(self._live.values())

    # Environments and tasks

    async def info(
        self,
        env_id: str,
        config: Mapping[str, JSON] | None = None,
        timeout_s: float | None = None,
    ) -> EnvInfo:
        """What an environment is under a configuration, which this loads.

        Raises:
            EnvError: `reset_timeout`, retryable, if loading takes longer than `timeout_s` (by
                default the environment's `reset_timeout_s`): it goes on meanwhile.
        """
        environment = self._environment(env_id)
        source = await self._source(
            environment, config or {}, timeout_s or environment.reset_timeout_s
        )
        assert source.instance is not None
        return EnvInfo(
            id=environment.id,
            description=inspect.cleandoc(environment.__doc__ or ""),
            tools=_tool_specs(source.instance),
            splits=source.splits,
            config_schema=environment.Config.model_json_schema(),
            max_sessions=self._limit(environment),
            cancel_safe=environment.cancel_safe,
        )

    async def preview(
        self,
        env_id: str,
        split: str,
        start: int,
        stop: int,
        config: Mapping[str, JSON] | None = None,
    ) -> list[TaskPreview]:
        """Tasks `[start, stop)` of a split, without what would give their answers away."""
        environment = self._environment(env_id)
        source = await self._source(environment, config or {}, environment.reset_timeout_s)
        size = self._split_size(source, split)
        last = stop if size is None else min(stop, size)
        tasks = await self._bounded(
            self._guard(self._get_tasks(source, split, range(start, last)), environment, None),
            environment.reset_timeout_s,
            make_error("reset_timeout", f"reading tasks of '{env_id}' ran out of time"),
        )
        previews = []
        for index, task in zip(range(start, last), tasks, strict=True):
            prompt: Any = task.prompt
            previews.append(TaskPreview(index, task.id, prompt))
        return previews

    async def _get_tasks(self, source: _Source, split: str, indices: Iterable[int]) -> list[Task]:
        assert source.instance is not None

        def get(instance: Environment = source.instance) -> list[Task]:
            return [instance.get(split, index) for index in indices]

        return await self.workers.run(get)

    # Opening

    async def create(
        self, request: CreateRequest, idempotency_key: str | None = None
    ) -> CreateReply:
        """Open `request.count` sessions, all or none.

        A repeated call with the same key gets the same sessions, until one of them is closed. It
        runs to its end even when its caller goes away; sessions nobody claims expire.
        """
        if idempotency_key is None:
            return await asyncio.shield(self._spawn(self._create(request)))
        creation = self._creations.get(idempotency_key)
        if creation is None:
            task = self._spawn(self._create(request, idempotency_key))
            creation = self._creations[idempotency_key] = _Creation(request, task)
            task.add_done_callback(lambda task: self._forget_failed(idempotency_key, task))
        elif creation.request != request:
            raise make_error(
                "idempotency_conflict",
                "this Idempotency-Key came before with another request; use a fresh one",
            )
        return await asyncio.shield(creation.task)

    async def _create(self, request: CreateRequest, key: str | None = None) -> CreateReply:
        if self.draining:
            raise make_error("draining", "the server is shutting down", retry_after_s=5.0)
        environment = self._environment(request.env)
        self._reserve(environment, request.count)
        opened: list[_Session] = []
        try:
            timeout_s = min(request.timeout_s or environment.reset_timeout_s, MAX_TIMEOUT_S)
            deadline = asyncio.get_running_loop().time() + timeout_s
            source = await self._source(environment, request.config, timeout_s)
            # A source in use is not dropped; from here on these sessions use it.
            source.num_sessions += request.count
            try:
                task = await self._task(source, request.task, deadline)
                opened = [self._make_session(source, task, request) for _ in range(request.count)]
                resets = [self._spawn(self._reset(session, deadline)) for session in opened]
                outcomes = await asyncio.gather(*resets, return_exceptions=True)
            finally:
                source.num_sessions -= request.count - len(opened)
        finally:
            self._live[environment.id] -= request.count - len(opened)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            for session, outcome in zip(opened, outcomes, strict=True):
                code = outcome.code if isinstance(outcome, EnvError) else "group_failed"
                self._retire(session, code, failures[0])
            raise failures[0]
        loop = asyncio.get_running_loop()
        for session in opened:
            session.expires = loop.time() + session.lease_s
            session.key = key
            self._sessions[session.id] = session
        if self._reaper is None:
            self._reaper = self._spawn(self._reap())
        return CreateReply([self._session_reply(session) for session in opened])

    def _forget_failed(self, key: str, task: asyncio.Task[CreateReply]) -> None:
        if task.cancelled() or task.exception() is not None:  # it opened nothing
            self._creations.pop(key, None)

    def _make_session(self, source: _Source, task: Task, request: CreateRequest) -> _Session:
        assert source.instance is not None
        environment = source.environment(source.config, shared=source.instance.shared)
        environment._workers = self.workers
        return _Session(
            id=secrets.token_urlsafe(16),
            source=source,
            environment=environment,
            task=task,
            seed=request.seed,
            lease_s=request.lease_s or DEFAULT_LEASE_S,
            expires=0.0,
        )

    async def _reset(self, session: _Session, deadline: float) -> None:
        environment = session.environment
        session.first = await self._bounded(
            self._guard(
                _first_prompt(environment, session.task, session.seed), environment, session.task
            ),
            deadline - asyncio.get_running_loop().time(),
            make_error("reset_timeout", f"reset of '{environment.id}' ran out of time"),
        )

    async def _task(self, source: _Source, spec: TaskSpec, deadline: float) -> Task:
        if spec.inline is not None:
            return protocol.from_inline(spec.inline)
        assert spec.split is not None and spec.index is not None  # TaskSpec checked it
        size = self._split_size(source, spec.split)
        if size is not None and spec.index >= size:
            raise make_error(
                "invalid_request",
                f"split '{spec.split}' of '{source.environment.id}' has {size} tasks, "
                f"so no index {spec.index}",
            )
        tasks = await self._bounded(
            self._guard(
                self._get_tasks(source, spec.split, (spec.index,)), source.environment, None
            ),
            deadline - asyncio.get_running_loop().time(),
            make_error("reset_timeout", f"get() of '{source.environment.id}' ran out of time"),
        )
        return tasks[0]

    def _split_size(self, source: _Source, split: str) -> int | None:
        if split not in source.splits:
            raise make_error(
                "invalid_request",
                f"environment '{source.environment.id}' has no split '{split}'; it has "
                f"{', '.join(source.splits) or 'none: send the task inline'}",
            )
        return source.splits[split]

    def _reserve(self, environment: type[Environment], count: int) -> None:
        limit = self._limit(environment)
        if count > limit:
            raise make_error(
                "invalid_request",
                f"a group of {count} never fits: '{environment.id}' takes {limit} sessions",
            )
        used = self._live.get(environment.id, 0)
        total = self.num_live
        if used + count > limit or (self._max_sessions and total + count > self._max_sessions):
            raise make_error(
                "at_capacity",
                f"{used} of {limit} sessions of '{environment.id}' are in use; close some, or "
                "raise max_sessions",
                retry_after_s=1.0,
            )
        self._live[environment.id] = used + count

    def _limit(self, environment: type[Environment]) -> int:
        return min(environment.max_sessions, self._max_sessions or environment.max_sessions)

    # Stepping

    async def step(self, session_id: str, request: StepRequest) -> bytes:
        """Take one step, or wait for and repeat the reply of one that was asked for before.

        Returns a `StepReply` as JSON.
        """
        session = self._session(session_id)
        action = protocol.from_wire_action(request.action)
        turn = session.turn
        if turn is not None and turn.index == request.step:
            if turn.action != action or turn.last != request.last:
                raise make_error(
                    "step_conflict",
                    f"step {request.step} of this session was asked for with another body",
                )
            reply = protocol.decode_reply(await _outcome(turn), StepReply)
            reply.replayed = True
            return protocol.encode(reply)
        if request.step != session.step or session.busy:
            raise make_error(
                "step_conflict", f"this session is at step {session.step}, not {request.step}"
            )
        if session.status != "live":
            raise make_error(
                "episode_done", "the episode is over; open a new session for another one"
            )
        return await _outcome(self._start_turn(session, action, request))

    def _start_turn(self, session: _Session, action: Action, request: StepRequest) -> _Turn:
        loop = asyncio.get_running_loop()
        seconds = min(request.timeout_s or session.environment.step_timeout_s, MAX_TIMEOUT_S)
        session.turn = turn = _Turn(session.step, action, request.last, previous=session.turn)
        turn.task = loop.create_task(self._run_turn(session, turn))
        turn.timer = loop.call_later(seconds, self._expire_turn, session, turn, seconds)
        return turn

    async def _run_turn(self, session: _Session, turn: _Turn) -> None:
        environment = session.environment
        try:
            if session.stuck is not None:
                await asyncio.wait({session.stuck})
                session.stuck = None
            reply, body = await self._guard(
                _answer(environment, turn, session.step + 1), environment, session.task
            )
        except EnvError as error:
            error.retryable = False  # the step was taken; asking again repeats this answer
            self._fail_turn(session, turn, error)
            return
        except asyncio.CancelledError:
            error = make_error("env_error", f"'{environment.id}' cancelled its own step")
            self._fail_turn(session, turn, error)
            raise
        if turn.outcome is not None:  # the deadline had passed, or the session was closed
            return
        session.step += 1
        session.reward += reply.reward
        if reply.terminated or reply.truncated:
            session.status = "ended"
            self._retire(session, "terminated" if reply.terminated else "truncated")
        self._settle(session, turn, body)

    def _expire_turn(self, session: _Session, turn: _Turn, seconds: float) -> None:
        if turn.outcome is not None:
            return
        error = make_error(
            "step_timeout", f"the step of '{session.environment.id}' took more than {seconds:g} s"
        )
        if session.environment.cancel_safe:
            error.retryable = True
            session.turn, session.stuck = turn.previous, session.stuck or turn.task
            self._settle(session, turn, error)
        else:
            self._fail_turn(session, turn, error)
        if turn.task is not None:
            turn.task.cancel()

    def _fail_turn(self, session: _Session, turn: _Turn, error: EnvError) -> None:
        if turn.outcome is not None:
            return
        session.status = "failed"
        self._retire(session, error.code, error)
        self._settle(session, turn, error)

    def _settle(self, session: _Session, turn: _Turn, outcome: bytes | EnvError) -> None:
        if turn.timer is not None:
            turn.timer.cancel()
        turn.timer = turn.previous = None
        turn.outcome = outcome
        for waiter in turn.waiters:
            if waiter.done():  # its caller went away
                continue
            if isinstance(outcome, EnvError):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)
        turn.waiters.clear()
        self._renew(session)

    # Leases and the end of sessions

    def status(self, session_id: str) -> SessionStatus:
        session = self._session(session_id)
        return SessionStatus(
            session.id,
            session.environment.id,
            session.task.id,
            session.step,
            session.status,
            self._lease_end(session),
        )

    def renew(self, session_id: str, lease_s: float | None) -> SessionStatus:
        if lease_s is not None:
            self._session(session_id).lease_s = lease_s
        return self.status(session_id)

    def delete(self, session_id: str) -> None:
        """Close a session. Closing one that was closed before is no error."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._bury(session, "closed")
        elif session_id not in self._tombstones:
            raise make_error("not_found", "there is no such session")

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is not None and not self._expired(session):
            self._renew(session)
            return session
        if session is not None:
            self._bury(session, "expired")
        if session_id in self._tombstones:
            how = self._tombstones[session_id]
            raise make_error("session_expired", f"this session has {how}; open a new one")
        raise make_error("not_found", "there is no such session")

    def _renew(self, session: _Session) -> None:
        session.expires = asyncio.get_running_loop().time() + session.lease_s

    def _expired(self, session: _Session) -> bool:
        return not session.busy and session.expires <= asyncio.get_running_loop().time()

    def _lease_end(self, session: _Session) -> float:
        return time.time() + session.expires - asyncio.get_running_loop().time()

    async def _reap(self) -> None:
        while True:
            for session in [each for each in self._sessions.values() if self._expired(each)]:
                self._bury(session, "expired")
            now = asyncio.get_running_loop().time()
            leases = [each.expires for each in self._sessions.values() if not each.busy]
            await asyncio.sleep(min(max(min(leases, default=now + 1.0) - now, 0.01), 1.0))

    def _bury(self, session: _Session, how: str) -> None:
        """Forget a session, remembering only that it was there."""
        del self._sessions[session.id]
        if session.key is not None:
            self._creations.pop(session.key, None)
        self._tombstones[session.id] = "expired" if how == "expired" else "been closed"
        while len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        turn = session.turn
        if turn is not None and session.busy:
            error = make_error("session_expired", "the session was closed while its step ran")
            self._settle(session, turn, error)
            if turn.task is not None:
                turn.task.cancel()
        self._retire(session, "abandoned" if how == "closed" else how)

    def _retire(self, session: _Session, outcome: str, error: BaseException | None = None) -> None:
        """Write the episode's log line and close its environment, once."""
        if session.retired:
            return
        session.retired = True
        record = {
            "event": "episode",
            "env": session.environment.id,
            "session": session.id[:8],
            "task": session.task.id,
            "seed": session.seed,
            "turns": session.step,
            "reward": session.reward,
            "outcome": outcome,
            "seconds": round(time.monotonic() - session.started, 3),
        }
        if error is not None:
            record["error"] = str(error)
        logger.info(json.dumps(record))
        self._spawn(self._close(session))

    async def _close(self, session: _Session) -> None:
        environment = session.environment
        if session.turn is not None and session.turn.task is not None:
            await asyncio.wait({session.turn.task}, timeout=CLOSE_TIMEOUT_S)
        try:
            await self._bounded(
                self._guard(environment.call(environment.close), environment, None),
                CLOSE_TIMEOUT_S,
                make_error("env_error", f"close() of '{environment.id}' ran out of time"),
            )
        except EnvError as error:
            logger.warning("%s", error)
        finally:
            session.source.num_sessions -= 1
            self._live[environment.id] -= 1

    async def drain(self, timeout_s: float) -> None:
        """Open no more sessions, and wait until the open ones have ended, or the time is over."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self.num_live and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def aclose(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close all sessions and what they shared, waiting for their `close` until the deadline."""
        self.draining = True
        if self._reaper is not None:
            self._reaper.cancel()
        for session in list(self._sessions.values()):
            self._bury(session, "closed")
        deadline = time.monotonic() + timeout_s
        while pending := {task for task in self._background if not task.done()}:
            await asyncio.wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
            if time.monotonic() >= deadline:
                logger.warning("%d environment calls hang at shutdown", len(pending))
                break
        closing = [self._spawn(self._close_source(each)) for each in self._sources.values()]
        self._sources.clear()
        if closing:
            await asyncio.wait(closing, timeout=max(deadline - time.monotonic(), 1.0))
        self.workers.close()

    # Sources: what a configuration's sessions share

    def _environment(self, env_id: str) -> type[Environment]:
        try:
            environment = self._resolve(env_id)
            tools_of(environment)
        except ConfigError as error:
            raise make_error("not_found", str(error)) from error
        return environment

    async def _source(
        self, environment: type[Environment], config: Mapping[str, JSON], timeout_s: float
    ) -> _Source:
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
            source = self._sources[key] = _Source(environment, values)
            source.loading = self._spawn(self._guard(self._load(source), environment, None))
            self._drop_unused_sources()
        self._sources.move_to_end(key)
        assert source.loading is not None
        await asyncio.wait({source.loading}, timeout=timeout_s)
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

    async def _load(self, source: _Source) -> None:
        shared = await self.workers.run(source.environment.load_shared, source.config)
        instance = source.environment(source.config, shared=shared)
        _tool_specs(instance)  # a wrong `offered_tools` is known before the first session
        source.splits = dict(await self.workers.run(instance.splits))
        source.instance = instance

    def _drop_unused_sources(self) -> None:
        unused = [
            key
            for key, source in self._sources.items()
            if source.num_sessions == 0 and source.loading is not None and source.loading.done()
        ]
        for key in unused[: max(len(self._sources) - _MAX_SOURCES, 0)]:
            self._spawn(self._close_source(self._sources.pop(key)))

    async def _close_source(self, source: _Source) -> None:
        if source.instance is None:
            return
        environment = source.environment
        try:
            await self._bounded(
                self._guard(
                    self.workers.run(environment.close_shared, source.instance.shared),
                    environment,
                    None,
                ),
                CLOSE_TIMEOUT_S,
                make_error("env_error", f"close_shared() of '{environment.id}' ran out of time"),
            )
        except EnvError as error:
            logger.warning("%s", error)

    # Running an author's code

    async def _guard(
        self,
        coroutine: Coroutine[Any, Any, T],
        environment: type[Environment] | Environment,
        task: Task | None,
    ) -> T:
        """Await an author's code; what it raises comes out as an EnvError, its trace in the log.

        A ConfigError or DataError is about what the caller asked for, and so `invalid_request`.
        """
        try:
            return await coroutine
        except EnvError:
            raise
        except (ConfigError, DataError) as error:
            raise make_error("invalid_request", str(error)) from error
        except AgentRLError as error:
            raise make_error("env_error", str(error)) from error
        except (Exception, SystemExit) as error:
            logger.exception("environment '%s' failed", environment.id)
            message = f"'{environment.id}' raised {describe(error, task)}"
            raise make_error("env_error", message) from error

    async def _bounded(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float, late: EnvError
    ) -> T:
        """Await a coroutine until the deadline, and not longer even if it ignores cancellation."""
        task = self._spawn(coroutine)
        try:
            await asyncio.wait({task}, timeout=max(timeout_s, 0.001))
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            raise late
        if task.cancelled():
            raise make_error("env_error", "the environment cancelled its own call")
        return task.result()

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_observe)
        return task

    def _session_reply(self, session: _Session) -> SessionReply:
        return SessionReply(
            id=session.id,
            task_id=session.task.id,
            lease_expires_at=self._lease_end(session),
            lease_s=session.lease_s,
            step=session.step,
            observation=session.first,
            tools=_tool_specs(session.environment),
        )


def _tool_specs(environment: Environment) -> list[dict[str, Any]]:
    return [tool.spec for tool in environment._tools.values()]


async def _first_prompt(environment: Environment, task: Task, seed: int) -> list[dict[str, Any]]:
    """Reset, and copy the prompt as the wire would, so that nobody can change it afterwards."""
    return protocol.as_json(await start_episode(environment, task, seed))


async def _answer(environment: Environment, turn: _Turn, step: int) -> tuple[StepReply, bytes]:
    """Take the turn and encode its reply here, where a value that is not JSON is still an error
    of the environment."""
    result = await take_turn(environment, turn.action, last=turn.last)
    reply = protocol.to_step_reply(result, step)
    return reply, protocol.encode(reply)


async def _outcome(turn: _Turn) -> bytes:
    if turn.outcome is None:
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        turn.waiters.append(waiter)
        return await waiter
    if isinstance(turn.outcome, EnvError):
        raise turn.outcome
    return turn.outcome


def _observe(future: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not report an error nobody waited for."""
    if not future.cancelled():
        future.exception()
