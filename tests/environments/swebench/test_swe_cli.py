"""`agentrl swebench doctor|pull|reap|eval`, with a scripted model behind a real chat server."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_swe_dataset import ROW

from agentrl.cli.main import main
from agentrl.env.container.engine import current_owner, labels
from agentrl.errors import ConfigError, DataError
from agentrl_swebench.cli import app

EVALUATION = Path(__file__).parents[3] / "examples" / "swebench" / "eval.toml"


@pytest.fixture(autouse=True)
def _state(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_STATE_DIR", str(tmp_path / "state"))


def command(*words):
    return app([*map(str, words)], result_action="return_value")


@contextmanager
def model_server(say):
    """A chat server; `say(messages)` gives the command to run, or None to submit."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            said = say(body["messages"])
            name = "submit" if said is None else "bash"
            arguments = json.dumps({} if said is None else {"command": said})
            function = {"name": name, "arguments": arguments}
            call = {"id": f"c{len(requests)}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            answer = {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


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


@pytest.mark.docker
def test_doctor_reap_and_pull(fixture_dir, engine, capsys):
    dataset = fixture_dir / "dataset.jsonl"
    gone = labels("run", "grade", owner=current_owner() + "0")  # which started much later
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
def test_what_agentrl_eval_played_gets_the_official_report(
    fixture_dir, fixture_instances, tmp_path, capsys
):
    def say(messages):
        prompt = messages[0]["content"]
        if messages[-1]["role"] != "user":
            return None
        instance = next(
            each for each in fixture_instances.values() if each.problem_statement.strip() in prompt
        )
        return f"git apply - <<'END'\n{instance.patch}END\n"

    dataset, out = str(fixture_dir / "dataset.jsonl"), tmp_path / "scripted"
    with model_server(say) as (url, requests):
        words = ["eval", str(EVALUATION), "--inference.urls", url, "--env.config.source", dataset]
        assert main([*words, "--env.config.grade", "false", "--out", str(out)]) == 0
    assert {tool["function"]["name"] for tool in requests[0]["tools"]} == {"bash", "submit"}
    assert "You have 50 turns" in requests[0]["messages"][0]["content"]
    words = ["--dataset", dataset, "--predictions", out, "--out", out, "--policy", "strict"]
    assert command("eval", *words) == 0
    assert "resolved 4 of 4 instances" in capsys.readouterr().out
    report = json.loads((out / "scripted.run.json").read_text())
    assert report["resolved_instances"] == 4 and report["schema_version"] == 2


@pytest.mark.docker
def test_run_plays_grades_and_goes_on(fixture_dir, fixture_instances, tmp_path, capsys):
    def say(messages):
        prompt = messages[0]["content"]
        if messages[-1]["role"] != "user":
            return None
        instance = next(
            each for each in fixture_instances.values() if each.problem_statement.strip() in prompt
        )
        return f"git apply - <<'END'\n{instance.patch}END\n"

    words = ["run", "--dataset", fixture_dir / "dataset.jsonl", "--out", tmp_path]
    words += ["--model", "some/model", "--policy", "strict", "--slice"]
    with model_server(say) as (url, requests):
        assert command(*words, "0:1", "--url", url) == 0
        assert "resolved 1 of 1 instances" in capsys.readouterr().out
        num_asked = len(requests)
        assert command(*words, "0:1", "--url", url) == 0
        assert "1 verdicts come from an earlier call" in capsys.readouterr().out
        assert len(requests) == num_asked
    report = json.loads((tmp_path / "some__model.run.json").read_text())
    assert report["resolved_instances"] == 1


def test_run_makes_no_folder_of_a_models_name(tmp_path):
    for name in ("..", "."):
        with pytest.raises(ConfigError, match="name of a folder"):
            command("run", "--dataset", "d.jsonl", "--url", "u", "--model", name, "--out", tmp_path)


@pytest.mark.parametrize("handler", ["eval", "validate", "doctor", "pull"])
@pytest.mark.parametrize("name", ["../../../../victim", "VICTIM"])
def test_no_row_reaches_a_folder_outside_out(tmp_path, handler, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("1")
    name = str(victim) if name == "VICTIM" else name
    out = tmp_path / "out"
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"instance_id": name, "image": "i", "patch": ""}) + "\n")
    words = ["--predictions", "gold", "--out", out] if handler == "eval" else []
    with pytest.raises(DataError, match="line 1: instance_id"):
        command(handler, "--dataset", data, *words)
    assert (victim / "precious").read_text() == "1"
    assert not out.exists()
