"""Times a grading by the official command line and by ours, without and with control runs.

    python benchmarks/swe_grading.py --dataset DIR/dataset.jsonl [--workers 1 4 8]

grades every reference solution with each, `--copies` times in one call (under ids of their own,
since the official command grades an instance once), and prints seconds per grading (of the harness'
own logs, creating the container to removing it), seconds of the whole call, gradings per hour,
their ratio to the official command's, and processor seconds per grading: of the command, the engine
and all containers; other work on the machine, in containers aside, changes those least. A grading
with its control run counts once. What a control run needs to know of an instance is found out for
every copy; a training run does so once.
"""

from __future__ import annotations

import argparse
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

_TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ", re.MULTILINE)
_TIMEOUT_S = 3600


def harness_seconds(log: Path) -> float:
    """From the first to the last line of a `run_instance.log`."""
    times = _TIME.findall(log.read_text(errors="replace"))
    first, last = (datetime.strptime(times[k], "%Y-%m-%d %H:%M:%S,%f") for k in (0, -1))
    return (last - first).total_seconds()


class Processor:
    """Processor seconds of a command, the engine and all containers while the command runs.

    The kernel counts the command's own in a control group, whoever waits for its processes. The
    engine's helpers, one per container, belong to nobody: they are seen ten times a second, the
    last moments of each are missed. A helper waits for its container's processes, so that what they
    used is counted by it as well as by the containers' control group.
    """

    def __init__(self) -> None:
        first = Path("/sys/fs/cgroup/cpuacct")
        self._root = first if first.is_dir() else Path("/sys/fs/cgroup")
        self._own = self._root / f"agentrl-bench-{os.getpid()}"
        self._helpers: dict[str, float] = {}
        self._others: set[str] = set()
        self._over = threading.Event()

    def join(self) -> None:
        """Count the calling process, and all that it will start."""
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
    """Its name and the processor seconds of it and the children that it waited for."""
    try:
        text = Path("/proc", number, "stat").read_text()
    except OSError:
        return "", 0.0  # it ended
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, sum(map(int, rest.split()[11:15])) / os.sysconf("SC_CLK_TCK")


def measure(command: Sequence[str]) -> tuple[list[float], float, float]:
    """Seconds of each grading and of the call, and the call's processor seconds."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder, Processor() as processor:
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            preexec_fn=processor.join,
        )
        whole = time.monotonic() - started
        if done.returncode:
            raise ConfigError(f"{' '.join(command[:4])} failed: {done.stderr[-300:]}")
        each = [harness_seconds(path) for path in Path(folder).rglob("run_instance.log")]
    return each, whole, processor.used


def copied(dataset: Path, copies: int, out: Path) -> int:
    """Write every row so many times, each with an id of its own; how many there are."""
    rows = [instance.row() for instance in load_instances(str(dataset))]
    lines = [
        json.dumps(row | {"instance_id": f"{row['instance_id']}{number}"}) + "\n"
        for number in range(copies)
        for row in rows
    ]
    out.write_text("".join(lines))
    return len(lines)


def _commands(dataset: str, workers: str) -> dict[str, list[str]]:
    official = [
        *(str(Path(sys.executable).with_name("swebench")), "eval", dataset, "--gold"),
        *("--run-id", "bench", "-j", workers, "-t", "300"),
    ]
    ours = [
        *(sys.executable, "-m", "agentrl_swebench", "eval", "--dataset", dataset),
        *("--predictions", "gold", "--run-id", "bench", "--max-workers", workers),
        *("--timeout", "300"),
    ]
    return {"official": official, "agentrl": ours, "with control": [*ours, "--audit"]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/swe_grading.py",
        description="Time gradings against the official command line.",
    )
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE")
    parser.add_argument("--copies", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 4, 8], metavar="N", help="(default: 1 4 8)"
    )
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            dataset = Path(folder, "dataset.jsonl")
            number = copied(given.dataset, given.copies, dataset)
            print(f"{number} gradings per call")
            head = f"{'workers':>7} {'':14} {'grading, s':>10} {'all, s':>8} {'per hour':>9} ratio"
            print(f"{head} processor, s")
            for workers in given.workers:
                official = 0.0
                for name, command in _commands(str(dataset), str(workers)).items():
                    each, whole, processor = measure(command)
                    official = official or number / whole
                    print(
                        f"{workers:7} {name:14} {statistics.median(each):10.1f} {whole:8.1f} "
                        f"{3600 * number / whole:9.0f} {number / whole / official:5.2f} "
                        f"{processor / number:12.2f}",
                        flush=True,
                    )
    except AgentRLError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
