"""The three planes: what each token opens, and that nothing else does."""

import itertools

import httpx
import pytest

from agentrl.env import protocol
from agentrl.env.server.access import Access
from agentrl.errors import EnvError

TOKEN = "the.server/token"
ADD = {"tool_calls": [{"id": "c", "name": "add", "arguments": {"number": 2}}]}


@pytest.fixture
def guarded(serve_environments):
    with (
        serve_environments(["workshop"], token=TOKEN) as (url, _),
        httpx.Client(base_url=url) as http,
    ):
        body = {"env": "workshop", "task": {"split": "train", "index": 0}, "count": 2}
        opened = http.post("/v1/sessions", json=body, headers=bearer(TOKEN))
        assert opened.status_code == 201
        yield http, opened.json()["sessions"]


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def code(response):
    assert response.headers["content-type"] == "application/problem+json", response.text
    return response.status_code, response.json()["code"]


CONTROL = [
    ("POST", "/v1/sessions", {"env": "workshop", "task": {"split": "train", "index": 0}}),
    ("GET", "/v1/envs", None),
    ("GET", "/v1/envs/workshop", None),
    ("GET", "/v1/envs/workshop/tasks?split=train", None),
    ("GET", "/v1/server", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("POST", "/v1/batch", [{"op": "ping", "id": 1}]),
    ("GET", "/nothing", None),
]


def session_calls(sid):
    return [
        ("GET", f"/v1/sessions/{sid}", None),
        ("POST", f"/v1/sessions/{sid}/step", {"step": 0, "action": ADD}),
        ("POST", f"/v1/sessions/{sid}/reset", {"step": 0}),
        ("POST", f"/v1/sessions/{sid}/snapshot", {"step": 0}),
        ("POST", f"/v1/sessions/{sid}/renew", {}),
        ("DELETE", f"/v1/sessions/{sid}", None),
        ("POST", f"/v1/batch?sid={sid}", [{"op": "status", "id": 1, "sid": sid}]),
    ]


def gym_calls(sid):
    return [
        ("POST", "/reset", {"session": sid}),
        ("POST", "/step", {"session": sid, "action": "x"}),
    ]


def test_a_session_token_opens_its_session_and_no_other(guarded):
    http, (mine, other) = guarded
    headers = bearer(mine["token"])
    closed = [*CONTROL, *session_calls(other["id"]), *gym_calls(mine["id"])]
    for method, path, body in closed:
        refused = http.request(method, path, json=body, headers=headers)
        assert code(refused) == (403, "forbidden"), path
    for method, path, body in session_calls(mine["id"]):
        answer = http.request(method, path, json=body, headers=headers)
        assert answer.status_code in (200, 204, 409, 422), answer.text
        if method == "POST" and path.startswith("/v1/batch"):
            assert answer.json()[0]["error"]["code"] == "session_expired"  # deleted above
    batch = [{"op": "delete", "id": 1, "sid": other["id"]}, {"op": "info", "id": 2, "env": "hello"}]
    url = f"/v1/batch?sid={mine['id']}"
    for reply in http.post(url, json=batch, headers=headers).json():
        assert reply["error"]["code"] == "forbidden"
    assert http.get(f"/v1/sessions/{other['id']}", headers=bearer(TOKEN)).json()["step"] == 0
    # a session's token is the same after every call, and another session's is another
    assert mine["token"] != other["token"] and mine["token"] not in mine["id"]


def test_an_agent_token_opens_the_agent_plane_of_its_session_alone(guarded):
    http, (mine, other) = guarded
    headers = bearer(mine["agent_token"])
    for sid in (mine["id"], other["id"]):
        for method, path, body in [*CONTROL, *session_calls(sid), *gym_calls(sid)]:
            refused = http.request(method, path, json=body, headers=headers)
            assert code(refused) == (403, "forbidden"), path
    tools = http.get("/v1/agent/tools", headers=headers)
    assert tools.status_code == 200 and tools.json()["step"] == 0
    assert "add" in [tool["function"]["name"] for tool in tools.json()["tools"]]
    body = {"name": "add", "arguments": {"number": 3}, "step": 0}
    for _ in range(2):  # with a step it may be repeated
        reply = http.post("/v1/agent/call", json=body, headers=headers)
        assert reply.json() == {"content": '{"count":3}', "ended": False, "step": 1}
    reply = http.post("/v1/agent/call", json={"name": "nothing"}, headers=headers).json()
    assert reply["step"] == 2 and "nothing" in reply["content"]
    ended = http.post(
        "/v1/agent/call", json={"name": "submit", "arguments": {"value": 1}}, headers=headers
    )
    assert set(ended.json()) == {"content", "ended", "step"} and ended.json()["ended"]
    assert code(http.post("/v1/agent/call", json=body, headers=headers)) == (409, "step_conflict")
    again = http.post("/v1/agent/call", json={"name": "add"}, headers=headers)
    assert code(again) == (409, "episode_done")
    # the other session went nowhere
    assert http.get(f"/v1/sessions/{other['id']}", headers=bearer(TOKEN)).json()["step"] == 0


def test_guesses_open_nothing(guarded):
    http, (mine, other) = guarded
    token, agent = mine["token"], mine["agent_token"]
    mac = agent.rpartition(".")[2]
    guesses = [
        "A" * 22,
        token[:-1],
        token + "A",
        token.swapcase(),
        TOKEN[:-1],
        TOKEN + "x",
    ]
    guesses += [
        agent[:-1],
        f"{other['id']}.{mac}",
        f".{mac}",
        f"{mine['id']}.",
        f"{mine['id']}.{token}",
    ]
    guesses += [mine["id"], "\xff" * 22, "." * 50, f"{mine['id']}.{'A' * 22}"]
    paths = [f"/v1/sessions/{mine['id']}", "/v1/agent/tools", "/v1/envs"]
    for guess, path in itertools.product(guesses, paths):
        headers = [(b"Authorization", b"Bearer " + guess.encode("latin-1"))]
        assert http.get(path, headers=headers).status_code in (401, 403), (guess, path)
    for wrong in (token, TOKEN, None):  # neither is an agent's
        refused = http.get("/v1/agent/tools", headers=bearer(wrong) if wrong else {})
        assert code(refused) == (401, "unauthorized")
    # a session token tells nothing about which ids exist
    answers = {
        http.get(f"/v1/sessions/{sid}", headers=bearer(mine["token"])).text
        for sid in (other["id"], "B" * 22)
    }
    assert len(answers) == 1


def test_without_a_server_token_the_agent_plane_is_closed_all_the_same(serve_environments):
    with serve_environments(["workshop"]) as (url, _), httpx.Client(base_url=url) as http:
        body = {"env": "workshop", "task": {"split": "train", "index": 0}}
        session = http.post("/v1/sessions", json=body).json()["sessions"][0]
        sid, headers = session["id"], bearer(session["agent_token"])
        calls = [*CONTROL, *session_calls(sid), *gym_calls(sid)]
        for method, path, body in calls:
            refused = http.request(method, path, json=body, headers=headers)
            assert code(refused) == (403, "forbidden"), path
        assert http.get("/v1/agent/tools", headers=headers).status_code == 200
        assert code(http.get("/v1/agent/tools")) == (401, "unauthorized")
        guess = f"{sid}.{'A' * 22}"
        assert code(http.get("/v1/agent/tools", headers=bearer(guess))) == (401, "unauthorized")
        assert http.get(f"/v1/sessions/{sid}").json()["step"] == 0


def test_workers_with_one_secret_accept_each_others_tokens():
    secret = bytes(32)
    access = Access("t", loopback_only=False, secret=secret)
    token = protocol.session_token(secret, "1-abc")
    for path, query in (("/v1/sessions/1-abc/step", b""), ("/v1/ws", b"worker=1&sid=1-abc")):
        grant = access.check(path, query, {b"authorization": b"Bearer " + token.encode()})
        assert grant.session == "1-abc"
    for path, query in (("/v1/sessions/1-abd/step", b""), ("/v1/ws", b"sid=x&sid=1-abc")):
        with pytest.raises(EnvError, match="opens one session"):
            access.check(path, query, {b"authorization": b"Bearer " + token.encode()})
    elsewhere = Access("t", loopback_only=False, secret=b"1" * 32)
    with pytest.raises(EnvError, match="opens one session"):
        elsewhere.check("/v1/sessions/1-abc", b"", {b"authorization": b"Bearer " + token.encode()})
