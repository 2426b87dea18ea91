"""Measures learning on a mixture of environments and the gain from choosing tasks by difficulty.

    python benchmarks/learning_mixtures.py mixed|difficulty [--seeds 1,2,3] [--out FOLDER]

`mixed`: three environments in one run, beside a run of each alone that plays the same tasks of it
in the same steps. `difficulty`: samplers on arithmetic with numbers of 1 to 6 digits, 256 training
tasks. Every run is a process with one thread, which trains the example's model and evaluates it on
held-out tasks. A run that `--out` holds is not repeated. At the end a table
is printed, with 95% intervals of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from learning_report import table
from learning_rows import QUICKSTART, ROOT, settings

from agentrl.evaluate.statistics import mean_estimate
from agentrl.view.tracking import read_metrics

NUM_STEPS = {"mixed": 60, "difficulty": 40}
EVERY = 10
"""Steps between evaluations of a run with a sampler."""
ENVIRONMENTS = ("products", "sums", "search")
GROUPS = 3
"""Of each environment in a step."""
MIXTURE = ROOT / "examples" / "mixture" / "run.toml"
COMMON = "eval.num_tasks=200 run.num_steps={steps} run.save_every={steps} run.seed={seed}"
POOL = (
    f"{COMMON} run.eval_every={EVERY} env.config.seed={{seed}} env.config.num_tasks=256 "
    "env.config.min_digits=1 env.config.digits=6"
)

MIXED = {
    name: f"{COMMON} run.eval_every={{steps}} rollout.groups_per_step={GROUPS * len(played)} "
    + " ".join(
        f"env.{each}.weight={int(each in played)}"
        # Search reads its questions, which the run's own seed puts in order.
        + (f" env.{each}.config.seed={{seed}}" if each != "search" else "")
        for each in ENVIRONMENTS
    )
    for name, played in {"mixed": ENVIRONMENTS, **{n: (n,) for n in ENVIRONMENTS}}.items()
}
DIFFICULTY = {
    "uniform": f"{POOL} rollout.sampler=uniform",
    "difficulty": f"{POOL} rollout.sampler=difficulty",
}


def metrics_of(
    name: str, run_file: Path, keys: str, num_steps: int, seed: int, out: Path
) -> list[dict]:
    """The lines of a run's metrics; it is trained where its folder does not hold them all."""
    run_dir = out / f"{name}-{seed}"
    if run_dir.exists() and len(done := read_metrics(run_dir)) == num_steps:
        return done
    command = [sys.executable, "-m", "agentrl", "train", str(run_file)]
    command += settings(f"{keys.format(seed=seed, steps=num_steps)} run.dir={run_dir}")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return read_metrics(run_dir)


def interval(values: Sequence[float]) -> str:
    """The mean over the seeds, with its 95% interval."""
    return str(mean_estimate(np.asarray(values, float)))


def mixed(seeds: Sequence[int], out: Path) -> list[list[str]]:
    """One line for each environment: the reward on held-out tasks, both ways."""
    runs = {
        name: [metrics_of(name, MIXTURE, keys, NUM_STEPS["mixed"], seed, out) for seed in seeds]
        for name, keys in MIXED.items()
    }
    rows = [["environment", "held out: mixed", "alone", "difference"]]
    for name in ENVIRONMENTS:
        together, alone = (
            np.asarray([lines[-1][f"eval/{name}/avg@1"] for lines in runs[run]])
            for run in ("mixed", name)
        )
        rows.append([f"`{name}`", *map(interval, (together, alone, together - alone))])
    return rows


def difficulty(seeds: Sequence[int], out: Path) -> list[list[str]]:
    """One line for each sampler."""
    steps = range(EVERY, NUM_STEPS["difficulty"] + 1, EVERY)
    head = ["sampler", *(f"held out, step {step}" for step in steps)]
    rows = [[*head, "groups of equal rewards"]]
    for name, keys in DIFFICULTY.items():
        runs = [
            metrics_of(name, QUICKSTART, keys, NUM_STEPS["difficulty"], seed, out) for seed in seeds
        ]
        held_out = {step: [lines[step - 1]["eval/avg@1"] for lines in runs] for step in steps}
        equal = [
            statistics.fmean(line["group/zero_variance_fraction"] for line in lines[EVERY:])
            for lines in runs
        ]
        values = [interval(values) for values in held_out.values()]
        rows.append([f"`{name}`", *values, interval(equal)])
    return rows


TABLES = {"mixed": mixed, "difficulty": difficulty}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--out", type=Path, default=Path("runs/mixtures"))
    args = parser.parse_args()
    rows = TABLES[args.table]([int(seed) for seed in args.seeds.split(",")], args.out)
    print(table(rows[0], rows[1:]))


if __name__ == "__main__":
    main()
