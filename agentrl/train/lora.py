"""Training a low-rank adapter instead of all weights: PEFT's layers in place of the linear ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from agentrl.config import LoraSection
from agentrl.errors import ConfigError
from agentrl.sync.adapter import CONFIG_FILE, has_adapter

_MISSING = "low-rank adapters need the peft package: pip install 'agentrl[lora]'"


def add_adapter(model: PreTrainedModel, section: LoraSection) -> None:
    """Freeze the model and put a trainable adapter beside its linear layers.

    One of the two matrices of each layer starts at zero, so the model computes what it did before.
    The head stays as it is: its log-probs are computed from its weight alone.

    Raises:
        ConfigError: PEFT is not installed, or no linear layer has one of the names in `targets`.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError(_MISSING) from None
    base: Any = model.name_or_path
    targets = section.targets
    adapter = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
    )
    try:
        model.add_adapter(adapter)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets = {targets!r}: {error}") from error
    head: Any = model.get_output_embeddings()
    if any(p.requires_grad for p in head.parameters()):
        raise ConfigError("model.lora.targets names the language-model head; leave it out")
    model.train()


@contextlib.contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """The frozen model that the adapter sits on, while the block runs: the reference of a KL.

    A model without an adapter is left as it is.
    """
    if not has_adapter(model):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def is_adapter(path: str) -> bool:
    """Whether a directory holds an adapter and not a whole model."""
    return (Path(path) / CONFIG_FILE).is_file()


def merged(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The base model with the adapter at `path` added into its weights.

    Raises:
        ConfigError: PEFT is not installed, or the adapter is of another model.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise ConfigError(_MISSING) from None
    try:
        whole = PeftModel.from_pretrained(model, path).merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the adapter at {path} does not fit its base model: {error}") from error
    return whole.requires_grad_(True)
