"""An index directory: built from a corpus, added to, opened.

    index.json     what the directory holds; written last, in one move
    passages.bin, ends.u64, ids-N.u64      the passages (store.py)
    bm25/          tantivy's segments (bm25.py)
    vectors.f32    one vector per passage (dense.py)

A new index is built beside its place and moved there when it is whole. An addition only appends,
and counts once `index.json` says so: interrupted, it leaves the index as it was, or one that says
that the addition must be repeated.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from agentrl.errors import ConfigError, DataError
from agentrl_search.bm25 import BM25, BM25Writer
from agentrl_search.corpus import Passage
from agentrl_search.dense import Dense, DenseWriter, make_encoder
from agentrl_search.retrieval import Hybrid, LocalRetriever, Ranker
from agentrl_search.store import PassageStore, StoreWriter, remove_old_ids

Retrieval = Literal["bm25", "dense", "hybrid"]
FORMAT = 1
CHUNK = 1024
"""Passages between two reports of progress."""


class DenseInfo(msgspec.Struct, frozen=True):
    model: str
    """A model directory or an embedding server, see `make_encoder`."""
    dimension: int | None
    query_prefix: str
    passage_prefix: str


class IndexInfo(msgspec.Struct, frozen=True):
    """The content of `index.json`."""

    format: int
    num_passages: int
    bm25: bool
    stemmer: str | None
    dense: DenseInfo | None


def build_index(
    passages: Iterable[Passage],
    directory: Path,
    *,
    retrieval: Retrieval = "bm25",
    stemmer: str | None = "english",
    model: str | None = None,
    query_prefix: str = "",
    passage_prefix: str = "",
    allow_private: bool = False,
    progress: Callable[[int], None] = lambda num_passages: None,
) -> IndexInfo:
    """Build an index in a new directory. Passages are streamed: beside a buffer of 256 MB
    memory grows by some 40 bytes each.

    Args:
        stemmer: language of BM25's stemmer, in English; None for none.
        model: for dense and hybrid retrieval, see `make_encoder`.
        query_prefix: what the model wants before a query.
        passage_prefix: what the model wants before a passage.
        allow_private: an embedding server may have a private address.
        progress: called with the number of passages so far.

    Raises:
        ConfigError: the directory holds something, or options contradict each other.
        DataError: a passage is broken, two have one id, or the directory can't be written, as on
            a full disk.
    """
    if (retrieval == "bm25") != (model is None):
        raise ConfigError(
            f"retrieval '{retrieval}' "
            + ("has no use for a model" if model else "needs a model to make vectors with")
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists; choose another place, or add to the index there")
    dense = None
    if model is not None:
        if not model.startswith(("http://", "https://")):
            model = str(Path(model).expanduser().resolve())
        dense = DenseInfo(model, None, query_prefix, passage_prefix)
    empty = IndexInfo(FORMAT, 0, retrieval != "dense", stemmer, dense)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.building")
    with _locked(directory), _writing(directory):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            info = _append(passages, partial, empty, allow_private, progress)
            partial.replace(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return info


def add_to_index(
    passages: Iterable[Passage],
    directory: Path,
    *,
    allow_private: bool = False,
    progress: Callable[[int], None] = lambda num_passages: None,
) -> IndexInfo:
    """Append passages to an index; who has it open keeps the old state until it is opened again.

    Raises:
        DataError: there is no index, a passage is broken, or an id is there already.
    """
    with _locked(directory), _writing(directory):
        return _append(passages, directory, read_info(directory), allow_private, progress)


def open_index(
    directory: Path, retrieval: Retrieval | None = None, *, allow_private: bool = False
) -> LocalRetriever:
    """Open an index for reading; everything but an encoder is memory-mapped.

    Args:
        retrieval: None takes all the index has: hybrid where it holds words and vectors.

    Raises:
        ConfigError: the index lacks what `retrieval` needs, or a package is missing.
        DataError: there is no index, or it is damaged.
    """
    info = read_info(directory)
    rankers: list[Ranker] = []
    if info.bm25 and retrieval != "dense":
        rankers.append(BM25(directory / "bm25", info.num_passages, info.stemmer))
    if info.dense is not None and retrieval != "bm25":
        rankers.append(
            Dense(
                directory / "vectors.f32",
                info.num_passages,
                info.dense.dimension or 0,
                make_encoder(info.dense.model, allow_private=allow_private),
                info.dense.query_prefix,
            )
        )
    if not rankers or (retrieval == "hybrid" and len(rankers) < 2):
        held = "words" if info.bm25 else "vectors"
        raise ConfigError(f"index {directory} holds {held} only; it can't do '{retrieval}'")
    store = PassageStore(directory, info.num_passages)
    return LocalRetriever(store, rankers[0] if len(rankers) == 1 else Hybrid(rankers))


def read_info(directory: Path) -> IndexInfo:
    """Reads what an index directory holds.

    Raises:
        DataError: it is no index, or one of another version.
    """
    try:
        info = msgspec.json.decode((directory / "index.json").read_bytes(), type=IndexInfo)
    except OSError as error:
        raise DataError(
            f"{directory} is no index ({error.strerror}); build one with "
            "`agentrl search index CORPUS --out DIR`"
        ) from error
    except msgspec.DecodeError as error:
        raise DataError(f"{directory / 'index.json'} is damaged: {error}") from error
    if info.format != FORMAT:
        raise DataError(f"index {directory} has format {info.format}, not {FORMAT}; build it again")
    return info


def _append(
    passages: Iterable[Passage],
    directory: Path,
    info: IndexInfo,
    allow_private: bool,
    progress: Callable[[int], None],
) -> IndexInfo:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(StoreWriter(directory, info.num_passages)))
        words = vectors = None
        if info.bm25:
            words = BM25Writer(directory / "bm25", info.num_passages, info.stemmer)
            stack.callback(words.close)
        if info.dense is not None:
            encoder = make_encoder(info.dense.model, allow_private=allow_private)
            vectors = DenseWriter(
                directory / "vectors.f32",
                info.num_passages,
                info.dense.dimension,
                encoder,
                info.dense.passage_prefix,
            )
            stack.callback(vectors.close)
        for chunk in _chunks(passages):
            rows = [store.add(passage) for passage in chunk]
            if words is not None:
                for row, passage in zip(rows, chunk, strict=True):
                    words.add(row, passage.contents)
            if vectors is not None:
                vectors.add([passage.contents for passage in chunk])
            progress(store.num_passages)
        if store.num_passages == info.num_passages:
            raise DataError("there is no passage to index")
        # The store checks the ids, so it must come before what can't be taken back.
        store.commit()
        dense = info.dense
        if vectors is not None and dense is not None:
            vectors.commit()
            dense = msgspec.structs.replace(dense, dimension=vectors.dimension)
        if words is not None:
            words.commit()
        info = msgspec.structs.replace(info, num_passages=store.num_passages, dense=dense)
        _write_info(directory, info)
    # tantivy makes some files for their owner alone; a server may run as another user.
    mode = (directory / "index.json").stat().st_mode
    for path in (directory / "bm25").glob("*"):
        path.chmod(mode)
    remove_old_ids(directory, info.num_passages)
    return info


def _write_info(directory: Path, info: IndexInfo) -> None:
    partial = directory / "index.json.partial"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(info)))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / "index.json")


def _chunks(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    iterator = iter(passages)
    while chunk := list(itertools.islice(iterator, CHUNK)):
        yield chunk


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"index {directory} can't be written ({error}); free space there, then repeat it"
        ) from error


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    path = directory.with_name(f".{directory.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is writing to index {directory}") from error
        yield
