"""Compiles a model's layers with `torch.compile`, which fuses kernels between matrix products.

Norms, rotary embeddings and activations are fused; attention stays as it is
(`agentrl.model.attention`). One compiled form serves rows of any length. Only the trainer's packed
rows use it: the embedded engine, and any call of a layer with a cache, run the family's own code.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentrl.errors import ConfigError, first_line
from agentrl.model.attention import SegmentMask
from agentrl.model.logprobs import PACKED, probe_rows, tolerance
from agentrl.model.rows import MicroBatch

_REMEDY = "set model.compile = false"


def compile_layers(
    module: nn.Module, decoder: PreTrainedModel, compute: Callable[[MicroBatch], Tensor]
) -> None:
    """Compiles the layers of a decoder, and checks on two short rows that forward and backward pass
    give the same results as before. Every rank calls it; gradients are None before and after.

    Args:
        module: the module that is trained: the decoder with its head or value head.
        compute: returns the module's result for a micro-batch, (Q,) float32.

    Raises:
        ConfigError: the model does not run on packed rows, there is no compiler, or the compiled
            layers differ by more than rounding.
    """
    name = type(decoder).__name__
    if decoder.config._attn_implementation not in PACKED:
        raise ConfigError(
            f"model.compile = true: {name} trains one segment at a time, but layers are compiled "
            f"for packed rows only; {_REMEDY}"
        )
    micro = probe_rows(decoder)
    values, norms = _computed(module, compute, micro)
    layers: Any = decoder.layers
    for layer in layers:
        # A bound method, so that a copy of the layer calls itself and not this layer.
        layer.forward = types.MethodType(_forward, layer)
    try:
        compiled_values, compiled_norms = _computed(module, compute, micro)
    except TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)
        raise ConfigError(
            f"model.compile = true: {name} cannot be compiled ({first_line(cause)}); a CPU needs a "
            f"C++ compiler (g++), a GPU Triton; or {_REMEDY}"
        ) from error
    difference = (compiled_values - values).abs().mean().item()
    # A critic's value head starts at zero, so a rank without a part of it has gradients of zero.
    of_gradient = ((compiled_norms - norms).abs().max() / norms.max().clamp(min=1e-30)).item()
    rounding = tolerance(decoder.dtype)
    if not (difference < rounding and of_gradient < rounding):
        raise ConfigError(
            f"model.compile = true: compiled, {name} differs from itself by {difference:.2g}, and "
            f"its gradient by {of_gradient:.2g}; {_REMEDY}"
        )


def _computed(
    module: nn.Module, compute: Callable[[MicroBatch], Tensor], micro: MicroBatch
) -> tuple[Tensor, Tensor]:
    """Computes values (Q,), and for each parameter the norm of the gradient of their sum; with
    several ranks, of this rank's shard of that gradient."""
    values = compute(micro)
    values.sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    norms = torch.stack([each.double().norm().cpu() for each in local])
    module.zero_grad(set_to_none=True)
    return values.detach(), norms


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer: its compiled form on packed rows, else its own."""
    forward = type(layer).forward
    if any(isinstance(each, SegmentMask) for each in (*args, *kwargs.values())):
        forward = _compiled(forward)
    return forward(layer, *args, **kwargs)


@functools.cache
def _compiled(forward: Callable) -> Callable:
    """Returns one compiled function for all layers of a class, which differ only in their weights.

    Matrices are not padded: on a GPU the benefit depends on a row's length, so short and long rows
    would be compiled separately.
    """
    return torch.compile(forward, dynamic=True, options={"shape_padding": False})
