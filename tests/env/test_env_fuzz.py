"""Fuzz of a real server process: HTTP by its own OpenAPI document, WebSockets by broken bytes.

What must never happen: a 5xx, an answer that the document does not declare, no answer at all.
"""

import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
)
TOKEN = "fuzz-token"
TIMEOUT_S = 15.0
QUIET = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}


@pytest.fixture(scope="module")
def server():
    """URL of the process, which must end as it should at the end."""
    command = [sys.executable, str(Path(__file__).with_name("fuzz_server.py")), TOKEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.poll() is None, "the server died"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def session(server):
    """A session that is there, so that calls get further than `not_found`."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {"env": "steady", "task": {"split": "train", "index": 0}, "lease_s": 3600}
    return httpx.post(f"{server}/v1/sessions", json=body, headers=headers).json()["sessions"][0]


# HTTP


def fill_in(case, session):
    """Put in what is there, which chance would not find, so that calls get further than 404."""
    there = {"session_id": session["id"], "env_id": "steady"}
    if case.method != "DELETE":
        for name in case.path_parameters.keys() & there.keys():
            case.path_parameters[name] = there[name]
    if isinstance(case.body, dict) and isinstance(case.body.get("timeout_s"), int | float):
        case.body["timeout_s"] = 10.0  # less may pass, and 504 is the right answer then
    if case.path == "/v1/envs/{env_id}/tasks" and case.query:
        case.query["split"] = "test"
    if isinstance(case.body, dict) and case.path == "/v1/sessions":
        case.body.pop("from_snapshot", None)
        case.body |= {"env": "steady", "task": {"split": "train", "index": 0}}
        case.body |= {"config": {}, "count": 1}
    elif isinstance(case.body, dict) and case.path in ("/reset", "/step"):
        case.body = {**case.body, "session": session["id"]}
        for name in ("env", "config", "split", "index", "task"):
            case.body.pop(name, None)


def attack(server, session, num_examples):
    """Call every operation of the document with good and bad data; the answers by status."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    schema = schemathesis.openapi.from_url(f"{server}/openapi.json", headers=headers)
    schema.config.update(base_url=server)
    statuses: Counter[int] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:

            @settings(max_examples=num_examples, **QUIET)
            @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
            def call(case, known):
                if known:
                    fill_in(case, session)
                token = session["agent_token"] if "/agent/" in case.path else TOKEN
                sent = {**headers, "Authorization": f"Bearer {token}"}
                response = case.call(headers=sent, timeout=TIMEOUT_S)
                statuses[response.status_code] += 1
                case.validate_response(response, checks=CHECKS)

            call()
    assert httpx.get(f"{server}/healthz").status_code == 200
    return statuses


def test_http_as_the_document_describes_it(server, session):
    statuses = attack(server, session, 3)
    assert statuses[200] > 20 and statuses[201] and statuses[422] > 20, statuses


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_http_as_the_document_describes_it_for_long(server, session):
    print(dict(attack(server, session, 40)))


# WebSocket


def open_raw(server, query=""):
    raw = socket.create_connection(("127.0.0.1", int(server.rsplit(":", 1)[1])), TIMEOUT_S)
    raw.sendall(
        b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += raw.recv(1)
    assert b" 101 " in head
    return raw


def masked(opcode, payload, fin=True, mask=b"\1\2\3\4"):
    """A WebSocket frame as a client sends it."""
    first = (0x80 if fin else 0) | opcode
    if len(payload) < 126:
        head = bytes([first, 0x80 | len(payload)])
    elif len(payload) < 2**16:
        head = bytes([first, 0x80 | 126]) + struct.pack(">H", len(payload))
    else:
        head = bytes([first, 0x80 | 127]) + struct.pack(">Q", len(payload))
    keys = mask * (len(payload) // 4 + 1)
    return head + mask + bytes(a ^ b for a, b in zip(payload, keys, strict=False))


class Reader:
    """Messages of a raw socket."""

    def __init__(self, raw):
        self.raw, self.data = raw, b""

    def _exactly(self, count):
        while len(self.data) < count:
            piece = self.raw.recv(65536)
            if not piece:
                raise EOFError
            self.data += piece
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def message(self):
        """Opcode and payload; EOFError where the server closed the connection."""
        first, length = self._exactly(2)
        assert first & 0x80 and not length & 0x80
        if length == 126:
            (length,) = struct.unpack(">H", self._exactly(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", self._exactly(8))
        return first & 15, self._exactly(length)


PROBE = 2**53 - 1


def answers_until_probe(server, data):
    """Send bytes and then a ping frame; the replies, up to the ping's or the closing.

    That either comes within the time limit is what the tests are about.
    """
    replies = []
    with open_raw(server) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(data + masked(1, b'{"op":"ping","id":%d}' % PROBE))
        reader = Reader(raw)
        try:
            while True:
                opcode, payload = reader.message()
                if opcode == 8:
                    code = int.from_bytes(payload[:2], "big")
                    assert code in (1000, 1002, 1003, 1007, 1008, 1009), code
                    return replies, code
                if opcode == 1:
                    message = json.loads(payload)
                    replies += message if isinstance(message, list) else [message]
                    if replies[-1]["id"] == PROBE:
                        return replies, None
        except (EOFError, ConnectionError):
            return replies, None


def check(replies):
    for reply in replies:
        assert ("ok" in reply) != ("error" in reply)
        if "error" in reply:
            assert reply["error"]["status"] < 500, reply


ids = st.integers(0, 3) | st.integers(-(2**70), 2**70) | st.none() | st.floats() | st.text()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
OPS = ("create", "step", "reset", "snapshot", "renew", "status", "delete", "info", "ping")
TASKS = ({"split": "train", "index": 0}, {"inline": {"id": "x", "prompt": "p"}}, {"split": "no"})
ACTIONS = ({"text": "x"}, {"tool_calls": [{"id": "c", "name": "add", "arguments": {}}]}, {})


def fields(sid):
    """Frames that are nearly right."""
    return st.fixed_dictionaries(
        {"op": st.sampled_from(OPS), "id": st.integers(0, 9)},
        optional={
            "sid": st.sampled_from((sid, "nobody")) | values,
            "step": st.integers(-1, 5) | values,
            "action": st.sampled_from(ACTIONS) | values,
            "env": st.just("steady") | values,
            "task": st.sampled_from(TASKS) | values,
            "count": st.integers(-1, 3) | values,
            "seed": values,
            "lease_s": st.floats() | st.integers(0, 9),
            "timeout_s": st.floats() | st.integers(1, 9),
            "config": st.just({}) | values,
            "key": st.text(max_size=3),
            "from_snapshot": st.text(max_size=3),
            "extra": values,
        },
    )


def fuzz_frames(server, session, num_examples):
    num = 0

    @settings(max_examples=num_examples, **QUIET)
    @given(frames=st.lists(fields(session["id"]) | values, max_size=4), one=st.booleans())
    def frames_that_are_nearly_right(frames, one):
        nonlocal num
        num += 1
        if one:
            data = b"".join(masked(1, json.dumps(frame).encode()) for frame in frames)
        else:
            data = masked(1, json.dumps(frames).encode())
        if any(isinstance(f, dict) and f.get("op") == "delete" for f in frames):
            data = data.replace(b"delete", b"delate")  # keep the session for the next
        replies, code = answers_until_probe(server, data)
        assert code is None
        check(replies)
        assert len(replies) >= 1

    frames_that_are_nearly_right()
    return num


def fuzz_bytes(server, num_examples):
    good = masked(1, b'{"op":"ping","id":1}') * 3 + masked(9, b"hi") + masked(1, b"[]")
    piece = st.one_of(
        st.binary(max_size=40),
        st.builds(masked, st.integers(0, 15), st.binary(max_size=200), st.booleans()),
        st.just(good),
        st.just(b"\x81\xff" + b"\x7f" + b"\xff" * 7 + b"\0\0\0\0"),
        st.just(b"\x81\xff" + b"\xff" * 8 + b"\0\0\0\0"),
        st.just(b"\x81\x02{}"),
        st.just(masked(8, b"\x03")),
        st.just(masked(8, struct.pack(">H", 999) + b"\xff")),
    )
    num = 0

    @settings(max_examples=num_examples, **QUIET)
    @given(pieces=st.lists(piece, max_size=5), seed=st.integers(0, 2**32))
    def broken_bytes(pieces, seed):
        nonlocal num
        num += 1
        data = bytearray(b"".join(pieces))
        generator = random.Random(seed)
        for _ in range(generator.randint(0, 2)):
            if data:
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        # A length without its bytes is no hang: the server may wait for them a while.
        with open_raw(server) as raw:
            with contextlib.suppress(ConnectionError):
                raw.sendall(bytes(data))
                raw.shutdown(socket.SHUT_WR)
            reader = Reader(raw)
            replies = []
            with contextlib.suppress(EOFError, ConnectionError):
                while True:
                    opcode, payload = reader.message()
                    if opcode == 8:
                        code = int.from_bytes(payload[:2], "big")
                        assert not payload or code != 1011, payload
                        break
                    if opcode == 1:
                        message = json.loads(payload)
                        replies += message if isinstance(message, list) else [message]
            check(replies)

    broken_bytes()
    return num


def test_frames_that_are_nearly_right(server, session):
    fuzz_frames(server, session, 80)


def test_broken_bytes(server):
    fuzz_bytes(server, 100)


BROKEN = {
    "no mask": (b"\x81\x02{}", 1002),
    "reserved bit": (b"\xc1\x80\0\0\0\0", 1002),
    "reserved opcode": (masked(3, b""), 1002),
    "continuation of nothing": (masked(0, b"x"), 1002),
    "text within a fragmented text": (masked(1, b"{", fin=False) + masked(1, b"}"), 1002),
    "fragmented ping": (masked(9, b"", fin=False), 1002),
    "long ping": (masked(9, b"p" * 126), 1002),
    "huge length": (b"\x81\xff" + b"\x7f" + b"\xff" * 7 + b"\0\0\0\0", 1009),
    "negative length": (b"\x81\xff" + b"\xff" * 8 + b"\0\0\0\0", 1009),
    "9 MiB": (b"\x81\xff" + struct.pack(">Q", 9 * 2**20) + b"\0\0\0\0", 1009),
    "9 MiB in fragments": (
        masked(1, b"x" * 2**20, fin=False) + masked(0, b"x" * 2**20, fin=False) * 8,
        1009,
    ),
    "empty fragments without end": (
        masked(1, b"", fin=False) + masked(0, b"", fin=False) * 5000 + masked(0, b""),
        1009,
    ),
    "close with half a code": (masked(8, b"\x03"), 1002),
    "close with a code of nobody": (masked(8, struct.pack(">H", 999)), 1002),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_websocket_frame_closes_with_a_code(server, name):
    data, expected = BROKEN[name]
    replies, code = answers_until_probe(server, data)
    # Where much is left unread, TCP may reset the connection before the code is read.
    assert replies == [] and (code == expected or (code is None and len(data) > 2**14))


def test_bad_utf8_spoils_only_its_own_message(server):
    data = masked(1, b"\xff\xfe") + masked(1, b"\xc3", fin=False) + masked(0, b"\x28")
    data += masked(1, b'{"op":"status","id":1,"sid":"\xff"}')
    replies, code = answers_until_probe(server, data)
    assert code is None and len(replies) == 4 and all("error" in each for each in replies[:3])
    check(replies)


def test_fragments_and_control_frames_between_them_are_put_together(server):
    data = masked(1, b'{"op":"pi', fin=False) + masked(9, b"hello") + masked(10, b"who asked")
    data += masked(0, b"", fin=False) + masked(0, b'ng","id":7}')
    replies, code = answers_until_probe(server, data)
    assert replies == [{"id": 7, "ok": {}}, {"id": PROBE, "ok": {}}] and code is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_websockets_for_long(server, session):
    started = time.monotonic()
    num_frames, num_bytes = fuzz_frames(server, session, 1500), fuzz_bytes(server, 1500)
    print(f"{num_frames} + {num_bytes} sockets in {time.monotonic() - started:.0f} s")
