"""Packs the trained tokens of each trajectory into a list, to compute on and to scatter back.

Returns and GAE run over the packed list, so that tool and padding tokens cost no discount, have no
value and receive no reward. N trained tokens, J trajectories, U turns with a trained token (units).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.batch import Batch


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """The positions of the trained tokens, in the order in which each trajectory sampled them."""

    shape: tuple[int, int]  # (B, T)
    position: Tensor  # (N,) int64 into the flattened (B, T)
    trajectory: Tensor  # (N,) int64 in [0, J), ascending
    rank: Tensor  # (N,) int64: number of the trajectory's trained tokens before this one
    turn: Tensor  # (N,) int64: turn id
    unit: Tensor  # (N,) int64 in [0, U): number of the (trajectory, turn) pair, ascending
    lengths: Tensor  # (J,) int64: number of trained tokens
    row_of: Tensor  # (J,) int64: the trajectory's first row
    trajectory_of_row: Tensor  # (B,) int64 in [0, J)

    @property
    def num_trajectories(self) -> int:
        return len(self.lengths)

    def compress(self, tensor: Tensor) -> Tensor:
        """Packs (B, T) into (N,)."""
        return tensor.reshape(-1)[self.position]

    def scatter(self, packed: Tensor) -> Tensor:
        """Unpacks (N,) into (B, T), 0 where nothing is trained."""
        flat = packed.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.position, packed).view(self.shape)

    def pad(self, packed: Tensor) -> Tensor:
        """Spreads (N,) into (J, longest trajectory), 0 beyond each trajectory's end."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        padded = packed.new_zeros(self.num_trajectories, longest)
        padded[self.trajectory, self.rank] = packed
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        """Packs (J, longest trajectory) into (N,)."""
        return padded[self.trajectory, self.rank]

    def first_token_of_unit(self) -> Tensor:
        """Returns the index (U,) of each unit's first token among the packed tokens."""
        return _starts(self.unit)

    def last_token_of_unit(self) -> Tensor:
        """Returns the index (U,) of each unit's last token among the packed tokens."""
        return _ends(self.unit)

    def last_token(self) -> Tensor:
        """Returns the index, among the packed tokens, of the last token of each trajectory that has
        any."""
        return _ends(self.trajectory)


def trajectory_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns each row's trajectory, (B,) int64 in [0, J), and each trajectory's first row, (J,)
    int64."""
    rows = torch.arange(batch.num_rows, device=batch.loss_mask.device)
    if batch.trajectory_ids is None:
        return rows, rows
    ids, of_row = torch.unique(batch.trajectory_ids, return_inverse=True)
    first = torch.full((len(ids),), batch.num_rows, dtype=torch.long, device=rows.device)
    return of_row, first.scatter_reduce(0, of_row, rows, "amin")


def index_tokens(batch: Batch, mask: Tensor) -> TokenIndex:
    """Indexes the tokens where `mask` (B, T) is true.

    Raises:
        ValueError: a trajectory has several rows, and the batch has no turn ids to order them by.
    """
    rows, columns = mask.shape
    trajectory_of_row, row_of = trajectory_rows(batch)
    if batch.turn_ids is None and len(row_of) < rows:
        raise ValueError("rows that share a trajectory need Batch.turn_ids to be put in order")
    turn_ids = contiguous_turns(mask) if batch.turn_ids is None else batch.turn_ids
    position = mask.reshape(-1).nonzero().squeeze(1)
    trajectory = trajectory_of_row[position // columns] if columns else position
    turn = turn_ids.reshape(-1)[position].long()
    if len(row_of) < rows or not _ascending(trajectory):
        by_turn = torch.argsort(turn, stable=True)
        order = by_turn[torch.argsort(trajectory[by_turn], stable=True)]
        position, trajectory, turn = position[order], trajectory[order], turn[order]
    lengths = torch.bincount(trajectory, minlength=len(row_of))
    starts = lengths.cumsum(0) - lengths
    rank = torch.arange(len(position), device=position.device) - starts[trajectory]
    new_unit = torch.ones_like(trajectory, dtype=torch.bool)
    new_unit[1:] = (trajectory[1:] != trajectory[:-1]) | (turn[1:] != turn[:-1])
    return TokenIndex(
        shape=(rows, columns),
        position=position,
        trajectory=trajectory,
        rank=rank,
        turn=turn,
        unit=new_unit.long().cumsum(0) - 1,
        lengths=lengths,
        row_of=row_of,
        trajectory_of_row=trajectory_of_row,
    )


def contiguous_turns(mask: Tensor) -> Tensor:
    """Numbers each row's runs of true positions from 0. Returns (B, T) int64: the number of the run
    that a position is in or follows; 0 before the first."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return (starts.long().cumsum(1) - 1).clamp(min=0)


def suffix_sum(values: Tensor, decay: float | Tensor) -> Tensor:
    """Computes y_t = x_t + decay * y_(t+1) along dim 1, by doubling, in log2(L) passes.

    Args:
        values: (J, L).
        decay: a number, or one per row (J, 1).

    Returns:
        (J, L).
    """
    length = values.shape[1]
    result = values.clone()
    step, factor = 1, decay
    while step < length:
        result[:, :-step] = result[:, :-step] + factor * result[:, step:]
        step, factor = 2 * step, factor * factor
    return result


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns each row's mean (B, 1) of `values` (B, T) over the mask; 0 if the mask is empty."""
    count = mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask, values, 0).sum(1, keepdim=True) / count


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Returns each row's sum (B, 1) of `values` (B, T) over the mask."""
    return torch.where(mask, values, 0).sum(1, keepdim=True)


def turn_reduce(values: Tensor, mask: Tensor, turn_ids: Tensor | None, over: str) -> Tensor:
    """Returns, at every token, the mean, sum or maximum of its turn's values over the mask.

    Args:
        values: (B, T).
        mask: (B, T) bool.
        turn_ids: (B, T) int. None: contiguous runs of the mask are the turns.
        over: "mean", "sum" or "max".

    Returns:
        (B, T), 0 where the mask is 0.
    """
    turns = (contiguous_turns(mask) if turn_ids is None else turn_ids).long()
    num_turns = int(torch.where(mask, turns, 0).max()) + 1 if mask.numel() else 1
    turns = torch.where(mask, turns, 0)
    masked = torch.where(mask, values, 0)
    zeros = values.new_zeros(values.shape[0], num_turns)
    if over == "max":
        lowest = torch.where(mask, values, -torch.inf)
        reduced = torch.full_like(zeros, -torch.inf).scatter_reduce(1, turns, lowest, "amax")
    else:
        reduced = zeros.scatter_add(1, turns, masked)
        if over == "mean":
            reduced = reduced / zeros.scatter_add(1, turns, mask.to(values.dtype)).clamp(min=1)
    return torch.where(mask, reduced.gather(1, turns), 0)


def _ascending(values: Tensor) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _starts(ids: Tensor) -> Tensor:
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    return first.nonzero().squeeze(1)


def _ends(ids: Tensor) -> Tensor:
    last = torch.ones_like(ids, dtype=torch.bool)
    last[:-1] = ids[1:] != ids[:-1]
    return last.nonzero().squeeze(1)
