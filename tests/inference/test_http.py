"""The HTTP client against servers that write bytes, right ones and wrong ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from agentrl.inference import http as http_module
from agentrl.inference.http import AnswerCut, ConnectionFailed, HTTPClient

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Seen: Yes\r\n\r\nok"
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Reads requests, and lets `answer` write; counts connections."""

    def __init__(self, answer: Handler) -> None:
        self.answer = answer
        self.connections = 0
        self.lost = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                self.requests.append(head + await reader.readexactly(length))
                await self.answer(self.requests[-1], writer)
                await writer.drain()
        self.lost += 1
        writer.close()


@contextlib.asynccontextmanager
async def serving(answer: Handler | bytes) -> AsyncIterator[tuple[Server, HTTPClient]]:
    async def write(_: bytes, writer: asyncio.StreamWriter) -> None:
        assert isinstance(answer, bytes)
        writer.write(answer)

    server = Server(write if isinstance(answer, bytes) else answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    client = HTTPClient(server.url)
    try:
        yield server, client
    finally:
        client.close()
        listener.close()


def test_a_request_and_its_answer():
    async def go():
        async with serving(OK) as (server, _):
            client = HTTPClient(server.url + "/under/", token="secret")
            response = await client.request("POST", "/path?a=b", b'{"x": 1}')
            await client.request("GET", "/")
            client.close()
            return response, server

    response, server = asyncio.run(go())
    assert (response.status, response.body, response.headers["x-seen"]) == (200, b"ok", "Yes")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /under/path?a=b HTTP/1.1"
    assert body == b'{"x": 1}'
    expected = {
        b"Host: " + server.url.removeprefix("http://").encode(),
        b"Authorization: Bearer secret",
        b"Content-Type: application/json",
        b"Content-Length: 8",
    }
    assert set(lines[1:]) == expected
    assert server.requests[1].startswith(b"GET /under/ HTTP/1.1\r\n")
    assert b"Content-Length" not in server.requests[1]


def test_connections_are_used_again_but_never_shared():
    async def slow(_: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(OK)

    async def go():
        async with serving(slow) as (server, client):
            for _ in range(3):
                await asyncio.gather(*(client.request("GET", "/") for _ in range(4)))
            return server.connections

    assert asyncio.run(go()) == 4


@pytest.mark.parametrize("closes", ["the server said so", "it was idle for too long"])
def test_connections_that_will_be_closed_are_not_used_again(closes, monkeypatch):
    said_so = closes == "the server said so"
    answer = OK.replace(b"X-Seen: Yes", b"Connection: close") if said_so else OK
    if not said_so:
        monkeypatch.setattr(http_module, "KEEPALIVE_S", 0.0)

    async def go():
        async with serving(answer) as (server, client):
            for _ in range(3):
                assert (await client.request("GET", "/")).body == b"ok"
            return server.connections

    assert asyncio.run(go()) == 3


def test_chunks_empty_bodies_and_interim_answers():
    chunked = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )

    async def go(answer: bytes):
        async with serving(answer) as (_, client):
            first = await client.request("GET", "/")
            return first, await client.request("GET", "/")

    for answer, body in ((chunked, b"abcde"), (OK.replace(b"2\r\nX", b"0\r\nX")[:-2], b"")):
        first, second = asyncio.run(go(answer))
        assert first.body == second.body == body


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ConnectionFailed),
        (b"HTTP/1.1 200 OK\r\nContent-", AnswerCut),
        (OK[:-1], AnswerCut),
        (b"SSH-2.0-OpenSSH_9.6\r\n", AnswerCut),
    ],
)
def test_a_connection_that_is_lost(answer, error):
    async def cut(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async def go():
        async with serving(cut) as (_, client), asyncio.timeout(5):
            await client.request("GET", "/")

    with pytest.raises(error):
        asyncio.run(go())


def test_nobody_listens():
    with pytest.raises(ConnectionFailed, match="cannot connect"):
        asyncio.run(HTTPClient("http://127.0.0.1:9").request("GET", "/"))
    for url in ("127.0.0.1:80", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="not an address"):
            HTTPClient(url)
    with pytest.raises(ValueError, match="control characters"):
        HTTPClient("http://host", token="a\r\nX-Other: b")


def test_cancelling_closes_the_connection_at_once():
    async def never(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")

    async def go():
        async with serving(never) as (server, client):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.request("POST", "/", b"x" * 10_000_000)
            begin = time.monotonic()
            while server.lost == 0:
                await asyncio.sleep(0.001)
            return time.monotonic() - begin, client._idle

    took, idle = asyncio.run(go())
    assert took < 0.3
    assert idle == []


def test_an_answer_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(http_module, "MAX_ANSWER_BYTES", 1000)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 4000

    async def go():
        async with serving(answer) as (_, client), asyncio.timeout(5):
            await client.request("GET", "/")

    with pytest.raises(AnswerCut, match="longer than 1000 bytes"):
        asyncio.run(go())


def test_a_client_outlives_an_event_loop():
    client = None

    async def go():
        nonlocal client
        async with serving(OK) as (server, _):
            client = HTTPClient(server.url)
            assert (await client.request("GET", "/")).body == b"ok"
            return server.url

    asyncio.run(go())

    async def again():
        assert client is not None
        with pytest.raises(ConnectionFailed):  # the server is gone; it does not hang
            async with asyncio.timeout(2):
                await client.request("GET", "/")

    asyncio.run(again())
