"""The ranks of a run as workers of Ray Train:

    python ray_train.py RUN.toml NUM_WORKERS [--section.key value ...]

Ray makes the process group, and the library finds it made. Nothing in agentrl imports Ray. The
folder that this is started in lies where all workers see it. `pip install "ray[train]"`.
"""

import os
import sys

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def work(settings: dict) -> None:
    from agentrl.config import load_config
    from agentrl.train.loop import train

    os.chdir(settings["folder"])  # Ray starts its workers somewhere else
    train(load_config(settings["run_file"], settings["overrides"]), quiet=True)


if __name__ == "__main__":
    run_file, num_workers, *overrides = sys.argv[1:]
    TorchTrainer(
        work,
        train_loop_config={"run_file": run_file, "overrides": overrides, "folder": os.getcwd()},
        scaling_config=ScalingConfig(
            num_workers=int(num_workers), use_gpu=torch.cuda.is_available()
        ),
        # A second attempt would begin a run of its own: start again with --run.resume true.
        run_config=RunConfig(failure_config=FailureConfig(max_failures=0)),
    ).fit()
