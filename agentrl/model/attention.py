"""Causal attention within the segments of a packed row, for any transformers decoder.

transformers looks up by name how a decoder makes its masks and how its layers attend. This module
registers one function for each under the name `agentrl_packed`:

* `packed_mask` is called once per kind of layer (full, sliding window, chunks) and returns a
  `SegmentMask`, which holds the segments and the window but nothing of size [N, N]. The decoder
  passes it to its layers unchanged.
* `packed_attention` computes what the layer asks for (scaling, soft caps, sinks, any number and
  size of key and value heads) within each segment: on CUDA in one call for the whole row, on a CPU
  segment by segment, so that the work is the sum of the squared lengths.

Segments may continue others (`agentrl.model.rows`), whose tokens they then see as well. Only layers
of plain causal attention support that; a model whose layers all do uses the name `agentrl_shared`,
which stands for the same two functions.

The segments of a forward pass are set around it by `with packed_segments(lengths)`. A decoder that
makes its masks in another way raises an error there, rather than mix the segments. Outside such a
block both names behave like transformers' `sdpa`, so `generate` works.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.model.context import Context, attend_by_heads

ATTENTION_NAME = "agentrl_packed"
SHARED_ATTENTION_NAME = "agentrl_shared"
WHOLE_ROW = Context()
BLOCK_SIZE = 128
"""Default block size of flex attention's kernels, in tokens."""

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# `varlen_attn` cannot differentiate through its log-sum-exp, so its backward pass is called here.
_cuda_backward = torch.ops.torch_attn._varlen_attn_backward
_WITH_LSE = AuxRequest(lse=True)
# Torch 2.11 accepts fewer heads of keys than of queries without this argument.
_HAS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters

# Without it, rows of fewer than 128 tokens get the decoding kernel, which torch 2.11 cannot build
# for dynamic lengths.
_FLEX_OPTIONS = {"BACKEND": "TRITON"}

# Limit of the flash kernels behind `varlen_attn`.
_MAX_FLASH_HEAD_DIM = 256

_segments: ContextVar[tuple[list[int], list[int], Context] | None] = ContextVar(
    "segments", default=None
)


# masks --------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class _Pieces:
    """P pieces of a row, gathered end to end into M tokens."""

    index: torch.Tensor  # (M,) int64: position of each token in the row
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
    """Pieces of queries, each of which sees all keys of the corresponding piece of keys."""

    queries: _Pieces
    keys: _Pieces


class SegmentMask:
    """The keys that each query of a packed row sees.

    These are the last `window` keys up to its own position in its segment, and all keys of the
    segments that its segment continues.
    """

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
        """(start, stop) of each segment in the row."""
        self.shared = [
            (start, stop, end)
            for (start, stop), end in zip(self.spans, branch_ends or stops, strict=True)
            if end > stop
        ]
        """(start, stop, end) of each continued segment: queries [stop, end) see all keys
        [start, stop). Outermost first."""

    def dense(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Returns the mask of one segment of `length` tokens, without those that it continues.

        Returns:
            (length, length) bool, True where a query sees a key; None for plain causal attention.
        """
        if self.window is None or length <= self.window:
            return None
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return causal.triu(1 - self.window)

    @functools.cached_property
    def borders(self) -> torch.Tensor:
        """(S + 1,) int32: where each segment begins in the row; the last entry is N."""
        starts = [0, *accumulate(self.lengths)]
        return _sent(torch.tensor(starts, dtype=torch.int32), self._device)

    @functools.cached_property
    def levels(self) -> list[Level]:
        """The continued segments, grouped by how many others they continue themselves. One call
        computes a level."""
        levels: list[list[tuple[int, int, int]]] = []
        around: list[int] = []  # ends of the branches that contain the current segment
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
        """The mask for flex attention: the blocks of keys that each block of queries sees.

        Nothing of size [N, N] is built. A block that is listed as seen in part may contain no pair
        that is seen: flex attention evaluates the mask for each of its entries. For blocks that
        are listed as seen whole it does not.
        """
        ends = {start: end for start, _, end in self.shared}
        of_segment = torch.tensor([ends.get(start, stop) for start, stop in self.spans])
        total = sum(self.lengths)
        window = self.window or total
        last = of_segment.repeat_interleave(  # (N,): the first later query that does not see it
            torch.tensor(self.lengths), output_size=total
        )
        padded = torch.nn.functional.pad(last, (0, -total % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
        key = torch.arange(0, total, BLOCK_SIZE)  # start of each block
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
    """Converts (rows, columns) bool to flex attention's lists of blocks.

    Returns:
        (1, 1, rows) int32, the number of True entries of each row; and (1, 1, rows, columns) int32,
        their columns followed by the others.
    """
    columns = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    numbers = blocks.sum(1, dtype=torch.int32)
    return _sent(numbers[None, None], device), _sent(columns.int()[None, None], device)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies the tensor to the device without waiting for the copy."""
    return tensor.to(device, non_blocking=True)


@contextlib.contextmanager
def packed_segments(
    lengths: list[int], branch_ends: list[int] | None = None, context: Context | None = None
) -> Iterator[None]:
    """Splits the rows of decoders that are called in this block into segments.

    Args:
        lengths: tokens of each segment, summing to N.
        branch_ends: see `MicroBatch.branch_ends`; None if no segment continues another.
        context: the ranks that hold a slice of the row each; None if this rank holds the whole row.
    """
    token = _segments.set((lengths, branch_ends or list(accumulate(lengths)), context or WHOLE_ROW))
    try:
        yield
    finally:
        _segments.reset(token)


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    config: PretrainedConfig | None = None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> SegmentMask | torch.Tensor | None:
    """Makes the mask of a kind of layer, for transformers' `AttentionMaskInterface`.

    Args:
        local_size: tokens of the layer's window, or of a chunk.
        use_vmap: True if the decoder adds conditions of its own to the mask.
        allow_is_bidirectional_skip: passed for masks that are not causal.

    Returns:
        The mask; outside of `packed_segments` what transformers' `sdpa` takes.

    Raises:
        ValueError: the mask is not causal or has further conditions; or it has a window or chunks,
            and segments continue others.
    """
    segments = _segments.get()
    if segments is None:
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            *args,
            local_size=local_size,
            use_vmap=use_vmap,
            config=config,
            device=device,
            **kwargs,
        )
    lengths, branch_ends, context = segments
    held = sum(lengths) // (context.size if context.group else 1)
    if use_vmap or allow_is_bidirectional_skip is not None or (q_length, kv_length) != (held, held):
        raise ValueError("its masks are more than causal")
    if local_size is None:
        return SegmentMask(lengths, None, torch.device(device), branch_ends, context)
    if branch_ends != list(accumulate(lengths)):
        raise ValueError("some of its layers do not see the whole shared prefix")
    if local_size == getattr(config, "attention_chunk_size", None):
        # Chunks are counted from the start of their segment, and each becomes a segment.
        chunk, local_size = local_size, None
        lengths = [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]
    return SegmentMask(lengths, local_size, torch.device(device), context=context)


# attention ----------------------------------------------------------------------------------------


@torch.compiler.disable  # it would recompile the loops over segments for every new row
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: SegmentMask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Computes a layer's attention, for transformers' `AttentionInterface`.

    Args:
        query: (1, num_heads, N, head_dim). With context parallelism, N here and below is the number
            of tokens in this rank's slice.
        key: (1, num_key_value_heads, N, head_dim).
        value: (1, num_key_value_heads, N, value_dim).
        scaling: factor on the scores; None means 1 / sqrt(head_dim).
        kwargs: further arguments of the family's attention, such as `softcap` and `s_aux` (sinks).

    Returns:
        (1, N, num_heads, value_dim), and None for the attention weights.

    Raises:
        ValueError: the decoder did not make its mask with `packed_mask` or has dropout; the
            segments do not add up to the row; or they continue others and the layer cannot
            compute that.
    """
    mask = attention_mask
    if not isinstance(mask, SegmentMask):
        if _segments.get() is not None:
            raise ValueError(f"{type(module).__name__} attends without a mask of transformers")
        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout:
        raise ValueError(f"{type(module).__name__} has dropout")
    if mask.shared and not (_is_plain(kwargs) and query.shape[-1] == value.shape[-1]):
        raise ValueError(f"{type(module).__name__} attends in a way that cannot share prefixes")

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if query.shape[2] != sum(mask.lengths):
            raise ValueError(
                f"the segments have {sum(mask.lengths)} tokens, but the row has {query.shape[2]}"
            )
        compute = _in_one_call if query.is_cuda else _by_segment
        if query.device.type == "cpu" and query.itemsize == 2:
            # Rounds once, at the end: in float64 the order of a sum hardly matters, so the sampler
            # and the trainer round the same values. Torch's 16-bit CPU kernels are no faster.
            wide = query.double(), key.double(), value.double()
            return compute(module, *wide, mask, scaling, kwargs).to(query.dtype)
        return compute(module, query, key, value, mask, scaling, kwargs)

    if mask.context.size > 1:
        return attend_by_heads(attend, query, key, value, mask.context), None
    return attend(query, key, value), None


def _by_segment(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SegmentMask,
    scaling: float | None,
    wanted: dict[str, Any],
) -> torch.Tensor:
    plain = _is_plain(wanted)
    if plain and mask.window is None and query.shape[-1] == value.shape[-1]:
        return _FlashOnCPU.apply(query, key, value, mask, scaling).transpose(1, 2)
    parts = [tensor.split(mask.lengths, dim=2) for tensor in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        seen = mask.dense(q.shape[2], q.device)
        if plain:
            output = scaled_dot_product_attention(
                q, k, v, seen, is_causal=seen is None, scale=scaling, enable_gqa=grouped
            ).transpose(1, 2)
        else:
            # Each family computes soft caps and sinks in its own way.
            eager: Callable = sys.modules[type(module).__module__].eager_attention_forward
            if seen is None:
                seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
            lowest = torch.finfo(q.dtype).min
            added = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, lowest)
            output, _ = eager(module, q, k, v, added[None, None], scaling=scaling, **wanted)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _in_one_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SegmentMask,
    scaling: float | None,
    wanted: dict[str, Any],
) -> torch.Tensor:
    """Computes plain attention in 16 bits by flash attention, anything else by flex attention."""
    equal = query.shape[-1] == value.shape[-1] <= _MAX_FLASH_HEAD_DIM
    if not (query.itemsize == 2 and equal and _is_plain(wanted)):
        output, _ = flex_attention_forward(
            module,
            query,
            key,
            value,
            mask.blocks,
            scaling=scaling,
            kernel_options=_FLEX_OPTIONS,
            **wanted,
        )
        return output
    if mask.shared:
        output = _FlashOnCUDA.apply(
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)), mask, scaling
        )
        return output[None]
    longest = max(mask.lengths)
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        mask.borders,
        mask.borders,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if mask.window is None else mask.window - 1, 0),
        **_grouped(query, key),
    )
    assert isinstance(output, torch.Tensor)
    return output[None]


def _grouped(query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """Returns the argument with which `varlen_attn` accepts fewer heads (dimension 1) of keys."""
    return {"enable_gqa": query.shape[1] != key.shape[1]} if _HAS_ENABLE_GQA else {}


class _FlashOnCPU(torch.autograd.Function):
    """Attends from each segment to itself, then from what continues a segment to that segment, and
    merges the results by their log-sum-exp (lse).

    Each part's backward pass takes the merged output and lse, which is exact: a query's probability
    of a key is exp(score - lse), and grad . output belongs to the query alone, so neither depends
    on the part that a key is in.
    """

    @staticmethod
    def forward(ctx, query, key, value, mask: SegmentMask, scale):
        output, lse = torch.empty_like(query), query.new_empty(query.shape[:3])
        for start, stop in mask.spans:
            q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))
            output[:, :, start:stop], lse[:, :, start:stop] = _cpu_forward(
                q, k, v, is_causal=True, scale=scale
            )
        for start, stop, end in mask.shared:
            k, v = key[:, :, start:stop], value[:, :, start:stop]
            there, more = _cpu_forward(query[:, :, stop:end], k, v, scale=scale)
            _merge(output[:, :, stop:end], lse[:, :, stop:end], there, more)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mask, ctx.scale = mask, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, output, lse = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]

        def part(queries: slice, keys: slice, is_causal: bool):
            q, out, sums = (tensor[:, :, queries] for tensor in (query, output, lse))
            k, v = key[:, :, keys], value[:, :, keys]
            return _cpu_backward(
                grad[:, :, queries], q, k, v, out, sums, 0.0, is_causal, scale=ctx.scale
            )

        for start, stop in ctx.mask.spans:
            here = slice(start, stop)
            for total, found in zip(grads, part(here, here, True), strict=True):
                total[:, :, here] = found
        for start, stop, end in ctx.mask.shared:
            queries, keys = slice(stop, end), slice(start, stop)
            found = part(queries, keys, False)
            for total, where, more in zip(grads, (queries, keys, keys), found, strict=True):
                total[:, :, where] += more
        return *grads, None, None


class _FlashOnCUDA(torch.autograd.Function):
    """Does the same as `_FlashOnCPU` for (N, heads, head_dim), with one call for all segments and
    one for each level of continued segments."""

    @staticmethod
    def forward(ctx, query, key, value, mask: SegmentMask, scale):
        longest = max(mask.lengths)
        arguments: dict[str, Any] = {"scale": scale, "return_aux": _WITH_LSE}
        arguments |= _grouped(query, key)
        output, lse = varlen_attn(
            query,
            key,
            value,
            mask.borders,
            mask.borders,
            longest,
            longest,
            window_size=(-1, 0),
            **arguments,
        )
        for level in mask.levels:
            queries, keys = level.queries, level.keys
            there, more = varlen_attn(
                query[queries.index],
                key[keys.index],
                value[keys.index],
                queries.borders,
                keys.borders,
                queries.longest,
                keys.longest,
                **arguments,
            )
            here, sums = output[queries.index].transpose(0, 1).float(), lse[:, queries.index]
            _merge(here, sums, there.transpose(0, 1).float(), more)
            output[queries.index] = here.transpose(0, 1).to(output.dtype)
            lse[:, queries.index] = sums
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mask, ctx.scale = mask, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, output, lse = ctx.saved_tensors
        mask, longest = ctx.mask, max(ctx.mask.lengths)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = _cuda_backward(
            grad.contiguous(),
            query,
            key,
            value,
            output,
            lse,
            mask.borders,
            mask.borders,
            longest,
            longest,
            True,
            no_dropout,
            ctx.scale,
            [-1, 0],
        )
        for level in mask.levels:
            queries, keys = level.queries, level.keys
            found = _cuda_backward(
                grad[queries.index],
                query[queries.index],
                key[keys.index],
                value[keys.index],
                output[queries.index],
                lse[:, queries.index].contiguous(),
                queries.borders,
                keys.borders,
                queries.longest,
                keys.longest,
                False,
                no_dropout,
                ctx.scale,
                [-1, -1],
            )
            for total, where, more in zip(grads, (queries, keys, keys), found, strict=True):
                total.index_add_(0, where.index, more)
        return *grads, None, None


def _merge(output: torch.Tensor, lse: torch.Tensor, there: torch.Tensor, more: torch.Tensor):
    """Merges attention to two sets of keys, in place in `output` and `lse`."""
    output.lerp_(there, torch.sigmoid(more - lse)[..., None].to(output.dtype))
    lse.copy_(torch.logaddexp(lse, more))


def _is_plain(wanted: dict[str, Any]) -> bool:
    """Returns whether masked scaled dot products are all that a layer asks for."""
    return all(wanted.get(name) is None for name in ("softcap", "s_aux", "position_bias"))


for _name in (ATTENTION_NAME, SHARED_ATTENTION_NAME):
    AttentionInterface.register(_name, packed_attention)
    AttentionMaskInterface.register(_name, packed_mask)
