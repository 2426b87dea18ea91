"""Context parallelism (`train.parallel.context`): one row on several ranks, if it is too long for
one device.

Every part of a decoder except attention treats each token by itself, so each of W ranks can hold a
slice of a micro-batch's row. Two exchanges around attention turn

    all heads of a slice's tokens   (1, heads, N / W, d)   <->   (1, heads / W, N, d)   all tokens

and between them attention is the same as on one rank, with segments and shared prefixes: Jacobs et
al., "DeepSpeed Ulysses", 2023, https://arxiv.org/abs/2309.14509. (torch's own context parallelism
passes keys around a ring, for one causal sequence, and does not support segments.)

The objective sees whole rows. So the ranks combine their log-probs, those of other ranks without
gradient; all compute the same loss, and each computes its own part of the gradient. These parts are
added up like those of ranks with different rows, so networks are sharded over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from agentrl.errors import ConfigError
from agentrl.model.lengths import rope_tables
from agentrl.model.rows import KeptIds, MicroBatch


@dataclass(slots=True, frozen=True)
class Context:
    """The ranks that hold one row together. Their numbers are consecutive, so that they are usually
    on one machine."""

    size: int = 1
    """Number of these ranks, W."""
    rank: int = 0
    """Index of this rank among them."""
    group: dist.ProcessGroup | None = None
    """None if this process holds the whole row and computes the heads of all W, one after the
    other."""


_context = Context()


def current() -> Context:
    """Returns the context of this rank."""
    return _context


def join(size: int) -> None:
    """Forms groups of `size` consecutive ranks. Every rank has to call this.

    Args:
        size: a divisor of the number of ranks.
    """
    global _context
    for first in range(0, dist.get_world_size(), size):
        group: Any = dist.new_group(list(range(first, first + size)))
        if first <= dist.get_rank() < first + size:
            _context = Context(size, dist.get_rank() - first, group)


def leave() -> None:
    """Forgets the group, so that this process computes whole rows again."""
    global _context
    _context = Context()


def of(model: nn.Module) -> Context:
    """Returns the ranks with which this rank computes a model's rows.

    For a sharded model (`agentrl.model.sharding`) this is this rank's group. Any other model, such
    as one that rank 0 checks or samples from, computes whole rows in this process alone.
    """
    return getattr(model, "row_context", Context(_context.size))


def require_position_free(config: PretrainedConfig) -> None:
    """Refuses a model whose rotary angles depend on the length of its row, since each rank sees
    only a slice of it.

    Raises:
        ConfigError: the model's angles do.
    """
    text = config.get_text_config()
    for each in rope_tables(text):
        if (kind := each.get("rope_type")) in ("dynamic", "longrope"):
            raise ConfigError(
                f"train.parallel.context = {_context.size} cannot train {text.model_type} with "
                f"rope_type '{kind}', whose angles depend on the length of the whole row; set "
                "train.parallel.context = 1"
            )


# a rank's slice of the row ------------------------------------------------------------------------


def own_part(micro: MicroBatch, context: Context) -> MicroBatch:
    """Returns this rank's slice of the row, with the trained tokens that are predicted there.

    The segments stay those of the whole row, followed by one of padding, if needed, that makes its
    length a multiple of the number of ranks. Without a group, returns `micro` itself.
    """
    if context.group is None:
        return micro
    start, stop = _bounds(micro, context)
    padding = context.size * (stop - start) - micro.num_tokens
    end = [micro.num_tokens + padding] if padding else []
    here = _is_own(micro, context)
    kept = micro.kept
    if kept is not None:
        counts = np.diff(kept.starts)
        starts = np.cumsum([0, *counts[here]])
        kept = KeptIds(kept.ids[np.repeat(here, counts)], starts)
    routes = micro.routes
    if routes is not None:
        around = ((0, padding), *[(0, 0)] * (routes.ndim - 1))
        routes = np.pad(routes, around, constant_values=-1)[start:stop]
    return replace(
        micro,
        routes=routes,
        input_ids=np.pad(micro.input_ids, (0, padding))[start:stop],
        position_ids=np.concatenate([micro.position_ids, np.arange(padding)])[start:stop],
        cu_seqlens=np.concatenate([micro.cu_seqlens, end]).astype(np.int32),
        branch_ends=np.concatenate([micro.branch_ends, end]).astype(np.int32),
        trained_index=micro.trained_index[here] - start,
        targets=micro.targets[here],
        row_of=micro.row_of[here],
        column_of=micro.column_of[here],
        kept=kept,
    )


def of_all(micro: MicroBatch, own: Tensor, context: Context) -> Tensor:
    """Combines the ranks' values of trained tokens.

    Args:
        micro: the whole row.
        own: values of the trained tokens of this rank's part, see `own_part`.

    Returns:
        (Q,) values of all trained tokens of the row. The gradient flows to `own` only.
    """
    if context.group is None:
        return own
    here = torch.from_numpy(np.flatnonzero(_is_own(micro, context)))
    here = here.to(own.device, non_blocking=True)
    values = own.new_zeros(micro.num_trained)
    values[here] = own.detach()
    dist.all_reduce(values, group=context.group)
    return values.index_put((here,), own)


def _bounds(micro: MicroBatch, context: Context) -> tuple[int, int]:
    size = -(-micro.num_tokens // context.size)
    return context.rank * size, (context.rank + 1) * size


def _is_own(micro: MicroBatch, context: Context) -> np.ndarray:
    """Returns (Q,) bool: whether each trained token is predicted in this rank's slice."""
    start, stop = _bounds(micro, context)
    return (start <= micro.trained_index) & (micro.trained_index < stop)


# attention ----------------------------------------------------------------------------------------


def attend_by_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Context,
) -> Tensor:
    """Computes attention of a slice's tokens over the whole row.

    Args:
        attend: computes attention over the whole row for some of the heads; see `packed_attention`
            for its arguments and result, and for those of this function.
        context: that of the forward pass, passed explicitly because a layer may be recomputed
            outside of it (gradient checkpointing).

    Raises:
        ValueError: the heads cannot be divided evenly among the ranks.
    """
    size = context.size
    if query.shape[1] % size or (key.shape[1] % size and size % key.shape[1]):
        raise ValueError(
            f"its {query.shape[1]} heads and {key.shape[1]} heads of keys cannot be divided among "
            f"{size} ranks"
        )
    if key.shape[1] < size:  # all ranks whose queries belong to one head of keys get a copy of it
        key, value = (each.repeat_interleave(size // each.shape[1], 1) for each in (key, value))
    if context.group is None:
        parts = (each.chunk(size, dim=1) for each in (query, key, value))
        return torch.cat([attend(*part) for part in zip(*parts, strict=True)], dim=2)
    query, key, value = (_exchanged(each, context, to_heads=True) for each in (query, key, value))
    output = attend(query, key, value).transpose(1, 2)
    return _exchanged(output, context, to_heads=False).transpose(1, 2)


def _exchanged(tensor: Tensor, context: Context, *, to_heads: bool) -> Tensor:
    exchanged = _Exchange.apply(tensor, context, to_heads)
    assert isinstance(exchanged, Tensor)
    return exchanged


class _Exchange(torch.autograd.Function):
    """Converts (1, heads, n, d) to (1, heads / W, W n, d), or back, among the ranks of a group.

    Each direction is the gradient of the other.
    """

    @staticmethod
    def forward(ctx, tensor: Tensor, context: Context, to_heads: bool):
        ctx.context, ctx.to_heads = context, to_heads
        if to_heads:
            parts = tensor[0].unflatten(0, (context.size, -1))
        else:
            parts = tensor[0].unflatten(1, (context.size, -1)).transpose(0, 1)
        parts = parts.contiguous()  # (W, heads / W, n, d): the part for each rank
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=context.group)
        if to_heads:
            return received.transpose(0, 1).flatten(1, 2)[None]
        return received.flatten(0, 1)[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.forward(ctx, grad, ctx.context, not ctx.to_heads), None, None
