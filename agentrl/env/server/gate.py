"""Checks requests, and limits bodies: their size, their time, and the memory of all together.

A client that sends or reads slowly makes the server hold its body in memory. So each body has a
time limit, and all large bodies together have a limit in bytes, beyond which a request is
`at_capacity`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.env import protocol
from agentrl.env.protocol import make_error
from agentrl.env.server.access import Access
from agentrl.errors import EnvError

MAX_BODY_BYTES = 2 * 2**20
"""Default limit of a request's body."""
BODY_TIMEOUT_S = 30.0
"""Seconds in which a client must send its body, and in which it must read a large reply."""
FREE_BYTES = 2**14
"""The first bytes of each request, which do not count against the limit for all bodies."""
MAX_LARGE_BODIES = 32
"""Limit for all bodies together, as a number of bodies of the largest size."""
_CHUNK_BYTES = 2**16
_SCOPE_KEY = "agentrl.hold"


class Gate:
    """Middleware that checks access and reads the body before the application gets a request.

    FastAPI reads a body before it calls dependencies: with the access check as a dependency,
    anybody could make the server read megabytes.
    """

    def __init__(self, app: ASGIApp, access: Access, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_bytes = 0
        """Bytes that all bodies hold, without the first `FREE_BYTES` of each request."""
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        hold = scope[_SCOPE_KEY] = Hold(self)
        message = {"type": "http.request", "body": b"", "more_body": False}

        async def receive_read() -> Any:
            return message

        try:
            try:
                self._access.check(scope["path"], scope["headers"])
                if scope["method"] not in ("GET", "DELETE"):
                    message["body"] = await hold.read(scope["headers"], receive)
            except EnvError as error:
                app = problem(error)
            await app(scope, receive_read, send)
        finally:
            self.num_bytes -= hold.counted


class Hold:
    """Counts the memory that one request and its reply hold."""

    __slots__ = ("_gate", "_num_bytes", "counted")

    def __init__(self, gate: Gate) -> None:
        self.counted = 0
        """Bytes that count against the limit for all bodies."""
        self._gate = gate
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Adds to the memory that is held.

        Raises:
            EnvError: `at_capacity`: all bodies together would exceed the limit.
        """
        self._num_bytes += num_bytes
        counted = max(self._num_bytes - FREE_BYTES, 0)
        if not counted:
            return
        others = self._gate.num_bytes - self.counted
        if others and others + counted > MAX_LARGE_BODIES * self._gate.max_body_bytes:
            message = "too many large requests at a time; retry later"
            raise make_error("at_capacity", message, retry_after_s=1.0)
        self._gate.num_bytes = others + counted
        self.counted = counted

    async def read(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
        """Reads the request's body.

        Raises:
            EnvError: `payload_too_large`; `request_timeout`: it did not arrive in time, or the
                client disconnected; `at_capacity`.
        """
        limit = self._gate.max_body_bytes
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        announced = int(length[:20])  # the HTTP server has checked that this is a number
        too_large = f"the body is larger than the {limit} bytes that this server accepts"
        if announced > limit:
            raise make_error("payload_too_large", too_large)
        self.add(announced)  # before reading any of it
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise make_error("request_timeout", "the client disconnected")
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > limit:
                        raise make_error("payload_too_large", too_large)
                    if not announced:
                        self.add(len(chunk))
                    chunks.append(chunk)
                    # One more receive() to learn that a complete body has ended would cost as much.
                    if size == announced or not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise make_error("request_timeout", message) from None


class Reply(Response):
    """A response of bytes, by default JSON, with the protocol's header.

    A large body is sent in chunks and abandoned after `BODY_TIMEOUT_S`.
    """

    media_type = "application/json"

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        own = {protocol.PROTOCOL_HEADER: protocol.PROTOCOL_VERSION}
        super().__init__(body, status, own | dict(headers or {}), media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= _CHUNK_BYTES:
            await super().__call__(scope, receive, send)
            return
        scope[_SCOPE_KEY].add(len(self.body))
        start = {"type": "http.response.start", "status": self.status_code}
        body = memoryview(self.body)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                await send({**start, "headers": self.raw_headers})
                for at in range(0, len(body), _CHUNK_BYTES):
                    chunk = bytes(body[at : at + _CHUNK_BYTES])
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            return  # the server closes a connection whose reply is incomplete


def problem(error: EnvError, headers: Mapping[str, str] | None = None) -> Reply:
    """Returns the answer to a request that failed: problem details (RFC 9457)."""
    more = dict(headers or {})
    if error.retry_after_s is not None:
        more["retry-after"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        more["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        more["connection"] = "close"  # the rest of the body will not be read
    body = protocol.encode(protocol.to_problem(error))
    return Reply(body, error.status, more, protocol.PROBLEM_TYPE)
