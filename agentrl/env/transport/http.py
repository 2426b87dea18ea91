"""The way to an environment server where each call is one HTTP request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import msgspec

from agentrl.env import protocol
from agentrl.env.protocol import (
    CreateReply,
    CreateRequest,
    EnvInfo,
    ResetRequest,
    SessionReply,
    SnapshotReply,
    SnapshotRequest,
    StepReply,
    StepRequest,
    TaskPreview,
    make_error,
)
from agentrl.env.transport.base import CONNECT_S, MAX_PATIENCE_S, PATIENCE_S
from agentrl.errors import ConfigError, EnvUnavailable
from agentrl.types import JSON

if TYPE_CHECKING:
    import aiohttp


class Http:
    """An environment server. Connections are kept alive for less long than the server keeps them,
    so that a request does not meet a connection which is just being closed."""

    deletes_at_once = False

    def __init__(self, url: str, token: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"environment server '{url}' needs to be a URL, http://host:port")
        self.url = url.rstrip("/")
        self.patience_s = PATIENCE_S
        self._headers = {protocol.PROTOCOL_HEADER: protocol.PROTOCOL_VERSION}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connections: aiohttp.ClientSession | None = None

    async def server(self, timeout_s: float) -> protocol.ServerInfo:
        return await self._call("GET", "/v1/server", protocol.ServerInfo, None, timeout_s)

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo:
        query = {"timeout_s": repr(timeout_s)}
        if config:
            query["config"] = msgspec.json.encode(config).decode()
        path = f"/v1/envs/{quote(env_id, safe='')}?{urlencode(query)}"
        return await self._call("GET", path, EnvInfo, None, timeout_s + CONNECT_S)

    async def tasks(
        self,
        env_id: str,
        split: str,
        start: int,
        stop: int,
        config: Mapping[str, JSON],
        timeout_s: float,
    ) -> list[TaskPreview]:
        query = {"split": split, "start": str(start), "stop": str(stop)}
        if config:
            query["config"] = msgspec.json.encode(config).decode()
        path = f"/v1/envs/{quote(env_id, safe='')}/tasks?{urlencode(query)}"
        reply: protocol.TaskList = await self._call("GET", path, protocol.TaskList, None, timeout_s)
        return reply.tasks

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply:
        return await self._call(
            "POST", "/v1/sessions", CreateReply, request, timeout_s, {"Idempotency-Key": key}
        )

    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        path = f"/v1/sessions/{session_id}/step"
        return await self._call("POST", path, StepReply, request, timeout_s)

    async def reset(self, session_id: str, request: ResetRequest, timeout_s: float) -> SessionReply:
        path = f"/v1/sessions/{session_id}/reset"
        return await self._call("POST", path, SessionReply, request, timeout_s)

    async def snapshot(
        self, session_id: str, request: SnapshotRequest, timeout_s: float
    ) -> SnapshotReply:
        path = f"/v1/sessions/{session_id}/snapshot"
        return await self._call("POST", path, SnapshotReply, request, timeout_s)

    async def renew(self, session_id: str, timeout_s: float) -> None:
        path, body = f"/v1/sessions/{session_id}/renew", protocol.RenewRequest()
        await self._call("POST", path, protocol.SessionStatus, body, timeout_s)

    async def delete(self, session_id: str, timeout_s: float) -> None:
        await self._call("DELETE", f"/v1/sessions/{session_id}", None, None, timeout_s)

    async def aclose(self) -> None:
        if self._connections is not None:
            await self._connections.close()

    def connections(self) -> aiohttp.ClientSession:
        """The pool of connections, each request of which carries the token and the version."""
        import aiohttp

        if self._connections is None:
            self._connections = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                headers=self._headers,
                # Of no use to the server, which would read them with every step.
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._connections

    async def _call(
        self,
        method: str,
        path: str,
        reply: Any,
        request: msgspec.Struct | None,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Send a request until it is answered, again when the answer takes long: the request or
        its answer may be lost, and a server that still works on it lets both wait for one result.
        """
        clock = asyncio.get_running_loop().time
        deadline, patience_s = clock() + timeout_s, self.patience_s
        body = None if request is None else protocol.encode(request)
        headers = {"Content-Type": "application/json", **(headers or {})}
        while True:
            remaining = deadline - clock()
            try:
                status, ours, answer = await self._send(
                    method, path, body, headers, min(patience_s, remaining)
                )
                break
            except TimeoutError as error:
                if patience_s >= remaining:
                    raise EnvUnavailable(
                        f"environment server {self.url} did not answer within {timeout_s:.1f} s"
                    ) from error
            patience_s = min(patience_s * 2, MAX_PATIENCE_S)
        if not ours and status not in (502, 503, 504):
            raise make_error(
                "env_error",
                f"{self.url} answered {status} but is no agentrl environment server; check the URL",
            )
        try:
            if 200 <= status < 300:
                return None if reply is None else protocol.decode_reply(answer, reply)
            problem = protocol.decode_reply(answer, protocol.Problem)
        except msgspec.DecodeError as error:
            raise EnvUnavailable(
                f"environment server {self.url} sent a broken answer ({status}, {len(answer)} "
                "bytes)"
            ) from error
        raise protocol.from_problem(problem)

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout_s: float,
    ) -> tuple[int, bool, bytes]:
        """The status, whether an agentrl server answered, and the body of the answer.

        Raises:
            TimeoutError: no answer came in time.
            EnvUnavailable: the server cannot be reached, or the connection broke.
        """
        import aiohttp

        try:
            async with self.connections().request(
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
            raise unreachable(self.url, error) from error
        except TimeoutError:
            raise
        except aiohttp.ClientError as error:
            raise unreachable(self.url, error) from error


def unreachable(url: str, error: Exception) -> EnvUnavailable:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    number = getattr(cause, "errno", None)
    reason = os.strerror(number) if number else str(error) or type(error).__name__
    return EnvUnavailable(
        f"environment server {url} cannot be reached ({reason}); start it with "
        "`agentrl env serve ID`, or check the URL"
    )
