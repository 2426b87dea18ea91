"""Shards networks over the ranks (FSDP2), so that they need not fit on a single GPU.

Weights are float32 whatever dtype the model computes in. Before a layer runs, its weights are
gathered in the computing dtype; after its backward pass the gradients of all ranks are summed in
float32, and each rank keeps those of its shard. The update is then the same as that of the master
weights in `agentrl.train.optimizer` (docs/precision.md). Zhao et al., "PyTorch FSDP", 2023,
https://arxiv.org/abs/2304.11277.

Every rank reads its own rows of a model's files (`reading_rows`), so that no process ever holds
more than its part and one tensor. Until `shard` they are kept beside parameters of the whole's
size, whose memory is never touched: whatever is frozen, added or tied before sees an ordinary
module. What no file holds, as adapters that are drawn at random, `shard` sends from rank 0, so it
starts equal everywhere.

With a single rank these functions do nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import types
from collections.abc import Iterator, Mapping
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from agentrl.model import context, logprobs, ranks
from agentrl.model.tensors import set_dtype

Module = TypeVar("Module", bound=nn.Module)

_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Without it transformers' threads read whole tensors faster than they are cut."""


@contextlib.contextmanager
def reading_rows(family: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    """Yields a class whose `from_pretrained` gives each rank its rows of every parameter, as a
    `DTensor`, within the block. Every rank enters it.

    Only those rows are read. A tensor that the files hold in another form, such as a mixture's
    experts one by one, is read whole and cut, one after the other.
    """
    mesh = _mesh("cpu")

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, *args, **kwargs)
        converted = [
            re.findall(r"[A-Za-z]\w+", pattern)
            for each in get_model_conversion_mapping(self)
            if isinstance(each, WeightConverter)
            for pattern in each.target_patterns
        ]
        for prefix, module in self.named_modules():
            for name, parameter in module._parameters.items():
                full = f"{prefix}.{name}"
                if not any(all(word in full for word in words) for words in converted):
                    module._parameters[name] = _rows_of(parameter, mesh)

    def keep_rows(module: nn.Module, name: str, parameter: Any) -> Any:
        placeholder = module._parameters.get(name)
        loaded = placeholder is not None and placeholder.is_meta and not parameter.is_meta
        return _rows_of(parameter, mesh) if loaded else None

    own = {"__init__": init, "__module__": family.__module__}
    handle = register_module_parameter_registration_hook(keep_rows)
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield type(family.__name__, (family,), own)
    finally:
        handle.remove()
        os.environ.pop(_ONE_BY_ONE)
        if before is not None:
            os.environ[_ONE_BY_ONE] = before


def _rows_of(parameter: Any, mesh: DeviceMesh) -> Any:
    """Returns the parameter with this rank's rows alone; one without rows as it is."""
    if (
        parameter is None
        or isinstance(parameter, DTensor)
        or 0 in (parameter.ndim, *parameter.shape)
    ):
        return parameter
    rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None).clone()
    cut: Any = nn.Parameter(rows, requires_grad=False)
    cut._is_hf_initialized = getattr(parameter, "_is_hf_initialized", False)
    return cut


def set_rows_aside(model: PreTrainedModel) -> None:
    """Gives a model of `reading_rows` parameters of the whole's size, each with its `rows`. Their
    memory is not used until it is written to."""
    whole: dict[Tensor, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if parameter not in whole:
                empty = _untouched(parameter)
                # As transformers loads a whole model, whatever the family declares.
                whole[parameter] = nn.Parameter(empty, requires_grad=empty.is_floating_point())
                whole[parameter].rows = parameter.detach()
            module._parameters[name] = whole[parameter]


@contextlib.contextmanager
def held_whole(module: nn.Module) -> Iterator[None]:
    """Gathers the parameters of a module of which ranks have set rows aside, within the block, and
    keeps the rows of what they then are. Every rank enters it."""
    parts: list[Any] = [each for each in module.parameters() if hasattr(each, "rows")]
    for each in parts:
        each.data.copy_(each.rows.full_tensor())
    yield
    for each in parts:
        each.rows = _rows_of(each, each.rows.device_mesh).detach()
        each.data = _untouched(each)


def _untouched(tensor: Tensor) -> Tensor:
    """Returns a tensor of this shape in pages of its own, which take memory once they are written
    to. The allocator could return pages that are in memory already."""
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


def _mesh(kind: str) -> DeviceMesh:
    if (group := ranks.everywhere()) is None:
        return init_device_mesh(kind, (ranks.size(),), mesh_dim_names=("data",))
    return DeviceMesh.from_group(group, kind, mesh_dim_names=("data",))


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
    """Gives every rank its shard of a module. Every rank calls it.

    A single rank gets the module back unchanged.

    Args:
        module: a model of `agentrl.model.load.load_model`, or a critic around its decoder, in which
            everything is already frozen, added or tied as it is to be.
        dtype: dtype of the forward and backward pass.
        optimizer: `adamw_cpu` keeps shards and gradients in host memory; a layer's weights are on
            the device while it computes.
    """
    if ranks.size() == 1:
        return module
    offload = OffloadPolicy()
    if optimizer == "adamw_cpu":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    _wrap(module, _mesh(device.type), dtype, offload)
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0, group=ranks.everywhere())
    finish(module, dtype=dtype, device=device)
    return module


def finish(module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Makes a network that is in parts sum gradients, and compute log-probs as others do."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            # The loss is a sum over the batch, so gradients of ranks are summed, not averaged.
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
        if isinstance(each, PreTrainedModel):
            object.__setattr__(each, "computes_on", device)
            object.__setattr__(each, "row_context", context.current())
    if isinstance(module, PreTrainedModel):
        set_dtype(module.config, dtype)  # servers load the weights in it
    if isinstance(module, PreTrainedModel) and isinstance(module, FSDPModule):
        # FSDP gathers weights only for `forward` and for methods that are registered.
        method = types.MethodType(logprobs.logprobs_and_routing, module)
        object.__setattr__(module, "fsdp_logprobs", method)
        register_fsdp_forward_method(module, "fsdp_logprobs")


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
        _divide(root.value_head, mesh=mesh, offload_policy=offload)
    for layer in getattr(decoder, "layers", ()):
        _divide(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # The root is sharded again after the backward pass, which a frozen network does not have.
    frozen = not any(parameter.requires_grad for parameter in module.parameters())
    _divide(
        module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=frozen
    )


def _divide(module: nn.Module, **how: Any) -> None:
    """Shards what is still whole of a module, and fills the shards at once, so that rows and shards
    of no more than one module are in memory together."""
    whole = {n: p for n, p in module.named_parameters() if not isinstance(p, DTensor)}
    fully_shard(module, **how)
    _fill(dict(module.named_parameters()), whole)


@torch.no_grad()
def _fill(shards: dict[str, Any], whole: dict[str, nn.Parameter]) -> None:
    """Fills each shard with the rows that this rank has read, or those of rank 0's tensor."""
    for name, parameter in whole.items():
        shard = shards[name]
        local = shard.to_local()
        if (rows := getattr(parameter, "rows", None)) is None:
            sent = parameter.detach().to(local.device)
            rows = distribute_tensor(sent, shard.device_mesh, shard.placements)
        local.copy_(rows.to_local())
