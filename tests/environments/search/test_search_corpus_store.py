"""Passages: how corpora are read, and how they stand on disk."""

import json
import tempfile
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from rows_for_tests import write_rows

from agentrl.errors import DataError
from agentrl_search import passages as passages_module
from agentrl_search.corpus import Passage, read_corpus, split_contents
from agentrl_search.passages import Passages, PassageWriter

ROWS = [
    {"id": 7, "contents": '"Oslo"\nOslo is a city.'},
    {"_id": "b", "title": "Rome", "text": "Rome is a city."},
    {"text": "No title, no id."},
]
SQUAD = {
    "data": [
        {
            "title": "Big_Town",
            "paragraphs": [{"context": "First.", "qas": []}, {"context": "Second.", "qas": []}],
        }
    ]
}
EXPECTED = [
    Passage("7", "Oslo", "Oslo is a city."),
    Passage("b", "Rome", "Rome is a city."),
    Passage("rows.jsonl:3", "", "No title, no id."),
]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_rows_of_every_shape_become_passages(tmp_path):
    path = write(tmp_path / "rows.jsonl", "\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    assert list(read_corpus(path)) == EXPECTED


def test_parquet_is_streamed_in_order(tmp_path):
    table = pyarrow.table({"id": list(range(3000)), "text": [f"text {i}" for i in range(3000)]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    read = list(read_corpus(tmp_path / "rows.parquet"))
    assert read == [Passage(str(i), "", f"text {i}") for i in range(3000)]


def test_a_folder_holds_text_and_squad_files_too(tmp_path):
    long = "word " * 150
    write(tmp_path / "a" / "notes.md", f"One.\n\nTwo,\nstill two.\n\n\n{long}\n\n{long}")
    write(tmp_path / "squad.json", json.dumps(SQUAD))
    write(tmp_path / "ignored.csv", "a,b")
    read = list(read_corpus(tmp_path))
    assert [passage.id for passage in read] == [
        "a/notes.md#1", "a/notes.md#2", "Big_Town/0", "Big_Town/1",
    ]  # fmt: skip
    assert read[0].text.startswith("One.\n\nTwo,\nstill two.\n\nword word")
    assert read[2] == Passage("Big_Town/0", "Big Town", "First.")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.jsonl", '{"text": "a"}\nnot json', "line 2: not JSON"),
        ("c.jsonl", '{"text": "a"}\n[1]', "line 2: a list"),
        ("c.jsonl", '{"body": "a"}', "line 1: a passage needs a column 'text' or 'contents'"),
        ("c.jsonl", '{"text": 5}', "needs a column 'text'"),
        ("c.jsonl", "", "contains no passages"),
        ("c.json", "{}", "not in SQuAD's layout"),
        ("c.parquet", "not parquet", "cannot be read as parquet"),
        ("c.csv", "a,b", "neither .jsonl nor .parquet"),
    ],
)
def test_a_broken_corpus_names_the_place(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        list(read_corpus(write(tmp_path / name, text)))


@given(title=st.text(min_size=1).filter(lambda t: "\n" not in t), text=st.text())
def test_contents_can_be_split_again(title, text):
    assert split_contents(Passage("", title, text).contents) == (title, text)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def add(directory: Path, num_passages: int, passages: list[Passage]) -> int:
    writer = PassageWriter(directory, num_passages, None, words=False)
    try:
        for passage in passages:
            writer.add(passage)
        writer.check()
        writer.commit()
    finally:
        writer.close()
    return num_passages + len(passages)


@settings(max_examples=20, deadline=None)
@given(
    passages=st.lists(
        st.builds(Passage, texts, texts, texts), min_size=1, unique_by=lambda p: p.id
    ),
    cut=st.integers(min_value=1),
    hash_of=st.sampled_from([passages_module._hash, len]),  # different ids may have one hash
)
def test_the_store_returns_what_was_written_in_two_parts(passages, cut, hash_of):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages_module, "_hash", hash_of)
        directory = Path(name)
        add(directory, add(directory, 0, passages[:cut]), passages[cut:])
        store = Passages(directory, len(passages), None)
        assert [store.read(row) for row in range(len(passages))] == passages
        assert [store.find(passage.id) for passage in passages] == passages
        assert store.find("an id that is too long to be drawn above") is None


def test_what_an_interrupted_addition_left_is_cut_off(tmp_path):
    first, lost, second = (Passage(str(i), "", f"text {i}" * 5) for i in range(3))
    add(tmp_path, 0, [first])
    add(tmp_path, 1, [lost])  # and its index.json was never written
    add(tmp_path, 1, [second])
    store = Passages(tmp_path, 2, None)
    assert [store.read(0), store.read(1), store.find("1")] == [first, second, None]


def test_repeated_ids_are_refused_within_and_across_parts(tmp_path):
    add(tmp_path, 0, [Passage("a", "", "one")])
    for names in (["b", "b"], ["b", "a"]):
        with pytest.raises(DataError, match=f"have the id '{names[1]}'"):
            add(tmp_path, 1, [Passage(name, "", "text") for name in names])
    assert Passages(tmp_path, 1, None).find("b") is None


def test_a_repeated_id_is_found_long_before_the_end(tmp_path):
    writer = PassageWriter(tmp_path, 0, None, words=False)
    with pytest.raises(DataError, match="two passages have the id 'p3'"):
        for number in range(1_000_000):
            writer.add(Passage("p3" if number == 7 else f"p{number}", "", "text"))
    assert writer.num_passages <= 1024
    writer.close()


def test_passages_without_a_text_are_left_out_and_counted(tmp_path, caplog):
    rows = [{"text": "one"}, {"text": ""}, {"contents": " \n"}, {"text": "two"}]
    path = write_rows(tmp_path / "corpus.jsonl", rows)
    assert [passage.text for passage in read_corpus(path)] == ["one", "two"]
    assert "skipped 2 passages without text" in caplog.text
