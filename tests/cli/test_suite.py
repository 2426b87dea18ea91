import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl import api
from agentrl.cli.main import main
from agentrl.cli.suite import load_suite
from agentrl.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
SUITE = """
run = "run.toml"
[[model]]
name = "start"
[[model]]
name = "greedy"
eval.temperature = 0
[[model]]
name = "hot"
eval.temperature = 1.5
[[benchmark]]
name = "one"
env.config.digits = 2
eval.num_tasks = {tasks}
eval.samples_per_task = 2
[[benchmark]]
name = "two_short"
rollout.max_turns = 1
eval.num_tasks = {tasks}
[[benchmark]]
name = "sums"
env.config.operators = "+"
eval.num_tasks = {tasks}
[[benchmark]]
name = "train"
eval.split = "train"
eval.num_tasks = {tasks}
"""


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    run = (QUICKSTART / "run.toml").read_text().replace('"model"', f'"{QUICKSTART / "model"}"')
    (folder / "run.toml").write_text(run)
    (folder / "suite.toml").write_text(text)
    return folder / "suite.toml"


def untimed(result: dict) -> dict:
    return json.loads(json.dumps(result), object_hook=_without_seconds)


def _without_seconds(each: dict) -> dict:
    return {key: value for key, value in each.items() if key not in ("seconds", "folder")}


@pytest.mark.slow
def test_a_suite_is_played_once_and_every_cell_equals_an_evaluation(tmp_path, capsys, monkeypatch):
    text = SUITE.format(tasks=3).split('[[model]]\nname = "hot"')[0]
    text += "[[benchmark]]" + SUITE.format(tasks=3).split("[[benchmark]]")[1]
    text += '[[benchmark]]\nname = "sums"\nenv.config.operators = "+"\neval.num_tasks = 3\n'
    suite, out = write(tmp_path / "suite", text), tmp_path / "out"
    assert main(["suite", str(suite), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(c["model"], c["benchmark"], c["num_samples"]) for c in result["cells"]] == [
        ("start", "one", 6),
        ("start", "sums", 3),
        ("greedy", "one", 6),
        ("greedy", "sums", 3),
    ]
    cell = result["cells"][0]
    alone = api.evaluate(load_suite(suite).cells["start", "one"])
    assert cell["avg@2"] == alone.to_json()["avg@2"]
    sampled = sum(t.num_sampled_tokens for t in alone.trajectories)
    read = sum(turn.start for t in alone.trajectories for turn in t.turns)
    assert (cell["tokens_read"], cell["tokens_sampled"]) == (read, sampled)
    assert [row["benchmark"] for row in result["comparisons"]] == ["one", "sums"]

    monkeypatch.setattr(api, "play", lambda *_, **__: pytest.fail("a cell is played again"))
    assert main(["suite", str(suite), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "| model | one (avg@2) | sums (avg@1) |" in shown
    assert shown == (out / "suite.md").read_text()
    suite.write_text(text.replace("samples_per_task = 2", "samples_per_task = 1"))
    monkeypatch.undo()
    assert main(["suite", str(suite), "--out", str(out)]) == 2
    assert "holds another evaluation; eval.samples_per_task differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('name = "one"', 'name = "../one"', "names are of letters"),
        ('name = "greedy"', 'name = "start"', "two [[model]] are named 'start'"),
        ("eval.split", "eval.spilt", "benchmark train: eval.spilt: unknown key"),
        ("[[model]]", "[[modell]]", "unknown key modell"),
        (
            "eval.temperature = 0\n",
            "prices = { read = 1 }\n",
            "model greedy, benchmark one: prices",
        ),
        ('run = "run.toml"', 'run = "none.toml"', "none.toml: no such file"),
    ],
)
def test_a_suite_that_is_wrong_is_refused_before_anything_is_played(tmp_path, before, after, said):
    path = write(tmp_path, SUITE.format(tasks=2).replace(before, after))
    with pytest.raises(ConfigError) as caught:
        load_suite(path)
    assert said in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_suite_that_is_killed_twice_ends_complete_and_equal(tmp_path):
    suite = write(tmp_path / "suite", SUITE.format(tasks=16))

    def start(out: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "agentrl", "suite", str(suite), "--out", str(out)]
        return subprocess.Popen(command, start_new_session=True)

    assert start(tmp_path / "whole").wait() == 0
    for number in (3, 8):
        process = start(tmp_path / "killed")
        while len(list((tmp_path / "killed").glob("*/*/config.toml"))) < number:
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "killed" / "suite.json").exists()
    assert start(tmp_path / "killed").wait() == 0
    whole, killed = (
        json.loads((tmp_path / name / "suite.json").read_text()) for name in ("whole", "killed")
    )
    assert len(whole["cells"]) == 12
    assert untimed(killed) == untimed(whole)
    print((tmp_path / "killed" / "suite.md").read_text())
