"""Checkpoints: everything a run needs to go on bit for bit, written so that no kill can spoil it.

    run_dir/checkpoints/step_000020/
        model.safetensors       parameters and buffers of the policy, tied tensors once
        optimizer.safetensors   optimizer state as "<state name>/<parameter name>"
        critic.safetensors, critic_optimizer.safetensors     only with a critic
        config.json, tokenizer.json, ...   the folder loads with transformers' `from_pretrained`
        state.json              step, version, data position, random states, schedulers, fingerprint
        manifest.json           sha256 and size of every other file; written last

A checkpoint is written into a hidden sibling folder, forced to disk and renamed, so `step_N` is
either complete or absent. Older ones are removed only after that. Whatever else can be damaged
(a flipped bit, a truncated copy) is found by the manifest on loading; then the one before is used,
loudly, and if none is left the run stops: a resumed run never starts afresh in silence. Nothing is
pickled: safetensors and JSON only.

The life of a run: `clean_leftovers` or `resume` at the start, then after every k-th optimizer step
`save_checkpoint(run_dir, capture_state(...))`, where `CheckpointNotSaved` (disk full) is a warning.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl.errors import CheckpointError
from agentrl.sync.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_config,
    adapter_tensors,
    has_adapter,
)
from agentrl.types import JSON

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
STEP_NAME = re.compile(r"step_(\d{6,})")
LEFTOVER_NAME = re.compile(r"\.(tmp|old|prune)-(step_\d{6,})")


class CheckpointNotSaved(CheckpointError):
    """The disk refused a checkpoint (full, read-only, I/O error).

    The partial folder is already removed and the older checkpoints are intact, so the training
    loop logs this as a warning and goes on.
    """


class Scheduler(Protocol):
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state_dict: dict) -> None: ...


class Tokenizer(Protocol):
    def save_pretrained(self, save_directory: str) -> object: ...


@dataclass(slots=True)
class TrainState:
    """What a checkpoint holds. Made by `capture_state` or `load_checkpoint`."""

    step: int
    """Optimizer steps finished."""
    policy_version: int
    fingerprint: dict[str, JSON]
    """What makes two runs the same run: task and environment ids, model, group size, seed, ...
    A resumed run compares it, see `check_fingerprint`."""
    data_position: dict[str, JSON] = field(default_factory=dict)
    extra: dict[str, JSON] = field(default_factory=dict)
    """Whatever else the loop wants back, e.g. the state of a KL controller."""
    rng: dict[str, JSON] = field(default_factory=dict)
    """States of the random generators of python, numpy and torch, see `capture_rng`."""
    schedulers: dict[str, JSON] = field(default_factory=dict)
    optimizer_groups: dict[str, JSON] = field(default_factory=dict)
    """Hyper-parameters of the optimizers' parameter groups, by file stem."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """File stem (`model` or `adapter_model`, `optimizer`, `critic`, `critic_optimizer`) -> name ->
    CPU tensor. Tensors of a model on the CPU alias the live ones: save before the next optimizer
    step."""
    pretrained: dict[str, str] = field(default_factory=dict)
    """Further small text files of the folder, e.g. config.json, by name."""
    tokenizer: Tokenizer | None = None


def capture_state(
    *,
    step: int,
    policy_version: int,
    fingerprint: Mapping[str, JSON],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None = None,
    critic: torch.nn.Module | None = None,
    critic_optimizer: torch.optim.Optimizer | None = None,
    critic_scheduler: Scheduler | None = None,
    data_position: Mapping[str, JSON] | None = None,
    extra: Mapping[str, JSON] | None = None,
    tokenizer: Tokenizer | None = None,
) -> TrainState:
    """Collect the state of a run between two optimizer steps.

    Sharded parameters (DTensor) are gathered, so with several ranks every rank calls this and
    rank 0 saves. The random states are those of the calling process.

    Raises:
        TypeError: something in it has no exact JSON form; names the key.
    """
    state = TrainState(
        step=step,
        policy_version=policy_version,
        fingerprint=_json_object(fingerprint, "fingerprint"),
        data_position=_json_object(data_position or {}, "data_position"),
        extra=_json_object(extra or {}, "extra"),
        rng=capture_rng(),
        pretrained=_config_files(model),
        tokenizer=tokenizer,
    )
    networks = (
        ("", "model", model, optimizer, scheduler),
        ("critic_", "critic", critic, critic_optimizer, critic_scheduler),
    )
    for prefix, stem, network, network_optimizer, network_scheduler in networks:
        if network is None:
            continue
        state.tensors[_stem(stem, network)] = {
            name: _to_cpu(tensor) for name, tensor in _named_tensors(network).items()
        }
        if network_optimizer is not None:
            key = f"{prefix}optimizer"
            state.tensors[key] = _optimizer_tensors(network, network_optimizer)
            state.optimizer_groups[key] = _optimizer_groups(network, network_optimizer)
        if network_scheduler is not None:
            key = f"{prefix}scheduler"
            state.schedulers[key] = _json_object(network_scheduler.state_dict(), key)
    return state


def restore_state(
    state: TrainState,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None = None,
    critic: torch.nn.Module | None = None,
    critic_optimizer: torch.optim.Optimizer | None = None,
    critic_scheduler: Scheduler | None = None,
    restore_random_states: bool = True,
) -> None:
    """Put a loaded state into freshly built objects, in place and bit for bit. Tied tensors stay
    tied; sharded parameters receive their shard.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit; names the file and the tensor.
    """
    stem = _stem("model", model)
    _load_tensors(model, state.tensors.get(stem, {}), f"{stem}.safetensors")
    _load_optimizer(model, optimizer, state, "optimizer")
    if critic is not None:
        _load_tensors(critic, state.tensors.get("critic", {}), "critic.safetensors")
        if critic_optimizer is not None:
            _load_optimizer(critic, critic_optimizer, state, "critic_optimizer")
    for key, target in (("scheduler", scheduler), ("critic_scheduler", critic_scheduler)):
        if target is not None:
            saved = state.schedulers.get(key)
            if not isinstance(saved, dict):
                raise CheckpointError(
                    f"{STATE_FILE} holds no {key}: the run that saved it had none; "
                    "resume with the same schedule"
                )
            # A copy: load_state_dict may adopt the lists it is given.
            target.load_state_dict(copy.deepcopy(saved))
    # Last, because building and loading may draw random numbers.
    if restore_random_states:
        restore_rng(state.rng)


# ---------------------------------------------------------------------------------- writing


def save_checkpoint(run_dir: str | Path, state: TrainState, *, keep: int = 2) -> Path:
    """Write `state` to `run_dir/checkpoints/step_N` and prune all but the newest `keep`.

    The new folder appears by one rename after everything in it is on disk. Checkpoints of later
    steps belong to a timeline that this run left when it resumed from an earlier one: they are
    set aside as `step_N.abandoned`, not deleted and not used again.

    Raises:
        CheckpointNotSaved: the operating system refused; the older checkpoints are intact.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    root = Path(run_dir) / "checkpoints"
    target = root / f"step_{state.step:06d}"
    partial = root / f".tmp-{target.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        partial.mkdir()
        _write_files(partial, state)
        _move_into_place(partial, target)
    except (OSError, SafetensorError) as error:
        # safetensors wraps the operating system's errors in its own class.
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointNotSaved(
            f"checkpoint of step {state.step} not saved: {error}; free space under {root} "
            "(older checkpoints are intact)"
        ) from error
    try:
        _prune(root, newest=state.step, keep=keep)
    except OSError as error:
        logger.warning("old checkpoints under %s could not be removed: %s", root, error)
    return target


def _write_files(folder: Path, state: TrainState) -> None:
    for stem, tensors in state.tensors.items():
        # transformers reads the "format" entry of the header.
        save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    for name, text in state.pretrained.items():
        (folder / name).write_text(text, encoding="utf-8")
    if state.tokenizer is not None:
        state.tokenizer.save_pretrained(str(folder))
    content = {
        "format_version": FORMAT_VERSION,
        "step": state.step,
        "policy_version": state.policy_version,
        "fingerprint": state.fingerprint,
        "data_position": state.data_position,
        "extra": state.extra,
        "schedulers": state.schedulers,
        "optimizer_groups": state.optimizer_groups,
        "rng": state.rng,
    }
    (folder / STATE_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _force_to_disk(path)
    manifest = {
        "files": {
            path.relative_to(folder).as_posix(): {
                "sha256": _sha256(path),
                "size": path.stat().st_size,
            }
            for path in files
        }
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _force_to_disk(folder / MANIFEST_FILE)
    for subfolder in [path for path in folder.rglob("*") if path.is_dir()]:
        _force_to_disk(subfolder)
    _force_to_disk(folder)


def _move_into_place(partial: Path, target: Path) -> None:
    """Rename, keeping an older folder of the same step until the new one stands.

    A kill between the two renames leaves `.old-step_N`, which `clean_leftovers` puts back.
    """
    old = target.with_name(f".old-{target.name}")
    _remove(old)
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    _force_to_disk(target.parent)
    _remove(old)


def _prune(root: Path, *, newest: int, keep: int) -> None:
    for step, path in _steps(root):
        if step > newest:
            abandoned = path.with_name(f"{path.name}.abandoned")
            _remove(abandoned)
            path.rename(abandoned)
            logger.warning("set aside %s: this run continued from an earlier step", abandoned)
    for _, path in _steps(root)[:-keep]:
        # Renamed first: a kill during the removal must not leave a half-empty `step_N`.
        doomed = path.with_name(f".prune-{path.name}")
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


# ---------------------------------------------------------------------------------- reading


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest `step_N` folder, not verified; None when there is none."""
    steps = _steps(Path(run_dir) / "checkpoints")
    return steps[-1][1] if steps else None


def clean_leftovers(run_dir: str | Path) -> list[str]:
    """Remove what a killed save left behind and return the removed folders' names.

    Call it once when a run starts, before anything is saved; no other process may be saving.
    """
    root = Path(run_dir) / "checkpoints"
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = LEFTOVER_NAME.fullmatch(path.name)
        if match is None:
            continue
        kind, step_name = match.groups()
        if kind == "old" and not (root / step_name).exists():
            path.rename(root / step_name)
        else:
            shutil.rmtree(path)
            removed.append(path.name)
    return removed


def load_checkpoint(path: str | Path) -> TrainState:
    """Read and verify one checkpoint folder.

    Every file is compared with the manifest before it is parsed, so nothing damaged is used.

    Raises:
        CheckpointError: a file is missing, truncated, changed or not what its name says; names it.
    """
    folder = Path(path)
    names = _verify(folder)
    content = _read_json(folder / STATE_FILE)
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / STATE_FILE} has format version {content.get('format_version')}; this "
            f"release of agentrl reads {FORMAT_VERSION}"
        )
    try:
        return TrainState(
            step=int(content["step"]),
            policy_version=int(content["policy_version"]),
            fingerprint=content["fingerprint"],
            data_position=content["data_position"],
            extra=content["extra"],
            rng=content["rng"],
            schedulers=content["schedulers"],
            optimizer_groups=content["optimizer_groups"],
            tensors={
                name.removesuffix(".safetensors"): _read_tensors(folder / name)
                for name in names
                if name.endswith(".safetensors")
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} is not a checkpoint's: {error!r}") from error


def load_latest(run_dir: str | Path) -> TrainState:
    """Read the newest checkpoint that verifies; each damaged one is reported as a warning.

    Raises:
        CheckpointError: there is none to load. Never a silent fresh start.
    """
    steps = _steps(Path(run_dir) / "checkpoints")
    if not steps:
        raise CheckpointError(
            f"no checkpoint under {Path(run_dir) / 'checkpoints'} to resume from; start without "
            "--resume or point to another run folder"
        )
    problems = []
    for _, path in reversed(steps):
        try:
            state = load_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            logger.warning("CHECKPOINT DAMAGED: %s; trying the one before", error)
            continue
        if problems:
            logger.warning("resuming from the older checkpoint %s", path)
        return state
    raise CheckpointError(
        f"none of the {len(steps)} checkpoints under {Path(run_dir) / 'checkpoints'} can be "
        f"loaded: {'; '.join(problems)}; restore one from a copy or start without --resume"
    )


def check_fingerprint(
    saved: Mapping[str, JSON], current: Mapping[str, JSON], *, force: bool = False
) -> None:
    """Refuse to continue another run's checkpoint.

    Raises:
        CheckpointError: lists every differing key with both values. With `force` the same line is
            logged as a warning instead.
    """
    before = _flatten(_json_object(saved, "fingerprint"))
    now = _flatten(_json_object(current, "fingerprint"))
    absent = object()
    differences = [
        f"{key}: checkpoint {_shown(before, key)}, now {_shown(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if not _same(before.get(key, absent), now.get(key, absent))
    ]
    if not differences:
        return
    text = f"the checkpoint is of a different run: {'; '.join(differences)}"
    if force:
        logger.warning("%s (resumed all the same: run.force_resume)", text)
        return
    raise CheckpointError(
        f"{text}; restore the old values or pass --run.force_resume true to continue with the new"
    )


def resume(
    run_dir: str | Path,
    *,
    fingerprint: Mapping[str, JSON],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None = None,
    critic: torch.nn.Module | None = None,
    critic_optimizer: torch.optim.Optimizer | None = None,
    critic_scheduler: Scheduler | None = None,
    force: bool = False,
) -> TrainState:
    """Clean up, load the newest good checkpoint, compare fingerprints, restore everything.

    Raises:
        CheckpointError: nothing to load, another run's fingerprint, or tensors that do not fit.
    """
    clean_leftovers(run_dir)
    state = load_latest(run_dir)
    check_fingerprint(state.fingerprint, fingerprint, force=force)
    restore_state(
        state,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        critic=critic,
        critic_optimizer=critic_optimizer,
        critic_scheduler=critic_scheduler,
    )
    return state


def _steps(root: Path) -> list[tuple[int, Path]]:
    """`step_N` folders, oldest first."""
    if not root.is_dir():
        return []
    found = [(STEP_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def _verify(folder: Path) -> list[str]:
    """Names of the files in the manifest, each present and unchanged."""
    files = _read_json(folder / MANIFEST_FILE).get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{folder / MANIFEST_FILE} lists no files")
    weights = WEIGHTS_FILE if WEIGHTS_FILE in files else "model.safetensors"
    for name in (STATE_FILE, weights, "optimizer.safetensors"):
        if name not in files:
            raise CheckpointError(f"{folder / MANIFEST_FILE} does not list {name}")
    for name, entry in files.items():
        path = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or not isinstance(entry, dict):
            raise CheckpointError(f"{folder / MANIFEST_FILE} has a bad entry {name!r}")
        try:
            size = path.stat().st_size
            if size != entry.get("size"):
                raise CheckpointError(
                    f"{path} is damaged: {size} bytes, the manifest says {entry.get('size')}"
                )
            if _sha256(path) != entry.get("sha256"):
                raise CheckpointError(
                    f"{path} is damaged: its sha256 is not the one in the manifest"
                )
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return list(files)


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object")
    return content


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Cloned: the file is mapped, and optimizers write into their state in place.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


# ---------------------------------------------------------------------------------- tensors


def _stem(stem: str, network: torch.nn.Module) -> str:
    """The file of a network's tensors: PEFT's name where only an adapter is trained and saved."""
    return WEIGHTS_FILE.removesuffix(".safetensors") if has_adapter(network) else stem


def _named_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied tensor only under its first name. Of a
    model with an adapter, the adapter's alone.

    Raises:
        TypeError: the module keeps a state that is not a tensor.
    """
    if has_adapter(module):
        return adapter_tensors(module)
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} of {type(module).__name__} is not a tensor")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def _to_cpu(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = tensor.cpu().contiguous()
    # safetensors refuses tensors that share storage, e.g. two views of one buffer.
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def _parameter_names(module: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _optimizer_tensors(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    names = _parameter_names(module)
    tensors = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"optimizer state {key!r} of {names[id(parameter)]} is not a tensor; "
                    f"{type(optimizer).__name__} cannot be saved"
                )
            tensors[f"{key}/{names[id(parameter)]}"] = _to_cpu(value)
    return tensors


def _optimizer_groups(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[JSON]:
    names = _parameter_names(module)
    groups: list[JSON] = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = [p for p in group["params"] if id(p) not in names]
        if strangers:
            raise TypeError(
                f"optimizer group {index} holds {len(strangers)} parameters that are not in the "
                f"{type(module).__name__} it is saved with"
            )
        hyperparameters = {key: value for key, value in group.items() if key != "params"}
        saved = _json_object(hyperparameters, f"optimizer group {index}")
        saved["params"] = [names[id(parameter)] for parameter in group["params"]]
        groups.append(saved)
    return groups


@torch.no_grad()
def _load_tensors(module: torch.nn.Module, saved: Mapping[str, Tensor], file: str) -> None:
    live = _named_tensors(module)
    _compare_names(live.keys(), saved.keys(), file)
    for name, target in live.items():
        source = saved[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"{file}: {name} is {source.dtype} {tuple(source.shape)}, the model has "
                f"{target.dtype} {tuple(target.shape)}"
            )
    for name, target in live.items():
        target.copy_(_like(saved[name], target))


def _load_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, key: str
) -> None:
    file = f"{key}.safetensors"
    saved_groups = state.optimizer_groups.get(key)
    names = _parameter_names(module)
    live_groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if not isinstance(saved_groups, list) or live_groups != [
        group.get("params") if isinstance(group, dict) else None for group in saved_groups
    ]:
        raise CheckpointError(
            f"{STATE_FILE}: the parameter groups of {key} are not those of this run's optimizer"
        )
    parameters = dict(module.named_parameters())
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    loaded: dict[Tensor, dict[str, Tensor]] = {}
    for name, tensor in state.tensors.get(key, {}).items():
        kind, _, parameter_name = name.partition("/")
        parameter = parameters.get(parameter_name)
        if parameter is None:
            raise CheckpointError(f"{file}: {parameter_name} is not a parameter of this model")
        if kind == "step":
            # Where torch's own optimizers keep it; a step on the wrong device is an error there.
            group = group_of[id(parameter)]
            on_device = group.get("capturable") or group.get("fused")
            value = tensor.clone()
            loaded.setdefault(parameter, {})[kind] = (
                value.to(parameter.device) if on_device else value
            )
        elif tensor.shape == parameter.shape:
            loaded.setdefault(parameter, {})[kind] = _like(tensor.clone(), parameter)
        else:
            raise CheckpointError(
                f"{file}: {name} has shape {tuple(tensor.shape)}, its parameter "
                f"{tuple(parameter.shape)}"
            )
    optimizer.state.clear()
    optimizer.state.update(loaded)
    saved_options: list[Any] = saved_groups
    for group, saved in zip(optimizer.param_groups, saved_options, strict=True):
        for option, value in saved.items():
            if option != "params":
                # JSON has no tuples, and optimizers compare and unpack betas as one.
                is_tuple = isinstance(group.get(option), tuple) and isinstance(value, list)
                group[option] = tuple(value) if is_tuple else value


def _like(tensor: Tensor, target: Tensor) -> Tensor:
    """`tensor` on the device of `target` and, if that one is sharded, this rank's shard."""
    if isinstance(target, DTensor):
        return distribute_tensor(
            tensor.to(target.to_local().device), target.device_mesh, target.placements
        )
    return tensor.to(target.device)


def _compare_names(live, saved, file: str) -> None:
    missing, unexpected = sorted(live - saved), sorted(saved - live)
    if missing or unexpected:
        raise CheckpointError(
            f"{file} does not fit the model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )


def _config_files(model: torch.nn.Module) -> dict[str, str]:
    """config.json and generation_config.json of a transformers model; nothing of any other."""
    files = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        # A model built from a config carries neither; inference engines choose the class by the
        # first and the precision by the second. FSDP2 renames the class it wraps.
        if not config.architectures:
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = next(model.parameters()).dtype
        files["config.json"] = config.to_json_string()
    if has_adapter(model):
        files[CONFIG_FILE] = adapter_config(model)
    generation_config: Any = getattr(model, "generation_config", None)
    if hasattr(generation_config, "to_json_string"):
        files["generation_config.json"] = generation_config.to_json_string()
    return files


# ---------------------------------------------------------------------------------- random states


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


# ---------------------------------------------------------------------------------- JSON


def _json_object(value: Mapping, where: str) -> dict[str, JSON]:
    plain = _json_value(dict(value), where)
    assert isinstance(plain, dict)
    return plain


def _json_value(value: object, where: str) -> JSON:
    """`value` with tuples as lists; TypeError where JSON would lose something in silence."""
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


def _flatten(value: Mapping[str, JSON], prefix: str = "") -> dict[str, JSON]:
    flat: dict[str, JSON] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _same(left: object, right: object) -> bool:
    """Equal and of one JSON type: `1 == True` in Python, and `1 == 1.0` is a changed config."""
    return type(left) is type(right) and left == right


def _shown(values: Mapping[str, JSON], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "(absent)"
