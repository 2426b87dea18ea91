"""Rows that share prefixes have the loss and gradient that they have alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples_for_tests import VOCAB_SIZE, forked_samples, sample_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.model.attention import ATTENTION_NAME, SHARED_ATTENTION_NAME
from agentrl.model.load import set_gradient_checkpointing
from agentrl.model.logprobs import sample_logprobs
from agentrl.model.rows import pack
from agentrl.train.update import own_share
from agentrl.types import Sample


def make_model(dtype: torch.dtype, device: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        # Larger than the default, so that attention and softmax are far from uniform.
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).to(device, dtype)


def step(model, samples, token_budget, *, share):
    """Loss, gradient and tokens of one pass over the samples, every token with a weight of its
    own."""
    model.set_attn_implementation(SHARED_ATTENTION_NAME if share else ATTENTION_NAME)
    model.zero_grad()
    total = num_tokens = 0.0
    for rows, _ in own_share(samples, range(len(samples)), token_budget, share=share):
        micro = pack(samples, rows, share=share)
        num_tokens += micro.num_tokens
        logprobs, entropy = sample_logprobs(model, micro, temperature=0.9, with_entropy=True)
        weights = np.sin(7.0 * micro.rows[micro.row_of] + 3.0 * micro.column_of)
        weights = torch.from_numpy(weights).to(logprobs)
        loss = (weights * logprobs).sum() + 0.1 * entropy.sum()
        loss.backward()
        total += float(loss.detach())
    gradient = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return total, gradient, num_tokens


def assert_same(one, other, tolerance):
    assert one[0] == pytest.approx(other[0], rel=tolerance, abs=tolerance)
    for a, b in zip(one[1], other[1], strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@settings(max_examples=25)
@given(forked_samples(), st.integers(20, 400), st.integers(20, 400))
def test_the_gradient_is_that_of_rows_by_themselves(samples, budget, other):
    # Its norms round to float32 even so.
    model = make_model(torch.float64, "cpu")
    if not any(sample.num_trained for sample in samples):
        return
    alone = step(model, samples, budget, share=False)
    assert_same(step(model, samples, other, share=True), alone, 1e-6)


def large_groups() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for group in range(4):
        prompt = rng.integers(0, VOCAB_SIZE, 80)
        history = np.concatenate([prompt, rng.integers(0, VOCAB_SIZE, 60)])
        for member in range(6):
            own = rng.integers(0, VOCAB_SIZE, int(rng.integers(10, 120)))
            row = np.concatenate([prompt if member < 4 else history, own])
            mask = np.arange(len(row)) >= len(row) - len(own)
            samples.append(sample_of(row, mask, group_id=str(group)))
    return samples


ON_CUDA = pytest.mark.gpu


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 2e-6),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.float32, 1e-4, marks=ON_CUDA),  # TF32 is off by default
        pytest.param("cuda", torch.bfloat16, 5e-2, marks=ON_CUDA),
    ],
)
def test_a_batch_of_groups_on_each_device(device, dtype, tolerance, checkpointing):
    model, samples = make_model(dtype, device), large_groups()
    alone = step(model, samples, 1000, share=False)
    set_gradient_checkpointing(model, checkpointing)
    shared = step(model, samples, 1000, share=True)
    assert shared[2] < 0.7 * alone[2]
    assert_same(shared, alone, tolerance)
