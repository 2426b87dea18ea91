"""Runs a rank of `test_ranks.py`: `python ranks_worker.py CASES.json`, alone or by torchrun.

The file lists cases: `config` of the run, `samples` (a file of them, packed), `steps`
and the folder `out`. Rank 0 writes there what the case came to: gradients of every update, the
weights at the end, and the metrics.
"""

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from agentrl.config import RunConfig
from agentrl.model import ranks
from agentrl.model.load import load_tokenizer
from agentrl.train.follow import unpacked
from agentrl.train.trainer import Trainer, make_trainer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def recorded(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Gets the gradients of every update, as soon as they are complete."""
    gradients: dict[str, torch.Tensor] = {}
    for kind, learner in (("policy", trainer.learner), ("critic", trainer.critic)):
        if learner is None:
            continue

        def step(learner=learner, kind=kind, original=learner.step):
            for name, parameter in learner.model.named_parameters():
                if parameter.grad is not None:
                    key = f"{kind}/{learner.num_updates}/{name}"
                    gradients[key] = whole(parameter.grad)
            return original()

        learner.step = step
    return gradients


def run_case(case: dict) -> None:
    config = RunConfig.model_validate(case["config"])
    out = Path(case["out"])
    tokenizer = load_tokenizer(config.model.path)
    trainer = asyncio.run(make_trainer(config, tokenizer, out))
    gradients = recorded(trainer)
    samples, metrics = unpacked(msgspec.msgpack.decode(Path(case["samples"]).read_bytes())), []
    for step in range(1, case.get("steps", 1) + 1):
        metrics.append(trainer.learn(step, samples, None, None))
    learners = [trainer.learner] + ([trainer.critic] if trainer.critic else [])
    weights = {
        f"weights/{number}/{name}": whole(parameter)
        for number, learner in enumerate(learners)
        for name, parameter in learner.model.named_parameters()
        if parameter.requires_grad
    }
    if ranks.rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_file(gradients | weights, out / "tensors.safetensors")
        (out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    ranks.join(torch.device("cpu"), RunConfig.model_validate(cases[0]["config"]).train.parallel)
    for case in cases:
        run_case(case)
    ranks.leave()
    ranks.end_process(0)
