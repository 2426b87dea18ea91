"""`agentrl swebench doctor|pull|reap|eval`, with a scripted model behind a real chat server."""

import json
from pathlib import Path

import pytest
from chat_server import scripted_chat
from rows_for_tests import write_rows
from swe_rows import ROW

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


@pytest.fixture
def solver(fixture_instances):
    """A chat server that solves an instance by a command and then submits; and its requests."""

    def say(body):
        prompt, name, arguments = body["messages"][0]["content"], "submit", {}
        if body["messages"][-1]["role"] == "user":
            known = fixture_instances.values()
            instance = next(each for each in known if each.problem_statement.strip() in prompt)
            name, arguments = "bash", {"command": f"git apply - <<'END'\n{instance.patch}END\n"}
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"c{len(requests)}", "type": "function", "function": function}
        return {"content": None, "tool_calls": [call]}

    requests = []
    with scripted_chat(say, requests) as url:
        yield url, requests


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
    path = write_rows(tmp_path / "rows.jsonl", rows)
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
    path = write_rows(tmp_path / "rows.jsonl", [ROW])
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
def test_what_agentrl_eval_played_gets_the_official_report(fixture_dir, solver, tmp_path, capsys):
    dataset, out = str(fixture_dir / "dataset.jsonl"), tmp_path / "scripted"
    url, requests = solver
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
def test_run_plays_grades_and_goes_on(fixture_dir, solver, tmp_path, capsys):
    words = ["run", "--dataset", fixture_dir / "dataset.jsonl", "--out", tmp_path]
    words += ["--model", "some/model", "--policy", "strict", "--slice"]
    url, requests = solver
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
    data = write_rows(tmp_path / "d.jsonl", [{"instance_id": name, "image": "i", "patch": ""}])
    words = ["--predictions", "gold", "--out", out] if handler == "eval" else []
    with pytest.raises(DataError, match="line 1: instance_id"):
        command(handler, "--dataset", data, *words)
    assert (victim / "precious").read_text() == "1"
    assert not out.exists()
