"""Stands in front of the application: checks access, reads bodies, answers errors.

Each body has a limit in bytes and in seconds, and a limited number of large ones is read at a time,
because a client that sends slowly makes the server hold its body in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.env import protocol
from agentrl.env.protocol import make_error
from agentrl.env.server.access import Access, headers_of
from agentrl.errors import EnvError

MAX_BODY_BYTES = 2 * 2**20
"""Default limit of a request's body."""
BODY_TIMEOUT_S = 30.0
"""Seconds in which a client must send its body."""
LARGE_BYTES = 2**16
"""Size above which a body is large, or if its size is not announced."""
MAX_LARGE_BODIES = 32
"""Large bodies that are read at a time; further ones wait."""


class Gate:
    """Checks access and reads the body before the application gets a request.

    FastAPI reads a body before it calls dependencies: with the access check as a dependency,
    anybody could make the server read megabytes.
    """

    def __init__(self, app: ASGIApp, access: Access, max_body_bytes: int) -> None:
        self._app = app
        self._access = access
        self._max_body_bytes = max_body_bytes
        self._large = asyncio.Semaphore(MAX_LARGE_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        message = {"type": "http.request", "body": b"", "more_body": False}

        async def receive_read() -> Any:
            return message

        try:
            self._access.check(scope["path"], headers)
            if scope["method"] not in ("GET", "DELETE"):
                length = headers.get("content-length")
                # The HTTP server has checked that this is a number.
                message["body"] = await self._read(int(length[0][:20]) if length else None, receive)
            await self._app(scope, receive_read, send)
        except Exception as error:
            await _answer_to(scope, error)(scope, receive, send)
            if not isinstance(error, EnvError | HTTPException | RequestValidationError):
                raise  # a bug in the server: the HTTP server logs its traceback

    async def _read(self, announced: int | None, receive: Receive) -> bytes:
        """Reads the request's body."""
        limit = self._max_body_bytes
        too_large = f"the body is larger than the {limit} bytes that this server accepts"
        if announced is not None and announced > limit:
            raise make_error("payload_too_large", too_large)
        is_large = announced is None or announced > LARGE_BYTES
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S), self._large if is_large else nullcontext():
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise make_error("request_timeout", "the client disconnected")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise make_error("payload_too_large", too_large)
                    # One more receive() to learn that a complete body has ended would cost as much.
                    if len(body) == announced or not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise make_error("request_timeout", message) from None


class Reply(Response):
    """A response of bytes, by default JSON, with the protocol's header."""

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


def _answer_to(scope: Scope, error: Exception) -> Reply:
    if isinstance(error, EnvError):
        return problem(error)
    if isinstance(error, RequestValidationError):
        return problem(make_error("invalid_request", protocol.describe_problems(error.errors())))
    if isinstance(error, HTTPException) and error.status_code == 404:
        path = scope["path"][:200]
        return problem(make_error("not_found", f"there is no call {path}; /docs lists them"))
    if isinstance(error, HTTPException) and error.status_code == 405:
        routes = [each for each in scope["app"].routes if each.matches(scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for each in routes for method in each.methods}))
        return problem(make_error("method_not_allowed", f"send {allowed}"), {"allow": allowed})
    return problem(make_error("env_error", f"internal error: {type(error).__name__}"))


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
