"""Limits on what a client sends besides bodies, which uvicorn's fast parser reads without any.

Without them one endless header fills the memory, and its pieces are joined in a time that grows
with the square of their number, during which nobody else is served; and headers that never end
hold their connection for ever.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16
"""Bytes of a request that are not body: request line, headers, framing of chunks, trailers. One
read of the socket more may be parsed before it is noticed."""
HEAD_TIMEOUT_S = 30.0
"""A request's headers must be complete by then; within the same time again it is noticed."""
_SOCKET_PATH = b"/v1/ws"


class LimitedProtocol(HttpToolsProtocol):
    """One connection. What breaks a limit is answered 400, or cut off if the body had begun."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_other_bytes = 0
        self._head_began: float | None = self.loop.time()
        """None while no headers are being read."""
        # One timer per connection and not one per request, which would cost each step.
        self._watch = self.loop.call_later(HEAD_TIMEOUT_S, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        # Elsewhere the wish for a WebSocket is ignored, as HTTP allows, and the request answered.
        is_socket = self.url.partition(b"?")[0] == _SOCKET_PATH and self.url.isascii()
        return is_socket and self.scope["method"] == "GET" and super()._should_upgrade()

    def handle_websocket_upgrade(self) -> None:
        self._watch.cancel()  # another protocol takes the connection over
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        if self._num_other_bytes > MAX_HEAD_BYTES:
            self._refuse("The request's headers are too large.")
            return
        self._num_other_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_began = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_began = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_other_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_other_bytes = 0
        super().on_message_complete()

    def _check(self) -> None:
        began = self._head_began
        if began is not None and self.loop.time() - began >= HEAD_TIMEOUT_S:
            self._refuse("The request's headers did not arrive in time.")
        else:
            self._watch = self.loop.call_later(HEAD_TIMEOUT_S, self._check)

    def _refuse(self, reason: str) -> None:
        if self.transport.is_closing():
            return
        if self._head_began is not None:
            self.send_400_response(reason)
        else:
            self.transport.abort()
