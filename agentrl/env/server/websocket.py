"""`GET /v1/ws`: many sessions on one WebSocket.

    client ── frames ──> decode ──> SessionManager.handle ── a future per frame
    client <── replies ── writer <── outbox <──────────────── when it is done

A step costs no task here: the manager answers with a future, and its callback puts the reply into
the outbox. What is in the outbox when the writer comes round goes out as one message, if the client
has sent arrays itself.

Losing the socket loses no session: what was begun runs to its end, and the client asks again.

Bounds. At most `MAX_IN_FLIGHT` frames of a socket are being answered, and `MAX_OUTBOX_BYTES` wait
to be sent; beyond that the socket is not read, so that the client feels it. A message has a largest
size, a largest number of fragments and a time in which it must be complete. Pings are answered as
fast as the client reads the answers.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from agentrl.env import protocol
from agentrl.env.protocol import Frame, FrameError, make_error
from agentrl.env.server.access import Grant, check_frame
from agentrl.env.session.manager import SessionManager
from agentrl.errors import EnvError

logger = logging.getLogger("agentrl.env")

MAX_IN_FLIGHT = 4096
"""As many as this package's client leaves unanswered."""
MAX_OUTBOX_BYTES = 8 * 2**20
MAX_REPLY_BYTES = 2**20
"""Larger arrays of replies are cut in two; a single reply may be larger."""
MAX_FRAGMENTS = 1024
MESSAGE_TIMEOUT_S = 30.0
"""A message that has begun must be complete by then; within the same time again it is noticed."""


@dataclass(slots=True)
class Sockets:
    """What is counted of all sockets of a process."""

    num_open: int = 0
    num_frames: int = 0


def choose_subprotocol(offered: list[str]) -> str | None:
    """The subprotocol to accept a handshake with.

    Raises:
        EnvError: `invalid_request` if the client offered some, and ours is not among them.
    """
    if protocol.SUBPROTOCOL in offered:
        return protocol.SUBPROTOCOL
    if offered:
        message = f"offer the subprotocol {protocol.SUBPROTOCOL}, or none"
        raise make_error("invalid_request", message)
    return None


async def serve_socket(
    manager: SessionManager,
    sockets: Sockets,
    grant: Grant,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Accept the handshake and answer frames until the client goes away.

    Args:
        grant: what the frames may touch.
        scope: of a WebSocket that has passed the checks of `access`.

    Raises:
        EnvError: before the handshake was accepted.
    """
    subprotocol = choose_subprotocol(scope["subprotocols"])
    await receive()  # websocket.connect
    headers = [(protocol.PROTOCOL_HEADER.lower().encode(), protocol.PROTOCOL_VERSION.encode())]
    await send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": headers})
    sockets.num_open += 1
    socket = _Socket(manager, sockets, grant, send)
    writer = asyncio.get_running_loop().create_task(socket.write())
    try:
        await socket.read(receive)
    finally:
        sockets.num_open -= 1
        socket.closed = True
        writer.cancel()
        await asyncio.wait({writer})


class _Socket:
    def __init__(self, manager: SessionManager, sockets: Sockets, grant: Grant, send: Send) -> None:
        self.closed = False
        self._manager = manager
        self._sockets = sockets
        self._grant = grant
        self._send = send
        self._arrays = False
        """The client sends arrays, so it may get some."""
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._num_in_flight = 0
        """Frames whose reply is not sent yet."""
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()

    async def read(self, receive: Receive) -> None:
        while (message := await receive())["type"] == "websocket.receive":
            self._take(message.get("text") or message.get("bytes") or b"")
            message = None  # or an idle socket would keep it
            while self._is_full() and not self.closed:
                self._has_room.clear()
                await self._has_room.wait()

    def _take(self, text: bytes | str) -> None:
        frames = protocol.decode_frames(text)
        if not self._arrays:
            self._arrays = _is_array(text)
        self._sockets.num_frames += len(frames)
        self._num_in_flight += len(frames)
        for frame in frames:
            self._begin(frame)

    async def write(self) -> None:
        """Send what is in the outbox, as few messages as may be."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                replies, self._outbox, self._outbox_bytes = self._outbox, [], 0
                for message in _messages(replies) if self._arrays else replies:
                    await self._send({"type": "websocket.send", "text": message.decode()})
                self._num_in_flight -= len(replies)
                self._has_room.set()
        except ClientDisconnected:
            pass
        finally:
            # Nothing can be sent any more; the reader, which may wait for room, has to find out.
            self.closed = True
            self._has_room.set()

    def _is_full(self) -> bool:
        return self._num_in_flight > MAX_IN_FLIGHT or self._outbox_bytes > MAX_OUTBOX_BYTES

    def _begin(self, frame: Frame | FrameError) -> None:
        if isinstance(frame, FrameError):
            self._put(protocol.error_frame(frame.id, frame.error))
            return
        if self._grant.session is not None:
            refused = check_frame(self._grant, getattr(frame, "sid", None))
            if refused is not None:
                self._put(protocol.error_frame(frame.id, refused))
                return
        try:
            future = self._manager.handle(frame)
        except EnvError as error:
            self._put(protocol.error_frame(frame.id, error))
            return
        if future.done():
            self._answer(frame.id, future)
        else:
            future.add_done_callback(lambda done, id=frame.id: self._answer(id, done))

    def _answer(self, id: int, future: asyncio.Future[bytes]) -> None:
        self._put(reply_frame(id, future))

    def _put(self, reply: bytes) -> None:
        if self.closed:
            return
        self._outbox.append(reply)
        self._outbox_bytes += len(reply)
        self._wake.set()


def reply_frame(id: int, future: asyncio.Future[bytes]) -> bytes:
    """The reply to a frame whose future is done."""
    if future.cancelled():
        error: BaseException | None = make_error("unavailable", "the server is shutting down")
    else:
        error = future.exception()
    if error is None:
        return protocol.ok_frame(id, future.result())
    if not isinstance(error, EnvError):  # a bug here, whose trace belongs in the log
        logger.error("frame %d", id, exc_info=error)
        error = make_error("env_error", f"internal error: {type(error).__name__}")
    return protocol.error_frame(id, error)


def _is_array(message: bytes | str) -> bool:
    return message.lstrip()[:1] in (b"[", "[")


def _messages(replies: list[bytes]) -> list[bytes]:
    """Replies as arrays that are not too large; one alone stays as it is."""
    if len(replies) == 1:
        return replies
    messages: list[bytes] = []
    batch: list[bytes] = []
    size = 0
    for reply in replies:
        too_large = size + len(reply) > MAX_REPLY_BYTES or len(batch) == protocol.MAX_FRAMES
        if batch and too_large:
            messages.append(b"[" + b",".join(batch) + b"]")
            batch, size = [], 0
        batch.append(reply)
        size += len(reply)
    messages.append(b"[" + b",".join(batch) + b"]")
    return messages


_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class SocketProtocol(WebSocketsSansIOProtocol):
    """One connection, as uvicorn serves it, with bounds that uvicorn does not have."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._num_fragments = 0
        self._began: float | None = None
        """When the message that is not complete yet began, or was last waited for."""
        self._watch = self.loop.call_later(MESSAGE_TIMEOUT_S, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)
        # The connection is part of reference cycles, so what it read would stay for a while: whole
        # fragments, events that nobody took, half a frame, and an error's traceback.
        self.frames = []
        self.conn.events.clear()
        self.conn.reader.buffer.clear()
        self.conn.parser_exc = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_complete:
            # uvicorn does not look for it, and would leave the client waiting.
            self.handshake_complete = True
            self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST)
            self.transport.close()
        elif not self.conn.reader.buffer and self.conn.current_size is None:
            self._began = None
        elif self._began is None:
            self._began = self.loop.time()

    def send_receive_event_to_app(self) -> None:
        self._num_fragments = 0
        self._began = None
        super().send_receive_event_to_app()

    def handle_text(self, event: Any) -> None:
        # As bytes, of which the decoder of frames says what is wrong; uvicorn would decode them
        # once more, and log a trace and close where they are no UTF-8.
        self.handle_bytes(event)

    def handle_bytes(self, event: Any) -> None:
        super().handle_bytes(event)
        event.data = b""  # the parser holds its last frame, for as long as the socket is idle

    def handle_cont(self, event: Any) -> None:
        if self.close_sent:
            return
        self._num_fragments += 1  # empty ones never reach the bound on the size
        if self._num_fragments > MAX_FRAGMENTS:
            self._fail(1009, f"a message may have {MAX_FRAGMENTS} fragments")
            return
        super().handle_cont(event)
        event.data = b""

    # A client that sends and does not read: answers to its pings must not pile up.

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._began = None if self._began is None else self.loop.time()
            if self.writable.is_set():
                self.transport.resume_reading()
        return message

    def keepalive_timeout(self) -> None:
        if self.read_paused and self.writable.is_set():
            # It is us who do not read, and so the answer may have arrived.
            assert self.ping_timeout is not None
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
        else:
            super().keepalive_timeout()

    def _check(self) -> None:
        late = self._began is not None and self.loop.time() - self._began >= MESSAGE_TIMEOUT_S
        if late and not self.read_paused and not self.close_sent:
            self._fail(1008, "the message did not arrive in time")
        else:
            self._watch = self.loop.call_later(MESSAGE_TIMEOUT_S, self._check)

    def _fail(self, code: int, reason: str) -> None:
        self.frames = []
        self.conn.send_close(code, reason)
        self.handle_parser_exception()
