"""The HTTP calls: replies, problems, limits. In this process, but where a socket is the point."""

import contextlib
import json
import random
import socket
import threading
import time

import httpx
import pytest
import sample_envs
from fastapi.testclient import TestClient
from manager_calls import wait_until

from agentrl.env.server import gate
from agentrl.env.server.access import is_loopback
from agentrl.env.server.app import make_app
from agentrl.env.server.serve import serve
from agentrl.errors import ConfigError

JSON = {"Content-Type": "application/json"}


def open_session(http, env="workshop", **rest):
    body = {"env": env, "task": {"split": "train", "index": 0}, **rest}
    response = http.post("/v1/sessions", json=body)
    assert response.status_code == 201, response.text
    return response.json()["sessions"][0]


def call(name, **arguments):
    return {"tool_calls": [{"id": "c", "name": name, "arguments": arguments}]}


def problem(response, status, code):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["agentrl-protocol"] == "1"
    body = response.json()
    assert body["code"] == code and body["status"] == status and body["title"]
    return body


@contextlib.contextmanager
def client_of(*environments, **options):
    app = make_app(environments, **options)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as http:
        yield http


@pytest.fixture(scope="module")
def http():
    with client_of("hello", "workshop", "free-form") as client:
        yield client


def test_an_episode_with_curl_like_requests(http):
    session = open_session(http, seed=3, lease_s=20)
    url = f"/v1/sessions/{session['id']}"
    first = http.post(f"{url}/step", json={"step": 0, "action": call("add", number=2)})
    assert first.headers["agentrl-protocol"] == "1"
    assert first.json() == {
        "step": 1,
        "observation": [
            {"role": "tool", "tool_call_id": "c", "name": "add", "content": '{"count":2}'}
        ],
        "reward": 0.0,
        "terminated": False,
        "truncated": False,
        "reward_components": {},
        "info": {},
        "metrics": {"tool_calls": 1.0},
        "replayed": False,
        "tools": None,
    }
    again = http.post(f"{url}/step", json={"step": 0, "action": call("add", number=2)})
    assert again.json() == first.json() | {"replayed": True}
    status = http.get(url).json()
    assert status["step"] == 1 and status["status"] == "live" and status["env"] == "workshop"
    renewed = http.post(f"{url}/renew", json={"lease_s": 500})
    assert renewed.json()["lease_expires_at"] - time.time() > 400
    assert http.post(f"{url}/renew").status_code == 200
    assert [http.delete(url).status_code for _ in range(2)] == [204, 204]
    gone = http.post(f"{url}/step", json={"step": 1, "action": {"text": "x"}})
    problem(gone, 410, "session_expired")
    problem(http.get(url), 410, "session_expired")


def test_environments_and_tasks_are_listed_without_references(http):
    assert "workshop" in http.get("/v1/envs").json()["environments"]
    info = http.get("/v1/envs/workshop").json()
    assert info["splits"] == {"train": 1000} and info["max_sessions"] == 16
    assert info["tools"][0]["function"]["name"] == "greet"
    assert info["description"] == "A tool for every way an environment can behave."
    assert "greeting" in info["config_schema"]["properties"]
    tasks = http.get("/v1/envs/workshop/tasks", params={"split": "train", "start": 5, "stop": 7})
    assert [task["index"] for task in tasks.json()["tasks"]] == [5, 6]
    assert "secret" not in tasks.text
    assert len(http.get("/v1/envs/hello/tasks?split=test").json()["tasks"]) == 3
    problem(http.get("/v1/envs/hello/tasks?split=dev"), 422, "invalid_request")
    problem(http.get("/v1/envs/hello/tasks"), 422, "invalid_request")
    problem(http.get("/v1/envs/hello/tasks?split=test&start=-1"), 422, "invalid_request")
    problem(http.get("/v1/envs/hello/tasks?split=train&stop=5000"), 422, "invalid_request")
    problem(http.get("/v1/envs/nowhere"), 404, "not_found")


def test_what_is_listed_follows_the_configuration_in_the_query(http):
    query = {"config": json.dumps({"num_tasks": 6, "offer": ["add"]}), "timeout_s": "5"}
    info = http.get("/v1/envs/workshop", params=query).json()
    assert info["splits"] == {"train": 6}
    assert [tool["function"]["name"] for tool in info["tools"]] == ["add"]
    query = {"config": '{"num_tasks": 2}', "split": "train"}
    assert len(http.get("/v1/envs/workshop/tasks", params=query).json()["tasks"]) == 2
    for config, says in [
        ("{", "config must be a JSON object"),
        ("[]", "config must be a JSON object"),
        ('{"x": ' + "[" * 5000, "depth limit"),
        ('{"x": ' + "[" * 64 + "]" * 64 + "}", "nests deeper"),
        ('{"x": 1}', "there is no key 'x'"),
        ('{"fail_loading": "data"}', "rows.jsonl, line 3"),
    ]:
        refused = http.get("/v1/envs/workshop", params={"config": config})
        assert says in problem(refused, 422, "invalid_request")["detail"]
    problem(http.get("/v1/envs/workshop?timeout_s=-1"), 422, "invalid_request")


def test_the_schema_describes_every_call(http):
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    step = document["paths"]["/v1/sessions/{session_id}/step"]["post"]
    body = step["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert schemas[body.rsplit("/", 1)[1]]["required"] == ["step", "action"]
    assert "The agent gets no further turn" in json.dumps(schemas["StepRequest"])
    problem = step["responses"]["4XX"]["content"]["application/problem+json"]["schema"]
    assert {"code", "detail", "retryable"} <= set(problem["properties"])
    served = {(r.path_format, m) for r in http.app.routes for m in r.methods}
    served = {(path, m) for path, m in served if not path.startswith(("/openapi.json", "/docs"))}
    described = {(p, m.upper()) for p, calls in document["paths"].items() for m in calls}
    assert described == served
    assert not {"HTTPValidationError", "ValidationError"} & set(schemas)
    assert "/openapi.json" in http.get("/docs").text


def test_problems_carry_the_code_and_whether_to_retry(http):
    session = open_session(http)
    url = f"/v1/sessions/{session['id']}/step"
    grader = http.post(url, json={"step": 0, "action": call("lose_grader")})
    assert problem(grader, 500, "grader_error")["detail"] == "the grader is gone"
    problem(http.post("/v1/sessions/nope/step", json={"step": 0, "action": {}}), 404, "not_found")
    problem(http.get("/v1/nothing"), 404, "not_found")
    problem(http.put("/v1/sessions"), 405, "method_not_allowed")
    timeout = {"step": 0, "action": call("wait", seconds=9), "timeout_s": 0.05}
    session = open_session(http)
    late = problem(
        http.post(f"/v1/sessions/{session['id']}/step", json=timeout), 504, "step_timeout"
    )
    assert late["retryable"] is False
    with client_of("hello", max_sessions=1, max_wait_s=0.1) as small:
        body = {"env": "hello", "task": {"split": "train", "index": 0}}
        assert small.post("/v1/sessions", json=body).status_code == 201
        full = small.post("/v1/sessions", json=body)
        assert problem(full, 429, "at_capacity")["retryable"] is True
        assert int(full.headers["retry-after"]) >= 1


BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"1e400",
    b"\xff\xfe",
    b'{"step": "0", "action": {}}',
    b'{"step": 0, "action": {"text": 5}}',
    b'{"step": 0, "action": {"tool_calls": [{}]}}',
    b'{"step": 0, "action": {}, "shell": "rm"}',
    b'{"step": 0, "action": {}, "timeout_s": -1}',
    b'{"step": 0, "action": {"text": "\\ud800"}}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
]


def test_bad_bodies_are_refused_and_change_nothing(http):
    session = open_session(http)
    generator = random.Random(0)
    good = json.dumps({"step": 0, "action": call("add", number=1)}).encode()
    broken = []
    for _ in range(150):
        body = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            body[generator.randrange(len(body))] = generator.randrange(256)
        broken.append(bytes(body[: generator.randint(0, len(body) - 1)]))
    for path in (f"/v1/sessions/{session['id']}/step", "/v1/sessions"):
        for body in BAD_BODIES + broken:
            problem(http.post(path, content=body, headers=JSON), 422, "invalid_request")
    for body in set(BAD_BODIES) - {b"", b"null"}:  # which stand for an empty request
        renew = http.post(f"/v1/sessions/{session['id']}/renew", content=body, headers=JSON)
        problem(renew, 422, "invalid_request")
    assert http.get(f"/v1/sessions/{session['id']}").json()["step"] == 0
    for odd in ("%00", "..%2f..%2fhealthz", "a" * 5000, "%F0%9F"):
        assert http.get(f"/v1/sessions/{odd}").status_code == 404
    assert http.get("/healthz").json()["status"] == "ok"


def test_a_body_of_another_type_is_told_what_to_send(http):
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        refused = http.post("/v1/sessions", content=b'{"env": "hello"}', headers=headers)
        assert "application/json" in problem(refused, 422, "invalid_request")["detail"]


def test_large_bodies_are_refused():
    with client_of("workshop", max_body_bytes=10_000) as http:
        step = f"/v1/sessions/{open_session(http)['id']}/step"
        fits = {"step": 0, "action": {"text": "x" * 9_000}}
        assert http.post(step, json=fits).status_code == 200
        announced = http.post(step, json={"step": 1, "action": {"text": "x" * 11_000}})
        problem(announced, 413, "payload_too_large")
        assert announced.headers["connection"] == "close"
        chunks = (b"x" * 1_000 for _ in range(50))
        problem(http.post(step, content=chunks, headers=JSON), 413, "payload_too_large")


def test_ids_cannot_be_guessed(http):
    ids = {open_session(http)["id"] for _ in range(8)}
    assert len(ids) == 8 and all(len(each) == 22 for each in ids)  # 128 bits in base64
    known = min(ids)
    for guess in (known[:-1], known + "A", known.swapcase(), "A" * 22, "*", "%2e%2e"):
        url = f"/v1/sessions/{guess}"
        problem(http.post(f"{url}/step", json={"step": 0, "action": {}}), 404, "not_found")
        problem(http.get(url), 404, "not_found")
        problem(http.delete(url), 404, "not_found")
    for each in ids:
        http.delete(f"/v1/sessions/{each}")


def test_a_body_that_does_not_arrive_is_given_up(serve_environments, monkeypatch):
    monkeypatch.setattr(gate, "BODY_TIMEOUT_S", 0.2)
    with (
        serve_environments(["hello"]) as (url, _),
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw,
    ):
        head = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        raw.sendall(head + b"{")
        raw.settimeout(20)
        assert b"408" in raw.recv(200)


def test_another_protocol_version_is_refused(http):
    refused = http.get("/v1/envs", headers={"Agentrl-Protocol": "2"})
    assert "protocol 1" in problem(refused, 422, "invalid_request")["detail"]


def test_a_blocking_environment_does_not_hold_up_the_server(served):
    with httpx.Client(base_url=served, timeout=60) as http:
        url = f"/v1/sessions/{open_session(http)['id']}/step"
        slow = {"step": 0, "action": call("hang"), "timeout_s": 60}
        replies = []
        thread = threading.Thread(
            target=lambda: replies.append(httpx.post(served + url, json=slow, timeout=60))
        )
        thread.start()
        wait_until(lambda: http.get("/metrics").text.count("agentrl_env_threads 1.0"))
        for _ in range(5):
            assert http.get("/healthz").status_code == 200
        assert not replies
        sample_envs.Workshop.release.set()
        thread.join(30)
        sample_envs.Workshop.release.clear()
        assert replies[0].status_code == 200


def test_a_server_off_loopback_needs_a_token():
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="AGENTRL_ENV_TOKEN"):
            serve(make_app(["hello"]), host=host, port=0)
    for empty in ("", " "):  # which every client would send
        with pytest.raises(ConfigError, match="AGENTRL_ENV_TOKEN"):
            serve(make_app(["hello"], token=empty), host="0.0.0.0", port=0, token=empty)
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: .*in use; choose another"):
            serve(make_app(["hello"]), port=port)


def test_the_gym_aliases_play_an_episode(http):
    first = http.post("/reset", json={"env": "workshop", "split": "train", "index": 3}).json()
    assert set(first) == {"session", "observation", "tools", "step"} and first["step"] == 0
    sid = first["session"]
    action = call("add", number=2)
    result = http.post("/step", json={"session": sid, "action": action}).json()
    assert result["step"] == 1 and result["observation"][0]["content"] == '{"count":2}'
    result = http.post("/step", json={"session": sid, "action": "words", "step": 1}).json()
    assert result["step"] == 2 and not result["terminated"]
    problem(
        http.post("/step", json={"session": sid, "action": "x", "step": 1}), 409, "step_conflict"
    )
    for body in (
        {},
        {"env": "workshop"},
        {"env": "workshop", "split": "train"},
        {"env": "workshop", "split": "train", "index": 0, "task": {"split": "train", "index": 0}},
        {"env": "workshop", "session": sid},
    ):
        problem(http.post("/reset", json=body), 422, "invalid_request")
    inline = {"env": "workshop", "task": {"id": "mine", "prompt": "a task of my own"}, "seed": 4}
    assert "my own" in http.post("/reset", json=inline).json()["observation"][-1]["content"]
    problem(http.post("/step", json={"session": "nobody", "action": "x"}), 404, "not_found")
    http.delete(f"/v1/sessions/{sid}")


def test_what_the_server_is_and_does(http):
    info = http.get("/v1/server").json()
    assert info["protocol_versions"] == [1] and info["max_body_bytes"] == 2 * 2**20
    # a client of another version finds out here, or names all it speaks
    assert http.get("/v1/server", headers={"Agentrl-Protocol": "7"}).json() == info
    assert http.get("/v1/envs", headers={"Agentrl-Protocol": "2, 1"}).status_code == 200
    session = open_session(http)
    http.post(f"/v1/sessions/{session['id']}/step", json={"step": 0, "action": call("add")})
    http.delete(f"/v1/sessions/{session['id']}")
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = {}
    for line in response.text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)
    assert samples['agentrl_env_sessions_opened_total{env="workshop"}'] >= 1
    assert samples['agentrl_env_sessions_closed_total{env="workshop",outcome="abandoned"}'] >= 1
    steps = samples['agentrl_env_steps_total{env="workshop"}']
    assert steps >= 1 and samples["agentrl_env_step_seconds_count"] >= steps
    assert samples['agentrl_env_step_seconds_bucket{le="+Inf"}'] >= steps
    assert samples["agentrl_env_threads"] >= 0 and samples["process_resident_memory_bytes"] > 0
    assert http.get("/readyz").json()["status"] == "ok"


def test_a_draining_server_lives_and_is_not_ready():
    with client_of("hello") as http:
        http.app.state.manager.draining = True
        assert http.get("/healthz").json()["status"] == "draining"
        unready = http.get("/readyz")
        assert "shutting down" in problem(unready, 503, "unavailable")["detail"]
        assert int(unready.headers["retry-after"]) >= 1


def test_ids_begin_with_the_name_of_the_server():
    with client_of("hello", name="3") as http:
        assert open_session(http, "hello")["id"].startswith("3-")


def test_other_methods_are_refused_by_name(http):
    for path in ("/v1/sessions", "/v1/sessions/x/step", "/v1/envs", "/reset"):
        refused = http.put(path)
        problem(refused, 405, "method_not_allowed")
        assert refused.headers["allow"] in ("POST", "GET")
    assert http.patch("/v1/sessions/x").headers["allow"] == "DELETE, GET"
    for path in ("/", "/v1/sessions/", "/v1/sessions/x/", "/v1/sessions/x/y", "//v1/envs", "/v1"):
        problem(http.get(path), 404, "not_found")
