"""Several servers on consecutive ports, in processes that are really killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from manager_calls import wait_until

ENVIRONMENT = f"{Path(__file__).with_name('sample_envs.py')}:Hello"


def free_ports(count):
    """The first of so many ports in a row that nobody listens on."""
    for _ in range(100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no ports in a row are free")


def children(process):
    """Process ids by server number, whether or not they have ended."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (entry / "cmdline").read_bytes().decode().split("\0")
            if parent == process.pid and "agentrl.env.server.worker" in arguments:
                found[json.loads(arguments[-2])["name"]] = int(entry.name)
    return found


def start(first, *options, workers=2, environment=ENVIRONMENT, err=subprocess.PIPE, **environ):
    command = [sys.executable, "-m", "agentrl", "env", "serve", environment]
    return subprocess.Popen(
        [*command, "--workers", str(workers), "--port", str(first), *options],
        stdout=subprocess.PIPE,
        stderr=err,
        text=True,
        env={**os.environ, **environ},
    )


@contextlib.contextmanager
def serving(*args, **options):
    """Yields the process, what it says before its URLs, and the URLs."""
    process = start(*args, **options)
    try:
        serves = next(line for line in process.stdout if line.startswith("serving"))
        says, _, urls = serves.strip().rpartition(" at ")
        yield process, says, urls.split(",")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


@pytest.fixture
def fleet():
    with serving(free_ports(2), "--max-sessions", "3", AGENTRL_ENV_TOKEN="t0k") as (process, *says):
        assert says[0] == "serving hello"
        yield process, says[1]


def call(url, path, body=None):
    headers = {"Authorization": "Bearer t0k"}
    return httpx.request("POST" if body else "GET", url + path, json=body, headers=headers)


def open_session(url):
    reply = call(url, "/v1/sessions", {"env": "hello", "task": {"split": "train", "index": 0}})
    assert reply.status_code == 201
    return reply.json()["sessions"][0]["id"]


def answers(url):
    with contextlib.suppress(httpx.TransportError):
        return call(url, "/v1/server").status_code == 200


@pytest.mark.promise
@pytest.mark.slow
def test_one_that_is_killed_comes_back_and_the_others_go_on(fleet):
    process, urls = fleet
    sessions = [open_session(url) for url in urls]
    assert [session[:2] for session in sessions] == ["0-", "1-"]
    assert httpx.get(f"{urls[1]}/v1/envs").status_code == 401, "all ask for the token"
    killed = children(process)["1"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: children(process).get("1", killed) != killed and answers(urls[1]))
    assert call(urls[0], f"/v1/sessions/{sessions[0]}").json()["status"] == "live"
    assert call(urls[1], f"/v1/sessions/{sessions[1]}").status_code == 404
    open_session(urls[1])


BAD = """
import ctypes, os, subprocess, sys
from agentrl.env import Environment, Task, tool

class Bad(Environment):
    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(str(index), "go")

    @tool
    def die(self) -> str:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # left behind"])
        os._exit(3)

    @tool
    def hold(self) -> str:
        ctypes.PyDLL(None).usleep(2**31)  # keeps the interpreter's lock
        return ""

    @tool
    def stop(self) -> str:
        os.kill(os.getpid(), 19)
        return ""
"""


@pytest.mark.parametrize(
    "name",
    [
        "die",
        pytest.param("hold", marks=pytest.mark.slow),
        pytest.param("stop", marks=pytest.mark.slow),
    ],
)
def test_one_server_that_dies_or_hangs_is_started_again(name, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    environment = f"{tmp_path / 'bad.py'}:Bad"
    with serving(0, workers=1, environment=environment) as (process, _, (url,)):
        (pid,) = children(process).values()
        reset = {"env": "Bad", "split": "train", "index": 0}
        session = httpx.post(f"{url}/reset", json=reset).json()["session"]
        action = {"text": "", "tool_calls": [{"id": "c", "name": name, "arguments": {}}]}
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{url}/step", json={"session": session, "action": action}, timeout=2)
        wait_until(lambda: list(children(process).values()) not in ([], [pid]), 50)
        wait_until(lambda: answers(url))
        assert httpx.post(f"{url}/reset", json=reset).status_code == 200
        assert not Path(f"/proc/{pid}").exists()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert not entry.read_bytes().endswith(b"# left behind\0")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all(fleet, number):
    process, urls = fleet
    pids = children(process).values()
    assert len(pids) == 2
    process.send_signal(number)
    assert process.wait(30) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(answers(url) for url in urls)


def test_an_environment_that_prints_much_does_not_stop_its_server(tmp_path):
    file = tmp_path / "loud.py"
    file.write_text(
        "from agentrl.env import Environment, Task\n"
        "print('loading')\n"
        "class Loud(Environment):\n"
        "    def splits(self):\n"
        "        return {'train': 1}\n"
        "    def get(self, split, index):\n"
        "        print('x' * 200_000)\n"  # more than a pipe holds
        "        return Task('0', 'What?')\n"
    )
    with (
        open(tmp_path / "err", "wb") as err,
        serving(free_ports(2), environment=f"{file}:Loud", err=err) as (_, _, urls),
    ):
        body = {"env": "Loud", "task": {"split": "train", "index": 0}}
        assert httpx.post(urls[0] + "/v1/sessions", json=body, timeout=60).status_code == 201
    assert "x" * 200_000 in (tmp_path / "err").read_text()


def test_a_supervisor_that_is_killed_leaves_no_server(fleet):
    process, urls = fleet
    pids = list(children(process).values())
    process.kill()
    process.wait(30)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    assert not any(answers(url) for url in urls)


@pytest.mark.promise
@pytest.mark.slow
def test_one_that_cannot_start_ends_all_with_a_message():
    first = free_ports(2)
    with socket.create_server(("127.0.0.1", first + 1)):
        process = start(first)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and not out
    assert f"127.0.0.1:{first + 1}: Address already in use" in err
    with contextlib.suppress(httpx.TransportError):
        assert not httpx.get(f"http://127.0.0.1:{first}/healthz")
