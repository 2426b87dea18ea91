"""Checkpoints: everything a run needs to go on bit for bit, written so that no kill can spoil it.

    run_dir/checkpoints/step_000020/
        model.safetensors       parameters and buffers of the policy, tied tensors once
        optimizer.safetensors   optimizer state as "<state name>/<parameter name>"
        critic.safetensors, critic_optimizer.safetensors     only with a critic
        config.json, tokenizer.json, ...   the folder loads with transformers' `from_pretrained`
        state.json              step, data position, random states, optimizers' options, fingerprint
        manifest.json           sha256 and size of every other file; written last

Where every rank has a shard of each network, each writes its own (`agentrl.train.shard_files`):
folders `model/`, `optimizer/` and so on stand in the place of those files, every rank computes the
sums of what it wrote, and rank 0 does the rest. Both are read by any number of ranks; `agentrl
export` makes one folder for `from_pretrained` of the second.

A checkpoint is written into a hidden sibling folder, forced to disk and renamed, so `step_N` is
either complete or absent. Older ones are removed only after that. Whatever else can be damaged
(a flipped bit, a truncated copy) is found by the manifest on loading; then the one before is used,
loudly, and if none is left the run stops: a resumed run never starts afresh in silence. Nothing is
pickled: safetensors and JSON only.

The life of a run: `clean_leftovers` or `resume` at the start, then after every k-th training step
`save_checkpoint(run_dir, capture_state(...))`, where `CheckpointNotSaved` (disk full) is a warning.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import CheckpointError
from agentrl.sync.adapter import WEIGHTS_FILE
from agentrl.train import ranks
from agentrl.train.shard_files import entry_of, force_to_disk, sha256, together, write_shards
from agentrl.train.state import STATE_FILE, Trained, TrainState, Weights, exact_json, restore_state
from agentrl.types import JSON

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""One process wrote it: a file of whole tensors per network and optimizer."""
SHARDED_VERSION = 2
"""Several ranks wrote it: a folder of shards in the place of each of those files."""
MANIFEST_FILE = "manifest.json"
BEST_NAME = "best"
"""A link to the checkpoint at which `run.keep_best` was highest."""
STEP_NAME = re.compile(r"step_(\d{6,})")
LEFTOVER_NAME = re.compile(r"\.(tmp|old|prune)-(step_\d{6,})")


class CheckpointNotSaved(CheckpointError):
    """The disk refused a checkpoint (full, read-only, I/O error).

    The partial folder is already removed and the older checkpoints are intact, so the training
    loop logs this as a warning and goes on.
    """


# writing ------------------------------------------------------------------------------------------


def save_checkpoint(
    run_dir: str | Path, state: TrainState, *, keep: int = 2, is_best: bool = False
) -> Path:
    """Write `state` to `run_dir/checkpoints/step_N` and prune all but the newest `keep` and the
    best, which `run_dir/checkpoints/best` links to.

    The new folder appears by one rename after everything in it is on disk. Checkpoints of later
    steps belong to a timeline that this run left when it resumed from an earlier one: they are
    set aside as `step_N.abandoned`, not deleted and not used again.

    Args:
        is_best: the link moves to this one.

    Raises:
        CheckpointNotSaved: the operating system refused; the older checkpoints are intact.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    root = Path(run_dir) / "checkpoints"
    target = root / f"step_{state.step:06d}"
    partial = root / f".tmp-{target.name}"
    leads = ranks.rank() == 0

    def begin() -> None:
        if leads:
            root.mkdir(parents=True, exist_ok=True)
            _remove(partial)
            partial.mkdir()

    def finish() -> None:
        if leads:
            _write_rest(partial, state, entries)
            _move_into_place(partial, target)

    try:
        together(begin)
        entries = _write_tensors(partial, state)
        together(finish)
    except (OSError, SafetensorError) as error:
        # safetensors wraps the operating system's errors in its own class.
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointNotSaved(
            f"checkpoint of step {state.step} not saved: {error}; free space under {root} "
            "(older checkpoints are intact)"
        ) from error
    try:
        if leads:
            if is_best:
                point_best_to(target)
            _prune(root, newest=state.step, keep=keep)
    except OSError as error:
        logger.warning("old checkpoints under %s could not be removed: %s", root, error)
    return target


def _write_tensors(folder: Path, state: TrainState) -> dict[str, JSON]:
    """Write all tensors, this rank's shards of them; entries of the shards for the manifest."""
    entries: dict[str, JSON] = {}
    for stem, tensors in state.tensors.items():
        if ranks.size() > 1:
            entries |= write_shards(folder / stem, tensors)
        else:
            # transformers reads the "format" entry of the header.
            save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    return entries


def _write_rest(folder: Path, state: TrainState, entries: Mapping[str, JSON]) -> None:
    """Write everything but tensors, and the manifest last.

    Args:
        entries: of files that those who wrote them have forced to disk.
    """
    for name, text in state.pretrained.items():
        (folder / name).write_text(text, encoding="utf-8")
    if state.tokenizer is not None:
        state.tokenizer.save_pretrained(str(folder))
    content = {
        "format_version": FORMAT_VERSION if ranks.size() == 1 else SHARDED_VERSION,
        "step": state.step,
        "fingerprint": state.fingerprint,
        "data_position": state.data_position,
        "extra": state.extra,
        "optimizer_groups": state.optimizer_groups,
        "rng": state.rng,
    }
    (folder / STATE_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "files": {
            name: entries[name] if name in entries else entry_of(path)
            for name, path in files.items()
        }
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    force_to_disk(folder / MANIFEST_FILE)
    for subfolder in [path for path in folder.rglob("*") if path.is_dir()]:
        force_to_disk(subfolder)
    force_to_disk(folder)


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
    force_to_disk(target.parent)
    _remove(old)


def point_best_to(target: Path) -> None:
    """Makes `best` a link to this checkpoint beside it, in one step."""
    link = target.with_name(f".{BEST_NAME}.partial")
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, target.with_name(BEST_NAME))


def _prune(root: Path, *, newest: int, keep: int) -> None:
    for step, path in _steps(root):
        if step > newest:
            abandoned = path.with_name(f"{path.name}.abandoned")
            _remove(abandoned)
            path.rename(abandoned)
            logger.warning("set aside %s: this run continued from an earlier step", abandoned)
    best = (root / BEST_NAME).resolve()
    for _, path in _steps(root)[:-keep]:
        if path.resolve() == best:
            continue
        # Renamed first: a kill during the removal must not leave a half-empty `step_N`.
        doomed = path.with_name(f".prune-{path.name}")
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


# reading ------------------------------------------------------------------------------------------


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
    """Read and verify one checkpoint folder. Shards, and what a rank needs of a file of whole
    tensors, are read when the state is restored.

    Every file is compared with the manifest before it is parsed, so nothing damaged is used.

    Raises:
        CheckpointError: a file is missing, truncated, changed or not what its name says; names it.
    """
    folder = Path(path)
    names = verify(folder)
    content = _read_json(folder / STATE_FILE)
    version = content.get("format_version")
    if version not in (FORMAT_VERSION, SHARDED_VERSION):
        raise CheckpointError(
            f"{folder / STATE_FILE} has format version {version}; this release of agentrl reads "
            f"{FORMAT_VERSION} and {SHARDED_VERSION}"
        )
    whole = version == FORMAT_VERSION and ranks.size() == 1
    try:
        return TrainState(
            step=int(content["step"]),
            fingerprint=content["fingerprint"],
            data_position=content["data_position"],
            extra=content["extra"],
            rng=content["rng"],
            optimizer_groups=content["optimizer_groups"],
            tensors={
                name.removesuffix(".safetensors"): _read_tensors(folder / name)
                for name in names
                if whole and name.endswith(".safetensors")
            },
            folder=None if whole else folder,
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
    before = _flatten(exact_json(saved, "fingerprint"))
    now = _flatten(exact_json(current, "fingerprint"))
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
    policy: Trained,
    critic: Trained | None = None,
    reference: Weights | None = None,
    force: bool = False,
) -> TrainState:
    """Clean up, load the newest good checkpoint, compare fingerprints, restore everything.

    Raises:
        CheckpointError: nothing to load, another run's fingerprint, or tensors that do not fit.
    """
    if ranks.rank() == 0:
        clean_leftovers(run_dir)
    ranks.barrier()
    state = load_latest(run_dir)
    check_fingerprint(state.fingerprint, fingerprint, force=force)
    restore_state(state, policy=policy, critic=critic, reference=reference)
    return state


def _steps(root: Path) -> list[tuple[int, Path]]:
    """`step_N` folders, oldest first."""
    if not root.is_dir():
        return []
    found = [(STEP_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def verify(folder: Path) -> list[str]:
    """Names of the files in the manifest, each present and unchanged.

    Raises:
        CheckpointError: one is not; names it.
    """
    files = _read_json(folder / MANIFEST_FILE).get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{folder / MANIFEST_FILE} lists no files")
    weights = WEIGHTS_FILE if WEIGHTS_FILE in files else "model.safetensors"
    needed = [STATE_FILE]
    if not any(name.startswith(("model/", "adapter_model/")) for name in files):
        needed += [weights, "optimizer.safetensors"]
    for name in needed:
        if name not in files:
            raise CheckpointError(f"{folder / MANIFEST_FILE} does not list {name}")
    # Each rank looks at its share of them, and all come to the same end.
    own = list(files.items())[ranks.rank() :: ranks.size()]
    problems = [each for each in ranks.gather(_damage(folder, own)) if each]
    if problems:
        raise CheckpointError(str(problems[0]))
    return list(files)


def _damage(folder: Path, entries: Iterable[tuple[str, Any]]) -> str | None:
    """Returns the first thing that is wrong with these files; None if nothing is."""
    for name, entry in entries:
        path = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or not isinstance(entry, dict):
            return f"{folder / MANIFEST_FILE} has a bad entry {name!r}"
        try:
            size = path.stat().st_size
            if size != entry.get("size"):
                return f"{path} is damaged: {size} bytes, the manifest says {entry.get('size')}"
            if sha256(path) != entry.get("sha256"):
                return f"{path} is damaged: its sha256 is not the one in the manifest"
        except OSError as error:
            return f"{path} cannot be read: {error}"
    return None


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
