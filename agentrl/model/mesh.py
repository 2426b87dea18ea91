"""Divides a model's layers over ranks (`train.parallel.tensor`, `train.parallel.expert`).

transformers does it, with the plan that comes with the model's family: the ranks of a row hold
parts of each matrix and exchange activations; ranks of any rows hold some of a mixture's experts
and are sent the tokens that chose them. What remains is sharded by FSDP over the ranks with
different rows. Every rank reads its own part of the files, and none ever holds the whole model.

    ranks 0 1 2 3 with tensor = 2, expert = 4:
        rows      A A B B        both ranks of a row compute it together
        shards    0 0 1 1        of what each of these two holds, so gradients are summed over A, B
        experts   0 1 2 3        each holds a quarter of them, for rows A and B
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, _AllReduceBackward
from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce
from transformers.distributed.utils import TransformersDeviceMesh

from agentrl.config import ParallelSection
from agentrl.errors import ConfigError
from agentrl.model import ranks
from agentrl.model.lora import is_adapter

STYLE = "replicated_with_grad_allreduce"


class _SummedGradient(ReplicatedWithGradAllReduce):
    """Sums the gradient of a norm within heads over the ranks that have different heads.

    transformers sums the gradient as it has accumulated, so a second micro-batch would count the
    first one's again.
    """

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        original, group = module.forward, mesh.get_group()

        def forward(*args: Any, **kwargs: Any) -> Any:
            own: dict[str, Any] = dict(module._parameters)
            for name, parameter in own.items():
                if parameter is not None:
                    summed: Any = _AllReduceBackward.apply(parameter, group)
                    module._parameters[name] = summed
            try:
                return original(*args, **kwargs)
            finally:
                module._parameters.update(own)

        module.forward = forward
        return module


ALL_PARALLEL_STYLES.register(STYLE, _SummedGradient())  # pyright: ignore[reportArgumentType]


def divided(
    family: type[PreTrainedModel],
    config: PretrainedConfig,
    path: str,
    parallel: ParallelSection,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[type[PreTrainedModel], dict[str, Any]]:
    """Returns the family's class and the arguments with which its `from_pretrained` loads each
    rank's part, in float32. Every rank calls it.

    Args:
        dtype: dtype of the forward and backward pass.

    Raises:
        ConfigError: the family or this model cannot be divided so.
    """
    _require_plan(family, config, path, parallel)
    shards = ranks.size() // parallel.tensor
    if shards == 1 and dtype != torch.float32:
        raise ConfigError(
            f"model.dtype = '{str(dtype).removeprefix('torch.')}' with train.parallel.tensor = "
            f"{parallel.tensor} on {ranks.size()} ranks: weights are float32, and only ranks with "
            "different rows gather them in another dtype; start twice as many ranks, or set "
            "model.dtype = 'float32'"
        )
    layout = DistributedConfig(
        fsdp_size=shards,
        tp_size=parallel.tensor,
        ep_size=parallel.expert,
        fsdp_mixed_precision=dtype == torch.bfloat16,
    )

    def prepare(cls: Any, distributed_config: Any, device_map: Any = None) -> tuple:
        names = ("pp", "dp_replicate", "fsdp", "tp"), ("pp", "dp_replicate", "efsdp", "ep")
        sizes = (1, 1, shards, parallel.tensor), (1, 1, layout.efsdp_size, parallel.expert)
        dense, experts = (
            init_device_mesh(device.type, size, mesh_dim_names=name)
            for size, name in zip(sizes, names, strict=True)
        )
        return distributed_config, device, TransformersDeviceMesh(dense, experts)

    # The head's weight is read by itself, so it is gathered with the root and not in its forward.
    own = {
        "prepare_distribute_model": classmethod(prepare),
        "_fsdp_plan": {},
        "__module__": family.__module__,
    }
    return type(family.__name__, (family,), own), {"distributed_config": layout}


def _require_plan(
    family: type[PreTrainedModel], config: PretrainedConfig, path: str, parallel: ParallelSection
) -> None:
    """Checks that the model's family says how it is divided, and that its numbers can be."""
    name, text = family.__name__, config.get_text_config()
    remedy = "divide it with train.parallel.data and context only"
    if is_adapter(path):
        raise ConfigError(
            f"model.path = {path!r} is an adapter; make a whole model of it with `agentrl export` "
            f"before it is divided, or {remedy}"
        )
    if text is not config:
        raise ConfigError(f"{name} has towers beside its decoder, which are not divided; {remedy}")
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if parallel.expert > 1:
        if not getattr(text, "base_model_ep_plan", None) or not experts:
            raise ConfigError(
                f"train.parallel.expert = {parallel.expert}: transformers has no plan for the "
                f"experts of {name}; set it to 1"
            )
        if experts % parallel.expert:
            raise ConfigError(
                f"train.parallel.expert = {parallel.expert} does not divide the {experts} experts "
                f"of {name}; choose a divisor"
            )
    if parallel.tensor == 1:
        return
    if not getattr(text, "base_model_tp_plan", None):
        raise ConfigError(
            f"train.parallel.tensor = {parallel.tensor}: transformers has no plan for {name}; "
            f"{remedy}"
        )
    if experts and parallel.expert == 1:
        raise ConfigError(
            f"train.parallel.tensor = {parallel.tensor} would cut each of the {experts} experts of "
            f"{name}; divide them with train.parallel.expert, a multiple of {parallel.tensor}"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, key, None)) and heads % parallel.tensor:
            raise ConfigError(
                f"train.parallel.tensor = {parallel.tensor} does not divide {key} = {heads} of "
                f"{name}; choose a divisor"
            )
