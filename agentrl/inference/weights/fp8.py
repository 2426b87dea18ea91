"""Emulates a server that keeps its weights in 8 bits, so that the probe can compare with it.

vLLM's `fp8_per_channel` rounds each row of a linear layer's matrix when it is loaded, and each
token's input to the layer, to float8 (e4m3: a sign, 4 bits of exponent, 3 of fraction). Each row
and each input has its own scale. Embedding, head and norms are not rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_LARGEST = 448.0
_SMALLEST_SCALE = 1 / (_LARGEST * 512)


def to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds (..., N) rows to float8; returns them divided by their scales, and (..., 1) scales.

    Both are float32.
    """
    rows = rows.float()
    scales = (rows.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST_SCALE)
    rounded = (rows / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return rounded.float(), scales


@contextlib.contextmanager
def in_8_bits(model: PreTrainedModel) -> Iterator[list[nn.Linear]]:
    """Makes the model compute like such a server, without changing its weights.

    Yields the layers that round. Ranks that share the weights have to enter it together.
    """
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    handles = [layer.register_forward_hook(_multiply) for layer in layers]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def _multiply(layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    tokens, scales = to_float8(inputs[0])
    weight, of_rows = to_float8(layer.weight)
    product = (tokens @ weight.T) * scales * of_rows.T
    if layer.bias is not None:
        product = product + layer.bias
    return product.to(output.dtype)
