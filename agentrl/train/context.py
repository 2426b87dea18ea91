"""One row on several ranks (`train.parallel.context`): rows too long for one device.

All of a decoder but attention looks at one token at a time, so each of W ranks holds a slice of a
micro-batch's row. Around attention two exchanges turn

    all heads of a slice's tokens   (1, heads, N / W, d)   <->   (1, heads / W, N, d)   all tokens

and what attends in between is what attends on one rank, segments and shared prefixes included:
Jacobs et al., "DeepSpeed Ulysses", 2023, https://arxiv.org/abs/2309.14509. (torch's own context
parallelism passes keys around a ring, for one causal sequence, and knows no segments.)

The objective sees whole rows. So the ranks put their log-probs together, those of others without
gradient; all compute the same loss, and each takes its own part of the gradient from it. These
parts add up like those of ranks with other rows, so the networks are sharded over all ranks alike.
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
from agentrl.train.plan import KeptIds, MicroBatch


@dataclass(slots=True, frozen=True)
class Context:
    """The ranks that hold one row together; neighbours, so that they lie in one machine."""

    size: int = 1
    rank: int = 0
    """This one, among them."""
    group: dist.ProcessGroup | None = None
    """None: this process computes the heads of all of them, one after the other."""


_context = Context()


def current() -> Context:
    return _context


def join(size: int) -> None:
    """Form groups of `size` neighbouring ranks. Every rank calls it, with a divisor of them all."""
    global _context
    for first in range(0, dist.get_world_size(), size):
        group: Any = dist.new_group(list(range(first, first + size)))
        if first <= dist.get_rank() < first + size:
            _context = Context(size, dist.get_rank() - first, group)


def leave() -> None:
    """Forget the group, which ends with its ranks; this process computes whole rows again."""
    global _context
    _context = Context()


def of(model: nn.Module) -> Context:
    """Returns the group of ranks with which a model computes its rows: of a sharded model
    (`agentrl.train.sharding`) this rank's group.

    With any other model, such as one that rank 0 checks or samples from, this process asks nothing
    of the others and computes whole rows.
    """
    return getattr(model, "row_context", Context(_context.size))


def require_position_free(config: PretrainedConfig) -> None:
    """
    Raises:
        ConfigError: how the model turns a token's position into angles depends on the last
            position of the row, which the ranks do not see alike.
    """
    text = config.get_text_config()
    found = getattr(text, "rope_parameters", None) or {}
    for each in (found, *(value for value in found.values() if isinstance(value, dict))):
        if (kind := each.get("rope_type")) in ("dynamic", "longrope"):
            raise ConfigError(
                f"train.parallel.context = {_context.size} cannot train {text.model_type} with "
                f"rope_type '{kind}', whose angles depend on the length of the whole row; set "
                "train.parallel.context = 1"
            )


# a rank's slice of the row ------------------------------------------------------------------------


def own_part(micro: MicroBatch, context: Context) -> MicroBatch:
    """This rank's slice of the row, and the trained tokens that are predicted there.

    Its segments remain those of the whole row, with one more that fills it up to a multiple of the
    ranks.
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
        around = ((0, padding), (0, 0), (0, 0))
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
    """Returns (Q,) values of all trained tokens, put together from the ranks' own parts; the
    gradient goes to this rank's own."""
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
    """Attention of a slice's tokens over the whole row.

    Args:
        attend: what computes it for some heads of the whole row; see `packed_attention` for its
            arguments and its result.
        context: as it was in the forward pass; a layer may be computed again outside of it.

    Raises:
        ValueError: the ranks cannot share the heads evenly.
    """
    size = context.size
    if query.shape[1] % size or (key.shape[1] % size and size % key.shape[1]):
        raise ValueError(f"has {query.shape[1]} heads, {key.shape[1]} of keys, for {size} ranks")
    if key.shape[1] < size:  # ranks whose queries belong to one head of keys all get it
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
    """(1, heads, n, d) to (1, heads / W, W n, d), or back; the one is the gradient of the other."""

    @staticmethod
    def forward(ctx, tensor: Tensor, context: Context, to_heads: bool):
        ctx.context, ctx.to_heads = context, to_heads
        if to_heads:
            parts = tensor[0].unflatten(0, (context.size, -1))
        else:
            parts = tensor[0].unflatten(1, (context.size, -1)).transpose(0, 1)
        parts = parts.contiguous()  # (W, heads / W, n, d): what each of the ranks gets
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=context.group)
        if to_heads:
            return received.transpose(0, 1).flatten(1, 2)[None]
        return received.flatten(0, 1)[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.forward(ctx, grad, ctx.context, not ctx.to_heads), None, None
