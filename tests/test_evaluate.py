import json
import shutil
from pathlib import Path

import pytest
from chat_server import chat_server

from agentrl.cli import main
from agentrl.rollout import read_trajectories

ROOT = Path(__file__).parents[1]
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
def test_a_chat_server_is_evaluated_through_the_same_episodes(capsys, parse_tool_calls):
    with chat_server(MODEL, parse_tool_calls=parse_tool_calls) as url:
        result = evaluate(
            capsys,
            *(RUN, "--inference.backend", "openai", "--inference.urls", url),
            *("--eval.num_tasks", "8", "--eval.temperature", "0"),
        )
    greedy = evaluate(capsys, RUN, "--eval.num_tasks", "8", "--eval.temperature", "0")
    assert result["num_failed"] == 0
    assert result["avg@1"] == greedy["avg@1"], "greedy answers do not depend on the way there"


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


def test_a_server_that_is_not_there_fails_every_sample(capsys):
    arguments = ["--inference.backend", "openai", "--inference.urls", "http://127.0.0.1:9"]
    assert main(["eval", RUN, *arguments, "--eval.num_tasks", "1", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["num_failed"] == 1 and "127.0.0.1:9" in result["first_error"]


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
