"""The engine's HTTP session keeps its promises against servers that write right and wrong bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from agentrl.errors import ConfigError
from agentrl.inference import http as http_module
from agentrl.inference.http import (
    AnswerCut,
    ConnectionFailed,
    EngineSession,
    make_client,
    require_address,
)

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
async def serving(
    answer: Handler | bytes, token: str | None = None
) -> AsyncIterator[tuple[Server, EngineSession]]:
    async def write(_: bytes, writer: asyncio.StreamWriter) -> None:
        assert isinstance(answer, bytes)
        writer.write(answer)

    server = Server(write if isinstance(answer, bytes) else answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    session = EngineSession(token)
    try:
        yield server, session
    finally:
        await session.aclose()
        listener.close()


async def test_a_request_and_its_answer():
    async with serving(OK, token="secret") as (server, session):
        answer = await session.request("POST", server.url + "/under/path?a=b", b'{"x": 1}')
    assert (answer.status, answer.body, answer.headers["x-seen"]) == (200, b"ok", "Yes")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /under/path?a=b HTTP/1.1"
    assert body == b'{"x": 1}'
    for line in (b"Authorization: Bearer secret", b"Content-Type: application/json"):
        assert line in lines
    assert b"accept-encoding" not in head.lower()


async def test_connections_are_used_again_but_never_shared():
    together = asyncio.Barrier(4)

    async def all_at_once(_: bytes, writer: asyncio.StreamWriter) -> None:
        await together.wait()
        writer.write(OK)

    async with serving(all_at_once) as (server, session), asyncio.timeout(20):
        for _ in range(3):
            await asyncio.gather(*(session.request("GET", server.url) for _ in range(4)))
        assert server.connections == 4


@pytest.mark.parametrize("closes", ["the server said so", "it was idle for too long"])
async def test_connections_that_will_be_closed_are_not_used_again(closes, monkeypatch):
    said_so = closes == "the server said so"
    answer = OK.replace(b"X-Seen: Yes", b"Connection: close") if said_so else OK
    if not said_so:
        monkeypatch.setattr(http_module, "KEEPALIVE_S", 0.0)
    async with serving(answer) as (server, session):
        for _ in range(3):
            assert (await session.request("GET", server.url)).body == b"ok"
        assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ConnectionFailed),
        (b"HTTP/1.1 200 OK\r\nContent-", ConnectionFailed),
        (OK[:-1], AnswerCut),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc", AnswerCut),
        (b"SSH-2.0-OpenSSH_9.6\r\n", AnswerCut),
    ],
)
async def test_a_connection_that_is_lost_is_not_used_and_its_request_not_sent_again(answer, error):
    async def cut(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with serving(OK) as (server, session), asyncio.timeout(20):
        await session.request("POST", server.url, b"first")
        server.answer = cut
        with pytest.raises(error):
            await session.request("POST", server.url, b"second")
        bodies = [request.rpartition(b"\r\n\r\n")[2] for request in server.requests]
        assert bodies == [b"first", b"second"]


async def test_nobody_listens():
    session = EngineSession()
    with pytest.raises(ConnectionFailed, match="cannot connect"):
        await session.request("GET", "http://127.0.0.1:9/")
    await session.aclose()


def test_addresses_and_tokens_that_cannot_work_name_the_key():
    assert require_address("http://[::1]:8000/v/", "k") == "http://[::1]:8000/v"
    for url in ("127.0.0.1:80", "ftp://host", "http://", "http://host:x", "localhost:8000"):
        with pytest.raises(ConfigError, match=r"^inference\.urls: .* is not an address"):
            require_address(url, "inference.urls")
    for make in (EngineSession, lambda token: make_client(token=token)):
        with pytest.raises(ConfigError, match=r"inference\.token.*line break"):
            make("a\r\nX-Other: b")


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n", OK[:-1]])
async def test_cancelling_closes_the_connection(begun):
    asked = asyncio.Event()

    async def never(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        asked.set()

    async with serving(never) as (server, session), asyncio.timeout(20):
        call = asyncio.create_task(session.request("POST", server.url, b"x" * 10_000_000))
        await asked.wait()
        assert server.lost == 0
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while server.lost == 0:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("length", [b"Content-Length: 5000", b"X-Length: none"])
async def test_an_answer_that_is_too_long_is_refused_while_it_comes(length, monkeypatch):
    monkeypatch.setattr(http_module, "MAX_ANSWER_BYTES", 1000)
    answer = b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n" + b"x" * 4000
    async with serving(answer) as (server, session), asyncio.timeout(20):
        with pytest.raises(AnswerCut, match="longer than 1000 bytes"):
            await session.request("GET", server.url)
        while server.lost == 0:
            await asyncio.sleep(0.001)


async def test_a_redirect_is_not_followed():
    answer = b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
    async with serving(answer) as (server, session), make_client(server.url) as client:
        assert (await session.request("GET", server.url)).status == 307
        assert (await client.get("/")).status_code == 307


async def test_no_proxy_of_the_environment_is_asked(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving(OK) as (server, session), make_client(server.url) as client:
        assert (await session.request("GET", server.url)).body == b"ok"
        assert (await client.get("/")).content == b"ok"
