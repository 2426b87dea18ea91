"""Captures the state of a run between two optimizer updates, and restores it bit for bit.

Tensors by file and name, everything else as JSON: nothing that would have to be unpickled.
"""

from __future__ import annotations

import base64
import copy
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.errors import CheckpointError
from agentrl.sync.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_config,
    adapter_tensors,
    has_adapter,
)
from agentrl.train.shard_files import read_shards
from agentrl.types import JSON

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"


class Trained(Protocol):
    """A network and what updates it, such as a `Learner`."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def masters(self) -> Mapping[Tensor, Tensor]:
        """The weights that the optimizer updates in place of parameters, by parameter."""
        ...

    def cast(self) -> None:
        """Give those parameters what their masters are now."""
        ...


class Weights(Protocol):
    """A network that nothing updates."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def masters(self) -> Mapping[Tensor, Tensor]: ...


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
    unless they were copied: save before the next update. Empty where `folder` holds them."""
    pretrained: dict[str, str] = field(default_factory=dict)
    """Further small text files of the folder, e.g. config.json, by name."""
    tokenizer: Tokenizer | None = None
    folder: Path | None = None
    """The folder from which `restore_state` reads tensors, where no process reads all of them."""


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
        state.tensors[stem] = _cpu_tensors(trained, copy_tensors)
        state.tensors[optimizer_stem] = _optimizer_tensors(trained, copy_tensors)
        state.optimizer_groups[optimizer_stem] = _optimizer_groups(trained)
    if reference is not None:
        state.tensors["reference"] = _cpu_tensors(reference, copy_tensors)
    return state


def _cpu_tensors(trained: Weights, copied: bool) -> dict[str, Tensor]:
    return {name: _to_cpu(each, copied) for name, each in _named_tensors(trained).items()}


def restore_state(
    state: TrainState,
    *,
    policy: Trained,
    critic: Trained | None = None,
    reference: Weights | None = None,
) -> None:
    """Put a loaded state into freshly built objects, in place and bit for bit. Tied tensors stay
    tied; sharded parameters receive their shard.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit; names the file and the tensor.
    """
    for trained, stem, optimizer_stem in _parts(policy, critic):
        _load_weights(state, trained, stem)
        if state.folder is None:
            moments = state.tensors.get(optimizer_stem, {})
        else:
            moments = _read_moments(state.folder, trained, optimizer_stem)
        _load_optimizer(trained, state, optimizer_stem, moments)
        trained.cast()
    if reference is not None:
        _load_weights(state, reference, "reference")
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


def _load_weights(state: TrainState, trained: Weights, stem: str) -> None:
    if state.folder is None:
        _load_tensors(trained, state.tensors.get(stem, {}), f"{stem}.safetensors")
    else:
        _read_weights(state.folder, trained, stem)


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


@torch.no_grad()
def _read_weights(folder: Path, trained: Weights, stem: str) -> None:
    """Read them in place: there is no room for a second copy of what fills a device."""

    def targets(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _fitting(trained, saved, f"{stem}.safetensors")

    if not _read(folder, stem, targets):
        targets({})  # raises


def _read_moments(folder: Path, trained: Trained, stem: str) -> dict[str, Tensor]:
    """Read moments into new memory on their parameters' devices; skip what fits no parameter."""
    updated = _updated_parameters(trained)

    def targets(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in saved.items():
            kind, _, parameter_name = name.partition("/")
            parameter = updated.get(parameter_name)
            if parameter is not None and parameter.shape == tensor.shape and kind != "step":
                like = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
                found[name] = like
            elif parameter is not None:
                found[name] = torch.empty_like(tensor, device="cpu")
        return found

    return _read(folder, stem, targets)


def _read(
    folder: Path, stem: str, targets: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Reads a network or an optimizer, whether it was written whole or in shards."""
    if (folder / stem).is_dir():
        return read_shards(folder / stem, targets)
    if (folder / f"{stem}.safetensors").is_file():
        return read_shards(folder, targets, [f"{stem}.safetensors"])
    return {}


def _to_cpu(tensor: Tensor, copied: bool) -> Tensor:
    """Returns the tensor on the host, in storage of its own size. A shard remains one, for its rank
    to write."""
    tensor = tensor.detach()
    if copied:
        return tensor.to("cpu", copy=True).contiguous()
    if isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.cpu().contiguous()
    # safetensors refuses tensors that share storage, e.g. two views of one buffer.
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def _updated_parameters(trained: Trained) -> dict[str, Tensor]:
    """Returns the tensors that the optimizer may update, by the parameter's name."""
    return {name: trained.masters.get(p, p) for name, p in trained.model.named_parameters()}


def _parameter_names(trained: Trained) -> dict[int, str]:
    return {id(parameter): name for name, parameter in _updated_parameters(trained).items()}


def _optimizer_tensors(trained: Trained, copied: bool) -> dict[str, Tensor]:
    names, optimizer = _parameter_names(trained), trained.optimizer
    tensors = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, int):
                value = torch.tensor(value)  # how bitsandbytes counts steps
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"optimizer state {key!r} of {names[id(parameter)]} is not a tensor; "
                    f"{type(optimizer).__name__} cannot be saved"
                )
            tensors[f"{key}/{names[id(parameter)]}"] = _to_cpu(value, copied)
    return tensors


def _optimizer_groups(trained: Trained) -> list[JSON]:
    names = _parameter_names(trained)
    groups: list[JSON] = []
    for index, group in enumerate(trained.optimizer.param_groups):
        strangers = [p for p in group["params"] if id(p) not in names]
        if strangers:
            raise TypeError(
                f"optimizer group {index} holds {len(strangers)} parameters that are not in the "
                f"{type(trained.model).__name__} it is saved with"
            )
        hyperparameters = {key: value for key, value in group.items() if key != "params"}
        saved = exact_json(hyperparameters, f"optimizer group {index}")
        saved["params"] = [names[id(parameter)] for parameter in group["params"]]
        saved["optimizer"] = type(trained.optimizer).__name__
        groups.append(saved)
    return groups


@torch.no_grad()
def _load_tensors(trained: Weights, saved: Mapping[str, Tensor], file: str) -> None:
    for name, target in _fitting(trained, saved, file).items():
        target.copy_(saved[name])


def _fitting(trained: Weights, saved: Mapping[str, Tensor], file: str) -> dict[str, Tensor]:
    """The tensors of this run that saved ones are for, by name.

    Raises:
        CheckpointError: names, shapes or dtypes differ.
    """
    live = _named_tensors(trained)
    _compare_names(live.keys(), saved.keys(), file)
    for name, target in live.items():
        source = saved[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"{file}: {name} is {source.dtype} {tuple(source.shape)}, this run trains "
                f"{target.dtype} {tuple(target.shape)}; start a new run with its folder as "
                "model.path"
            )
    return live


def _load_optimizer(
    trained: Trained, state: TrainState, key: str, tensors: Mapping[str, Tensor]
) -> None:
    file, optimizer = f"{key}.safetensors", trained.optimizer
    saved_groups = state.optimizer_groups.get(key)
    names = _parameter_names(trained)
    live_groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if not isinstance(saved_groups, list) or live_groups != [
        group.get("params") if isinstance(group, dict) else None for group in saved_groups
    ]:
        raise CheckpointError(
            f"{STATE_FILE}: the parameter groups of {key} are not those of this run's optimizer"
        )
    saved_options: list[Any] = saved_groups
    saved_by = {group.get("optimizer", "AdamW") for group in saved_options}
    if saved_by != {type(optimizer).__name__}:
        raise CheckpointError(
            f"{file} is the state of {', '.join(sorted(saved_by))}, this run's optimizer is "
            f"{type(optimizer).__name__}; set train.optimizer as it was"
        )
    parameters = _updated_parameters(trained)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    loaded: dict[Tensor, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        kind, _, parameter_name = name.partition("/")
        parameter = parameters.get(parameter_name)
        if parameter is None:
            raise CheckpointError(f"{file}: {parameter_name} is not a parameter of this model")
        if kind == "step" and tensor.dtype == torch.int64:
            loaded.setdefault(parameter, {})[kind] = tensor.item()
        elif kind == "step":
            # Where torch's own optimizers keep it; a step on the wrong device is an error there.
            group = group_of[id(parameter)]
            on_device = group.get("capturable") or group.get("fused")
            value = tensor.clone()
            loaded.setdefault(parameter, {})[kind] = (
                value.to(parameter.device) if on_device else value
            )
        elif kind.startswith(("qmap", "absmax")):  # of 8-bit moments
            loaded.setdefault(parameter, {})[kind] = tensor.to(parameter.device)
        elif tensor.shape == parameter.shape:
            # What was read is there already; a state in memory keeps its own.
            loaded.setdefault(parameter, {})[kind] = tensor.to(
                parameter.device, copy=state.folder is None
            )
        else:
            raise CheckpointError(
                f"{file}: {name} has shape {tuple(tensor.shape)}, its parameter "
                f"{tuple(parameter.shape)}"
            )
    optimizer.state.clear()
    optimizer.state.update(loaded)
    for group, saved in zip(optimizer.param_groups, saved_options, strict=True):
        for option, value in saved.items():
            if option not in ("params", "optimizer"):
                # JSON has no tuples, and optimizers compare and unpack betas as one.
                is_tuple = isinstance(group.get(option), tuple) and isinstance(value, list)
                group[option] = tuple(value) if is_tuple else value


def _compare_names(live, saved, file: str) -> None:
    missing, unexpected = sorted(live - saved), sorted(saved - live)
    if missing or unexpected:
        raise CheckpointError(
            f"{file} does not fit the model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )


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
