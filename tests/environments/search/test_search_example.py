"""examples/search: its data, its demonstrations, its run file, and that its reward rises."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl_search.dialect import read_action
from agentrl_search.env import SearchEnvironment

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "search"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("torch", reason="the example makes a model with torch")
    spec = importlib.util.spec_from_file_location("make_example", EXAMPLE / "make_example.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_example"] = module
    spec.loader.exec_module(module)
    return module


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_data_is_what_its_script_makes(example):
    files, taken = example.make_data(random.Random("0/data"), 600)
    for name, rows in files.items():
        assert rows_of(EXAMPLE / name) == rows, name
    train, test = ({row["gold_ids"][0] for row in files[f"questions/{s}.jsonl"]}
                   for s in ("train", "test"))  # fmt: skip
    assert len(train) == 500 and len(test) == 100 and not train & test
    assert train | test == taken


def test_demonstrations_tell_nothing_of_the_corpus_and_begin_as_they_say(example):
    _, taken = example.make_data(random.Random("0/data"), 600)
    rng = random.Random(1)
    dialogues = [example.make_dialogue(rng, taken, example.BEGINNINGS) for _ in range(3000)]
    first = [dialogue["messages"][1]["content"] for dialogue in dialogues]
    for dialogue in dialogues:
        asked = dialogue["messages"][0]["content"]
        assert not any(name in asked for name in taken)
    actions = [read_action(text) for text in first]
    good = [
        action is not None
        and action.kind == "search"
        and action.text in dialogue["messages"][0]["content"]
        for action, dialogue in zip(actions, dialogues, strict=True)
    ]
    shares = {
        "guess": sum(a is not None and a.kind == "answer" for a in actions),
        "unreadable": sum(a is None for a in actions),
        "search": sum(good),
    }
    for beginning, count in shares.items():
        expected = example.BEGINNINGS[beginning] / 100
        assert count / 3000 == pytest.approx(expected, abs=0.04), beginning


def test_the_run_file_and_every_question_s_answer(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(EXAMPLE / "run.toml", [])
    env = SearchEnvironment(config.env.config)
    assert env.splits() == {"train": 1500, "test": 300}
    found = 0
    for split, size in env.splits().items():
        for index in range(0, size or 0, 25):
            task = env.get(split, index)
            [name] = task.metadata["gold_ids"]  # type: ignore[misc]
            [hit] = env.shared.retriever.search([str(name)], 1)[0]
            assert hit.passage.id == name and task.reference[0] in hit.passage.text  # type: ignore[index]
            found += 1
    assert found == 72
    SearchEnvironment.close_shared(env.shared)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reward_rises(tmp_path):
    from agentrl.view.tracking import read_metrics

    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "agentrl", "train", "examples/search/run.toml"]
    done = subprocess.run(
        [*command, "--run.dir", str(run_dir)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_metrics(run_dir)
    first, last = (
        {
            name: sum(row.get(name, 0.0) for row in part) / 5
            for name in ("reward/mean", "reward/format")
        }
        for part in (rows[:5], rows[-5:])
    )
    print(f"{first} -> {last}")
    assert last["reward/mean"] - first["reward/mean"] >= 0.2
    assert last["reward/format"] > first["reward/format"]
    assert rows[-1]["env/searches"] > rows[0]["env/searches"]
