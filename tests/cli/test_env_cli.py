"""`agentrl env`, as a process."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from agentrl.cli.main import main
from agentrl.env import Action, ToolCall, connect

ENVIRONMENTS = Path(__file__).parents[1] / "env" / "sample_envs.py"
HELLO = f"{ENVIRONMENTS}:Hello"
WORKSHOP = f"{ENVIRONMENTS}:Workshop"


@contextmanager
def served(*arguments, **variables):
    """A real `agentrl env serve` on a free port; yields the process and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "env", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    try:
        line = process.stdout.readline()
        assert " at http://127.0.0.1:" in line, line + process.stderr.read()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def wait_until_draining(url):
    deadline = time.monotonic() + 30
    while httpx.get(f"{url}/healthz").json()["status"] != "draining":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_session(url, env="workshop", index=0):
    body = {"env": env, "task": {"split": "train", "index": index}}
    return httpx.post(f"{url}/v1/sessions", json=body)


def test_a_server_process_from_start_to_sigterm():
    options = ("--max-sessions", "3", "--drain-s", "600")
    with served(WORKSHOP, HELLO, *options) as (process, url):
        assert httpx.get(f"{url}/v1/envs").json() == {"environments": ["workshop", "hello"]}
        session = open_session(url).json()["sessions"][0]
        step = f"{url}/v1/sessions/{session['id']}/step"

        process.send_signal(signal.SIGTERM)
        wait_until_draining(url)
        refused = open_session(url)
        assert refused.status_code == 503 and refused.json()["code"] == "draining"
        calls = [{"id": "c", "name": "submit", "arguments": {"value": 1}}]
        done = httpx.post(step, json={"step": 0, "action": {"tool_calls": calls}})
        assert done.json()["terminated"] and done.json()["reward"] == 1.5

        assert process.wait(60) == 0, "with the last session it ends"
        log = process.stderr.read()
        episode = json.loads(log[log.index("{") :].splitlines()[0])
        assert episode["env"] == "workshop" and episode["outcome"] == "terminated"


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_sessions(second):
    with served(HELLO, "--drain-s", "600") as (process, url):
        assert open_session(url, "hello").status_code == 201
        process.send_signal(signal.SIGTERM)
        wait_until_draining(url)
        process.send_signal(second)
        process.wait(60)


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_environment_hangs():
    with served(WORKSHOP) as (process, url):
        session = open_session(url).json()["sessions"][0]
        calls = [{"id": "c", "name": "hang", "arguments": {}}]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{url}/v1/sessions/{session['id']}/step",
                json={"step": 0, "action": {"tool_calls": calls}},
                timeout=0.3,
            )
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(12) == 0
        assert time.monotonic() - started < 10


def test_a_token_from_the_environment_and_configuration_from_the_command_line():
    async def greet(url):
        async with connect(url, token="t0k") as client:
            session = await client.session("workshop", split="train", index=0)
            action = Action(tool_calls=(ToolCall("c", "greet", {}),))
            return (await session.step(action, timeout_s=5)).observation[0]["content"]

    options = ("--config", "greeting=moin", "--config", '{"slow_reset_s": 0}')
    with served(WORKSHOP, *options, AGENTRL_ENV_TOKEN="t0k") as (_, url):
        assert open_session(url).status_code == 401
        assert asyncio.run(greet(url)) == "moin"


def run(capsys, *arguments):
    status = main(["env", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_wrong_input_is_one_line_and_status_2(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ENVIRONMENTS.parent)
    monkeypatch.delenv("AGENTRL_ENV_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, says in [
            (
                ("serve", "sample_envs:Hello", "--port", port),
                f"127.0.0.1:{port}: Address already in use",
            ),
            (("serve", "sample_envs:Hello", "--host", "0.0.0.0"), "--token"),
            (("serve", "sample_envs:Hello", "--host", "0.0.0.0", "--token", " "), "--token"),
            (("serve", "nothing"), "no environment 'nothing'"),
            (("run",), "name what to run"),
            (("serve", "sample_envs:Hello", "--config", "x=1"), "no key 'x'; the keys are none"),
            (("serve", "sample_envs:Hello", "--config", "x"), "KEY=VALUE"),
            (("serve", "sample_envs:Hello", "--config", "{x"), "not valid JSON"),
            (
                ("serve", "sample_envs:Hello", "sample_envs:Workshop", "--config", "x=1"),
                "one environment",
            ),
            (("info", "nothing"), "no environment 'nothing'"),
            (("info", "sample_envs:Workshop", "--config", "greting=x"), "did you mean greeting?"),
            (("info", "sample_envs:Workshop", "--config", "fail_loading=data"), "line 3: there is"),
        ]:
            status, _, err = run(capsys, *arguments)
            assert status == 2 and says in err and len(err.splitlines()) == 1, err


def test_list_and_info(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ENVIRONMENTS.parent)
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "list")
    (line,) = [line for line in out.splitlines() if line.startswith("math ")]
    assert status == 0 and line.split()[:5] == ["math", "calculator", "4,096", "Math", "problems"]
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run(capsys, "info", "math")
    assert status == 0 and out.splitlines()[1] == "agentrl_math.env:MathEnvironment"
    config = ("--config", 'offer=["add"]', "--config", "num_tasks=5")
    status, out, _ = run(capsys, "info", "sample_envs:Workshop", *config)
    assert status == 0 and "add(" in out and "greet(" not in out and "1,000" not in out
    status, out, _ = run(capsys, "info", "sample_envs:Workshop")
    assert status == 0
    for shown in ("workshop", "1,000", "greet()", "add(number)", "at most 16 sessions"):
        assert shown in out
    assert '  greeting = "hello"\n      What `greet` says.' in out
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "info", "math", "--config", "tools=true")
    assert "calculator(expression)" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_draining_takes_as_long_as_it_is_told():
    with served(HELLO, "--drain-s", "0.5") as (process, url):
        assert open_session(url, "hello").status_code == 201
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert time.monotonic() - started < 5, "which it takes where it is not told"
