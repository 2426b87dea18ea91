"""Traces of single steps, for Perfetto: where the time of a step goes, on the host and the GPU.

    traces/step_000003.json.gz          rank 0: rollout, update, push
    traces/step_000003-rank1.json.gz    another rank: its updates

`agentrl train --profile 3` asks for them. Rollouts that are played ahead show as what they are at
that moment: `rollout` is then the time that the trainer waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from agentrl.train import ranks

span = record_function
"""`with span("update"):` names what is done in it, in a trace that is being written."""


class Profiler:
    """Traces the steps that it was made for, and does nothing in others."""

    def __init__(self, run_dir: Path, steps: Sequence[int]) -> None:
        self._folder = run_dir / "traces"
        self._steps = steps
        self._tracing: tuple[profile, Path] | None = None

    def unreached(self, last_step: int, num_steps: int) -> list[int]:
        """Returns the steps of which a run that goes on after `last_step` writes no trace."""
        return [step for step in self._steps if not last_step < step <= num_steps]

    def start(self, step: int) -> None:
        """Begin a step's trace, where one is wanted."""
        if step not in self._steps:
            return
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        tracing = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            # Updates and the embedded engine work in threads of their own.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        rank = f"-rank{ranks.rank()}" if ranks.rank() else ""
        tracing.start()
        self._tracing = tracing, self._folder / f"step_{step:06}{rank}.json.gz"

    def stop(self) -> Path | None:
        """End a trace that is under way and write it; returns its file."""
        if self._tracing is None:
            return None
        (tracing, file), self._tracing = self._tracing, None
        self._folder.mkdir(exist_ok=True)
        with ranks.silent():  # torch keeps the lock for seconds per 100,000 operations
            tracing.stop()
            tracing.export_chrome_trace(str(file))
        return file
