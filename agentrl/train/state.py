"""Captures the state of a run between two optimizer updates, and restores it bit for bit.

The state is tensors, by file and name, and JSON: nothing in it has to be unpickled.

Tensors are read with torch's distributed checkpoint, which knows where each part of each tensor is
stored. So any number of ranks can read what any other number wrote, in shards or whole, and each
rank reads only its own part, into the tensors that it trains.
"""

from __future__ import annotations

import base64
import copy
import logging
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import load  # pyright: ignore
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from agentrl.errors import CheckpointError
from agentrl.model import ranks
from agentrl.model.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_config,
    adapter_tensors,
    has_adapter,
)
from agentrl.model.sharding import Frozen
from agentrl.model.tensors import set_dtype
from agentrl.train.optimizer import Learner
from agentrl.types import JSON

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"


Trained = Learner[Any]
Weights = Trained | Frozen
"""A network, which may be frozen."""


@dataclass(slots=True)
class TrainState:
    """The contents of a checkpoint, as `capture_state` or `load_checkpoint` returns them."""

    step: int
    """Number of finished training steps, which is also the policy's version."""
    fingerprint: dict[str, JSON]
    """Identifies the run: task and environment ids, model, group size, seed and so on. A resumed
    run must have the same one, see `check_fingerprint`."""
    data_position: dict[str, JSON] = field(default_factory=dict)
    """The position of the task source."""
    extra: dict[str, JSON] = field(default_factory=dict)
    """Anything else the loop needs back, e.g. the state of a KL controller."""
    rng: dict[str, JSON] = field(default_factory=dict)
    """States of the random generators of Python, NumPy and torch, see `capture_rng`."""
    optimizer_groups: dict[str, JSON] = field(default_factory=dict)
    """Parameter groups of each optimizer, by file stem: names of parameters and options."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """File stem (`model` or `adapter_model`, `optimizer`, `critic`, `critic_optimizer`,
    `reference`) -> name -> tensor on the CPU, or a shard (`DTensor`) on its own device. Shards, and
    tensors of a model on the CPU, share memory with the live ones unless they were copied, so save
    them before the next update. Empty in a loaded state."""
    pretrained: dict[str, str] = field(default_factory=dict)
    """Text of further small files, e.g. config.json, by file name."""
    tokenizer: PreTrainedTokenizerBase | None = None
    folder: Path | None = None
    """Folder from which `restore_state` reads the tensors; None in a captured state."""


def capture_state(
    *,
    step: int,
    fingerprint: Mapping[str, JSON],
    policy: Trained,
    critic: Trained | None = None,
    reference: Weights | None = None,
    data_position: Mapping[str, JSON] | None = None,
    extra: Mapping[str, JSON] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    copy_tensors: bool = False,
) -> TrainState:
    """Collects the state of a run between two optimizer updates.

    With sharded networks each rank captures its own shards, and all ranks save together. The random
    states are those of the calling process.

    Args:
        reference: the reference model, if its weights change during the run.
        copy_tensors: copy all tensors, shards included, into host memory, so that the next update
            may run before the state is saved.

    Raises:
        TypeError: a value has no exact JSON form (names its key), or a state of a network or an
            optimizer is not a tensor.
    """
    state = TrainState(
        step=step,
        fingerprint=exact_json(fingerprint, "fingerprint"),
        data_position=exact_json(data_position or {}, "data_position"),
        extra=exact_json(extra or {}, "extra"),
        rng=capture_rng(),
        pretrained=_config_files(policy.model),
        tokenizer=tokenizer,
    )
    for trained, stem, optimizer_stem in _parts(policy, critic):
        state.tensors[stem] = _to_cpu(_named_tensors(trained), copy_tensors)
        state.tensors[optimizer_stem] = _to_cpu(_moments(trained), copy_tensors)
        state.optimizer_groups[optimizer_stem] = _optimizer_groups(trained)
    if reference is not None:
        state.tensors["reference"] = _to_cpu(_named_tensors(reference), copy_tensors)
    return state


def restore_state(
    state: TrainState,
    *,
    policy: Trained,
    critic: Trained | None = None,
    reference: Weights | None = None,
) -> None:
    """Restores a loaded state into newly built objects, in place and bit for bit.

    Tied tensors stay tied. Each rank reads its own shards; every rank has to call this.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit; names the file and the tensor.
    """
    assert state.folder is not None, "only a loaded state can be restored"
    for trained, stem, optimizer_stem in _parts(policy, critic):
        _restore_weights(state.folder, trained, stem)
        groups = state.optimizer_groups.get(optimizer_stem)
        _restore_optimizer(state.folder, trained, optimizer_stem, groups)
        trained.cast()
    if reference is not None:
        _restore_weights(state.folder, reference, "reference")
    # Last, because restoring the rest may draw random numbers.
    restore_rng(state.rng)


def _parts(policy: Trained, critic: Trained | None) -> list[tuple[Trained, str, str]]:
    """Lists the trained networks, each with the file stems of its weights and of its optimizer.

    An adapter's file has the name that PEFT expects.
    """
    adapter = WEIGHTS_FILE.removesuffix(".safetensors")
    parts = [(policy, adapter if has_adapter(policy.model) else "model", "optimizer")]
    return parts if critic is None else [*parts, (critic, "critic", "critic_optimizer")]


# tensors ------------------------------------------------------------------------------------------


def read_tensors(
    folder: Path, stem: str, targets: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Reads the tensors of a network or an optimizer in place, from shards or from one file.

    Each rank reads the parts of tensors that it holds; every rank has to call this.

    Args:
        folder: the checkpoint.
        stem: name of the folder of shards, or of the file without its suffix. If neither exists,
            no tensors are found.
        targets: receives the saved tensors by name, on the meta device (without data), and returns
            the tensors to read into, of the same shape and dtype. Tensors that it leaves out are
            not read; a `DTensor` receives this rank's shard.

    Returns:
        The targets, filled.
    """
    shards, whole = folder / stem, folder / f"{stem}.safetensors"
    reader = HuggingFaceStorageReader(str(shards))
    if not shards.is_dir():
        reader.fs = _OneFile(whole)
    saved = {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")  # pyright: ignore
        for name, each in reader.read_metadata().state_dict_metadata.items()
    }
    read = dict(targets(saved))
    with warnings.catch_warnings():
        # torch warns that there is only one process, which is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            dict(read),
            storage_reader=reader,
            process_group=ranks.host_group(),
            no_dist=ranks.size() == 1,
        )
    return read


class _OneFile(FileSystem):
    """Lists one file, if it exists, and hides the rest of its folder."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def ls(self, path: object) -> list[str]:
        return [str(self._path)] if self._path.is_file() else []


def _named_tensors(trained: Weights) -> dict[str, Tensor]:
    """Returns parameters (or their masters) and persistent buffers by name.

    A tied tensor has only its first name. Of a model with an adapter, only the adapter's tensors
    are returned.
    """
    module, masters = trained.model, trained.masters
    if has_adapter(module):
        adapter = adapter_tensors(module)
        learning = {id(each) for each in module.parameters() if each.requires_grad}
        assert learning == {id(each) for each in adapter.values()}, "add_adapter refuses others"
        return {name: masters.get(p, p) for name, p in adapter.items()}
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} of {type(module).__name__} is not a tensor")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = masters.get(tensor, tensor)
    return named


def _to_cpu(tensors: Mapping[str, Tensor], copied: bool) -> dict[str, Tensor]:
    """Returns contiguous tensors in host memory, each in storage of its own size.

    A shard (`DTensor`) stays where it is, unless `copied` is set, and stays a shard.
    """
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if copied:
            tensor = tensor.to("cpu", copy=True).contiguous()
        elif not isinstance(tensor, DTensor):
            tensor = tensor.cpu().contiguous()
            # safetensors refuses tensors that share storage, such as two views of one buffer.
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()
        found[name] = tensor
    return found


@torch.no_grad()
def _restore_weights(folder: Path, trained: Weights, stem: str) -> None:
    """Reads a network in place, since a device may have no room for a second copy."""
    live, file = _named_tensors(trained), f"{stem}.safetensors"

    def targets(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        missing, unexpected = sorted(live.keys() - saved), sorted(saved.keys() - live)
        if missing or unexpected:
            raise CheckpointError(
                f"{file} does not fit the model: {len(missing)} tensors missing {missing[:3]}, "
                f"{len(unexpected)} unexpected {unexpected[:3]}"
            )
        for name, target in live.items():
            source = saved[name]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise CheckpointError(
                    f"{file}: {name} is {source.dtype} {tuple(source.shape)}, but this run trains "
                    f"{target.dtype} {tuple(target.shape)}; start a new run with its folder as "
                    "model.path"
                )
        return live

    read_tensors(folder, stem, targets)


# optimizers ---------------------------------------------------------------------------------------

# `torch.distributed.checkpoint.state_dict` does not fit here: it knows optimizers of a module's own
# parameters only, not of masters, and allocates a gradient for every parameter to load moments.


def _parameters_by_group(trained: Trained) -> list[dict[str, Tensor]]:
    """Returns, for each group of the optimizer, its tensors by parameter name.

    A tensor is the parameter itself or its master.
    """
    names = {trained.masters.get(p, p): name for name, p in trained.model.named_parameters()}
    groups = []
    for index, group in enumerate(trained.optimizer.param_groups):
        strangers = [p for p in group["params"] if p not in names]
        if strangers:
            raise TypeError(
                f"optimizer group {index} holds {len(strangers)} parameters that are not in the "
                f"{type(trained.model).__name__} it is saved with"
            )
        groups.append({names[p]: p for p in group["params"]})
    return groups


def _moments(trained: Trained) -> dict[str, Tensor]:
    """Returns the optimizer's state as "<state name>/<parameter name>" -> tensor."""
    tensors, optimizer = {}, trained.optimizer
    for group in _parameters_by_group(trained):
        for name, parameter in group.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, int):
                    value = torch.tensor(value)  # bitsandbytes counts steps in an int
                if not isinstance(value, Tensor):
                    raise TypeError(
                        f"optimizer state {key!r} of {name} is not a tensor; "
                        f"{type(optimizer).__name__} cannot be saved"
                    )
                tensors[f"{key}/{name}"] = value
    return tensors


def _optimizer_groups(trained: Trained) -> list[JSON]:
    groups: list[JSON] = []
    for index, parameters in enumerate(_parameters_by_group(trained)):
        options = {**trained.optimizer.param_groups[index], "params": list(parameters)}
        options["optimizer"] = type(trained.optimizer).__name__
        groups.append(exact_json(options, f"optimizer group {index}"))
    return groups


def _restore_optimizer(folder: Path, trained: Trained, stem: str, saved_groups: Any) -> None:
    """Reads moments into new memory on their parameters' devices, and sets the groups' options."""
    file, optimizer = f"{stem}.safetensors", trained.optimizer
    live_groups = _parameters_by_group(trained)
    if not isinstance(saved_groups, list) or [list(group) for group in live_groups] != [
        group.get("params") if isinstance(group, dict) else None for group in saved_groups
    ]:
        raise CheckpointError(
            f"{STATE_FILE}: the parameter groups of {stem} differ from those of this run's "
            "optimizer; train the same parameters as the saved run"
        )
    saved_by = {group.get("optimizer", "AdamW") for group in saved_groups}
    if saved_by != {type(optimizer).__name__}:
        raise CheckpointError(
            f"{file} is the state of {', '.join(sorted(saved_by))}, but this run's optimizer is "
            f"{type(optimizer).__name__}; set train.optimizer as it was"
        )
    parameters = {name: p for group in live_groups for name, p in group.items()}

    def targets(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in saved.items():
            kind, _, parameter_name = name.partition("/")
            parameter = parameters.get(parameter_name)
            if parameter is None:
                raise CheckpointError(f"{file}: {parameter_name} is not a parameter of this model")
            if kind.startswith(("step", "qmap", "absmax")):  # the latter two are of 8-bit moments
                found[name] = torch.empty_like(tensor, device="cpu")
            elif tensor.shape == parameter.shape:
                like = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
                found[name] = like
            else:
                raise CheckpointError(
                    f"{file}: {name} has shape {tuple(tensor.shape)}, but its parameter has "
                    f"{tuple(parameter.shape)}"
                )
        return found

    # `load_state_dict` knows parameters by their numbers.
    numbers = {name: number for number, name in enumerate(parameters)}
    moments: dict[int, dict[str, Any]] = {}
    for name, tensor in read_tensors(folder, stem, targets).items():
        kind, _, parameter_name = name.partition("/")
        counts = kind == "step" and tensor.dtype == torch.int64
        moments.setdefault(numbers[parameter_name], {})[kind] = tensor.item() if counts else tensor
    groups = []
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        options = {**group, **saved, "params": [numbers[name] for name in saved["params"]]}
        options.pop("optimizer", None)
        # How the update is computed follows from the ranks of this process.
        options |= {key: group[key] for key in ("fused", "foreach") if key in group}
        # JSON has no tuples, which optimizers expect some options, such as betas, to be.
        tuples = {key for key, value in group.items() if isinstance(value, tuple)}
        groups.append({k: tuple(v) if k in tuples else v for k, v in options.items()})
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _config_files(model: torch.nn.Module) -> dict[str, str]:
    """Returns the text of a transformers model's config.json, generation_config.json, adapter
    configuration and processor files, by file name; of other models, nothing."""
    files = {}
    config: Any = getattr(model, "config", None)
    # Beside an adapter, transformers would take the folder for a whole model.
    if hasattr(config, "to_json_string") and not has_adapter(model):
        config = copy.deepcopy(config)
        # A model built from a config has neither of these set, but inference engines choose the
        # class by the first and the precision by the second. FSDP2 renames the class it wraps.
        if not config.architectures:
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
        first = next(model.parameters())
        if not isinstance(first, DTensor):  # a shard is a float32 master, whatever computes
            set_dtype(config, first.dtype)
        files["config.json"] = config.to_json_string()
    if has_adapter(model):
        files[CONFIG_FILE] = adapter_config(model)
    generation_config: Any = getattr(model, "generation_config", None)
    if hasattr(generation_config, "to_json_string"):
        files["generation_config.json"] = generation_config.to_json_string()
    files |= getattr(model, "processor_files", {})
    return files


# random states ------------------------------------------------------------------------------------


def capture_rng() -> dict[str, JSON]:
    """Returns the states of the global generators of Python, NumPy, torch and, if CUDA is in use,
    every CUDA device.

    A separate `numpy.random.Generator` is not included: its `bit_generator.state` is plain JSON and
    belongs in `extra`.
    """
    version, words, gauss_next = random.getstate()
    numpy_state: Any = np.random.get_state()
    _, key, position, has_gauss, gauss = numpy_state
    cuda: list[JSON] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = [_encode(state.numpy()) for state in torch.cuda.get_rng_state_all()]
    return {
        "python": [version, list(words), gauss_next],
        "numpy": {
            "key": _encode(key),
            "pos": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": _encode(torch.get_rng_state().numpy()),
        "cuda": cuda,
    }


def restore_rng(rng: Mapping[str, JSON]) -> None:
    """Sets the generators to what `capture_rng` returned.

    Raises:
        CheckpointError: `rng` is not such a state.
    """
    state: Any = rng
    try:
        version, words, gauss_next = state["python"]
        random.setstate((version, tuple(words), gauss_next))
        saved, rest = state["numpy"], ("pos", "has_gauss", "gauss")
        key = _decode(saved["key"], np.uint32)
        np.random.set_state(("MT19937", key, *(saved[name] for name in rest)))
        torch.set_rng_state(torch.from_numpy(_decode(state["torch"], np.uint8)))
        saved_cuda = [torch.from_numpy(_decode(text, np.uint8)) for text in state["cuda"]]
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{STATE_FILE}: the random states are damaged: {error!r}") from error
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved_cuda and num_devices != len(saved_cuda):
        logger.warning(
            "the checkpoint holds random states of %d CUDA devices, and this machine has %d: "
            "the run continues, but not bit for bit",
            len(saved_cuda),
            num_devices,
        )
    for device, value in enumerate(saved_cuda[:num_devices]):
        torch.cuda.set_rng_state(value, device)


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _decode(text: object, dtype: type[np.generic]) -> np.ndarray:
    if not isinstance(text, str):
        raise TypeError(f"expected base64 text, not {type(text).__name__}")
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).copy()


# JSON ---------------------------------------------------------------------------------------------


def exact_json(value: Mapping, where: str) -> dict[str, JSON]:
    """Returns the value as plain JSON. Tuples become lists.

    Args:
        where: name of the value, for the error.

    Raises:
        TypeError: JSON cannot represent a part of the value exactly; names the key.
    """
    plain = _json_value(dict(value), where)
    assert isinstance(plain, dict)
    return plain


def _json_value(value: object, where: str) -> JSON:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; JSON keys are strings")
        return {key: _json_value(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}, which has no exact JSON form")
