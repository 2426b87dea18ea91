"""One run of agentrl for `learning.py`: `agentrl train`, with the CPU seconds of every step.

python learning_run.py RUN.toml --out FILE [--section.key value ...]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from pathlib import Path

from agentrl.config import load_config
from agentrl.train.loop import train
from agentrl.view.tracking import MetricsWriter, read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args, overrides = parser.parse_known_args()
    cpu_s, write = [], MetricsWriter.write

    def stamped(self, step, metrics):
        write(self, step, metrics)
        cpu_s.append(sum(os.times()[:4]))  # of the process and what it started and ended

    MetricsWriter.write = stamped
    run_dir = train(load_config(args.run_file, overrides), quiet=True)
    metrics = read_metrics(run_dir)
    result = {"reward": [line["reward/mean"] for line in metrics], "cpu_s": cpu_s}
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    for key in ("env/solved", "eval/avg@1", "rollout/staleness_mean", "critic/explained_variance"):
        if any(key in line for line in metrics):
            result[key] = [line.get(key) for line in metrics]
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
