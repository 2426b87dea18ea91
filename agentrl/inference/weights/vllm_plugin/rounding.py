"""Makes vLLM's layers on a CPU round 16-bit values where transformers' layers do."""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import scaled_dot_product_attention


def align_rounding() -> None:
    """Makes vLLM's CPU layers round where transformers' layers do.

    Two engines with the same 16-bit weights differ if they round intermediate results differently.
    On a CPU, vLLM normalises the sum of residual and update before rounding it, rotates queries and
    keys with one rounding instead of three, and, without AVX512-BF16, its kernels for rotation and
    attention truncate instead of round. After this call:

    * the sum is rounded first and then normalised;
    * rotation is plain torch arithmetic;
    * attention is computed in float64 and rounded once. In float32, the engines would still sum in
      a different order, which occasionally changes the 16-bit result, and with a peaked
      distribution that can amount to 0.1 nats.

    Needs `--enforce-eager`, because compilation fuses layers and drops roundings. Does nothing on a
    GPU. Call it before the model is made; repeated calls have no effect.
    """
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.layernorm import (  # pyright: ignore[reportMissingImports]
        RMSNorm,
    )
    from vllm.model_executor.layers.rotary_embedding.base import (  # pyright: ignore[reportMissingImports]
        RotaryEmbedding,
    )
    from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore[reportMissingImports]
        CPUAttentionBackendImpl,
    )

    if hasattr(RMSNorm.forward_native, "__wrapped__"):
        return
    normalise = RMSNorm.forward_native

    @functools.wraps(normalise)
    def add_then_normalise(self, x, residual=None):
        if residual is None:
            return normalise(self, x)
        residual = x + residual
        return normalise(self, residual), residual

    RMSNorm.forward_native = add_then_normalise
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    attend, store = CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update

    def is_plain(impl, kv_cache) -> bool:
        return (
            kv_cache.dtype in (torch.bfloat16, torch.float16)
            and impl.attn_type == "decoder"
            and impl.sliding_window == -1
            and impl.alibi_slopes is None
            and impl.sinks is None
            and not impl.logits_soft_cap
        )

    @functools.wraps(attend)
    def attend_exactly(
        self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
    ):
        if attn_metadata is None or not is_plain(self, kv_cache):
            return attend(
                self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        exact_attention(
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            self.scale,
            output,
        )
        return output

    @functools.wraps(store)
    def store_plainly(self, layer, key, value, kv_cache, slot_mapping):
        if not is_plain(self, kv_cache):
            return store(self, layer, key, value, kv_cache, slot_mapping)
        used = slot_mapping >= 0  # negative slots are padding
        slots = slot_mapping[used]
        block, place = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        states = torch.cat([key[: len(used)], value[: len(used)]], -1)
        kv_cache[block, :, place] = states[used]

    CPUAttentionBackendImpl.forward = attend_exactly
    CPUAttentionBackendImpl.do_kv_cache_update = store_plainly


def exact_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Computes causal attention in float64 from each sequence's new tokens to the whole sequence.

    Args:
        query: (num_tokens, num_heads, head_dim), the new tokens of all sequences, concatenated.
        kv_cache: (num_blocks, num_kv_heads, block_size, 2 head_dim), keys before values, including
            those of the new tokens.
        block_table: (num_sequences, max_blocks).
        query_start_loc: (num_sequences + 1,), the start of each sequence's new tokens in `query`.
        seq_lens: (num_sequences,), lengths including the new tokens.
        output: written to; the shape of `query`, or with its last two dimensions merged.
    """
    head_dim, block_size = query.shape[-1], kv_cache.shape[2]
    result = output.view(-1, *query.shape[1:])

    def states(sequences: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = kv_cache[block_table[sequences, : -(-length // block_size)].long()]
        # (sequences, blocks, kv heads, place, 2 head_dim) -> (sequences, kv heads, length, ...)
        flat = blocks.transpose(1, 2).flatten(2, 3)[:, :, :length].double()
        return flat[..., :head_dim], flat[..., head_dim:]

    starts, new = query_start_loc[:-1], query_start_loc.diff()
    single = (new == 1).nonzero().squeeze(1)
    if len(single) > 0:
        lengths = seq_lens[single]
        longest = int(lengths.max())
        keys, values = states(single, longest)
        place = starts[single].long()
        attended = scaled_dot_product_attention(
            query[place, :, None].double(),
            keys,
            values,
            attn_mask=(torch.arange(longest) < lengths[:, None])[:, None, None],
            scale=scale,
            enable_gqa=True,
        )
        result[place] = attended.squeeze(2).to(result.dtype)
    for sequence in (new > 1).nonzero().flatten().tolist():
        start, count, length = (int(t[sequence]) for t in (starts, new, seq_lens))
        keys, values = states(torch.tensor([sequence]), length)
        positions = torch.arange(length - count, length)
        attended = scaled_dot_product_attention(
            query[None, start : start + count].transpose(1, 2).double(),
            keys,
            values,
            attn_mask=torch.arange(length) <= positions[:, None],
            scale=scale,
            enable_gqa=True,
        )
        result[start : start + count] = attended[0].transpose(0, 1).to(result.dtype)
