"""An adapter on 4-bit weights: who computes with them, what they take, and what is refused."""

import json
from importlib.util import find_spec

import pytest
import torch
from model_shapes import save_config
from test_loop import resumed, run, tensors_of
from torch import nn

from agentrl.config import RunConfig
from agentrl.model.quantised import QuantisedLinear
from agentrl.train import memory

# Not importorskip: each worker imports every test file, and bitsandbytes takes over a second.
pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs agentrl-gym[8bit]")

ADAPTER = ("--model.quantization", "nf4", "--model.lora.rank", "4", "--model.device", "cpu")


def test_a_layer_multiplies_with_its_four_bits_and_their_gradient_is_exact():
    torch.manual_seed(0)
    linear = nn.Linear(128, 64)
    layer = QuantisedLinear(linear, torch.device("cpu"))
    from bitsandbytes.functional import dequantize_4bit

    matrix = dequantize_4bit(layer.weight, layer.scales)
    assert 1e-3 < (matrix - linear.weight).abs().max() < 0.02
    x = torch.randn(3, 128, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, nn.functional.linear(x, matrix, linear.bias))
    y.sum().backward()
    torch.testing.assert_close(x.grad, matrix.sum(0).expand(3, -1))
    assert layer.weight.numel() == 128 * 64 // 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_compute_with_the_same_weights(tmp_path, dtype):
    folder = run(tmp_path / "run", *ADAPTER, "--model.dtype", dtype, "--objective.preset", "grpo")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    allowed = 1e-4 if dtype == "float32" else 0.3
    assert max(row["policy/rollout_train_logprob_diff_max"] for row in rows) < allowed
    assert all(row["train/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    whole = resumed(tmp_path, *ADAPTER, at=2)
    assert "adapter_model.safetensors" in tensors_of(whole, 3)


@pytest.mark.slow
def test_eight_billion_weights_fit_24_gb_by_the_count(tmp_path):
    save_config("Qwen/Qwen3-8B", tmp_path)

    def needed(**keys) -> float:
        model = {"path": str(tmp_path), "dtype": "bfloat16", "gradient_checkpointing": True}
        config = RunConfig.model_validate(
            {"model": model | {"lora": {"rank": 32}} | keys, "train": {"token_budget": 4096}}
            | {"rollout": {"max_turn_tokens": 512, "max_context_tokens": 4096}}
        )
        return memory.estimate(config, device_type="cuda").total / 2**30

    without, quantised = needed(), needed(quantization="nf4")
    print(f"{without:.1f} and {quantised:.1f} GiB")
    assert without - quantised == pytest.approx(6.945e9 * (2 - 0.516) / 2**30, rel=0.02)
    assert quantised < 12, "and a server has the rest of 24 GB"


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}, "compile": True}])
def test_four_bits_do_not_learn(model):
    with pytest.raises(ValueError, match="quantization needs an adapter"):
        RunConfig.model_validate({"model": {"path": "m", "quantization": "nf4"} | model})
