"""What a client may send before and around a body, against a real server."""

import contextlib
import socket
import time

import httpx
import pytest

from agentrl.env.server import limits

HEAD = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def connect(served):
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(served.rsplit(":", 1)[1]))
        yield lambda: stack.enter_context(socket.create_connection(address, 10))


def send_until_closed(raw, piece, most=64):
    """How many pieces the server took before it closed the connection."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            raw.sendall(piece)
            time.sleep(0.001)
            sent += 1
    return sent


@pytest.mark.parametrize(
    "start",
    [HEAD + b"X-Endless: ", b"GET /", HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nTrailer: "],
    ids=["header", "path", "trailer"],
)
def test_an_endless_head_is_cut_off(connect, served, start):
    raw = connect()
    raw.sendall(start)
    assert send_until_closed(raw, b"a" * 2**18) < 32  # 256 KiB each; some fill the buffers
    assert httpx.get(f"{served}/healthz").status_code == 200


def test_many_headers_are_cut_off(connect):
    raw = connect()
    raw.sendall(HEAD)
    assert send_until_closed(raw, b"".join(b"X-%d: y\r\n" % n for n in range(5000))) < 64


def test_what_is_allowed_passes(connect, served):
    big = {"X-Big": "a" * 60_000}
    with httpx.Client() as http:
        for _ in range(3):  # the count starts anew with each request of a connection
            assert http.get(f"{served}/v1/envs", headers=big).status_code == 200
    # a body in small chunks, and two requests in one packet
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 5000 + b"{}") + b"0\r\n\r\n"
    raw = connect()
    raw.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert b"422" in raw.recv(4096).split(b"\r\n")[0]
    raw = connect()
    raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
    answer = b""
    while answer.count(b"200 OK") < 2:
        answer += raw.recv(4096)


def test_headers_that_never_end_are_given_up(serve_environments, monkeypatch):
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_S", 0.3)
    request = HEAD + b"Content-Length: 2\r\n\r\n{}"
    with serve_environments(["hello"]) as (url, _):
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        for before, slowly in ((b"", HEAD), (b"", b""), (request, HEAD)):
            with socket.create_connection(address, 5) as raw:
                if before:  # a connection that was in use falls under it too
                    raw.sendall(before)
                    assert b"422" in raw.recv(4096)
                raw.sendall(slowly)
                started = time.monotonic()
                assert b"400" in raw.recv(4096)
                assert time.monotonic() - started < 2
        with socket.create_connection(address, 5) as raw:  # an idle connection stays
            for _ in range(3):
                raw.sendall(request)
                assert b"422" in raw.recv(4096)
                time.sleep(0.35)
