"""Shards networks over the ranks (FSDP2), so that they need not fit on a single GPU.

Weights are float32 whatever dtype the model computes in. Before a layer runs, its weights are
gathered in the computing dtype; after its backward pass the gradients of all ranks are summed in
float32, and each rank keeps those of its shard. The update is then the same as that of the master
weights in `agentrl.train.optimizer` (docs/precision.md). Zhao et al., "PyTorch FSDP", 2023,
https://arxiv.org/abs/2304.11277.

Rank 0 alone reads a model's files, into host memory, and runs every check there; the others build
the same modules around memory that they never touch. `shard` then splits the tensors, one layer at
a time, and sends each rank its part. So the host memory of a machine must hold one whole model, not
one per rank, and randomly initialised adapters start equal everywhere.

With a single rank these functions load a model as `agentrl.model.load` does, and shard nothing.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agentrl.model import context, logprobs, ranks
from agentrl.model import load as models
from agentrl.model.tensors import set_dtype

Module = TypeVar("Module", bound=nn.Module)


def load_model(
    path: str, *, dtype: torch.dtype, device: torch.device, max_tokens: int | None = None
) -> PreTrainedModel:
    """Loads the model at `path`, to be prepared and then passed to `shard`. Every rank calls it.

    Args:
        dtype: dtype that a single rank loads; with several ranks the weights are float32 until
            `shard`.
        device: device of a single rank's model; with several ranks it is in host memory.
        max_tokens: see `agentrl.model.load.load_model`.

    Raises:
        ConfigError: see `agentrl.model.load.load_model`; on rank 0 alone.
    """
    if ranks.size() == 1:
        return models.load_model(path, dtype=dtype, device=device, max_tokens=max_tokens)
    if ranks.rank() == 0:
        model = models.load_model(path, dtype=torch.float32, device="cpu", max_tokens=max_tokens)
        if context.current().size > 1:
            context.require_position_free(model.config)
        config = model.config
        implementations = [config._attn_implementation, config._experts_implementation]
        ranks.share([*implementations, *logprobs.logit_shape(model)])
    else:
        model = models.empty_model(path, max_tokens)
        found: Any = ranks.share()
        model.set_attn_implementation(found[0])
        model.set_experts_implementation(found[1])
        model.logit_shape = tuple(found[2:])  # pyright: ignore[reportArgumentType]
    return model


@dataclass(slots=True)
class Frozen:
    """A model that is not trained, with the attributes of a `Learner` that checkpoints read."""

    model: PreTrainedModel
    masters: Mapping[Tensor, Tensor] = field(default_factory=dict)
    """Empty: the model has no master weights."""

    @torch.no_grad()
    def become(self, model: PreTrainedModel) -> None:
        """Copies the weights of a model of the same shape, as they are used in its forward pass."""
        own, new = self.model.parameters(), model.parameters()
        for mine, its in zip(own, new, strict=True):
            mine, its = (
                each.to_local() if isinstance(each, DTensor) else each for each in (mine, its)
            )
            mine.copy_(its)


def shard(
    module: Module, *, dtype: torch.dtype, device: torch.device, optimizer: str = "adamw"
) -> Module:
    """Gives every rank its shard of rank 0's whole module. Every rank calls it.

    A single rank gets the module back unchanged.

    Args:
        module: a model of `load_model`, or a critic around its decoder, in which everything is
            already frozen, added or tied as it is to be.
        dtype: dtype of the forward and backward pass.
        optimizer: `adamw_cpu` keeps shards and gradients in host memory; a layer's weights are on
            the device while it computes.
    """
    if ranks.size() == 1:
        return module
    values = dict(module.named_parameters()) if ranks.rank() == 0 else {}
    if (group := ranks.everywhere()) is None:
        mesh = init_device_mesh(device.type, (ranks.size(),), mesh_dim_names=("data",))
    else:
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("data",))
    offload = OffloadPolicy()
    if optimizer == "adamw_cpu":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    _wrap(module, mesh, dtype, offload)
    _fill(module, values)
    for each in module.modules():
        if isinstance(each, PreTrainedModel):
            object.__setattr__(each, "computes_on", device)
            object.__setattr__(each, "row_context", context.current())
    if isinstance(module, PreTrainedModel):
        set_dtype(module.config, dtype)  # servers load the weights in it
        # FSDP gathers weights only for `forward` and for methods that are registered.
        method = types.MethodType(logprobs.logprobs_and_routing, module)
        object.__setattr__(module, "fsdp_logprobs", method)
        register_fsdp_forward_method(module, "fsdp_logprobs")
    return module


def _wrap(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, offload: OffloadPolicy) -> None:
    """Shards the module so that each layer is gathered by itself, and the rest (mostly embedding
    and head) together."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    root: Any = module
    if isinstance(module, PreTrainedModel):
        decoder = logprobs.decoder_of(module)
    else:
        decoder = root.backbone
        # The value head of a critic computes in float32.
        fully_shard(root.value_head, mesh=mesh, offload_policy=offload)
    for layer in getattr(decoder, "layers", ()):
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # The root is sharded again after the backward pass, which a frozen network does not have.
    frozen = not any(parameter.requires_grad for parameter in module.parameters())
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=frozen,
    )
    for each in module.modules():
        if isinstance(each, FSDPModule):
            # The loss is a sum over the batch, so gradients of ranks are summed, not averaged.
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def _fill(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Sends every rank its part of rank 0's values, one tensor at a time."""
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        whole = (
            values[name].to(local.device)
            if ranks.rank() == 0
            else torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
        )
        parts = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        local.copy_(parts.to_local())
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0, group=ranks.everywhere())
