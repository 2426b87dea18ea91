"""A rank of `test_parts.py`: compares its part of each model with the whole, loaded beside it.

python -m torch.distributed.run --nproc-per-node 3 parts_worker.py CASES.json

The file maps names to the directories of models. Rank 0 writes what differs on any rank into
`CASES.json.found`.
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl.config import ParallelSection, RunConfig
from agentrl.errors import ConfigError
from agentrl.model import ranks
from agentrl.model.build import build
from agentrl.model.load import load_model
from agentrl.model.logprobs import logit_shape, packing_of


def differences(path: str) -> list[str]:
    """Names the parameters and buffers of which this rank has not the part of the whole."""
    config = RunConfig.model_validate(
        {"model": {"path": path, "device": "cpu"}, "objective": {"preset": "grpo"}}
    )
    module = build(path, "policy", config).module
    whole = load_model(path, dtype=torch.float32, device="cpu")
    mine, its = dict(module.named_parameters()), dict(whole.named_parameters())
    found = sorted(mine.keys() ^ its.keys())
    for name in mine.keys() & its.keys():
        part, value = mine[name], its[name].detach()
        assert isinstance(part, DTensor)
        expected = distribute_tensor(value, part.device_mesh, part.placements, src_data_rank=None)
        if not torch.equal(part.to_local(), expected.to_local()) or part.shape != value.shape:
            found.append(name)
        if part.requires_grad != its[name].requires_grad:
            found.append(f"requires_grad of {name}")
    buffers = dict(whole.named_buffers())
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, buffers.pop(name)):
            found.append(name)
    found += buffers
    for form in (packing_of, logit_shape, experts_of):
        if form(module) != form(whole):
            found.append(f"{form.__name__}: {form(module)}, of the whole {form(whole)}")
    return found


def experts_of(model) -> str | None:
    return model.config._experts_implementation


if __name__ == "__main__":
    file = Path(sys.argv[1])
    ranks.join(torch.device("cpu"), ParallelSection())
    report = {}
    for name, path in json.loads(file.read_text()).items():
        try:
            report[name] = differences(path)
        except (ConfigError, SystemExit) as error:
            report[name] = [f"refused: {error}"]
    everywhere = ranks.gather(report)
    if ranks.rank() == 0:
        file.with_name(f"{file.name}.found").write_text(json.dumps(everywhere))
    ranks.leave()
    ranks.end_process(0)
