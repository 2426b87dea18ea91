"""Writes a run's checkpoints, one at a time: before training goes on, or while it does.

With `run.async_save` the caller captures a state whose tensors are copies, and a thread writes,
hashes, forces to disk and renames it. What is on disk is the same. Every rank has such a thread;
they speak to each other in a process group of their own (`ranks.saving_group`).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

from agentrl.train import checkpoint, ranks
from agentrl.train.state import TrainState

logger = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints. Used as a context manager, it waits at the end for the one under way,
    unless that can never finish."""

    def __init__(self, run_dir: Path, *, in_background: bool) -> None:
        self.in_background = in_background
        self.step = 0
        """The newest step whose checkpoint is in place."""
        self.refused = False
        """The disk refused the last one."""
        self._run_dir = run_dir
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: TrainState, *, keep: int, is_best: bool = False) -> None:
        """Write a state; the one before is written (`wait`).

        Args:
            state: in the background, one whose tensors are copies.
            is_best: see `checkpoint.save_checkpoint`.
        """
        assert self._thread is None
        if not self.in_background:
            with ranks.working("save"):
                self._write(state, keep, is_best)
            return
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # A daemon: it may never end where a connection to another rank broke; the process has to.
        self._thread = threading.Thread(
            target=self._write_apart,
            args=(state, keep, is_best, device),
            name="agentrl-save",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is under way; then `step` and `refused` are final.

        Raises:
            BaseException: whatever ended the thread; a disk that refused does not.
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
        # An interruption that is not to be delayed, or ranks of which some are gone.
        if error is None or (isinstance(error, Exception) and not ranks.is_broken(error)):
            self.wait()

    def _write_apart(self, state: TrainState, keep: int, is_best: bool, device: int | None) -> None:
        try:
            if device is not None:  # every thread begins with the first
                torch.cuda.set_device(device)
            with ranks.working("save", breaks=False):
                self._write(state, keep, is_best)
        except BaseException as error:
            self._error = error

    def _write(self, state: TrainState, keep: int, is_best: bool) -> None:
        """Write a checkpoint. A full disk is a warning, not an error: the run itself is still good,
        and so are older checkpoints."""
        try:
            checkpoint.save_checkpoint(self._run_dir, state, keep=keep, is_best=is_best)
        except checkpoint.CheckpointNotSaved as error:
            self.refused = True
            if ranks.rank() == 0:
                logger.warning("%s", error)
        else:
            self.step, self.refused = state.step, False
