"""A frozen model in 4 bits beneath an adapter (QLoRA).

Every linear layer of the decoder keeps its weight in NF4, blocks of 64 values with a scale each.
To multiply it is made a matrix of the computing dtype again, by sampler and trainer alike, forwards
and backwards: whoever computes with this model computes with the same weights. Embedding, head and
what a family reads past its layers stay as they are. Dettmers et al., "QLoRA", 2023,
https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.train import ranks
from agentrl.train.logprobs import decoder_of
from agentrl.train.lora import without_adapter_names

BYTES_OF_A_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""The value, the 8 bits of its block's scale, and the scale of 256 such."""


class _Multiply(torch.autograd.Function):
    """Keeps the 4 bits for the backward pass, not the matrix."""

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
    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        """
        Args:
            device: where it stays; its scales do not move with the module.
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
    """Raises:
    ConfigError: bitsandbytes is not installed, or several ranks share the weights.
    """
    if ranks.size() > 1:
        raise ConfigError(
            f"model.quantization works on one rank, and {ranks.size()} were started, which share "
            "the weights among them; leave it out"
        )
    if not importlib.util.find_spec("bitsandbytes"):
        raise ConfigError(
            "model.quantization needs the bitsandbytes package: pip install 'agentrl-gym[8bit]'"
        )


def quantise(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Put the model on the device, its decoder's linear layers in 4 bits, one after the other.

    Args:
        model: on the host; it need not fit the device whole.
    """
    decoder = decoder_of(model)
    whole = set(without_adapter_names(model))
    inside = {id(module) for module in decoder.modules()}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and id(module) in inside and name not in whole:
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, QuantisedLinear(module, device))
    return model.to(device)  # pyright: ignore[reportArgumentType, reportReturnType, reportCallIssue]
