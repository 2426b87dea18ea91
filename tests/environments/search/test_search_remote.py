"""Search-R1's retriever contract from both sides, refused addresses, the command line."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from aiohttp import web
from web_servers import in_thread, listening

from agentrl.cli.main import main
from agentrl.errors import ConfigError, EnvError
from agentrl_search import outgoing
from agentrl_search.corpus import Passage
from agentrl_search.dense import ServerEncoder
from agentrl_search.index import build_index, open_index
from agentrl_search.outgoing import check_url, post_json
from agentrl_search.retrieval import RemoteRetriever
from agentrl_search.server import make_app

PASSAGES = [Passage("a", "Apples", "Apples are red."), Passage("p", "", "Pears are green.")]


def answering(handler):
    app = web.Application()
    app.router.add_post("/{tail:.*}", handler)
    return in_thread(listening(app))


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("remote") / "index"
    build_index(PASSAGES, directory)
    return directory


@pytest.fixture(scope="module")
def served(index_dir):
    with in_thread(listening(make_app(open_index(index_dir)))) as url:
        yield url


def post(url: str, body: object) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_contract(served):
    asked = {"queries": ["red apples", "green", "nothing"], "topk": 1, "return_scores": True}
    status, reply = post(f"{served}/retrieve", asked)
    assert status == 200 and list(reply) == ["result"]
    [[apple], [pear], none] = reply["result"]
    assert none == []
    assert apple["document"] == {
        "id": "a", "title": "Apples", "contents": '"Apples"\nApples are red.',
    }  # fmt: skip
    assert apple["score"] > 0 and pear["document"]["contents"] == "Pears are green."
    _, plain = post(f"{served}/retrieve", {"queries": ["apples are"]})
    assert [document["id"] for document in plain["result"][0]] == ["a", "p"]


@pytest.mark.parametrize(
    "body",
    [b"{", {"queries": "text"}, {}, {"queries": ["a"], "topk": 0}, {"queries": [], "topk": 101},
     {"queries": ["a"] * 9000}],
)  # fmt: skip
def test_requests_out_of_the_contract_are_refused(served, body):
    status, reply = post(f"{served}/retrieve", body)
    assert status == 422 and reply["detail"]


def test_a_whole_batch_keeps_its_order(served):
    queries = ["apples", "pears"] * 300
    _, reply = post(f"{served}/retrieve", {"queries": queries, "topk": 1, "return_scores": False})
    assert [result[0]["id"] for result in reply["result"]] == ["a", "p"] * 300


def test_a_remote_retriever_finds_what_the_local_one_does(served, index_dir):
    remote = RemoteRetriever(f"{served}/retrieve", allow_private=True)
    queries = ["apples are", "pears", "nothing"]
    assert remote.search(queries, 2) == open_index(index_dir).search(queries, 2)
    assert remote.find("a") is None and remote.search([], 2) == []


@pytest.mark.parametrize(
    "reply",
    [{}, {"result": []}, {"result": [[{"document": {}}]]}, {"result": [[5]]}, {"result": [5]}, []],
)
def test_a_retriever_that_breaks_the_contract_is_an_error(reply):
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(reply)

    with answering(handler) as url, pytest.raises(EnvError, match="not in the format of /retrieve"):
        RemoteRetriever(url, allow_private=True).search(["q"], 1)


def test_failures_are_repeated_where_that_can_help(monkeypatch):
    monkeypatch.setattr(outgoing.time, "sleep", lambda seconds: None)
    statuses, seen = [503, 429, 200], []

    async def handler(_: web.Request) -> web.Response:
        seen.append(statuses[len(seen)])
        return web.json_response({"ok": 1}, status=seen[-1])

    with answering(handler) as url:
        assert post_json(url, {}, allow_private=True) == {"ok": 1}
        statuses[:], seen[:] = [404, 200], []
        with pytest.raises(EnvError, match="status 404"):
            post_json(url, {}, allow_private=True)
        assert seen == [404]
        statuses[:], seen[:] = [500] * 5, []
        with pytest.raises(EnvError, match="status 500"):
            post_json(url, {}, allow_private=True)
        assert len(seen) == 3
    with pytest.raises(EnvError, match="check that the server is running"):
        post_json(url, {}, allow_private=True)


def test_redirects_are_not_followed_and_replies_are_bounded(monkeypatch):
    async def handler(request: web.Request) -> web.Response:
        if request.path == "/redirect":
            raise web.HTTPFound("/json")
        return web.Response(body=b"x" * 2000)

    monkeypatch.setattr(outgoing, "MAX_REPLY_BYTES", 1000)
    with answering(handler) as url:
        with pytest.raises(EnvError, match="status 302"):
            post_json(f"{url}/redirect", {}, allow_private=True)
        with pytest.raises(EnvError, match="longer than"):
            post_json(f"{url}/json", {}, allow_private=True)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "[::1]",
     "[fd00::1]", "[::ffff:10.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "100.64.0.1",
     "224.0.0.1", "2130706433", "0x7f.1"],
)  # fmt: skip
def test_private_addresses_are_refused_however_they_are_written(host):
    with pytest.raises(ConfigError, match="private address"):
        check_url(f"http://{host}:8000/retrieve", allow_private=False)
    check_url(f"http://{host}:8000/retrieve", allow_private=True)


def test_a_name_that_turns_private_is_refused_at_the_call(monkeypatch):
    answers = iter(["93.184.216.34", "127.0.0.1"])

    def resolve(host: str, port: int, **_: object):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(outgoing.socket, "getaddrinfo", resolve)
    with pytest.raises(ConfigError, match=r"example\.org has the private address"):
        post_json("http://example.org/retrieve", {}, allow_private=False)


@pytest.mark.parametrize(
    "url", ["ftp://a", "file:///etc/passwd", "a", "http://u:p@a", "http://a:x"]
)
def test_odd_urls_are_refused(url):
    with pytest.raises(ConfigError):
        check_url(url, allow_private=True)


def test_an_embedding_server():
    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "m"
        vectors = [[float(len(text)), 1.0] for text in body["input"]]
        rows = [{"index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        return web.json_response({"data": rows[::-1]})

    async def broken(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"index": 0, "embedding": []}]})

    texts = ["x" * i for i in range(1, 150)]
    with answering(handler) as url:
        encoded = ServerEncoder(f"{url}/v1/embeddings#m", allow_private=True).encode(texts)
        assert encoded.shape == (149, 2)
        assert (encoded**2).sum(1) == pytest.approx(1.0)
        assert (encoded[:, 0] / encoded[:, 1]).tolist() == pytest.approx(list(range(1, 150)), 1e-4)
    with answering(broken) as url, pytest.raises(EnvError, match="sent no valid embeddings"):
        ServerEncoder(f"{url}/v1/embeddings#m", allow_private=True).encode(["a", "b"])


# --- the command line ----------------------------------------------------------------------------


def test_index_add_and_query(tmp_path, capsys):
    corpus, more = tmp_path / "c.jsonl", tmp_path / "more.txt"
    corpus.write_text('{"id": "a", "title": "Apples", "text": "Apples are red."}\n')
    more.write_text("Zebras are striped.")
    out = str(tmp_path / "index")
    assert main(["search", "index", str(corpus), "--out", out]) == 0
    assert main(["search", "index", str(more), "--out", out, "--add"]) == 0
    assert capsys.readouterr().out == f"{out}: 1 passages\n{out}: 2 passages\n"
    assert main(["search", "query", out, "zebra", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["id"] == "more.txt#1"
    assert main(["search", "query", out, "apple"]) == 0
    assert "a  Apples\nApples are red." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["index", "nowhere", "--out", "x"], "corpus nowhere does not exist"),
        (["query", "nowhere", "q"], "nowhere is not an index"),
        (["serve", "nowhere"], "nowhere is not an index"),
    ],
)
def test_errors_are_one_line(command, message, capsys):
    assert main(["search", *command]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in line


@pytest.mark.slow
def test_serve_answers_until_it_is_terminated(index_dir):
    server = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "search", "serve", str(index_dir), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        status, reply = post(url, {"queries": ["pears"], "topk": 1, "return_scores": True})
        assert status == 200 and reply["result"][0][0]["document"]["id"] == "p"
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("drip", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_the_timeout_bounds_a_server_that_sends_a_byte_at_a_time(drip):
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def answer():
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(drip)
                        while not done.wait(0.02):
                            connection.sendall(b"x")

        server.settimeout(0.2)
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/retrieve"
        outcome: list[Exception] = []

        def ask():
            try:
                post_json(url, {}, allow_private=True, timeout_s=0.5)
            except Exception as error:
                outcome.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(30)  # without a bound it has no end
        done.set()
        thread.join()
        assert [type(error) for error in outcome] == [EnvError]
        assert re.search("in time|no answer within", str(outcome[0]))
