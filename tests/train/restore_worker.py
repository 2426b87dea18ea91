"""Runs a rank of `test_ranks.py`: `torchrun restore_worker.py OUT save|restore`.

`save` makes two updates and a checkpoint, `restore` takes that into a fresh trainer. Each rank
writes its peak of memory there: bytes per parameter of its shards, those of the weights included.
"""

import asyncio
import hashlib
import json
import sys
import threading
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentrl.config import RunConfig
from agentrl.model import ranks
from agentrl.model.load import load_tokenizer
from agentrl.train import checkpoint
from agentrl.train.trainer import Trainer, make_trainer

TOKENIZER = Path(__file__).parents[2] / "examples/quickstart/model"


def make_model(folder: Path) -> None:
    config = Qwen3Config(
        vocab_size=353,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)


def held() -> int:
    """Bytes that this process cannot give back: pages of files that it has mapped are not in it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


class Peak:
    def __enter__(self) -> "Peak":
        self.bytes, self._over = held(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.bytes = max(self.bytes, held())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, held())


def digest(trainer: Trainer) -> str:
    """Hashes this rank's weights and moments, bit for bit."""
    learner, found = trainer.learner, hashlib.sha256()
    for name, parameter in learner.model.named_parameters():
        state = learner.optimizer.state.get(learner.masters.get(parameter, parameter), {})
        for key, value in sorted({**state, name: parameter}.items()):
            local = value.to_local() if isinstance(value, DTensor) else value
            found.update(f"{key} {tuple(local.shape)}".encode())
            found.update(local.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def main(out: Path, mode: str) -> None:
    config = RunConfig.model_validate(
        {"model": {"path": str(out / "model"), "device": "cpu"}, "train": {"token_budget": 256}}
    )
    ranks.join(torch.device("cpu"), config.train.parallel)
    if ranks.rank() == 0 and not (out / "model").exists():
        make_model(out / "model")
    ranks.barrier()
    tokenizer = load_tokenizer(config.model.path)
    trainer = asyncio.run(make_trainer(config, tokenizer, out / "run"))
    parameters = list(trainer.model.parameters())
    num_parameters = sum(each.numel() for each in parameters) / ranks.size()
    before = held() - 4 * num_parameters
    with Peak() as peak:
        if mode == "save":
            for update in range(2):
                for number, parameter in enumerate(parameters):
                    torch.manual_seed(number + 1000 * update)
                    parameter.grad = torch.randn_like(parameter)
                trainer.learner.step()
        else:
            checkpoint.resume(out / "run", fingerprint={}, policy=trainer.learner)
    if mode == "save":
        checkpoint.save_checkpoint(out / "run", trainer.state(2, {}, {}))
    said = {"peak": (peak.bytes - before) / num_parameters, "digest": digest(trainer)}
    (out / f"{mode}-{ranks.rank()}.json").write_text(json.dumps(said))
    ranks.leave()
    ranks.end_process(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
