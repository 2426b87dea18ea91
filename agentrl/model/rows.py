"""Plans which samples share a forward pass, and lays them out in one row. No torch.

A micro-batch is one packed row: its samples end to end, without padding. `cu_seqlens` keeps
attention inside each segment, positions restart at 0, and everything after the backbone is computed
at trained tokens only. Two samples of 5 and 3 tokens, with trained tokens as letters:

    input_ids       . . A B . | . C D         position_ids   0 1 2 3 4 | 0 1 2
    cu_seqlens      0           5       8
    trained_index   1 2 5 6                   the hidden state at t-1 predicts the token at t
    targets         A B C D
    row_of          0 0 1 1                   these two scatter values [Q] into a matrix of trained
    column_of       0 1 0 1                   tokens only: [[A, B], [C, D]]

Samples of one group can share a common prefix (their prompt, or the history before a fork), which
then is in the row only once. Two samples of 6 tokens, the first three of which are the same:

    input_ids       . . . | A B . | . C D     position_ids   0 1 2 | 3 4 5 | 3 4 5
    cu_seqlens      0       3       6       9
    branch_ends     9         6       9       the segments that continue the first one end at 9
    trained_index   2 3 6 7                   A and B are predicted at 2 and 3, C and D at 6 and 7

The segments form a prefix tree, and each of them is computed once:

    row 0    S S S P P a b c                    S S S P P ─┬─ a b c
    row 1    S S S P P d e            S S S  ─┬─           └─ d e
    row 2    S S S f g h                      └─ f g h

They are laid out depth first: `SSS PP abc de fgh`. So all segments that continue a segment directly
follow it, and attention needs to know only where they end: a query sees the keys before it in all
segments that its own one continues.

The ranks of a sharded model work in lockstep, since they gather each layer's weights together: in
every layer of every micro-batch each rank waits for all others. So all ranks need the same number
of micro-batches, and those that they compute at the same time (a round) should cost the same; equal
totals over the whole batch are not enough. `deal` therefore makes micro-batches of about equal
costs, in a number that is divisible by that of the ranks, and sorts them by cost.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from agentrl.types import Sample, ShownImage

# A shared segment costs one more kernel call per layer, and a merge of two results at every token
# that continues it.
_MIN_SHARED_TOKENS = 16
_MIN_SHARED_FRACTION = 1 / 16

QUADRATIC_FROM = 24_000
"""Length in tokens above which attention costs more than the rest of the model: parameters / (2 x
hidden size x layers), for a model of 1.7B parameters. It is about the same for larger models."""

Round = list[list[int]]
"""For each rank the bundles of its micro-batch; an empty list for a rank without one."""


@dataclass(slots=True, frozen=True)
class SegmentOfRow:
    """A segment of a micro-batch with images, and the tokens before it in its sample."""

    token_ids: np.ndarray  # (stop,) of the sample up to the segment's end
    start: int
    """Index in `token_ids` at which the segment begins."""
    images: list[ShownImage]
    """The images in `token_ids`."""


@dataclass(slots=True, frozen=True)
class KeptIds:
    """The ids from which each of Q trained tokens was drawn by truncated sampling."""

    ids: np.ndarray
    """(M,) int64, the ids of all tokens end to end."""
    starts: np.ndarray
    """(Q + 1,) int64: index in `ids` of each token's first one; the last entry is M."""


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """R samples packed into one row of N tokens, S segments and Q trained tokens."""

    rows: np.ndarray
    """(R,) int64: index of each sample in the list given to `pack`."""
    input_ids: np.ndarray  # (N,) int64
    position_ids: np.ndarray  # (N,) int64, position of each token in its sample
    cu_seqlens: np.ndarray  # (S + 1,) int32, where each segment begins; the last entry is N
    branch_ends: np.ndarray
    """(S,) int32: where the last segment that continues each one ends, or else its own end."""
    trained_index: np.ndarray
    """(Q,) int64: position in the row of the hidden state that predicts each trained token."""
    targets: np.ndarray  # (Q,) int64, the trained tokens
    row_of: np.ndarray  # (Q,) int64 in [0, R): the sample of each trained token
    column_of: np.ndarray  # (Q,) int64: how many trained tokens precede it in its sample
    kept: KeptIds | None = None
    """None if a sample's kept ids are not known, as when tokens come from the whole vocabulary."""
    routes: np.ndarray | None = None
    """(N, routers, experts per token) int16, or a server's (N, layers * experts per token): the
    experts of each token, -1 if its router is to choose; None if all routers are."""
    shown: list[SegmentOfRow] | None = None
    """One entry per segment; None if no sample has an image."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_trained(self) -> int:
        return len(self.targets)

    @property
    def max_trained(self) -> int:
        """The most trained tokens in one sample, which is the width of the matrix of them."""
        return int(self.column_of.max()) + 1 if len(self.column_of) else 0

    @property
    def segment_lengths(self) -> list[int]:
        return np.diff(self.cu_seqlens).tolist()


# common prefixes ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Segment:
    """Tokens [start, stop) of `rows`, which are the same in each of them."""

    rows: list[int]
    start: int
    stop: int
    parent: int
    """Index of the segment that this one continues; -1 if it begins its rows."""

    def __len__(self) -> int:
        return self.stop - self.start


class SortedRows:
    """Rows in lexicographic order, so that rows with long common prefixes are neighbours."""

    def __init__(self, rows: Sequence[int], token_ids: Sequence[np.ndarray]) -> None:
        """
        Args:
            rows: the rows' indices.
            token_ids: (T,) non-negative token ids of each row, in the order of `rows`.
        """
        # The big-endian bytes of non-negative integers sort like the integers.
        keys = [ids.astype(">u4").tobytes() for ids in token_ids]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        self.rows = [rows[index] for index in order]
        self._lengths = [len(token_ids[index]) for index in order]
        self._common = [0]  # number of first tokens that a row shares with the row before
        for one, other in pairwise(order):
            self._common.append(_common_prefix(token_ids[one], token_ids[other]))

    def tree(self, first: int = 0, last: int | None = None) -> list[Segment]:
        """Returns the prefix tree of rows [first, last), depth first.

        Tokens are shared only where that pays: at least 16, and at least a sixteenth of what
        follows them in the longest row. Otherwise each row keeps its own.
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
        """Splits the rows into runs, each with the number of tokens in its tree.

        That is at most `token_budget`, unless the run is a single row.
        """
        found, first = [], 0
        while first < len(self.rows):
            last, tokens = len(self.rows), _num_tokens(self.tree(first))
            if tokens > token_budget:
                last, tokens = first + 1, self._lengths[first]
                while last < len(self.rows):
                    with_next = _num_tokens(self.tree(first, last + 1))
                    if with_next > token_budget:
                        break
                    last, tokens = last + 1, with_next
            found.append((self.rows[first:last], tokens))
            first = last
        return found


def _num_tokens(tree: list[Segment]) -> int:
    return sum(map(len, tree))


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def bundles(
    samples: Sequence[Sample], rows: Sequence[int], token_budget: int, *, share: bool
) -> list[tuple[list[int], int]]:
    """Bundles rows that belong in one micro-batch, each bundle with its number of tokens.

    With `share`, the rows of a group form a bundle as far as the budget allows, and tokens that
    they share count once. Without, each row is a bundle.
    """
    groups = _groups(samples, rows, share)
    return [bundle for group in groups for bundle in group.bundles(token_budget)]


def _groups(samples: Sequence[Sample], rows: Sequence[int], share: bool) -> list[SortedRows]:
    """Sorts the rows of each group; without `share`, each row is a group."""
    groups: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(samples[row].group_id if share else number, []).append(row)
    return [
        SortedRows(group, [_compared(samples[row]) for row in group]) for group in groups.values()
    ]


def _compared(sample: Sample) -> np.ndarray:
    """Returns the token ids for comparing rows. Placeholders of images become a hash, so that those
    of different images differ."""
    if not sample.images:
        return sample.token_ids
    ids = sample.token_ids.astype(np.int64)
    for image in sample.images:
        ids[image.start : image.end] = 2**31 + int(image.sha256[:15], 16)
    return ids


# micro-batches ------------------------------------------------------------------------------------


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Partitions samples into micro-batches of at most `token_budget` tokens.

    Best-fit decreasing: the longest sample first, each into the fullest micro-batch that still has
    room for it. A sample longer than the budget gets a micro-batch of its own. The first
    micro-batch holds the longest sample, so a run that does not fit in memory fails at its start.

    Args:
        lengths: tokens of each sample, at least 1.
        token_budget: tokens per micro-batch, at least 1.

    Returns:
        One ascending list of indices into `lengths` per micro-batch. Every index occurs once.

    Raises:
        ValueError: a length or the budget is below 1.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    if any(length < 1 for length in lengths):
        empty = next(index for index, length in enumerate(lengths) if length < 1)
        raise ValueError(f"sample {empty} has {lengths[empty]} tokens; at least 1 is needed")

    micro_batches: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (tokens left, micro-batch), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        fit = bisect_left(open_bins, (length, -1))
        if fit < len(open_bins):
            left, chosen = open_bins.pop(fit)
            micro_batches[chosen].append(index)
        else:
            left, chosen = token_budget, len(micro_batches)
            micro_batches.append([index])
        if left > length:
            insort(open_bins, (left - length, chosen))
    return [sorted(micro_batch) for micro_batch in micro_batches]


def cost(tokens: int, lengths: Sequence[int]) -> float:
    """Returns the cost of rows in a micro-batch, where one token of a short row costs 1.

    Args:
        tokens: the rows' tokens in the micro-batch; shared ones count once.
        lengths: tokens of each row.
    """
    return tokens + sum(length * length for length in lengths) / QUADRATIC_FROM


def deal(
    lengths: Sequence[int], costs: Sequence[float], token_budget: int, num_ranks: int
) -> list[Round]:
    """Partitions bundles into rounds of one micro-batch per rank, the most costly round first.

    With one rank, the micro-batches are those of `plan_micro_batches`.

    Args:
        lengths: tokens of each bundle, at least 1.
        costs: cost of each bundle, see `cost`.
        token_budget: tokens per micro-batch, at least 1; a longer bundle gets one of its own.

    Returns:
        The rounds. Every index into `lengths` occurs once.
    """
    packed = plan_micro_batches(lengths, token_budget)
    if num_ranks == 1:
        return [[chosen] for chosen in packed]
    count = -(-len(packed) // num_ranks) * num_ranks
    while count <= len(lengths):
        even = _even(lengths, costs, token_budget, count)
        if even is not None:
            return _rounds(even, costs, num_ranks)
        count += -(-count // (100 * num_ranks)) * num_ranks  # 1% more, a multiple of the ranks
    return _rounds([[index] for index in range(len(lengths))], costs, num_ranks)


def share_of(
    rank: int, rounds: Sequence[Round], costs: Sequence[float]
) -> list[tuple[list[int], float]]:
    """Returns a rank's micro-batches with their weights, which are 1 or 0.

    In a round without a micro-batch for it, the rank computes the cheapest bundle with weight 0:
    the others would wait forever for a rank that skipped a forward or backward pass.
    """
    cheapest = min(range(len(costs)), key=costs.__getitem__)
    return [(chosen, 1.0) if (chosen := each[rank]) else ([cheapest], 0.0) for each in rounds]


def _even(
    lengths: Sequence[int], costs: Sequence[float], token_budget: int, count: int
) -> list[list[int]] | None:
    """Partitions bundles into `count` micro-batches; returns None if the budget is too small.

    The longest bundle comes first, and each goes into the cheapest micro-batch with room for it.
    """
    bins: list[tuple[float, int]] = [(0.0, number) for number in range(count)]  # a heap
    members: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length, full = lengths[index], []
        while bins and tokens[bins[0][1]] and tokens[bins[0][1]] + length > token_budget:
            full.append(heapq.heappop(bins))
        if not bins:
            return None
        paid, number = heapq.heappop(bins)
        members[number].append(index)
        tokens[number] += length
        heapq.heappush(bins, (paid + costs[index], number))
        for each in full:
            heapq.heappush(bins, each)
    return [sorted(each) for each in members]


def _rounds(micro_batches: list[list[int]], costs: Sequence[float], num_ranks: int) -> list[Round]:
    """Sorts micro-batches by descending cost and cuts them into rounds; the last may be padded."""

    def costly_first(chosen: list[int]) -> tuple[float, int]:
        return -sum(costs[index] for index in chosen), chosen[0]

    ordered = sorted(micro_batches, key=costly_first)
    ordered += [[] for _ in range(-len(ordered) % num_ranks)]
    return [ordered[start : start + num_ranks] for start in range(0, len(ordered), num_ranks)]


# packed rows --------------------------------------------------------------------------------------


def pack(samples: Sequence[Sample], rows: Sequence[int], *, share: bool = False) -> MicroBatch:
    """Lays `samples[row] for row in rows` end to end.

    Args:
        share: let samples of one group share their common prefixes, where that pays.

    Raises:
        ValueError: `rows` is empty, or a sample is empty, its mask and tokens differ in length, or
            its mask trains position 0, which no hidden state predicts.
    """
    if len(rows) == 0:
        raise ValueError("a micro-batch needs at least one row")
    for row in rows:
        _require_trainable(samples[row])
    segments: list[Segment] = []
    for group in _groups(samples, rows, share):
        tree = group.tree()
        for segment in tree:
            segment.parent += len(segments) if segment.parent >= 0 else 0
        segments += tree

    starts = np.concatenate([[0], np.cumsum([len(segment) for segment in segments])])
    branch_ends = starts[1:].copy()
    for index in reversed(range(len(segments))):
        if (parent := segments[index].parent) >= 0:
            branch_ends[parent] = max(branch_ends[parent], branch_ends[index])
    place = {row: np.empty(len(samples[row]), np.int64) for row in rows}
    for segment, start in zip(segments, starts, strict=False):
        for row in segment.rows:
            place[row][segment.start : segment.stop] = np.arange(start, start + len(segment))

    trained = [np.flatnonzero(samples[row].loss_mask) for row in rows]
    parts = [
        samples[segment.rows[0]].token_ids[segment.start : segment.stop] for segment in segments
    ]
    return MicroBatch(
        rows=np.asarray(rows, np.int64),
        input_ids=np.concatenate(parts).astype(np.int64),
        position_ids=np.concatenate([np.arange(s.start, s.stop) for s in segments]),
        cu_seqlens=starts.astype(np.int32),
        branch_ends=branch_ends.astype(np.int32),
        trained_index=np.concatenate(
            [place[row][at - 1] for row, at in zip(rows, trained, strict=True)]
        ),
        targets=np.concatenate(
            [samples[row].token_ids[at] for row, at in zip(rows, trained, strict=True)]
        ).astype(np.int64),
        row_of=np.repeat(np.arange(len(rows)), [len(at) for at in trained]),
        column_of=np.concatenate([np.arange(len(at)) for at in trained]),
        kept=_kept([samples[row] for row in rows]),
        routes=_routes(samples, segments),
        shown=_shown(samples, segments) if any(samples[row].images for row in rows) else None,
    )


def _shown(samples: Sequence[Sample], segments: Sequence[Segment]) -> list[SegmentOfRow]:
    """Returns each segment with the tokens and images before it in its first sample."""
    shown = []
    for segment in segments:
        sample = samples[segment.rows[0]]
        images = [image for image in sample.images if image.start < segment.stop]
        shown.append(SegmentOfRow(sample.token_ids[: segment.stop], segment.start, images))
    return shown


def _routes(samples: Sequence[Sample], segments: Sequence[Segment]) -> np.ndarray | None:
    """Returns the experts of the packed tokens; a shared token has those of its first sample."""
    known = [
        each.routes for each in (samples[s.rows[0]] for s in segments) if each.routes is not None
    ]
    if not known:
        return None
    parts = []
    for segment in segments:
        routes = samples[segment.rows[0]].routes
        if routes is None:
            routes = np.full((segment.stop, *known[0].shape[1:]), -1, known[0].dtype)
        parts.append(routes[segment.start : segment.stop])
    return np.concatenate(parts)


def _kept(samples: Sequence[Sample]) -> KeptIds | None:
    kept: list[np.ndarray] = []
    for sample in samples:
        if sample.kept_ids is None:
            return None
        kept += sample.kept_ids
    starts = np.cumsum([0, *map(len, kept)])
    return KeptIds(np.concatenate(kept).astype(np.int64), starts) if kept else None


def _require_trainable(sample: Sample) -> None:
    name = f"trajectory {sample.trajectory_id} has a row"
    if len(sample) == 0:
        raise ValueError(f"{name} without tokens")
    if len(sample.loss_mask) != len(sample):
        raise ValueError(
            f"{name} of {len(sample)} tokens with {len(sample.loss_mask)} mask entries"
        )
    if sample.loss_mask[0]:
        raise ValueError(
            f"{name} whose first token is marked as trained; no position predicts it, so its mask "
            "must be 0"
        )
