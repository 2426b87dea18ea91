"""Writes, finds, verifies, prunes and exports checkpoints, from which a run resumes bit for bit.

    run_dir/checkpoints/step_000020/
        model.safetensors       parameters and buffers of the policy, tied tensors once
        optimizer.safetensors   optimizer state as "<state name>/<parameter name>"
        critic.safetensors, critic_optimizer.safetensors     only with a critic
        config.json, tokenizer.json, ...   the folder loads with transformers' `from_pretrained`
        state.json              step, data position, random states, optimizers' options, fingerprint
        manifest.json           sha256 and size of every other file; written last

With several ranks, each network and optimizer is a folder of shards instead of one file:

        model/shard-00001-model-00001-of-00001.safetensors      written by rank 0
        model/shard-00002-model-00001-of-00001.safetensors      written by rank 1, and so on

Each rank writes and hashes its own shards, and rank 0 writes the rest. Any number of ranks can read
either kind; `agentrl export` turns the second into a folder for `from_pretrained`.

A checkpoint is written to a hidden folder beside its place, forced to disk and renamed, so that a
kill at any time leaves `step_N` complete or absent. Older checkpoints are removed only then. Other
damage (a flipped bit, a truncated copy) is found on loading, by the manifest: the run then warns
and uses the checkpoint before, and if none is left it stops, rather than start from scratch. Files
are safetensors, JSON and the tokenizer's; nothing is pickled.

A run calls `clean_leftovers` or `resume` when it starts, and `Saver.save(capture_state(...))` after
every k-th training step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import save  # pyright: ignore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from agentrl.config import RunConfig
from agentrl.errors import CheckpointError, ConfigError
from agentrl.model import ranks
from agentrl.model.adapter_files import WEIGHTS_FILE
from agentrl.model.load import require_empty
from agentrl.train.state import (
    STATE_FILE,
    Trained,
    TrainState,
    Weights,
    exact_json,
    read_tensors,
    restore_state,
)
from agentrl.types import JSON

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of checkpoints of one process: one file of whole tensors per network and optimizer."""
SHARDED_VERSION = 2
"""Of checkpoints of several ranks: a folder of shards in place of each of those files."""
MANIFEST_FILE = "manifest.json"
BEST_NAME = "best"
"""Name of the link to the checkpoint with the highest `run.keep_best`."""
STEP_NAME = re.compile(r"step_(\d{6,})")
LEFTOVER_NAME = re.compile(r"\.(tmp|old|prune)-(step_\d{6,})")
_SHARD_NAME = re.compile(r"shard-(\d+)-.*\.safetensors")


class CheckpointNotSaved(CheckpointError):
    """A checkpoint could not be written (disk full, read-only, I/O error).

    The partial folder is already removed and older checkpoints are intact, so the training loop
    logs this as a warning and continues.
    """


# writing ------------------------------------------------------------------------------------------


def save_checkpoint(
    run_dir: str | Path, state: TrainState, *, keep: int = 2, is_best: bool = False
) -> Path:
    """Writes `state` to `run_dir/checkpoints/step_N`, and removes old checkpoints.

    The newest `keep` remain, and the one that `run_dir/checkpoints/best` links to. Checkpoints of
    later steps than this one were abandoned when the run resumed from an earlier step: they are
    renamed to `step_N.abandoned`, and neither deleted nor used again. Every rank has to call this.

    Args:
        is_best: let `best` link to this checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointNotSaved: the operating system refused; older checkpoints are intact.
        ValueError: `keep` is below 1.
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
        _together(begin)
        entries = _write_tensors(partial, state)
        _together(finish)
    except (OSError, SafetensorError) as error:
        # safetensors wraps errors of the operating system in its own class.
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
    """Writes all tensors, or this rank's shards, and returns the shards' manifest entries."""
    entries: dict[str, JSON] = {}
    for stem, tensors in state.tensors.items():
        if ranks.size() > 1:
            entries |= _write_shards(folder / stem, tensors)
        else:
            # transformers reads the "format" entry of the header.
            save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    return entries


def _write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, JSON]:
    """Writes this rank's shards of the tensors into the folder. Every rank has to call this.

    Returns:
        The manifest entries of all ranks' files.
    """
    try:
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=ranks.saving_group(),
            no_dist=ranks.size() == 1,
        )
    except CheckpointException as error:
        reasons = [f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()]
        raise OSError("; ".join(reasons)) from error
    own = [
        path
        for path in sorted(folder.iterdir())
        if (match := _SHARD_NAME.fullmatch(path.name)) and int(match[1]) == ranks.rank() + 1
    ]
    entries: dict[str, JSON] = {}
    for each in _together(lambda: {f"{folder.name}/{path.name}": _entry_of(path) for path in own}):
        entries |= each
    return entries


def _write_rest(folder: Path, state: TrainState, entries: Mapping[str, JSON]) -> None:
    """Writes everything but the tensors, and the manifest last.

    Args:
        entries: manifest entries of shards, which are already forced to disk.
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
    files: dict[str, JSON] = {}
    paths = sorted(folder.rglob("*"))
    for path in filter(Path.is_file, paths):
        name = path.relative_to(folder).as_posix()
        files[name] = entries[name] if name in entries else _entry_of(path)
    manifest = folder / MANIFEST_FILE
    manifest.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    for path in (manifest, *filter(Path.is_dir, paths), folder):
        _force_to_disk(path)


def _move_into_place(partial: Path, target: Path) -> None:
    """Renames the new folder, and removes an older one of the same step after that.

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


def point_best_to(target: Path) -> None:
    """Makes `best`, beside this checkpoint, a link to it, atomically."""
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
        # Renamed first, since a kill during the removal must not leave a half-empty `step_N`.
        doomed = path.with_name(f".prune-{path.name}")
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _together(work: Callable[[], Any]) -> list[Any]:
    """Calls `work` on every rank and returns all ranks' results, which have to be JSON.

    Raises:
        OSError: a rank could not write; raised on every rank, and names that one.
    """
    result, problem = None, None
    try:
        result = work()
    except (OSError, SafetensorError) as error:
        problem = str(error)
    outcomes: list[Any] = ranks.gather([result, problem], ranks.saving_group())
    problems = [f"rank {rank}: {each[1]}" for rank, each in enumerate(outcomes) if each[1]]
    if problems:
        raise OSError("; ".join(problems))
    return [each[0] for each in outcomes]


def _entry_of(path: Path) -> dict[str, JSON]:
    """Forces a file to disk and returns its manifest entry."""
    _force_to_disk(path)
    return {"sha256": _sha256(path), "size": path.stat().st_size}


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# saving while training continues ------------------------------------------------------------------


class Saver:
    """Writes a run's checkpoints one at a time, in the background or not.

    In the background (`run.async_save`) the caller captures copies of all tensors, and a thread
    writes them while training continues. Every rank has such a thread; these threads communicate
    in a process group of their own (`ranks.saving_group`).

    As a context manager, it waits at the end for the save in progress, unless that cannot finish.
    """

    def __init__(self, run_dir: Path, *, in_background: bool) -> None:
        self.in_background = in_background
        self.step = 0
        """The newest step whose checkpoint is in place; 0 if there is none."""
        self.refused = False
        """Whether the last save failed, because the operating system refused it."""
        self._run_dir = run_dir
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: TrainState, *, keep: int, is_best: bool = False) -> None:
        """Saves a state, or starts to. Call `wait` first.

        Args:
            state: its tensors must be copies if saves run in the background.
            keep, is_best: see `save_checkpoint`.
        """
        assert self._thread is None
        if not self.in_background:
            with ranks.working("save"):
                self._write(state, keep, is_best)
            return
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # A daemon, because a broken connection to another rank can block it forever, and the
        # process must still be able to exit.
        self._thread = threading.Thread(
            target=self._write_in_thread,
            args=(state, keep, is_best, device),
            name="agentrl-save",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits for the save in progress, after which `step` and `refused` are up to date.

        Raises:
            BaseException: what ended the thread. A refused save does not; it sets `refused`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # An interruption must not be delayed, and if a rank is gone the save never finishes.
        if error is None or (isinstance(error, Exception) and not ranks.is_broken(error)):
            self.wait()

    def _write_in_thread(
        self, state: TrainState, keep: int, is_best: bool, device: int | None
    ) -> None:
        try:
            if device is not None:  # a new thread's current device is the first
                torch.cuda.set_device(device)
            with ranks.working("save", breaks=False):
                self._write(state, keep, is_best)
        except BaseException as error:
            self._error = error

    def _write(self, state: TrainState, keep: int, is_best: bool) -> None:
        """Writes a checkpoint. A refused one is only a warning: the run and older checkpoints are
        intact."""
        try:
            save_checkpoint(self._run_dir, state, keep=keep, is_best=is_best)
        except CheckpointNotSaved as error:
            self.refused = True
            if ranks.rank() == 0:
                logger.warning("%s", error)
        else:
            self.step, self.refused = state.step, False


# reading ------------------------------------------------------------------------------------------


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """Returns the newest `step_N` folder, without verifying it; None if there is none."""
    steps = _steps(Path(run_dir) / "checkpoints")
    return steps[-1][1] if steps else None


def clean_leftovers(run_dir: str | Path) -> list[str]:
    """Removes the folders that a killed save left behind, and returns their names.

    A folder that was being replaced is put back. Call this once, when a run starts; no other
    process may be saving.
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
    """Verifies a checkpoint and reads everything but the tensors, which `restore_state` reads.

    Every file is compared with the manifest before it is parsed. Every rank has to call this.

    Raises:
        CheckpointError: a file is missing, damaged or not of its format; names the file.
    """
    folder = Path(path)
    _verify(folder)
    content = _read_json(folder / STATE_FILE)
    version = content.get("format_version")
    if version not in (FORMAT_VERSION, SHARDED_VERSION):
        raise CheckpointError(
            f"{folder / STATE_FILE} has format version {version}, but this release of agentrl "
            f"reads {FORMAT_VERSION} and {SHARDED_VERSION}; resume with the release that wrote it"
        )
    try:
        return TrainState(
            step=int(content["step"]),
            fingerprint=content["fingerprint"],
            data_position=content["data_position"],
            extra=content["extra"],
            rng=content["rng"],
            optimizer_groups=content["optimizer_groups"],
            folder=folder,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} is damaged: {error!r}") from error


def load_latest(run_dir: str | Path) -> TrainState:
    """Loads the newest checkpoint that is intact, and warns about each damaged one.

    Raises:
        CheckpointError: there is none, so that a run never starts from scratch unnoticed.
    """
    steps = _steps(Path(run_dir) / "checkpoints")
    if not steps:
        raise CheckpointError(
            f"no checkpoint under {Path(run_dir) / 'checkpoints'} to resume from; start without "
            "--resume or name another run folder"
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
    """Compares the fingerprint of a checkpoint with that of the current run.

    Args:
        force: log a warning instead of raising.

    Raises:
        CheckpointError: they differ; lists every differing key with both values.
    """
    # A key that was added since the checkpoint was saved had its default's effect then.
    defaults = _flatten(RunConfig.model_validate({"model": {"path": "none"}}).decisive())
    before = defaults | _flatten(exact_json(saved, "fingerprint"))
    now = defaults | _flatten(exact_json(current, "fingerprint"))
    differences = [
        f"{key}: checkpoint {before.get(key, '(absent)')}, now {now.get(key, '(absent)')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if not differences:
        return
    text = f"the checkpoint is of a different run: {'; '.join(differences)}"
    if force:
        logger.warning("%s (resumed anyway: run.resume = 'force')", text)
        return
    raise CheckpointError(
        f"{text}; restore the old values, or pass --run.resume force to continue with the new"
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
    """Restores a run from its newest intact checkpoint, and returns the loaded state.

    Every rank has to call this.

    Args:
        reference: the reference model, if its weights change during the run.
        force: continue even if the fingerprints differ, with a warning.

    Raises:
        CheckpointError: there is no intact checkpoint, the fingerprints differ, or tensors do not
            fit.
    """
    if ranks.rank() == 0:
        clean_leftovers(run_dir)
    ranks.barrier()
    state = load_latest(run_dir)
    check_fingerprint(state.fingerprint, fingerprint, force=force)
    restore_state(state, policy=policy, critic=critic, reference=reference)
    return state


def _steps(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    found = [(STEP_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def _verify(folder: Path) -> list[str]:
    """Checks all files against the manifest and returns their names. Every rank calls this."""
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
    # Each rank checks its share of the files, and all raise the same error.
    own = list(files.items())[ranks.rank() :: ranks.size()]
    problems = [each for each in ranks.gather(_damage(folder, own)) if each]
    if problems:
        raise CheckpointError(str(problems[0]))
    return list(files)


def _damage(folder: Path, entries: Iterable[tuple[str, Any]]) -> str | None:
    """Returns the first problem with these files; None if they are intact."""
    for name, entry in entries:
        path = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or not isinstance(entry, dict):
            return f"{folder / MANIFEST_FILE} has a bad entry {name!r}"
        try:
            size = path.stat().st_size
            if size != entry.get("size"):
                return f"{path} is damaged: {size} bytes instead of {entry.get('size')}"
            if _sha256(path) != entry.get("sha256"):
                return f"{path} is damaged: its sha256 differs from the manifest's"
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
        except SafetensorError as error:
            return f"{path} is not a safetensors file: {error}"
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


def _flatten(value: Mapping[str, JSON], prefix: str = "") -> dict[str, str]:
    """Returns the JSON text of each value by its dotted key. Unlike the values, the texts of 1, 1.0
    and true differ."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(item, ensure_ascii=False, sort_keys=True)
    return flat


# export -------------------------------------------------------------------------------------------


def has_shards(checkpoint: Path) -> bool:
    """Returns whether several ranks wrote a checkpoint's weights, each its part."""
    return any((checkpoint / stem).is_dir() for stem in ("model", "adapter_model"))


def export(checkpoint: Path, out: Path) -> None:
    """Writes the model, or the adapter, of a checkpoint to one folder, without what only training
    needs; shards are put together.

    `out` appears complete or not at all. The weights are the float32 masters; the dtype in
    `config.json` is the one in which the run computed.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
        ConfigError: `checkpoint` is not a checkpoint, or `out` is not empty.
    """
    require_empty(out)
    if not (checkpoint / MANIFEST_FILE).is_file():
        raise ConfigError(
            f"{checkpoint} is not a checkpoint: it has no {MANIFEST_FILE}; name "
            "RUN/checkpoints/step_N"
        )
    names = _verify(checkpoint)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if has_shards(checkpoint):
        stem = "model" if (checkpoint / "model").is_dir() else "adapter_model"
        tensors = read_tensors(
            checkpoint,
            stem,
            lambda saved: {
                name: torch.empty_like(each, device="cpu") for name, each in saved.items()
            },
        )
        # transformers reads the "format" entry of the header.
        save_file(tensors, partial / f"{stem}.safetensors", metadata={"format": "pt"})
    for name in names:
        of_training = name.endswith(".safetensors") and not name.startswith("model")
        if "/" not in name and name not in (STATE_FILE, MANIFEST_FILE) and not of_training:
            shutil.copyfile(checkpoint / name, partial / name)
    if out.exists():
        out.rmdir()
    partial.rename(out)
