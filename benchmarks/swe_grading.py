"""Times gradings by the official command line and by agentrl, without and with withheld runs.

    python benchmarks/swe_grading.py --dataset DIR/dataset.jsonl [--workers 1 4 8] [--rounds 2]

Grades every reference solution `--copies` times per call, each copy under its own id, since the
official command grades an instance only once. Whatever runs later finds more of the images' files
in the page cache, so every other round runs the arms in reverse order. An untimed call of the
first arm comes before all rounds, so that no arm is the first to start a container.

Each line is an arm with medians over the rounds: seconds per grading (of the official command, from
its logs: creating the container to removing it), seconds of the whole call, gradings per hour, the
ratio to the official command in the same round, and CPU seconds per grading. The gradings per hour
of every round stand at the end of the line. CPU seconds include the command, the engine and all
containers, and vary less with other work on the machine than the times do. A grading with its
withheld run counts once. The two runs of a reference solution are made once per instance and
process: for every copy in the arm `withheld`. In the arm `in training`, one process grades each
instance `--copies` times, as it does a group of rollouts, and leaves out official runs that are not
needed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from agentrl.errors import AgentRLError, ConfigError
from agentrl_swebench.dataset import load_instances
from agentrl_swebench.grade import Verdict, grade

_TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ", re.MULTILINE)
_TIMEOUT_S = 3600


def harness_seconds(log: Path) -> float | None:
    """Returns the seconds from the first to the last line of a `run_instance.log`; None if its
    lines have no times, as agentrl's have none."""
    times = _TIME.findall(log.read_text(errors="replace"))
    if not times:
        return None
    first, last = (datetime.strptime(times[k], "%Y-%m-%d %H:%M:%S,%f") for k in (0, -1))
    return (last - first).total_seconds()


class Processor:
    """Counts the CPU seconds of a command, the engine and all containers while the command runs.

    The command's own processes are counted by a control group. The engine's helpers, one per
    container, are in no group: they are polled ten times a second, so the last moments of each are
    missed. A helper waits for its container's processes, so their time is counted twice, by the
    helper and by the containers' control group; the larger of the two figures is taken.
    """

    def __init__(self) -> None:
        first = Path("/sys/fs/cgroup/cpuacct")
        self._root = first if first.is_dir() else Path("/sys/fs/cgroup")
        self._own = self._root / f"agentrl-bench-{os.getpid()}"
        self._helpers: dict[str, float] = {}
        self._others: set[str] = set()
        self._over = threading.Event()

    def join(self) -> None:
        """Counts the calling process and all that it will start."""
        with contextlib.suppress(OSError):
            (self._own / "cgroup.procs").write_text("0")

    def __enter__(self) -> Processor:
        with contextlib.suppress(OSError):
            self._own.mkdir()
        self._look()
        self._before = self._seconds()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        rest, containers, helpers = map(float.__sub__, self._seconds(), self._before)
        self.used = rest + max(containers, helpers)
        with contextlib.suppress(OSError):
            self._own.rmdir()

    def _follow(self) -> None:
        while not self._over.wait(0.1):
            self._look()

    def _look(self) -> None:
        for number in {each for each in os.listdir("/proc") if each.isdigit()} - self._others:
            name, seconds = _of_process(number)
            if name.startswith("containerd-shim"):
                self._helpers[number] = seconds
            elif name != "containerd":  # such a process may be about to become a helper
                self._others.add(number)

    def _seconds(self) -> tuple[float, float, float]:
        """Returns the CPU seconds so far of the command and the engine, of the containers and of
        the helpers; nan where the engine or the control groups cannot be seen."""
        engine = [
            seconds
            for name, seconds in map(_of_process, filter(str.isdigit, os.listdir("/proc")))
            if name in ("dockerd", "containerd")  # with the children that they waited for
        ]
        if not engine:
            return math.nan, math.nan, math.nan
        own, containers = map(self._of_group, (self._own, self._root / "docker"))
        return own + sum(engine), containers, sum(self._helpers.values())

    def _of_group(self, group: Path) -> float:
        try:
            if self._root.name == "cpuacct":
                return int((group / "cpuacct.usage").read_text()) / 1e9
            return int((group / "cpu.stat").read_text().split()[1]) / 1e6
        except OSError:
            return math.nan


def _of_process(number: str) -> tuple[str, float]:
    """Returns a process's name and the CPU seconds of it and of the children it waited for."""
    try:
        text = Path("/proc", number, "stat").read_text()
    except OSError:
        return "", 0.0  # it ended
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, sum(map(int, rest.split()[11:15])) / os.sysconf("SC_CLK_TCK")


Measured = tuple[list[float], float, float]
"""Seconds of each grading, seconds of the call, CPU seconds of the call."""


def measure(command: Sequence[str]) -> Measured:
    """Runs a command in an empty folder; returns the seconds of each grading, the seconds of the
    call and its CPU seconds.

    Raises:
        ConfigError: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder, Processor() as processor:
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            preexec_fn=processor.join,
        )
        whole = time.monotonic() - started
        if done.returncode:
            raise ConfigError(f"{' '.join(command[:4])} failed: {done.stderr[-300:]}")
        logs = map(harness_seconds, Path(folder).rglob("run_instance.log"))
        each = [seconds for seconds in logs if seconds is not None]
    return each, whole, processor.used


def copied(dataset: Path, copies: int, out: Path) -> int:
    """Writes every row `copies` times, each under its own id; returns the number of rows."""
    rows = [instance.row() for instance in load_instances(str(dataset))]
    lines = [
        json.dumps(row | {"instance_id": f"{row['instance_id']}{number}"}) + "\n"
        for number in range(copies)
        for row in rows
    ]
    out.write_text("".join(lines))
    return len(lines)


def _commands(
    dataset: str, workers: str, original: str = "", copies: str = ""
) -> dict[str, list[str]]:
    official = [
        *(str(Path(sys.executable).with_name("swebench")), "eval", dataset, "--gold"),
        *("--run-id", "bench", "-j", workers, "-t", "300"),
    ]
    ours = [
        *(sys.executable, "-m", "agentrl", "swebench", "eval", "--dataset", dataset),
        *("--predictions", "gold", "--run-id", "bench", "--max-workers", workers),
        *("--timeout", "300"),
    ]
    grade_all = "import sys, swe_grading; swe_grading.grade_as_in_training(*sys.argv[1:])"
    training = [sys.executable, "-c", grade_all, original, workers, copies]
    return {
        "official": official,
        "agentrl": ours,
        "withheld": [*ours, "--withhold"],
        "in training": training,
    }


def grade_as_in_training(dataset: str, workers: str, copies: str) -> None:
    """Grades every reference solution `copies` times in this process, with withheld runs.

    Raises:
        SystemExit: one was not rewarded.
    """

    async def grade_all() -> list[Verdict]:
        options = {"policy": "official", "run_id": "bench", "timeout_s": 300, "withhold": True}
        options |= {"official_run": "uncovered", "pay_uncovered": True}
        calls = (
            grade(each, each.patch, workers=int(workers), **options)
            for _ in range(int(copies))
            for each in load_instances(dataset)
        )
        return await asyncio.gather(*calls)

    if any(verdict.reward != 1.0 for verdict in asyncio.run(grade_all())):
        raise SystemExit("a reference solution was not rewarded")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/swe_grading.py",
        description="Time gradings against the official command line.",
    )
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--copies", type=int, default=4, help="gradings per instance and call (default: 4)"
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 4, 8], metavar="N", help="(default: 1 4 8)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        metavar="N",
        help="calls per arm; every other round runs the arms in reverse order (default: 2)",
    )
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds} must be positive")
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            dataset = Path(folder, "dataset.jsonl")
            number = copied(given.dataset, given.copies, dataset)
            measure(_commands(str(given.dataset), "4")["official"])
            print(f"{number} gradings per call, {given.rounds} rounds", flush=True)
            print(f"{'workers':>7} {'arm':14} grading, s  call, s  per hour  ratio  CPU s  rounds")
            for workers in given.workers:
                commands = _commands(
                    str(dataset), str(workers), str(given.dataset.resolve()), str(given.copies)
                )
                rounds = [
                    {
                        arm: measure(commands[arm])
                        for arm in (reversed(commands) if k % 2 else commands)
                    }
                    for k in range(given.rounds)
                ]
                for arm in commands:
                    print(f"{workers:7} {_line(arm, rounds, number)}", flush=True)
    except AgentRLError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _line(arm: str, rounds: Sequence[dict[str, Measured]], number: int) -> str:
    """Returns an arm's columns: medians over the rounds, then the hourly rate of each round."""
    median = statistics.median
    each, calls, processor = zip(*(measured[arm] for measured in rounds), strict=True)
    hourly = [3600 * number / call for call in calls]
    seconds = median(median(times) if times else math.nan for times in each)
    ratios = [measured["official"][1] / measured[arm][1] for measured in rounds]
    return (
        f"{arm:14} {seconds:10.1f} {median(calls):8.1f} {median(hourly):9.0f} "
        f"{median(ratios):6.2f} {median(processor) / number:6.2f}  "
        + " ".join(f"{figure:.0f}" for figure in hourly)
    )


if __name__ == "__main__":
    sys.exit(main())
