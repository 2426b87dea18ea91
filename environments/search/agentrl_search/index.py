"""Builds, extends and opens an index directory.

    index.json     description of the index; written last, atomically
    passages/      tantivy's segments, which store the passages and rank them (passages.py)
    vectors.f32    one vector per passage (dense.py)

A new index is built in a temporary directory beside its destination and moved there when complete.
An addition only appends to the files and takes effect with the new `index.json`. If it is
interrupted, the index either still works as before, or reports that the addition has to be
repeated.
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
from agentrl_search.corpus import Passage
from agentrl_search.dense import Dense, DenseWriter, make_encoder
from agentrl_search.passages import Passages, PassageWriter
from agentrl_search.retrieval import Hybrid, LocalRetriever, Ranker

Retrieval = Literal["bm25", "dense", "hybrid"]
FORMAT = 2
CHUNK = 1024
"""Passages between two reports of progress."""


class DenseInfo(msgspec.Struct, frozen=True):
    model: str
    """A model directory or an embedding server; see `make_encoder`."""
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
    """Builds an index in a new directory.

    Passages are streamed; memory use is a buffer of 256 MB plus about 30 bytes per passage.

    Args:
        stemmer: English name of the language of BM25's stemmer; None to not stem.
        model: embedding model for dense and hybrid retrieval; see `make_encoder`.
        query_prefix: text the model needs before a query.
        passage_prefix: text the model needs before a passage.
        allow_private: whether an embedding server may have a private address.
        progress: called with the number of passages so far.

    Raises:
        ConfigError: the directory is not empty, or the options contradict each other.
        DataError: a passage is invalid, an id occurs twice, or the directory cannot be written,
            as on a full disk.
    """
    if (retrieval == "bm25") != (model is None):
        raise ConfigError(
            f"retrieval '{retrieval}' "
            + ("does not use a model; leave it out" if model else "needs an embedding model")
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{directory} already exists; choose another directory, or add to the index in it"
        )
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
    """Appends passages to an index. Open retrievers do not see them until they reopen the index.

    Raises:
        DataError: there is no index, a passage is invalid, or its id is already in the index.
    """
    with _locked(directory), _writing(directory):
        return _append(passages, directory, read_info(directory), allow_private, progress)


def open_index(
    directory: Path, retrieval: Retrieval | None = None, *, allow_private: bool = False
) -> LocalRetriever:
    """Opens an index for reading. Everything except an embedding model is memory-mapped.

    Args:
        retrieval: None uses everything the index supports: hybrid if it has BM25 and vectors.

    Raises:
        ConfigError: the index does not support `retrieval`, or a package is missing.
        DataError: there is no index, or it is damaged.
    """
    info = read_info(directory)
    passages = Passages(directory / "passages", info.num_passages, info.stemmer)
    rankers: list[Ranker] = [passages] if info.bm25 and retrieval != "dense" else []
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
        supported = "bm25" if info.bm25 else "dense"
        raise ConfigError(
            f"index {directory} supports '{supported}' only, not '{retrieval}'; set retrieval to "
            f"'{supported}', or build the index for '{retrieval}'"
        )
    return LocalRetriever(passages, rankers[0] if len(rankers) == 1 else Hybrid(rankers))


def read_info(directory: Path) -> IndexInfo:
    """Reads the `index.json` of an index directory.

    Raises:
        DataError: the directory is not an index, or its format has another version.
    """
    try:
        info = msgspec.json.decode((directory / "index.json").read_bytes(), type=IndexInfo)
    except OSError as error:
        raise DataError(
            f"{directory} is not an index ({error.strerror}); build one with "
            "`agentrl search index CORPUS --out DIR`"
        ) from error
    except msgspec.DecodeError as error:
        raise DataError(f"{directory / 'index.json'} is damaged: {error}") from error
    if info.format != FORMAT:
        raise DataError(f"index {directory} has format {info.format}, not {FORMAT}; rebuild it")
    return info


def _append(
    passages: Iterable[Passage],
    directory: Path,
    info: IndexInfo,
    allow_private: bool,
    progress: Callable[[int], None],
) -> IndexInfo:
    with contextlib.ExitStack() as stack:
        store = PassageWriter(
            directory / "passages", info.num_passages, info.stemmer, words=info.bm25
        )
        stack.callback(store.close)
        vectors = None
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
            for passage in chunk:
                store.add(passage)
            if vectors is not None:
                vectors.add([passage.contents for passage in chunk])
            progress(store.num_passages)
        if store.num_passages == info.num_passages:
            raise DataError("there are no passages to index")
        store.check()
        dense = info.dense
        if vectors is not None and dense is not None:
            vectors.commit()
            dense = msgspec.structs.replace(dense, dimension=vectors.dimension)
        store.commit()
        info = msgspec.structs.replace(info, num_passages=store.num_passages, dense=dense)
        _write_info(directory, info)
    # tantivy makes some files readable by their owner only; a server may run as another user.
    mode = (directory / "index.json").stat().st_mode
    for path in (directory / "passages").glob("*"):
        path.chmod(mode)
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
            f"index {directory} cannot be written ({error}); free disk space and try again"
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
