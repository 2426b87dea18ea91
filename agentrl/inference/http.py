"""HTTP/1.1 for the calls of a rollout: one request per turn, thousands at a time, one thread.

General clients spend more CPU on such a call than the rest of the turn does. This one knows what an
inference server needs and no more: a body of bytes out, a body of bytes in, connections kept for
the next call. No redirects, cookies, proxies or compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

KEEPALIVE_S = 3.0
"""A connection idle for longer is not used again: below the 5 s after which vLLM closes it, so that
a request is never written into a connection that is being closed."""
MAX_ANSWER_BYTES = 512 * 2**20


class ConnectionFailed(Exception):
    """No byte of an answer came: no connection, or one that was lost while waiting."""


class AnswerCut(Exception):
    """The answer began and did not end, or is no HTTP."""


@dataclass(slots=True)
class Response:
    status: int
    body: bytes
    raw_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """As they came; most answers' are never looked at."""

    @property
    def headers(self) -> dict[str, str]:
        """By names in lower case."""
        return {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in self.raw_headers
        }


class HTTPClient:
    """Requests to one server, whose base address may have a path: `http://host:port/prefix`.

    Every request has a connection of its own while it runs; cancelling the request closes it, which
    is how a server learns that nobody waits any more. Deadlines are the caller's.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        """
        Raises:
            ValueError: not an http or https address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address like http://host:port")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        if token is not None:
            if not token.isprintable():
                raise ValueError("a bearer token cannot hold control characters")
            headers += f"Authorization: Bearer {token}\r\n"
        self._headers = headers
        self._heads: dict[tuple[str, str], bytes] = {}
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        """Send one request, its body as JSON, and read the whole answer.

        Raises:
            ConnectionFailed, AnswerCut: see their docstrings.
        """
        head = self._heads.get((method, path))
        if head is None:
            head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}".encode()
            self._heads[method, path] = head
        if body is None:
            message = head + b"\r\n"
        else:
            message = b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
                head,
                len(body),
                body,
            )
        connection = self._take_idle() or await self._connect()
        try:
            response = await connection.exchange(message)
        finally:
            # After a complete answer only; else (an error, a cancellation) it is closed.
            if connection.reusable:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()
        return response

    def close(self) -> None:
        """Close idle connections; the ones in use are closed by cancelling their requests."""
        for connection in self._idle:
            if not connection.loop.is_closed():
                connection.close()
        self._idle.clear()

    def _take_idle(self) -> _Connection | None:
        oldest = time.monotonic() - KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.loop is not asyncio.get_running_loop():
                continue  # of an event loop that ended, and the connection with it
            if connection.reusable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port, ssl=self._ssl
            )
        except OSError as error:
            raise ConnectionFailed(f"cannot connect ({error})") from error
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time. The parser calls the `on_*` methods."""

    def __init__(self) -> None:
        self.reusable = False
        self.idle_since = 0.0
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Response] | None = None
        self._began = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    async def exchange(self, message: bytes) -> Response:
        self.reusable = False
        self._began = False
        self._headers, self._chunks, self._num_bytes = [], [], 0
        if self._transport is None:
            raise ConnectionFailed("the connection was closed")
        self._answer = self.loop.create_future()
        self._transport.write(message)
        return await self._answer

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            # Not `close()`: that waits until a request that nobody reads is written.
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type

    def data_received(self, data: bytes) -> None:
        self._began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(AnswerCut(f"the answer is no HTTP ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._began:
            self._fail(AnswerCut("the connection was lost in the middle of the answer"))
        else:
            self._fail(ConnectionFailed("the connection was lost before an answer came"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._num_bytes += len(body)
        if self._num_bytes > MAX_ANSWER_BYTES:
            self._fail(AnswerCut(f"the answer is longer than {MAX_ANSWER_BYTES} bytes"))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and its like: the answer is still to come
            self._headers, self._chunks = [], []
            return
        self.reusable = self._transport is not None and self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            chunks = self._chunks
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._answer.set_result(Response(status, body, self._headers))

    def _fail(self, error: Exception) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
