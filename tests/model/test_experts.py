"""A grouped product of all experts is used where it computes what a loop over them does."""

import logging

import pytest
import torch
from families import save_tiny_model, tiny_model
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from agentrl.model.load import load_model


def wrong(self, hidden_states, top_k_index, top_k_weights):
    return torch.zeros_like(hidden_states)


def unsupported(self, hidden_states, top_k_index, top_k_weights):
    raise RuntimeError("grouped_mm: no kernel for this device")


def load(path):
    return load_model(str(path), dtype=torch.float32, device="cpu")


def test_the_grouped_product_is_used(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        model = load(save_tiny_model(tmp_path, "qwen3_moe"))
    assert model.config._experts_implementation == "grouped_mm"
    assert not [each for each in caplog.records if "expert" in each.message]


@pytest.mark.parametrize("kernel", [wrong, unsupported])
def test_a_kernel_that_is_not_exact_is_replaced_by_the_loop(kernel, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", kernel)
    with caplog.at_level(logging.WARNING):
        model = load(save_tiny_model(tmp_path, "qwen3_moe"))
    assert model.config._experts_implementation == "eager"
    assert len([each for each in caplog.records if "expert" in each.message]) == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "jamba"])
def test_its_gradients_are_those_of_the_loop(family):
    model, gradients = tiny_model(family), []
    for implementation in ("eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        logits = model(torch.arange(5, 45)[None], use_cache=False).logits
        logits.log_softmax(-1)[..., 3].sum().backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    for loop, grouped in zip(*gradients, strict=True):
        assert (loop - grouped).abs().max() < 1e-5 * loop.abs().max()
