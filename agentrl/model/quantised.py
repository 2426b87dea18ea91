"""Keeps a frozen model in 4 bits beneath an adapter (QLoRA).

Every linear layer of the decoder keeps its weight in NF4, in blocks of 64 values with one scale
each. For a product the weight is expanded to the computing dtype, the same way in sampler and
trainer, forward and backward, so that all of them compute with the same weights. The embedding, the
head and layers whose weight the family reads directly stay as they are. Dettmers et al., "QLoRA",
2023, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.model import ranks
from agentrl.model.logprobs import decoder_of
from agentrl.model.lora import without_adapter_names

BYTES_OF_A_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of the value, of its block's 8-bit scale, and of the scale that 256 blocks share."""


class _Multiply(torch.autograd.Function):
    """Multiplies by a 4-bit weight, and keeps the 4 bits for the backward pass, not the matrix."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, state: Any) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(packed)
        ctx.state = state
        return x @ _matrix(packed, state).to(x.dtype).T

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore
        (packed,) = ctx.saved_tensors
        return grad @ _matrix(packed, ctx.state).to(grad.dtype), None, None


class QuantisedLinear(nn.Linear):
    """A linear layer whose frozen weight is in NF4."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        """
        Args:
            device: device on which the layer stays, because its scales do not move with it.
        """
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().to(device)
        packed, self.scales = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        product: Any = _Multiply.apply(input, self.weight, self.scales)
        return product if self.bias is None else product + self.bias


def _matrix(packed: Tensor, state: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, state)


def require_quantisation() -> None:
    """Checks that `model.quantization` can be used here.

    Raises:
        ConfigError: bitsandbytes is not installed, or there are several ranks.
    """
    if ranks.size() > 1:
        raise ConfigError(
            f"model.quantization works on one rank only, but {ranks.size()} were started; start "
            "one, or leave it out"
        )
    if not importlib.util.find_spec("bitsandbytes"):
        raise ConfigError(
            "model.quantization needs the bitsandbytes package: pip install 'agentrl-gym[8bit]'"
        )


def quantise(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Moves a model to the device and quantises its decoder's linear layers, one at a time.

    Args:
        model: a model in host memory; unquantised, it need not fit on the device.
    """
    decoder = decoder_of(model)
    whole = set(without_adapter_names(model))
    inside = {id(module) for module in decoder.modules()}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and id(module) in inside and name not in whole:
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, QuantisedLinear(module, device))
    return model.to(device)  # pyright: ignore[reportArgumentType, reportReturnType, reportCallIssue]
