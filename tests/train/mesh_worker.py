"""Runs a rank of `test_meshes.py`: `torchrun mesh_worker.py FOLDER OUT AXES begin|resume`.

`begin` learns two steps, saves a checkpoint, writes the weights as a push by file does, and learns
a third step; `resume` takes the checkpoint into a fresh trainer and learns the third step. Either
writes the weights and moments that it ends with.
"""

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import torch
from ranks_worker import whole
from safetensors.torch import save_file

from agentrl.config import RunConfig
from agentrl.inference.weights.files import write_weights
from agentrl.model import ranks
from agentrl.model.load import load_tokenizer
from agentrl.model.tensors import take_part
from agentrl.train import checkpoint
from agentrl.train.follow import unpacked
from agentrl.train.trainer import make_trainer


def main(folder: Path, out: Path, axes: dict, mode: str) -> None:
    train = {"learning_rate": 1e-3, "token_budget": 256, "parallel": axes}
    config = RunConfig.model_validate(
        {"model": {"path": str(folder / "qwen3_moe"), "device": "cpu"}, "train": train}
    )
    ranks.join(torch.device("cpu"), config.train.parallel)
    trainer = asyncio.run(make_trainer(config, load_tokenizer(config.model.path), folder / "run"))
    samples = unpacked(msgspec.msgpack.decode((folder / "samples").read_bytes()))
    out.mkdir(parents=True, exist_ok=True)
    if mode == "begin":
        for step in (1, 2):
            trainer.learn(step, samples, None, None)
        checkpoint.save_checkpoint(folder / "run", trainer.state(2, {}, {}))
        if ranks.rank() == 0:
            write_weights(trainer.model, out / "pushed.safetensors")
        else:
            take_part(trainer.model)
    else:
        state = checkpoint.resume(folder / "run", fingerprint={}, policy=trainer.learner)
        trainer.restore_counters(state)
    trainer.learn(3, samples, None, None)
    ended = {}
    for name, parameter in trainer.model.named_parameters():
        ended[f"weights/{name}"] = whole(parameter)
        for kind, value in trainer.learner.optimizer.state[parameter].items():
            ended[f"moments/{kind}/{name}"] = whole(value)
    if ranks.rank() == 0:
        save_file(ended, out / "ended.safetensors")
    ranks.leave()
    ranks.end_process(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
