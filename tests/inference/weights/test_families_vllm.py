"""A tiny model of each family in a real vLLM: served, updated once, equal to the trainer after."""

import asyncio
import os

import pytest
import torch
from control_server import perturb
from families import IN_BFLOAT16, SERVED, save_tiny_model
from vllm_process import python_of_vllm, vllm_server

from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer
from agentrl.model.load import load_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(python_of_vllm() is None, reason="AGENTRL_VLLM_PYTHON is not set"),
    pytest.mark.timeout(600),
]
ALWAYS = ["falcon_h1", "gemma3_text", "qwen3_moe"]
"""Recurrent layers with a bias that vLLM keeps, windows, and experts that it packs."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def serve_and_update(model_type, directory) -> dict[str, float]:
    dtype = "bfloat16" if model_type in IN_BFLOAT16 else "float32"
    path = save_tiny_model(directory / "model", model_type, wide=True)
    model = load_model(path, dtype=getattr(torch, dtype), device="cpu")

    async def push(url):
        sync = ServerWeightSync(
            [url],
            transfer=FileTransfer(directory / "weights"),
            probe_ids=list(range(5, 69)),
            temperature=0.8,
            tolerance=TOLERANCE[dtype],
            timeout_s=60.0,
        )
        try:
            return await sync.push(model, 1)
        finally:
            await sync.aclose()

    flags = ("--max-model-len", "128")
    with vllm_server(directory / "model", directory, dtype=dtype, flags=flags) as url:
        perturb(model, seed=1, scale=0.02)
        return asyncio.run(push(url))


@pytest.mark.parametrize("model_type", SERVED)
def test_served_and_updated(model_type, tmp_path):
    if model_type not in ALWAYS and "AGENTRL_ALL_FAMILIES" not in os.environ:
        pytest.skip("half a minute each: set AGENTRL_ALL_FAMILIES to serve every family")
    print(model_type, serve_and_update(model_type, tmp_path))
