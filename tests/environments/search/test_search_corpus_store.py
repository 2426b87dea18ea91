"""Passages: how corpora are read, and how they stand on disk."""

import json
import tempfile
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from agentrl.errors import DataError
from agentrl_search.corpus import Passage, read_corpus, split_contents
from agentrl_search.store import ENDS, PASSAGES, PassageStore, StoreWriter

ROWS = [
    {"id": 7, "contents": '"Oslo"\nOslo is a city.'},
    {"_id": "b", "title": "Rome", "text": "Rome is a city."},
    {"text": "No title, no id."},
]
SQUAD = {
    "data": [
        {
            "title": "Big_Town",
            "paragraphs": [
                {"context": "First.", "qas": []},
                {"context": "Second.", "qas": []},
            ],
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


@given(
    passages=st.lists(
        st.builds(Passage, texts, texts, texts), min_size=1, unique_by=lambda p: p.id
    ),
    cut=st.integers(min_value=1),
)
def test_the_store_returns_what_was_written_in_two_parts(passages, cut):
    cut = min(cut, len(passages))
    with tempfile.TemporaryDirectory() as name:
        directory, written = Path(name), 0
        for part in (passages[:cut], passages[cut:]):
            writer = StoreWriter(directory, written)
            assert [writer.add(p) for p in part] == list(range(written, written + len(part)))
            writer.commit()
            writer.close()
            written += len(part)
        store = PassageStore(directory, len(passages))
        assert [store.read(row) for row in range(len(store))] == passages
        assert [store.find(passage.id) for passage in passages] == passages
        assert store.find("an id that is too long to be drawn above") is None
        store.close()


def test_what_an_interrupted_addition_left_is_cut_off(tmp_path):
    first, lost, second = (Passage(str(i), "", f"text {i}" * 5) for i in range(3))
    writer = StoreWriter(tmp_path, 0)
    writer.add(first)
    writer.commit()
    writer.close()
    interrupted = StoreWriter(tmp_path, 1)
    interrupted.add(lost)
    interrupted.close()  # no commit
    writer = StoreWriter(tmp_path, 1)
    writer.add(second)
    writer.commit()
    writer.close()
    store = PassageStore(tmp_path, 2)
    assert [store.read(0), store.read(1), store.find("1")] == [first, second, None]


def test_repeated_ids_are_refused_within_and_across_parts(tmp_path):
    writer = StoreWriter(tmp_path, 0)
    writer.add(Passage("a", "", "one"))
    writer.commit()
    writer.close()
    for passages in (["b", "b"], ["b", "a"]):
        writer = StoreWriter(tmp_path, 1)
        for passage_id in passages:
            writer.add(Passage(passage_id, "", "text"))
        with pytest.raises(DataError, match=f"have the id '{passages[1]}'"):
            writer.commit()
        writer.close()


def test_equal_hashes_of_different_ids_do_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl_search.store._hash", lambda passage_id: len(passage_id))
    writer = StoreWriter(tmp_path, 0)
    passages = [Passage(name, "", name) for name in ("aa", "b", "cc", "d", "ee")]
    for passage in passages:
        writer.add(passage)
    writer.commit()
    writer.close()
    store = PassageStore(tmp_path, 5)
    assert [store.find(passage.id) for passage in passages] == passages
    assert store.find("zz") is None


@pytest.mark.parametrize("name", [PASSAGES, ENDS, "ids-1.u64"])
def test_a_damaged_store_is_not_opened(tmp_path, name):
    writer = StoreWriter(tmp_path, 0)
    writer.add(Passage("a", "", "one"))
    writer.commit()
    writer.close()
    content = (tmp_path / name).read_bytes()
    for damaged in (content[:-1], b""):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            PassageStore(tmp_path, 1)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match="damaged"):
        PassageStore(tmp_path, 1)


def test_a_repeated_id_is_found_long_before_the_end(tmp_path):
    writer = StoreWriter(tmp_path, 0)
    with pytest.raises(DataError, match="two passages have the id 'p3'"):
        for number in range(1_000_000):
            writer.add(Passage("p3" if number == 7 else f"p{number}", "", "text"))
    assert writer.num_passages <= 1024
    writer.close()


def test_passages_without_a_text_are_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": "one"}, {"text": ""}, {"contents": " \n"}, {"text": "two"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [passage.text for passage in read_corpus(path)] == ["one", "two"]
    assert "skipped 2 passages without text" in caplog.text
