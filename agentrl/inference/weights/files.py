"""Writes a model's weights to a single safetensors file, with the names of its checkpoint."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.model.adapter_files import ADAPTER_FOLDER, has_adapter, write_adapter
from agentrl.model.tensors import CheckpointTensors

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_WEIGHTS_NAME = re.compile(r"policy-(\d+)\.safetensors")
_LEFTOVER_NAME = re.compile(r"\.policy-\d+\.safetensors\.tmp")


def weights_path(directory: Path, version: int) -> Path:
    return directory / f"policy-{version}.safetensors"


def write_policy(model: PreTrainedModel, directory: Path, version: int) -> Path:
    """Writes all weights of `model`, or only the adapter if only an adapter is trained.

    Returns:
        The path of the file, to be sent to the servers.

    Raises:
        OSError: see `write_weights`.
    """
    if has_adapter(model):
        return write_adapter(model, directory / ADAPTER_FOLDER)
    path = weights_path(directory, version)
    write_weights(model, path)
    return path


def write_weights(model: PreTrainedModel, path: Path) -> None:
    """Writes the model's weights atomically, in the dtype that the model computes in.

    Tensors are written one by one: a CPU model is not copied, and for a GPU model or a sharded one
    (see `agentrl.model.tensors`) the host holds a single tensor at a time. The file is not fsynced,
    because it is useless after a crash of the machine.

    Raises:
        OSError: the directory cannot be written or is full; no partial file is left.
    """
    tensors = CheckpointTensors(model)
    header: dict[str, dict] = {}
    end = 0
    # Wide dtypes first, so that every tensor is aligned, which readers of memory maps need.
    for name, shape in sorted(tensors.shapes.items(), key=lambda item: -item[1].itemsize):
        begin, end = end, end + shape.nbytes
        header[name] = {
            "dtype": _DTYPES[shape.dtype],
            "shape": list(shape.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    temporary = path.with_name(f".{path.name}.tmp")
    remaining = iter(tensors)
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)))
            file.write(encoded)
            for name, tensor in remaining:
                file.seek(8 + len(encoded) + header[name]["data_offsets"][0])
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
            file.truncate(8 + len(encoded) + end)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        for _ in remaining:  # other ranks wait for this one in every collective
            pass


def remove_weights(directory: Path, *, keep: int | None = None) -> None:
    """Deletes all versions except `keep`, and temporary files of killed writers.

    An adapter is kept, because a restarted server reads it. Servers that have a deleted file open
    can still read it.
    """
    for path in directory.iterdir():
        match = _WEIGHTS_NAME.fullmatch(path.name)
        if (match and match[1] != str(keep)) or _LEFTOVER_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)
