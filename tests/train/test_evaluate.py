import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_server import chat_server, scripted_chat
from rows_for_tests import write_rows

from agentrl.cli.main import main
from agentrl.rollout import read_trajectories
from agentrl.rollout.log import TrajectoryLog
from agentrl.types import TrajectoryError

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "examples" / "quickstart" / "run.toml")
MODEL = str(ROOT / "examples" / "quickstart" / "model")
GSM8K = str(ROOT / "examples" / "gsm8k" / "eval.toml")
FEW = ["--eval.num_tasks", "6", "--eval.samples_per_task", "4", "--eval.pass_k", "1,4"]


def evaluate(capsys, *arguments: str) -> dict:
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_avg_and_pass_at_k_of_a_model(capsys, tmp_path):
    result = evaluate(capsys, RUN, *FEW, "--out", str(tmp_path))
    assert (result["num_tasks"], result["num_samples"], result["num_failed"]) == (6, 24, 0)
    assert 0 < result["avg@4"]["value"] < 1, "the warm start guesses about half the time"
    assert result["pass^4"]["value"] <= result["avg@4"]["value"] and "pass^1" not in result
    assert result["avg@4"]["value"] == result["pass@1"]["value"] < result["pass@4"]["value"]
    for name in ("avg@4", "pass@4"):
        estimate = result[name]
        assert 0 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1
    assert json.loads((tmp_path / "eval.json").read_text()) == result
    rewards = [t.reward for _, t in read_trajectories(tmp_path)]
    assert sum(rewards) / 24 == pytest.approx(result["avg@4"]["value"])
    assert evaluate(capsys, RUN, *FEW) == result, "the same seed gives the same result"


def test_a_table_for_people(capsys):
    assert main(["eval", RUN, "--eval.num_tasks", "3"]) == 0
    shown = capsys.readouterr().out
    assert "avg@1" in shown and "3 tasks" in shown


@pytest.mark.parametrize("parse_tool_calls", [True, False])
def test_a_chat_server_is_evaluated_through_the_same_episodes(capsys, tmp_path, parse_tool_calls):
    with chat_server(MODEL, parse_tool_calls=parse_tool_calls) as url:
        result = evaluate(
            capsys,
            *(RUN, "--inference.backend", "openai", "--inference.urls", url),
            *("--eval.num_tasks", "8", "--eval.temperature", "0"),
            *("--out", str(tmp_path / "chat")),
        )
    greedy = evaluate(capsys, RUN, "--eval.num_tasks", "8", "--eval.temperature", "0")
    assert result["num_failed"] == 0
    assert result["avg@1"] == greedy["avg@1"], "greedy answers do not depend on the way there"
    (_, first), *_ = read_trajectories(tmp_path / "chat")
    assert first.info["prompt_tokens"] > first.num_sampled_tokens > 0, "what a suite counts"


def test_a_chat_server_samples_its_own_way_unless_told(capsys):
    bodies: list[dict] = []
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens")
    told = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 7}
    overrides = [str(part) for key, value in told.items() for part in (f"--eval.{key}", value)]
    with chat_server(MODEL, parse_tool_calls=True, bodies=bodies) as url:
        served = [RUN, "--inference.backend", "openai", "--inference.urls", url]
        evaluate(capsys, *served, "--eval.num_tasks", "1")
        assert {key for body in bodies for key in keys if key in body} == {"max_tokens"}
        bodies.clear()
        evaluate(
            capsys,
            *(*served, "--eval.num_tasks", "2", *overrides, "--eval.seed", "3"),
            *("--eval.samples_per_task", "2"),
        )
    assert all({key: body[key] for key in told} == told for body in bodies)
    assert len({body["seed"] for body in bodies}) == len(bodies) >= 4


def test_evaluation_samples_as_the_models_authors_do_and_says_so(capsys, tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "model")
    few = [RUN, "--model.path", str(model), "--eval.num_tasks", "6"]
    assert main(["eval", *few, "--json"]) == 0
    assert "generation_config" not in capsys.readouterr().err
    own = json.loads((model / "generation_config.json").read_text())
    authors = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 1}
    (model / "generation_config.json").write_text(json.dumps(own | authors))
    assert main(["eval", *few, "--json"]) == 0
    shown = capsys.readouterr()
    assert (
        "eval samples with temperature 0.6, top_p 0.95, top_k 1, as generation_config.json says; "
        "override: eval.temperature, eval.top_p, eval.top_k"
    ) in " ".join(shown.err.split())
    greedy = evaluate(capsys, *few, "--eval.temperature", "0")
    assert json.loads(shown.out)["avg@1"] == greedy["avg@1"], "of one token only one is sampled"
    free = evaluate(capsys, *few, "--eval.temperature", "1", "--eval.top_k", "-1")
    again = evaluate(capsys, *few, "--eval.temperature", "1", "--eval.top_k", "-1")
    assert free == again


def test_a_server_that_is_not_there_is_one_line_before_anything_is_played(capsys, tmp_path):
    arguments = ["--inference.backend", "openai", "--inference.urls", "http://127.0.0.1:9"]
    arguments += ["--inference.retry_for_s", "0.5", "--out", str(tmp_path / "out")]
    assert main(["eval", RUN, *arguments]) != 0
    out, error = capsys.readouterr()
    (line,) = [line for line in error.splitlines() if line.startswith("agentrl: error: ")]
    assert "http://127.0.0.1:9/v1/: no server answers" in line and "avg@" not in out


def test_a_token_server_that_is_not_there_is_one_line_too(capsys, monkeypatch):
    monkeypatch.setattr("agentrl.train.evaluate.SERVERS_WAIT_S", 0.5)
    words = ["--inference.backend", "vllm", "--inference.urls", "http://127.0.0.1:9"]
    assert main(["eval", RUN, *words]) != 0
    shown = capsys.readouterr()
    assert "http://127.0.0.1:9" in shown.err and "is vLLM running there" in shown.err
    assert "avg@" not in shown.out


@pytest.mark.slow
def test_gsm8k_end_to_end(capsys, data_dir):
    result = evaluate(
        capsys,
        *(GSM8K, "--env.config.source", str(data_dir / "gsm8k"), "--eval.num_tasks", "24"),
        *("--rollout.max_turn_tokens", "16"),
    )
    assert (result["num_tasks"], result["num_failed"]) == (24, 0)
    assert result["avg@1"]["value"] <= 0.2, "a model of this size knows no word problem"


def test_rollouts_are_kept_with_metrics_and_a_report_that_shows_tokens(capsys, tmp_path):
    out = tmp_path / "out"
    few = ["--eval.num_tasks", "3", "--eval.samples_per_task", "2"]
    assert main(["rollout", RUN, *few, "--out", str(out)]) == 0
    assert "6 episodes of 3 tasks" in capsys.readouterr().out
    assert len(list(read_trajectories(out))) == 6
    assert (out / "metrics.jsonl").read_text().count("\n") == 1
    assert "\\u003c|im_start|>" in (out / "report.html").read_text()
    assert main(["rollout", RUN, *few, "--out", str(out)]) == 2, "nothing is overwritten"
    assert "already holds" in capsys.readouterr().err
    killed = tmp_path / "killed"
    killed.mkdir()
    shutil.copy(out / "config.toml", killed)
    TrajectoryLog(killed).append(0, [t for _, t in read_trajectories(out)][:4])
    assert main(["rollout", RUN, *few, "--out", str(killed), "--resume"]) == 0
    assert played(killed) == played(out)
    assert (killed / "metrics.jsonl").read_text().count("\n") == 1


def test_a_training_run_is_no_folder_to_go_on_in(capsys, tmp_path):
    assert main(["eval", RUN, *FEW, "--out", str(tmp_path)]) == 0
    log = tmp_path / "trajectories"
    (log / "step_000000.msgpack.zst").rename(log / "step_000003.msgpack.zst")
    for command in ("eval", "rollout"):
        assert main([command, RUN, *FEW, "--out", str(tmp_path), "--resume"]) == 2
        assert "holds a training run" in capsys.readouterr().err
    assert (log / "step_000003.msgpack.zst").exists(), "it would have been deleted"


def played(folder: Path) -> dict[str, tuple]:
    """Returns the tokens and the reward of each episode."""
    return {
        t.trajectory_id: (t.reward, [row.token_ids for row in t.branches])
        for _, t in read_trajectories(folder)
    }


def test_an_evaluation_that_is_there_is_not_played_again(capsys, tmp_path):
    folder = str(tmp_path / "e")
    first = evaluate(capsys, RUN, *FEW, "--out", folder)
    before = played(tmp_path / "e")
    assert main(["eval", RUN, *FEW, "--out", folder]) == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert main(["eval", RUN, *FEW, "--out", folder, "--resume", "--eval.temperature", "0.5"]) == 2
    assert "eval.temperature differ" in capsys.readouterr().err
    assert main(["eval", RUN, *FEW, "--resume"]) == 2
    assert "give --out DIR" in capsys.readouterr().err
    assert evaluate(capsys, RUN, *FEW, "--out", folder, "--resume") == first
    assert played(tmp_path / "e") == before
    # More tasks: only those are played.
    more = evaluate(capsys, RUN, *FEW, "--out", folder, "--resume", "--eval.num_tasks", "8")
    assert more["num_samples"] == 32
    assert before.items() <= played(tmp_path / "e").items()


@pytest.mark.parametrize("concurrent", [2, 64])
def test_a_limit_of_tokens_ends_an_evaluation_which_resume_completes(
    capsys, caplog, tmp_path, concurrent
):
    whole = evaluate(capsys, RUN, *FEW, "--out", str(tmp_path / "whole"))
    few, folder = [*FEW, "--rollout.max_concurrent", str(concurrent)], str(tmp_path / "e")
    part = evaluate(capsys, RUN, *few, "--out", folder, "--eval.max_total_tokens", "1")
    assert part["num_samples"] == 4, "a task that was begun is played whole"
    assert "20 episodes were not played" in caplog.text and "--resume" in caplog.text
    assert evaluate(capsys, RUN, *few, "--out", folder, "--resume") == whole


def test_shards_make_one_evaluation(capsys, tmp_path):
    whole = evaluate(capsys, RUN, *FEW, "--out", str(tmp_path / "whole"))
    parts = tmp_path / "parts"
    counts = [
        evaluate(capsys, RUN, *FEW, "--out", str(parts), "--shard", f"{number}/4")["num_samples"]
        for number in (1, 2, 3, 4)
    ]
    assert counts == [8, 8, 4, 4]
    assert evaluate(capsys, RUN, *FEW, "--out", str(parts), "--resume") == whole
    assert played(parts).keys() == played(tmp_path / "whole").keys()
    for wrong in ("0/2", "3/2", "two"):
        assert main(["eval", RUN, "--out", str(parts), "--shard", wrong]) == 2
        assert "write 1/3, 2/3 and 3/3" in capsys.readouterr().err


def test_failed_episodes_are_played_again_and_a_torn_record_is_cut(capsys, tmp_path):
    folder = tmp_path / "e"
    first = evaluate(capsys, RUN, *FEW, "--out", str(folder))
    trajectories = [t for _, t in read_trajectories(folder)]
    for trajectory, code in zip(
        trajectories, ("unavailable", "turn_timeout", "env_error"), strict=False
    ):
        trajectory.error = TrajectoryError("step", code, "planted")
    shutil.rmtree(folder / "trajectories")
    TrajectoryLog(folder).append(0, trajectories[:-2])
    (log,) = (folder / "trajectories").glob("step_*")
    log.write_bytes(log.read_bytes()[:-7])  # a kill in the middle of a record
    again = evaluate(capsys, RUN, *FEW, "--out", str(folder), "--resume")
    assert again["errors"] == {"env_error": 1}, "what failed for good stays"
    assert again["num_samples"] == first["num_samples"]
    same = {t.trajectory_id: t.reward for t in trajectories[3:]}
    assert same.items() <= {i: reward for i, (reward, _) in played(folder).items()}.items()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_kills", "reward"),
    [(8, []), (2, ["--reward.functions", "math", "--env.config.report_reference", "true"])],
    ids=["own", "functions"],
)
def test_a_killed_evaluation_goes_on_where_it_stopped(capsys, tmp_path, num_kills, reward):
    """After many SIGKILLs each episode is on disk once, and the result is the undisturbed one."""
    size = [
        *("--eval.num_tasks", "32", "--eval.samples_per_task", "4"),
        *("--rollout.max_concurrent", "8"),
    ]
    undisturbed = evaluate(capsys, RUN, *size, *reward, "--out", str(tmp_path / "whole"))
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "agentrl", "eval", RUN, *size, *reward, "--out", str(folder)]
    kills = 0
    while not (folder / "eval.json").exists():
        process = subprocess.Popen(
            [*command, "--json", *(["--resume"] if (folder / "config.toml").exists() else [])],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        before = log_bytes(folder)
        # Killed once it wrote something new, at another moment each time.
        while kills < num_kills and process.poll() is None and log_bytes(folder) <= before:
            time.sleep(0.01)
        if kills < num_kills:
            # So early that a fast machine still has episodes to play after the last kill.
            time.sleep(0.02 * (kills % 4))
            process.kill()
        _, said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said.decode()[-1500:]
        kills += process.returncode != 0
    assert kills == num_kills
    assert json.loads((folder / "eval.json").read_text()) == undisturbed
    assert played(folder) == played(tmp_path / "whole")


def log_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("trajectories/step_*"))


def test_two_evaluations_of_the_same_tasks_are_compared(capsys, tmp_path):
    cold, hot = tmp_path / "cold", tmp_path / "hot"
    evaluate(capsys, RUN, *FEW, "--out", str(cold), "--eval.temperature", "0")
    evaluate(capsys, RUN, *FEW, "--out", str(hot), "--eval.temperature", "1.2")
    assert main(["compare", str(cold), str(hot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tasks"] == 6 and found["low"] <= found["value"] <= found["high"]
    assert found["value"] == pytest.approx(found["second"] - found["first"])
    assert main(["compare", str(cold), str(hot), "--difference", "0.01"]) == 0
    assert "one of 0.01 needs " in capsys.readouterr().out
    assert main(["compare", str(cold), str(hot), "--difference", "0"]) == 2
    capsys.readouterr()
    assert main(["compare", str(cold), str(cold)]) == 0
    shown = capsys.readouterr().out
    assert "the same mean reward in both" in shown and "better" not in shown
    evaluate(capsys, RUN, *FEW, "--out", str(tmp_path / "one"), "--eval.num_tasks", "1")
    assert main(["compare", str(cold), str(tmp_path / "one")]) == 2
    assert "1 tasks in common" in capsys.readouterr().err


def test_regrading_needs_no_playing_and_shows_what_changed(capsys, tmp_path):
    folder = tmp_path / "e"
    reported = ["--env.config.report_reference", "true"]
    evaluate(capsys, RUN, *FEW, *reported, "--out", str(folder))
    before = played(folder)
    # The same rule by another way: nothing changes.
    assert main(["regrade", str(folder), "--reward.functions", "math", "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["changed"] == [] and same["after"] == same["before"]
    rule = tmp_path / "rules.py"
    rule.write_text("def always(text, reference):\n    return 1.0\n")
    assert main(["regrade", str(folder), "--reward.functions", f"{rule}:always", "--json"]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed["after"] == 1.0
    assert {each["trajectory_id"] for each in changed["changed"]} == {
        i for i, (reward, _) in before.items() if reward != 1.0
    }
    assert json.loads((folder / "regrade.json").read_text()) == changed
    assert played(folder) == before, "the old verdicts stay"
    assert main(["regrade", str(folder)]) == 2
    assert "--reward.functions NAME" in capsys.readouterr().err
    assert main(["regrade", str(tmp_path)]) == 2
    assert "agentrl eval --out" in capsys.readouterr().err


CODE_TESTS = json.dumps(
    {"fn_name": "add", "inputs": [[1, 2], [3, 2], [0, 5]], "outputs": [3, 5, 5]}
)
CODE_ANSWERS = ["return a + b", "return a * b", "return a + b if a != 1 else 0"]
"""Right, wrong, and right in two of three tests."""


def code_answer(body: dict) -> dict:
    """Answers the n-th question with the n-th of `CODE_ANSWERS`, in a circle."""
    number = int(body["messages"][-1]["content"].split()[1])
    said = CODE_ANSWERS[number % len(CODE_ANSWERS)]
    return {"content": f"```python\ndef add(a, b):\n    {said}\n```"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "function", "rule"),
    [
        ("math", "math", "def rule(text, reference):\n    return float('####' in text)"),
        ("search", "em", "def rule(text, reference):\n    return 1.0"),
        ("code", "code", None),
    ],
)
def test_grading_again_equals_playing_again(capsys, tmp_path, monkeypatch, what, function, rule):
    """Grades by one rule, then by another: verdicts equal those of an evaluation with that rule."""
    monkeypatch.chdir(ROOT)
    few = ["--eval.num_tasks", "12", "--env.config.report_reference", "true"]
    with scripted_chat(code_answer, []) as url:
        if what == "code":
            rows = ({"question": f"Task {n} : add", "answer": CODE_TESTS} for n in range(12))
            write_rows(tmp_path / "test.jsonl", rows)
            command = [RUN, *few, "--inference.backend", "openai", "--inference.urls", url]
            command += ["--env.config", json.dumps(CODE_CONFIG | {"source": str(tmp_path)})]
        else:
            run = {"math": "quickstart", "search": "search"}[what]
            command = [str(ROOT / "examples" / run / "run.toml"), *few]
        own = ["--reward.functions", function]
        evaluate(capsys, *command, *own, "--out", str(tmp_path / "first"))
        if rule is None:
            other = [*own, "--reward.options.code.partial", "true"]
        else:
            (tmp_path / "rules.py").write_text(rule)
            other = ["--reward.functions", f"{tmp_path / 'rules.py'}:rule"]
        evaluate(capsys, *command, *other, "--out", str(tmp_path / "second"))
    rewards = [
        {t.trajectory_id: t.reward for _, t in read_trajectories(tmp_path / name)}
        for name in ("first", "second")
    ]
    for start, end, arguments in (("first", "second", other), ("second", "first", own)):
        before, after = rewards if start == "first" else rewards[::-1]
        if what == "code" and end == "first":
            arguments = [*own, "--reward.options.code.partial", "false"]
        assert main(["regrade", str(tmp_path / start), *arguments, "--json"]) == 0
        changed = {
            each["trajectory_id"]: each["after"]
            for each in json.loads(capsys.readouterr().out)["changed"]
        }
        assert before | changed == pytest.approx(after)
        assert set(changed) == {i for i in before if before[i] != pytest.approx(after[i])}
    if what == "code":
        assert sorted(rewards[0].values()) == [0.0] * 8 + [1.0] * 4
        assert sum(value == pytest.approx(2 / 3) for value in rewards[1].values()) == 4
    else:
        assert rewards[0] != rewards[1], "the rules do not differ here"


CODE_CONFIG = {"report_reference": True, "equivalence": "literal", "instruction": ""}
