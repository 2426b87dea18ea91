"""Step time with rollouts and training in turn, against both at once, on a real vLLM server.

    AGENTRL_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/async_overlap.py [--steps 24]

Whole training runs of the quickstart's model: a real server, real weight updates, real optimizer
steps. As on a cluster server and trainer have hardware of their own: the server's processes are
pinned to the last core of the machine, trainer and driver to the first, one thread each, in all
runs alike. Episodes are heavy-tailed: every environment step takes a simulated, log-normal time,
during which no CPU is used, as a tool on another machine would. The delay is chosen so that in the
synchronous run a step's rollouts take as long as its training, which is lengthened by more passes
over the same batch. R and T are the synchronous run's mean seconds of rollout and training per
step, and max(R, T) is what no schedule can beat in the long run with as many episodes in flight.
`server busy` is the CPU time of all the server's processes per second.

Every trained token's staleness is read back from the run's trajectories and compared with the
bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from agentrl.config import load_config
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.program import ServerSettings
from agentrl.inference.weights.plugin import write_plugin
from agentrl.rollout import read_trajectories
from agentrl.train.loop import train
from agentrl.types import Action, StepResult
from agentrl.view.tracking import read_metrics
from agentrl_math.env import MathConfig, MathEnvironment

ROOT = Path(__file__).parents[1]
RUN = ROOT / "examples" / "vllm_cpu" / "run.toml"
SIGMA = 1.0
"""Of the log-normal delay: one in 40 takes more than 7 times the median."""
WARM_UP = 4
"""Steps left out: until the stream has filled up."""


class SlowMathConfig(MathConfig):
    median_delay_s: float = 0.5


class SlowMath(MathEnvironment):
    """The quickstart's tasks with a slow environment."""

    Config = SlowMathConfig

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self.config.median_delay_s * math.exp(random.gauss(0.0, SIGMA)))
        return await super().step(action)


def run(folder: Path, url: str, args: argparse.Namespace, delay_s: float, staleness: int) -> Path:
    overrides = [
        *("--run.dir", str(folder), "--run.num_steps", str(args.steps), "--run.save_every", "1000"),
        *("--inference.urls", url, "--rollout.max_staleness", str(staleness)),
        *("--env.id", f"{Path(__file__).resolve()}:SlowMath"),
        *("--env.config.median_delay_s", str(delay_s), "--train.num_epochs", str(args.epochs)),
        # The policy stays what it is, so that all runs play the same kind of episodes.
        *("--train.learning_rate", "1e-7"),
    ]
    random.seed(1)
    with contextlib.redirect_stdout(io.StringIO()):
        return train(load_config(RUN, overrides), quiet=True)


def pin_this_process(cores: set[int]) -> None:
    """All threads it has, and with them all it will have; child processes inherit it too."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def cpu_seconds_of_children() -> float:
    """CPU time of every process below this one: the server, its engine and its worker."""
    times: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                times[int(entry.name)] = int(fields[1]), ticks / os.sysconf("SC_CLK_TCK")

    def is_below(pid: int) -> bool:
        parent = times[pid][0]
        return parent == os.getpid() or (parent in times and is_below(parent))

    return sum(seconds for pid, (_, seconds) in times.items() if is_below(pid))


def means(folder: Path) -> tuple[float, float, float]:
    """Mean seconds of a step, of its rollouts (or the wait for them) and of its training."""
    rows = read_metrics(folder)[WARM_UP:]
    step, rollout, training = (
        statistics.fmean(row[f"time/{name}_s"] for row in rows)
        for name in ("step", "rollout", "train")
    )
    return step, rollout, training


def staleness_of_tokens(folder: Path) -> Counter[int]:
    counts: Counter[int] = Counter()
    for step, trajectory in read_trajectories(folder):
        for row in trajectory.branches:
            versions = np.asarray(row.policy_versions)
            counts.update((step - 1 - versions[versions >= 0]).tolist())
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=16, help="passes per step, to lengthen it")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    python = os.environ.get("AGENTRL_VLLM_PYTHON")
    if python is None:
        sys.exit("set AGENTRL_VLLM_PYTHON to the interpreter of an environment with vLLM")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(_with_server(python, folder, args))


async def _with_server(python: str, folder: Path, args: argparse.Namespace) -> None:
    settings = ServerSettings(
        python=python,
        model=str(ROOT / "examples" / "quickstart" / "model"),
        dtype="float32",
        max_model_len=256,
        log_dir=folder,
        plugin_dir=write_plugin(folder / "plugin"),
        # Which core it runs on is the operating system's to say, see `pin_this_process`.
        env={"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "0"},
    )
    launcher = ServerLauncher(settings)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("this needs two cores: one for the server, one for the trainer")
    torch.set_num_threads(1)
    pin_this_process({cores[-1]})  # which the server inherits
    await launcher.start()
    pin_this_process({cores[0]})
    try:
        # A run has its own event loop.
        await asyncio.to_thread(_compare, folder, launcher.urls[0], args)
    finally:
        await launcher.aclose()


def _compare(folder: Path, url: str, args: argparse.Namespace) -> None:
    delay_s = 0.5
    _, rollout, training = means(run(folder / "calibration", url, args, delay_s, 0))
    delay_s *= training / rollout
    print(f"{args.steps} steps of 64 episodes, median delay of an environment step {delay_s:.2f} s")
    print(
        "  staleness   step s   wait s   train s   to max(R,T)   to sync   server busy   oldest   "
        "histogram"
    )
    bound = sync_step = 0.0
    for staleness in [0, *args.staleness]:
        began, used = time.monotonic(), cpu_seconds_of_children()
        made = run(folder / f"staleness-{staleness}", url, args, delay_s, staleness)
        busy = (cpu_seconds_of_children() - used) / (time.monotonic() - began)
        step, wait, training = means(made)
        if staleness == 0:
            bound, sync_step = max(wait, training), step
        counts = staleness_of_tokens(made)
        assert max(counts) <= staleness, counts
        total = sum(counts.values())
        shares = " ".join(f"{lag}:{count / total:.0%}" for lag, count in sorted(counts.items()))
        print(
            f"{staleness:11d} {step:8.2f} {wait:8.2f} {training:9.2f} {step / bound:13.2f} "
            f"{sync_step / step:8.2f}x {busy:12.0%} {max(counts):8d}   {shares}",
            flush=True,
        )


if __name__ == "__main__":
    main()
