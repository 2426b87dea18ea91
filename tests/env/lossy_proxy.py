"""A proxy that drops, duplicates, delays and cuts a share of messages and connections.

A message is a whole HTTP request or response. With `pages` the proxy also answers with pages of its
own, as middleboxes do, whether or not the server has had the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Self
from urllib.parse import urlsplit

FAULTS = ("drop", "duplicate", "delay", "cut")
PAGES = ("200 OK", "302 Found", "403 Forbidden", "404 Not Found", "429 Too Many Requests")
PAGES += ("500 Internal Server Error", "502 Bad Gateway", "520 Unknown", "524 A Timeout Occurred")


class Cut(Exception):
    """The proxy cuts the connection, both sides of it."""


class LossyProxy:
    def __init__(self, upstream: str, *, share: float, seed: int, pages: bool) -> None:
        self.url = ""
        self.num_messages = 0
        self.num_connections = 0
        self.faults: Counter[str] = Counter()
        self._upstream = urlsplit(upstream)
        self._share = share
        self._pages = pages
        self._chance = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
            while True:
                await self._exchange(reader, writer, *server)
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

    async def _exchange(self, reader, writer, server_reader, server_writer) -> None:
        """One HTTP request and its response."""
        request = await read_http(reader)
        fault = await self._fault()
        if fault == "drop":
            return
        if fault == "page":
            if self._chance.random() < 0.5:
                await self._ask_and_forget(request)
            writer.write(self._page())
            return
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
            return
        if fault == "cut":
            writer.write(response[: len(response) // 2])
            await writer.drain()
            raise Cut
        writer.write(response)

    async def _ask_and_forget(self, request: bytes) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await self._connect()
            writer.write(request)
            await read_http(reader)
            writer.transport.abort()

    def _page(self) -> bytes:
        status = self._chance.choice(PAGES)
        body = f"<html><h1>{status}</h1></html>".encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"Retry-After: 1\r\nLocation: /login\r\n\r\n" + body

    async def _fault(self) -> str | None:
        self.num_messages += 1
        if self._chance.random() >= self._share:
            return None
        fault = self._chance.choice((*FAULTS, "page") if self._pages else FAULTS)
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
