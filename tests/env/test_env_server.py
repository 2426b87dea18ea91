"""The HTTP side: routes, problems, limits and access, against a real server."""

import asyncio
import contextlib
import json
import random
import socket
import time

import httpx
import pytest
import sample_envs

from agentrl.env.server.app import is_loopback, make_app, serve
from agentrl.env.server.routes import OPERATIONS
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


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served) as client:
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
        ('{"x": ' + "[" * 5000, "nests deeper"),
        ('{"x": ' + "[" * 64 + "]" * 64 + "}", "nests deeper"),
        ('{"x": 1}', "there is no key 'x'"),
        ('{"fail_loading": "data"}', "rows.jsonl, line 3"),
    ]:
        refused = http.get("/v1/envs/workshop", params={"config": config})
        assert says in problem(refused, 422, "invalid_request")["detail"]
    problem(http.get("/v1/envs/workshop?timeout_s=-1"), 422, "invalid_request")
    document = http.get("/openapi.json").json()
    parameters = document["paths"]["/v1/envs/{env_id}"]["get"]["parameters"]
    assert [each["name"] for each in parameters if each["in"] != "header"] == [
        "env_id",
        "config",
        "timeout_s",
    ]
    assert "last" in document["components"]["schemas"]["StepRequest"]["properties"]


def test_the_last_turn_over_http(http):
    session = open_session(http)
    url = f"/v1/sessions/{session['id']}/step"
    body = {"step": 0, "action": call("add"), "last": True}
    reply = http.post(url, json=body).json()
    assert reply["truncated"] and not reply["terminated"] and reply["reward"] == 0.5
    assert reply["reward_components"] == {"turns": 1.0, "is_grading_fine": 1.0}
    assert http.post(url, json=body).json() == reply | {"replayed": True}
    problem(http.post(url, json=body | {"last": False}), 409, "step_conflict")
    problem(http.post(url, json=body | {"last": "yes"}), 422, "invalid_request")


def test_health_and_the_description(http):
    assert http.get("/healthz").json()["status"] == "ok"
    document = http.get("/openapi.json").json()
    step = document["paths"]["/v1/sessions/{session_id}/step"]["post"]
    body = step["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    assert schemas[body.rsplit("/", 1)[1]]["required"] == ["step", "action"]
    assert "Problem" in schemas and "Idempotency-Key" not in schemas
    called = {(each.path, each.method.lower()) for each in OPERATIONS} | {("/v1/ws", "get")}
    described = {(path, method) for path, calls in document["paths"].items() for method in calls}
    assert described == called


def test_a_repeated_create_opens_once(http):
    body = {"env": "workshop", "task": {"split": "train", "index": 0}, "count": 2}
    headers = {"Idempotency-Key": "k1"}
    first, second = (http.post("/v1/sessions", json=body, headers=headers) for _ in range(2))
    assert first.json() == second.json() and len(first.json()["sessions"]) == 2
    other = http.post("/v1/sessions", json=body | {"count": 1}, headers=headers)
    problem(other, 409, "idempotency_conflict")
    for session in first.json()["sessions"]:
        http.delete(f"/v1/sessions/{session['id']}")


def test_problems_carry_the_code_and_whether_to_retry(http, serve_environments):
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
    assert "retryable" not in late  # false is the default
    with serve_environments(["hello"], max_sessions=1, max_wait_s=0.1) as (url, _):
        body = {"env": "hello", "task": {"split": "train", "index": 0}}
        assert httpx.post(f"{url}/v1/sessions", json=body).status_code == 201
        full = httpx.post(f"{url}/v1/sessions", json=body)
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
    for body in BAD_BODIES[1:]:
        renew = http.post(f"/v1/sessions/{session['id']}/renew", content=body, headers=JSON)
        problem(renew, 422, "invalid_request")
    assert http.get(f"/v1/sessions/{session['id']}").json()["step"] == 0
    for odd in ("%00", "..%2f..%2fhealthz", "a" * 5000, "%F0%9F"):
        assert http.get(f"/v1/sessions/{odd}").status_code == 404
    assert http.get("/healthz").json()["status"] == "ok"


def test_large_bodies_are_refused(serve_environments):
    with serve_environments(["workshop"], max_body_bytes=10_000) as (url, _):
        with httpx.Client(base_url=url) as http:
            session = open_session(http)
            step = f"/v1/sessions/{session['id']}/step"
            fits = {"step": 0, "action": {"text": "x" * 9_000}}
            assert http.post(step, json=fits).status_code == 200
            announced = {"step": 1, "action": {"text": "x" * 11_000}}
            problem(http.post(step, json=announced), 413, "payload_too_large")
            chunks = (b"x" * 1_000 for _ in range(50))
            problem(http.post(step, content=chunks, headers=JSON), 413, "payload_too_large")
        # a liar gets no further: the announced length is what the server reads
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(
                b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: 9999999999\r\n\r\n"
            )
            assert b"413" in raw.recv(200)


def test_a_gigabyte_is_not_read(http, served):
    """A body without an announced length is cut off soon after the limit."""
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", int(served.rsplit(":", 1)[1])), 10) as raw:
        raw.sendall(
            b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            for _ in range(1024):
                raw.sendall(chunk)
                sent += 1
    assert 2 <= sent < 32  # MiB: what was read, and what the socket's buffers hold
    assert http.get("/healthz").status_code == 200


def test_connections_that_send_nothing_hold_up_nobody(http, served):
    address = ("127.0.0.1", int(served.rsplit(":", 1)[1]))
    session = open_session(http)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            raw = stack.enter_context(socket.create_connection(address))
            raw.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        started = time.monotonic()
        for index in range(20):
            url = f"/v1/sessions/{session['id']}/step"
            assert http.post(url, json={"step": index, "action": call("add")}).status_code == 200
        assert time.monotonic() - started < 2


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
    monkeypatch.setattr("agentrl.env.server.app.BODY_TIMEOUT_S", 0.2)
    with (
        serve_environments(["hello"]) as (url, _),
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw,
    ):
        head = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        raw.sendall(head + b"{")
        raw.settimeout(5)
        assert b"408" in raw.recv(200)


def test_a_token_is_asked_for_everywhere_but_on_healthz(serve_environments):
    with (
        serve_environments(["hello"], token="s3cret") as (url, _),
        httpx.Client(base_url=url) as http,
    ):
        assert http.get("/healthz").status_code == 200
        paths = ("/v1/envs", "/v1/sessions/x", "/openapi.json", "/nothing")
        for token in (
            None,
            "Bearer",
            "Bearer wrong",
            "s3cret",
            "Basic s3cret",
            "Bearer s3cre",
        ):
            headers = {"Authorization": token} if token else {}
            for path in paths:
                refused = http.get(path, headers=headers)
                problem(refused, 401, "unauthorized")
                assert refused.headers["www-authenticate"] == "Bearer"
                assert "s3cret" not in refused.text
            refused = http.post("/v1/sessions/x/step", headers=headers, json={})
            problem(refused, 401, "unauthorized")
        good = {"Authorization": "bearer s3cret"}
        assert http.get("/v1/envs", headers=good).status_code == 200


def test_a_website_cannot_reach_a_server_on_this_machine(http):
    for host in ("evil.example", "127.0.0.1.evil.example", "", "10.0.0.1:80", "[::2]", "[x"):
        problem(http.get("/v1/envs", headers={"Host": host}), 403, "forbidden")
    for origin in ("http://evil.example", "null", "https://localhost.evil.example", "http://[x"):
        problem(http.get("/v1/envs", headers={"Origin": origin}), 403, "forbidden")
        problem(http.post("/v1/sessions/x/step", headers={"Origin": origin}), 403, "forbidden")
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1", "127.8.8.8:9", "[::1]:8700"):
        assert http.get("/v1/envs", headers={"Host": host}).status_code == 200
    assert http.get("/v1/envs", headers={"Origin": "http://localhost:3000"}).status_code == 200


def test_another_protocol_version_is_refused(http):
    refused = http.get("/v1/envs", headers={"Agentrl-Protocol": "2"})
    assert "protocol 1" in problem(refused, 422, "invalid_request")["detail"]


def test_a_blocking_environment_does_not_hold_up_the_server(http, served):
    session = open_session(http)

    async def main():
        async with httpx.AsyncClient(base_url=served) as client:
            slow = asyncio.create_task(
                client.post(
                    f"/v1/sessions/{session['id']}/step",
                    json={"step": 0, "action": call("hang"), "timeout_s": 1.0},
                    timeout=10,
                )
            )
            await asyncio.sleep(0.05)
            started = time.monotonic()
            for _ in range(5):
                assert (await client.get("/healthz")).status_code == 200
            assert time.monotonic() - started < 0.7 and not slow.done()
            problem(await slow, 504, "step_timeout")

    asyncio.run(main())


def test_a_server_off_loopback_needs_a_token():
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="AGENTRL_ENV_TOKEN"):
            serve(make_app(["hello"]), host=host, port=0)
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: .*in use; choose another"):
            serve(make_app(["hello"]), port=port)


def test_two_environments_with_one_id_are_refused():
    twin = type("Twin", (sample_envs.Hello,), {"id": "hello"})
    with pytest.raises(ConfigError, match="two environments have the id 'hello'"):
        make_app(["hello", twin])


def test_a_session_is_reset_and_forked_in_place(http):
    session = open_session(http, seed=3)
    url = f"/v1/sessions/{session['id']}"
    assert http.post(f"{url}/step", json={"step": 0, "action": call("submit", value=1)}).json()[
        "terminated"
    ]
    again = http.post(f"{url}/reset", json={"step": 1, "task": {"split": "train", "index": 7}})
    assert again.status_code == 200 and again.json()["task_id"] == "train/7"
    assert again.json()["step"] == 2 and again.json()["id"] == session["id"]
    repeated = http.post(f"{url}/reset", json={"step": 1, "task": {"split": "train", "index": 7}})
    assert repeated.json() == again.json()
    problem(http.post(f"{url}/reset", json={"step": 1}), 409, "step_conflict")
    problem(http.post(f"{url}/reset", json={}), 422, "invalid_request")
    problem(http.post(f"{url}/snapshot", json={"step": 2}), 422, "not_supported")
    fork = {"env": "workshop", "from_snapshot": "A" * 22}
    problem(http.post("/v1/sessions", json=fork), 410, "session_expired")
    http.delete(url)


def test_a_batch_answers_every_frame_in_its_order(http):
    sid = open_session(http)["id"]
    step = {"op": "step", "sid": sid, "action": call("add", number=2)}
    frames = [
        {"op": "ping", "id": 9},
        step | {"id": 1, "step": 0},
        {"op": "fly", "id": 2},
        {"op": "status", "id": 3, "sid": "nobody"},
        5,
        {"op": "delete", "id": 4, "sid": sid},
    ]
    reply = http.post("/v1/batch", json=frames)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    replies = reply.json()
    assert [each["id"] for each in replies] == [9, 1, 2, 3, None, 4]
    assert replies[0]["ok"] == {} and replies[3]["error"]["code"] == "not_found"
    assert "ok" in replies[5] and "error" in replies[2] and "error" in replies[4]
    assert http.post("/v1/batch", json=[]).json() == []
    problem(http.post("/v1/batch", json=[{"op": "ping", "id": 1}] * 1025), 413, "too_many_frames")
    for body in (b"", b"{", b"[", b"{}", b"[" * 10**6, b'{"op":"ping","id":1}', b"\xff"):
        problem(http.post("/v1/batch", content=body, headers=JSON), 422, "invalid_request")


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
    again = http.post("/reset", json={"session": sid, "seed": 4}).json()
    assert again["session"] == sid and again["step"] == 3
    for body in (
        {},
        {"env": "workshop"},
        {"env": "workshop", "split": "train"},
        {"env": "workshop", "split": "train", "index": 0, "task": {"split": "train", "index": 0}},
        {"env": "workshop", "session": sid},
    ):
        problem(http.post("/reset", json=body), 422, "invalid_request")
    problem(http.post("/reset", json={"session": "nobody"}), 404, "not_found")
    http.delete(f"/v1/sessions/{sid}")


def test_what_the_server_is_and_does(http):
    info = http.get("/v1/server").json()
    assert info["protocol_versions"] == [1] and info["workers"] == 1
    assert info["max_frames"] == 1024 and info["max_body_bytes"] == 2 * 2**20
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
    assert samples["agentrl_env_websockets"] == 0 and samples["process_resident_memory_bytes"] > 0
    assert http.get("/readyz").json()["status"] == "ok"


def test_a_draining_server_lives_and_is_not_ready(serve_environments):
    with serve_environments(["hello"]) as (url, manager):
        manager.draining = True
        assert httpx.get(f"{url}/healthz").json()["status"] == "draining"
        unready = httpx.get(f"{url}/readyz")
        assert "shutting down" in problem(unready, 503, "unavailable")["detail"]
        assert int(unready.headers["retry-after"]) >= 1


def test_other_methods_are_refused_by_name(http):
    for path in ("/v1/sessions", "/v1/sessions/x/step", "/v1/ws", "/openapi.json", "/reset"):
        refused = http.put(path)
        problem(refused, 405, "method_not_allowed")
        assert refused.headers["allow"] in ("POST", "GET")
    assert http.patch("/v1/sessions/x").headers["allow"] == "GET, DELETE"
    for path in ("/", "/v1/sessions/", "/v1/sessions/x/", "/v1/sessions/x/y", "//v1/envs", "/v1"):
        problem(http.get(path), 404, "not_found")
