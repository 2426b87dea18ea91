"""A model's folder out of a checkpoint whose weights lie in shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.errors import ConfigError
from agentrl.train.checkpoint import MANIFEST_FILE, verify
from agentrl.train.model import require_empty
from agentrl.train.shard_files import read_shards
from agentrl.train.state import STATE_FILE


def export(checkpoint: Path, out: Path) -> None:
    """Write the model, or the adapter, that a checkpoint holds: whole, or not at all.

    Its weights are the float32 masters, and its `config.json` names what the run computed in.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
        ConfigError: `checkpoint` is not one or has no shards, or `out` is not empty.
    """
    require_empty(out)
    if not (checkpoint / MANIFEST_FILE).is_file():
        raise ConfigError(
            f"{checkpoint} is no checkpoint: it has no {MANIFEST_FILE}; name RUN/checkpoints/step_N"
        )
    names = verify(checkpoint)
    stem = next((s for s in ("model", "adapter_model") if (checkpoint / s).is_dir()), None)
    if stem is None:
        raise ConfigError(f"{checkpoint} has no shards: it is a model's folder already")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = read_shards(
        checkpoint / stem,
        lambda saved: {name: torch.empty_like(each, device="cpu") for name, each in saved.items()},
    )
    # transformers reads the "format" entry of the header.
    save_file(tensors, partial / f"{stem}.safetensors", metadata={"format": "pt"})
    for name in names:
        if "/" not in name and name not in (STATE_FILE, MANIFEST_FILE):
            shutil.copyfile(checkpoint / name, partial / name)
    if out.exists():
        out.rmdir()
    partial.rename(out)
