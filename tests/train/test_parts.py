"""Several ranks read a model in parts: each part is that of the whole model, bit for bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import save_tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

WORKER = Path(__file__).with_name("parts_worker.py")
FAMILIES = {
    "one matrix as embedding and head": ("qwen3", {"tie_word_embeddings": True}),
    "embedding and head": ("qwen3", {"tie_word_embeddings": False}),
    "experts one by one": ("qwen3_moe", {}),
    "fewer experts than ranks": ("mixtral", {"num_local_experts": 2}),
    "experts in one tensor": ("gpt_oss", {}),
    "convolutions": ("falcon_mamba", {}),
    "convolutions that files hold apart": ("olmo_hybrid", {}),
    "vision tower": ("qwen3_vl", {}),
}


def save_adapter(folder: Path, base: str) -> str:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_rank_reads_its_part_of_the_whole(tmp_path):
    """Three ranks, which do not divide the rows evenly, read every parameter and buffer as one
    rank does, and compute in the form that the whole is proved in. Rank 0 alone names a refusal."""
    paths = {
        name: save_tiny_model(tmp_path / name, family, **changes)
        for name, (family, changes) in FAMILIES.items()
    }
    paths["adapter"] = save_adapter(tmp_path / "adapter", paths["embedding and head"])
    paths["incomplete"] = str(shutil.copytree(paths["embedding and head"], tmp_path / "incomplete"))
    weights = tmp_path / "incomplete" / "model.safetensors"
    tensors = load_file(weights)
    del tensors[max(tensors)]
    save_file(tensors, weights, {"format": "pt"})
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(paths))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", str(WORKER), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "cases.json.found").read_text())
    refused = [each.pop("incomplete") for each in found]
    assert "lack 1 tensors" in refused[0][0]
    assert refused[1:] == [["refused: 1"]] * 2
    assert found == [{name: [] for name in paths if name != "incomplete"}] * 3
