"""Every family of docs/models.md against its own unpacked eager forward, one sample at a time."""

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from families import (
    FAMILIES,
    NAMED,
    NOT_SAMPLED,
    PAGE,
    SPOKEN,
    VISION,
    page,
    row_of,
    rows_of,
    save_tiny_model,
)
from samples_for_tests import sample_of

from agentrl.errors import InferenceError
from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded_sampling import (
    SampleRequest,
    require_exact_cache,
    sample,
    share_weights,
)
from agentrl.model.load import load_model
from agentrl.model.logprobs import decoder_of, recomputed_logprobs, sample_logprobs
from agentrl.model.rows import pack
from agentrl.model.text.table import DIALECTS
from agentrl.types import Sample

# One of each kind: windows and caps, sinks, chunks, MLA, recurrent layers, dropout, a vision tower.
FAST = ["gemma2", "gpt_oss", "llama4_text", "glm4_moe_lite", "nemotron_h", "seed_oss", "mistral3"]
ALL = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
    for name in [*FAMILIES, *VISION]
]
# Longer than the windows, chunks and blocks of the tiny models; one of a single token.
LENGTHS = (13, 3, 9, 1, 7)
MAX_TOKENS = 128
"""No row gets to where a published model's scale or choice of keys begins."""


@dataclass
class Reference:
    logprobs: torch.Tensor
    gradients: dict[str, torch.Tensor]


def make_samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [sample_of(rng.integers(3, 128, length), np.arange(length) > 0) for length in LENGTHS]


def gradients_of(model, logprobs) -> dict[str, torch.Tensor]:
    """Returns the gradients of a sum in which each token has its own weight."""
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    (logprobs * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def reference_of(model, samples) -> Reference:
    implementation = decoder_of(model).config._attn_implementation
    model.set_attn_implementation("eager")
    parts = []
    for sample_ in samples:
        ids = torch.from_numpy(sample_.token_ids.astype(np.int64))[None]
        table = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        parts.append(table.gather(1, ids[0, 1:, None]).squeeze(1))
    logprobs = torch.cat(parts)
    gradients = gradients_of(model, logprobs)
    model.set_attn_implementation(implementation)
    return Reference(logprobs.detach(), gradients)


@pytest.mark.parametrize("model_type", ALL)
def test_packed_samples_are_exact(model_type, tmp_path):
    """Log-probs within 2e-5; gradients within 1e-4 of their tensor's norm (of a thousandth of the
    largest norm, where that is more: some are 0 but for rounding). Then a round of sampling."""
    model = load_model(save_tiny_model(tmp_path, model_type), dtype=torch.float32, device="cpu")
    twin = share_weights(model)  # before a family's modules hold states with gradients
    samples = make_samples()
    expected = reference_of(model, samples)
    logprobs, _ = sample_logprobs(model, pack(samples, range(len(samples))), temperature=1.0)
    assert (logprobs - expected.logprobs).abs().max() < 2e-5
    assert logprobs.std() > 0.1  # the weights matter
    gradients = gradients_of(model, logprobs)
    assert gradients.keys() == expected.gradients.keys()
    largest = max(gradient.norm() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        allowed = 1e-4 * max(gradient.norm(), 1e-3 * largest)
        assert (gradients[name] - gradient).norm() <= allowed, name

    assert row_of(model_type, rows_of(model)) in PAGE.read_text().splitlines()
    if model_type in VISION:
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert any("vision" in name or "visual" in name for name in frozen)

    if model_type in NOT_SAMPLED:
        with pytest.raises(InferenceError, match="cannot be sampled from in this process"):
            require_exact_cache(twin)
        return
    require_exact_cache(twin, MAX_TOKENS)
    requests = [
        SampleRequest(str(prompt), prompt, SamplingParams(max_tokens=7, temperature=1.0))
        for prompt in ([5, 9, 17, 33, 60, 61, 62], [88, 90])
    ]
    for request, turn in zip(requests, sample(twin, requests, seed=1), strict=True):
        ours = recomputed_logprobs(model, request.prompt_ids, turn.token_ids, 1.0)
        assert turn.logprobs == pytest.approx(ours, abs=2e-4)


@pytest.mark.slow
def test_the_table_of_all_families_runs_on_a_handful():
    command = [sys.executable, PAGE.parents[1] / "benchmarks" / "model_families.py"]
    chosen = ["phi3", "llama4_text", "mamba", "recurrent_gemma", "deepseek_v4", "xlnet"]
    ran = subprocess.run([*command, *chosen], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "families: {'exact': 5, 'refused': 1}" in ran.stdout


def test_the_page_names_dialects_that_there_are():
    types = {model_type for types in SPOKEN.values() for model_type in types.split()}
    of_no_family_here = {"text", "kimi_k2", "kimi_k3", "deepseek_v4"}
    of_no_family_here |= {"minicpm5", "minimax_m3", "step3", "xlam"}
    assert DIALECTS.keys() - SPOKEN.keys() == of_no_family_here
    assert types <= {*FAMILIES, *VISION} and SPOKEN.keys() <= DIALECTS.keys()


def test_the_page_lists_every_family():
    of_families = PAGE.read_text().partition("| `model_type`")[2]
    listed = {line.split("`")[1] for line in of_families.splitlines() if line[:3] == "| `"}
    assert listed == {*FAMILIES, *VISION}
    assert set(NAMED) <= listed and len(listed) > 40


@pytest.mark.slow
def test_the_page_is_as_its_writer_would_write_it():
    assert PAGE.read_text() == page()
