"""Keys and values of the embedded engine, without a copy of all of them for each token.

On a CPU the copies that transformers makes move more memory than the weights of a small model:
`torch.cat` writes all keys and values again for one more token, and `repeat_kv` writes them once
for each head that shares them. Here a layer keeps room for tokens to come, and the query heads of a
group attend to their one key head as if they were several positions. Both compute what
transformers' own code does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_ROOM = 32
"""Tokens that a layer makes room for at once. More would cost memory that short turns never use."""


def make_cache(config: PretrainedConfig) -> DynamicCache:
    """Makes a model's cache, with room in each layer that keeps all keys and values."""
    cache = DynamicCache(config=config)
    cache.layers = [
        _RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class _RoomyLayer(DynamicLayer):
    """Holds `keys` and `values` as views of larger tensors of shape (B, heads, room, size)."""

    _room: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends (B, heads, new tokens, size) and returns all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        length = before + key_states.shape[-2]
        if self._room is None or length > self._room[0].shape[-2]:
            larger = []
            for kept, new in ((self.keys, key_states), (self.values, value_states)):
                room = new.new_empty(*new.shape[:2], length + _ROOM, new.shape[-1])
                if kept is not None and before:
                    room[:, :, :before] = kept
                larger.append(room)
            self._room = (larger[0], larger[1])
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, before:length] = new
        self._show(length)
        return self.keys, self.values  # pyright: ignore[reportReturnType]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keeps the rows of these indices, in their order, with the room behind them."""
        if self._room is not None:
            length = self.get_seq_length()
            keys, values = (room.index_select(0, beam_idx) for room in self._room)
            self._room = (keys, values)
            self._show(length)

    def _show(self, length: int) -> None:
        assert self._room is not None
        self.keys, self.values = (room[:, :, :length] for room in self._room)


@contextlib.contextmanager
def grouping_heads(device: torch.device) -> Iterator[None]:
    """Lets transformers' `sdpa` be `grouped_attention` within this block, on a CPU.

    Under a name of its own, families that ask whether they run `sdpa` would leave something out.
    """
    if device.type != "cpu":
        yield
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # what transformers has beneath shows again


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes a layer's attention as transformers' `sdpa` does.

    Args:
        query: (B, heads, new tokens, size).
        key: (B, key heads, tokens, size).
        value: (B, key heads, tokens, size).
        attention_mask: (B, 1, new tokens, tokens), or None where every token may be seen.

    Returns:
        (B, new tokens, heads, size)
    """
    batch, num_heads, num_new, _ = query.shape
    groups = num_heads // key.shape[1]
    plain = attention_mask is None or attention_mask.shape[1] == 1
    if num_new > 1 or groups == 1 or not plain or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    # Heads that share keys are neighbours, so they become positions of one head without a copy.
    attended = scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups, -1),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return attended.reshape(batch, 1, num_heads, -1), None


def plain_attention(model: PreTrainedModel) -> str:
    """Returns the fastest of transformers' attentions that computes the same as `eager`."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not capped else "eager"
