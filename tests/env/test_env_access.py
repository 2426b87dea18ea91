"""Each token opens its own routes and no others; only allowed hosts and origins are answered."""

import itertools

import pytest
from fastapi.testclient import TestClient

from agentrl.env.server.access import Access
from agentrl.env.server.app import make_app
from agentrl.errors import EnvError

TOKEN = "the.server/token"
ADD = {"tool_calls": [{"id": "c", "name": "add", "arguments": {"number": 2}}]}


@pytest.fixture(scope="module")
def http():
    with TestClient(make_app(["workshop"], token=TOKEN), "http://localhost") as client:
        yield client


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def code(response):
    assert response.headers["content-type"] == "application/problem+json", response.text
    assert response.headers["agentrl-protocol"] == "1"
    return response.status_code, response.json()["code"]


OPEN = {"env": "workshop", "task": {"split": "train", "index": 0}}
EVERYTHING = [
    ("POST", "/v1/sessions", OPEN),
    ("GET", "/v1/envs", None),
    ("GET", "/v1/envs/workshop", None),
    ("GET", "/v1/envs/workshop/tasks?split=train", None),
    ("GET", "/v1/server", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/docs", None),
    ("GET", "/nothing", None),
    ("POST", "/reset", {"env": "workshop", "split": "train", "index": 0}),
    ("POST", "/step", {"session": "x", "action": "x"}),
    ("GET", "/v1/sessions/x", None),
    ("POST", "/v1/sessions/x/step", {"step": 0, "action": ADD}),
    ("POST", "/v1/sessions/x/renew", {}),
    ("DELETE", "/v1/sessions/x", None),
]


def test_a_token_is_asked_for_everywhere_but_where_health_is_asked_for(http):
    assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200
    opened = http.post("/v1/sessions", json=OPEN, headers=bearer(TOKEN)).json()["sessions"][0]
    guesses = ("", "wrong", "A" * 22, TOKEN[:-1], TOKEN + "x", TOKEN.swapcase(), "\xff" * 22)
    wrong = (None, "Bearer", TOKEN, f"Basic {TOKEN}", f"Bearer {opened['id']}")
    wrong += tuple(f"Bearer {guess}" for guess in guesses)
    for given, (method, path, body) in itertools.product(wrong, EVERYTHING):
        headers = [(b"Authorization", given.encode("latin-1"))] if given else []
        refused = http.request(method, path, json=body, headers=headers)
        assert code(refused) == (401, "unauthorized"), path
        assert refused.headers["www-authenticate"] == "Bearer" and TOKEN not in refused.text
    assert http.get("/v1/envs", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200
    gone = http.delete(f"/v1/sessions/{opened['id']}", headers=bearer(TOKEN))
    assert gone.status_code == 204


async def test_nothing_of_a_body_is_read_without_the_token():
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/sessions", "query_string": b""}
    headers = [(b"host", b"localhost"), (b"content-length", b"2000000")]
    await make_app(["workshop"], token=TOKEN)(scope | {"headers": headers}, receive, send)
    assert sent[0]["status"] == 401


HOSTS = ("localhost", "LOCALHOST:1234", "127.0.0.1", "127.8.8.8:9", "[::1]:8700")
BAD_HOSTS = (
    *("evil.example", "127.0.0.1.evil.example", "", "10.0.0.1:80", "[::2]", "[x", "[::1", "::1"),
    *("evil.example\\@127.0.0.1", "evil.example@127.0.0.1", "127.0.0.1/evil.example", "0.0.0.0"),
    *("localhost:80:90", "localhost:", "localhost:x", "localhost evil.example", "127.0.0.1,evil"),
)


def check(*headers):
    given = {}
    for name, value in headers:
        given.setdefault(name.decode(), []).append(value.decode())
    Access(None, loopback_only=True).check("/v1/envs", given)


def test_a_website_cannot_reach_a_server_on_this_machine():
    for host in HOSTS:
        check((b"host", host.encode()))
    for host in BAD_HOSTS:
        with pytest.raises(EnvError, match="answers on localhost"):
            check((b"host", host.encode()))
    for hosts in ((), (b"localhost", b"evil.example"), (b"localhost", b"localhost")):
        with pytest.raises(EnvError, match="answers on localhost"):
            check(*((b"host", host) for host in hosts))


def test_only_the_servers_own_origin_is_answered():
    host = (b"host", b"localhost:8700")
    for origin in (b"http://localhost:8700", b"https://LOCALHOST:8700"):
        check(host, (b"origin", origin))
    for origin in (
        *(b"http://evil.example", b"null", b"https://localhost.evil.example", b"http://[x", b""),
        *(b"http://localhost:3000", b"http://localhost", b"http://127.0.0.1:8700"),
        *(b"file://localhost:8700", b"http://localhost:8700/", b"http://localhost:8700 evil"),
    ):
        with pytest.raises(EnvError, match="origin"):
            check(host, (b"origin", origin))
    with pytest.raises(EnvError, match="origin"):
        check(host, (b"origin", b"http://localhost:8700"), (b"origin", b"http://evil.example"))


def test_hosts_and_origins_are_checked_for_every_call():
    with TestClient(make_app(["workshop"]), "http://localhost") as http:
        for method, path, body in [*EVERYTHING, ("GET", "/healthz", None)]:
            for headers in ({"Host": "evil.example"}, {"Origin": "http://localhost:1"}):
                refused = http.request(method, path, json=body, headers=headers)
                assert code(refused) == (403, "forbidden"), path
