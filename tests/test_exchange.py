import json
import os
import socket
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.evaluate.episodes import EpisodeLog, read_evaluation
from agentrl.exchange import _evaluation as evaluation_of
from agentrl.exchange import read_inspect, read_lm_eval, write_inspect
from agentrl.types import StopReason, TokenRow, Trajectory, TrajectoryError, Turn

THEIRS = os.environ.get("AGENTRL_EVAL_FORMATS_PYTHON", "")
"""Python of an environment with inspect_ai and lm-eval."""
with_theirs = pytest.mark.skipif(
    not THEIRS, reason="AGENTRL_EVAL_FORMATS_PYTHON names no Python with inspect_ai and lm-eval"
)
INSPECT_PLAYS = """
import sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ModelOutput
from inspect_ai.scorer import match
from inspect_ai.solver import solver

@solver
def says():
    async def solve(state, generate):
        answer = "4" if state.epoch == 1 else "5"
        state.output = ModelOutput.from_content("none", "ANSWER: " + answer)
        state.messages.append(ChatMessageAssistant(content="ANSWER: " + answer))
        return state
    return solve

samples = [Sample(input="2+2", target="4", id="b/c"), Sample(input="2+3", target="5", id="a")]
task = Task(dataset=samples, solver=says(), scorer=match(), epochs=2, name="sums")
eval(task, model="mockllm/model", log_dir=sys.argv[1], display="none")
"""
LM_EVAL_TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"]}
metric_list: [{metric: exact_match}]
"""


def episode(task: str, number: int, reward: float, answer: str) -> Trajectory:
    function = {"name": "add", "arguments": {"a": 1}}
    call = {"id": "c1", "type": "function", "function": function}
    said = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"Add {task}."},
        {"role": "assistant", "content": "", "reasoning": "Let me call it.", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": f"#### {answer}"},
    ]
    turns = [
        Turn(0, 5, 3, "stop", "tool_calls", message=2),
        Turn(0, 12, 4, "stop", "text", message=4, parent=0),
    ]
    return Trajectory(
        f"{task}-{number}",
        group_id=task,
        env_id="math",
        task_id=task,
        seed=number,
        branches=[TokenRow(messages=said)],
        turns=turns,
        reward=reward,
        info={"reference": "7"},
        stop_reason=StopReason.TERMINATED,
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    """Writes an evaluation of two tasks with three samples each, of which the last failed."""
    played = [
        episode(f"test/{task}", number, float(number == task), "7" if number == task else "8")
        for task in range(2)
        for number in range(3)
    ]
    played[-1].error = TrajectoryError("step", "env_error", "it broke")
    played[-1].reward = 0.0
    config = load_config({"env": {"id": "math"}, "model": {"path": "a/model"}})
    EpisodeLog(tmp_path / "kept", config).finish(played)
    return tmp_path / "kept"


def facts(trajectories: list[Trajectory]) -> list[tuple]:
    return [
        (t.trajectory_id, t.task_id, t.reward, t.error is None, t.messages) for t in trajectories
    ]


def test_a_log_of_inspect_comes_back_as_it_was(folder, capsys):
    log, back = folder.with_name("log.eval"), folder.with_name("back")
    assert main(["convert", str(folder), str(log)]) == 0
    assert main(["convert", str(log), str(back)]) == 0
    assert capsys.readouterr().out.count(": 6 episodes of 2 tasks, average 0.417") == 2
    _, before = read_evaluation(folder)
    config, after = read_evaluation(back)
    assert facts(after) == facts(before) and config.model.path == "a/model"
    assert [t.num_sampled_tokens for t in after] == [7] * 6
    assert main(["compare", str(folder), str(back), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 0.0
    assert main(["regrade", str(back), "--reward.functions", "math", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == []
    assert main(["convert", str(folder), str(log)]) == 2, "nothing is overwritten"
    assert "is there already" in capsys.readouterr().err


def test_samples_of_lm_eval_hold_the_last_answers(folder, capsys):
    log, back = folder.with_name("samples.jsonl"), folder.with_name("back")
    assert main(["convert", str(folder), str(log)]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["reward"] for line in lines] == [pytest.approx(1 / 3), 0.5]
    assert lines[1]["rewards"] == [0.0, 1.0, None]
    assert lines[0]["arguments"]["gen_args_0"]["arg_0"] == "Add.\n\nAdd test/0."
    assert main(["convert", str(log), str(back)]) == 0
    _, before = read_evaluation(folder)
    _, after = read_evaluation(back)
    assert [f[:4] for f in facts(after)] == [f[:4] for f in facts(before)]
    assert [t.messages[-1] for t in after] == [t.messages[-1] for t in before]
    capsys.readouterr()
    assert main(["regrade", str(back), "--reward.functions", "math", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == []


def test_no_secret_is_in_a_log_that_is_made_to_be_shared(folder, tmp_path):
    config = load_config(
        {
            "env": {"id": "math", "token": "SECRET-1"},
            "model": {"path": "m"},
            "inference": {"token": "SECRET-2"},
        }
    )
    _, played = read_evaluation(folder)
    write_inspect(tmp_path / "log.eval", config, evaluation_of(config, played), 0.0)
    with zipfile.ZipFile(tmp_path / "log.eval") as archive:
        text = b"".join(archive.read(name) for name in archive.namelist()).decode()
    assert "SECRET" not in text and '"task": "math"' in text


LINE = {
    "doc_id": 3,
    "doc": {"question": "2+2"},
    "target": "4",
    "arguments": [["2+2", {"until": []}]],
    "resps": [["4 "]],
    "filter": "strict-match",
    "metrics": ["exact_match", "f1"],
    "exact_match": 0.0,
    "f1": 0.5,
}


def test_a_metric_and_a_filter_are_chosen_by_name(tmp_path, capsys):
    path = tmp_path / "samples_sums_2026.jsonl"
    other = LINE | {"filter": "flexible", "exact_match": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (LINE, other)))
    for score, reward in ((None, 0.0), ("f1", 0.5), ("exact_match,flexible", 1.0)):
        config, (played,) = read_lm_eval(path, score)
        assert (played.reward, played.task_id) == (reward, "3")
        assert config.env.id == "sums_2026"
        assert played.messages[0]["content"] == "2+2"
    assert "--score takes f1,strict-match" in capsys.readouterr().err
    for text, said in (
        ("{", ":1: not JSON"),
        (json.dumps(LINE | {"exact_match": "x"}), "not a number: x"),
        (json.dumps({"doc_id": 1}), "no arguments, filter"),
        ("", "no samples"),
    ):
        path.write_text(text)
        assert main(["convert", str(path), str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err
    path.write_text(json.dumps(LINE))
    assert main(["convert", str(path), str(tmp_path / "out"), "--score", "acc"]) == 2
    assert "has exact_match,strict-match" in capsys.readouterr().err


def test_lines_of_the_harness_are_read_whatever_they_hold(tmp_path, capsys):
    """It writes texts as they are, several answers with one value, and ids of the data set."""
    path = tmp_path / "samples_sums.jsonl"
    first = LINE | {"doc": {"id": "same"}, "target": "4\u2028\x85"}
    first |= {"resps": [["4", "5", "5"]], "filtered_resps": ["5"], "exact_match": 1.0}
    other = LINE | {"doc": {"id": "same"}, "doc_id": 4, "exact_match": float("nan")}
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in (first, other)]
    path.write_text("".join(lines), "utf-8")
    config, played = read_lm_eval(path, "exact_match")
    assert [(t.task_id, t.reward, t.error is None) for t in played] == [
        ("3", 1.0, True),
        ("4", 0.0, False),
    ]
    assert played[0].messages[-1]["content"] == "5"
    assert (config.eval.num_tasks, config.eval.samples_per_task) == (2, 1)
    assert "1 tasks have several answers" in capsys.readouterr().err


def test_what_a_chat_server_counted_is_kept_and_a_cut_answer_is_told(folder, tmp_path):
    config, played = read_evaluation(folder)
    played[0].info["prompt_tokens"] = 99
    played[0].turns[-1].finish_reason = "length"
    write_inspect(tmp_path / "log.eval", config, evaluation_of(config, played), 0.0)
    _, back = read_inspect(tmp_path / "log.eval")
    assert [t.num_read_tokens for t in back[:2]] == [99, 17]
    with zipfile.ZipFile(tmp_path / "log.eval") as archive:
        names = [name for name in archive.namelist() if name.startswith("samples/")]
        ends = [json.loads(archive.read(name))["output"]["choices"][0] for name in names]
    assert [end["stop_reason"] for end in ends[:2]] == ["max_tokens", "stop"]


@pytest.mark.parametrize("content", [b"no archive", None])
def test_what_is_no_log_is_refused_by_name(tmp_path, capsys, content):
    path = tmp_path / "log.eval"
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other.json", "{}")
    else:
        path.write_bytes(content)
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert f"{path}: not a log of inspect_ai" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def theirs(*arguments: str, **options) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(options.pop("home", "/tmp"))}
    done = subprocess.run(
        [THEIRS, *arguments], capture_output=True, text=True, env=environment, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@with_theirs
@pytest.mark.slow
def test_inspect_itself_reads_the_export_with_the_same_numbers(folder):
    log = folder.with_name("log.eval")
    assert main(["convert", str(folder), str(log)]) == 0
    dumped = json.loads(theirs("-m", "inspect_ai", "log", "dump", str(log)))
    config, played = read_evaluation(folder)
    result = evaluation_of(config, played).to_json()
    (score,) = dumped["results"]["scores"]
    average = result["avg@2"]
    assert score["metrics"]["mean"]["value"] == average["value"]
    assert score["metrics"]["stderr"]["value"] == average["standard_error"]
    assert dumped["results"]["total_samples"] == result["num_samples"] == 6
    assert dumped["results"]["completed_samples"] == 5
    read = [
        (s["id"], s["epoch"], s["scores"]["reward"]["value"] if s.get("scores") else None)
        for s in dumped["samples"]
    ]
    assert sorted(read) == sorted(
        (t.task_id, t.seed + 1, t.reward if t.error is None else None) for t in played
    )
    assert [m["role"] for m in dumped["samples"][0]["messages"]] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    script = "import sys; from inspect_ai.log import read_eval_log_sample_summaries as read\n"
    script += "print(len(read(sys.argv[1])))"
    assert theirs("-c", script, str(log)).split() == ["6"]
    with viewed(log.parent) as ask:
        (listed,) = ask("/api/logs")["files"]
        shown = ask(f"/api/logs/{quote(listed['name'], safe='')}?header-only=0")
    assert listed["task"] == "math"
    assert shown["results"]["scores"][0]["metrics"]["mean"]["value"] == average["value"]


@contextmanager
def viewed(folder: Path) -> Iterator[Callable[[str], dict]]:
    """`inspect view` over a folder, as something to ask."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [THEIRS, "-m", "inspect_ai", "view", "start", "--log-dir", str(folder)]
    command += ["--port", str(port)]

    def ask(path: str) -> dict:
        with urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return json.load(answer)

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while True:
                assert server.poll() is None, "it ended"
                with suppress(URLError):
                    ask("/api/logs")
                    break
                time.sleep(0.2)
            yield ask
        finally:
            server.terminate()


@with_theirs
@pytest.mark.slow
def test_a_log_that_inspect_wrote_is_read(tmp_path):
    theirs("-c", INSPECT_PLAYS, str(tmp_path / "logs"))
    (log,) = (tmp_path / "logs").glob("*.eval")
    config, played = read_inspect(log)
    assert [(t.task_id, t.reward) for t in played] == [
        *(("b/c", 1.0), ("b/c", 0.0), ("a", 0.0), ("a", 1.0))
    ]
    assert (config.env.id, config.model.path) == ("sums", "mockllm/model")
    assert (config.eval.num_tasks, config.eval.samples_per_task) == (2, 2)
    assert played[0].messages == [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "ANSWER: 4"},
    ]
    out = tmp_path / "out"
    assert main(["convert", str(log), str(out)]) == 0
    assert main(["regrade", str(out), "--reward.functions", "em"]) == 0
    assert json.loads((out / "regrade.json").read_text())["num_samples"] == 4


@with_theirs
@pytest.mark.slow
def test_samples_that_lm_eval_wrote_are_read(tmp_path):
    data = tmp_path / "tiny.jsonl"
    data.write_text(
        '{"question": "2+2", "answer": "4"}\n{"question": "say lol", "answer": "lol"}\n'
    )
    (tmp_path / "tiny.yaml").write_text(LM_EVAL_TASK.replace("DATA", str(data)))
    arguments = ["--model", "dummy", "--tasks", "tiny", "--include_path", str(tmp_path)]
    arguments += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    theirs("-m", "lm_eval", *arguments, home=tmp_path / "home")
    (log,) = (tmp_path / "out").rglob("samples_*.jsonl")
    (results,) = (tmp_path / "out").rglob("results_*.json")
    _, played = read_lm_eval(log)
    assert [(t.task_id, t.reward) for t in played] == [("0", 0.0), ("1", 1.0)]
    assert played[1].messages[-1]["content"] == "lol", "what its dummy model says"
    told = json.loads(results.read_text())["results"]["tiny"]["exact_match,none"]
    assert sum(t.reward for t in played) / 2 == told
