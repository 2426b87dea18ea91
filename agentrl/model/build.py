"""Builds every network of a run, from its files to the form that computes.

    load           in the dtype of a single rank, or in float32 to be sharded; proves it exact
    freeze         towers, routers and what `model.freeze` names
    adapter        `model.lora`, on 4-bit weights if `model.quantization` is set
    checkpointing  layers that are computed again in the backward pass
    shard          every rank keeps its part; if layers are divided, each has read it in `load`
    compile        `model.compile`, and proves it exact again

A new kind of network is a new role here; nothing else assembles one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, overload

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.model import ranks, sharding
from agentrl.model.compile import compile_layers
from agentrl.model.critic import Critic
from agentrl.model.load import (
    freeze_named,
    load_masters,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    set_gradient_checkpointing,
    train_tower,
)
from agentrl.model.logprobs import decoder_of, packing_of, sample_logprobs
from agentrl.model.lora import add_adapter
from agentrl.model.quantised import quantise, require_quantisation
from agentrl.model.routers import freeze_routers, require_aux_loss
from agentrl.model.routes import make_replayable, require_choices

ModelRole = Literal["policy", "reference", "teacher", "sampler"]
_KEYS = {"critic": "critic.path", "reference": "model.reference", "teacher": "teacher.path"}
"""Key of the run file that names the model of a role."""

Module = TypeVar("Module", bound=nn.Module)


@dataclass(slots=True, frozen=True)
class Network(Generic[Module]):
    """A network, ready to compute."""

    module: Module
    weights: Module | None
    """The same in float32, exactly as its files hold it, for the optimizer to begin with. None if
    nothing of the files is trained, or if `module` itself is in float32."""


@overload
def build(
    path: str, role: ModelRole, config: RunConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> Network[PreTrainedModel]: ...
@overload
def build(
    path: str,
    role: Literal["critic"],
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Network[Critic]: ...
def build(
    path: str, role: str, config: RunConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> Network:
    """Builds a network. Every rank calls it and gets its part.

    Args:
        path: a local directory, or a name on the Hugging Face hub.
        role: `policy` and `critic` are trained; `reference` and `teacher` are frozen; a `sampler`
            is whole in the process that calls it, whatever other ranks do.
        tokenizer: the policy's, which another model must share.

    Raises:
        ConfigError: the model cannot be loaded, cannot be computed exactly, has another tokenizer,
            or does not support what the run file asks for.
    """
    section, parallel = config.model, role != "sampler"
    device, dtype = resolve_device(section.device), resolve_dtype(section.dtype)
    if tokenizer is not None and path != section.path:
        require_same_tokenizer(path, tokenizer, _KEYS[role])

    quantised = role == "policy" and section.quantization
    if quantised:
        require_quantisation()
    longest = config.rollout.max_context_tokens
    divided = parallel and config.train.parallel.splits_layers and ranks.size() > 1
    if quantised:
        whole = load_model(path, dtype=dtype, device="cpu", max_tokens=longest)
        model = quantise(whole, device)
    else:
        mesh = config.train.parallel if parallel else None
        model = load_model(path, dtype=dtype, device=device, max_tokens=longest, parallel=mesh)

    if role == "policy":
        _prepare_policy(model, config)
    elif role in ("reference", "teacher"):
        model.requires_grad_(False)
        if isinstance(model, FSDPModule):
            model.set_reshard_after_forward(True)  # no backward pass needs what it gathers
    if role in ("policy", "critic"):
        set_gradient_checkpointing(model, section.gradient_checkpointing)
    module = Critic(decoder_of(model)) if role == "critic" else model

    if parallel and not divided:
        # What is not trained has no state of an optimizer, and stays on the device.
        optimizer = config.train.optimizer if role in ("policy", "critic") else "adamw"
        module = sharding.shard(module, dtype=dtype, device=device, optimizer=optimizer)
    if role == "policy" and config.train.router_replay:
        require_choices(model)
        if isinstance(model, FSDPModule):
            model.reshard()  # without a backward pass the embedding and the head would stay whole
    if section.compile and isinstance(module, Critic):
        compile_layers(module, module.backbone, module)
    elif section.compile and role == "policy":
        compile_layers(
            module,
            decoder_of(model),
            lambda micro: sample_logprobs(model, micro, temperature=1.0)[0],
        )

    weights = None
    # The shards of several ranks are float32. An adapter's weights do not come from a file.
    if ranks.size() == 1 and (role == "critic" or (role == "policy" and not section.lora.rank)):
        weights = load_masters(path, dtype)
        if weights is not None and role == "critic":
            weights = Critic(decoder_of(weights))
    return Network(module, weights)


def _prepare_policy(model: PreTrainedModel, config: RunConfig) -> None:
    """Freezes what is not to be trained, and adds the adapter."""
    section = config.model
    if not section.freeze_tower:
        train_tower(model)
    if section.freeze_router:
        freeze_routers(model)
    freeze_named(model, section.freeze)
    if config.train.router_aux_loss:
        require_aux_loss(model)
    if config.train.router_replay:
        make_replayable(model)
        if section.gradient_checkpointing and not packing_of(model):
            raise ConfigError(
                f"train.router_replay: {type(model).__name__} runs one segment at a time, and when "
                "the backward pass recomputes a layer, only the last segment's routes are known; "
                "set model.gradient_checkpointing = false"
            )
    if section.lora.rank:
        add_adapter(model, section.lora, path=section.path)
    if section.quantization:
        dtype = resolve_dtype(section.dtype)
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.data = parameter.data.to(dtype)  # PEFT took the dtype of the packed weights


def require_same_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Checks that another model has the policy's tokenizer.

    Args:
        path: the model.
        key: key of the run file that names it.

    Raises:
        ConfigError: its tokenizer has other tokens, or other ids for them.
    """
    its, ours = load_tokenizer(path).get_vocab(), tokenizer.get_vocab()
    if its != ours:
        different = len(set(its.items()) ^ set(ours.items()))
        raise ConfigError(
            f"{key} = {path!r} has another tokenizer than the policy ({len(its)} tokens, the "
            f"policy's has {len(ours)}; {different} entries differ); choose a model of the same "
            "family"
        )
