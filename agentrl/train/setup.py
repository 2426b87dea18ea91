"""Sets up what a run needs before its first step: directory, device, seeds, interruption."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch

from agentrl import event_loop
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.train.checkpoint import latest_checkpoint

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"


def run_directory(config: RunConfig) -> tuple[Path, IO[bytes]]:
    """Create or find the run directory and write `config.toml` into it; also returns what keeps it
    for this process, until it is closed.

    A new run never touches an old one: `runs/<name>` that is in use becomes `runs/<name>-2`, and
    so on; an explicit `run.dir` in use is an error. `run.resume` takes the newest of them.

    Raises:
        ConfigError: the directory is in use, or nothing is there to resume.
    """
    newest = newest_run(config)
    if config.run.resume:
        if newest is None:
            raise ConfigError(
                f"--resume: no run under {config.run.path}; start it without --resume, or name "
                "its directory with --run.dir"
            )
        run_dir = newest
    elif config.run.dir is not None and newest is not None:
        raise ConfigError(
            f"{config.run.dir} already holds a run; continue it with --resume, or choose another "
            "--run.dir"
        )
    else:
        run_dir = config.run.path if newest is None else _numbered(config)[-1]
    partial = run_dir / ".config.toml.partial"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _keep(run_dir)
        partial.write_text(config.to_toml())
        os.replace(partial, run_dir / "config.toml")
    except OSError as error:
        raise ConfigError(
            f"the run directory {run_dir} cannot be written ({error.strerror}); choose another "
            "with --run.dir"
        ) from error
    return run_dir, lock


def _keep(run_dir: Path) -> IO[bytes]:
    """Two processes that train in one directory would write each step twice, and each would remove
    what the other is just saving."""
    lock = (run_dir / LOCK_FILE).open("a+b")
    lock.seek(0)
    host, _, process = lock.read().decode(errors="replace").partition(" ")
    try:
        # Of this process alone: what a killed one has forked does not hold it any longer.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if host == socket.gethostname():
            lock.close()
            raise ConfigError(
                f"process {process} trains in {run_dir}; stop it first, or choose another run.name "
                "or --run.dir"
            ) from None
        # A network's file system keeps the lock of a machine that was lost for a while.
        logger.warning("%s is locked by process %s on %s; going on", run_dir, process, host)
    except OSError:
        logger.info("%s is on a file system without locks", run_dir)
    lock.truncate(0)
    lock.write(f"{socket.gethostname()} {os.getpid()}".encode())
    lock.flush()
    return lock


def newest_run(config: RunConfig) -> Path | None:
    """The run directory of this name that was made last, if any holds a run."""
    return next((path for path in reversed(_numbered(config)) if _holds_a_run(path)), None)


def _holds_a_run(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    return latest_checkpoint(path) is not None or (metrics.exists() and metrics.stat().st_size > 0)


def _numbered(config: RunConfig) -> list[Path]:
    """The directories that exist for this name, in order, and the next free one."""
    first = config.run.path
    if config.run.dir is not None:
        return [first]
    paths, number = [first], 1
    while paths[-1].exists():
        number += 1
        paths.append(first.with_name(f"{first.name}-{number}"))
    return paths


def resolve_device(device: str) -> torch.device:
    """Returns the torch device; `auto` is the GPU where there is one.

    Raises:
        ConfigError: a GPU was asked for and torch sees none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "model.device = 'cuda', but torch sees no GPU; install a CUDA build of torch, or set "
            "model.device = 'cpu'"
        )
    return torch.device(device)


def resolve_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def interruptible() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second ends the process as usual."""
    requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def first() -> None:
        requested.set()
        for number in signals:
            loop.remove_signal_handler(number)

    try:
        for number in signals:
            loop.add_signal_handler(number, first)
    except (RuntimeError, ValueError, NotImplementedError):
        # In a thread beside a notebook's loop, or on a platform without signals.
        with event_loop.stopped_by(lambda: loop.call_soon_threadsafe(requested.set)):
            yield requested
        return
    try:
        yield requested
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
