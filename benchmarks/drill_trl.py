"""Plants faults of docs/drill.md in TRL 1.16's GRPOTrainer and prints what its reward does.

    PYTHON benchmarks/drill_trl.py [--faults sound,member] [--seeds 1,2,3] [--steps 40]

PYTHON belongs to an environment that has TRL. Every run trains the quickstart's model on the
quickstart's tasks, as the arm `trl` of docs/learning.md does, in a process with one thread. A fault
wraps one function of the trainer, of its reward or of the loading of its model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import learning_trl
import numpy as np
import torch
from learning_report import spread, table
from learning_rows import QUICKSTART, SAME
from trl import GRPOTrainer

from agentrl.config import load_config

WINDOW = 5
"""A reward is the mean of so many steps."""
Fault = Callable[[], AbstractContextManager[object]]


def old_weights() -> AbstractContextManager[object]:
    """Samples from the weights with which the run began."""
    generate, first = GRPOTrainer._generate_single_turn, {}

    @torch.no_grad()
    def put(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])

    def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    def stale(self: GRPOTrainer, *given: Any, **keys: Any) -> Any:
        now = copied(self.model)
        put(self.model, first.setdefault("weights", now))
        made = generate(self, *given, **keys)
        put(self.model, now)
        return made

    return patch.object(GRPOTrainer, "_generate_single_turn", stale)


def tokens_shifted() -> AbstractContextManager[object]:
    """Moves the sampled row by one token under its mask, after the reward was given."""
    generate = GRPOTrainer._generate

    def shifted(self: GRPOTrainer, prompts: list) -> Any:
        prompt_ids, completion_ids, *rest = generate(self, prompts)
        return prompt_ids, [ids[1:] + ids[:1] for ids in completion_ids], *rest

    return patch.object(GRPOTrainer, "_generate", shifted)


def wrong_member() -> AbstractContextManager[object]:
    """Gives every member of a group of eight the reward of the one before it."""
    correct = learning_trl.correct

    def dealt(completions: list, reference: list[str], **row: object) -> list[float]:
        rewards = np.reshape(correct(completions, reference, **row), (-1, 8))
        return np.roll(rewards, 1, axis=1).ravel().tolist()

    return patch.object(learning_trl, "correct", dealt)


def hidden_tools() -> AbstractContextManager[object]:
    """Takes the part of the chat template that shows tools out of it."""
    load = learning_trl.load

    def without_tools(path: str) -> tuple:
        model, tokenizer = load(path)
        shown = re.compile(r"\{% if tools %\}.*?\{% endif %\}", re.DOTALL)
        tokenizer.chat_template = shown.sub("", tokenizer.chat_template, count=1)
        return model, tokenizer

    return patch.object(learning_trl, "load", without_tools)


def untold_top_p() -> AbstractContextManager[object]:
    """Samples from the likeliest 0.6, which the trainer's probabilities know nothing of."""
    settings = learning_trl.settings

    def truncated(*given: Any, **more: Any) -> Any:
        return settings(*given, **more, top_p=0.6)

    return patch.object(learning_trl, "settings", truncated)


FAULTS: dict[str, Fault] = {
    "sound": nullcontext,
    "weights": old_weights,
    "shifted": tokens_shifted,
    "member": wrong_member,
    "tools": hidden_tools,
    "top_p": untold_top_p,
}


def rewards(fault: str, seed: int, num_steps: int) -> Sequence[float]:
    """Returns the reward of every step of one run."""
    overrides = ["--run.num_steps", str(num_steps), "--run.seed", str(seed)]
    config = load_config(QUICKSTART, [*overrides, "--env.config.seed", str(seed), *SAME])
    with tempfile.TemporaryDirectory() as scratch, FAULTS[fault]():
        return learning_trl.play(config, scratch, "bare")["reward"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for fault in args.faults.split(","):
        runs = np.asarray(
            [rewards(fault, int(seed), args.steps) for seed in args.seeds.split(",")], float
        )
        print(json.dumps({"fault": fault, "reward": runs.tolist()}), flush=True)
        ends = (runs[:, :WINDOW], runs[:, -WINDOW:])
        lines.append([fault, str(len(runs)), *(spread(end.mean(1)) for end in ends)])
    head = ["fault", "seeds", f"first {WINDOW} steps", f"last {WINDOW} of {args.steps}"]
    print(table(head, lines))


if __name__ == "__main__":
    sys.exit(main())
