"""Bodies on their way: how large they may be, how long they may take, and what all hold together.

A client that sends or reads slowly holds memory as long as it likes to take. So each body has a
time limit, and all large ones together a limit in bytes, beyond which a request is `at_capacity`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentrl.env import protocol
from agentrl.env.protocol import make_error

MAX_BODY_BYTES = 2 * 2**20
BODY_TIMEOUT_S = 30.0
"""A request must have sent its body by then, and a client read a large reply."""
FREE_BYTES = 2**14
"""A request of this size always passes; what is beyond it counts against the limit for all."""
MAX_LARGE_BODIES = 32
"""Bodies of the largest size that may be held at a time."""
_CHUNK_BYTES = 2**16
_SCOPE_KEY = "agentrl.hold"


class Transit:
    """Counts what the bodies of all requests hold."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_bytes = 0
        """Held beyond each request's first `FREE_BYTES`."""

    def hold(self, scope: Scope) -> Hold:
        """`with transit.hold(scope) as hold:` around all of a request."""
        scope[_SCOPE_KEY] = hold = Hold(self)
        return hold


class Hold:
    """The memory that one request and its reply hold."""

    __slots__ = ("_counted", "_num_bytes", "_transit")

    def __init__(self, transit: Transit) -> None:
        self._transit = transit
        self._num_bytes = self._counted = 0

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self._transit.num_bytes -= self._counted

    def add(self, num_bytes: int) -> None:
        """
        Raises:
            EnvError: `at_capacity`.
        """
        self._num_bytes += num_bytes
        counted = max(self._num_bytes - FREE_BYTES, 0)
        if not counted:
            return
        others = self._transit.num_bytes - self._counted
        if others and others + counted > MAX_LARGE_BODIES * self._transit.max_body_bytes:
            message = "too many large requests at a time; send this one again later"
            raise make_error("at_capacity", message, retry_after_s=1.0)
        self._transit.num_bytes = others + counted
        self._counted = counted

    async def read(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
        """The request's body.

        Raises:
            EnvError: `payload_too_large`, `request_timeout`, or `at_capacity`.
        """
        limit = self._transit.max_body_bytes
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        announced = int(length[:20])  # the HTTP server has seen to it that this is a number
        too_large = f"a body may have {limit} bytes at most"
        if announced > limit:
            raise make_error("payload_too_large", too_large)
        self.add(announced)  # before any of it is read
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise make_error("request_timeout", "the client went away")
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > limit:
                        raise make_error("payload_too_large", too_large)
                    if not announced:
                        self.add(len(chunk))
                    chunks.append(chunk)
                    # To ask for the end of a body that is there costs as much as to ask for it.
                    if size == announced or not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise make_error("request_timeout", "the body did not arrive in time") from None


class Reply(Response):
    """Bytes that are JSON, or of another type. Each has the protocol's header."""

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
            return  # the server closes a connection whose reply was not finished
