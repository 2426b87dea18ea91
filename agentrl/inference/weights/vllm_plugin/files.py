"""vLLM's weight-transfer backend "agentrl", which loads weights from a safetensors file.

    init_info    {"directory": "/dev/shm/run"}     files outside of it are refused
    update_info  {"path": "/dev/shm/run/policy-7.safetensors"}     or an adapter's weight file

An update uses vLLM's layerwise reload. It keeps the storage of every parameter, to which CUDA
graphs point, and repacks or requantises a layer once all of its tensors are loaded. This backend
adds four things:

* The whole file is first loaded without data, onto parameters without storage. A tensor that does
  not fit is found before any weight has changed, and the server continues with the old ones.
* Tensors are read one by one from a memory map.
* A tied head is repacked. On a CPU, vLLM multiplies with a packed copy of each weight matrix. The
  head shares its parameter with the embedding, so the file has no tensor for it and the reload
  skips it. The server would then embed with the new weights and predict with the old ones.
* Mixture-of-experts weights are repacked on a CPU. vLLM packs them only when it first sets up the
  layer, and would then copy plain weights over packed ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

ADAPTER_FILE = "adapter_model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Header = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensor name -> shape and dtype, for all tensors of a file."""


@dataclass(frozen=True)
class CheckedFit:
    """Result of checking a file, reused for the next files with the same header."""

    model: torch.nn.Module
    header: Header
    tied: list[torch.nn.Module]


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    directory: str
    """Absolute path of the only directory from which weights are read."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """A safetensors file in the directory, with the tensors of a Hugging Face checkpoint."""


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads weights from a file. Each vLLM worker makes one after it has loaded its model."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.directory: Path | None = None
        self.unusable: str | None = None
        self.checked: CheckedFit | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Sets the weight directory.

        Raises:
            ValueError: the directory is not absolute or does not exist on this machine.
        """
        directory = Path(init_info.directory)
        if not directory.is_absolute() or not directory.is_dir():
            raise ValueError(
                f"weight directory {init_info.directory} is not the absolute path of an existing "
                "directory on this server; share it with the trainer under the same path"
            )
        self.directory = directory.resolve()

    def start_weight_update(self) -> None:
        """Checks that an update is possible, without changing anything.

        So there is nothing to undo if the trainer dies before it sends the file.
        """
        if self.directory is None:
            raise ValueError("no weight directory: call /init_weight_transfer_engine first")
        if self.unusable is not None:
            raise ValueError(f"restart this server: an update failed half-way ({self.unusable})")

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads the file into the model.

        Raises:
            ValueError: the path is refused, or a tensor is unknown, missing or has another shape;
                the model is unchanged.
        """
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        if self.directory is None:
            raise ValueError("no weight directory: call /init_weight_transfer_engine first")
        path = file_inside(self.directory, update_info.path)
        if path.name == ADAPTER_FILE:
            # vLLM drops adapters at the end of an update, and the next request loads them again.
            return
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
        with file, set_current_vllm_config(self.vllm_config):
            header = read_header(file)
            initialize_layerwise_reload(self.model)
            try:
                checked = self.checked
                if checked is None or checked.model is not self.model or checked.header != header:
                    complete = self.model_config.quantization in (None, "fp8_per_channel")
                    tied = check_fit(self.model, header, complete=complete)
                    checked = self.checked = CheckedFit(self.model, header, tied)
            except BaseException:
                # If no tensors were loaded, this restores the old parameters.
                finalize_layerwise_reload(self.model, self.model_config)
                raise
            try:
                if self.device.type == "cpu":
                    forget_packed_experts(self.model)
                self.model.load_weights((name, file.get_tensor(name)) for name in header)
                finalize_layerwise_reload(self.model, self.model_config)
                for module in checked.tied:
                    if hasattr(module, "cpu_linear"):
                        method: Any = module.quant_method
                        method.process_weights_after_loading(module)
            except BaseException as error:
                self.unusable = f"{path}: {type(error).__name__}: {error}"
                raise

    def finish_weight_update(self) -> None:
        """Does nothing: one file is one update."""

    def shutdown(self) -> None:
        """Does nothing: files are closed after every update."""


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Resets vLLM's mixture-of-experts kernels, so that it packs the experts when reloading."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def file_inside(directory: Path, path: str) -> Path:
    """Resolves `path` to a regular file in `directory`.

    Raises:
        ValueError: the file is outside of `directory`, also through `..` or a link, or is not a
            file.
    """
    resolved = Path(path).resolve()
    if not Path(path).is_absolute() or not resolved.is_relative_to(directory):
        raise ValueError(f"{path} is not in the weight directory {directory}")
    if not resolved.is_file():
        raise ValueError(f"{path} is not a file on this server; share {directory} with the trainer")
    return resolved


def read_header(file) -> Header:
    """Reads the names, shapes and dtypes of a safetensors file.

    Raises:
        ValueError: a tensor has an unknown dtype.
    """
    header: Header = {}
    for name in file.keys():  # noqa: SIM118 (it is not a dict and cannot be iterated)
        tensor = file.get_slice(name)
        dtype = _DTYPES.get(tensor.get_dtype())
        if dtype is None:
            raise ValueError(
                f"tensor {name} has the dtype {tensor.get_dtype()}, which this backend does not "
                "support"
            )
        header[name] = (tuple(tensor.get_shape()), dtype)
    return header


def check_fit(model: torch.nn.Module, header: Header, *, complete: bool) -> list[torch.nn.Module]:
    """Checks that a file fits a model, by loading its names and shapes without data.

    Args:
        model: after `initialize_layerwise_reload`, so its parameters have no storage; unchanged
            afterwards.
        complete: refuse a file that leaves a parameter unset. False for models of quantised
            checkpoints, which have parameters that the file lacks.

    Returns:
        Modules without a tensor in the file whose parameter is shared with one (a tied head).

    Raises:
        ValueError: a tensor does not fit or is missing; the message names it.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
        get_layerwise_info,
    )

    tensors = [
        (layer_name, layer, name, tensor)
        for layer_name, layer in model.named_modules()
        for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]
        if tensor is not None and hasattr(tensor, "weight_loader")
    ]
    loaded: dict[tuple[str, str], int] = {}  # (layer, tensor) -> elements
    deferred = [tensor.weight_loader for _, _, _, tensor in tensors]
    for (layer_name, _, name, tensor), loader in zip(tensors, deferred, strict=True):
        tensor.weight_loader = _counting(loader, (layer_name, name), loaded)
    try:
        model.load_weights(  # pyright: ignore[reportCallIssue]
            (name, torch.empty(shape, dtype=dtype, device="meta"))
            for name, (shape, dtype) in header.items()
        )
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError) as error:
        raise ValueError(
            f"the file's tensors do not fit this server's model: {type(error).__name__}: {error}"
        ) from error
    finally:
        for (_, _, _, tensor), loader in zip(tensors, deferred, strict=True):
            tensor.weight_loader = loader

    if not complete:
        return []
    owners: dict[int, bool] = {}  # id of the real parameter -> loaded
    unset = []
    for layer_name, layer, name, tensor in tensors:
        if name not in layer._parameters:
            continue
        real = get_layerwise_info(layer).kernel_tensors[0].get(name)
        elements = loaded.get((layer_name, name), 0)
        if elements == 0:
            unset.append((layer_name, layer, name, real))
        elif elements < _elements_to_load(layer, tensor):
            raise ValueError(
                f"the file sets only {elements} of {_elements_to_load(layer, tensor)} elements of "
                f"{layer_name}.{name}; one of its tensors is missing"
            )
        owners[id(real)] = owners.get(id(real), False) or elements > 0
    missing = [
        f"{layer_name}.{name}" for layer_name, _, name, real in unset if not owners[id(real)]
    ]
    if missing:
        raise ValueError(f"the file lacks {len(missing)} parameters: {', '.join(missing[:3])}")
    return [layer for _, layer, _, _ in unset]


def _counting(
    loader: Callable, key: tuple[str, str], loaded: dict[tuple[str, str], int]
) -> Callable:
    """Wraps a parameter's loader, without the reload's deferral, to count the elements it loads."""
    from vllm.model_executor.model_loader.reload.meta import (  # pyright: ignore[reportMissingImports]
        get_numel_loaded,
        to_meta_tensor,
    )

    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    signature = inspect.signature(loader)

    def count(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        target = bound.arguments.get("param")
        if isinstance(target, torch.Tensor) and not target.is_meta:
            # A bias to which vLLM keeps a reference; it must not be filled from meta tensors.
            bound.arguments["param"] = to_meta_tensor(target)
        try:
            elements, result = get_numel_loaded(loader, bound)
        except (AssertionError, LookupError, RuntimeError, ValueError) as error:
            shapes = [tuple(value.shape) for value in bound.args if isinstance(value, torch.Tensor)]
            raise ValueError(
                f"a tensor of shape {shapes[-1]} does not fit {'.'.join(key)} of shape "
                f"{shapes[0]} ({type(error).__name__} {error})"
            ) from error
        loaded[key] = loaded.get(key, 0) + elements
        return result

    return count


def _elements_to_load(layer: torch.nn.Module, tensor: torch.Tensor) -> int:
    """Returns the number of elements a checkpoint has to provide, without vocabulary padding."""
    shard = getattr(layer, "shard_indices", None)
    if shard is not None and tensor.dim() > 0:
        return tensor.numel() // tensor.shape[0] * shard.num_org_elements
    return getattr(tensor, "weight_loader_numel", tensor.numel())
