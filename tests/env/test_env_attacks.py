"""Attacks a separate server process as hostile or broken clients do, beside an honest client.

Every attack must be answered with a 4xx or cut off, must not grow the server's memory, and must
leave a session of somebody else playable meanwhile. How much slower that one gets is printed
(`pytest -s`), and not asserted, since it depends on what else the machine does.
"""

import contextlib
import json
import math
import resource
import select
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import httpx
import pytest
from env_servers import in_process_of_its_own

MAX_GROWTH_MB = 64
LARGE_BODIES_MB = 64
"""What the server grants to large bodies on their way, all together."""
TIMEOUT_S = 2.0
"""For headers and bodies; the server's own are longer."""


@pytest.fixture(scope="module")
def process():
    """The attackers hold thousands of connections, and so does the server, which inherits this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    program = str(Path(__file__).with_name("fuzz_server.py"))
    try:
        with in_process_of_its_own(program, "", str(TIMEOUT_S)) as (process, process.url):
            yield process
            assert process.poll() is None, "the server died"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
        """Returns the duration of each step since the previous call."""
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
        before = neighbour.seconds()
        memory = highest = memory_mb(process)
        done = threading.Event()

        def watch():
            nonlocal highest
            while not done.wait(0.05):
                highest = max(highest, memory_mb(process))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        allowed = types.SimpleNamespace(mb=MAX_GROWTH_MB)
        yield allowed
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
    assert highest - memory <= allowed.mb


def connect(url):
    return socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 20)


POST = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n"
STEP = b"POST /v1/sessions/x/step HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def answer_of(raw):
    """The start of the server's answer; empty if it closed the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in data and (piece := raw.recv(4096)):
            data += piece
    return data


def status_of(raw):
    data = answer_of(raw)
    return int(data.split(b" ")[1]) if data else None


def taken_of(url, start, piece, most=64):
    """Returns how many pieces the server took before it closed the connection."""
    sent = 0
    with connect(url) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(start)
        while sent < most:
            raw.sendall(piece)
            sent += 1
    return sent


def all_closed(raws, seconds=40.0):
    """Returns whether the server closes all the connections in time."""
    waiting, deadline = set(raws), time.monotonic() + seconds
    poll = select.poll()
    by_fd = {raw.fileno(): raw for raw in raws}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while waiting and time.monotonic() < deadline:
        for fd, _ in poll.poll(200):
            with contextlib.suppress(ConnectionError):
                if by_fd[fd].recv(65536):
                    continue
            poll.unregister(fd)
            waiting.discard(by_fd[fd])
    return not waiting


# Too much


def test_a_gigabyte_announced(server, others):
    with connect(server) as raw:
        raw.sendall(POST + b"Content-Length: 1073741824\r\n\r\n")
        assert status_of(raw) == 413


@pytest.mark.parametrize(
    "start",
    [
        POST + CHUNKED,
        POST + b"X-Endless: ",
        b"GET /",
        POST + CHUNKED + b"0\r\nTrailer: ",
        POST + CHUNKED + b"1;",
    ],
    ids=["body", "header", "path", "trailer", "chunk extension"],
)
def test_what_has_no_end_is_cut_off(server, others, start):
    piece = b"40000\r\n" + b" " * 2**18 + b"\r\n" if start == POST + CHUNKED else b"a" * 2**18
    assert taken_of(server, start, piece) < 48  # 256 KiB each; some fill the buffers


def test_many_headers_are_cut_off(server, others):
    headers = b"".join(b"X-%d: y\r\n" % number for number in range(25_000))
    assert taken_of(server, POST, headers) < 48


@pytest.mark.parametrize("body", [b"[" * 10**6, b'{"a":' * (4 * 10**5)], ids=["arrays", "objects"])
def test_json_a_million_deep(server, others, body):
    """Objects not quite as deep: a million of them is refused for its size."""
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server, headers=headers) as http:
        assert http.post("/v1/sessions", content=b'{"a":' * 10**6).status_code == 413
        for path in ("/v1/sessions", "/v1/sessions/x/step", "/reset"):
            for text in (body, b'{"step":0,"action":' + body):
                reply = http.post(path, content=text)
                assert reply.status_code == 422, (path, reply.text)


def test_more_sessions_than_there_is_capacity_for(server, others):
    body = {"env": "steady", "task": {"split": "train", "index": 0}}
    opened = []
    with httpx.Client(base_url=server) as http:
        for _ in range(100):
            reply = http.post("/v1/sessions", json=body)
            if reply.status_code == 201:
                opened.append(reply.json()["sessions"][0]["id"])
            else:
                assert reply.status_code == 429 and reply.json()["retryable"]
                assert "retry-after" in reply.headers
        assert len(opened) == 63  # of 64; one is the neighbour's
        for sid in opened:
            assert http.delete(f"/v1/sessions/{sid}").status_code == 204


# Too slow


@pytest.mark.slow
def test_slow_clients_are_given_up(server, others):
    """Nothing at all, headers, bodies and chunks that never end, many of each."""
    starts = [
        (b"", b""),
        (POST + b"X-Slow: ", b"a"),
        (STEP + b"Content-Length: 1000000\r\n\r\n", b" "),
        (STEP + CHUNKED, b"1\r\n \r\n"),
    ]
    with contextlib.ExitStack() as stack:
        raws = []
        for start, piece in starts * 75:
            raws.append((stack.enter_context(connect(server)), piece))
            raws[-1][0].sendall(start)
        deadline = time.monotonic() + 2 * TIMEOUT_S
        while time.monotonic() < deadline:
            for raw, piece in raws:
                with contextlib.suppress(OSError):
                    raw.sendall(piece)
            time.sleep(0.1)
        assert all_closed([raw for raw, _ in raws])


@pytest.mark.slow
def test_thousands_of_idle_connections(server, others):
    with contextlib.ExitStack() as stack:
        raws = []
        for number in range(2000):
            raws.append(stack.enter_context(connect(server)))
            if number % 2:  # idle after a request
                raws[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"200 OK" in answer_of(raws[-1])
        assert httpx.get(f"{server}/healthz").status_code == 200
        assert all_closed(raws)


@pytest.mark.slow
def test_thousands_of_large_bodies_that_never_end(server, others):
    others.mb += LARGE_BODIES_MB
    with contextlib.ExitStack() as stack:
        raws = []
        for _ in range(3000):
            raw = stack.enter_context(connect(server))
            raw.sendall(STEP + b"Content-Length: 2000000\r\n\r\n")
            raw.setblocking(False)
            raws.append(raw)
        for _ in range(30):
            for raw in raws:
                with contextlib.suppress(OSError):
                    raw.send(b" " * 2**16)
        assert httpx.get(f"{server}/healthz", timeout=60).status_code == 200
        assert all_closed(raws, 120)


# Who it says it is


@pytest.mark.parametrize(
    "head",
    [
        b"Host: localhost\r\nHost: evil.example\r\n",
        b"Host: evil.example\r\nHost: localhost\r\n",
        b"Host: evil.example\\@127.0.0.1\r\n",
        b"Host: evil.example@127.0.0.1\r\n",
        b"Host: evil.example\r\n",
        b"Host: localhost\r\nOrigin: http://localhost:1\r\n",
        b"",
    ],
)
def test_another_host_or_origin_is_refused(server, head):
    with connect(server) as raw:
        raw.sendall(b"GET /v1/envs HTTP/1.1\r\n" + head + b"\r\n")
        assert status_of(raw) == 403


@pytest.mark.parametrize(
    "request_",
    [
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 5x\r\n\r\nabcde",
        POST + b"X : y\r\n\r\n",
        POST + b"Transfer-Encoding: x\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"\0" * 100 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server, request_):
    with connect(server) as raw:
        raw.sendall(request_)
        assert status_of(raw) == 400
