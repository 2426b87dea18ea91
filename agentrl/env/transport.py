"""Transports, which connect a client to a session manager in this process or over HTTP.

A transport makes each call once and raises its error; `agentrl.env.client` retries failed calls.
There is one exception: an HTTP request that is not answered for a while is sent again here, because
it or its answer may have been lost. That is safe, because the manager recognises a repeated step by
its index and a repeated creation by its key.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote, urlencode

from agentrl.env import protocol
from agentrl.env.protocol import (
    CreateReply,
    CreateRequest,
    EnvInfo,
    EnvList,
    RenewRequest,
    SessionStatus,
    StepReply,
    StepRequest,
    TaskList,
    TaskPreview,
    make_error,
)
from agentrl.errors import ConfigError, EnvError, EnvUnavailable
from agentrl.types import JSON

if TYPE_CHECKING:
    import aiohttp

    from agentrl.env.sessions.manager import SessionManager

T = TypeVar("T")

CONNECT_S = 5.0
"""Seconds in which a connection must open, and a health check must be answered."""
PATIENCE_S = 10.0
"""Seconds before a request that was not answered is sent again; doubled after each time."""
MAX_PATIENCE_S = 60.0
"""The largest value that doubling reaches."""
KEEP_ALIVE_S = 30.0
"""Seconds for which an idle connection is kept. It must be less than the server keeps it, or a
request could be sent on a connection that is being closed."""


class Transport(Protocol):
    """The calls of the protocol. Each takes at most `timeout_s` seconds and may be repeated.

    Raises:
        EnvError: the manager answered with it.
        EnvUnavailable: no answer came; it is unknown whether the call was executed.
    """

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo: ...

    async def tasks(
        self, env_id: str, split: str, rows: range, config: Mapping[str, JSON], timeout_s: float
    ) -> list[TaskPreview]: ...

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply: ...
    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply: ...
    async def renew(self, session_id: str, timeout_s: float) -> None: ...
    async def delete(self, session_id: str, timeout_s: float) -> None: ...
    async def aclose(self) -> None: ...


class InProcess:
    """Calls a session manager in this process. Requests and replies are converted to JSON and back,
    so that an episode is the same as over HTTP and the caller shares no objects with the author's
    code."""

    def __init__(self, manager: SessionManager) -> None:
        self.manager = manager

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo:
        return _copy(await self.manager.info(env_id, protocol.as_json(dict(config)), timeout_s))

    async def tasks(
        self, env_id: str, split: str, rows: range, config: Mapping[str, JSON], timeout_s: float
    ) -> list[TaskPreview]:
        config = protocol.as_json(dict(config))
        previews = await self.manager.environments.preview(env_id, split, rows, config)
        return _copy(TaskList(split, previews)).tasks

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply:
        return _copy(await self.manager.create(_copy(request), key))

    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        return protocol.decode(await self.manager.step(session_id, _copy(request)), StepReply)

    async def renew(self, session_id: str, timeout_s: float) -> None:
        self.manager.renew(session_id, None)

    async def delete(self, session_id: str, timeout_s: float) -> None:
        self.manager.delete(session_id)

    async def aclose(self) -> None:
        await self.manager.aclose()


def _copy(message: T) -> T:
    return protocol.decode(protocol.encode(message), type(message))


class Http:
    """Calls an environment server, with one HTTP request per call on connections that are kept."""

    def __init__(self, url: str, token: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"environment server '{url}' is not a URL; write http://host:port")
        self.url = url.rstrip("/")
        self._headers = {
            protocol.PROTOCOL_HEADER: protocol.PROTOCOL_VERSION,
            "Content-Type": "application/json",
        }
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connections: aiohttp.ClientSession | None = None
        self._was_reached = False
        """Whether an agentrl server has answered at this URL."""

    async def environments(self, timeout_s: float) -> list[str]:
        """Returns the ids of the server's environments."""
        reply: EnvList = await self._call("GET", "/v1/envs", EnvList, timeout_s=timeout_s)
        return reply.environments

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo:
        path = _env_path(env_id, "", config, timeout_s=timeout_s)
        return await self._call("GET", path, EnvInfo, timeout_s=timeout_s + CONNECT_S)

    async def tasks(
        self, env_id: str, split: str, rows: range, config: Mapping[str, JSON], timeout_s: float
    ) -> list[TaskPreview]:
        path = _env_path(env_id, "/tasks", config, split=split, start=rows.start, stop=rows.stop)
        reply: TaskList = await self._call("GET", path, TaskList, timeout_s=timeout_s)
        return reply.tasks

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply:
        return await self._call(
            "POST",
            "/v1/sessions",
            CreateReply,
            request,
            timeout_s=timeout_s,
            headers={"Idempotency-Key": key},
        )

    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        path = f"/v1/sessions/{session_id}/step"
        return await self._call("POST", path, StepReply, request, timeout_s=timeout_s)

    async def renew(self, session_id: str, timeout_s: float) -> None:
        path = f"/v1/sessions/{session_id}/renew"
        await self._call("POST", path, SessionStatus, RenewRequest(), timeout_s=timeout_s)

    async def delete(self, session_id: str, timeout_s: float) -> None:
        await self._call("DELETE", f"/v1/sessions/{session_id}", None, timeout_s=timeout_s)

    async def aclose(self) -> None:
        if self._connections is not None:
            await self._connections.close()

    async def _call(
        self,
        method: str,
        path: str,
        reply: type[Any] | None,
        request: object | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Makes a call and returns the answer as `reply`, or None if `reply` is None."""
        body = None if request is None else protocol.encode(request)
        clock = asyncio.get_running_loop().time
        deadline, wait_s = clock() + timeout_s, PATIENCE_S
        while True:
            remaining_s = deadline - clock()
            try:
                status, is_ours, answer = await self._send(
                    method, path, body, headers, min(wait_s, remaining_s)
                )
                break
            except TimeoutError as error:
                if remaining_s <= wait_s:
                    raise EnvUnavailable(
                        f"environment server {self.url} did not answer within {timeout_s:.1f} s"
                    ) from error
            await self._check_health()
            wait_s = min(2 * wait_s, MAX_PATIENCE_S)
        return self._read(status, is_ours, answer, reply)

    def _read(self, status: int, is_ours: bool, answer: bytes, reply: type[Any] | None) -> Any:
        if not is_ours and (self._was_reached or status == 429 or status >= 500):
            # Probably a proxy, and the server may have executed the call: the client retries.
            raise EnvUnavailable(
                f"something in front of the environment server {self.url} answered with {status}; "
                "look into the proxy's log, or check the URL"
            )
        if not is_ours:
            raise make_error(
                "env_error",
                f"{self.url} answered {status} but is not an agentrl environment server; check "
                "the URL",
            )
        self._was_reached = True
        try:
            if 200 <= status < 300:
                return None if reply is None else protocol.decode(answer, reply)
            problem = protocol.decode(answer, protocol.Problem)
        except EnvError as error:
            raise EnvUnavailable(
                f"environment server {self.url} sent a broken answer ({status}, {len(answer)} "
                "bytes)"
            ) from error
        raise protocol.from_problem(problem)

    async def _check_health(self) -> None:
        """Checks that the server still answers, and so is only slow with the call."""
        try:
            await self._send("GET", "/healthz", None, None, CONNECT_S)
        except TimeoutError as error:
            raise EnvUnavailable(f"environment server {self.url} does not answer") from error

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        timeout_s: float,
    ) -> tuple[int, bool, bytes]:
        """Sends one request.

        Returns:
            The status, whether an agentrl server answered, and the body of the answer.

        Raises:
            TimeoutError: the server was reached, but did not answer in time.
            EnvUnavailable: the server cannot be reached, or the connection broke.
        """
        import aiohttp

        try:
            if self._connections is None:
                self._connections = self._connect()
            async with self._connections.request(
                method,
                self.url + path,
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=max(timeout_s, 0.001), sock_connect=CONNECT_S),
                allow_redirects=False,
            ) as response:
                answer = await response.read()
                return response.status, protocol.PROTOCOL_HEADER in response.headers, answer
        except aiohttp.ConnectionTimeoutError as error:
            raise self._unreachable(error) from error
        except TimeoutError:
            raise
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            raise self._final(
                f"its certificate or TLS was refused ({error}); for a certificate of your own set "
                "SSL_CERT_FILE"
            ) from error
        except aiohttp.ClientConnectorDNSError as error:
            if self._was_reached:
                raise self._unreachable(error) from error
            raise self._final(f"its name cannot be resolved ({error}); check the URL") from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    def _final(self, why: str) -> EnvUnavailable:
        """Returns the error for a server that another attempt will not reach either."""
        error = EnvUnavailable(f"environment server {self.url} cannot be reached: {why}")
        error.retryable = False
        return error

    def _connect(self) -> aiohttp.ClientSession:
        """Makes the pool of connections, which belongs to the running event loop."""
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers=self._headers,
            # The server does not use them, and would have to parse them in every step.
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _unreachable(self, error: Exception) -> EnvUnavailable:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        number = getattr(cause, "errno", None)
        reason = os.strerror(number) if number else str(error) or type(error).__name__
        return EnvUnavailable(
            f"environment server {self.url} cannot be reached ({reason}); start it with "
            "`agentrl env serve ID`, or check the URL"
        )


def _env_path(env_id: str, rest: str, config: Mapping[str, JSON], **query: object) -> str:
    if config:
        query["config"] = json.dumps(config)
    return f"/v1/envs/{quote(env_id, safe='')}{rest}?{urlencode(query)}"
