"""One run of TRL 1.16's GRPOTrainer for `learning.py`, in an environment that has TRL.

    python learning_trl.py bare|adapter|words RUN.toml --out FILE [--section.key value ...]
    python learning_trl.py replay RUN_DIR --out FILE

`bare` plays the run file's tasks with an environment written for TRL, `adapter` with agentrl's own
through `agentrl_adapters.trl_factory`, and `words` those of examples/smollm2, which take one turn.
All take the numbers of the run file: tasks in the order of their index, learning rate, betas,
clipping, group size, tokens of a turn.

`replay` trains on the trajectories that a run of agentrl recorded, which saved a checkpoint after
every step. Before each step TRL's model gets the weights of the run's last checkpoint; after it,
what TRL's step added to them is compared with what agentrl's did. The two keep Adam's moments of
their own, so a difference of one step is not hidden from the next.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from agentrl.api import evaluate
from agentrl.config import RunConfig, load_config
from agentrl.env.registry import resolve
from agentrl.rollout import read_trajectories
from agentrl.types import Sample, samples_of
from agentrl.view.tracking import read_metrics
from agentrl_adapters.trl_factory import episode_reward, make_trl_factory, make_trl_rows
from agentrl_math.calculator import calculate, show
from agentrl_math.tasks import Arithmetic
from agentrl_rewards.math import math_reward

LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo"},
}
"""What agentrl's presets are called there."""


def settings(config: RunConfig, out: str, **more: object) -> GRPOConfig:
    """The run file's numbers, by TRL's names."""
    rollout, train = config.rollout, config.train
    rows = rollout.groups_per_step * rollout.group_size
    given = dict(
        output_dir=out,
        seed=config.run.seed,
        max_steps=config.run.num_steps * train.num_epochs,
        num_iterations=train.num_epochs,
        per_device_train_batch_size=rows,
        num_generations=rollout.group_size,
        shuffle_dataset=False,
        temperature=rollout.temperature,
        top_p=1.0,
        top_k=0,
        max_completion_length=rollout.max_turns * rollout.max_turn_tokens,
        generation_kwargs={"max_new_tokens": rollout.max_turn_tokens},
        max_tool_calling_iterations=rollout.max_turns - 1,
        beta=0.0,
        epsilon=config.objective.surrogate.low,
        epsilon_high=config.objective.surrogate.high,
        learning_rate=train.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        adam_epsilon=train.eps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOConfig(**given | LOSSES[config.objective.preset] | more)


def load(path: str) -> tuple:
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.response_template = qwen3_template  # how its tool calls are read
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer


class Calculator:
    """The math environment as one would write it for TRL."""

    def reset(self, question: str, **row: object) -> str:
        return question

    def calculator(self, expression: str) -> str:
        """Calculate an arithmetic expression exactly.

        Args:
            expression: for example (3 + 4) * 2.5 / 7
        """
        return show(calculate(expression))


def correct(completions: list, reference: list[str], **_: object) -> list[float]:
    """Reward of the last message, by the math environment's own grader."""
    return [
        math_reward(
            said[-1].get("content") or "" if said[-1].get("role") == "assistant" else "",
            expected,
            equivalence="literal",
        )
        for said, expected in zip(completions, reference, strict=True)
    ]


def last_number(completions: list, reference: list[str], **_: object) -> list[float]:
    """The reward of examples/smollm2/words.py."""
    said = (re.findall(r"-?\d+", each[-1].get("content") or "") for each in completions)
    return [
        float(bool(numbers) and numbers[-1] == expected)
        for numbers, expected in zip(said, reference, strict=True)
    ]


class Watch(TrainerCallback):
    """CPU seconds of the process and what it started, after every step."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.cpu_s.append(sum(os.times()[:4]))


def play(config: RunConfig, scratch: str, how: str) -> dict:
    count = config.run.num_steps * config.rollout.groups_per_step
    env = config.env.config
    if how == "words":
        problems = resolve(config.env.id)(env)
        tasks = (problems.get(config.env.split, index) for index in range(count))
        rows = [
            {"prompt": [{"role": "user", "content": task.prompt}], "reference": task.reference}
            for task in tasks
        ]
        offered = {"reward_funcs": last_number}
    elif how == "adapter":
        rows = make_trl_rows(config.env.split, count)
        offered = {
            "environment_factory": make_trl_factory(config.env.id, config=env),
            "reward_funcs": episode_reward,
        }
    else:
        tasks = Arithmetic(
            env["operators"], env["min_digits"], env["digits"], None, 1, env.get("seed", 0)
        )
        rows = [
            {
                "prompt": [{"role": "user", "content": ""}],
                "question": task.prompt,
                "reference": task.reference,
            }
            for task in (tasks.get(config.env.split, index) for index in range(count))
        ]
        offered = {"environment_factory": Calculator, "reward_funcs": correct}
    model, tokenizer = load(config.model.path)
    if how == "words":
        del tokenizer.response_template
    watch = Watch()
    trainer = GRPOTrainer(
        model=model,
        args=settings(config, scratch),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[watch],
        **offered,
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    rewards = [line["reward"] for line in logs]
    result = {"reward": rewards, "cpu_s": watch.cpu_s, "peak_mib": peak}
    if how == "words":  # as agentrl's own arms are evaluated
        last = held_out(config, model, tokenizer, f"{scratch}/trained")
        result["eval/avg@1"] = [None] * (len(rewards) - 1) + [last]
    return result


def held_out(config: RunConfig, model: Any, tokenizer: Any, folder: str) -> float:
    """Returns the share of `[eval]`'s tasks that the model solves; writes it to `folder`."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    trained = config.model.model_copy(update={"path": folder})
    statistics = evaluate(config.model_copy(update={"model": trained})).statistics
    assert statistics is not None, "an answer of one turn does not fail"
    return statistics.average.value


class Locked(TrainerCallback):
    """Sets the weights before a step of agentrl, compares them and the gradients after it."""

    def __init__(self, run_dir: Path, num_epochs: int) -> None:
        self.run_dir, self.num_epochs = run_dir, num_epochs
        self.updates: list[float] = []
        self.weighted: list[float] = []
        self.gradients: list[float] = []

    def _saved(self, step: int, of: str = "model") -> dict[str, torch.Tensor]:
        return load_file(self.run_dir / "checkpoints" / f"step_{step:06d}" / f"{of}.safetensors")

    @torch.no_grad()
    def on_step_begin(self, args, state, control, model, **_: object) -> None:
        if state.global_step % self.num_epochs == 0:
            self.before = self._saved(state.global_step // self.num_epochs)
            for name, parameter in model.named_parameters():
                parameter.copy_(self.before[name])

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, optimizer, **_: object) -> None:
        if state.global_step % self.num_epochs == 0:
            after = self._saved(state.global_step // self.num_epochs)
            moments = self._saved(state.global_step // self.num_epochs, "optimizer")
            sums = torch.zeros(3, 2, dtype=torch.float64)
            for name, parameter in model.named_parameters():
                ours = after[name].double() - self.before[name].double()
                theirs = parameter.double() - self.before[name].double()
                mean = moments[f"exp_avg/{name}"].double()  # of the gradients, Adam's
                their_mean = optimizer.state[parameter]["exp_avg"].double()
                for row, (one, other) in enumerate(
                    [(ours, theirs), (mean * ours, mean * theirs), (mean, their_mean)]
                ):
                    sums[row, 0] += (other - one).square().sum()
                    sums[row, 1] += one.square().sum()
            update, weighted, gradient = (sums[:, 0] / sums[:, 1]).sqrt().tolist()
            self.updates.append(update)
            self.weighted.append(weighted)
            self.gradients.append(gradient)


def replay(run_dir: Path, scratch: str) -> dict:
    config = load_config(run_dir / "config.toml", [])
    steps: dict[int, list[Sample]] = {}
    for step, trajectory in read_trajectories(run_dir):
        (sample,) = samples_of(trajectory)  # one row each: the template only appends
        steps.setdefault(step, []).append(sample)
    recorded = iter(sorted(steps.items()))

    def rollout(prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        _, samples = next(recorded)
        starts = [int(sample.loss_mask.argmax()) for sample in samples]
        cut = list(zip(samples, starts, strict=True))
        return {
            "prompt_ids": [sample.token_ids[:start].tolist() for sample, start in cut],
            "completion_ids": [sample.token_ids[start:].tolist() for sample, start in cut],
            "env_mask": [sample.loss_mask[start:].tolist() for sample, start in cut],
            "logprobs": [sample.rollout_logprobs[start:].tolist() for sample, start in cut],
            "recorded": [sample.reward for sample in samples],
        }

    def recorded_reward(completions: list, recorded: list[float], **_: object) -> list[float]:
        return recorded

    model, tokenizer = load(config.model.path)
    locked = Locked(run_dir, config.train.num_epochs)
    length = getattr(config.objective.aggregate, "max_tokens", None)
    trainer = GRPOTrainer(
        model=model,
        args=settings(config, scratch, **({"max_completion_length": length} if length else {})),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": ""}]}]
            * (config.run.num_steps * config.rollout.groups_per_step)
        ),
        callbacks=[locked],
        rollout_func=rollout,
        reward_funcs=recorded_reward,
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "grad_norm" in line]
    per_update = [line["grad_norm"] for line in logs]
    epochs = config.train.num_epochs
    theirs = [sum(per_update[i : i + epochs]) / epochs for i in range(0, len(per_update), epochs)]
    metrics = read_metrics(run_dir)
    return {
        "grad_norm": theirs,
        "grad_norm_agentrl": [line["train/grad_norm"] for line in metrics],
        "update_difference": locked.updates,
        "weighted_update_difference": locked.weighted,
        "gradient_difference": locked.gradients,
        "clipped": [
            line.get("policy/clip_fraction_low", 0.0) + line.get("policy/clip_fraction_high", 0.0)
            for line in metrics
        ],
        "versions": {"torch": torch.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bare", "adapter", "words", "replay"])
    parser.add_argument("path", type=Path, help="a run file, or for replay a run directory")
    parser.add_argument("--out", type=Path, required=True)
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if args.what == "replay":
            result = replay(args.path, scratch)
        else:
            config = load_config(args.path, overrides)
            result = play(config, scratch, args.what)
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
