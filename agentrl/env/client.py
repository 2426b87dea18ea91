"""Playing environments: one interface, in this process or over HTTP.

    async with connect("http://127.0.0.1:8700") as client:      # or connect() for this process
        session = await client.session("math", split="train", index=0, seed=7)
        result = await session.step(Action(text="42"), timeout_s=60)
        await session.close()

Both ways go through the same `SessionManager` and the same JSON, so an episode is the same bit for
bit. Calls that failed on the way are repeated with the same step index or idempotency key, which
the manager executes once, with growing, jittered pauses and never beyond the call's deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from agentrl.env import protocol, registry
from agentrl.env.base import Environment, load_config
from agentrl.env.protocol import (
    CreateReply,
    CreateRequest,
    EnvInfo,
    SessionReply,
    StepReply,
    StepRequest,
    TaskSpec,
    make_error,
)
from agentrl.env.session import SessionManager
from agentrl.errors import ConfigError, EnvError, EnvUnavailable
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolCall, ToolSpec

logger = logging.getLogger("agentrl.env")

T = TypeVar("T")

LEASE_S = 50.0
"""A session of a client that died is closed after this long; a living client renews."""
GRACE_S = 5.0
"""How much longer than the server's own deadline the client waits for its answer."""
LOAD_TIMEOUT_S = 1800.0
"""How long a configuration may load, such as a dataset that is downloaded."""
INFO_CALL_S = 30.0
"""One call for it; as long as the server is loading it is repeated."""
UNREACHABLE_S = 10.0
"""How long a server that cannot be reached is tried."""
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

    async def close(self) -> None:
        """Give the session up. Never raises; what cannot be told to the server expires there."""
        ...


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


class _Transport(Protocol):
    """A way to one session manager. Errors of the way itself are `EnvUnavailable`."""

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo: ...
    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply: ...
    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply: ...
    async def renew(self, session_id: str, timeout_s: float) -> None: ...
    async def delete(self, session_id: str, timeout_s: float) -> None: ...
    async def aclose(self) -> None: ...


class InProcess:
    """A session manager of this process. Messages pass through JSON, so nothing is shared."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo:
        reply = protocol.encode(
            await self._manager.info(env_id, protocol.as_json(dict(config)), timeout_s)
        )
        return protocol.decode_reply(reply, EnvInfo)

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply:
        request = protocol.decode_request(protocol.encode(request), CreateRequest)
        reply = protocol.encode(await self._manager.create(request, key))
        return protocol.decode_reply(reply, CreateReply)

    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        request = protocol.decode_request(protocol.encode(request), StepRequest)
        return protocol.decode_reply(await self._manager.step(session_id, request), StepReply)

    async def renew(self, session_id: str, timeout_s: float) -> None:
        self._manager.renew(session_id, None)

    async def delete(self, session_id: str, timeout_s: float) -> None:
        self._manager.delete(session_id)

    async def aclose(self) -> None:
        await self._manager.aclose()


class Http:
    """An environment server. Connections are kept alive for less long than the server keeps them,
    so that a request does not meet a connection which is just being closed."""

    def __init__(self, url: str, token: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"environment server '{url}' needs to be a URL, http://host:port")
        self.url = url.rstrip("/")
        self._headers = {protocol.PROTOCOL_HEADER: protocol.PROTOCOL_VERSION}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: Any = None

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo:
        query = {"timeout_s": repr(timeout_s)}
        if config:
            query["config"] = msgspec.json.encode(config).decode()
        path = f"/v1/envs/{quote(env_id, safe='')}?{urlencode(query)}"
        return await self._call("GET", path, EnvInfo, None, timeout_s + GRACE_S)

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply:
        return await self._call(
            "POST", "/v1/sessions", CreateReply, request, timeout_s, {"Idempotency-Key": key}
        )

    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        path = f"/v1/sessions/{session_id}/step"
        return await self._call("POST", path, StepReply, request, timeout_s)

    async def renew(self, session_id: str, timeout_s: float) -> None:
        path, body = f"/v1/sessions/{session_id}/renew", protocol.RenewRequest()
        await self._call("POST", path, protocol.SessionStatus, body, timeout_s)

    async def delete(self, session_id: str, timeout_s: float) -> None:
        await self._call("DELETE", f"/v1/sessions/{session_id}", None, None, timeout_s)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call(
        self,
        method: str,
        path: str,
        reply: Any,
        request: msgspec.Struct | None,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Any:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                headers=self._headers | {"Content-Type": "application/json"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        data = None if request is None else protocol.encode(request)
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=GRACE_S),
                allow_redirects=False,
            ) as response:
                body = await response.read()
                status, ours = response.status, protocol.PROTOCOL_HEADER in response.headers
        except TimeoutError as error:
            raise EnvUnavailable(
                f"environment server {self.url} did not answer within {timeout_s:.1f} s"
            ) from error
        except aiohttp.ClientError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            number = getattr(cause, "errno", None)
            reason = os.strerror(number) if number else str(error) or type(error).__name__
            raise EnvUnavailable(
                f"environment server {self.url} cannot be reached ({reason}); start it with "
                "`agentrl env serve ID`, or check the URL"
            ) from error
        if not ours and status not in (502, 503, 504):
            raise make_error(
                "env_error",
                f"{self.url} answered {status} but is no agentrl environment server; check the URL",
            )
        try:
            if 200 <= status < 300:
                return None if reply is None else protocol.decode_reply(body, reply)
            problem = protocol.decode_reply(body, protocol.Problem)
        except msgspec.DecodeError as error:
            raise EnvUnavailable(
                f"environment server {self.url} sent a broken answer ({status}, {len(body)} bytes)"
            ) from error
        raise protocol.from_problem(problem)


class _Server:
    """A transport and what the client knows about it."""

    def __init__(self, transport: _Transport) -> None:
        self.transport = transport
        self.num_sessions = 0
        self.failed_at = float("-inf")
        """When it last could not be reached or was full, on the event loop's clock."""


class _Session:
    def __init__(self, client: Client, server: _Server, opened: SessionReply) -> None:
        self.id = opened.id
        self.task_id = opened.task_id
        self.messages = protocol.from_wire_messages(opened.observation)
        self.tools: list[ToolSpec] = opened.tools
        self._client = client
        self._server = server
        self._step = opened.step
        self._used = asyncio.get_running_loop().time()
        server.num_sessions += 1
        client._sessions.add(self)

    async def step(self, action: Action, *, timeout_s: float, last: bool = False) -> StepResult:
        request = StepRequest(self._step, protocol.to_wire_action(action), timeout_s, last)
        transport = self._server.transport

        async def attempt(remaining: float) -> StepReply:
            return await transport.step(self.id, request, remaining)

        reply = await _retry(attempt, timeout_s)
        self._step = reply.step
        self._used = asyncio.get_running_loop().time()
        return protocol.from_step_reply(reply)

    async def close(self) -> None:
        if self not in self._client._sessions:
            return
        self._client._sessions.discard(self)
        self._server.num_sessions -= 1
        # In a task of its own: an episode that is being cancelled still frees its session.
        await asyncio.shield(self._client._spawn(_delete(self._server.transport, self.id)))


class Client:
    """`EnvClient` over one or more transports; a session stays with the one that opened it."""

    def __init__(self, transports: Sequence[_Transport]) -> None:
        self._servers = [_Server(transport) for transport in transports]
        self._sessions: set[_Session] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._renewer: asyncio.Task[None] | None = None

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
            first = infos[0]
            if any((each.splits, each.tools) != (first.splits, first.tools) for each in infos):
                raise ConfigError(
                    f"the environment servers have different splits or tools for '{env_id}'; "
                    "start them with the same configuration and data"
                )
            return msgspec.structs.replace(
                first, max_sessions=sum(each.max_sessions for each in infos)
            )

        return await _retry(attempt, timeout_s)

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
        if (task is None) == (split is None or index is None):
            raise ConfigError("a session needs either split and index, or a task")
        spec = TaskSpec(split, index) if task is None else protocol.to_task_spec(task)
        request = CreateRequest(env_id, spec, seed, dict(config or {}), count, LEASE_S, timeout_s)
        opening = self._spawn(self._open(request, timeout_s))
        try:
            return [*await asyncio.shield(opening)]
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_unclaimed)
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

    async def _open(self, request: CreateRequest, timeout_s: float) -> list[_Session]:
        key = uuid.uuid4().hex

        async def attempt(remaining: float) -> list[_Session]:
            async def create(server: _Server) -> list[_Session]:
                reply = await server.transport.create(request, key, remaining)
                return [_Session(self, server, opened) for opened in reply.sessions]

            return await self._on_a_server(create)

        sessions = await _retry(attempt, timeout_s)
        if self._renewer is None:
            self._renewer = self._spawn(self._renew())
        return sessions

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
            now = asyncio.get_running_loop().time()
            for session in [each for each in self._sessions if each._used < now - LEASE_S / 3]:
                try:
                    await session._server.transport.renew(session.id, GRACE_S)
                    session._used = asyncio.get_running_loop().time()
                except EnvError as error:  # its owner will hear about it from the next step
                    logger.debug("renewing session %s: %s", session.id[:8], error)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _delete(transport: _Transport, session_id: str) -> None:
    try:
        await transport.delete(session_id, GRACE_S)
    except EnvError as error:
        logger.debug("closing session %s: %s", session_id[:8], error)


async def _retry(attempt: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
    """Repeat a call that failed on the way, or met a full server, until its deadline. `attempt`
    is told how long it may take."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    unreachable_since: float | None = None
    pause = 0.05
    while True:
        try:
            return await attempt(deadline + GRACE_S - clock())
        except EnvError as error:
            if not error.retryable or error.code not in _RETRIED:
                raise
            now = clock()
            if error.code == "unavailable":
                unreachable_since = unreachable_since or now
                if now - unreachable_since > UNREACHABLE_S:
                    raise
            else:
                unreachable_since = None
            wait = max(error.retry_after_s or 0.0, pause) * random.uniform(0.75, 1.25)
            if now + wait >= deadline:
                raise
        await asyncio.sleep(wait)
        pause = min(pause * 2, 2.0)


def connect(urls: str | Sequence[str] | None = None, *, token: str | None = None) -> Client:
    """A client of environment servers, or of this process. Use it as `async with connect(...)`.

    Args:
        urls: one URL, several (comma-separated or a sequence), or None for this process.
        token: what the servers ask for; by default from the variable AGENTRL_ENV_TOKEN.
    """
    if isinstance(urls, str):
        urls = [url.strip() for url in urls.split(",") if url.strip()]
    if not urls:
        return Client([InProcess(SessionManager(registry.resolve))])
    token = token or os.environ.get(protocol.TOKEN_VARIABLE)
    return Client([Http(url, token) for url in urls])


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


class SyncEnv:
    """A `LocalEnv` on an event loop in a thread, for scripts and notebooks."""

    def __init__(self, env: LocalEnv) -> None:
        self._env = env
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agentrl-env", daemon=True).start()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def info(self) -> EnvInfo:
        return self._wait(self._env.info())

    def reset(
        self,
        split: str | None = None,
        index: int = 0,
        *,
        task: Task | None = None,
        seed: int = 0,
    ) -> list[Message]:
        return self._wait(self._env.reset(split, index, task=task, seed=seed))

    def step(
        self, action: Action | str, *, timeout_s: float = 600.0, last: bool = False
    ) -> StepResult:
        return self._wait(self._env.step(action, timeout_s=timeout_s, last=last))

    def call(self, tool: str, /, **arguments: JSON) -> StepResult:
        return self._wait(self._env.call(tool, **arguments))

    def close(self) -> None:
        if not self._loop.is_closed():
            self._wait(self._env.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
