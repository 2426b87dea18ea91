"""`agentrl swebench doctor|pull|reap|run`, with a scripted model behind a real chat server."""

import argparse
import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web
from test_swe_dataset import ROW

from agentrl.env.container.engine import Owner, current_owner, labels
from agentrl.errors import ConfigError, DataError
from agentrl.rollout import read_trajectories
from agentrl_swebench.cli import add_subcommands


@pytest.fixture(autouse=True)
def _state(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_STATE_DIR", str(tmp_path / "state"))


def command(*words):
    parser = argparse.ArgumentParser()
    add_subcommands(parser)
    arguments = parser.parse_args([str(word) for word in words])
    return arguments.handler(arguments)


@contextmanager
def model_server(say):
    """`say(messages)` gives the command to run, or None to submit."""
    requests = []

    async def complete(request):
        body = await request.json()
        requests.append(body)
        said = say(body["messages"])
        if isinstance(said, int):
            return web.Response(status=said)
        name = "submit" if said is None else "bash"
        arguments = {} if said is None else {"command": said}
        call = {
            "id": f"c{len(requests)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return web.json_response(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )

    started, stop = threading.Event(), None
    address = []

    def serve():
        nonlocal stop

        async def main():
            nonlocal stop
            stop = asyncio.Event()
            app = web.Application(client_max_size=1 << 26)
            app.router.add_post("/v1/chat/completions", complete)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            address.append((asyncio.get_running_loop(), runner.addresses[0][1]))
            started.set()
            await stop.wait()
            await runner.cleanup()

        asyncio.run(main())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    started.wait(10)
    loop, port = address[0]
    try:
        yield f"http://127.0.0.1:{port}", requests
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def test_without_an_engine_doctor_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert command("doctor") == 1
    shown = capsys.readouterr().out
    assert "fix  engine: no Docker engine answers" in shown
    assert "harness" in shown


def test_doctor_finds_rows_that_no_grading_could_follow(monkeypatch, tmp_path, capsys):
    pytest.importorskip("swebench", reason="its list of log parsers is looked at")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    rows = [
        ROW | {"instance_id": "a-1", "FAIL_TO_PASS": []},
        ROW | {"instance_id": "a-2", "log_parser": "parse_log_own"},
        ROW | {"instance_id": "a-3"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command("doctor", "--dataset", path) == 1
    shown = capsys.readouterr().out
    assert "fix  rows: a-1 name no test in FAIL_TO_PASS" in shown
    assert "fix  rows: a-2 need a log parser that the harness lacks: parse_log_own" in shown
    assert "a-3" not in shown
    command("doctor", "--dataset", path, "--filter", "a-[23]$", "--slice", "1:")  # a-3
    assert "rows:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("--filter", "("), "--filter"),
        (("--slice", "3"), "is not FROM:TO"),
        (("--slice", "9:"), "leave no instance"),
    ],
)
def test_a_choice_of_instances_that_makes_no_sense(tmp_path, chosen, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    with pytest.raises(ConfigError, match=message):
        command("doctor", "--dataset", path, *chosen)


def test_run_refuses_what_makes_no_sense(tmp_path):
    words = ("run", "--dataset", "x.jsonl", "--model", "http://x", "--out", tmp_path)
    with pytest.raises(ConfigError, match="--max-turns"):
        command(*words, "--max-turns", "0")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    row = {"instance_id": ROW["instance_id"], "model_name_or_path": "one", "model_patch": ""}
    (tmp_path / "predictions.jsonl").write_text(json.dumps(row) + "\n")
    words = ("run", "--dataset", tmp_path / "rows.jsonl", *words[3:])
    with pytest.raises(ConfigError, match="predictions of one: continue with --model-name one"):
        command(*words, "--model-name", "other")


@pytest.mark.docker
def test_doctor_reap_and_pull(fixture_dir, engine, capsys):
    dataset = fixture_dir / "dataset.jsonl"
    me = current_owner()
    gone = labels("run", "grade", owner=Owner(me.boot_id, me.pid_namespace, 2**30, 1))
    image = "agentrl/swebench-fixture:agentrl-spans-1"
    for _ in range(3):  # the watchdog of an earlier test's process may be before us
        left = engine.containers.create(image, ["true"], labels=gone)
        status = command("doctor", "--dataset", dataset)
        found = capsys.readouterr().out
        assert command("reap") == 0
        reaped = capsys.readouterr().out
        if "containers: 1 have lost" in found and left.id[:12] in reaped:
            break
    assert status == 1 and "fix  containers: 1 outlived their process" in found
    assert "ok   images: all 4 are local" in found
    assert left.id[:12] in reaped
    command("doctor", "--dataset", dataset)  # 1 where the disk is short
    assert "ok   containers:" in capsys.readouterr().out
    assert command("pull", "--dataset", dataset, "--min-free-gb", "1", "--scrub") == 0
    shown = capsys.readouterr().out
    assert shown.count(": local") == 4 and shown.count(": scrubbed at ") == 4


@pytest.mark.docker
@pytest.mark.timeout(600)
def test_a_model_solves_and_an_interrupted_call_goes_on(
    fixture_dir, fixture_instances, tmp_path, capsys
):
    broken = {"agentrl__tally-1"}

    def say(messages):
        prompt = messages[0]["content"]
        name = next(
            key
            for key, each in fixture_instances.items()
            if each.problem_statement.strip() in prompt
        )
        if name in broken:
            return 400
        if messages[-1]["role"] == "user":
            return f"git apply - <<'END'\n{fixture_instances[name].patch}END\n"
        return None

    out = tmp_path / "out"
    words = ("--dataset", fixture_dir / "dataset.jsonl", "--out", out, "--max-turns", "3")
    with model_server(say) as (url, requests):
        first = ("run", *words, "--model", url, "--model-name", "scripted", "--no-grade")
        assert command(*first) == 1
        told = capsys.readouterr()
        assert "agentrl__tally-1: no prediction" in told.err
        lines = (out / "predictions.jsonl").read_text().splitlines()
        assert {json.loads(line)["instance_id"] for line in lines} == {
            "agentrl__spans-1",
            "agentrl__ledger-1",
            "agentrl__gauge-1",
        }
        assert {tool["function"]["name"] for tool in requests[0]["tools"]} == {"bash", "submit"}
        assert "You have 3 turns" in requests[0]["messages"][0]["content"]

        before = len(requests)
        assert command(*first, "--max-total-tokens", "0") == 1
        assert "1 instances were not started" in capsys.readouterr().err
        assert len(requests) == before

        broken.clear()
        with open(out / "predictions.jsonl", "a") as file:
            file.write('{"instance_id": "agentrl__tally-1", "model_na')  # as a kill leaves it
        (log,) = (out / "trajectories").glob("step_*")
        log.write_bytes(log.read_bytes() + b"torn")
        before = len(requests)
        assert command(*first[:-1], "--policy", "strict") == 0
        assert len({t.task_id for _, t in read_trajectories(out)}) == 4
        assert len(requests) - before == 2  # one instance, two turns
    told = capsys.readouterr().out
    assert "3 predictions come from an earlier call" in told
    assert "resolved 4 of 4 instances" in told
    rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [row.keys() for row in rows] == [
        {"instance_id", "model_name_or_path", "model_patch"}
    ] * 4
    report = json.loads((out / "scripted.run.json").read_text())
    assert report["resolved_instances"] == 4 and report["schema_version"] == 2


@pytest.mark.parametrize("handler", ["eval", "validate", "doctor", "pull", "run"])
@pytest.mark.parametrize("name", ["../../../../victim", "VICTIM"])
def test_no_row_reaches_a_folder_outside_out(tmp_path, handler, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("1")
    name = str(victim) if name == "VICTIM" else name
    out = tmp_path / "out"
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"instance_id": name, "image": "i", "patch": ""}) + "\n")
    words = {
        "eval": ["--predictions", "gold", "--out", out],
        "run": ["--model", "http://127.0.0.1:9", "--out", out],
    }
    with pytest.raises(DataError, match="line 1: instance_id"):
        command(handler, "--dataset", data, *words.get(handler, []))
    assert (victim / "precious").read_text() == "1"
    assert not out.exists()
