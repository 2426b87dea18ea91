"""A proxy that drops, duplicates, delays and cuts a share of messages and connections.

A message is a whole HTTP request or response, or a WebSocket data frame, in either direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

FAULTS = ("drop", "duplicate", "delay", "cut")


class Cut(Exception):
    """The proxy cuts the connection, both sides of it."""


class LossyProxy:
    def __init__(self, upstream: str, share: float, seed: int) -> None:
        self.url = ""
        self.num_messages = 0
        self.num_connections = 0
        self.num_websockets = 0
        self.faults: Counter[str] = Counter()
        self._upstream = urlsplit(upstream)
        self._share = share
        self._chance = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_connections += 1
        server = None
        try:
            if self._chance.random() < self._share:
                self.faults["refuse connection"] += 1
                raise Cut
            server = await self._connect()
            while not await self._exchange(reader, writer, *server):
                pass
            self.num_websockets += 1
            await self._pump_frames(reader, writer, *server)
        except (Cut, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            if server is not None:
                server[1].transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            self._upstream.hostname, self._upstream.port, limit=2**24
        )

    async def _exchange(self, reader, writer, server_reader, server_writer) -> bool:
        """One HTTP request and its response; True once the connection is a WebSocket."""
        request = await read_http(reader)
        fault = await self._fault()
        if fault == "drop":
            return False
        if fault == "duplicate":
            task = asyncio.ensure_future(self._ask_and_forget(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if fault == "cut" and self._chance.random() < 0.5:
            raise Cut
        server_writer.write(request)
        if fault == "cut":  # the server takes it, its answer is lost
            await server_writer.drain()
            await read_http(server_reader)
            raise Cut
        response = await read_http(server_reader)
        fault = await self._fault()
        if fault == "drop":
            return False
        if fault == "cut":
            writer.write(response[: len(response) // 2])
            await writer.drain()
            raise Cut
        writer.write(response)
        return response.startswith(b"HTTP/1.1 101")

    async def _ask_and_forget(self, request: bytes) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await self._connect()
            writer.write(request)
            await read_http(reader)
            writer.transport.abort()

    async def _pump_frames(self, reader, writer, server_reader, server_writer) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:  # each ends with an error, and ends the other
                tasks.create_task(self._pump(reader, server_writer))
                tasks.create_task(self._pump(server_reader, writer))
        except* (Cut, OSError, asyncio.IncompleteReadError):
            pass

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            frame, is_data = await read_frame(reader)
            fault = await self._fault() if is_data else None
            if fault == "drop":
                continue
            if fault == "cut":
                writer.write(frame[: len(frame) // 2])
                await writer.drain()
                raise Cut
            writer.write(frame * 2 if fault == "duplicate" else frame)
            await writer.drain()

    async def _fault(self) -> str | None:
        self.num_messages += 1
        if self._chance.random() >= self._share:
            return None
        fault = self._chance.choice(FAULTS)
        self.faults[fault] += 1
        if fault == "delay":
            await asyncio.sleep(self._chance.random() * 0.1)
        return fault


async def read_http(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line[15:])
    return head + await reader.readexactly(length)


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """A WebSocket frame (RFC 6455, section 5.2), and whether it is a whole data message."""
    head = await reader.readexactly(2)
    length, mask = head[1] & 0x7F, 4 if head[1] & 0x80 else 0
    extended = await reader.readexactly({126: 2, 127: 8}.get(length, 0))
    if extended:
        length = int.from_bytes(extended)
    body = await reader.readexactly(mask + length)
    return head + extended + body, head[0] & 0x8F in (0x81, 0x82)


@contextlib.asynccontextmanager
async def lossy_proxy(upstream: str, *, share: float, seed: int) -> AsyncIterator[LossyProxy]:
    proxy = LossyProxy(upstream, share, seed)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0, limit=2**24)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(proxy._tasks):
            task.cancel()
        await asyncio.gather(*proxy._tasks, return_exceptions=True)
