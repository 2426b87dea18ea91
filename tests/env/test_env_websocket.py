"""`/v1/ws` against a real server, with a client that is not this package's."""

import contextlib
import json
import socket
import time

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from agentrl.env.server import websocket

TASK = {"split": "train", "index": 0}


@contextlib.contextmanager
def open_socket(url, query="", **options):
    options.setdefault("subprotocols", ["agentrl.v1"])
    with connect(
        url.replace("http", "ws") + "/v1/ws" + query, compression=None, **options
    ) as socket:
        yield socket


def ask(socket, *frames):
    """Send frames one by one; the replies by id."""
    for frame in frames:
        socket.send(json.dumps(frame))
    return {reply["id"]: reply for reply in receive(socket, len(frames))}


def receive(socket, count):
    replies = []
    while len(replies) < count:
        message = json.loads(socket.recv(10))
        replies += message if isinstance(message, list) else [message]
    return replies


def create(env="workshop", id=1, **rest):
    return {"op": "create", "id": id, "env": env, "task": TASK, **rest}


def step(sid, id, at, name="add", **arguments):
    action = {"tool_calls": [{"id": "c", "name": name, "arguments": arguments}]}
    return {"op": "step", "id": id, "sid": sid, "step": at, "action": action}


def opened(socket, **rest):
    return ask(socket, create(**rest))[1]["ok"]["sessions"][0]["id"]


def test_an_episode_in_frames(served):
    with open_socket(served) as socket:
        assert socket.subprotocol == "agentrl.v1"
        sid = opened(socket, key="k", seed=3)
        assert ask(socket, create(key="k", seed=3))[1]["ok"]["sessions"][0]["id"] == sid
        first = ask(socket, step(sid, 2, 0, number=2))[2]["ok"]
        assert first["step"] == 1 and first["observation"][0]["content"] == '{"count":2}'
        assert ask(socket, step(sid, 3, 0, number=2))[3]["ok"] == first | {"replayed": True}
        assert ask(socket, step(sid, 4, 0, number=3))[4]["error"]["code"] == "step_conflict"
        rest = ask(
            socket,
            {"op": "ping", "id": 5},
            {"op": "status", "id": 6, "sid": sid},
            {"op": "renew", "id": 7, "sid": sid, "lease_s": 9},
            {"op": "info", "id": 8, "env": "workshop"},
            {"op": "snapshot", "id": 9, "sid": sid, "step": 1},
            {"op": "reset", "id": 10, "sid": sid, "step": 1},
        )
        assert rest[5]["ok"] == {} and rest[6]["ok"]["step"] == 1
        assert rest[8]["ok"]["id"] == "workshop"
        assert rest[9]["error"]["code"] == "not_supported"
        assert rest[10]["ok"]["id"] == sid and rest[10]["ok"]["step"] == 2
        assert ask(socket, {"op": "delete", "id": 11, "sid": sid})[11]["ok"] == {}
        assert ask(socket, step(sid, 12, 2))[12]["error"]["code"] == "session_expired"


def test_arrays_are_answered_with_arrays_and_slow_steps_hold_up_nobody(served):
    with open_socket(served) as socket:
        slow, *quick = [opened(socket) for _ in range(8)]
        frames = [step(slow, 100, 0, "wait", seconds=0.5)]
        frames += [step(sid, number, 0) for number, sid in enumerate(quick)]
        started = time.monotonic()
        socket.send(json.dumps(frames))
        got = []
        num_messages = 0
        while len(got) < 7:
            message = json.loads(socket.recv(5))
            assert isinstance(message, list) or len(quick) == 1
            got += message if isinstance(message, list) else [message]
            num_messages += 1
        assert time.monotonic() - started < 0.4 and num_messages <= 3
        assert sorted(each["id"] for each in got) == list(range(7))
        last = json.loads(socket.recv(5))
        assert last["id"] == 100 and last["ok"]["step"] == 1
        ask(socket, *({"op": "delete", "id": n, "sid": s} for n, s in enumerate([slow, *quick])))


def test_a_client_that_sends_single_frames_gets_single_frames(served):
    with open_socket(served) as socket:
        for number in range(200):
            socket.send(json.dumps({"op": "ping", "id": number}))
        for _ in range(200):
            assert isinstance(json.loads(socket.recv(5)), dict)


def test_a_broken_frame_spoils_only_itself(served):
    with open_socket(served) as socket:
        for text in ("", "{", "nonsense", "null", "7", '"x"', "[" * 100_000, "{}", '{"op": 1}'):
            socket.send(text)
            reply = json.loads(socket.recv(5))
            reply = reply[0] if isinstance(reply, list) else reply
            assert reply["id"] is None and reply["error"]["status"] == 422, text
        socket.send(b"\xff\xfe")  # binary messages carry JSON as well
        assert json.loads(socket.recv(5))["error"]["code"] == "invalid_request"
        socket.send(b'{"op": "ping", "id": 1}')
        assert json.loads(socket.recv(5)) == {"id": 1, "ok": {}}
        array = ['{"op":"ping","id":1}', '{"op":"fly","id":2}', "5", '{"op":"ping","id":3}']
        array.append('{"op":"ping","id":4,"extra":' + "[" * 99 + "]" * 99 + "}")
        socket.send(f"[{','.join(array)}]")
        by_id = {each["id"]: each for each in receive(socket, 5)}
        assert by_id[1]["ok"] == by_id[3]["ok"] == {}
        assert {by_id[key]["error"]["code"] for key in (2, None, 4)} == {"invalid_request"}
        socket.send(json.dumps([{"op": "ping", "id": n} for n in range(1025)]))
        reply = json.loads(socket.recv(5))
        reply = reply[0] if isinstance(reply, list) else reply
        assert reply["error"]["code"] == "too_many_frames"
        # the same id twice is the client's affair: two replies
        socket.send(json.dumps([{"op": "ping", "id": 5}] * 2))
        assert receive(socket, 2) == [{"id": 5, "ok": {}}] * 2


def test_losing_the_socket_loses_no_session(served):
    with open_socket(served) as socket:
        sid = opened(socket)
        socket.send(json.dumps(step(sid, 2, 0, "wait", seconds=0.2)))
        socket.socket.close()  # without a word
    with open_socket(served) as socket:
        again = ask(socket, step(sid, 2, 0, "wait", seconds=0.2))[2]["ok"]
        assert again["replayed"] and '"waited, count 1"' in json.dumps(again["observation"])
        ask(socket, {"op": "delete", "id": 3, "sid": sid})


def test_the_handshake_asks_for_what_http_asks_for(serve_environments, served):
    def refused(url, status, query="", **options):
        with pytest.raises(InvalidStatus) as error, open_socket(url, query, **options):
            pass
        response = error.value.response
        assert response.status_code == status
        assert response.headers["content-type"] == "application/problem+json"
        assert json.loads(response.body)["status"] == status

    refused(served, 403, origin="http://evil.example")
    refused(served, 422, subprotocols=["chat", "agentrl.v2"])
    refused(served, 422, additional_headers={"Agentrl-Protocol": "2"})
    with open_socket(served, subprotocols=None) as socket:
        assert socket.subprotocol is None and ask(socket, {"op": "ping", "id": 1})
    plain = httpx.get(f"{served}/v1/ws")
    assert plain.status_code == 426 and plain.headers["upgrade"] == "websocket"
    with serve_environments(["hello"], token="s3cret") as (url, manager):
        refused(url, 401)
        refused(url, 401, additional_headers={"Authorization": "Bearer wrong"})
        headers = {"Authorization": "Bearer s3cret"}
        with open_socket(url, additional_headers=headers) as socket:
            replies = ask(socket, create("hello", count=2))[1]["ok"]["sessions"]
        mine, other = replies
        token = {"Authorization": f"Bearer {mine['token']}"}
        refused(url, 403, additional_headers=token)
        refused(url, 403, f"?sid={other['id']}", additional_headers=token)
        agent = {"Authorization": f"Bearer {mine['agent_token']}"}
        refused(url, 403, additional_headers=agent)
        refused(url, 403, f"?sid={mine['id']}", additional_headers=agent)
        with open_socket(url, f"?sid={mine['id']}", additional_headers=token) as socket:
            replies = ask(
                socket,
                {"op": "status", "id": 1, "sid": mine["id"]},
                {"op": "status", "id": 2, "sid": other["id"]},
                {"op": "delete", "id": 3, "sid": other["id"]},
                create("hello", id=4),
                {"op": "info", "id": 5, "env": "hello"},
            )
        assert replies[1]["ok"]["step"] == 0
        for number in (2, 3, 4, 5):
            assert replies[number]["error"]["code"] == "forbidden"
        assert manager.num_live == 2


def test_a_message_has_a_largest_size(serve_environments):
    with serve_environments(["hello"], max_body_bytes=10_000) as (url, _):
        with open_socket(url) as socket:
            socket.send(json.dumps({"op": "ping", "id": 1}) + " " * 9_000)
            assert json.loads(socket.recv(5))["ok"] == {}
            with pytest.raises(ConnectionClosed) as error:
                socket.send(" " * 11_000)
                socket.recv(5)
            assert error.value.rcvd.code == 1009
        with open_socket(url) as socket:
            socket.send(["{", "", "}"])  # fragments
            assert json.loads(socket.recv(5))["error"]["code"] == "invalid_request"
            with pytest.raises(ConnectionClosed) as error:
                socket.send([""] * 2000)
                socket.recv(5)
            # with so much unread, TCP may reset the connection before the code arrives
            assert error.value.rcvd is None or error.value.rcvd.code == 1009


def test_frames_in_flight_are_bounded(serve_environments, monkeypatch):
    monkeypatch.setattr(websocket, "MAX_IN_FLIGHT", 4)
    with serve_environments(["workshop"]) as (url, _), open_socket(url) as socket:
        sids = [opened(socket) for _ in range(6)]
        for number, sid in enumerate(sids):
            socket.send(json.dumps(step(sid, number, 0, "wait", seconds=0.4)))
        socket.send(json.dumps({"op": "ping", "id": 100}))
        first = json.loads(socket.recv(5))
        assert first["id"] != 100  # not read before there was room
        rest = {json.loads(socket.recv(5))["id"] for _ in range(6)}
        assert rest | {first["id"]} == {*range(6), 100}


def raw_socket(url, start=b"", receive_buffer=None):
    """A WebSocket of which the test writes and reads the very bytes."""
    raw = socket.socket()
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(10)
    raw.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    raw.sendall(
        b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += raw.recv(1)
    assert b" 101 " in head
    raw.sendall(start)
    return raw


def until_closed(raw):
    """What arrives until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(65536):
            data += piece
    return data


PING = b"\x89\xfd\0\0\0\0" + b"p" * 125
FRAME = b"\x81\x97\0\0\0\0" + b'{"op": "swim", "id": 1}'  # the answer is longer


@pytest.mark.parametrize("flood", [PING * 500, FRAME * 500], ids=["pings", "frames"])
def test_a_client_that_does_not_read_is_not_read(served, flood):
    with raw_socket(served, receive_buffer=4096) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw.setblocking(False)
        sent, waiting = 0, 0.0
        while waiting < 0.3:
            assert sent < 2**26
            try:
                sent += raw.send(flood[sent % len(flood) :])
                waiting = 0.0
            except BlockingIOError:
                time.sleep(0.02)
                waiting += 0.02
        assert httpx.get(f"{served}/healthz").status_code == 200
        # and goes on where it stopped, once it reads
        raw.settimeout(5)
        received = 0
        while received < 2**16:
            received += len(raw.recv(65536))


def test_a_message_that_does_not_arrive_is_given_up(serve_environments, monkeypatch):
    monkeypatch.setattr(websocket, "MESSAGE_TIMEOUT_S", 0.3)
    with serve_environments(["hello"]) as (url, _):
        for start in (b"\x81\xfe\x10\x00\0\0\0\0abc", b"\x01\x81\0\0\0\0{"):
            with raw_socket(url, start) as raw:
                started = time.monotonic()
                data = until_closed(raw)
                assert time.monotonic() - started < 2
                assert data[:4] == b"\x88" + data[1:2] + (1008).to_bytes(2, "big")
        with open_socket(url) as idle:
            time.sleep(0.8)
            assert ask(idle, {"op": "ping", "id": 1})


def test_a_client_that_is_gone_is_noticed(serve_environments, monkeypatch):
    monkeypatch.setattr("agentrl.env.server.app.PING_S", 0.2)
    with serve_environments(["hello"]) as (url, _), raw_socket(url) as raw:
        data = until_closed(raw)  # it answers no ping
        assert data[0] == 0x89 and b"keepalive" in data


def test_handshakes_that_cannot_be_read_are_answered(served):
    address = ("127.0.0.1", int(served.rsplit(":", 1)[1]))
    head = (
        b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    )
    key = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    for rest, status in [
        (b"\r\n", b"400"),
        (b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n", b"400"),
        (key.replace(b"13", b"12") + b"\r\n", b"400"),
        (key + b"X-Big: " + b"a" * 20_000 + b"\r\n\r\n", b"431"),
        (key + b"".join(b"X-%d: y\r\n" % n for n in range(300)) + b"\r\n", b"431"),
        (key + b"Content-Length: 3\r\n\r\nabc", b"400"),
    ]:
        with socket.create_connection(address, 5) as raw:
            raw.sendall(head + rest)
            assert b" " + status + b" " in raw.recv(200).split(b"\r\n")[0], rest[:60]
            until_closed(raw)
    for path in (b"/v1/ws\xff", b"/v1/ws?x=\xc3\xa9", b"/v1/envs", b"/nowhere"):
        with socket.create_connection(address, 5) as raw:
            raw.sendall(head.replace(b"/v1/ws", path) + key + b"\r\n")
            assert b"HTTP/1.1 " in raw.recv(200)
    assert httpx.get(f"{served}/healthz").status_code == 200
