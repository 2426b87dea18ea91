"""Reads and writes low-rank adapters (LoRA) in the PEFT library's format.

PEFT, transformers and vLLM load a folder with `adapter_model.safetensors` and
`adapter_config.json`, which names the base model. Hu et al., "LoRA: Low-Rank Adaptation of Large
Language Models", 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ADAPTER_FOLDER = "adapter"
"""Folder in a run's weight directory from which servers load the adapter, also when restarted."""
_NAME = "default"
"""PEFT's name for a model's only adapter; part of the parameters' names."""


def has_adapter(model: nn.Module) -> bool:
    """Returns whether only an adapter of this model is trained."""
    return _NAME in (getattr(model, "peft_config", None) or {})


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the adapter's parameters (not copies) by name in `adapter_model.safetensors`."""
    marker = f".{_NAME}."
    return {
        f"base_model.model.{name.replace(marker, '.')}": parameter
        for name, parameter in model.named_parameters()
        if marker in name
    }


def adapter_config(model: nn.Module) -> str:
    """Returns the text of `adapter_config.json`."""
    configs: Any = model.peft_config
    values = configs[_NAME].to_dict() | {"inference_mode": True}
    return json.dumps(values, indent=1, sort_keys=True, default=_as_list) + "\n"


def write_adapter(model: nn.Module, folder: Path) -> Path:
    """Writes the adapter to its folder atomically: a reader sees either the old or the new one.

    Returns:
        The path of the weight file.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: _whole(tensor).cpu().contiguous() for name, tensor in adapter_tensors(model).items()
    }
    # The configuration never changes, so the rename of the weight file is the whole update.
    for name, content in (
        (CONFIG_FILE, adapter_config(model).encode()),
        (WEIGHTS_FILE, save(tensors, metadata={"format": "pt"})),
    ):
        aside = folder / f".{name}.tmp"
        try:
            aside.write_bytes(content)
            os.replace(aside, folder / name)
        finally:
            aside.unlink(missing_ok=True)
    return folder / WEIGHTS_FILE


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _as_list(value: object) -> list:
    """Sorts PEFT's sets of module names, whose order changes from run to run."""
    if isinstance(value, set):
        return sorted(value)
    raise TypeError(f"{value!r} of the adapter's configuration is not JSON")
