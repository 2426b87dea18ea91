"""Records traces of single steps for Perfetto, which show where the time goes on host and GPU.

    traces/step_000003.json.gz          rank 0: rollout, update, push
    traces/step_000003-rank1.json.gz    another rank: its updates

`agentrl train --profile 3` traces step 3. If a stream plays ahead, the span `rollout` is only the
time for which the trainer waits for episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from agentrl.model import ranks

span = record_function
"""`with span("update"):` names a section of the trace being recorded, if any."""


class Profiler:
    """Traces the given steps, and does nothing in others."""

    def __init__(self, run_dir: Path, steps: Sequence[int]) -> None:
        self._folder = run_dir / "traces"
        self._steps = steps
        self._tracing: tuple[profile, Path] | None = None

    def unreached(self, last_step: int, num_steps: int) -> list[int]:
        """Returns the steps to trace that a run from `last_step` + 1 to `num_steps` misses."""
        return [step for step in self._steps if not last_step < step <= num_steps]

    def start(self, step: int) -> None:
        """Begins to trace a step, if it is one of those to trace."""
        if step not in self._steps:
            return
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        tracing = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            # Updates and the embedded engine run in other threads than this one.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        rank = f"-rank{ranks.rank()}" if ranks.rank() else ""
        tracing.start()
        self._tracing = tracing, self._folder / f"step_{step:06}{rank}.json.gz"

    def stop(self) -> Path | None:
        """Ends the current trace and writes it; returns its file, or None if there is no trace."""
        if self._tracing is None:
            return None
        (tracing, file), self._tracing = self._tracing, None
        self._folder.mkdir(exist_ok=True)
        with ranks.silent():  # torch holds Python's lock for seconds per 100,000 operations
            tracing.stop()
            tracing.export_chrome_trace(str(file))
        return file
