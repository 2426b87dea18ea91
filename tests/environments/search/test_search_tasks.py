"""Questions: SQuAD's layout and rows as several data sets have them; the tag dialect's parser."""

import json
import time

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from rows_for_tests import write_rows

from agentrl.errors import ConfigError, DataError
from agentrl_search.dialect import TagAction, cut_turn, is_well_formed, read_action
from agentrl_search.tasks import load_questions

CHAT = [{"role": "user", "content": "Answer. Question: who?"}]
SQUAD = {
    "data": [
        {
            "title": "Big_Town",
            "paragraphs": [
                {
                    "context": "Ann built it in 1900.",
                    "qas": [
                        {
                            "question": "Who built it?",
                            "answers": [{"text": "Ann"}, {"text": "Ann"}, {"text": "Ann B."}],
                            "is_impossible": False,
                        },
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ]
}


@pytest.mark.parametrize(
    ("row", "prompt", "golds", "metadata"),
    [
        ({"question": "q", "answer": "a"}, "q", ["a"], {}),
        ({"question": "q", "answer": ["a", "b", "a"]}, "q", ["a", "b"], {}),  # NQ-open
        ({"question": "q", "golden_answers": ["a"]}, "q", ["a"], {}),
        ({"question": "q", "answers": ["a"], "gold_ids": ["p", "r"]}, "q", ["a"],
         {"gold_ids": ["p", "r"]}),
        ({"question": "q", "answers": {"text": ["a"], "answer_start": [1]}}, "q", ["a"], {}),
        ({"question": "q", "answer": {"value": "a", "aliases": ["b"], "normalized_value": "n"}},
         "q", ["a", "b"], {}),  # TriviaQA
        ({"question": "q", "answer": "a", "supporting_facts": {"title": ["T", "U", "T"],
                                                               "sent_id": [0, 1, 2]}},
         "q", ["a"], {"gold_titles": ["T", "U"]}),  # HotpotQA
        ({"question": "q", "answer": "a", "supporting_facts": [["T", 0], ["U", 3]]},
         "q", ["a"], {"gold_titles": ["T", "U"]}),
        ({"question": "q", "prompt": CHAT,
          "reward_model": {"style": "rule", "ground_truth": {"target": ["a", "b"]}}},
         CHAT, ["a", "b"], {}),  # Search-R1
    ],
)  # fmt: skip
def test_rows_as_data_sets_have_them(tmp_path, row, prompt, golds, metadata):
    sources = [str(write_rows(tmp_path / "rows.jsonl", [row]))]
    if not isinstance(row.get("supporting_facts"), list):  # a parquet list has one type
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
        sources.append(str(tmp_path / "rows.parquet"))
    for path in sources:
        task = load_questions(path).get("train", 0)
        assert (task.prompt, task.reference, task.metadata) == (prompt, golds, metadata)


def test_squad_questions_know_their_paragraph(tmp_path):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(SQUAD))
    questions = load_questions(str(path))
    assert questions.splits() == {"train": 1}
    task = questions.get("train", 0)
    assert (task.prompt, task.reference) == ("Who built it?", ["Ann", "Ann B."])
    assert task.metadata == {"gold_ids": ["Big_Town/0"]}
    both = load_questions(str(path), unanswerable=True)
    assert both.splits() == {"train": 2} and both.get("train", 0) == task
    task = both.get("train", 1)
    assert (task.reference, task.metadata) == ([], {"unanswerable": True})


def test_sources(tmp_path):
    row = {"q": "q", "a": "a"}
    one = str(write_rows(tmp_path / "train.jsonl", [row] * 3))
    two = str(write_rows(tmp_path / "test.jsonl", [row]))
    keys = {"input_key": "q", "label_key": "a"}
    assert load_questions(str(tmp_path), **keys).splits() == {"test": 1, "train": 3}
    assert load_questions({"x": one, "y": two}, **keys).splits() == {"x": 3, "y": 1}
    assert load_questions("sample").splits() == {"train": 12}
    (tmp_path / "test.json").write_text("{}")
    with pytest.raises(DataError, match="each file name is a split"):
        load_questions(str(tmp_path), **keys)
    for source in ("owner/name", {}, "rows.csv"):
        with pytest.raises(ConfigError, match="neither 'sample' nor"):
            load_questions(source)


def test_metadata_of_a_column_as_an_object_or_its_json_text(tmp_path):
    rows = [{"question": "q", "answer": "a", "gold_ids": ["7"], "m": {"level": 2}}]
    rows.append({**rows[0], "m": '{"level": 3}'})
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    questions = load_questions(path, metadata_key="m")
    assert [questions.get("train", i).metadata for i in (0, 1)] == [
        {"level": 2, "gold_ids": ["7"]},
        {"level": 3, "gold_ids": ["7"]},
    ]
    with pytest.raises(DataError, match="no column 'n'; set metadata_key to one of: question"):
        load_questions(path, metadata_key="n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "line 1: there is no column 'answers'; set label_key to one of: q"),
        ({"question": "q", "answer": [""]}, "has to be an answer"),
        ({"question": "q", "answer": []}, "has to be an answer"),
        ({"question": "q", "answer": {"odd": 1}}, "has to be an answer"),
        ({"query": "q", "answer": "a"}, "'question' has to be a string"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "a"}, "'prompt' has to be"),
    ],
)
def test_broken_rows_name_line_and_column(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        load_questions(str(write_rows(tmp_path / "rows.jsonl", [row])))


# --- the tags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think>x</think><search> who? </search>", TagAction("search", "who?")),
        ("<answer>Ann</answer> and more <search>q</search>", TagAction("answer", "Ann")),
        ("<search>q</search><answer>a</answer>", TagAction("search", "q")),
        ("<search>open <answer>a</answer>", TagAction("answer", "a")),
        ("<search>a\nb</search>", TagAction("search", "a\nb")),
        ("</search><search>q", None),
        ("</search><search>q</search>", None),
        ("<search>a<search>b</search></search>", TagAction("search", "a<search>b")),
        ("<search>q</answer></search>", None),
        ("<answer></answer>", TagAction("answer", "")),
        ("just text", None),
    ],
)
def test_the_first_closing_tag_ends_the_turn_and_closes_its_action(text, action):
    assert read_action(text) == action


@pytest.mark.parametrize(
    ("text", "with_think", "without"),
    [
        ("<think>x</think>\n<search>q</search>", True, True),
        ("x</think><answer>a</answer> ", True, True),  # the template wrote <think>
        ("<search>q</search>", False, True),
        ("<think>x</think><search>q</search> then", True, True),  # what follows is cut off
        ("<think>x</think>so <search>q</search>", False, False),
        ("<think>x</think><search>q</search><answer>a</answer>", True, True),
        ("<think>x</think><search>q</search><information>i</information>", True, True),
        ("<think>x</think><information>i</information><search>q</search>", False, False),
        ("<think><search>q</search></think><answer>a</answer>", False, False),
        ("<think>x</think><search></search>", False, False),
        ("<think>x</think><answer>a", False, False),
        ("", False, False),
    ],
)
def test_well_formed_turns(text, with_think, without):
    assert is_well_formed(text, require_think=True) is with_think
    assert is_well_formed(text, require_think=False) is without


tags = st.sampled_from(
    [f"<{slash}{name}>" for slash in ("", "/") for name in
     ("search", "answer", "information", "think")] + ["a", " ", "<", "x\n"]
)  # fmt: skip


@given(st.lists(tags, max_size=12).map("".join))
def test_a_well_formed_turn_has_the_action_that_is_read(text):
    action = read_action(text)
    if is_well_formed(text, require_think=False):
        assert action is not None
        assert "<search>" not in action.text
    assert action == read_action(cut_turn(text)) and text.startswith(cut_turn(text))
    if action is not None:
        assert cut_turn(text).endswith(f"</{action.kind}>")
        assert f"<{action.kind}>" in text and f"</{action.kind}>" in text


def test_a_megabyte_of_tags_takes_no_time():
    started = time.perf_counter()
    for text in ("<search>" * 125_000, "<search></answer>" * 60_000, "</think>" * 125_000):
        read_action(text)
        is_well_formed(text, require_think=True)
    assert time.perf_counter() - started < 1
