"""The weight-transfer backend "agentrl" of vLLM: weights come as a safetensors file.

This module runs inside vLLM's processes. It imports vLLM, torch, safetensors and the standard
library only, because agentrl need not be installed there: `agentrl.sync.plugin.write_plugin` puts
a copy of it on a server's PYTHONPATH, and `pip install agentrl` next to vLLM registers it too.

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

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import scaled_dot_product_attention
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

BACKEND = "agentrl"

ADAPTER_FILE = "adapter_model.safetensors"

ALIGN_ROUNDING = "AGENTRL_ALIGN_ROUNDING"
"""Environment variable: `1` makes a server on a CPU round 16-bit values where transformers does."""

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

SPIN_S = 0.001
"""What a process on a CPU spins for its next message before it sleeps."""

RECHECK_MS = 20
"""How long it sleeps at most before it looks for a message that it was not woken for."""

Header = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and element type of every tensor of a file."""


@dataclass(frozen=True)
class CheckedFit:
    """What was found out about the last file; the next one usually has the same header."""

    model: torch.nn.Module
    header: Header
    tied: list[torch.nn.Module]


def register() -> None:
    """The entry point of group `vllm.general_plugins`; called once in every process of vLLM."""
    # A ValueError says it is there already: agentrl is installed here and also on PYTHONPATH.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "FileWeightTransferEngine")
    sleep_when_idle()
    if os.environ.get(ALIGN_ROUNDING) == "1":
        align_rounding()


def sleep_when_idle() -> None:
    """Have vLLM's processes on a CPU wait for each other asleep instead of spinning.

    After every message they look for the next one for a whole second, which between the turns of
    slow environments keeps a core busy that computes the model, or the trainer's gradient.

    Who sleeps is woken over a socket, and misses a call now and then. vLLM has sleepers look for
    themselves every 5 s; for a reply of a fifth of a second that is too long.
    """
    try:
        from vllm.distributed.device_communicators import (  # pyright: ignore[reportMissingImports]
            shm_broadcast,
        )
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        SpinCondition = shm_broadcast.SpinCondition
    except (ImportError, AttributeError):
        return  # another version of vLLM: it computes the same, and spins
    if not hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):
        return  # one whose sleepers never look for themselves
    if not current_platform.is_cpu() or hasattr(SpinCondition.__init__, "__wrapped__"):
        return
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
    make = SpinCondition.__init__

    @functools.wraps(make)
    def impatient(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, SPIN_S)

    SpinCondition.__init__ = impatient


def align_rounding() -> None:
    """Have vLLM's CPU layers round where the layers of transformers do.

    Two engines with the same 16-bit weights differ by what they round differently on the way. On a
    CPU vLLM normalises the sum of residual and update before that sum is rounded, rotates queries
    and keys with one rounding instead of three, and, without AVX512-BF16, its kernels for rotation
    and attention cut bits off instead of rounding. Afterwards:

    * the sum is rounded, then normalised;
    * rotation is plain torch arithmetic;
    * attention is computed in float64 and its result rounded once. In float32 the two engines would
      still differ by an order of summation, which now and then crosses a rounding boundary of 16
      bits, and a sharp model makes 0.1 nats of that.

    Needs `--enforce-eager`: a compiler fuses layers and leaves roundings out. Does nothing on a
    GPU. Called before a model is made; calling it twice is harmless.
    """
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.layernorm import (  # pyright: ignore[reportMissingImports]
        RMSNorm,
    )
    from vllm.model_executor.layers.rotary_embedding.base import (  # pyright: ignore[reportMissingImports]
        RotaryEmbedding,
    )
    from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore[reportMissingImports]
        CPUAttentionBackendImpl,
    )

    if hasattr(RMSNorm.forward_native, "__wrapped__"):
        return
    normalise = RMSNorm.forward_native

    @functools.wraps(normalise)
    def add_then_normalise(self, x, residual=None):
        if residual is None:
            return normalise(self, x)
        residual = x + residual
        return normalise(self, residual), residual

    RMSNorm.forward_native = add_then_normalise
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    attend, store = CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update

    def is_plain(impl, kv_cache) -> bool:
        return (
            kv_cache.dtype in (torch.bfloat16, torch.float16)
            and impl.attn_type == "decoder"
            and impl.sliding_window == -1
            and impl.alibi_slopes is None
            and impl.sinks is None
            and not impl.logits_soft_cap
        )

    @functools.wraps(attend)
    def attend_exactly(
        self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
    ):
        if attn_metadata is None or not is_plain(self, kv_cache):
            return attend(
                self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        exact_attention(
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            self.scale,
            output,
        )
        return output

    @functools.wraps(store)
    def store_plainly(self, layer, key, value, kv_cache, slot_mapping):
        if not is_plain(self, kv_cache):
            return store(self, layer, key, value, kv_cache, slot_mapping)
        used = slot_mapping >= 0  # the others are padding
        slots = slot_mapping[used]
        block, place = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        states = torch.cat([key[: len(used)], value[: len(used)]], -1)
        kv_cache[block, :, place] = states[used]

    CPUAttentionBackendImpl.forward = attend_exactly
    CPUAttentionBackendImpl.do_kv_cache_update = store_plainly


def exact_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Causal attention of the last tokens of each sequence to all of it, in float64.

    Args:
        query: (num_tokens, num_heads, head_dim), the sequences' new tokens one after the other.
        kv_cache: (num_blocks, num_kv_heads, block_size, 2 head_dim), keys before values, with those
            of the new tokens.
        block_table: (num_sequences, max_blocks).
        query_start_loc: (num_sequences + 1,), where the new tokens of each sequence begin.
        seq_lens: (num_sequences,), new tokens included.
        output: as `query`, or with the last two dimensions merged; is written.
    """
    head_dim, block_size = query.shape[-1], kv_cache.shape[2]
    result = output.view(-1, *query.shape[1:])

    def states(sequences: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = kv_cache[block_table[sequences, : -(-length // block_size)].long()]
        # (sequences, blocks, kv heads, place, 2 head_dim) -> (sequences, kv heads, length, ...)
        flat = blocks.transpose(1, 2).flatten(2, 3)[:, :, :length].double()
        return flat[..., :head_dim], flat[..., head_dim:]

    starts, new = query_start_loc[:-1], query_start_loc.diff()
    single = (new == 1).nonzero().squeeze(1)
    if len(single) > 0:
        lengths = seq_lens[single]
        longest = int(lengths.max())
        keys, values = states(single, longest)
        place = starts[single].long()
        attended = scaled_dot_product_attention(
            query[place, :, None].double(),
            keys,
            values,
            attn_mask=(torch.arange(longest) < lengths[:, None])[:, None, None],
            scale=scale,
            enable_gqa=True,
        )
        result[place] = attended.squeeze(2).to(result.dtype)
    for sequence in (new > 1).nonzero().flatten().tolist():
        start, count, length = (int(t[sequence]) for t in (starts, new, seq_lens))
        keys, values = states(torch.tensor([sequence]), length)
        positions = torch.arange(length - count, length)
        attended = scaled_dot_product_attention(
            query[None, start : start + count].transpose(1, 2).double(),
            keys,
            values,
            attn_mask=torch.arange(length) <= positions[:, None],
            scale=scale,
            enable_gqa=True,
        )
        result[start : start + count] = attended[0].transpose(0, 1).to(result.dtype)


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    directory: str
    """Absolute. The only place weights are read from."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """Of one safetensors file in the directory, with the tensors of a Hugging Face checkpoint."""


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
                    complete = self.model_config.quantization is None
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
        ValueError: it lies outside `directory`, also through `..` or a link, or is no file.
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
    for name in file.keys():  # noqa: SIM118 (it is no dict and cannot be iterated)
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
        complete: refuse a file that leaves a parameter unset (quantised models have parameters
            that no checkpoint holds).

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
    )

    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    signature = inspect.signature(loader)

    def count(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
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
