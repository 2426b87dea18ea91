"""What a mixture of environments learns, and what choosing tasks by difficulty is worth.

    python benchmarks/learning_mixtures.py mixed|difficulty [--seeds 1,2,3] [--out FOLDER]

`mixed`: three environments in one run, beside a run of each alone that plays the same tasks of it
in the same steps. `difficulty`: samplers on arithmetic with numbers of 1 to 6 digits. Every run is
a process with one thread, which trains the quickstart's model for 60 steps and evaluates it on
held-out tasks. A run that `--out` holds is not repeated. At the end the table of docs/mixtures.md
is printed, with 95% intervals of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from learning_rows import ROOT, settings

from agentrl.statistics import mean_estimate
from agentrl.tracking import read_metrics

NUM_STEPS = 60
GOAL = 0.8
WINDOW = 5
"""A reward is the mean of so many steps."""
ENVIRONMENTS = ("products", "sums", "digits")
GROUPS = 3
"""Of each environment in a step."""
MIXTURE = ROOT / "examples" / "mixture" / "run.toml"
QUICKSTART = ROOT / "examples" / "quickstart" / "run.toml"
COMMON = f"run.num_steps={NUM_STEPS} run.save_every={NUM_STEPS} eval.num_tasks=200"
POOL = (
    f"{COMMON} run.eval_every=10 env.config.seed={{seed}} env.config.num_tasks=256 "
    "env.config.min_digits=1 env.config.digits=6"
)

MIXED = {
    name: f"{COMMON} run.eval_every={NUM_STEPS} rollout.groups_per_step={GROUPS * len(played)} "
    + " ".join(
        f"env.{each}.weight={int(each in played)} env.{each}.config.seed={{seed}}"
        for each in ENVIRONMENTS
    )
    for name, played in {"mixed": ENVIRONMENTS, **{n: (n,) for n in ENVIRONMENTS}}.items()
}
DIFFICULTY = {
    "uniform": f"{POOL} rollout.sampler=uniform",
    "difficulty": f"{POOL} rollout.sampler=difficulty",
}


def metrics_of(name: str, run_file: Path, keys: str, seed: int, out: Path) -> list[dict]:
    """The lines of a run's metrics; it is trained where its folder does not hold them all."""
    run_dir = out / f"{name}-{seed}"
    if run_dir.exists() and len(done := read_metrics(run_dir)) == NUM_STEPS:
        return done
    command = [sys.executable, "-m", "agentrl", "train", str(run_file)]
    command += settings(f"{keys.format(seed=seed)} run.dir={run_dir} run.seed={seed}")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return read_metrics(run_dir)


def interval(values: Sequence[float]) -> str:
    """The mean over the seeds, with its 95% interval."""
    return str(mean_estimate(np.asarray(values, float)))


def mixed(seeds: Sequence[int], out: Path) -> list[list[str]]:
    """One line for each environment: the reward at the end and on held-out tasks, both ways."""
    runs = {
        name: [metrics_of(name, MIXTURE, keys, seed, out) for seed in seeds]
        for name, keys in MIXED.items()
    }
    rows = [["environment", "held out: mixed", "alone", "difference", "trained: mixed", "alone"]]
    for name in ENVIRONMENTS:
        held_out = {
            run: [lines[-1][f"eval/{name}/avg@1"] for lines in runs[run]] for run in ("mixed", name)
        }
        last = {
            run: [
                statistics.fmean(line[f"env/{name}/reward/mean"] for line in lines[-WINDOW:])
                for lines in runs[run]
            ]
            for run in ("mixed", name)
        }
        differences = [m - a for m, a in zip(held_out["mixed"], held_out[name], strict=True)]
        columns = (held_out["mixed"], held_out[name], differences, last["mixed"], last[name])
        rows.append([f"`{name}`", *map(interval, columns)])
    return rows


def difficulty(seeds: Sequence[int], out: Path) -> list[list[str]]:
    """One line for each sampler."""
    rows = [["sampler", *(f"held out, step {step}" for step in (20, 40, 60)),
             f"samples to {GOAL} on them", "groups of equal rewards"]]  # fmt: skip
    for name, keys in DIFFICULTY.items():
        runs = [metrics_of(name, QUICKSTART, keys, seed, out) for seed in seeds]
        evaluated = [[line for line in lines if "eval/avg@1" in line] for lines in runs]
        reached = [
            next((f"{line['step'] * 64}" for line in lines if line["eval/avg@1"] >= GOAL), "never")
            for lines in evaluated
        ]
        equal = [
            statistics.fmean(line["group/zero_variance_fraction"] for line in lines[10:])
            for lines in runs
        ]
        rows.append(
            [
                f"`{name}`",
                *(interval([lines[n]["eval/avg@1"] for lines in evaluated]) for n in (1, 3, 5)),
                ", ".join(reached),
                interval(equal),
            ]
        )
    return rows


TABLES: dict[str, Callable[[Sequence[int], Path], list[list[str]]]] = {
    "mixed": mixed,
    "difficulty": difficulty,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--out", type=Path, default=Path("runs/mixtures"))
    args = parser.parse_args()
    rows = TABLES[args.table]([int(seed) for seed in args.seeds.split(",")], args.out)
    for line in [rows[0], ["---"] * len(rows[0]), *rows[1:]]:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
