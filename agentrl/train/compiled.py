"""Layers through `torch.compile`: what lies between their matrix products in fewer kernels.

Norms, rotary embedding and activation are fused; attention stays as it is
(`agentrl.train.attention`). One compiled form serves rows of any length. Only the trainer's packed
rows run through it: whoever samples from the same weights, or calls a layer with a cache, gets the
family's own code.
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
from agentrl.train.attention import SegmentMask
from agentrl.train.logprobs import PACKED, probe_rows, tolerance
from agentrl.train.plan import MicroBatch

_REMEDY = "set model.compile = false"


def compile_layers(
    module: nn.Module, decoder: PreTrainedModel, compute: Callable[[MicroBatch], Tensor]
) -> None:
    """Compile the layers of a decoder, and compare with what they computed before: two short rows,
    forward and backward. Every rank calls it; gradients are None before and after.

    Args:
        module: what learns: the decoder with its head or value head.
        compute: its result for a micro-batch, (Q,) float32.

    Raises:
        ConfigError: the model does not run on packed rows, there is no compiler, or the compiled
            layers differ by more than rounding.
    """
    name = type(decoder).__name__
    if decoder.config._attn_implementation not in PACKED:
        raise ConfigError(
            f"model.compile = true: {name} trains one segment at a time, and layers are compiled "
            f"for packed rows only; {_REMEDY}"
        )
    micro = probe_rows(decoder)
    values, norms = _computed(module, compute, micro)
    layers: Any = decoder.layers
    for layer in layers:
        # Bound, so that a copy of the layer calls itself.
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
    # A critic begins with a head of zeros: a rank without a part of that head has no gradient.
    of_gradient = ((compiled_norms - norms).abs().max() / norms.max().clamp(min=1e-30)).item()
    rounding = tolerance(decoder.dtype)
    if not (difference < rounding and of_gradient < rounding):
        raise ConfigError(
            f"model.compile = true: compiled, {name} differs from itself by {difference:.2g}, its "
            f"gradient by {of_gradient:.2g}; {_REMEDY}"
        )


def _computed(
    module: nn.Module, compute: Callable[[MicroBatch], Tensor], micro: MicroBatch
) -> tuple[Tensor, Tensor]:
    """Values (Q,), and the norm of the gradient of their sum for each tensor, of a rank its shard's
    part."""
    values = compute(micro)
    values.sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    norms = torch.stack([each.double().norm().cpu() for each in local])
    module.zero_grad(set_to_none=True)
    return values.detach(), norms


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    if any(isinstance(each, SegmentMask) for each in (*args, *kwargs.values())):
        forward = _compiled(forward)
    return forward(layer, *args, **kwargs)


@functools.cache
def _compiled(forward: Callable) -> Callable:
    """Returns one compiled function for all layers of a class, which differ in their weights alone.

    Matrices are not padded: whether that pays depends on a row's length, on a GPU, so that short
    rows and long ones would be compiled apart.
    """
    return torch.compile(forward, dynamic=True, options={"shape_padding": False})
