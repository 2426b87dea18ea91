"""Finds the common prefixes of token rows, and lays out each of them once. No torch.

Trajectories of one group share their prompt, and branches of one trajectory share its history.
Rows as a prefix tree, each of whose segments is computed once:

    row 0    S S S P P a b c                    S S S P P ─┬─ a b c
    row 1    S S S P P d e            S S S  ─┬─           └─ d e
    row 2    S S S f g h                      └─ f g h

The segments lie in a packed row in depth-first order, `SSSPP abc de fgh`, each before everything
that continues it. Whatever continues a segment therefore lies in one piece right behind it, and its
end is all that attention has to know: a query sees the keys before it whose segment it continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# A shared segment costs a kernel call more per layer, and a merge of two results at every token
# that continues it.
_MIN_SHARED_TOKENS = 16
_MIN_SHARED_FRACTION = 1 / 16


@dataclass(slots=True)
class Segment:
    """Tokens [start, stop) of each of `rows`, which agree on them."""

    rows: list[int]
    start: int
    stop: int
    parent: int
    """Index of the segment that this one continues; -1 for none."""

    def __len__(self) -> int:
        return self.stop - self.start


class SortedRows:
    """Rows in lexicographic order, in which those that share most stand side by side."""

    def __init__(self, rows: Sequence[int], token_ids: Sequence[np.ndarray]) -> None:
        """
        Args:
            rows: names of the rows.
            token_ids: of the rows, in the order of `rows`.
        """
        # As big-endian bytes, non-negative integers sort like the numbers.
        keys = [ids.astype(">u4").tobytes() for ids in token_ids]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        self.rows = [rows[index] for index in order]
        self._lengths = [len(token_ids[index]) for index in order]
        self._common = [0]  # with the row before
        for one, other in pairwise(order):
            self._common.append(_common_prefix(token_ids[one], token_ids[other]))

    def tree(self, first: int = 0, last: int | None = None) -> list[Segment]:
        """The prefix tree of rows `first` to `last`, depth first.

        A segment of several rows is left out, and its tokens stay with the rows, where it is too
        short to pay: below 16 tokens or a sixteenth of what comes after it in the longest row.
        """
        last = len(self.rows) if last is None else last
        segments: list[Segment] = []
        todo = [(first, last, 0, -1)]
        while todo:
            low, high, start, parent = todo.pop()
            longest = max(self._lengths[low:high])
            stop = min(self._common[low + 1 : high], default=longest)
            pays = stop - start >= max(_MIN_SHARED_TOKENS, _MIN_SHARED_FRACTION * (longest - stop))
            if stop > start and (pays or high - low == 1):
                segments.append(Segment(self.rows[low:high], start, stop, parent))
                start, parent = stop, len(segments) - 1
            if high - low > 1:
                apart = (row for row in range(low + 1, high) if self._common[row] == stop)
                runs = pairwise([low, *apart, high])
                todo += reversed([(*run, start, parent) for run in runs])
        return segments

    def bundles(self, token_budget: int) -> list[tuple[list[int], int]]:
        """Runs of rows whose trees have at most `token_budget` tokens, or one row; with those."""
        found, first = [], 0
        while first < len(self.rows):
            last, tokens = len(self.rows), num_tokens(self.tree(first))
            if tokens > token_budget:
                last, tokens = first + 1, self._lengths[first]
                while last < len(self.rows):
                    with_next = num_tokens(self.tree(first, last + 1))
                    if with_next > token_budget:
                        break
                    last, tokens = last + 1, with_next
            found.append((self.rows[first:last], tokens))
            first = last
        return found


def num_tokens(tree: list[Segment]) -> int:
    return sum(map(len, tree))


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
