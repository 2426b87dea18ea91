"""Causal attention inside the segments of a packed row, for any transformers decoder.

transformers looks up by name how a decoder makes its masks and how its layers attend. Under the
name `agentrl_packed` stand one function for each:

* `packed_mask` is asked once per kind of layer (full, sliding window, chunks) and answers with a
  `SegmentMask`: which tokens lie together, and how far back one may look. Nothing of the size
  [N, N] is built. The decoder hands it to its layers untouched.
* `packed_attention` computes what the layer asks for (scaling, soft caps, sinks, key and value
  heads of their own number and size) inside each segment. On CUDA in one call for the whole row;
  on a CPU segment by segment, so that the work is the sum of the squared lengths.

Segments may continue others (`agentrl.train.plan`), whose tokens they see as well; only layers
of plain causal attention compute that. `agentrl_shared` stands for the same two functions, and says
of a model that all its layers do.

Which segments a forward pass has is said around it, `with packed_segments(lengths)`. A decoder that
makes its masks in another way fails there instead of mixing the segments, and without that block
the names behave as transformers' `sdpa`, so `generate` works.
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
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
)
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.train.context import Context, attend_by_heads

ATTENTION_NAME = "agentrl_packed"
SHARED_ATTENTION_NAME = "agentrl_shared"
WHOLE_ROW = Context()
BLOCK_SIZE = 128
"""The default block size of flex attention's kernels."""

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# `varlen_attn` does not differentiate through its log-sum-exp, so its backward pass is called here.
_cuda_backward = torch.ops.torch_attn._varlen_attn_backward
_WITH_LSE = AuxRequest(lse=True)
# Torch 2.11 takes fewer heads of keys than of queries without being told.
_TOLD_OF_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters

# Rows of fewer than 128 tokens would get the kernel for decoding, which torch 2.11 cannot build for
# rows of any length.
_FLEX_OPTIONS = {"BACKEND": "TRITON"}

# What the flash kernels behind `varlen_attn` can hold.
_MAX_FLASH_HEAD_DIM = 256

_segments: ContextVar[tuple[list[int], list[int], Context] | None] = ContextVar(
    "segments", default=None
)


# masks --------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def packed_segments(
    lengths: list[int], branch_ends: list[int] | None = None, context: Context | None = None
) -> Iterator[None]:
    """Decoders called in this block read their row as segments of these lengths, summing to N.

    Args:
        branch_ends: where what continues each segment ends (`MicroBatch.branch_ends`); None where
            no segment continues another.
        context: the ranks that hold a slice of the row each; None for a rank that holds it all.
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
    """A mask function as transformers' `AttentionMaskInterface` wants it.

    Args:
        local_size: the layer's window, or the size of its chunks.
        use_vmap: true where the decoder adds conditions of its own.
        allow_is_bidirectional_skip: passed for masks that are not causal.

    Raises:
        ValueError: a mask other than a causal one, with or without a window or chunks; or a window
            or chunks where segments continue others.
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
        raise ValueError("has layers that do not see the whole of a shared prefix")
    if local_size == getattr(config, "attention_chunk_size", None):
        # Chunks count from the start of their own segment: each is a segment by itself.
        chunk, local_size = local_size, None
        lengths = [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]
    return SegmentMask(lengths, local_size, torch.device(device), context=context)


# attention ----------------------------------------------------------------------------------------


@torch.compiler.disable  # loops over segments would be compiled anew for each other row
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
    """An attention function as transformers' `AttentionInterface` wants it.

    Args:
        query: (1, num_heads, N, head_dim); of ranks that hold a slice of the row each, its N.
        key: (1, num_key_value_heads, N, head_dim); `value` likewise, with a head size of its own.
        scaling: factor on the scores; None means 1 / sqrt(head_dim).
        kwargs: what else the family's own attention takes: `softcap`, `s_aux` (sinks) and so on.

    Returns:
        (1, N, num_heads, size of a value's head), and None for the attention weights.

    Raises:
        ValueError: the decoder made no mask, so the segments are not known, or has dropout.
    """
    if not isinstance(attention_mask, SegmentMask):
        if _segments.get() is not None:
            raise ValueError(f"{type(module).__name__} attends without a mask of transformers")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout:
        raise ValueError(f"{type(module).__name__} has dropout")
    if attention_mask.shared and not (_is_plain(kwargs) and query.shape[-1] == value.shape[-1]):
        raise ValueError(f"{type(module).__name__} attends in a way that shares no prefixes")
    attend = functools.partial(_attend, module, attention_mask, scaling, kwargs)
    if attention_mask.context.size > 1:
        return attend_by_heads(attend, query, key, value, attention_mask.context), None
    return attend(query, key, value), None


def _attend(
    module: torch.nn.Module,
    mask: SegmentMask,
    scaling: float | None,
    wanted: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    if query.shape[2] != sum(mask.lengths):
        raise ValueError(f"the segments have {sum(mask.lengths)} tokens, the row {query.shape[2]}")
    attend = _in_one_call if query.is_cuda else _by_segment
    if query.device.type == "cpu" and query.itemsize == 2:
        # Rounded once, at the end, like that of vLLM servers on a CPU
        # (`agentrl.sync.vllm_plugin.rounding`): both then round the same values, in whatever
        # order each of them sums. Torch's 16-bit CPU kernels are no faster.
        wide = query.double(), key.double(), value.double()
        return attend(module, *wide, mask, scaling, wanted).to(query.dtype)
    return attend(module, query, key, value, mask, scaling, wanted)


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
            # Soft caps and sinks are computed in as many ways as there are families.
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
    """Flash attention where it can, compiled flex attention elsewhere."""
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
    """Arguments of `varlen_attn` for the heads of both, in dimension 1."""
    return {"enable_gqa": query.shape[1] != key.shape[1]} if _TOLD_OF_GROUPS else {}


class _FlashOnCPU(torch.autograd.Function):
    """Each segment on itself, then whatever continues a segment on it, merged by log-sum-exp.

    The backward pass of a part takes the merged output and log-sum-exp, and is exact: a query's
    probability of a key is exp(score - lse), and grad . output is the query's, whichever part the
    key stands in.
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
    """The same as `_FlashOnCPU` for (N, heads, head_dim), in one call for all segments and one for
    each level of those that others continue."""

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
    """Softmax over two sets of keys, in place, from the softmax over each."""
    output.lerp_(there, torch.sigmoid(more - lse)[..., None].to(output.dtype))
    lse.copy_(torch.logaddexp(lse, more))


def _is_plain(wanted: dict[str, Any]) -> bool:
    """Tells whether scaled dot products with a mask compute all that a layer asks for."""
    return all(wanted.get(name) is None for name in ("softcap", "s_aux", "position_bias"))


for _name in (ATTENTION_NAME, SHARED_ATTENTION_NAME):
    AttentionInterface.register(_name, packed_attention)
    AttentionMaskInterface.register(_name, packed_mask)
