"""The attention mask of a packed row, for `agentrl.train.attention`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.attention.flex_attention import BlockMask

from agentrl.train.context import Context

WHOLE_ROW = Context()
BLOCK_SIZE = 128
"""The default block size of flex attention's kernels."""


@dataclass(slots=True, frozen=True)
class _Pieces:
    """Pieces of a row, gathered end to end."""

    index: torch.Tensor  # (M,) int64: where each of their tokens lies in the row
    borders: torch.Tensor  # (P + 1,) int32: where each piece begins; the last entry is M
    longest: int

    @classmethod
    def of(cls, spans: list[tuple[int, int]], device: torch.device) -> _Pieces:
        borders = [0, *accumulate(stop - start for start, stop in spans)]
        return cls(
            index=_sent(torch.cat([torch.arange(*span) for span in spans]), device),
            borders=_sent(torch.tensor(borders, dtype=torch.int32), device),
            longest=max(stop - start for start, stop in spans),
        )


@dataclass(slots=True, frozen=True)
class Level:
    """Pieces of queries, each of which sees all keys of its piece."""

    queries: _Pieces
    keys: _Pieces


class SegmentMask:
    """Says which keys a query of a packed row sees: those before it in its segment, `window` at
    most, and all of the segments that its own continues."""

    def __init__(
        self,
        lengths: list[int],
        window: int | None,
        device: torch.device,
        branch_ends: list[int] | None = None,
        context: Context = WHOLE_ROW,
    ) -> None:
        self.lengths = lengths
        self.context = context
        self.window = window if window is not None and window < max(lengths) else None
        self._device = device
        stops = list(accumulate(lengths))
        self.spans = list(zip([0, *stops], stops, strict=False))
        """(start, stop) of every segment."""
        self.shared = [
            (start, stop, end)
            for (start, stop), end in zip(self.spans, branch_ends or stops, strict=True)
            if end > stop
        ]
        """(start, stop, end): queries [stop, end) see all keys [start, stop). Outermost first."""

    def dense(self, length: int, device: torch.device) -> torch.Tensor | None:
        """(length, length) bool, True where a query sees a key; None for plain causal attention."""
        if self.window is None or length <= self.window:
            return None
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return causal.triu(1 - self.window)

    @functools.cached_property
    def borders(self) -> torch.Tensor:
        """(S + 1,) int32: where each segment begins; the last entry is N."""
        starts = [0, *accumulate(self.lengths)]
        return _sent(torch.tensor(starts, dtype=torch.int32), self._device)

    @functools.cached_property
    def levels(self) -> list[Level]:
        """The shared segments by how many others they continue: those of one level in one call."""
        levels: list[list[tuple[int, int, int]]] = []
        around: list[int] = []  # where the segments end that the next one continues
        for start, stop, end in self.shared:
            while around and around[-1] <= start:
                around.pop()
            if len(around) == len(levels):
                levels.append([])
            levels[len(around)].append((start, stop, end))
            around.append(end)
        return [
            Level(
                queries=_Pieces.of([(stop, end) for _, stop, end in level], self._device),
                keys=_Pieces.of([(start, stop) for start, stop, _ in level], self._device),
            )
            for level in levels
        ]

    @functools.cached_property
    def blocks(self) -> BlockMask:
        """The same as flex attention wants it: the blocks of keys that each block of queries sees.

        Nothing of the size [N, N] is built. A listed block may hold nothing that is seen: flex
        attention asks for each of its entries, but for those of the blocks that are seen whole.
        """
        ends = {start: end for start, _, end in self.shared}
        of_segment = torch.tensor([ends.get(start, stop) for start, stop in self.spans])
        total = sum(self.lengths)
        window = self.window or total
        last = of_segment.repeat_interleave(  # (N,): no later query sees it
            torch.tensor(self.lengths), output_size=total
        )
        padded = torch.nn.functional.pad(last, (0, -total % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
        key = torch.arange(0, total, BLOCK_SIZE)  # where each block begins
        query = key[:, None]
        seen = (key <= query) & (query < padded.amax(1)) & (query - key < window + BLOCK_SIZE - 1)
        whole = (
            (key < query)
            & (query + BLOCK_SIZE <= padded.amin(1))
            & (query - key < window - BLOCK_SIZE + 1)
        )
        last = _sent(last, self._device)

        def sees(batch, head, query, key):
            return (key <= query) & (query - key < window) & (query < last[key])

        return BlockMask.from_kv_blocks(
            *_listed(seen & ~whole, self._device),
            *_listed(whole, self._device),
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=sees,
            seq_lengths=(total, total),
        )


def _listed(blocks: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts the blocks of each row of (rows, columns) bool, and lists their columns first."""
    columns = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    numbers = blocks.sum(1, dtype=torch.int32)
    return _sent(numbers[None, None], device), _sent(columns.int()[None, None], device)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, which the host does not wait for."""
    return tensor.to(device, non_blocking=True)
