"""What a hostile or broken client costs the others, against a server process of its own.

Every attack must be answered with a 4xx or cut off, must not grow the server's memory, and must
leave a session of somebody else playable meanwhile. How much slower that one gets is printed
(`pytest -s`), and not asserted, since it depends on what else the machine does.
"""

import contextlib
import json
import math
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

MAX_GROWTH_MB = 64


@pytest.fixture(scope="module")
def process():
    command = [sys.executable, str(Path(__file__).with_name("fuzz_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.url = process.stdout.readline().strip()
        try:
            yield process
            assert process.poll() is None, "the server died"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(process):
    return process.url


class Neighbour:
    """Somebody else, who plays an episode all the while: in a process of its own, since what this
    one does as the attacker would keep a thread waiting too."""

    def __init__(self, url):
        command = [sys.executable, str(Path(__file__).with_name("neighbour.py")), url]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self):
        """What each of its steps took since this was asked before."""
        print("how long?", file=self.process.stdin, flush=True)
        told = json.loads(self.process.stdout.readline())
        assert not told["failures"], told["failures"][0]
        return told["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait(40)
        self.process.stdout.close()


def p95(seconds):
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]


def memory_mb(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(each for each in status.splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.fixture
def others(process, request):
    """Checks what the attack in the test's body did to memory and to a neighbour."""
    neighbour = Neighbour(process.url)
    try:
        neighbour.seconds()  # the first ones, among them that of the session
        time.sleep(1.0)
        before = neighbour.seconds()
        memory = highest = memory_mb(process)
        done = threading.Event()

        def watch():
            nonlocal highest
            while not done.wait(0.05):
                highest = max(highest, memory_mb(process))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        yield
        during = neighbour.seconds()
        done.set()
        watcher.join()
        highest = max(highest, memory_mb(process))
    finally:
        neighbour.close()
    print(
        f"\n{request.node.name}: memory +{highest - memory:.1f} MB; "
        f"p95 of {len(during)} steps {p95(during) * 1e3:.1f} ms, "
        f"before {p95(before) * 1e3:.1f} ms"
    )
    assert highest - memory <= MAX_GROWTH_MB


def connect(url):
    return socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 20)


POST = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n"
UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def open_websocket(url):
    raw = connect(url)
    raw.sendall(UPGRADE)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += raw.recv(1)
    assert b" 101 " in head
    return raw


def status_of(raw):
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n" not in data:
            piece = raw.recv(4096)
            if not piece:
                break
            data += piece
    return int(data.split(b" ")[1]) if data else None


def send_until_closed(raw, piece, most):
    """How many pieces the server took."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            raw.sendall(piece)
            sent += 1
    return sent


def again_and_again(seconds=1.0):
    """Attacks that are over at once are repeated, so that others feel them for a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield


def test_a_gigabyte_announced(server, others):
    for _ in again_and_again():
        with connect(server) as raw:
            raw.sendall(POST + b"Content-Length: 1073741824\r\n\r\n")
            assert status_of(raw) == 413
        with open_websocket(server) as raw:
            raw.sendall(b"\x81\xff" + struct.pack(">Q", 2**30) + b"\0\0\0\0")
            assert raw.recv(100)[2:4] == struct.pack(">H", 1009)


def test_a_gigabyte_streamed(server, others):
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    fragment = b"\0\xff" + struct.pack(">Q", 2**20) + b"\0\0\0\0" + b" " * 2**20
    for _ in again_and_again():
        with connect(server) as raw:
            raw.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            assert send_until_closed(raw, chunk, 1024) < 32
        with open_websocket(server) as raw:
            raw.sendall(b"\x01\x81\0\0\0\0[")
            assert send_until_closed(raw, fragment, 1024) < 32


@pytest.mark.parametrize("body", [b"[" * 10**6, b'{"a":' * (4 * 10**5)], ids=["arrays", "objects"])
def test_json_a_million_deep(server, others, body):
    """Objects not quite as deep: a million of them is refused for its size."""
    assert httpx.post(f"{server}/v1/sessions", content=b'{"a":' * 10**6).status_code == 413
    step = b'{"op":"ping","id":1,"x":'
    for _ in again_and_again():
        with httpx.Client(base_url=server) as http:
            for path in ("/v1/sessions", "/v1/batch", "/v1/sessions/x/step", "/reset"):
                for text in (body, b"[" + step + body, step + body):
                    reply = http.post(path, content=text)
                    assert reply.status_code == 422, (path, reply.text)
        for text in (body, step + body, b"[" + step + body):
            with open_websocket(server) as raw:
                raw.sendall(b"\x81\xff" + struct.pack(">Q", len(text)) + b"\0\0\0\0" + text)
                assert b'"code":"invalid_request"' in raw.recv(4096)


def test_slow_clients(server, others):
    """Headers, handshakes, bodies and frames that never end, many of each."""
    starts = [
        (connect, POST + b"X-Slow: ", b"a"),
        (connect, UPGRADE[:-2] + b"X-Slow: ", b"a"),
        (connect, POST + b"Content-Length: 1000000\r\n\r\n", b" "),
        (open_websocket, b"\x81\xff" + struct.pack(">Q", 2**20) + b"\0\0\0\0", b" "),
        (open_websocket, b"\x01\x80\0\0\0\0", b"\0\x80\0\0\0\0"),  # empty fragments
    ]
    with contextlib.ExitStack() as stack:
        raws = []
        for opening, start, piece in starts * 60:
            raw = stack.enter_context(opening(server))
            raw.sendall(start)
            raws.append((raw, piece))
        for _ in range(5):
            time.sleep(0.2)
            for raw, piece in raws:
                raw.sendall(piece)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_more_sessions_than_there_is_room_for(server, others, count):
    body = {"env": "steady", "task": {"split": "train", "index": 0}}
    opened, refused = [], 0
    with open_websocket(server) as raw:
        reader = raw.makefile("rb")
        for start in range(0, count, 1000):
            frames = [{"op": "create", "id": start + n, **body} for n in range(1000)]
            text = json.dumps(frames).encode()
            raw.sendall(b"\x81\xff" + struct.pack(">Q", len(text)) + b"\0\0\0\0" + text)
        while len(opened) + refused < count:
            for reply in read_message(reader):
                if "ok" in reply:
                    opened.append(reply["ok"]["sessions"][0]["id"])
                else:
                    assert reply["error"]["code"] == "at_capacity", reply
                    assert reply["error"]["status"] == 429 and reply["error"]["retryable"]
                    refused += 1
    assert len(opened) == 63  # of 64; one is the neighbour's
    reply = httpx.post(f"{server}/v1/sessions", json=body)
    assert reply.status_code == 429 and "retry-after" in reply.headers
    for sid in opened:
        assert httpx.delete(f"{server}/v1/sessions/{sid}").status_code == 204


def read_message(reader):
    """The frames of one message of the server."""
    first, length = reader.read(2)
    if length == 126:
        (length,) = struct.unpack(">H", reader.read(2))
    elif length == 127:
        (length,) = struct.unpack(">Q", reader.read(8))
    payload = reader.read(length)
    if first & 15 != 1:
        return []
    message = json.loads(payload)
    return message if isinstance(message, list) else [message]


def test_many_idle_sockets(server, others):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1000, (soft if hard == resource.RLIM_INFINITY else min(soft, hard)) - 200)
    assert count >= 500, "raise the limit on open files (ulimit -n)"
    with contextlib.ExitStack() as stack:
        for number in range(count):
            stack.enter_context(open_websocket(server) if number % 2 else connect(server))
        assert httpx.get(f"{server}/healthz").status_code == 200


def test_idle_sockets_do_not_keep_what_they_sent(server, others):
    text = b" " * (3 * 2**19)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            raw = stack.enter_context(open_websocket(server))
            raw.sendall(b"\x81\xff" + struct.pack(">Q", len(text)) + b"\0\0\0\0" + text)
            assert b'"code":"invalid_request"' in raw.recv(4096)
