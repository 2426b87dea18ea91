"""Playing environments: one interface, in this process or on environment servers.

    async with connect("http://127.0.0.1:8700") as client:      # or connect() for this process
        session = await client.session("math", split="train", index=0, seed=7)
        result = await session.step(Action(text="42"), timeout_s=60)
        await session.close()

`connect(...).sync` is the same without `await`. All ways (`agentrl.env.transport`) go through the
same `SessionManager` and the same JSON, so an episode is the same bit for bit. Calls that failed on
the way are repeated with the same step index or idempotency key, which the manager executes once,
with growing, jittered pauses and never beyond the call's deadline. What cannot be repeated, because
the server or the worker process that held the session is gone, is an error for the caller to start
over from: `session_lost`, `session_expired`, `not_found` or `unavailable`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from agentrl.env import protocol, registry
from agentrl.env.base import Environment, load_config
from agentrl.env.protocol import (
    CreateRequest,
    EnvInfo,
    ResetRequest,
    SessionReply,
    SnapshotRequest,
    StepReply,
    StepRequest,
    TaskPreview,
    TaskSpec,
    make_error,
)
from agentrl.env.session.manager import SessionManager
from agentrl.env.transport.base import CONNECT_S, ConnectionLost, InProcess, Transport
from agentrl.env.transport.http import Http
from agentrl.env.transport.websocket import WebSocket
from agentrl.errors import ConfigError, EnvError, EnvUnavailable
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolCall, ToolSpec

if TYPE_CHECKING:
    from agentrl.env.sync import SyncClient, SyncEnv

logger = logging.getLogger("agentrl.env")

T = TypeVar("T")

LEASE_S = 50.0
"""A session of a client that died is closed after this long; a living client renews."""
GRACE_S = CONNECT_S
"""How much longer than the server's own deadline the client waits for its answer; how long an
opening or closing that nobody waits for any more may go on."""
LOAD_TIMEOUT_S = 1800.0
"""How long a configuration may load, such as a dataset that is downloaded."""
INFO_CALL_S = 30.0
"""One call for it; as long as the server is loading it is repeated."""
UNREACHABLE_S = 10.0
"""How long a server that refuses connections is tried."""
SILENT_S = 30.0
"""How long one is tried that does not answer, or on a way that breaks: less than its lease, so that
the session is still there."""
RESTART_S = 60.0
"""How long, where it was reached before: it may be starting again."""
FIRST_PAUSE_S = 0.05
"""Before a call is repeated; the next pauses are longer, up to two seconds."""
_RETRIED = ("at_capacity", "draining", "unavailable", "request_timeout", "reset_timeout")


class EnvSession(Protocol):
    """One episode. Not for use from several tasks at once."""

    id: str
    task_id: str
    messages: list[Message]
    """The first prompt."""
    tools: list[ToolSpec]

    async def step(self, action: Action, *, timeout_s: float, last: bool = False) -> StepResult:
        """Take a step, exactly once whatever happens on the way.

        Args:
            last: the agent gets no further turn; if the environment does not end the episode
                here, it is truncated and its reward components are reported.

        Raises:
            EnvError: its `code` says why; `GraderError` if the grader failed.
        """
        ...

    async def reset(
        self,
        *,
        split: str | None = None,
        index: int | None = None,
        task: Task | None = None,
        seed: int | None = None,
        timeout_s: float = 120.0,
    ) -> list[Message]:
        """Start a new episode in this session, by default on the same task and seed.

        Returns the first prompt, which `messages` then is too.
        """
        ...

    async def snapshot(self, *, lease_s: float = 600.0, timeout_s: float = 120.0) -> Snapshot:
        """Keep the episode as it is now, for sessions that go on from here.

        Raises:
            EnvError: `not_supported` where the environment has no `snapshot`.
        """
        ...

    async def fork(self, count: int = 1, *, timeout_s: float = 120.0) -> Sequence[EnvSession]:
        """`count` sessions that go on from where this one is."""
        ...

    async def close(self) -> None:
        """Give the session up. Never raises; what cannot be told to the server expires there."""
        ...


@dataclass(slots=True, frozen=True)
class Snapshot:
    """An episode's state on the server that made it."""

    id: str
    env_id: str
    step: int
    expires_at: float
    """Unix time, seconds."""
    server: _Server


class EnvClient(Protocol):
    async def info(
        self,
        env_id: str,
        config: Mapping[str, JSON] | None = None,
        *,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> EnvInfo:
        """The environment's splits, tools and limits under a configuration, which is loaded."""
        ...

    async def session(
        self,
        env_id: str,
        *,
        split: str | None = None,
        index: int | None = None,
        task: Task | None = None,
        seed: int = 0,
        config: Mapping[str, JSON] | None = None,
        timeout_s: float = 120.0,
    ) -> EnvSession:
        """Open a session on a task of the environment, or one of your own, and reset it.

        While the environment is at capacity the call waits, until its deadline.

        Raises:
            EnvUnavailable: no server can be reached, or all stayed full.
            EnvError: the environment refused or failed.
        """
        ...

    async def aclose(self) -> None: ...


class _Server:
    """A transport and what the client knows about it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.num_sessions = 0
        self.failed_at = float("-inf")
        """When it last could not be reached or was full, on the event loop's clock."""


class _Session:
    def __init__(self, client: Client, server: _Server, env_id: str, opened: SessionReply) -> None:
        self.id = opened.id
        self.env_id = env_id
        self._client = client
        self._server = server
        self._begin(opened)
        server.num_sessions += 1
        client._sessions.add(self)

    def _begin(self, opened: SessionReply) -> None:
        self.task_id = opened.task_id
        self.messages = protocol.from_wire_messages(opened.observation)
        self.tools: list[ToolSpec] = opened.tools
        self._step = opened.step
        self._used = asyncio.get_running_loop().time()

    async def step(self, action: Action, *, timeout_s: float, last: bool = False) -> StepResult:
        request = StepRequest(self._step, protocol.to_wire_action(action), timeout_s, last)
        transport = self._server.transport

        async def attempt(remaining: float) -> StepReply:
            return await transport.step(self.id, request, remaining)

        reply = await _retry(attempt, timeout_s)
        self._step = reply.step
        self._used = asyncio.get_running_loop().time()
        return protocol.from_step_reply(reply)

    async def reset(
        self,
        *,
        split: str | None = None,
        index: int | None = None,
        task: Task | None = None,
        seed: int | None = None,
        timeout_s: float = 120.0,
    ) -> list[Message]:
        same = split is None and index is None and task is None
        spec = None if same else _task_spec(split, index, task)
        request = ResetRequest(self._step, spec, seed, timeout_s)
        transport = self._server.transport

        async def attempt(remaining: float) -> SessionReply:
            return await transport.reset(self.id, request, remaining)

        self._begin(await _retry(attempt, timeout_s))
        return self.messages

    async def snapshot(self, *, lease_s: float = 600.0, timeout_s: float = 120.0) -> Snapshot:
        request = SnapshotRequest(self._step, lease_s)
        transport = self._server.transport

        async def attempt(remaining: float) -> protocol.SnapshotReply:
            return await transport.snapshot(self.id, request, remaining)

        made = await _retry(attempt, timeout_s)
        return Snapshot(made.snapshot, self.env_id, made.step, made.expires_at, self._server)

    async def fork(self, count: int = 1, *, timeout_s: float = 120.0) -> list[EnvSession]:
        snapshot = await self.snapshot(timeout_s=timeout_s)
        return await self._client.fork(snapshot, count, timeout_s=timeout_s)

    async def close(self) -> None:
        if self not in self._client._sessions:
            return
        self._client._sessions.discard(self)
        self._server.num_sessions -= 1
        transport = self._server.transport
        if transport.deletes_at_once:
            await _delete(transport, self.id)
        else:
            # In a task of its own: an episode that is being cancelled still frees its session.
            await asyncio.shield(self._client._spawn(_delete(transport, self.id)))


class Client:
    """`EnvClient` over one or more transports; a session stays with the one that opened it."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._servers = [_Server(transport) for transport in transports]
        self._sessions: set[_Session] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._renewer: asyncio.Task[None] | None = None
        self._was_reached = False
        self._sync: SyncClient | None = None

    @property
    def sync(self) -> SyncClient:
        """The same without `await`, on an event loop in a thread. Use one or the other."""
        from agentrl.env.sync import SyncClient

        if self._sync is None:
            self._sync = SyncClient(self)
        return self._sync

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def info(
        self,
        env_id: str,
        config: Mapping[str, JSON] | None = None,
        *,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> EnvInfo:
        """Ask every server, so that each has loaded the configuration before the first session.

        Servers out of reach are left out while there are others. `max_sessions` of the answer is
        the sum over the servers.

        Raises:
            ConfigError: the servers have different splits or tools.
            EnvError: a server refused, or none could be reached.
        """

        async def attempt(remaining: float) -> EnvInfo:
            # Short calls: a server that hangs is noticed, one that loads is asked again.
            wait_s = min(remaining, INFO_CALL_S)
            answers = await asyncio.gather(
                *(each.transport.info(env_id, config or {}, wait_s) for each in self._servers),
                return_exceptions=True,
            )
            infos = [answer for answer in answers if isinstance(answer, EnvInfo)]
            for answer in answers:
                left_out = infos and isinstance(answer, EnvUnavailable)
                if isinstance(answer, BaseException) and not left_out:
                    raise answer
            first, self._was_reached = infos[0], True
            if any((each.splits, each.tools) != (first.splits, first.tools) for each in infos):
                raise ConfigError(
                    f"the environment servers have different splits or tools for '{env_id}'; "
                    "start them with the same configuration and data"
                )
            return msgspec.structs.replace(
                first, max_sessions=sum(each.max_sessions for each in infos)
            )

        return await _retry(attempt, timeout_s, self._unreachable_s)

    async def tasks(
        self,
        env_id: str,
        split: str,
        start: int = 0,
        stop: int | None = None,
        *,
        config: Mapping[str, JSON] | None = None,
        timeout_s: float = 120.0,
    ) -> list[TaskPreview]:
        """Tasks `[start, stop)` of a split, by default 20: their ids and prompts, no answers."""
        end = start + 20 if stop is None else stop

        async def attempt(remaining: float) -> list[TaskPreview]:
            async def ask(server: _Server) -> list[TaskPreview]:
                where = (env_id, split, start, end, config or {})
                return await server.transport.tasks(*where, remaining)

            return await self._on_a_server(ask)

        return await _retry(attempt, timeout_s, self._unreachable_s)

    async def session(
        self,
        env_id: str,
        *,
        split: str | None = None,
        index: int | None = None,
        task: Task | None = None,
        seed: int = 0,
        config: Mapping[str, JSON] | None = None,
        timeout_s: float = 120.0,
    ) -> EnvSession:
        group = await self.group(
            env_id,
            1,
            split=split,
            index=index,
            task=task,
            seed=seed,
            config=config,
            timeout_s=timeout_s,
        )
        return group[0]

    async def group(
        self,
        env_id: str,
        count: int,
        *,
        split: str | None = None,
        index: int | None = None,
        task: Task | None = None,
        seed: int = 0,
        config: Mapping[str, JSON] | None = None,
        timeout_s: float = 120.0,
    ) -> list[EnvSession]:
        """`count` sessions on one task and seed, on one server, all or none."""
        spec = _task_spec(split, index, task)
        request = CreateRequest(env_id, spec, seed, dict(config or {}), count, LEASE_S, timeout_s)
        return await self._claim(self._open(request, timeout_s))

    async def fork(
        self, snapshot: Snapshot, count: int = 1, *, timeout_s: float = 120.0
    ) -> list[EnvSession]:
        """`count` sessions that go on from a snapshot, on the server that made it."""
        request = CreateRequest(
            snapshot.env_id,
            count=count,
            lease_s=LEASE_S,
            timeout_s=timeout_s,
            from_snapshot=snapshot.id,
        )
        return await self._claim(self._open(request, timeout_s, snapshot.server))

    async def _claim(self, opening: Coroutine[Any, Any, list[_Session]]) -> list[EnvSession]:
        """Wait for sessions that are being opened; whoever gives up waiting does not leave them
        open, nor an opening that goes on for long: on a server that hangs, each would hold a
        connection."""
        task = self._spawn(opening)
        try:
            return [*await asyncio.shield(task)]
        except asyncio.CancelledError:
            task.add_done_callback(self._close_unclaimed)
            asyncio.get_running_loop().call_later(GRACE_S, task.cancel)
            raise

    async def aclose(self) -> None:
        """Close all sessions and connections."""
        if self._renewer is not None:
            self._renewer.cancel()
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for server in self._servers:
            await server.transport.aclose()

    async def _open(
        self, request: CreateRequest, timeout_s: float, server: _Server | None = None
    ) -> list[_Session]:
        key = secrets.token_hex(16)

        async def attempt(remaining: float) -> list[_Session]:
            async def create(server: _Server) -> list[_Session]:
                reply = await server.transport.create(request, key, remaining)
                return [_Session(self, server, request.env, opened) for opened in reply.sessions]

            return await (self._on_a_server(create) if server is None else create(server))

        sessions = await _retry(attempt, timeout_s, self._unreachable_s)
        self._was_reached = True
        if self._renewer is None:
            self._renewer = self._spawn(self._renew())
        return sessions

    @property
    def _unreachable_s(self) -> float:
        return RESTART_S if self._was_reached else UNREACHABLE_S

    async def _on_a_server(self, call: Callable[[_Server], Awaitable[T]]) -> T:
        """Call the least loaded server, avoiding those that failed a moment ago; if it fails,
        the next one, until one succeeds or all have failed."""
        now = asyncio.get_running_loop().time()
        order = sorted(
            self._servers, key=lambda each: (each.failed_at > now - GRACE_S, each.num_sessions)
        )
        for server in order:
            try:
                return await call(server)
            except EnvUnavailable:
                server.failed_at = now
                if server is order[-1]:
                    raise
        raise AssertionError("a client has at least one server")

    def _close_unclaimed(self, opening: asyncio.Task[list[_Session]]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            for session in opening.result():
                self._spawn(session.close())

    async def _renew(self) -> None:
        """Hold the sessions that wait for their policy: to the server they look idle."""
        while True:
            await asyncio.sleep(LEASE_S / 6)
            # Side by side, so that a server which hangs does not cost the others' sessions.
            await asyncio.gather(*(self._renew_on(server) for server in self._servers))

    async def _renew_on(self, server: _Server) -> None:
        now = asyncio.get_running_loop().time()
        idle = [each for each in self._sessions if each._used < now - LEASE_S / 3]
        for session in [each for each in idle if each._server is server]:
            try:
                await server.transport.renew(session.id, GRACE_S)
                session._used = asyncio.get_running_loop().time()
            except EnvUnavailable as error:  # nor would it answer for the others
                logger.debug("renewing sessions: %s", error)
                return
            except EnvError as error:  # its owner will hear about it from the next step
                logger.debug("renewing session %s: %s", session.id[:8], error)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _task_spec(split: str | None, index: int | None, task: Task | None) -> TaskSpec:
    if (task is None) == (split is None or index is None):
        raise ConfigError("a session needs either split and index, or a task")
    return TaskSpec(split, index) if task is None else protocol.to_task_spec(task)


async def _delete(transport: Transport, session_id: str) -> None:
    async def attempt(remaining: float) -> None:
        await transport.delete(session_id, min(remaining, GRACE_S))

    try:
        await _retry(attempt, GRACE_S / 2, GRACE_S / 2)
    except EnvError as error:
        logger.debug("closing session %s: %s", session_id[:8], error)


async def _retry(
    attempt: Callable[[float], Awaitable[T]], timeout_s: float, unreachable_s: float | None = None
) -> T:
    """Repeat a call that failed on the way, or met a full server, until its deadline. `attempt`
    is told how long it may take."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    unreachable_since: float | None = None
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await attempt(deadline + GRACE_S - clock())
        except EnvError as error:
            if not error.retryable or error.code not in _RETRIED:
                raise
            now = clock()
            if isinstance(error, ConnectionLost):
                # All sessions of a worker share a connection: on a bad network one call after
                # another may lose it, though each time the server answers some of them.
                unreachable_since, pause = None, FIRST_PAUSE_S
            elif error.code == "unavailable":
                unreachable_since = unreachable_since or now
                patience_s = unreachable_s or UNREACHABLE_S
                if not _refuses(error):  # a bad network, perhaps, and the session lives
                    patience_s = max(patience_s, SILENT_S)
                if now - unreachable_since > patience_s:
                    raise
            else:
                unreachable_since = None
            wait = max(error.retry_after_s or 0.0, pause) * random.uniform(0.75, 1.25)
            if now + wait >= deadline:
                raise
        await asyncio.sleep(wait)
        pause = min(pause * 2, 2.0)


def _refuses(error: EnvError) -> bool:
    """Whether nobody listens at the server's address any more."""
    cause = error.__cause__
    return isinstance(getattr(cause, "os_error", cause), ConnectionRefusedError)


def connect(
    urls: str | Sequence[str] | None = None,
    *,
    token: str | None = None,
    transport: Literal["websocket", "http"] = "websocket",
) -> Client:
    """A client of environment servers, or of this process. Use it as `async with connect(...)`.

    Args:
        urls: one URL, several (comma-separated or a sequence), or None for this process.
        token: what the servers ask for; by default from the variable AGENTRL_ENV_TOKEN.
        transport: all sessions on one WebSocket per worker of a server, which falls back to HTTP
            where no WebSocket is spoken; or one HTTP request for each call.
    """
    if isinstance(urls, str):
        urls = [url.strip() for url in urls.split(",") if url.strip()]
    if not urls:
        return Client([InProcess(SessionManager(registry.resolve))])
    token = token or os.environ.get(protocol.TOKEN_VARIABLE)
    way = WebSocket if transport == "websocket" else Http
    return Client([way(url, token) for url in urls])


def make(environment: str | type[Environment], **config: JSON) -> LocalEnv:
    """One environment to try by hand, in this process.

    env = make("math")
    messages = await env.reset("train", 0)      # or env.sync.reset("train", 0)
    result = await env.step("The answer is 4.")

    Raises:
        ConfigError: there is no such environment, or it does not take this configuration.
    """
    found = registry.resolve(environment) if isinstance(environment, str) else environment
    found = registry.with_id(found)
    load_config(found, config)
    return LocalEnv(found, config)


class LocalEnv:
    """An environment with one session at a time, in this process."""

    def __init__(self, environment: type[Environment], config: dict[str, JSON]) -> None:
        self._environment = environment
        self._config = config
        self._client = Client([InProcess(SessionManager(lambda _: environment))])
        self._session: EnvSession | None = None
        self._sync: SyncEnv | None = None

    @property
    def sync(self) -> SyncEnv:
        """The same without `await`, with a session of its own."""
        from agentrl.env.sync import SyncEnv

        if self._sync is None:
            self._sync = SyncEnv(LocalEnv(self._environment, self._config))
        return self._sync

    async def info(self) -> EnvInfo:
        return await self._client.info(self._environment.id, self._config)

    async def reset(
        self,
        split: str | None = None,
        index: int = 0,
        *,
        task: Task | None = None,
        seed: int = 0,
    ) -> list[Message]:
        """Start an episode, by default on the first task of its configuration's first split."""
        if self._session is not None:
            await self._session.close()
        if split is None and task is None:
            split = next(iter((await self.info()).splits), None)
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
        """Take a step; a string is a turn of plain text."""
        if self._session is None:
            raise make_error("episode_done", "call reset before step")
        action = Action(text=action) if isinstance(action, str) else action
        return await self._session.step(action, timeout_s=timeout_s, last=last)

    async def call(self, tool: str, /, **arguments: JSON) -> StepResult:
        """Take a step that calls one tool."""
        return await self.step(Action(tool_calls=(ToolCall("call-0", tool, arguments),)))

    async def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
        await self._client.aclose()
