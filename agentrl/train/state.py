"""Captures the state of a run between two optimizer updates, and restores it bit for bit.

Tensors by file and name, everything else as JSON: nothing that would have to be unpickled.

A network that is sharded over ranks is read by torch's distributed checkpoint, which knows which
part of which tensor lies where: any number of ranks can read what any other number wrote, and what
one process wrote whole. Every rank reads its own part into the tensors that it trains.
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
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import load  # pyright: ignore
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from agentrl.errors import CheckpointError
from agentrl.sync.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_config,
    adapter_tensors,
    has_adapter,
)
from agentrl.train import ranks
from agentrl.types import JSON

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"


class Weights(Protocol):
    """A network that nothing updates."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def masters(self) -> Mapping[Tensor, Tensor]:
        """The weights that an optimizer updates in place of parameters, by parameter."""
        ...


class Trained(Weights, Protocol):
    """A network and what updates it, such as a `Learner`."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def cast(self) -> None:
        """Give the parameters what their masters are now."""
        ...


class Tokenizer(Protocol):
    def save_pretrained(self, save_directory: str) -> object: ...


@dataclass(slots=True)
class TrainState:
    """The contents of a checkpoint, made by `capture_state` or `load_checkpoint`."""

    step: int
    """Training steps finished; the version of the policy."""
    fingerprint: dict[str, JSON]
    """Everything that makes two runs the same run: task and environment ids, model, group size,
    seed, ... A resumed run compares it, see `check_fingerprint`."""
    data_position: dict[str, JSON] = field(default_factory=dict)
    extra: dict[str, JSON] = field(default_factory=dict)
    """Whatever else the loop wants back, e.g. the state of a KL controller."""
    rng: dict[str, JSON] = field(default_factory=dict)
    """States of the random generators of python, numpy and torch, see `capture_rng`."""
    optimizer_groups: dict[str, JSON] = field(default_factory=dict)
    """Hyper-parameters of the optimizers' parameter groups, by file stem."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """File stem (`model` or `adapter_model`, `optimizer`, `critic`, `critic_optimizer`,
    `reference`) -> name -> CPU tensor. Those of a model on the CPU, and shards, alias the live ones
    unless they were copied: save before the next update. Empty in a loaded state."""
    pretrained: dict[str, str] = field(default_factory=dict)
    """Further small text files of the folder, e.g. config.json, by name."""
    tokenizer: Tokenizer | None = None
    folder: Path | None = None
    """The checkpoint from which `restore_state` reads the tensors of a loaded state."""


def capture_state(
    *,
    step: int,
    fingerprint: Mapping[str, JSON],
    policy: Trained,
    critic: Trained | None = None,
    reference: Weights | None = None,
    data_position: Mapping[str, JSON] | None = None,
    extra: Mapping[str, JSON] | None = None,
    tokenizer: Tokenizer | None = None,
    copy_tensors: bool = False,
) -> TrainState:
    """Collect the state of a run between two optimizer updates.

    Of sharded networks it holds this rank's shards: every rank captures, and all save together.
    The random states are those of the calling process.

    Args:
        reference: one whose weights change while the run goes on.
        copy_tensors: into host memory, shards as well, so that the next update may come before the
            save.

    Raises:
        TypeError: something in it has no exact JSON form; names the key.
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
    """Put a loaded state into freshly built objects, in place and bit for bit. Tied tensors stay
    tied; sharded parameters receive their shard. Every rank calls it.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit; names the file and the tensor.
    """
    assert state.folder is not None, "a captured state is restored once it is saved and loaded"
    for trained, stem, optimizer_stem in _parts(policy, critic):
        _restore_weights(state.folder, trained, stem)
        groups = state.optimizer_groups.get(optimizer_stem)
        _restore_optimizer(state.folder, trained, optimizer_stem, groups)
        trained.cast()
    if reference is not None:
        _restore_weights(state.folder, reference, "reference")
    # Last, because building and loading may draw random numbers.
    restore_rng(state.rng)


def _parts(policy: Trained, critic: Trained | None) -> list[tuple[Trained, str, str]]:
    """Lists what is trained, with the stems of the files of its weights and of its optimizer.

    Where only an adapter is trained and saved, its file has the name that PEFT gives it.
    """
    adapter = WEIGHTS_FILE.removesuffix(".safetensors")
    parts = [(policy, adapter if has_adapter(policy.model) else "model", "optimizer")]
    return parts if critic is None else [*parts, (critic, "critic", "critic_optimizer")]


# tensors ------------------------------------------------------------------------------------------


def read_tensors(
    folder: Path, stem: str, targets: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Read a network or an optimizer of a checkpoint in place, whether it was written whole or in
    shards: of each tensor the part that this rank holds. Every rank calls it.

    Args:
        targets: gets the saved tensors, without data, by name. It returns what they are read into,
            of the same shape and dtype; a sharded one receives this rank's shard. What it leaves
            out is not read.

    Returns:
        The targets.
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
        # That there is one process, which is what it is told.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            dict(read),
            storage_reader=reader,
            process_group=ranks.host_group(),
            no_dist=ranks.size() == 1,
        )
    return read


class _OneFile(FileSystem):
    """A folder in which this file alone is seen, if it is there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def ls(self, path: object) -> list[str]:
        return [str(self._path)] if self._path.is_file() else []


def _named_tensors(trained: Weights) -> dict[str, Tensor]:
    """Returns parameters, or their masters, and persistent buffers by name. A tied tensor stands
    under its first name only. Of a model with an adapter it is the adapter's tensors alone.

    Raises:
        TypeError: the module keeps a state that is not a tensor.
    """
    module, masters = trained.model, trained.masters
    if has_adapter(module):
        return {name: masters.get(p, p) for name, p in adapter_tensors(module).items()}
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
    """Returns the tensors on the host, each in storage of its own size. A shard remains one, for
    its rank to write."""
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if copied:
            tensor = tensor.to("cpu", copy=True).contiguous()
        elif not isinstance(tensor, DTensor):
            tensor = tensor.cpu().contiguous()
            # safetensors refuses tensors that share storage, e.g. two views of one buffer.
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()
        found[name] = tensor
    return found


@torch.no_grad()
def _restore_weights(folder: Path, trained: Weights, stem: str) -> None:
    """Read a network in place: there is no room for a second copy of what fills a device."""
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
                    f"{file}: {name} is {source.dtype} {tuple(source.shape)}, this run trains "
                    f"{target.dtype} {tuple(target.shape)}; start a new run with its folder as "
                    "model.path"
                )
        return live

    read_tensors(folder, stem, targets)


# optimizers ---------------------------------------------------------------------------------------

# `torch.distributed.checkpoint.state_dict` has loaders for these, which know no master weights, and
# which take a step with gradients of zeros first: memory that a device may not have.


def _parameters_by_group(trained: Trained) -> list[dict[str, Tensor]]:
    """Returns the tensors that the optimizer updates by the names of the parameters that they are,
    or are masters of.

    Raises:
        TypeError: the optimizer updates something else as well.
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
    tensors, optimizer = {}, trained.optimizer
    for group in _parameters_by_group(trained):
        for name, parameter in group.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, int):
                    value = torch.tensor(value)  # how bitsandbytes counts steps
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
    """Read moments into new memory where their parameters are, and set the groups' options."""
    file, optimizer = f"{stem}.safetensors", trained.optimizer
    live_groups = _parameters_by_group(trained)
    if not isinstance(saved_groups, list) or [list(group) for group in live_groups] != [
        group.get("params") if isinstance(group, dict) else None for group in saved_groups
    ]:
        raise CheckpointError(
            f"{STATE_FILE}: the parameter groups of {stem} are not those of this run's optimizer"
        )
    saved_by = {group.get("optimizer", "AdamW") for group in saved_groups}
    if saved_by != {type(optimizer).__name__}:
        raise CheckpointError(
            f"{file} is the state of {', '.join(sorted(saved_by))}, this run's optimizer is "
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
            if kind.startswith(("step", "qmap", "absmax")):  # the latter two of 8-bit moments
                found[name] = torch.empty_like(tensor, device="cpu")
            elif tensor.shape == parameter.shape:
                like = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
                found[name] = like
            else:
                raise CheckpointError(
                    f"{file}: {name} has shape {tuple(tensor.shape)}, its parameter "
                    f"{tuple(parameter.shape)}"
                )
        return found

    # Optimizers number their parameters.
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
        # JSON has no tuples, and optimizers compare and unpack betas as one.
        tuples = {key for key, value in group.items() if isinstance(value, tuple)}
        groups.append({k: tuple(v) if k in tuples else v for k, v in options.items()})
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _config_files(model: torch.nn.Module) -> dict[str, str]:
    """Returns config.json, generation_config.json and the processor's files of a transformers
    model, nothing of others."""
    files = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        # A model built from a config carries neither; inference engines choose the class by the
        # first and the precision by the second. FSDP2 renames the class it wraps.
        if not config.architectures:
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
        first = next(model.parameters())
        if not isinstance(first, DTensor):  # whose dtype is that of the masters
            config.dtype = first.dtype
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
    """States of the global generators of python, numpy, torch and, if in use, every CUDA device.

    A `numpy.random.Generator` of the loop's own is not in it: its `bit_generator.state` is plain
    JSON and goes into `extra`.
    """
    version, words, gauss_next = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    cuda: list[JSON] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = [_encode(state.numpy()) for state in torch.cuda.get_rng_state_all()]
    return {
        "python": [version, list(words), gauss_next],
        "numpy": {
            "key": _encode(numpy_state["state"]["key"]),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": _encode(torch.get_rng_state().numpy()),
        "cuda": cuda,
    }


def restore_rng(rng: Mapping[str, JSON]) -> None:
    """Set the generators to a state of `capture_rng`.

    Raises:
        CheckpointError: it is not such a state.
    """
    state: Any = rng
    try:
        version, words, gauss_next = state["python"]
        random.setstate((version, tuple(words), gauss_next))
        np.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {
                    "key": _decode(state["numpy"]["key"], np.uint32),
                    "pos": state["numpy"]["pos"],
                },
                "has_gauss": state["numpy"]["has_gauss"],
                "gauss": state["numpy"]["gauss"],
            }
        )
        torch.set_rng_state(torch.from_numpy(_decode(state["torch"], np.uint8)))
        saved_cuda = [torch.from_numpy(_decode(text, np.uint8)) for text in state["cuda"]]
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{STATE_FILE}: the random states are damaged: {error!r}") from error
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved_cuda and num_devices != len(saved_cuda):
        logger.warning(
            "the checkpoint holds random states of %d CUDA devices, this machine has %d: "
            "the run goes on, but not bit for bit",
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
    """The value as plain JSON; `where` it stands is for the error.

    Raises:
        TypeError: JSON would lose something in silence; names the key.
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
