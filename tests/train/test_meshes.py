"""Ranks that hold parts of layers (`train.parallel`) compute what one rank does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_ranks import MODEL, TORCHRUN, WORKER, make_samples, relative, run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from agentrl.config import RunConfig
from agentrl.model.load import load_model
from agentrl.model.tensors import CheckpointTensors
from agentrl.train import checkpoint

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": SHARED
    | {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4},
    "glm4_moe": SHARED | {"n_group": 1, "topk_group": 1},
}
KL = {"kl": {"where": "loss", "coef": 0.05}, "entropy": {"coef": 0.01}}
OBJECTIVES: dict[str, dict] = {
    "grpo": {"objective": {"preset": "grpo"}},
    "gspo": {"objective": {"preset": "gspo"}, "train": {"num_epochs": 2}},
    "kl": {
        "objective": {"preset": "grpo", **KL},
        "train": {"num_minibatches": 2},
        "model": {"gradient_checkpointing": True},
    },
    "cispo": {"objective": {"preset": "cispo"}, "train": {"num_epochs": 2}},
}
DENSE, MIXTURES = ["qwen3"], [name for name in FAMILIES if name != "qwen3"]
MESHES = {
    "fsdp 2": (2, {}, list(FAMILIES)),
    "tensor 2": (2, {"tensor": 2}, DENSE),
    "expert 2": (2, {"expert": 2}, MIXTURES),
    "fsdp 2 x tensor 2": (4, {"tensor": 2}, DENSE),
    "fsdp 2 x tensor 2 x expert 4": (4, {"tensor": 2, "expert": 4}, MIXTURES),
}


def save_family(folder: Path, name: str, **changes: int) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE | FAMILIES[name] | changes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # gains of 1 and biases of 0 would hide what is left out
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder / name)
    return str(folder / name)


def config_of(path: str, case: dict, parallel: dict) -> dict:
    train = {"learning_rate": 1e-4, "token_budget": 256, "parallel": parallel}
    return case | {
        "model": {"path": path, "device": "cpu"} | case.get("model", {}),
        "train": train | case.get("train", {}),
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_computes_what_one_rank_does(mesh, tmp_path):
    samples = make_samples(tmp_path / "samples", num_groups=4)
    num_ranks, parallel, families = MESHES[mesh]
    paths = {name: save_family(tmp_path, name) for name in families}
    for count, axes in ((1, {}), (num_ranks, parallel)):
        cases = [
            {
                "config": config_of(paths[family], case, axes),
                "samples": samples,
                "out": str(tmp_path / str(count) / family / name),
            }
            for family in families
            for name, case in OBJECTIVES.items()
        ]
        run(tmp_path, count, cases)
    for family in families:
        for name in OBJECTIVES:
            one, many = (tmp_path / str(count) / family / name for count in (1, num_ranks))
            mine, its = (load_file(each / "tensors.safetensors") for each in (many, one))
            gradient, weights = (relative(mine, its, kind) for kind in ("policy/", "weights/"))
            losses = [
                json.loads((each / "metrics.json").read_text())[0]["loss/policy"]
                for each in (many, one)
            ]
            print(f"{mesh:29} {family:12} {name:6} gradient {gradient:.1e} weights {weights:.1e}")
            assert gradient < 1e-6 and weights < 1e-6
            assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"tensor": 2, "context": 2}, {}),
        ({"tensor": 2, "expert": 3}, {}),
        ({"expert": 2}, {"model": {"lora": {"rank": 4}}}),
        ({"expert": 2}, {"objective": {"preset": "ppo"}}),
        ({"tensor": 2}, {"train": {"optimizer": "adamw_cpu"}}),
        ({"tensor": 2}, {"model": {"compile": True}}),
        ({"expert": 2}, {"train": {"router_aux_loss": 0.1}}),
    ],
)
def test_what_a_mesh_cannot_do_is_refused_before_loading(axes, changes):
    with pytest.raises(ValueError, match=r"train\.parallel"):
        RunConfig.model_validate(config_of("nowhere", changes, axes))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mesh_resumes_bit_for_bit_and_onto_others(tmp_path):
    make_samples(tmp_path / "samples", num_groups=4)
    path = save_family(tmp_path, "qwen3_moe")

    def ended(num_ranks: int, axes: dict, mode: str) -> dict[str, torch.Tensor]:
        out = tmp_path / f"{num_ranks}-{mode}"
        worker = str(WORKER.with_name("mesh_worker.py"))
        launch = [sys.executable] if num_ranks == 1 else [*TORCHRUN, str(num_ranks)]
        command = [*launch, worker, str(tmp_path), str(out), json.dumps(axes), mode]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return load_file(out / "ended.safetensors")

    whole_mesh = {"tensor": 2, "expert": 4}
    begun = ended(4, whole_mesh, "begin")
    again = ended(4, whole_mesh, "resume")
    assert begun.keys() == again.keys()
    assert [name for name in begun if not torch.equal(begun[name], again[name])] == []
    for num_ranks, axes in ((2, {"expert": 2}), (1, {})):
        other = ended(num_ranks, axes, "resume")
        for kind in ("weights/", "moments/exp_avg/", "moments/exp_avg_sq/"):
            assert relative(other, begun, kind) < 5e-6, (num_ranks, kind)

    # What a push writes is the model of the checkpoint, under the names of its family's files.
    pushed = load_file(tmp_path / "4-begin" / "pushed.safetensors")
    checkpoint.export(tmp_path / "run/checkpoints/step_000002", tmp_path / "exported")
    model = load_model(path, dtype=torch.float32, device="cpu")
    model.load_state_dict(load_file(tmp_path / "exported/model.safetensors"))
    expected = dict(CheckpointTensors(model))
    assert pushed.keys() == expected.keys() == load_file(f"{path}/model.safetensors").keys()
    assert all(torch.equal(pushed[name], expected[name]) for name in expected)
