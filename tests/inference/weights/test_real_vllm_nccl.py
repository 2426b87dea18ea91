"""vLLM's own NCCL backend, its communicator and its binding, with a library for host memory.

The server is real; what stands in is the shared library, and the GPU's streams (`nccl_stand_in`).
"""

import asyncio
from pathlib import Path

import pytest
import torch
from control_server import perturb
from nccl_stand_in import build, write_vllm_plugin
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from vllm_process import python_of_vllm, vllm_server

from agentrl.errors import WeightSyncError
from agentrl.inference.base import SamplingParams
from agentrl.inference.http import make_client
from agentrl.inference.vllm import VLLMEngine
from agentrl.inference.weights.nccl import Library, NCCLTransfer
from agentrl.inference.weights.push import ServerWeightSync

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
PROBE_IDS = list(range(10, 74))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(python_of_vllm() is None, reason="AGENTRL_VLLM_PYTHON is not set"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = build(tmp_path_factory.mktemp("nccl"))
    if path is None:
        pytest.skip("no C compiler to build the stand-in of NCCL with")
    return path


def untied_model() -> Qwen3ForCausalLM:
    """vLLM's own reload on a CPU forgets the packed copy of a tied head."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=320,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


async def sampled_versions(engine: VLLMEngine, number: int) -> list[int]:
    sampling = SamplingParams(max_tokens=600, temperature=1.0, top_p=1.0, stop_token_ids=())
    generation = await engine.generate(f"g{number}-m000-t000", [5, 6, 7 + number], sampling)
    return generation.versions


async def test_updates_with_sequences_in_flight(library, tmp_path):
    model = untied_model()
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(tmp_path / "model")
    write_vllm_plugin(tmp_path / "plugin")
    environment = {"VLLM_NCCL_SO_PATH": str(library)}

    with vllm_server(tmp_path / "model", tmp_path, backend="nccl", environment=environment) as url:
        transfer = NCCLTransfer(Library(str(library)))
        sync = ServerWeightSync(
            [url],
            transfer=transfer,
            probe_ids=PROBE_IDS,
            temperature=0.8,
            tolerance=1e-3,
            timeout_s=60.0,
        )
        engine = VLLMEngine([url])
        await engine.start()
        crossed = 0
        for version in range(1, 6):
            flying = [asyncio.create_task(sampled_versions(engine, n)) for n in range(4)]
            await asyncio.sleep(0.1)
            metrics = await sync.push(model, version)
            # Tolerances of the probe hold after every update: the weights are all there.
            assert metrics["sync/probe_logprob_diff_max"] < 1e-3
            for versions in await asyncio.gather(*flying):
                assert versions == sorted(versions) and versions[-1] in (version - 1, version)
                crossed += len(set(versions)) == 2
            engine.policy_version = version
            perturb(model, seed=version, scale=0.02)
        assert crossed

        # A trainer that starts again has another communicator, and the old one is let go.
        again = ServerWeightSync(
            [url],
            transfer=NCCLTransfer(Library(str(library))),
            probe_ids=PROBE_IDS,
            temperature=0.8,
            tolerance=1e-3,
            timeout_s=60.0,
        )
        await sync.aclose()
        await again.push(model, 6)

        # One tensor that the server's model does not have: said at once, and the server lives.
        await again._transfer.take(model, 7)
        again._transfer.delivered(7)  # what is sent from now on is the copy
        weights = again._transfer._weights
        weights["model.surplus.weight"] = torch.zeros(3)
        with pytest.raises(WeightSyncError, match="surplus"):
            await again.push_to(url)
        del weights["model.surplus.weight"]
        await again.push(model, 8)
        await again.aclose()
        await engine.aclose()
        async with make_client(url) as http:
            assert (await http.get("/weight_info")).json()["weight_version"] == "8"
