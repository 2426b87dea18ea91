"""Every preset trains: the quickstart for 20 steps, three seeds each, and a table of the rewards.

    python benchmarks/presets.py [--presets grpo,ppo] [--seeds 3] [--steps 20]

Fails when a metric is not finite, an update was skipped, or a preset's reward over the last five
steps is lower than over the first five. Twenty steps of a 0.6-million-parameter model say that a
preset works, not which one is better. One core, a quarter of an hour for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from agentrl.algo import PRESETS
from agentrl.config import load_config
from agentrl.train.loop import train
from agentrl.view.tracking import NUM_NON_FINITE, read_metrics

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart" / "run.toml"
TEACHER_STEPS = 60
SETTINGS = {
    "ppo": {"critic.learning_rate": "1e-3"},
    # Lambda is 1 - 1 / (alpha n): VAPO's 0.05 is made for thousands of tokens and gives lambda 0 to
    # the quickstart's, which have ten to thirty.
    "vapo": {"critic.learning_rate": "1e-3", "objective.credit.length_alpha": "1.0"},
    "dapo": {"rollout.keep": "zero_variance", "rollout.max_waves": "4"},
}
"""What a preset needs besides its name; everything else is the quickstart's."""


def run(directory: Path, preset: str, seed: int, num_steps: int, settings: dict[str, str]) -> Path:
    overrides = [
        *("--objective.preset", preset, "--run.seed", str(seed), "--run.dir", str(directory)),
        *("--run.num_steps", str(num_steps), "--run.save_every", str(num_steps)),
        *("--track.log_trajectories", "false"),
        *(part for key, value in settings.items() for part in (f"--{key}", value)),
    ]
    with contextlib.redirect_stdout(sys.stderr):
        return train(load_config(QUICKSTART, overrides), quiet=True)


def problems(metrics: list[dict]) -> list[str]:
    found = []
    for row in metrics:
        if row.get(NUM_NON_FINITE):
            found.append(f"step {row['step']}: {row[NUM_NON_FINITE]} metrics are not finite")
        if row.get("train/skipped_updates_in_all") or row.get("critic/skipped_updates_in_all"):
            found.append(f"step {row['step']}: an update was skipped")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    head = [
        f"Reward, mean ± standard deviation over {args.seeds} seeds (divided by n); "
        f"{args.steps} steps of 8 groups of 8.",
        "",
        "| preset | first 3 steps | last 3 steps | last 5 − first 5 | besides the preset |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(head), flush=True)
    failures, started = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for preset in args.presets.split(","):
            settings = dict(SETTINGS.get(preset, {}))
            shown = [f"`{key} = {value}`" for key, value in settings.items()]
            if "teacher_logprobs" in PRESETS[preset].needs():
                teacher = root / "teacher"
                if not teacher.exists():
                    run(teacher, "grpo", 100, TEACHER_STEPS, {})
                checkpoint = teacher / "checkpoints" / f"step_{TEACHER_STEPS:06d}"
                settings["teacher.path"] = str(checkpoint)
                shown.append(f"teacher: `grpo` after {TEACHER_STEPS} steps")
            rewards, explained = [], []
            for seed in range(1, args.seeds + 1):
                name = f"{preset}-{seed}"
                metrics = read_metrics(run(root / name, preset, seed, args.steps, settings))
                failures += [f"{name}, {problem}" for problem in problems(metrics)]
                rewards.append([row["reward/mean"] for row in metrics])
                values = [row.get("critic/explained_variance") for row in metrics[-5:]]
                explained += [value for value in values if value is not None]
            if explained:
                shown.append(f"explained variance of the critic {np.mean(explained):.2f}")
            table = np.asarray(rewards)  # (seeds, steps)
            rise = table[:, -5:].mean(1) - table[:, :5].mean(1)
            if rise.mean() < 0:
                failures.append(f"{preset}: the reward fell by {-rise.mean():.3f}")
            cells = [
                f"{part.mean():.2f} ± {part.std():.2f}"
                for part in (table[:, :3].mean(1), table[:, -3:].mean(1), rise)
            ]
            print(f"| `{preset}` | {' | '.join(cells)} | {', '.join(shown)} |", flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s")
    for failure in failures:
        print(f"FAILED {failure}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
