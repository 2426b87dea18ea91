"""Measures what it costs a run to keep every token's signals, in CPU time of the whole process.

    python benchmarks/signals.py [PAIRS]

The quickstart with `track.signals` 1 and 0, in turn; the promise is that the trainer loses at most
1 %. A seed fixes what each step computes, so the same step of all runs is the same work: the least
CPU time seen of each step, over the pairs, is what is compared, and a busy machine's noise of ten
per cent a run falls out. CPU time counts the thread that writes the signals, too.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

from agentrl.config import load_config
from agentrl.rollout.signals import SignalLog
from agentrl.train.loop import train
from agentrl.train.signals import StepSignals

RUN = Path(__file__).parents[1] / "examples" / "quickstart" / "run.toml"
STEPS = 10


def timed(share: float, folder: Path) -> list[float]:
    """CPU seconds of each step of a run."""
    keys = [
        "--run.num_steps",
        str(STEPS),
        "--run.save_every",
        "1000",
        "--track.signals",
        f"{share}",
    ]
    config = load_config(RUN, [*keys, "--run.dir", str(folder)])
    ends: list[float] = []
    train(config, quiet=True, callbacks=[lambda _: ends.append(time.process_time())])
    # The first step starts what lasts for the whole run.
    return [end - start for start, end in itertools.pairwise(ends)]


def measured(cls: type, name: str, spent: list[float]) -> None:
    """Add up the CPU seconds of a method, in whichever thread it is called."""
    method = getattr(cls, name)

    def wrapper(*args: object, **kwargs: object) -> object:
        started = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - started)

    setattr(cls, name, wrapper)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    trainers: list[float] = []
    writers: list[float] = []
    for cls, name in ((StepSignals, "take"), (StepSignals, "rows"), (SignalLog, "write")):
        measured(cls, name, trainers)
    measured(SignalLog, "_write", writers)
    least = {share: [math.inf] * (STEPS - 1) for share in (0, 1)}
    ratios, shares = [], []
    with tempfile.TemporaryDirectory() as folder:
        timed(0, Path(folder) / "warm-up")
        for pair in range(pairs):
            seconds = {}
            for share in (pair % 2, 1 - pair % 2):  # each of them first in turn
                trainers.clear()
                writers.clear()
                started = time.process_time()
                seconds[share] = timed(share, Path(folder) / f"{pair}-{share}")
                whole = time.process_time() - started
                pairs_of_steps = zip(least[share], seconds[share], strict=True)
                least[share] = [min(each) for each in pairs_of_steps]
                if share:
                    shares.append((sum(trainers) / whole, sum(writers) / whole))
            ratios.append(sum(seconds[1]) / sum(seconds[0]))
    print(f"CPU time with signals / without: {sum(least[1]) / sum(least[0]):.4f} of the least of")
    print(f"each step; by pair median {statistics.median(ratios):.4f}", end="")
    print(f" ({min(ratios):.4f} to {max(ratios):.4f}, {pairs} pairs of {STEPS} steps)")
    of_trainer, of_writer = (statistics.median(each) for each in zip(*shares, strict=True))
    print(f"of the run's CPU time the trainer's thread spends {of_trainer:.3%} on them", end="")
    print(f" and the thread that writes them {of_writer:.3%}")


if __name__ == "__main__":
    main()
