"""The weight-transfer backend "agentrl" of vLLM: weights come as a safetensors file.

    init_info    {"directory": "/dev/shm/run"}     files outside of it are refused
    update_info  {"path": "/dev/shm/run/policy-7.safetensors"}     or of an adapter's weights

An update goes through vLLM's layerwise reload, which keeps the storage of every parameter (CUDA
graphs point at it) and packs or quantises a layer again when all of its tensors are there. Four
things are added:

* The whole file is loaded without its data first, onto parameters without storage. Whatever does
  not fit is found before a single weight has changed, and the server goes on with the old ones.
* Tensors are read one by one from a memory map.
* A tied head is packed again. On a CPU vLLM multiplies with a packed copy of each weight matrix;
  the head shares its parameter with the embedding, so no tensor of its own arrives, the reload
  passes over it, and without this the server would embed with new weights and predict with old
  ones.
* Experts of a mixture are packed again, on a CPU: vLLM does so when it first sets them up and then
  copies plain weights over packed ones.
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
"""Shape and element type of every tensor of a file."""


@dataclass(frozen=True)
class CheckedFit:
    """Facts about the last file; the next one usually has the same header."""

    model: torch.nn.Module
    header: Header
    tied: list[torch.nn.Module]


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    directory: str
    """Absolute. The only place weights are read from."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """A safetensors file in the directory, with the tensors of a Hugging Face checkpoint."""


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Created by each worker of vLLM when its model is loaded; see the module's docstring."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.directory: Path | None = None
        self.unusable: str | None = None
        self.checked: CheckedFit | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Raises:
        ValueError: the directory is not absolute or does not exist on this machine.
        """
        directory = Path(init_info.directory)
        if not directory.is_absolute() or not directory.is_dir():
            raise ValueError(
                f"weight directory {init_info.directory} is not an absolute path of a directory "
                "that this server can see; share it with the trainer under the same path"
            )
        self.directory = directory.resolve()

    def start_weight_update(self) -> None:
        """Nothing is touched before the file is known to fit, so there is nothing to undo if the
        trainer dies between its calls."""
        if self.directory is None:
            raise ValueError("no weight directory: call /init_weight_transfer_engine first")
        if self.unusable is not None:
            raise ValueError(f"restart this server: an update failed half-way ({self.unusable})")

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load the file into the model.

        Raises:
            ValueError: the path is refused, or a tensor is unknown, missing or of another shape;
                the model is then as before.
        """
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        if self.directory is None:
            raise ValueError("no weight directory: call /init_weight_transfer_engine first")
        path = file_inside(self.directory, update_info.path)
        if path.name == ADAPTER_FILE:
            # Finishing an update drops the adapters, and the next request reads its own again.
            return
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is no complete safetensors file: {error}") from error
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
                # Without loaded tensors this puts the old parameters back.
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
        """Nothing: one file is one update."""

    def shutdown(self) -> None:
        """Nothing: files are closed after every update."""


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Have vLLM set its kernel for experts up from the start, which packs them, when the layer's
    weights are there."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def file_inside(directory: Path, path: str) -> Path:
    """The regular file that `path` leads to.

    Raises:
        ValueError: it lies outside `directory`, also through `..` or a link, or is not a file.
    """
    resolved = Path(path).resolve()
    if not Path(path).is_absolute() or not resolved.is_relative_to(directory):
        raise ValueError(f"{path} does not lie in the weight directory {directory}")
    if not resolved.is_file():
        raise ValueError(f"{path} is no file on this server; share {directory} with the trainer")
    return resolved


def read_header(file) -> Header:
    """Raises:
    ValueError: a tensor's element type is unknown.
    """
    header: Header = {}
    for name in file.keys():  # noqa: SIM118 (it is not a dict and cannot be iterated)
        tensor = file.get_slice(name)
        dtype = _DTYPES.get(tensor.get_dtype())
        if dtype is None:
            raise ValueError(
                f"{name} has element type {tensor.get_dtype()}, unknown to this backend"
            )
        header[name] = (tuple(tensor.get_shape()), dtype)
    return header


def check_fit(model: torch.nn.Module, header: Header, *, complete: bool) -> list[torch.nn.Module]:
    """Load the names and shapes of a file into a model whose parameters have no storage.

    Args:
        model: between `initialize_layerwise_reload` and the real loading; left as it came.
        complete: refuse a file that leaves a parameter unset (models of quantised checkpoints have
            parameters that no other holds).

    Returns:
        Modules that hold no tensor of their own in the file but share a loaded one (a tied head).

    Raises:
        ValueError: names the tensor and the reason.
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
            f"its tensors do not fit this server's model: {type(error).__name__}: {error}"
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
                f"{layer_name}.{name}: a tensor of it is missing"
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
    """A parameter's own loader, without the reload's deferral, that counts what it is given."""
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
            # A bias that vLLM kept as it is: not to be filled from tensors without values.
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
    """A vocabulary is padded to a round number of rows that no checkpoint holds."""
    shard = getattr(layer, "shard_indices", None)
    if shard is not None and tensor.dim() > 0:
        return tensor.numel() // tensor.shape[0] * shard.num_org_elements
    return getattr(tensor, "weight_loader_numel", tensor.numel())
