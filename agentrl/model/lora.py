"""Trains a low-rank adapter instead of all weights, with PEFT's layers around the linear ones."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from agentrl.config import LoraSection
from agentrl.errors import ConfigError
from agentrl.model.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_tensors, has_adapter
from agentrl.model.logprobs import decoder_of
from agentrl.model.sharding import held_whole

logger = logging.getLogger(__name__)

_FUSED_FAMILIES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_FUSED = re.compile(r"(^|\.)(out_proj|conv1d)$")
# Mamba's step sizes, routers, and indexers that choose keys: the family reads their weights itself.
_READ_BY_WEIGHT = re.compile(r"(mamba|mixer)\.dt_proj$|router\.classifier$|\.indexer\.")
_MISSING = "low-rank adapters need the peft package: pip install 'agentrl-gym[lora]'"


def add_adapter(model: PreTrainedModel, section: LoraSection, *, path: str) -> None:
    """Freezes the model and adds a trainable adapter to its linear layers.

    One of the two matrices of each layer starts at zero, so the model's results do not change. The
    head gets no adapter, because log-probs are computed from its weight alone.

    Args:
        path: path from which the model was loaded; the adapter names it as its base.

    Raises:
        ConfigError: PEFT is not installed, no linear layer has a name in `targets`, `targets` names
            the head or another module than a linear layer, or `path` is itself an adapter.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError(_MISSING) from None
    if is_adapter(path):
        raise ConfigError(
            f"model.path = {path!r} is an adapter, but model.lora needs a whole model as its base; "
            f"make one with `agentrl export {path} --out DIR`"
        )
    targets = section.targets
    # A relative path would mean nothing in another folder.
    base = str(Path(path).resolve()) if Path(path).is_dir() else path
    left_out = without_adapter_names(model)
    adapter = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=left_out or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        # transformers' own methods do the same, but refuse versions of PEFT that work.
        inject_adapter_in_model(adapter, model)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets = {targets!r}: {error}") from error
    head: Any = model.get_output_embeddings()
    if any(p.requires_grad for p in head.parameters()):
        raise ConfigError("model.lora.targets names the language-model head; leave it out")
    saved = {id(each) for each in adapter_tensors(model).values()}
    unsaved = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in saved]
    if unsaved:
        names = sorted({re.sub(r"\.lora_.*", "", name) for name in unsaved})
        raise ConfigError(
            f"model.lora.targets names {', '.join(names[:3])}, which is no linear layer: servers "
            "take no adapter of it, and of a tied embedding it would change the head too; leave "
            "it out"
        )
    model.eval()


def without_adapter_names(model: PreTrainedModel) -> list[str]:
    """Returns the names of linear layers that get no adapter, whatever the targets.

    Those are the layers outside the decoder, which are not trained, and the layers whose weight the
    family reads directly, so that PEFT's layer would be bypassed.
    """
    text = {id(module) for module in decoder_of(model).modules()}
    # PEFT's own list of families whose fused kernels read a projection's weight.
    fused = model.config.get_text_config().model_type in _FUSED_FAMILIES
    left_out: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        reads_weight = _READ_BY_WEIGHT.search(name) or (fused and _FUSED.search(name))
        # A router that is a linear layer returns more than one tensor.
        routes = "router" in type(module).__name__.lower()
        if id(module) not in text or reads_weight or routes:
            left_out.append(name)
    heads = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    found = [name for name in left_out if id(model.get_submodule(name)) not in heads]
    if kinds := sorted({name.rpartition(".")[2] for name in found}):
        logger.warning(
            "model.lora: %d linear layers get no adapter, because they are not trained or their "
            "weight is read directly: %s",
            len(found),
            ", ".join(kinds),
        )
    return found


@contextlib.contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Switches a model's adapter off while the block runs: its base is the reference of a KL term.

    A model without an adapter is left as it is.
    """
    if not has_adapter(model):
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        module.enable_adapters(False)
    # PEFT freezes an adapter that it switches off. If this is the first forward pass of a sharded
    # model, FSDP would then keep the adapter's gradients in the computing dtype.
    for parameter in learning:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)


def is_adapter(path: str) -> bool:
    """Tells whether a directory holds an adapter and not a whole model."""
    return (Path(path) / CONFIG_FILE).is_file()


def base_of(path: str) -> str:
    """Returns the path or name of the model on which an adapter was trained.

    Raises:
        ConfigError: the adapter's configuration names none.
    """
    try:
        base = json.loads((Path(path) / CONFIG_FILE).read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{Path(path) / CONFIG_FILE} names no base model: {error}") from error
    if not base or Path(base).resolve() == Path(path).resolve():
        raise ConfigError(f"{Path(path) / CONFIG_FILE} names no base model")
    return base


def merged(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Merges the adapter at `path` into the weights of its base model, and returns the model.

    Raises:
        ConfigError: PEFT is not installed, or the adapter's tensors are not exactly those that its
            configuration puts on this model.
    """
    try:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise ConfigError(_MISSING) from None
    try:
        adapted = PeftModel.from_pretrained(model, path)
        # PEFT starts what the file lacks anew, which merges as nothing, and ignores what is left.
        names = (name for name, _ in adapted.named_parameters() if ".lora_" in name)
        expected = {name.replace(f".{adapted.active_adapter}", "") for name in names}
        with safe_open(Path(path) / WEIGHTS_FILE, framework="pt") as file:
            found = {name for name in file.keys() if ".lora_" in name}  # noqa: SIM118
        if different := sorted(expected ^ found):
            raise ValueError(
                f"{WEIGHTS_FILE} lacks {len(expected - found)} tensors and has "
                f"{len(found - expected)} that nothing reads, such as {different[0]}"
            )
        for module in adapted.modules():
            if isinstance(module, BaseTunerLayer):
                with held_whole(module.get_base_layer()):
                    module.merge()
        whole = adapted.unload()
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise ConfigError(f"the adapter at {path} does not fit its base model: {error}") from error
    return whole.requires_grad_(True)
