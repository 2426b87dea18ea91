"""Servers that keep their weights in 8 bits: what they are sent, and what the probe can tell.

The stand-in rounds as vLLM does, and computes attention another way, which rounding makes more of.
"""

import asyncio
import copy
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from control_server import ControlServer, perturb, serving
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vllm_process import python_of_vllm, vllm_server

from agentrl.errors import WeightSyncError
from agentrl.inference.http import make_client
from agentrl.inference.weights.control import VLLMControl
from agentrl.inference.weights.files import weights_path
from agentrl.inference.weights.fp8 import in_8_bits, to_float8
from agentrl.inference.weights.probe import probe, trainer_logprobs
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer
from agentrl.model.load import load_model

MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
PROBE_IDS = np.random.default_rng(0).integers(349, size=32).tolist()


class RoundingServer(ControlServer):
    def __init__(self) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.bfloat16, attn_implementation="eager"
        )

    def sample(self, ids, parameters):
        with in_8_bits(self.model):
            return super().sample(ids, parameters)


def policy():
    return load_model(str(MODEL), dtype=torch.bfloat16, device="cpu")


def syncing(url: str, directory: Path, *, quantization: str | None = "fp8", tolerance=0.15):
    return ServerWeightSync(
        [url],
        transfer=FileTransfer(directory),
        probe_ids=PROBE_IDS,
        temperature=1.0,
        tolerance=tolerance,
        quantization=quantization,
        timeout_s=60.0,
    )


def moved(tensors, deviations: float, names: str):
    """The matrices of these names moved by so many standard deviations of their values."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if names in name and tensor.dim() == 2 and "embed" not in name:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensor.add_((deviations * noise).to(tensor.dtype))
    return tensors


def pushed(directory: Path, spoil=lambda tensors: tensors, **settings) -> ControlServer:
    """Push a policy; `spoil` changes what the server loads."""
    model, server = policy(), RoundingServer()
    perturb(model, seed=1, scale=0.01)
    server.after_load = spoil

    async def main() -> None:
        async with serving(server), aclosing(syncing(server.url, directory, **settings)) as sync:
            await sync.push(model, 1)
            sent = load_file(weights_path(directory, 1))
            assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}

    asyncio.run(main())
    return server


def test_weights_are_sent_in_16_bits_and_compared_as_the_server_rounds_them(tmp_path):
    server = pushed(tmp_path)
    assert server.routes().count("/update_weights") == 1
    with pytest.raises(WeightSyncError, match=r"on average, rounded to 8 bits, but at most 0\.001"):
        pushed(tmp_path, tolerance=1e-3)


@pytest.mark.parametrize(
    ("deviations", "names", "is_caught"),
    [
        (1.0, "", True),
        (1.0, "layers.0.", True),
        # Less than what rounding makes of two engines.
        (0.1, "layers.0.mlp.down_proj", False),
        (0.1, "", False),
    ],
)
def test_wrong_weights_are_told_from_rounding_down_to_a_size(
    tmp_path, deviations, names, is_caught
):
    def spoil(tensors):
        return moved(tensors, deviations, names)

    if is_caught:
        with pytest.raises(WeightSyncError, match="does not compute what the trainer does"):
            pushed(tmp_path, spoil)
    else:
        pushed(tmp_path, spoil)


def test_the_model_is_left_as_it_was_and_its_head_is_not_rounded():
    model = policy()
    before = copy.deepcopy(model.state_dict())
    with in_8_bits(model) as layers:
        assert len(layers) == 7 * model.config.num_hidden_layers and model.lm_head not in layers
    plain = trainer_logprobs(model, PROBE_IDS, version=1, temperature=1.0)
    rounded = trainer_logprobs(model, PROBE_IDS, version=1, temperature=1.0, quantization="fp8")
    again = trainer_logprobs(model, PROBE_IDS, version=1, temperature=1.0)
    assert plain.prompt == again.prompt and plain.prompt != rounded.prompt
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_value_is_off_by_a_sixteenth_at_most():
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    rounded, scales = to_float8(rows)
    wrong = ((rounded * scales - rows) / rows).abs()[rounded.abs() >= 2**-6]
    assert wrong.max() <= 1 / 16 + 1e-6 and 0.02 < wrong.mean() < 0.03
    assert torch.equal(to_float8(torch.zeros(1, 4))[0], torch.zeros(1, 4))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(python_of_vllm() is None, reason="AGENTRL_VLLM_PYTHON is not set")
async def test_a_real_vllm_rounds_every_update(tmp_path):
    flags = ("--quantization", "fp8_per_channel")
    with vllm_server(MODEL, tmp_path, dtype="bfloat16", flags=flags) as url:
        model, errors = policy(), []
        async with aclosing(syncing(url, tmp_path / "weights")) as sync, make_client() as http:
            control = VLLMControl(http, url, timeout_s=60)
            for version in range(1, 7):
                await sync.push(model, version)
                expected = trainer_logprobs(
                    model, PROBE_IDS, version=version, temperature=1.0, quantization="fp8"
                )
                errors.append((await probe(control, "policy", expected)).error)
                perturb(model, seed=version, scale=0.01)
            # A part of a layer alone would be rounded together with what was never written.
            tensors = load_file(weights_path(tmp_path / "weights", 6))
            del tensors["model.layers.0.self_attn.k_proj.weight"]
            lacking = tmp_path / "weights" / "lacking.safetensors"
            save_file(tensors, lacking)
            await control.post("/pause?mode=keep")
            await control.post("/start_weight_update")
            with pytest.raises(WeightSyncError, match="one of its tensors is missing"):
                await control.post("/update_weights", {"update_info": {"path": str(lacking)}})
    print(f"\nmean differences of the probe {[round(each, 4) for each in errors]}")
    assert max(errors) < 0.04
