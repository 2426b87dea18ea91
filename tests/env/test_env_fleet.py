"""Several worker processes behind one port, for real."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import connect

from agentrl.env.server.forwarding import merge_health, merge_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several workers need Linux")

ENVIRONMENT = f"{Path(__file__).parent / 'fleet_envs.py'}:Pid"
SERVE = """
import json, sys
from agentrl.env.server.fleet import serve_fleet
serve_fleet(ready=lambda url: print(url, flush=True), **json.loads(sys.argv[1]))
"""


class Fleet:
    """A server process, and calls to it."""

    def __init__(self, **options):
        options = {"environments": [ENVIRONMENT], "port": 0, "drain_s": 0.5} | options
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(options)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.address = urlsplit(self.url).hostname, urlsplit(self.url).port

    def connect(self):
        return http.client.HTTPConnection(*self.address, timeout=10)

    def call(self, method, path, body=None, *, connection=None, headers=None):
        """Status and decoded body; on a connection of its own unless one is given."""
        if connection is None:
            with contextlib.closing(self.connect()) as own:
                return self.call(method, path, body, connection=own, headers=headers)
        raw = None if body is None else json.dumps(body)
        connection.request(method, path, raw, headers or {})
        response = connection.getresponse()
        text = response.read().decode()
        is_json = "json" in response.headers.get("Content-Type", "")
        return response.status, json.loads(text) if is_json else text

    def open(self, index=0, **options):
        status, reply = self.call("POST", "/v1/sessions", create(index), **options)
        assert status == 201, reply
        return reply["sessions"][0]["id"]

    def pid(self, session, step, **options):
        status, reply = self.call("POST", f"/v1/sessions/{session}/step", take(step), **options)
        assert status == 200, reply
        return json.loads(reply["observation"][0]["content"])

    def workers(self):
        return children(self.process.pid)

    def stop(self, number=signal.SIGTERM, timeout=15):
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()
            self.process.stdout.close()


def create(index=0):
    return {"env": "pid", "task": {"split": "train", "index": index}}


def take(step, tool="pid", **arguments):
    call = {"id": "c", "name": tool, "arguments": arguments}
    return {"step": step, "action": {"tool_calls": [call]}}


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not (outcome := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return outcome


@pytest.fixture(scope="module")
def fleet():
    started = Fleet(num_workers=4)
    yield started
    assert started.stop() == 0


@pytest.fixture
def small_fleet():
    started = Fleet(num_workers=2)
    yield started
    started.stop(signal.SIGINT)


def test_sessions_stay_with_their_worker_over_new_connections(fleet):
    sessions = [fleet.open(index) for index in range(8)]
    assert {session.partition("-")[0] for session in sessions} == {"0", "1", "2", "3"}
    pids = {session: fleet.pid(session, 0)["pid"] for session in sessions}
    assert set(pids.values()) == set(fleet.workers())
    for session in sessions:
        assert fleet.pid(session, 1) == {"pid": pids[session], "count": 2}


def test_one_connection_reaches_the_sessions_of_all_workers(fleet):
    sessions = [fleet.open(index) for index in range(8)]
    with contextlib.closing(fleet.connect()) as connection:
        for step in range(3):
            for session in sessions:
                assert fleet.pid(session, step, connection=connection)["count"] == step + 1
        for session in sessions:
            status, _ = fleet.call("DELETE", f"/v1/sessions/{session}", connection=connection)
            assert status == 204
            status, problem = fleet.call("GET", f"/v1/sessions/{session}", connection=connection)
            assert (status, problem["code"]) == (410, "session_expired")


def test_many_clients_at_once(fleet):
    def play(index):
        with contextlib.closing(fleet.connect()) as connection:
            session = fleet.open(index, connection=connection)
            found = [fleet.pid(session, step, connection=connection) for step in range(10)]
        assert [each["count"] for each in found] == list(range(1, 11))
        assert len({each["pid"] for each in found}) == 1
        fleet.call("DELETE", f"/v1/sessions/{session}")
        return found[0]["pid"]

    with ThreadPoolExecutor(16) as pool:
        pids = list(pool.map(play, range(48)))
    assert set(pids) == set(fleet.workers())


def test_a_repeated_creation_meets_the_first_wherever_it_arrives(fleet):
    for key in ("a", "b", "c", "d", "e"):
        ids = {fleet.open(3, headers={"Idempotency-Key": key}) for _ in range(6)}
        assert len(ids) == 1


def test_unknown_sessions_and_wrong_requests_are_answered(fleet):
    for session in ("nonsense", "9-0-x", "99999999999999999999-0-x", "0-0-x", "2-7-x", "-1-0-x"):
        status, problem = fleet.call("GET", f"/v1/sessions/{session}")
        assert (status, problem["code"]) == (404, "not_found"), session
    status, problem = fleet.call("POST", "/v1/sessions", {"env": "nothing"})
    assert status == 422
    status, _ = fleet.call("GET", "/nowhere")
    assert status == 404


def test_health_speaks_for_all_workers(fleet):
    before = fleet.call("GET", "/healthz")[1]["sessions"]
    sessions = [fleet.open(index) for index in range(4)]
    status, health = fleet.call("GET", "/healthz")
    assert (status, health["status"], health["sessions"]) == (200, "ok", before + 4)
    for session in sessions:
        fleet.call("DELETE", f"/v1/sessions/{session}")


def test_metrics_name_the_worker(fleet):
    status, text = fleet.call("GET", "/metrics")
    assert status == 200
    for worker in range(4):
        assert f'worker="{worker}"' in text
    names = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert names and len(names) == len(set(names))
    assert fleet.call("GET", "/readyz")[0] == 200
    assert fleet.call("GET", "/v1/server")[1]["workers"] == 4


def test_a_batch_reaches_all_workers(fleet):
    sessions = [fleet.open(index) for index in range(8)]
    frames = [
        {"op": "step", "id": number, "sid": session, **take(0)}
        for number, session in enumerate(sessions)
    ]
    frames.insert(3, {"op": "nonsense", "id": 99})
    status, replies = fleet.call("POST", "/v1/batch", frames)
    assert status == 200
    assert [reply["id"] for reply in replies] == [0, 1, 2, 99, 3, 4, 5, 6, 7]
    assert replies.pop(3)["error"]["code"] == "invalid_request"
    assert all(reply["ok"]["step"] == 1 for reply in replies)


def test_a_websocket_takes_frames_for_all_workers(fleet):
    sessions = [fleet.open(index) for index in range(8)]
    host, port = fleet.address
    with connect(f"ws://{host}:{port}/v1/ws?worker=2", subprotocols=["agentrl.v1"]) as line:
        for step in range(3):
            frames = [
                {"op": "step", "id": number, "sid": session, **take(step)}
                for number, session in enumerate(sessions)
            ]
            line.send(json.dumps(frames[:4]))
            for frame in frames[4:]:
                line.send(json.dumps(frame))
            replies = {}
            while len(replies) < 8:
                message = json.loads(line.recv(10))
                for reply in message if isinstance(message, list) else [message]:
                    replies[reply["id"]] = reply["ok"]["step"]
            assert replies == dict.fromkeys(range(8), step + 1)


def test_websockets_reach_the_worker_they_name(fleet):
    host, port = fleet.address
    for worker in range(4):
        url = f"ws://{host}:{port}/v1/ws?x=1&worker={worker}"
        with connect(url, subprotocols=["agentrl.v1"]) as line:
            line.send(json.dumps({"op": "create", "id": 1, **create()}))
            assert json.loads(line.recv(10))["ok"]["sessions"][0]["id"].startswith(f"{worker}-")


def test_websockets_reach_the_worker_they_name_over_used_connections_too(fleet):
    import base64

    for worker in (0, 1, 2, 3):
        with contextlib.closing(fleet.connect()) as connection:
            assert fleet.call("GET", "/v1/server", connection=connection)[0] == 200
            head = (
                f"GET /v1/ws?worker={worker} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
                "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n"
            )
            connection.sock.sendall(head.encode())
            connection.sock.settimeout(5)
            answer = connection.sock.recv(1000)
            assert answer.startswith(b"HTTP/1.1 101")
            body = json.dumps({"op": "create", "id": 1, **create()}).encode()
            assert len(body) < 126
            connection.sock.sendall(bytes([0x81, 0x80 | len(body), 0, 0, 0, 0]) + body)
            answer = connection.sock.recv(4000)
            assert f'"id":"{worker}-0-'.encode() in answer


def test_the_agents_plane_finds_its_session(fleet):
    for index in range(6):
        _, reply = fleet.call("POST", "/v1/sessions", create(index))
        headers = {"Authorization": f"Bearer {reply['sessions'][0]['agent_token']}"}
        status, tools = fleet.call("GET", "/v1/agent/tools", headers=headers)
        assert (status, tools["step"]) == (200, 0)
        body = {"name": "pid", "arguments": {}}
        status, answer = fleet.call("POST", "/v1/agent/call", body, headers=headers)
        assert status == 200 and json.loads(answer["content"])["count"] == 1


def test_a_session_token_opens_its_session_from_every_worker():
    fleet = Fleet(num_workers=2, token="of the server")
    try:
        server = {"Authorization": "Bearer of the server"}
        _, reply = fleet.call("POST", "/v1/sessions", create(), headers=server)
        session, token = reply["sessions"][0]["id"], reply["sessions"][0]["token"]
        headers = {"Authorization": f"Bearer {token}"}
        for step in range(4):  # new connections go to the workers in turn
            frame = {"op": "step", "id": 1, "sid": session, **take(step)}
            status, replies = fleet.call(
                "POST", f"/v1/batch?sid={session}", [frame], headers=headers
            )
            assert status == 200 and replies[0]["ok"]["step"] == step + 1
        _, other = fleet.call("POST", "/v1/sessions", create(), headers=server)
        frame = {"op": "status", "id": 1, "sid": other["sessions"][0]["id"]}
        for _ in range(2):
            status, replies = fleet.call(
                "POST", f"/v1/batch?sid={session}", [frame], headers=headers
            )
            assert status == 200 and replies[0]["error"]["code"] == "forbidden"
        for path in ("/v1/sessions", "/v1/batch", "/reset"):  # refused before its body arrives
            address = fleet.address
            with socket.create_connection(address, 5) as raw:
                raw.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\n" % path.encode())
                raw.sendall(b"Content-Length: 100\r\n\r\n")
                assert b" 401 " in raw.recv(100)
    finally:
        fleet.stop(signal.SIGINT)


def test_gym_aliases_find_their_session(fleet):
    for index in range(6):
        _, reply = fleet.call("POST", "/reset", {"env": "pid", "split": "train", "index": index})
        status, step = fleet.call("POST", "/step", {"session": reply["session"], "action": "hi"})
        assert status == 200 and step["step"] == 1


def test_slow_first_lines_block_nobody(fleet):
    with contextlib.ExitStack() as stack:
        for part in (b"", b"G", b"POST /v1/sess") * 20:
            slow = stack.enter_context(socket.create_connection(fleet.address))
            slow.sendall(part)
        began = time.monotonic()
        session = fleet.open()
        assert fleet.pid(session, 0)["count"] == 1
        assert time.monotonic() - began < 1.0
        # One that goes on is served, by whichever worker it came to meanwhile.
        slow = stack.enter_context(socket.create_connection(fleet.address))
        for byte in f"GET /v1/sessions/{session} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode():
            slow.sendall(bytes([byte]))
            time.sleep(0.03)
        assert slow.recv(100).startswith(b"HTTP/1.1 200")


def test_a_killed_worker_loses_its_sessions_alone_and_is_started_again(small_fleet):
    fleet = small_fleet
    sessions = [fleet.open(index) for index in range(4)]
    pids = {session: fleet.pid(session, 0)["pid"] for session in sessions}
    victim = pids[sessions[0]]
    lost = [session for session in sessions if pids[session] == victim]
    kept = [session for session in sessions if pids[session] != victim]
    assert len(lost) == len(kept) == 2
    with contextlib.closing(fleet.connect()) as connection:
        assert fleet.pid(kept[0], 1, connection=connection)["count"] == 2
        os.kill(victim, signal.SIGKILL)
        assert fleet.pid(kept[0], 2, connection=connection)["count"] == 3
        began = time.monotonic()

        def is_lost():
            path = f"/v1/sessions/{lost[0]}/step"
            status, problem = fleet.call("POST", path, take(1), connection=connection)
            assert problem["code"] in ("unavailable", "session_lost"), problem
            assert problem.get("retryable", False) is (problem["code"] == "unavailable")
            return (status, problem["code"]) == (410, "session_lost")

        eventually(is_lost)
        assert time.monotonic() - began < 6
    assert fleet.pid(kept[1], 1) == {"pid": pids[kept[1]], "count": 2}
    for session in lost:
        status, problem = fleet.call("GET", f"/v1/sessions/{session}")
        assert (status, problem["code"]) == (410, "session_lost")
    frames = [
        {"op": "step", "id": number, "sid": session, **take(9)}
        for number, session in enumerate(lost + kept)
    ]
    codes = [each["error"]["code"] for each in fleet.call("POST", "/v1/batch", frames)[1]]
    assert codes == ["session_lost", "session_lost", "step_conflict", "step_conflict"]
    host, port = fleet.address
    with connect(f"ws://{host}:{port}/v1/ws?worker={lost[0][0]}") as line:
        line.send(json.dumps(frames[0]))
        (reply,) = json.loads(line.recv(10))
        assert (reply["id"], reply["error"]["code"]) == (0, "session_lost")
    fresh = {fleet.pid(fleet.open(index), 0)["pid"] for index in range(4)}
    assert fresh == set(fleet.workers()) and victim not in fresh
    assert len(fresh) == 2


@pytest.mark.parametrize("hang", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_parents_sigkill_ends_the_workers(hang):
    fleet = Fleet(num_workers=2)
    workers = fleet.workers()
    session = fleet.open()

    def call():
        with contextlib.suppress(OSError, http.client.HTTPException):
            fleet.call("POST", f"/v1/sessions/{session}/step", take(0, "hang_the_loop"))

    if hang:
        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.3)
    fleet.process.kill()
    fleet.process.wait()
    fleet.process.stdout.close()
    eventually(lambda: sum(map(alive, workers)) <= int(hang), 8)
    eventually(lambda: not any(map(alive, workers)), 25)


def test_sigterm_drains_open_sessions_and_leaves_nothing():
    fleet = Fleet(num_workers=2, drain_s=5.0)
    workers = fleet.workers()
    sessions = [fleet.open(index) for index in range(2)]
    fleet.process.send_signal(signal.SIGTERM)
    eventually(lambda: fleet.call("GET", "/healthz")[1].get("status") == "draining")
    assert fleet.call("POST", "/v1/sessions", create())[1]["code"] == "draining"
    for session in sessions:
        assert fleet.pid(session, 0)["count"] == 1
        fleet.call("DELETE", f"/v1/sessions/{session}")
    began = time.monotonic()
    assert fleet.process.wait(10) == 0
    assert time.monotonic() - began < 4
    fleet.process.stdout.close()
    assert not any(map(alive, workers))


def test_a_worker_that_cannot_start_ends_the_server():
    fleet = Fleet(num_workers=2, environments=["nothing-of-this-name"])
    assert fleet.url == ""
    assert fleet.stop() != 0


def test_metrics_are_merged_by_worker():
    first = '# HELP a Things.\n# TYPE a counter\na 1.0\n# TYPE b gauge\nb{env="x"} 2.0\n'
    second = "# HELP a Things.\n# TYPE a counter\na 3.0\n"
    assert merge_metrics([first, second]).splitlines() == [
        "# HELP a Things.",
        "# TYPE a counter",
        'a{worker="0"} 1.0',
        'a{worker="1"} 3.0',
        "# TYPE b gauge",
        'b{worker="0",env="x"} 2.0',
    ]


def test_health_is_summed_and_the_worst_status_told():
    answers = [{"status": "ok", "sessions": 2}, {"status": "draining", "sessions": 3}]
    assert merge_health(answers) == {"status": "draining", "sessions": 5}
