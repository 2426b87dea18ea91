"""How long a grading takes, here and by the official command line.

    python -m agentrl_swebench.bench_grade --dataset DIR/dataset.jsonl [--repeats N]

grades every reference solution `--repeats` times with each, with as many workers as cores, and
prints seconds per grading (from the harness' own logs, creating the container to removing it),
seconds of the whole call, and gradings per hour.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from agentrl.errors import AgentRLError, ConfigError
from agentrl_swebench.dataset import load_instances

_TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ", re.MULTILINE)
_TIMEOUT_S = 600


def harness_seconds(log: Path) -> float:
    """From the first to the last line of a `run_instance.log`."""
    times = _TIME.findall(log.read_text(errors="replace"))
    first, last = (datetime.strptime(times[k], "%Y-%m-%d %H:%M:%S,%f") for k in (0, -1))
    return (last - first).total_seconds()


def measure(command: Sequence[str], repeats: int) -> tuple[list[float], float]:
    """Seconds of each grading, and of all calls together."""
    each: list[float] = []
    whole = 0.0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            started = time.monotonic()
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
            whole += time.monotonic() - started
            if done.returncode:
                raise ConfigError(f"{' '.join(command[:4])} failed: {done.stderr[-300:]}")
            each += [harness_seconds(path) for path in Path(folder).rglob("run_instance.log")]
    return each, whole


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agentrl_swebench.bench_grade",
        description="Time gradings against the official command line.",
    )
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE")
    parser.add_argument("--repeats", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="(default: %(default)s)")
    given = parser.parse_args(arguments)
    dataset, workers = str(given.dataset.resolve()), str(given.workers)
    stock = [
        *(str(Path(sys.executable).with_name("swebench")), "eval", dataset, "--gold"),
        *("--run-id", "bench", "-j", workers, "-t", "300"),
    ]
    ours = [
        *(sys.executable, "-m", "agentrl_swebench", "eval", "--dataset", dataset),
        *("--predictions", "gold", "--run-id", "bench", "--max-workers", workers),
        *("--timeout", "300"),
    ]
    try:
        num_instances = len(load_instances(dataset))
        print(f"{num_instances} instances x {given.repeats}, {workers} workers")
        print(f"{'':10} {'grading, median s':>18} {'all, s':>8} {'gradings/hour':>14}")
        for name, command in (("official", stock), ("agentrl", ours)):
            each, whole = measure(command, given.repeats)
            per_hour = 3600 * len(each) / whole
            print(f"{name:10} {statistics.median(each):18.1f} {whole:8.1f} {per_hour:14.0f}")
    except AgentRLError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
