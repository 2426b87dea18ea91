import json

import pytest

from agentrl.cli.main import main
from agentrl.overlap import overlap

RUN = """
[model]
path = "model"
[env]
id = "math"
config = { source = "SOURCE" }
[eval]
split = "test"
"""
NAMES = ["Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ian", "Jo"]
THINGS = ["apples", "boats", "chairs", "drums", "eggs", "forks", "gloves", "hats", "inks", "jars"]
INSTRUCTION = "Think step by step and put the final answer in a box. "


def story(number: int) -> str:
    """Another one for every number, within the same instruction."""
    name, thing = NAMES[number % 10], THINGS[number // 10 % 10]
    return (
        f"{INSTRUCTION}{name} buys {number} {thing} on street {number * 7}, then {name} sells "
        f"{number * 3} {thing} to {NAMES[number // 7 % 10]} for {number * 11} coins."
    )


TRAIN = [(f"train/{i}", story(i)) for i in range(100, 400)]


def test_the_same_words_are_found_whatever_their_case_and_spacing():
    again = story(150).upper().replace(" ", "  \n").replace(".", " !")
    found = overlap(TRAIN, [("t/0", again), ("t/1", story(500)), ("t/2", again.lower())])
    assert found.exact == {"t/0": "train/150", "t/2": "train/150"}
    assert found.repeated == {"t/2": "t/0"}
    assert found.near == {}, "a shared instruction makes no two tasks near"
    assert (found.num_train, found.num_test) == (300, 3)


def test_a_changed_word_or_another_end_is_near():
    changed = story(222).replace("coins", "cents")
    longer = story(223) + " Why?"
    found = overlap(TRAIN, [("t/0", changed), ("t/1", longer), ("t/2", story(501))])
    assert found.exact == {}
    assert {task: other for task, (other, _) in found.near.items()} == {
        "t/0": "train/222",
        "t/1": "train/223",
    }
    share = found.near["t/0"][1]
    assert 0.8 <= share < 1
    assert overlap(TRAIN, [("t/0", changed)], threshold=share + 0.01).near == {}


def test_other_numbers_and_signs_are_other_tasks():
    found = overlap([("a", "What is 3 + 4?"), ("b", "What is 12 - 5?")], [("t", "What is 3 - 4?")])
    assert (found.exact, found.near, found.num_short) == ({}, {}, 1)


def test_prompts_without_words_are_not_the_same():
    found = overlap([("a", ""), ("b", "!")], [("t/0", ""), ("t/1", "?")])
    assert (found.exact, found.repeated, found.num_short) == ({}, {}, 2)


@pytest.fixture
def run(tmp_path):
    def write(split: str, questions: list[str]) -> None:
        rows = ({"question": text, "answer": "1"} for text in questions)
        path = tmp_path / "data" / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    (tmp_path / "data").mkdir()
    write("train", [text for _, text in TRAIN])
    write("test", [story(150), story(222).replace("coins", "cents"), story(500)])
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("SOURCE", str(tmp_path / "data")))
    return str(path)


def test_the_report_names_the_tasks_of_both_splits(run, capsys):
    assert main(["tasks", run]) == 0
    said = capsys.readouterr().out
    assert "math: 3 tasks of test, 300 of train" in said
    assert "1 have the words of a task of training: " in said and "1 are near one" in said
    assert main(["tasks", run, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["exact"]) == len(record["near"]) == 1 and record["num_short"] == 0
    assert main(["tasks", run, "--most", "10"]) == 0
    shown = capsys.readouterr()
    assert "split train of 300: its first 10 tasks are read" in shown.err
    assert "0 have the words" in shown.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--eval.split", "train"], "every task of the evaluation is trained on"),
        (["--threshold", "80"], "--threshold 80"),
        (["--played", "nowhere"], "nowhere: no config.toml"),
    ],
)
def test_what_cannot_be_compared_is_refused(run, capsys, arguments, said):
    assert main(["tasks", run, *arguments]) == 2
    assert said in capsys.readouterr().err
