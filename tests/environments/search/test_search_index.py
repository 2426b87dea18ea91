"""Indexes: BM25 against a plain implementation, dense vectors, fusion, additions, damage."""

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_for_tests import write_rows

from agentrl.errors import ConfigError, DataError
from agentrl_search import dense, index
from agentrl_search.corpus import Passage, read_corpus
from agentrl_search.dense import Dense, DenseWriter, LocalEncoder, make_encoder
from agentrl_search.dialect import without_tags
from agentrl_search.index import add_to_index, build_index, open_index, read_info
from agentrl_search.passages import Passages, PassageWriter, _remove
from agentrl_search.retrieval import Hybrid
from agentrl_search.tasks import load_questions

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]


def passages_of(texts: list[str]) -> list[Passage]:
    return [Passage(f"p{number}", "", text) for number, text in enumerate(texts)]


def ids(hits) -> list[str]:
    return [hit.passage.id for hit in hits]


def bm25_scores(query: str, texts: list[str], k1: float = 1.2, b: float = 0.75) -> list[float]:
    """Okapi BM25 with Lucene's idf, over all texts."""
    documents = [text.split() for text in texts]
    mean_length = sum(map(len, documents)) / len(documents)
    scores = [0.0] * len(texts)
    for word in set(query.split()):
        holding = sum(word in document for document in documents)
        idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
        for number, document in enumerate(documents):
            count = document.count(word)
            norm = k1 * (1 - b + b * len(document) / mean_length)
            scores[number] += idf * count * (k1 + 1) / (count + norm) if count else 0.0
    return scores


def test_scores_are_those_of_bm25(tmp_path):
    rng = np.random.default_rng(1)
    # Below 40 words: tantivy keeps longer lengths in 8 bits only.
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 39))) for _ in range(60)]
    build_index(passages_of(texts), tmp_path / "index", stemmer=None)
    retriever = open_index(tmp_path / "index")
    for query in ("alpha", "beta delta", "zeta gamma alpha nothing"):
        expected = bm25_scores(query, texts)
        hits = retriever.search([query], 60)[0]
        assert len(hits) == sum(score > 0 for score in expected)
        for hit in hits:
            assert hit.score == pytest.approx(expected[int(hit.passage.id[1:])], rel=1e-5)
        assert [hit.score for hit in hits] == sorted((h.score for h in hits), reverse=True)


def test_words_are_stemmed_lowered_and_freed_of_accents(tmp_path):
    build_index(passages_of(["Running in a CAFÉ", "walked home"]), tmp_path / "stem")
    retriever = open_index(tmp_path / "stem")
    found = retriever.search(["cafe runs", "HOME walks", "nothing here", "", "?!"], 2)
    assert [ids(hits) for hits in found] == [["p0"], ["p1"], [], [], []]
    build_index(passages_of(["Running"]), tmp_path / "plain", stemmer=None)
    assert open_index(tmp_path / "plain").search(["runs", "running"], 1)[0] == []
    with pytest.raises(ConfigError, match="stemmer for 'klingon'"):
        build_index(passages_of(["a"]), tmp_path / "x", stemmer="klingon")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["plain", "stem"]


@pytest.fixture(scope="module")
def small_index(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small") / "index"
    build_index(passages_of([f"{a} {b}" for a in WORDS for b in WORDS]), directory)
    return open_index(directory)


@given(st.text(max_size=40), st.sampled_from(WORDS), st.text(max_size=40))
def test_no_query_breaks_the_search(small_index, before, word, after):
    hits = small_index.search([f"{before} {word} {after}"], 5)[0]
    assert word in hits[0].passage.text


@pytest.mark.parametrize(
    "query", ['alpha" OR "', "body:alpha", "alpha AND NOT beta", "(alpha", "alpha*", "+alpha -beta"]
)
def test_query_syntax_means_nothing(small_index, query):
    assert any("alpha" in hit.passage.text for hit in small_index.search([query], 3)[0])
    assert small_index.search(["row:[0 TO 9]"], 3)[0] == []


def test_huge_queries_are_answered(small_index):
    assert small_index.search(["alpha " + "word" * 100_000 + " x" * 100_000], 1)[0]


def test_additions_make_the_index_of_the_whole_and_leave_open_readers_alone(tmp_path):
    texts = [f"{a} {b} {a}" for a in WORDS for b in WORDS]
    whole = passages_of(texts)
    build_index(whole, tmp_path / "whole")
    build_index(whole[:10], tmp_path / "parts")
    before = open_index(tmp_path / "parts")
    seen: list[int] = []
    add_to_index(whole[10:30], tmp_path / "parts", progress=seen.append)
    info = add_to_index(whole[30:], tmp_path / "parts")
    assert (seen, info.num_passages) == ([30], 36)
    one, other = open_index(tmp_path / "whole"), open_index(tmp_path / "parts")
    for word in WORDS:
        hits = one.search([word], 36)[0]
        assert [(h.passage, pytest.approx(h.score)) for h in other.search([word], 36)[0]] == [
            (h.passage, h.score) for h in hits
        ]
    assert before.find("p20") is None and before.find("p3") == whole[3]
    assert all(int(hit.passage.id[1:]) < 10 for hit in before.search([" ".join(WORDS)], 36)[0])


def test_an_addition_that_fails_or_is_cut_short_can_be_repeated(tmp_path):
    directory = tmp_path / "index"
    build_index(passages_of(["alpha", "beta"]), directory)
    with pytest.raises(DataError, match="have the id 'p0'"):
        add_to_index([Passage("new", "", "gamma"), Passage("p0", "", "x")], directory)
    retriever = open_index(directory)
    assert retriever.search(["gamma"], 3)[0] == [] and retriever.find("new") is None

    # as if the process had died between tantivy's commit and index.json
    writer = PassageWriter(directory / "passages", 2, "english", words=True)
    writer.add(Passage("lost", "", "lost gamma"))
    writer.commit()
    writer.close()
    with pytest.raises(DataError, match=r"was interrupted; .*repeat it"):
        open_index(directory)
    add_to_index([Passage("new", "", "delta")], directory)
    retriever = open_index(directory)
    assert retriever.search(["gamma"], 3)[0] == []
    assert ids(retriever.search(["delta"], 3)[0]) == ["new"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def broken():
        yield Passage("a", "", "text")
        raise DataError("line 2 is broken")

    with pytest.raises(DataError, match="line 2"):
        build_index(broken(), tmp_path / "index")
    with pytest.raises(DataError, match="no passages to index"):
        build_index([], tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == [".index.lock"]
    with pytest.raises(DataError, match="is not an index"):
        open_index(tmp_path / "index")


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="choose another directory"):
        build_index(passages_of(["a"]), tmp_path / "index")


def test_two_writers_at_once_are_refused(tmp_path):
    def nested():
        with pytest.raises(ConfigError, match="another process"):
            build_index(passages_of(["b"]), tmp_path / "index")
        yield Passage("a", "", "text")

    assert build_index(nested(), tmp_path / "index").num_passages == 1


@pytest.mark.parametrize(
    ("content", "message"), [("{", "damaged"), ('{"format": 1}', "damaged"), (None, "format 99")]
)
def test_a_damaged_or_foreign_index_is_not_opened(tmp_path, content, message):
    build_index(passages_of(["a"]), tmp_path / "index")
    path = tmp_path / "index" / "index.json"
    path.write_text(content or json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(DataError, match=message):
        open_index(tmp_path / "index")


def test_an_index_whose_files_are_cut_short_is_not_opened(tmp_path, monkeypatch):
    """Not even by a byte: who reads behind the end of a mapped file is ended by a signal."""
    monkeypatch.setattr(index, "make_encoder", lambda model, allow_private: LetterEncoder())
    directory = tmp_path / "index"
    passages = passages_of([f"{a} {b}" for a in WORDS for b in WORDS])
    build_index(passages, directory, retrieval="hybrid", model="somewhere")
    listed = (".json", ".lock")  # read, not mapped
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix not in listed]
    assert "vectors.f32" in {f.name for f in files}
    assert {".idx", ".term", ".fieldnorm", ".fast", ".store"} < {f.suffix for f in files}
    for file in files:
        content = file.read_bytes()
        for size in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            with pytest.raises(DataError, match=r"damaged|cannot be opened"):
                open_index(directory)
        file.write_bytes(content)
    assert open_index(directory).search(["alpha beta"], 1)[0]


def test_an_index_can_be_read_by_others_and_opening_it_writes_nothing(tmp_path):
    directory = tmp_path / "index"
    build_index(passages_of(["alpha"]), directory)
    for lock in directory.rglob("*.lock"):
        lock.unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    retriever = open_index(directory)
    assert ids(retriever.search(["alpha"], 1)[0]) == ["p0"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    expected = (directory / "index.json").stat().st_mode
    assert {path.stat().st_mode for path in directory.rglob("*") if path.is_file()} == {expected}


# --- dense vectors -------------------------------------------------------------------------------


class LetterEncoder:
    """A vector of letter counts."""

    def encode(self, texts: list[str]) -> np.ndarray:
        counts = np.array(
            [[text.lower().count(chr(97 + i)) + 0.01 for i in range(26)] for text in texts],
            np.float32,
        )
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000), num=st.integers(1, 40), k=st.integers(1, 50), block=st.integers(1, 9)
)
def test_dense_ranking_is_exact_for_every_block_size(seed, num, k, block):
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(list("abcdef"), 8)) for _ in range(num)]
    encoder = LetterEncoder()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "BLOCK", block)
        path = Path(name) / "vectors"
        writer = DenseWriter(path, 0, None, encoder, "")
        writer.add(texts)
        writer.commit()
        writer.close()
        queries = ["abc", "fed"]
        ranked = Dense(path, num, 26, encoder, "").rank(queries, k)
    expected = encoder.encode(queries) @ encoder.encode(texts).T
    for scores, hits in zip(expected, ranked, strict=True):
        best = np.sort(scores)[::-1][:k]
        assert [score for _, score in hits] == pytest.approx(best.tolist(), abs=1e-6)
        assert all(scores[row] == pytest.approx(score, abs=1e-6) for row, score in hits)
        assert len({row for row, _ in hits}) == len(hits)


def test_fusion_adds_reciprocal_ranks():
    def fixed(*rows):
        return SimpleNamespace(rank=lambda queries, k: [[(row, 9.0) for row in rows]])

    [ranked] = Hybrid([fixed(3, 1, 2), fixed(1, 4)]).rank(["q"], 3)
    assert [row for row, _ in ranked] == [1, 3, 4]
    assert [score for _, score in ranked] == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62])


def test_dense_and_hybrid_indexes(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "make_encoder", lambda model, allow_private: LetterEncoder())
    texts = ["aaab", "bbba", "cccc"]
    for retrieval in ("dense", "hybrid"):
        directory = tmp_path / retrieval
        build_index(passages_of(texts), directory, retrieval=retrieval, model="somewhere")
        add_to_index([Passage("late", "", "zzzz")], directory)
        retriever = open_index(directory)
        found = retriever.search(["aaaaaa", "z"], 2)
        assert ids(found[0]) == ["p0", "p1"] and ids(found[1])[0] == "late"
    info = read_info(tmp_path / "hybrid")
    assert info.dense is not None and info.dense.dimension == 26 and info.bm25
    assert Path(info.dense.model).is_absolute()
    assert ids(open_index(tmp_path / "hybrid", "bm25").search(["cccc"], 3)[0]) == ["p2"]
    with pytest.raises(ConfigError, match="supports 'dense' only"):
        open_index(tmp_path / "dense", "hybrid")
    with pytest.raises(ConfigError, match="needs an embedding model"):
        build_index(passages_of(texts), tmp_path / "x", retrieval="dense")
    with pytest.raises(ConfigError, match="does not use a model"):
        build_index(passages_of(texts), tmp_path / "x", model="m")


@pytest.fixture(scope="module")
def tiny_encoder_dir(tmp_path_factory):
    """A BERT of random weights in sentence-transformers' layout."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("encoder")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (directory / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizer(str(directory / "vocab.txt"))
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(directory)
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    set_pooling(directory, "mean_tokens")
    return directory


def set_pooling(directory: Path, mode: str) -> None:
    modes = {f"pooling_mode_{each}": each == mode for each in ("mean_tokens", "cls_token", "max")}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def test_a_local_model_pools_as_its_files_say_whatever_the_padding(tiny_encoder_dir):
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["alpha beta gamma delta", "zeta", "alpha " * 200]
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder_dir)
    model = AutoModel.from_pretrained(tiny_encoder_dir).eval()
    for mode in ("mean_tokens", "cls_token"):
        set_pooling(tiny_encoder_dir, mode)
        encoded = LocalEncoder(tiny_encoder_dir).encode(texts)
        assert encoded.shape == (3, 16) and encoded.dtype == np.float32
        for text, vector in zip(texts, encoded, strict=True):  # alone, so without padding
            inputs = tokenizer(text, truncation=True, max_length=32, return_tensors="pt")
            with torch.inference_mode():
                states = model(**inputs).last_hidden_state[0]
            pooled = states.mean(0) if mode == "mean_tokens" else states[0]
            expected = (pooled / pooled.norm()).numpy()
            assert vector == pytest.approx(expected, abs=1e-5)
    set_pooling(tiny_encoder_dir, "max")
    with pytest.raises(ConfigError, match="uses the pooling max"):
        LocalEncoder(tiny_encoder_dir)
    set_pooling(tiny_encoder_dir, "mean_tokens")


def test_a_dense_index_with_a_local_model(tiny_encoder_dir, tmp_path):
    texts = [f"{a} {b}" for a in WORDS for b in WORDS if a != b]
    build_index(
        passages_of(texts), tmp_path / "index", retrieval="dense", model=str(tiny_encoder_dir)
    )
    retriever = open_index(tmp_path / "index")
    for hits, text in zip(retriever.search(texts, 1), texts, strict=True):
        assert hits[0].passage.text == text and hits[0].score == pytest.approx(1.0, abs=1e-5)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a model directory"):
        make_encoder(str(tmp_path))
    with pytest.raises(ConfigError, match="add # and the model's name"):
        make_encoder("https://192.0.2.1/v1/embeddings")


def test_recall_on_squad(data_dir, tmp_path):
    """BM25 finds the paragraph of 95% of the questions among its first three."""
    path = data_dir / "squad" / "dev-v2.0-five-articles.json"
    build_index(read_corpus(path), tmp_path / "index")
    tasks = load_questions(str(path)).tasks["train"]
    results = open_index(tmp_path / "index").search([str(task.prompt) for task in tasks], 3)
    pairs = zip(tasks, results, strict=True)
    found = [task.metadata["gold_ids"][0] in ids(hits) for task, hits in pairs]  # type: ignore[index]
    assert len(tasks) == 705 and sum(found) / len(found) > 0.94


def test_an_index_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tantivy", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl-gym\[search\]'"):
        Passages(tmp_path, 1, None)


def test_a_file_that_comes_back_does_not_keep_the_view_of_an_index(tmp_path):
    """tantivy's watching thread takes a lock in the directory while its links are deleted."""
    view = tmp_path / "view"
    view.mkdir()
    until = time.monotonic() + 0.2

    def lock_again():
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                (view / f"lock-{time.monotonic_ns()}").touch()

    thread = threading.Thread(target=lock_again)
    thread.start()
    while not any(view.iterdir()):
        pass
    _remove(view)
    thread.join()
    assert not view.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("limit", [1000, 50_000])
def test_a_disk_without_room_is_one_line_not_a_traceback(tmp_path, limit):
    rows = ({"text": f"word{n} " * 50} for n in range(3000))
    corpus = write_rows(tmp_path / "corpus.jsonl", rows)
    script = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "from agentrl.cli.main import main\n"
        f"sys.exit(main(['search', 'index', {str(corpus)!r}, '--out', {str(tmp_path / 'i')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("</infor</think>mation>", ""),
        ("<search><sea<answer>rch>x", "x"),
        ("</think</think></think>>>", ">"),
        ("a < b > c <information> d", "a < b > c  d"),
        ("<" + "</think>" * 9 + "think>", ""),
    ],
)
def test_no_tag_is_put_together_from_what_is_left_of_others(text, shown):
    assert without_tags(text) == shown


def test_tags_are_taken_out_in_linear_time():
    without_tags("</infor" * 100_000 + "</think>" + "mation>" * 100_000)
