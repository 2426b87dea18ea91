"""Prepares a run before its first step: directory, device, seeds and signal handlers."""

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

from agentrl import runtime
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, DataError
from agentrl.train.checkpoint import latest_checkpoint
from agentrl.view.tracking import read_metrics, read_status

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

STATES = {
    "training": "in training",
    "dead": "killed",
    "finished": "finished",
    "stopped": "stopped early",
    "failed": "failed",
}
"""What is said of a run whose `read_status` has this state."""


def run_directory(config: RunConfig) -> tuple[Path, IO[bytes], str]:
    """Creates or finds the run directory and writes `config.toml` into it.

    A new run never touches an old one: if `runs/<name>` holds a run, it takes `runs/<name>-2`, and
    so on; an explicit `run.dir` that holds one is an error. `run.resume` takes the newest of them.

    Returns:
        The directory, its lock file, which reserves it for this process until it is closed, and a
        line that says where the run writes and how an older one of this name is continued.

    Raises:
        ConfigError: the directory is in use or cannot be written, or there is no run to resume.
    """
    newest = newest_run(config)
    if config.run.resume:
        if newest is None:
            raise ConfigError(
                f"--resume: no run under {config.run.path}; start it without --resume, or name "
                "its directory with --run.dir"
            )
        run_dir, line = newest, f"continues {_progress(newest)}"
    elif newest is None:
        run_dir, line = config.run.path, f"writes to {config.run.path}"
    elif config.run.dir is not None:
        raise ConfigError(
            f"{config.run.dir} already holds a run; continue it with --resume, or choose another "
            "--run.dir"
        )
    else:
        run_dir = _numbered(config)[-1]
        line = f"writes to {run_dir}, a new run; there is {_progress(newest)}"
        if read_status(newest)["state"] != "finished":
            line += f", which --resume --run.dir {newest} continues"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _reserve(run_dir)
        runtime.write_whole(run_dir / "config.toml", config.to_toml().encode())
    except OSError as error:
        raise ConfigError(
            f"the run directory {run_dir} cannot be written ({error.strerror}); choose another "
            "with --run.dir"
        ) from error
    return run_dir, lock, line


def _reserve(run_dir: Path) -> IO[bytes]:
    """Locks the directory for this process and returns the open lock file.

    Two processes that train in one directory would write each step twice, and each would delete
    the checkpoint that the other is saving.
    """
    lock = (run_dir / LOCK_FILE).open("a+b")
    lock.seek(0)
    host, _, process = lock.read().decode(errors="replace").partition(" ")
    try:
        # POSIX locks belong to this process alone, so children of a killed run do not keep it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if host == socket.gethostname():
            lock.close()
            raise ConfigError(
                f"process {process} trains in {run_dir}; stop it first, or choose another run.name "
                "or --run.dir"
            ) from None
        # A network file system keeps the lock of a lost machine for a while.
        logger.warning("%s is locked by process %s on %s; continuing", run_dir, process, host)
    except OSError:
        logger.info("%s is on a file system without locks", run_dir)
    lock.truncate(0)
    lock.write(f"{socket.gethostname()} {os.getpid()}".encode())
    lock.flush()
    return lock


def newest_run(config: RunConfig) -> Path | None:
    """Returns the newest directory of this name that holds a run; None if there is none."""
    return next((path for path in reversed(_numbered(config)) if _holds_a_run(path)), None)


def _holds_a_run(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    return latest_checkpoint(path) is not None or (metrics.exists() and metrics.stat().st_size > 0)


def _progress(run_dir: Path) -> str:
    """Returns a run's directory, how far it came, and whether it still runs."""
    try:
        steps = [row["step"] for row in read_metrics(run_dir)]
    except DataError:  # the error of what opens the file next is the better one
        steps = []
    step, state = max(steps, default=0), read_status(run_dir)["state"]
    return f"{run_dir} (step {step}{'' if state == 'unknown' else f', {STATES[state]}'})"


def _numbered(config: RunConfig) -> list[Path]:
    first = config.run.path
    if config.run.dir is not None:
        return [first]
    paths, number = [first], 1
    while paths[-1].exists():
        number += 1
        paths.append(first.with_name(f"{first.name}-{number}"))
    return paths


def seed_everything(seed: int) -> None:
    """Seeds the random generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def interruptible() -> Iterator[asyncio.Event]:
    """Yields an event that the first SIGINT or SIGTERM sets; a second ends the process as usual."""
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
        # This runs in a thread beside a notebook's loop, or the platform has no signals.
        with runtime.stopped_by(lambda: loop.call_soon_threadsafe(requested.set)):
            yield requested
        return
    try:
        yield requested
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
