"""Promises of one rank hold on several: real processes, started by torchrun, on gloo."""

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from samples_for_tests import sample_of

from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded_sampling import SampleRequest, sample, share_weights
from agentrl.model.load import load_model
from agentrl.train.follow import packed

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "examples/quickstart/model"
WORKER = Path(__file__).with_name("ranks_worker.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

KL = {"kl": {"where": "loss", "coef": 0.05}, "entropy": {"coef": 0.01}}
CASES: dict[str, dict] = {
    "grpo": {"objective": {"preset": "grpo"}},
    "ppo with critic": {
        "objective": {"preset": "ppo"},
        "critic": {"learning_rate": 1e-3},
        "train": {"num_minibatches": 2},
    },
    "gspo": {"objective": {"preset": "gspo"}, "train": {"num_epochs": 2}},
    "kl with reference": {
        "objective": {"preset": "grpo", **KL},
        "train": {"num_minibatches": 2},
        "model": {"gradient_checkpointing": True},
    },
    "lora": {"objective": {"preset": "grpo", **KL}, "model": {"lora": {"rank": 4}}},
    "distillation": {"objective": {"preset": "opd"}, "teacher": {"path": str(MODEL)}},
    "weights in host memory": {
        "objective": {"preset": "ppo"},
        "critic": {"learning_rate": 1e-3},
        "train": {"num_minibatches": 2, "optimizer": "adamw_cpu"},
    },
    "kl in the reward, whitened": {"objective": {"preset": "reinforce_pp"}},
    "cispo": {"objective": {"preset": "cispo"}, "train": {"num_epochs": 2}},
    "means of eight rows": {"objective": {"preset": "bnpo"}},
    "leave one out": {"objective": {"preset": "rloo"}},
    "bound on the second moment": {"objective": {"preset": "m2po"}},
}
WAYS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "2 on each row": (2, 2)}
"""How many ranks, and how many of them share each row."""


def make_samples(file: Path, num_groups=5, group_size=4, seed=3, longest=150) -> str:
    """Answers of heavy-tailed length, sampled from the model, to random prompts, for a worker.

    From the model, because tokens that it finds improbable have gradients that nearly cancel: the
    sum of those differs by 3e-6 on one rank already, between two budgets.
    """
    rng = np.random.default_rng(seed)
    model = share_weights(load_model(str(MODEL), dtype=torch.float32, device="cpu"))
    requests = [
        SampleRequest(
            f"{group}-{member}",
            prompt,
            SamplingParams(max_tokens=int(min(longest, 4 + 12 * rng.pareto(0.9)))),
        )
        for group in range(num_groups)
        for prompt in [rng.integers(3, 349, rng.integers(8, 40)).tolist()]
        for member in range(group_size)
    ]
    samples = []
    for request, turn in zip(requests, sample(model, requests, seed=seed), strict=True):
        start, length = len(request.prompt_ids), len(request.prompt_ids) + len(turn.token_ids)
        mask = (np.arange(length) >= start).astype(np.uint8)
        samples.append(
            sample_of(
                request.prompt_ids + turn.token_ids,
                mask,
                rollout_logprobs=np.array([0.0] * start + turn.logprobs, np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                trajectory_id=request.request_id,
                group_id=request.request_id.partition("-")[0],
                reward=float(rng.normal()),
            )
        )
    file.write_bytes(msgspec.msgpack.encode(packed(samples)))
    return str(file)


def config_of(case: dict, context: int = 1) -> dict:
    train = {"learning_rate": 1e-4, "token_budget": 256, "parallel": {"context": context}}
    return case | {
        "model": {"path": str(MODEL), "device": "cpu"} | case.get("model", {}),
        "train": train | case.get("train", {}),
    }


def run(tmp_path: Path, num_ranks: int, cases: list[dict]) -> None:
    """Run cases on so many ranks; alone without torchrun."""
    file = tmp_path / f"cases-{num_ranks}.json"
    file.write_text(json.dumps(cases))
    launch = [sys.executable] if num_ranks == 1 else [*TORCHRUN, str(num_ranks)]
    done = subprocess.run([*launch, str(WORKER), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def relative(mine: dict[str, torch.Tensor], its: dict[str, torch.Tensor], kind: str) -> float:
    """||mine - its|| / ||its|| over all tensors of a kind."""
    assert mine.keys() == its.keys()
    names = [name for name in its if name.startswith(kind)]
    top = sum((mine[n].double() - its[n].double()).square().sum() for n in names)
    low = sum(its[n].double().square().sum() for n in names)
    return math.sqrt(top / low)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_compute_what_one_does(tmp_path):
    """Loss and every gradient of ten objectives, on 2 and 3 ranks and on 2 that hold half of each
    row. With weights and moments in host memory they are those of ranks that keep them elsewhere,
    bit for bit."""
    samples = make_samples(tmp_path / "samples")
    for way, (num_ranks, context) in WAYS.items():
        cases = [
            {
                "config": config_of(case, context),
                "samples": samples,
                "out": str(tmp_path / way / name),
            }
            for name, case in CASES.items()
        ]
        run(tmp_path, num_ranks, cases)
    for name in CASES:
        expected = load_file(tmp_path / "1" / name / "tensors.safetensors")
        metrics = json.loads((tmp_path / "1" / name / "metrics.json").read_text())
        updates = {key.rpartition("/")[0] for key in expected if not key.startswith("weights")}
        kinds = sorted({"/".join(key.split("/")[:2]) + "/" for key in updates})
        for way in list(WAYS)[1:]:
            folder = tmp_path / way / name
            found = load_file(folder / "tensors.safetensors")
            differences = {kind: relative(found, expected, kind) for kind in kinds}
            print(f"{name}, ranks: {way}: {differences}")
            first = [value for kind, value in differences.items() if "/0/" in kind]
            # Later ones are taken at weights that differ already, in which Adam makes a step of
            # full size of the smallest gradient.
            assert max(first) <= 1e-6 and max(differences.values()) < 1e-5
            assert relative(found, expected, "weights") < 1e-6
            for its, mine in zip(
                metrics, json.loads((folder / "metrics.json").read_text()), strict=True
            ):
                assert its.keys() == mine.keys()
                for key, value in its.items():
                    if key == "computed_tokens":  # ranks share less of what rows begin with
                        continue
                    assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    for way in WAYS:
        on_device, on_host = (
            load_file(tmp_path / way / name / "tensors.safetensors")
            for name in ("ppo with critic", "weights in host memory")
        )
        assert on_host.keys() == on_device.keys()
        assert all(torch.equal(on_host[key], on_device[key]) for key in on_host)


@pytest.mark.slow
def test_an_adapter_with_a_kl_term_learns_in_bfloat16(tmp_path):
    """Its first forward pass is that of the reference, without the adapter."""
    case = CASES["lora"] | {"model": {"lora": {"rank": 4}, "dtype": "bfloat16"}}
    samples = make_samples(tmp_path / "samples", num_groups=2)
    for num_ranks in (1, 2):
        out = str(tmp_path / str(num_ranks))
        run(tmp_path, num_ranks, [{"config": config_of(case), "samples": samples, "out": out}])
    one, two = (load_file(tmp_path / number / "tensors.safetensors") for number in ("1", "2"))
    learned = [name for name in two if name.startswith("weights") and "lora_B" in name]
    assert learned and all(two[name].dtype == torch.float32 and two[name].any() for name in learned)
    for name in learned:  # Adam's first step goes by the sign of the gradient
        torch.testing.assert_close(two[name], one[name].float(), rtol=0, atol=2.1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_push_needs_memory_for_two_tensors(tmp_path, dtype):
    """On every rank, above its shards: at most two of the largest, whatever the model has."""
    worker = WORKER.with_name("push_worker.py")
    command = [*TORCHRUN, "2", str(worker), str(tmp_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "peaks.json").read_text())
    print(f"{dtype}: peaks in largest tensors {result['peaks']}, the model is {result['model']}")
    assert result["model"] > 2.5, "else the bound says nothing"
    assert max(result["peaks"]) <= 2.2
    written = load_file(tmp_path / "weights.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_trains_can_be_resumed(tmp_path, num_ranks):
    """On no rank a restore needs more memory than an update, and it is bit for bit."""
    worker = WORKER.with_name("restore_worker.py")
    said = {}
    for mode in ("save", "restore"):
        command = [*TORCHRUN, str(num_ranks), str(worker), str(tmp_path), mode]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        said[mode] = [
            json.loads((tmp_path / f"{mode}-{rank}.json").read_text()) for rank in range(num_ranks)
        ]
    for update, restore in zip(said["save"], said["restore"], strict=True):
        print(f"bytes a parameter: {update['peak']:.1f} in an update, {restore['peak']:.1f} after")
        assert update["peak"] > 14, "weights, gradients and moments are 16"
        assert restore["peak"] <= 1.05 * update["peak"]
        assert restore["digest"] == update["digest"]
