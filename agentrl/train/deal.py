"""Deals out micro-batches to ranks. No torch.

Ranks of a sharded model work in lockstep: each waits in every layer of every micro-batch for all
others (they gather its weights together). So all ranks need the same number of micro-batches, and
those of one round should cost the same; equal totals over a whole batch are not enough. Therefore
the plan is made for the ranks from the start: a multiple of their number of micro-batches, each as
dear as any, and the dearest of them first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from agentrl.train.plan import plan_micro_batches

QUADRATIC_FROM = 24_000
"""Tokens of a row from which attention costs more than all the rest: parameters / (2 x hidden size
x layers), for a model of 1.7B. Larger models have about the same."""

Round = list[list[int]]
"""The bundles of every rank's micro-batch; none for a rank that has nothing to add."""


def cost(tokens: int, lengths: Sequence[int]) -> float:
    """Returns the cost of rows in a micro-batch, in tokens of a short row.

    Args:
        tokens: number of them in the micro-batch; fewer than the rows have where they share a
            prefix.
        lengths: of the rows.
    """
    return tokens + sum(length * length for length in lengths) / QUADRATIC_FROM


def deal(
    lengths: Sequence[int], costs: Sequence[float], token_budget: int, num_ranks: int
) -> list[Round]:
    """Partition bundles of samples into rounds of one micro-batch per rank.

    The result depends on nothing but the arguments. With one rank it is `plan_micro_batches`.

    Args:
        lengths: tokens of each bundle, at least 1.
        costs: of each bundle.
        token_budget: tokens per micro-batch, at least 1; a longer bundle has one of its own.
    """
    packed = plan_micro_batches(lengths, token_budget)
    if num_ranks == 1:
        return [[chosen] for chosen in packed]
    count = -(-len(packed) // num_ranks) * num_ranks
    while count <= len(lengths):
        even = _even(lengths, costs, token_budget, count)
        if even is not None:
            return _rounds(even, costs, num_ranks)
        count += -(-count // (100 * num_ranks)) * num_ranks  # by 1%
    return _rounds([[index] for index in range(len(lengths))], costs, num_ranks)


def share_of(
    rank: int, rounds: Sequence[Round], costs: Sequence[float]
) -> list[tuple[list[int], float]]:
    """A rank's micro-batches with their weights.

    Where it has none it goes through the motions on the cheapest bundle, weighted 0: a rank that
    left a forward or backward pass out would leave the others waiting.
    """
    cheapest = min(range(len(costs)), key=costs.__getitem__)
    return [(chosen, 1.0) if (chosen := each[rank]) else ([cheapest], 0.0) for each in rounds]


def _even(
    lengths: Sequence[int], costs: Sequence[float], token_budget: int, count: int
) -> list[list[int]] | None:
    """Makes exactly `count` micro-batches: the longest bundle first, each into the cheapest one
    that still has room for it. None where the budget does not allow it."""
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
    def dearest_first(chosen: list[int]) -> tuple[float, int]:
        return -sum(costs[index] for index in chosen), chosen[0]

    ordered = sorted(micro_batches, key=dearest_first)
    ordered += [[] for _ in range(-len(ordered) % num_ranks)]
    return [ordered[start : start + num_ranks] for start in range(0, len(ordered), num_ranks)]
