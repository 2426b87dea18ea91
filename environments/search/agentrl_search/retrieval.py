"""Local and remote retrievers, which return the passages that match a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.errors import EnvError
from agentrl_search.corpus import Passage, split_contents
from agentrl_search.outgoing import check_url, post_json
from agentrl_search.passages import Passages

RRF_CONSTANT = 60
RRF_DEPTH = 50


@dataclass(slots=True, frozen=True)
class Hit:
    passage: Passage
    score: float
    """Higher is better. Comparable only within the results of one query."""


class Retriever(Protocol):
    """Finds passages. Has to be thread-safe."""

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Returns at most k passages per query, best first; an empty list if nothing matches.

        Raises:
            EnvError: the retriever failed.
        """
        ...

    def find(self, passage_id: str) -> Passage | None:
        """Returns the passage with this id, or None if there is none."""
        ...

    def close(self) -> None: ...


class Ranker(Protocol):
    def rank(self, queries: list[str], k: int) -> list[list[tuple[int, float]]]:
        """Returns, per query, `(row, score)` of at most k passages, best first."""
        ...


class Hybrid:
    """Reciprocal rank fusion: a passage scores the sum of 1/(60 + rank) over the rankers.

    Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
    Learning Methods", SIGIR 2009. Uses the first 50 passages of each ranker, or k if that is more.
    """

    def __init__(self, rankers: list[Ranker]) -> None:
        self._rankers = rankers

    def rank(self, queries: list[str], k: int) -> list[list[tuple[int, float]]]:
        fused: list[dict[int, float]] = [{} for _ in queries]
        for ranker in self._rankers:
            for scores, ranked in zip(fused, ranker.rank(queries, max(k, RRF_DEPTH)), strict=True):
                for rank, (row, _) in enumerate(ranked, start=1):
                    scores[row] = scores.get(row, 0.0) + 1.0 / (RRF_CONSTANT + rank)
        return [sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:k] for scores in fused]


class LocalRetriever:
    """A retriever over passages on this machine's disk."""

    def __init__(self, store: Passages, ranker: Ranker) -> None:
        self._store = store
        self._ranker = ranker

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        return [
            [Hit(self._store.read(row), score) for row, score in ranked]
            for ranked in self._ranker.rank(queries, k)
        ]

    def find(self, passage_id: str) -> Passage | None:
        return self._store.find(passage_id)

    def close(self) -> None:
        """Does nothing: the maps end with this object."""


class RemoteRetriever:
    """A retriever that queries a server with Search-R1's protocol.

        POST {"queries": [...], "topk": k, "return_scores": true}
        -> {"result": [[{"document": {"id"?, "title"?, "contents"}, "score"}]]}

    The protocol has no request for a single passage, so `find` always returns None.
    """

    def __init__(self, url: str, *, allow_private: bool = False, timeout_s: float = 10.0) -> None:
        """
        Raises:
            ConfigError: the URL is not valid, or its host has a private address that is not
                allowed.
        """
        check_url(url, allow_private=allow_private)
        self._url = url
        self._allow_private = allow_private
        self._timeout_s = timeout_s

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if not queries:
            return []
        reply = post_json(
            self._url,
            {"queries": queries, "topk": k, "return_scores": True},
            allow_private=self._allow_private,
            timeout_s=self._timeout_s,
        )
        try:
            results = reply["result"]
            if len(results) != len(queries):
                raise ValueError(f"{len(results)} results for {len(queries)} queries")
            return [[_to_hit(entry) for entry in result[:k]] for result in results]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EnvError(
                f"the answer of retriever {self._url} is not in the format of /retrieve: {error!r}"
            ) from error

    def find(self, passage_id: str) -> Passage | None:
        return None

    def close(self) -> None:
        pass


def _to_hit(entry: dict[str, Any]) -> Hit:
    document = entry["document"]
    title, text = split_contents(document["contents"])
    if not title and isinstance(document.get("title"), str):
        title = document["title"]
    return Hit(Passage(str(document.get("id", "")), title, text), float(entry.get("score", 0.0)))
