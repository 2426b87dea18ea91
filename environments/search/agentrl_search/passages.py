"""Passages in a tantivy index: memory-mapped segments that store them, and rank them by BM25.

Words are lower-cased, stripped of accents and, by default, stemmed as English. tantivy fixes k1 at
1.2 and b at 0.75. A query is its words, joined by OR. There is no query syntax, so an agent's query
is never interpreted as operators.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentrl.errors import ConfigError, DataError
from agentrl_search.corpus import Passage

MAX_QUERY_WORDS = 64
"""Words of a query beyond this many are ignored."""
_HEAP_BYTES = 256 << 20
_decode = msgspec.json.Decoder(tuple[str, str, str]).decode
_encode = msgspec.json.Encoder().encode


def _remove(view: Path) -> None:
    """Deletes a folder of links; retries, because tantivy's thread may recreate its lock there."""
    for _ in range(100):
        shutil.rmtree(view, ignore_errors=True)
        if not view.exists():
            return
        time.sleep(0.01)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Turns tantivy's ValueErrors into OSErrors; it reports a full disk as a ValueError."""
    try:
        yield
    except ValueError as error:
        raise OSError(f"tantivy: {error}") from error


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError as error:
        raise ConfigError("an index needs tantivy: pip install 'agentrl-gym[search]'") from error
    return tantivy


def _schema(tantivy: Any) -> Any:
    return (
        tantivy.SchemaBuilder()
        .add_unsigned_field("row", fast=True, indexed=True)
        .add_unsigned_field("id", indexed=True)  # its hash
        .add_bytes_field("passage", stored=True)
        .add_text_field("body", tokenizer_name="words", index_option="freq")
        .build()
    )


def _analyzer(tantivy: Any, stemmer: str | None) -> Any:
    builder = (
        tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
        .filter(tantivy.Filter.remove_long(60))
        .filter(tantivy.Filter.lowercase())
        .filter(tantivy.Filter.ascii_fold())
    )
    if stemmer:
        try:
            builder = builder.filter(tantivy.Filter.stemmer(stemmer))
        except ValueError as error:
            raise ConfigError(f"tantivy has no stemmer for '{stemmer}': {error}") from error
    return builder.build()


def _hash(passage_id: str) -> int:
    digest = hashlib.blake2b(passage_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class PassageWriter:
    """Adds passages to an index that already contains `num_passages`."""

    def __init__(
        self, directory: Path, num_passages: int, stemmer: str | None, *, words: bool
    ) -> None:
        """
        Args:
            words: whether BM25 is to find the passages.
        """
        self._tantivy = _tantivy()
        directory.mkdir(exist_ok=True)
        schema = _schema(self._tantivy)
        index = self._tantivy.Index(schema, path=str(directory))
        index.register_tokenizer("words", _analyzer(self._tantivy, stemmer))
        # One thread, so that the same corpus gives the same segments and the same order of ties.
        self._writer = index.writer(heap_size=_HEAP_BYTES, num_threads=1)
        if index.searcher().num_docs > num_passages:  # left from an interrupted addition
            field_type = self._tantivy.FieldType.Unsigned
            left_over = self._tantivy.Query.range_query(schema, "row", field_type, num_passages)
            self._writer.delete_documents_by_query(left_over)
            self._writer.commit()
            index.reload()
        self._before = _Stored(self._tantivy, schema, index.searcher())
        self._words = words
        self._first = num_passages
        self._hashes = array("Q")
        self._names, self._ends = bytearray(), array("Q")
        self._next_check = 1024

    @property
    def num_passages(self) -> int:
        return self._first + len(self._hashes)

    def add(self, passage: Passage) -> None:
        """Appends a passage.

        Raises:
            DataError: two passages have the same id. Among the new ones this is checked whenever
                their number has doubled, to fail early at about twice the cost of a single check.
        """
        number = _hash(passage.id)
        if self._first and self._before.find(passage.id, number) is not None:
            raise _repeated(passage.id)
        if len(self._hashes) == self._next_check:
            self._next_check *= 2
            self.check()
        document = self._tantivy.Document()
        document.add_unsigned("row", self.num_passages)
        document.add_unsigned("id", number)
        record = _encode((passage.id, passage.title, passage.text))
        document.add_bytes("passage", record)
        if self._words:
            document.add_text("body", passage.contents)
        self._hashes.append(number)
        self._names += passage.id.encode()
        self._ends.append(len(self._names))
        with _as_os_error():
            self._writer.add_document(document)

    def check(self) -> None:
        """Checks what cannot be undone after `commit`.

        Raises:
            DataError: two of the new passages have the same id.
        """
        order = np.argsort(np.array(self._hashes, np.uint64), kind="stable")
        hashes = np.array(self._hashes, np.uint64)[order]
        for position in np.flatnonzero(hashes[1:] == hashes[:-1]):
            one, other = (self._name(int(row)) for row in order[position : position + 2])
            if one == other:
                raise _repeated(one)

    def _name(self, position: int) -> str:
        start = self._ends[position - 1] if position else 0
        return self._names[start : self._ends[position]].decode()

    def commit(self) -> None:
        with _as_os_error():
            self._writer.commit()

    def close(self) -> None:
        with _as_os_error():
            self._writer.wait_merging_threads()


def _repeated(passage_id: str) -> DataError:
    return DataError(f"two passages have the id '{passage_id}'; ids have to be unique in a corpus")


class _Stored:
    """Reads the passages of an open index."""

    def __init__(self, tantivy: Any, schema: Any, searcher: Any) -> None:
        self._tantivy, self._schema, self._searcher = tantivy, schema, searcher

    def read(self, row: int) -> Passage:
        """Returns the passage with this row number, counting from 0."""
        (passage,) = self._with("row", row)
        return passage

    def find(self, passage_id: str, number: int) -> Passage | None:
        return next((each for each in self._with("id", number) if each.id == passage_id), None)

    def _with(self, field: str, value: int) -> list[Passage]:
        query = self._tantivy.Query.term_query(self._schema, field, value)
        hits = self._searcher.search(query, limit=8, count=False).hits
        found = (self._searcher.doc(address).get_first("passage") for _, address in hits)
        return [Passage(*_decode(each)) for each in found]


class Passages:
    """Reads passages, and ranks them by BM25. Safe to use from several threads."""

    def __init__(self, directory: Path, num_passages: int, stemmer: str | None) -> None:
        """
        Raises:
            ConfigError: tantivy is not installed.
            DataError: the index cannot be read or does not contain `num_passages` passages.
        """
        self._tantivy = tantivy = _tantivy()
        self._analyzer = _analyzer(tantivy, stemmer)
        try:
            files = [path for path in directory.iterdir() if not path.name.startswith(".")]
            # tantivy writes a lock file into the directory it opens, which may be read-only. So it
            # opens a temporary directory of links, which is not needed once the segments are
            # mapped.
            view = Path(tempfile.mkdtemp(prefix="agentrl-search-"))
            try:
                for path in files:
                    (view / path.name).symlink_to(path.resolve())
                self._index = tantivy.Index.open(str(view))
                self._index.config_reader(reload_policy="manual")
                self._searcher = self._index.searcher()
            finally:
                _remove(view)
        except (OSError, ValueError) as error:
            raise DataError(f"index {directory} cannot be opened: {error}") from error
        if self._searcher.num_docs != num_passages:
            raise DataError(
                f"index {directory} contains {self._searcher.num_docs:,} passages instead of "
                f"{num_passages:,}: an addition is running or was interrupted; wait for it, or "
                "repeat it"
            )
        self._stored = _Stored(tantivy, self._index.schema, self._searcher)

    def read(self, row: int) -> Passage:
        """Returns the passage with this row number, counting from 0."""
        return self._stored.read(row)

    def find(self, passage_id: str) -> Passage | None:
        return self._stored.find(passage_id, _hash(passage_id))

    def rank(self, queries: list[str], k: int) -> list[list[tuple[int, float]]]:
        """Returns, per query, `(row, score)` of at most k passages, best first."""
        return [self._rank(query, k) for query in queries]

    def _rank(self, query: str, k: int) -> list[tuple[int, float]]:
        words = list(dict.fromkeys(self._analyzer.analyze(query)))[:MAX_QUERY_WORDS]
        if not words:
            return []
        tantivy, schema = self._tantivy, self._index.schema
        terms = [
            (tantivy.Occur.Should, tantivy.Query.term_query(schema, "body", word, "freq"))
            for word in words
        ]
        found = self._searcher.search(tantivy.Query.boolean_query(terms), limit=k, count=False)
        addresses = [address for _, address in found.hits]
        rows = self._searcher.fast_field_values("row", addresses)
        ranked = [
            (int(row), float(score)) for row, (score, _) in zip(rows, found.hits, strict=True)
        ]
        return sorted(ranked, key=lambda hit: (-hit[1], hit[0]))
