"""The way to an environment server where all sessions share one WebSocket per worker process.

    step() -+                                     +- worker 0
    step() -+- outbox -> one message per tick --> |
    step() -+                                     +- worker 1 ...

Calls become frames with an id, and a reply is matched to its call by that id, in whatever order
replies come. Frames of calls that are made in one tick of the event loop travel as one message.

Losing the socket loses no session: the calls that were waiting fail as `unavailable`, the client
repeats them with the same step or key after a jittered pause, and the first of them opens the
socket anew. A server, or a proxy on the way to it, that speaks no WebSocket is used over HTTP; a
warning says so, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from agentrl.env import protocol
from agentrl.env.protocol import (
    CreateReply,
    CreateRequest,
    EnvInfo,
    ResetRequest,
    ServerInfo,
    SessionReply,
    SnapshotReply,
    SnapshotRequest,
    StepReply,
    StepRequest,
    TaskPreview,
    make_error,
)
from agentrl.env.transport.base import CONNECT_S, MAX_PATIENCE_S, PATIENCE_S, ConnectionLost
from agentrl.env.transport.http import Http, unreachable
from agentrl.errors import EnvError, EnvUnavailable
from agentrl.types import JSON

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger("agentrl.env")

R = TypeVar("R", bound=msgspec.Struct)

HEARTBEAT_S = 20.0
"""A ping after so long without a message; half as long without an answer ends the connection."""
MAX_UNANSWERED = 4096
"""Calls on one socket at a time; others wait for their turn."""
MAX_MESSAGE_BYTES = 256 * 2**20
"""The largest message read: an array of replies of many sessions."""
_NO_WEBSOCKET = (101, 200, 400, 403, 404, 405, 426, 501)
"""How servers and proxies that speak no WebSocket answer its handshake; 101 where a proxy passed it
on without its headers."""


class WebSocket:
    """An environment server, over WebSockets where it speaks them and else over HTTP."""

    deletes_at_once = False

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._http = Http(url, token)
        self._way: Frames | Http | None = None
        self._choosing: asyncio.Task[Frames | Http] | None = None
        self._num_timeouts = 0

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo:
        return await self._http.info(env_id, config, timeout_s)

    async def tasks(
        self,
        env_id: str,
        split: str,
        start: int,
        stop: int,
        config: Mapping[str, JSON],
        timeout_s: float,
    ) -> list[TaskPreview]:
        return await self._http.tasks(env_id, split, start, stop, config, timeout_s)

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply:
        way = self._way or await self._choose()
        return await way.create(request, key, timeout_s)

    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        way = self._way or await self._choose()
        return await way.step(session_id, request, timeout_s)

    async def reset(self, session_id: str, request: ResetRequest, timeout_s: float) -> SessionReply:
        way = self._way or await self._choose()
        return await way.reset(session_id, request, timeout_s)

    async def snapshot(
        self, session_id: str, request: SnapshotRequest, timeout_s: float
    ) -> SnapshotReply:
        way = self._way or await self._choose()
        return await way.snapshot(session_id, request, timeout_s)

    async def renew(self, session_id: str, timeout_s: float) -> None:
        way = self._way or await self._choose()
        await way.renew(session_id, timeout_s)

    async def delete(self, session_id: str, timeout_s: float) -> None:
        way = self._way or await self._choose()
        await way.delete(session_id, timeout_s)

    async def aclose(self) -> None:
        if self._choosing is not None:
            self._choosing.cancel()
        if self._way is not None and self._way is not self._http:
            await self._way.aclose()
        await self._http.aclose()

    async def _choose(self) -> Frames | Http:
        """Find out what the server speaks; callers of the same moment share one attempt."""
        if self._choosing is None:
            self._choosing = asyncio.get_running_loop().create_task(self._try())
            self._choosing.add_done_callback(self._chosen)
        return await asyncio.shield(self._choosing)

    def _chosen(self, choosing: asyncio.Task[Frames | Http]) -> None:
        self._choosing = None
        if not choosing.cancelled() and choosing.exception() is None:
            self._way = choosing.result()

    async def _try(self) -> Frames | Http:
        try:
            info = await self._http.server(CONNECT_S)
        except EnvError as error:
            if error.code != "not_found":
                raise
            return self._fall_back("it has no /v1/server")
        frames = Frames(self._http, info)
        try:
            await frames.sockets[0].open()
        except NoWebSocket as error:
            await frames.aclose()
            return self._fall_back(str(error))
        except HandshakeTimeout:
            # It answered over HTTP a moment ago. Once may be bad luck.
            await frames.aclose()
            self._num_timeouts += 1
            if self._num_timeouts < 3:
                raise
            return self._fall_back("the handshake is not answered")
        return frames

    def _fall_back(self, reason: str) -> Http:
        logger.warning("%s speaks no WebSocket (%s); using HTTP, which is slower", self.url, reason)
        return self._http


class NoWebSocket(EnvError):
    """The handshake was answered, but not by opening a WebSocket."""


class HandshakeTimeout(EnvUnavailable):
    pass


class Frames:
    """Calls as frames: which socket each one takes, and what its fields are."""

    def __init__(self, http: Http, info: ServerInfo) -> None:
        self.sockets = [Socket(http, info, worker) for worker in range(max(info.workers, 1))]

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply:
        if request.from_snapshot is None:
            # A repeated call meets the worker that may have opened the sessions already.
            socket = self.sockets[zlib.crc32(key.encode()) % len(self.sockets)]
        else:
            socket = self._socket_of(request.from_snapshot)
        head = b'"op":"create","key":' + json.dumps(key).encode()
        return await socket.call(head, protocol.encode(request), timeout_s, CreateReply)

    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        head = b'"op":"step","sid":' + _quote(session_id)
        socket = self._socket_of(session_id)
        return await socket.call(head, protocol.encode(request), timeout_s, StepReply)

    async def reset(self, session_id: str, request: ResetRequest, timeout_s: float) -> SessionReply:
        head = b'"op":"reset","sid":' + _quote(session_id)
        socket = self._socket_of(session_id)
        return await socket.call(head, protocol.encode(request), timeout_s, SessionReply)

    async def snapshot(
        self, session_id: str, request: SnapshotRequest, timeout_s: float
    ) -> SnapshotReply:
        head = b'"op":"snapshot","sid":' + _quote(session_id)
        socket = self._socket_of(session_id)
        return await socket.call(head, protocol.encode(request), timeout_s, SnapshotReply)

    async def renew(self, session_id: str, timeout_s: float) -> None:
        head = b'"op":"renew","sid":' + _quote(session_id)
        await self._socket_of(session_id).call(head, b"{}", timeout_s, None)

    async def delete(self, session_id: str, timeout_s: float) -> None:
        head = b'"op":"delete","sid":' + _quote(session_id)
        await self._socket_of(session_id).call(head, b"{}", timeout_s, None)

    async def aclose(self) -> None:
        await asyncio.gather(*(socket.aclose() for socket in self.sockets))

    def _socket_of(self, held_id: str) -> Socket:
        """Ids of sessions and snapshots begin with the number of the worker that holds them."""
        if len(self.sockets) == 1:
            return self.sockets[0]
        worker = held_id.partition("-")[0]
        if not worker.isdecimal() or int(worker) >= len(self.sockets):
            raise make_error("not_found", "there is no such session")
        return self.sockets[int(worker)]


def _quote(session_id: str) -> bytes:
    return b'"%s"' % session_id.encode() if session_id.isascii() else _json(session_id)


_json = msgspec.json.encode


class _Reply(msgspec.Struct):
    id: int | None = None
    ok: msgspec.Raw = msgspec.Raw(b"null")
    error: protocol.Problem | None = None


_replies = msgspec.json.Decoder(_Reply | list[_Reply])


class _Call:
    """A frame that waits for its reply."""

    __slots__ = ("deadline", "frame", "patience_s", "reply", "timer")

    def __init__(
        self, frame: bytes, deadline: float, patience_s: float, reply: asyncio.Future[msgspec.Raw]
    ) -> None:
        self.frame = frame
        self.deadline = deadline
        self.patience_s = patience_s
        self.reply = reply
        self.timer: asyncio.TimerHandle | None = None


class Socket:
    """The WebSocket to one worker, opened when a call needs it."""

    def __init__(self, http: Http, info: ServerInfo, worker: int) -> None:
        self.patience_s = PATIENCE_S
        self._http = http
        self._worker = worker
        self._max_frames = max(info.max_frames, 1)
        self._max_bytes = info.max_body_bytes
        self._connection: aiohttp.ClientWebSocketResponse | None = None
        self._opening: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: dict[int, _Call] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Calls beyond `MAX_UNANSWERED`."""
        self._outbox: list[bytes] = []
        self._wake = asyncio.Event()
        self._next_id = 0
        self._heard = False
        """Whether a message came on this connection."""
        self._pinged: int | None = None
        """Id of a ping sent since the last message from the server."""

    async def call(self, head: bytes, fields: bytes, timeout_s: float, kind: type[R] | None) -> R:
        """Send one frame and wait for its reply.

        Args:
            head: the members `op` and `sid` or `key`, as JSON without braces.
            fields: the other members, as a JSON object.
            kind: what the reply is read as; None returns None.

        Raises:
            EnvUnavailable: no answer came, or the socket was lost and the answer with it.
            EnvError: the server's problem.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._connection is None or len(self._calls) >= MAX_UNANSWERED:
            try:
                async with asyncio.timeout_at(deadline):
                    await (self.open() if self._connection is None else self._room())
            except TimeoutError:
                raise self._late(timeout_s) from None
            except NoWebSocket as error:  # it spoke one before
                raise unreachable(self._http.url, error) from error
        number = self._next_id
        self._next_id += 1
        tail = b"," + fields[1:] if len(fields) > 2 else b"}"
        frame = b'{"id":%d,%b%b' % (number, head, tail)
        if len(frame) > self._max_bytes:
            raise make_error(
                "payload_too_large", f"a frame may have {self._max_bytes} bytes at most"
            )
        call = _Call(frame, deadline, self.patience_s, loop.create_future())
        self._calls[number] = call
        call.timer = loop.call_at(
            min(deadline, loop.time() + call.patience_s), self._overdue, call, timeout_s
        )
        self._send(frame)
        try:
            raw = await call.reply
        finally:
            call.timer.cancel()
            del self._calls[number]
            while self._waiting:
                waiter = self._waiting.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    break
        if kind is None:
            return None  # type: ignore[return-value]
        try:
            return protocol.decode_reply(raw, kind)
        except msgspec.DecodeError as error:
            raise EnvUnavailable(
                f"environment server {self._http.url} sent a broken reply ({len(raw)} bytes)"
            ) from error

    async def open(self) -> None:
        """Open the socket unless it is open; callers of the same moment share one attempt.

        Raises:
            NoWebSocket: something answers there that speaks none.
            EnvUnavailable: it cannot be reached now.
        """
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # for callers that went away; those that wait have it raised

    async def aclose(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._connection.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _open(self) -> None:
        import aiohttp

        if self._connection is not None:
            return
        scheme, _, rest = self._http.url.partition("://")
        url = f"{'wss' if scheme == 'https' else 'ws'}://{rest}/v1/ws?worker={self._worker}"
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._http.connections().ws_connect(
                    url,
                    protocols=(protocol.SUBPROTOCOL,),
                    heartbeat=HEARTBEAT_S,
                    max_msg_size=MAX_MESSAGE_BYTES,
                )
        except TimeoutError as error:
            raise HandshakeTimeout(
                f"environment server {self._http.url} did not answer the WebSocket handshake"
            ) from error
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                raise make_error("unauthorized", f"{self._http.url}: {error.message}") from error
            if error.status in _NO_WEBSOCKET:
                raise NoWebSocket(f"status {error.status}", code="no_websocket") from error
            raise unreachable(self._http.url, error) from error
        except aiohttp.ClientError as error:
            raise unreachable(self._http.url, error) from error
        if connection.protocol != protocol.SUBPROTOCOL:
            await connection.close()
            raise NoWebSocket(f"no subprotocol {protocol.SUBPROTOCOL}", code="no_websocket")
        self._connection = connection
        self._heard = False
        self._pinged = None
        self._outbox.clear()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._read(connection)),
            loop.create_task(self._write(connection)),
        ]

    async def _room(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _send(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._wake.set()

    async def _write(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        """Send what a tick of the event loop left in the outbox, as few messages as may be."""
        import aiohttp

        while True:
            await self._wake.wait()
            if self._connection is not connection:
                return
            self._wake.clear()
            frames, self._outbox = self._outbox, []
            for message in _messages(frames, self._max_frames, self._max_bytes):
                try:
                    await connection.send_frame(message, aiohttp.WSMsgType.TEXT)
                except (aiohttp.ClientError, ConnectionError):
                    await connection.close()  # which the reader notices
                    return

    async def _read(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        import aiohttp

        try:
            async for message in connection:
                if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    break
                try:
                    replies = _replies.decode(message.data)
                except msgspec.DecodeError as error:
                    logger.warning("%s sent a broken message: %s", self._http.url, error)
                    break
                self._heard = True
                self._pinged = None
                for reply in replies if isinstance(replies, list) else (replies,):
                    self._receive(reply)
        finally:
            self._lose(connection)
            await connection.close()

    def _lose(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        if self._connection is not connection:
            return
        self._connection = None
        self._wake.set()  # ends the writer
        kind = ConnectionLost if self._heard else EnvUnavailable
        for call in self._calls.values():
            if not call.reply.done():
                call.reply.set_exception(kind(f"the connection to {self._http.url} was lost"))
        # Its tasks end with it, and close it, however long that may take.
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _receive(self, reply: _Reply) -> None:
        if reply.id is None:
            if reply.error is not None:
                logger.warning("%s: %s", self._http.url, reply.error.detail)
            return
        call = self._calls.get(reply.id)
        # Not there: the caller went away, or this is the reply to a frame that was sent again.
        if call is None or call.reply.done():
            return
        if reply.error is not None:
            call.reply.set_exception(protocol.from_problem(reply.error))
        else:
            call.reply.set_result(reply.ok)

    def _overdue(self, call: _Call, timeout_s: float) -> None:
        if call.reply.done():
            return
        now = asyncio.get_running_loop().time()
        if now >= call.deadline:
            call.reply.set_exception(self._late(timeout_s))
            return
        self._send(call.frame)
        self._ping()
        call.patience_s = min(call.patience_s * 2, MAX_PATIENCE_S)
        call.timer = asyncio.get_running_loop().call_at(
            min(call.deadline, now + call.patience_s), self._overdue, call, timeout_s
        )

    def _ping(self) -> None:
        """Have a server that is merely slow say so; one that does not is left for a new
        connection, since this one may lead nowhere any more."""
        connection = self._connection
        if self._pinged is not None or connection is None:
            return
        self._pinged = number = self._next_id
        self._next_id += 1
        self._send(b'{"op":"ping","id":%d}' % number)

        def give_up() -> None:
            if self._pinged == number:
                self._lose(connection)

        asyncio.get_running_loop().call_later(CONNECT_S, give_up)

    def _late(self, timeout_s: float) -> EnvUnavailable:
        return EnvUnavailable(
            f"environment server {self._http.url} did not answer within {timeout_s:.1f} s"
        )


def _messages(frames: Sequence[bytes], max_frames: int, max_bytes: int) -> list[bytes]:
    """Frames as messages: one frame, or an array of them within the server's limits."""
    if len(frames) == 1:
        return [frames[0]]
    messages: list[bytes] = []
    batch: list[bytes] = []
    size = 2
    for frame in frames:
        if batch and (len(batch) == max_frames or size + len(frame) + 1 > max_bytes):
            messages.append(b"[" + b",".join(batch) + b"]")
            batch, size = [], 2
        batch.append(frame)
        size += len(frame) + 1
    if batch:
        messages.append(b"[" + b",".join(batch) + b"]")
    return messages
