"""Iterates over a model's full weights one by one, also if they are sharded over ranks.

Each tensor of a sharded model is cast to the dtype that the model computes in, gathered by all
ranks together, and freed before the next one. So every rank has to iterate, and needs memory for
a single full tensor; only rank 0 uses the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from agentrl.model.adapter_files import adapter_tensors, has_adapter


def is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """Returns the dtype in which a sharded model computes; its own parameters are float32."""
    dtype: Any = model.config.dtype
    return dtype


def set_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Sets the dtype that a model's `config.json` states, also those of its text and its towers."""
    config.dtype = dtype
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            set_dtype(part, dtype)


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor unchanged, or gathers a sharded one and casts it to `dtype`.

    For sharded tensors this is a collective operation of all ranks.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    cast: Any = tensor
    if dtype is not None and tensor.is_floating_point():
        cast = tensor.to(dtype)
    return cast.full_tensor()


class CheckpointTensors:
    """Parameters and persistent buffers under the names of `save_pretrained`, tied ones once.

    Attributes:
        shapes: name -> tensor on the meta device, which has a shape and dtype but no data.
    """

    shapes: dict[str, Tensor]

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tensors: dict[str, Tensor] = {}
        seen: set[object] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            place = id(tensor) if isinstance(tensor, DTensor) else _place(tensor)
            if place not in seen or tensor.numel() == 0:
                self._tensors[name] = tensor.detach()
            seen.add(place)
        self._dtype: torch.dtype | None = None
        if is_sharded(model):
            self._dtype = computing_dtype(model)
            empty = {name: self._empty(tensor) for name, tensor in self._tensors.items()}
            self.shapes = revert_weight_conversion(model, empty)
        else:
            self._tensors = revert_weight_conversion(model, self._tensors)
            self.shapes = {name: tensor.to("meta") for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and full tensors, in no particular order.

        The tensors of a model that is not sharded share its memory, unless its checkpoints store
        them in another form than its modules do (mixture-of-experts weights, for example).
        """
        if self._dtype is None:
            yield from self._tensors.items()
            return
        parts = [[name] for name in self._tensors]
        alone = [self._shapes_of(names) for names in parts]
        if {name for each in alone for name in each} != self.shapes.keys():
            parts = [list(self._tensors)]  # some combine several tensors, so gather all of them
        for names in parts:
            tensors = {name: whole(self._tensors[name], self._dtype) for name in names}
            yield from revert_weight_conversion(self._model, tensors).items()

    def _shapes_of(self, names: list[str]) -> dict[str, Tensor]:
        tensors = {name: self._empty(self._tensors[name]) for name in names}
        return revert_weight_conversion(self._model, tensors)

    def _empty(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if isinstance(tensor, DTensor) and tensor.is_floating_point() else None
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")


def take_part(model: PreTrainedModel) -> None:
    """Takes part in the collectives while rank 0 gathers the weights for the servers."""
    if has_adapter(model):
        for tensor in adapter_tensors(model).values():
            whole(tensor)
    else:
        for _ in CheckpointTensors(model):
            pass


@torch.no_grad()
def copy_trained(model: PreTrainedModel, into: PreTrainedModel | None) -> None:
    """Copies the trained parameters into another model of the same architecture.

    Args:
        into: the target on rank 0; None on the other ranks, which only take part in gathering.
    """
    targets = {} if into is None else dict(into.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor = whole(parameter, computing_dtype(model))
            if into is not None:
                targets[name].copy_(tensor)


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
