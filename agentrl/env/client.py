"""The client, which plays environments in this process or on environment servers.

    async with connect("http://127.0.0.1:8700") as client:      # or connect() for this process
        session = await client.session("math", split="train", index=0, seed=7)
        result = await session.step(Action(text="42"), timeout_s=60)
        await session.close()

`connect(...).sync` is the same without `await`. Both transports (`agentrl.env.transport`) reach a
`SessionManager` and carry the same JSON, so an episode is bit-identical either way. A call that
failed on the way is retried, with growing, jittered pauses, until its deadline. It keeps its step
index or idempotency key, so the manager executes it only once. If the server or worker process that
held the session is gone, the caller gets an error (`session_lost`, `session_expired`, `not_found`
or `unavailable`) and must play the episode again.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from agentrl.env import protocol, registry
from agentrl.env.base import Environment
from agentrl.env.protocol import (
    CreateRequest,
    EnvInfo,
    SessionReply,
    StepReply,
    StepRequest,
    TaskPreview,
    TaskSpec,
    make_error,
)
from agentrl.env.sessions.manager import SessionManager
from agentrl.env.sync import Blocking, BlockingOwner, blocking, blocking_then
from agentrl.env.transport import CONNECT_S, Http, InProcess, Transport
from agentrl.errors import ConfigError, EnvError, EnvUnavailable
from agentrl.runtime import retry
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolSpec

logger = logging.getLogger("agentrl.env")

T = TypeVar("T")

LEASE_S = 50.0
"""Seconds without a call after which the server closes a session. A living client renews it, so
only the sessions of dead clients are closed."""
GRACE_S = CONNECT_S
"""Seconds that the client waits for an answer beyond the server's own deadline; seconds for which
opening or closing a session continues after its caller has gone; and seconds for which a server
that failed is avoided if there are others."""
LOAD_TIMEOUT_S = 1800.0
"""Seconds in which a configuration must load, for example download its data set."""
INFO_CALL_S = 30.0
"""Seconds for one call that asks for a description; it is repeated while the server loads."""
MAX_RENEWALS = 32
"""Leases that are renewed at a time on one server."""
UNREACHABLE_S = 10.0
"""Seconds for which a server that refuses connections is retried."""
SILENT_S = 30.0
"""Seconds for which a server that does not answer, or whose connections break, is retried. Less
than `LEASE_S`, so that the session still exists when the server answers again."""
RESTART_S = 60.0
"""Seconds for which a new session is retried if a server was reached before, which may be
restarting."""
_result_fields = operator.attrgetter(*(each.name for each in fields(StepResult)))
_REPEATED = ("at_capacity", "draining", "unavailable", "request_timeout", "reset_timeout")


@dataclass(slots=True, eq=False)
class _Endpoint:
    """A transport, and what the client knows about the server behind it."""

    transport: Transport
    load: int = 0
    """Number of this client's sessions that are open or being opened there."""
    failed_at: float = float("-inf")
    """Time on the event loop's clock when it last could not be reached or was full."""


class EnvSession:
    """One episode. Several tasks must not use it at the same time."""

    def __init__(self, client: EnvClient, endpoint: _Endpoint, opened: SessionReply) -> None:
        self.id = opened.id
        self.task_id = opened.task_id
        self.public = opened.public
        """What the environment shows of the task's row beside the prompt."""
        self.messages: list[Message] = opened.observation
        """The first prompt."""
        self.tools: list[ToolSpec] = opened.tools
        """The tools for the agent's next turn; a step may change them."""
        self._client = client
        self._endpoint = endpoint
        self._step = opened.step
        self._used = asyncio.get_running_loop().time()
        endpoint.load += 1
        client._sessions.add(self)

    async def step(self, action: Action, *, timeout_s: float, last: bool = False) -> StepResult:
        """Takes a step. It is executed at most once, however often it has to be sent.

        Args:
            timeout_s: seconds for the step, including retries.
            last: the agent gets no further turn; if the environment does not end the episode
                here, it is truncated and its reward components are reported.

        Raises:
            EnvError: the step failed; `code` says why. It is a `GraderError` if the grader failed.
        """
        request = StepRequest(self._step, action, timeout_s, last)

        async def attempt(remaining_s: float) -> StepReply:
            return await self._endpoint.transport.step(self.id, request, remaining_s + GRACE_S)

        try:
            reply = await retry(attempt, timeout_s=timeout_s, retry_after_s=_Patience())
        except EnvUnavailable:
            self._endpoint.failed_at = asyncio.get_running_loop().time()
            raise
        if reply.step != self._step + 1:
            raise make_error(
                "env_error",
                f"the environment server answered step {self._step} as if the next one were "
                f"{reply.step}; look into what stands between",
            )
        self._step = reply.step
        self._used = asyncio.get_running_loop().time()
        if reply.tools is not None:
            self.tools = reply.tools
        return StepResult(*_result_fields(reply))

    async def close(self) -> None:
        """Closes the session. Never raises; a server that cannot be reached lets it expire."""
        if self not in self._client._sessions:
            return
        self._client._sessions.discard(self)
        self._endpoint.load -= 1
        # In its own task, so that an episode that is being cancelled still frees its session.
        await asyncio.shield(self._client._spawn(self._delete()))

    async def _delete(self) -> None:
        async def attempt(remaining_s: float) -> None:
            await self._endpoint.transport.delete(self.id, remaining_s + GRACE_S / 2)

        try:
            # A server that refuses connections is gone, and its sessions with it.
            patience = _Patience(unreachable_s=0.0)
            await retry(attempt, timeout_s=GRACE_S / 2, retry_after_s=patience)
        except EnvError as error:
            logger.debug("closing session %s: %s", self.id[:8], error)


class EnvClient:
    """Opens sessions over one or more transports. A session stays on the one that opened it."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._name = secrets.token_hex(8)
        self._endpoints = [_Endpoint(transport) for transport in transports]
        self._sessions: set[EnvSession] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._renewer: asyncio.Task[None] | None = None
        self._was_reached = False
        self._fingerprints: dict[tuple[str, bytes], str] = {}
        self._sync: SyncClient | None = None

    @property
    def sync(self) -> SyncClient:
        """The same client without `await`, on an event loop in a thread. Do not use both."""
        if self._sync is None:
            self._sync = SyncClient(self, self.aclose)
        return self._sync

    async def __aenter__(self) -> EnvClient:
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
        """Returns the splits, tools and limits of an environment with a configuration.

        Asks every server, so that each loads the configuration before the first session. Servers
        that cannot be reached are left out unless all are. `max_sessions` is the sum over servers.

        Raises:
            ConfigError: the servers have different splits or tools.
            EnvError: a server refused, or none could be reached.
        """

        async def attempt(remaining_s: float) -> EnvInfo:
            # Short calls, so that a server that hangs is noticed; one that loads is asked again.
            wait_s = min(remaining_s + GRACE_S, INFO_CALL_S)
            answers = await asyncio.gather(
                *(each.transport.info(env_id, config or {}, wait_s) for each in self._endpoints),
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
            return replace(first, max_sessions=sum(each.max_sessions for each in infos))

        return await retry(attempt, timeout_s=timeout_s, retry_after_s=self._patience())

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
        """Returns the ids and prompts of tasks `start` to `stop - 1` of a split, by default 20.

        Raises:
            EnvError: the environment has no such split, or failed.
        """
        end = start + 20 if stop is None else stop

        async def ask(endpoint: _Endpoint, remaining_s: float) -> list[TaskPreview]:
            rows = range(start, end)
            return await endpoint.transport.tasks(env_id, split, rows, config or {}, remaining_s)

        return await self._on_some_server(ask, timeout_s)

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
        max_turns: int | None = None,
    ) -> EnvSession:
        """Opens a session for a task of the environment or a task of your own, and resets it.

        Waits until `timeout_s` while the environment is at capacity.

        Args:
            split: with `index`, selects one of the environment's tasks.
            task: a task of your own, instead of `split` and `index`.
            timeout_s: seconds for the call, including retries.
            max_turns: the most steps that the caller will take, which the environment is told.

        Raises:
            ConfigError: neither `task` nor `split` and `index` are given, or both.
            EnvUnavailable: no server can be reached, or all stayed full.
            EnvError: the environment refused or failed.
        """
        try:
            spec = TaskSpec(split, index, task)
        except ValueError:
            raise ConfigError("give a session either split and index, or a task") from None
        request = CreateRequest(
            env_id,
            spec,
            seed,
            dict(config or {}),
            lease_s=LEASE_S,
            timeout_s=timeout_s,
            max_turns=max_turns,
        )
        opening = self._spawn(self._open(request, timeout_s))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The caller gave up: close the session if it still opens, and stop trying soon,
            # because on a server that hangs each attempt holds a connection.
            opening.add_done_callback(self._close_unclaimed)
            asyncio.get_running_loop().call_later(GRACE_S, opening.cancel)
            raise

    async def aclose(self) -> None:
        """Closes all sessions and connections."""
        if self._renewer is not None:
            self._renewer.cancel()
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for endpoint in self._endpoints:
            await endpoint.transport.aclose()

    async def _open(self, request: CreateRequest, timeout_s: float) -> EnvSession:
        key = f"{self._name}/{secrets.token_hex(16)}"

        async def create(endpoint: _Endpoint, remaining_s: float) -> EnvSession:
            reply = await endpoint.transport.create(request, key, remaining_s)
            session = EnvSession(self, endpoint, reply.sessions[0])
            try:
                self._compare(request, reply.sessions[0].fingerprint)
            except ConfigError:
                await session.close()
                raise
            return session

        session = await self._on_some_server(create, timeout_s)
        self._was_reached = True
        if self._renewer is None:
            self._renewer = self._spawn(self._renew())
        return session

    def _compare(self, request: CreateRequest, fingerprint: str) -> None:
        key = request.env, protocol.encode(request.config)
        if self._fingerprints.setdefault(key, fingerprint) != fingerprint:
            raise ConfigError(
                f"environment '{request.env}' has another configuration, other splits or other "
                "tools than in earlier sessions: a server was restarted with other options; start "
                "all servers with the same ones"
            )

    async def _on_some_server(
        self, call: Callable[[_Endpoint, float], Awaitable[T]], timeout_s: float
    ) -> T:
        """Calls the least loaded server and, if it cannot be reached, others until the deadline.

        The call itself counts as load, so that many calls at once spread over the servers.
        """

        async def attempt(remaining_s: float) -> T:
            now = asyncio.get_running_loop().time()
            # If all failed within GRACE_S, this takes the one that failed first.
            endpoint = min(
                self._endpoints, key=lambda each: (max(each.failed_at, now - GRACE_S), each.load)
            )
            endpoint.load += 1
            try:
                return await call(endpoint, remaining_s + GRACE_S)
            except EnvUnavailable:
                endpoint.failed_at = asyncio.get_running_loop().time()
                raise
            finally:
                endpoint.load -= 1

        return await retry(attempt, timeout_s=timeout_s, retry_after_s=self._patience())

    def _patience(self) -> _Patience:
        return _Patience(RESTART_S if self._was_reached else UNREACHABLE_S)

    def _close_unclaimed(self, opening: asyncio.Task[EnvSession]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._spawn(opening.result().close())

    async def _renew(self) -> None:
        """Renews leases, so that sessions which wait for their policy do not expire."""
        while True:
            await asyncio.sleep(LEASE_S / 6)
            # Concurrently, so that a server that hangs does not let sessions elsewhere expire.
            await asyncio.gather(*(self._renew_on(endpoint) for endpoint in self._endpoints))

    async def _renew_on(self, endpoint: _Endpoint) -> None:
        now = asyncio.get_running_loop().time()
        idle = [
            each
            for each in self._sessions
            if each._endpoint is endpoint and each._used < now - LEASE_S / 3
        ]

        async def renew_next() -> None:
            while idle:
                session = idle.pop()
                try:
                    await endpoint.transport.renew(session.id, GRACE_S)
                    session._used = asyncio.get_running_loop().time()
                except EnvUnavailable as error:  # it would not answer for the others either
                    logger.debug("renewing sessions: %s", error)
                    idle.clear()
                except EnvError as error:  # the session's next step reports it
                    logger.debug("renewing session %s: %s", session.id[:8], error)

        await asyncio.gather(*(renew_next() for _ in range(MAX_RENEWALS)))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Patience:
    """Decides whether a call is retried after an error.

    Returns the seconds to wait at least, or None if the error is final.
    """

    def __init__(self, unreachable_s: float | None = None) -> None:
        self._unreachable_s = UNREACHABLE_S if unreachable_s is None else unreachable_s
        self._unreachable_since: float | None = None

    def __call__(self, error: Exception) -> float | None:
        if not isinstance(error, EnvError):
            return None
        if not error.retryable or error.code not in _REPEATED:
            return None
        now = asyncio.get_running_loop().time()
        if error.code != "unavailable":
            self._unreachable_since = None
        else:
            if self._unreachable_since is None:
                self._unreachable_since = now
            patience_s = self._unreachable_s
            cause = error.__cause__
            if not isinstance(getattr(cause, "os_error", cause), ConnectionRefusedError):
                # Something listens there: the network may be bad, and the session alive.
                patience_s = max(patience_s, SILENT_S)
            if now - self._unreachable_since > patience_s:
                return None
        return error.retry_after_s or 0.0


def connect(urls: str | Sequence[str] | None = None, *, token: str | None = None) -> EnvClient:
    """Makes a client of environment servers or of this process, for `async with connect(...)`.

    Args:
        urls: one URL, several (comma-separated or a sequence), or None for this process.
        token: the servers' token; by default the environment variable AGENTRL_ENV_TOKEN.

    Raises:
        ConfigError: one of `urls` is not a URL.
    """
    if isinstance(urls, str):
        urls = [url.strip() for url in urls.split(",") if url.strip()]
    if not urls:
        return EnvClient([InProcess(SessionManager(registry.resolve))])
    token = token or os.environ.get(protocol.TOKEN_VARIABLE)
    return EnvClient([Http(url, token) for url in urls])


def in_process(
    environment: type[Environment],
    *,
    max_sessions: int | None = None,
    config: Mapping[str, JSON] | None = None,
) -> EnvClient:
    """Makes a client that plays one class in this process, under whatever name is given.

    Args:
        max_sessions: the most sessions at a time; None: the limit of the class.
        config: the values that every session's configuration starts from.
    """
    environment = registry.with_id(environment)
    base = {environment.id: dict(config or {})}
    manager = SessionManager(lambda _: environment, max_sessions=max_sessions, config=base)
    return EnvClient([InProcess(manager)])


class SyncSession(Blocking):
    """An `EnvSession` whose methods block instead of being awaited."""

    @property
    def id(self) -> str:
        return self._wrapped.id

    @property
    def task_id(self) -> str:
        return self._wrapped.task_id

    @property
    def public(self) -> dict[str, JSON]:
        return self._wrapped.public

    @property
    def messages(self) -> list[Message]:
        return self._wrapped.messages

    @property
    def tools(self) -> list[ToolSpec]:
        return self._wrapped.tools

    step = blocking(EnvSession.step)
    close = blocking(EnvSession.close)


class SyncClient(BlockingOwner):
    """An `EnvClient` whose methods block. Close it, or use it as `with connect(...).sync`."""

    info = blocking(EnvClient.info)
    tasks = blocking(EnvClient.tasks)
    session = blocking_then(EnvClient.session, SyncSession)
