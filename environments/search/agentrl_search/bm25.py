"""BM25 with tantivy: an inverted index in memory-mapped segments on disk.

Words are lower-cased, stripped of accents and, by default, stemmed as English. tantivy fixes k1 at
1.2 and b at 0.75. A query is its words, joined by OR. There is no query syntax, so an agent's query
is never interpreted as operators.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError

MAX_QUERY_WORDS = 64
"""Words of a query beyond this many are ignored."""
_HEAP_BYTES = 256 << 20


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
        raise ConfigError("BM25 needs tantivy: pip install 'agentrl-gym[search]'") from error
    return tantivy


def _schema(tantivy: Any) -> Any:
    return (
        tantivy.SchemaBuilder()
        .add_unsigned_field("row", fast=True, indexed=True)
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


class BM25Writer:
    """Adds passages to an index that already contains `num_passages`."""

    def __init__(self, directory: Path, num_passages: int, stemmer: str | None) -> None:
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

    def add(self, row: int, contents: str) -> None:
        document = self._tantivy.Document()
        document.add_unsigned("row", row)
        document.add_text("body", contents)
        with _as_os_error():
            self._writer.add_document(document)

    def commit(self) -> None:
        with _as_os_error():
            self._writer.commit()

    def close(self) -> None:
        with _as_os_error():
            self._writer.wait_merging_threads()


class BM25:
    """Ranks passages. Safe to use from several threads."""

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
