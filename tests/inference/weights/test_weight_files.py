"""The file that carries a model's weights: exact, atomic, under a checkpoint's names."""

import json
import resource
import signal
from pathlib import Path

import pytest
import torch
from control_server import perturb, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.inference.weights.files import remove_weights, weights_path, write_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_the_file_holds_the_model_bit_for_bit(tmp_path, dtype, tied):
    model = tiny_model(tied=tied).to(dtype)
    path = weights_path(tmp_path, 7)
    write_weights(model, path)
    model.save_pretrained(tmp_path / "reference")
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    written = load_file(path)
    assert written.keys() == reference.keys()
    assert ("lm_head.weight" in written) is not tied
    for name, tensor in reference.items():
        assert written[name].dtype == dtype
        assert torch.equal(written[name], tensor), name


def test_the_file_is_a_snapshot(tmp_path):
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = weights_path(tmp_path, 1)
    write_weights(model, path)
    perturb(model, seed=1)
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, before[name])


def test_experts_are_named_as_in_a_checkpoint(tmp_path):
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "reference")
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    path = weights_path(tmp_path, 1)
    write_weights(model, path)
    written = load_file(path)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in written
    assert written.keys() == reference.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in reference.items())


class Bare(torch.nn.Module):
    """As much of a model as the writer needs."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.config = Qwen3Config()


shapes = st.lists(st.integers(0, 4), max_size=3)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])


@settings(max_examples=40)
@given(st.lists(st.tuples(shapes, dtypes, st.booleans()), min_size=1, max_size=6))
def test_any_shapes_and_dtypes_read_back_and_are_aligned(tmp_path_factory, specs):
    tensors = {}
    for number, (shape, dtype, transposed) in enumerate(specs):
        tensor = (torch.randn(shape) * 3).to(dtype)
        tensors[f"t{number}"] = tensor.mT if transposed and tensor.dim() >= 2 else tensor
    path = tmp_path_factory.mktemp("any") / "w.safetensors"
    write_weights(Bare(tensors), path)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        assert (8 + length + entry["data_offsets"][0]) % tensors[name].itemsize == 0


def test_a_write_that_fails_leaves_nothing(tmp_path):
    model = tiny_model()
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a disk that is full half-way
    try:
        with pytest.raises(OSError):
            write_weights(model, weights_path(tmp_path, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_handler)
    assert list(tmp_path.iterdir()) == []


def test_only_weights_of_other_versions_are_removed(tmp_path):
    kept = ["policy-8.safetensors", "notes.txt", "policy-x.safetensors", "model.safetensors"]
    gone = ["policy-7.safetensors", "policy-18.safetensors", ".policy-9.safetensors.tmp"]
    for name in kept + gone:
        (tmp_path / name).write_bytes(b"")
    remove_weights(tmp_path, keep=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    remove_weights(tmp_path)
    assert not (tmp_path / "policy-8.safetensors").exists()


def test_a_reader_keeps_its_data_when_the_file_is_removed(tmp_path: Path):
    model = tiny_model()
    write_weights(model, weights_path(tmp_path, 1))
    with safe_open(weights_path(tmp_path, 1), framework="pt") as file:
        remove_weights(tmp_path)
        tensor = file.get_tensor("model.norm.weight")
        assert torch.equal(tensor, model.state_dict()["model.norm.weight"])
