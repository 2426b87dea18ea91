"""Golden vectors as agentrl's batches; `vectors/README.md` says where each comes from."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from agentrl.algo import Batch, Objective, StepTotals, compute_advantages

OWN = Path(__file__).parent / "vectors" / "vectors.json.gz"
Knobs = dict
Outputs = dict[str, Tensor]
PLAIN = {"baseline": {"kind": "none"}, "scale": {"kind": "none"}}


@dataclass(frozen=True)
class Vector:
    name: str
    peer: str
    kind: str
    dtype: str
    knobs: Knobs
    inputs: dict
    outputs: dict

    def tensor(self, name: str) -> Tensor:
        return torch.tensor(numbers(self.inputs[name]), dtype=torch.float64)

    def mask(self) -> Tensor:
        """(B, T), or (B, 1) of ones where the vector has numbers per trajectory."""
        if "mask" in self.inputs:
            return self.tensor("mask") != 0
        if per_token := [name for name in self.inputs if name.endswith("logp")]:
            return torch.ones_like(self.tensor(per_token[0]), dtype=torch.bool)
        return torch.ones(len(next(iter(self.inputs.values()))), 1, dtype=torch.bool)

    def groups(self) -> Tensor:
        return self.tensor("group").long()

    def trained(self) -> list[list[int]]:
        """The trained positions of each row."""
        return [[t for t, m in enumerate(row) if m] for row in self.mask().tolist()]

    def gap(self) -> Tensor:
        return self.tensor("old_logp") - self.tensor("rollout_logp")


def load_vectors() -> list[Vector]:
    if directory := os.environ.get("AGENTRL_VECTORS"):
        found = {path.stem: json.loads(path.read_text()) for path in Path(directory).glob("*.json")}
        assert found, f"no vectors in AGENTRL_VECTORS={directory}"
    else:
        found = json.loads(gzip.decompress(OWN.read_bytes()))
    keys = ("peer", "kind", "dtype", "knobs", "inputs", "outputs")
    return [Vector(name, *(found[name][key] for key in keys)) for name in sorted(found)]


def numbers(value: object) -> object:
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return float(value)  # type: ignore[arg-type] # "nan" and "inf" are written as text


THEIR_NAMES = {
    "rewards": "rewards",
    "group_ids": "group",
    "old_logprobs": "old_logp",
    "rollout_logprobs": "rollout_logp",
    "ref_logprobs": "ref_logp",
    "values": "values",
    "returns": "returns",
    "advantages": "advantages",
    "baselines": "baselines",
    "sum_squared_probs": "sum_pi_sq",
    "reward_components": "rewards_per_func",
}


def batch_of(v: Vector, **fields: object) -> Batch:
    """A batch with the vector's tensors under agentrl's names; `fields` replace them."""
    found: dict = {
        ours: v.tensor(theirs) for ours, theirs in THEIR_NAMES.items() if theirs in v.inputs
    }
    mask = fields.pop("loss_mask", v.mask())
    assert isinstance(mask, Tensor)
    if "token_rewards" in v.inputs:
        # Every token is a turn of its own, so that rewards can lie anywhere.
        per_token = torch.where(mask, v.tensor("token_rewards"), 0)
        found |= {"rewards": per_token.sum(1), "turn_rewards": per_token}
        found["turn_ids"] = torch.arange(mask.shape[1]).expand(mask.shape)
    if "reward_components" in found:
        found["reward_names"] = component_names(v)
    found |= fields
    rows, old = len(mask), found.get("old_logprobs")
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    found.setdefault("rollout_logprobs", zeros if old is None else old)
    found.setdefault("rewards", zeros[:, 0])
    found["group_ids"] = found.get("group_ids", torch.zeros(rows)).long()
    return Batch(loss_mask=mask, **found)


def component_names(v: Vector) -> list[str]:
    return [f"f{number}" for number in range(v.tensor("rewards_per_func").shape[1])]


def solve(v: Vector, stages: Knobs, **fields: object) -> Tensor:
    """agentrl's advantages, (B,) where the vector has one number per trajectory."""
    if "rewards_per_func" in v.inputs:
        weights = dict(zip(component_names(v), v.knobs["weights"], strict=True))
        stages = {**stages, "reward": {**stages.get("reward", {}), "weights": weights}}
    batch = batch_of(v, **fields)
    advantages = compute_advantages(Objective.model_validate(stages), batch)
    return advantages if v.mask().shape[1] > 1 else advantages[:, 0]


def totals_of(**counts: float) -> StepTotals:
    known = dict.fromkeys(("tokens", "sequences", "groups", "trajectories", "local_batches"), 1.0)
    return StepTotals(**{**known, **counts})
