"""Low-rank adapters loaded into a running vLLM, with sequences in flight."""

import asyncio
from contextlib import aclosing
from importlib.util import find_spec

import pytest
import torch
from test_real_vllm import MODEL, PROBE_IDS, TEMPERATURE, exactness, in_flight, prompts, recomputed
from vllm_process import python_of_vllm

from agentrl.config import LoraSection
from agentrl.inference.http import make_client
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.program import ServerSettings
from agentrl.inference.weights.plugin import write_plugin
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer
from agentrl.model.adapter_files import ADAPTER_FOLDER, adapter_tensors, write_adapter
from agentrl.model.load import load_model
from agentrl.model.lora import add_adapter

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="adapters need agentrl-gym[lora]"),
    pytest.mark.vllm,
    pytest.mark.skipif(python_of_vllm() is None, reason="AGENTRL_VLLM_PYTHON is not set"),
    pytest.mark.timeout(600),
]


def move(model, seed):
    """A training step of the adapter, as far as a server can tell."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            if "lora_B" in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.01)


def test_every_token_is_of_the_adapter_it_is_labelled_with(tmp_path):
    model = load_model(str(MODEL), dtype=torch.float32, device="cpu")
    torch.manual_seed(0)
    add_adapter(model, LoraSection(rank=4), path=str(MODEL))
    weights = tmp_path / "weights"
    settings = ServerSettings(
        python=python_of_vllm() or "",
        model=str(MODEL),
        dtype="float32",
        max_model_len=2048,
        log_dir=tmp_path / "logs",
        plugin_dir=write_plugin(tmp_path / "plugin"),
        adapter=write_adapter(model, weights / ADAPTER_FOLDER).parent,
    )
    launcher = ServerLauncher(settings)

    async def main():
        async with aclosing(launcher), make_client() as http:
            await launcher.start()
            sync = ServerWeightSync(
                launcher.urls,
                transfer=FileTransfer(weights),
                probe_ids=PROBE_IDS,
                temperature=TEMPERATURE,
                tolerance=1e-3,
            )
            async with aclosing(sync):
                move(model, seed=1)
                first = await sync.push(model, 1)
                before = {name: t.clone() for name, t in adapter_tensors(model).items()}
                rows = prompts(4)
                tasks = await in_flight(http, launcher.urls[0], rows)
                move(model, seed=2)
                second = await sync.push(model, 2)
                sequences = await asyncio.gather(*tasks)
        return first, second, before, rows, sequences

    first, second, before, rows, sequences = asyncio.run(main())
    for metrics in (first, second):
        assert metrics["sync/probe_logprob_diff_max"] < 1e-4
    assert not list(weights.glob("policy-*")), "only the adapter is written"
    differences = []
    for version in (2, 1):
        if version == 1:
            for name, tensor in adapter_tensors(model).items():
                tensor.data.copy_(before[name])
        for row, sequence in zip(rows, sequences, strict=True):
            assert [label for label, _, _ in sequence.spans] == ["1", "2"]
            expected = recomputed(model, row, sequence.token_ids)
            got = torch.tensor(sequence.logprobs)
            for label, start, end in sequence.spans:
                if label == str(version):
                    differences.append((got[start:end] - expected[start:end]).abs())
    every = torch.cat(differences)
    print(f"\nadapter, keep: {exactness(every)}")
    assert len(every) == sum(len(sequence.token_ids) for sequence in sequences)
    assert every.max() < 1e-4
