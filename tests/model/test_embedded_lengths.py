"""Effects of a row's length are fixed for a run, or found by the probes at its start."""

import logging

import numpy as np
import pytest
import torch
from families import save_tiny_model, tiny_model

from agentrl.errors import ConfigError, InferenceError
from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded_sampling import (
    SampleRequest,
    require_exact_cache,
    sample,
    share_weights,
)
from agentrl.model.lengths import fix_angles, within_reach
from agentrl.model.load import load_model
from agentrl.model.logprobs import (
    _bare_sample,
    packing_of,
    recomputed_logprobs,
    require_exact,
    sample_logprobs,
)
from agentrl.model.rows import pack

ORIGINAL = 40
LONGROPE = {
    "original_max_position_embeddings": ORIGINAL,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}
DYNAMIC = {
    "max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
TEMPERATURE = {"attn_temperature_tuning": True, "floor_scale": ORIGINAL, "attn_scale": 0.5}


def row(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(3, 128, length).astype(np.int32)


def packed_and_alone(model, lengths) -> tuple[torch.Tensor, torch.Tensor]:
    samples = [_bare_sample(row(length)) for length in lengths]
    with torch.no_grad():
        whole, _ = sample_logprobs(model, pack(samples, range(len(samples))), temperature=1.0)
        alone = [sample_logprobs(model, pack([each], [0]), temperature=1.0)[0] for each in samples]
    return whole, torch.cat(alone)


def own_forward(model, ids: np.ndarray) -> torch.Tensor:
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        table = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    return table.gather(1, tokens[0, 1:, None])[:, 0]


@pytest.mark.parametrize("max_tokens", [ORIGINAL, 100])
def test_a_row_of_longrope_has_the_angles_of_the_run_whatever_it_is_packed_with(
    tmp_path, max_tokens
):
    path = save_tiny_model(tmp_path, "phi3", sliding_window=None, **LONGROPE)
    model = load_model(path, dtype=torch.float32, device="cpu", max_tokens=max_tokens)
    lengths = [max_tokens, 12]
    whole, alone = packed_and_alone(model, lengths)
    assert packing_of(model) > 0
    assert (whole - alone).abs().max() < 2e-5
    # The longest row is what the family itself makes of it; another factor would differ.
    family = tiny_model("phi3", sliding_window=None, **LONGROPE)
    longest = own_forward(family, row(max_tokens))
    assert (whole[: max_tokens - 1] - longest).abs().max() < 2e-5
    short = own_forward(family, row(12))
    assert ((whole[max_tokens - 1 :] - short).abs().max() < 2e-5) == (max_tokens == ORIGINAL)


def test_a_sampled_row_that_crosses_the_original_context_is_the_trainers():
    model = tiny_model("phi3", sliding_window=None, **LONGROPE)
    with pytest.raises(InferenceError, match="differ by"):
        require_exact_cache(share_weights(model))
    fix_angles(model, 100)
    require_exact(model)
    twin = share_weights(model)
    require_exact_cache(twin)
    request = SampleRequest("a", row(ORIGINAL - 4).tolist(), SamplingParams(12, 1.0))
    turn = sample(twin, [request], seed=0)[0]
    ours = recomputed_logprobs(model, request.prompt_ids, turn.token_ids, 1.0)
    assert turn.logprobs == pytest.approx(ours, abs=2e-5)


def test_a_family_whose_angles_follow_the_longest_segment_is_not_packed():
    model = tiny_model("phi3", sliding_window=None, **LONGROPE)  # as transformers has it
    require_exact(model)
    assert packing_of(model) == 0


def test_angles_of_a_dynamic_length_are_refused_beyond_the_original_context():
    with pytest.raises(ConfigError, match=rf"'dynamic'.*{ORIGINAL} tokens.*may have 41"):
        fix_angles(tiny_model("llama", **DYNAMIC), ORIGINAL + 1)
    for max_tokens in (None, ORIGINAL):
        model = tiny_model("llama", **DYNAMIC)
        fix_angles(model, max_tokens)
        require_exact(model)
        whole, alone = packed_and_alone(model, [ORIGINAL, 9])
        assert (whole - alone).abs().max() < 2e-5
        with pytest.raises(ValueError, match="a row of 41 tokens is longer than the 40"):
            own_forward(model, row(ORIGINAL + 1))


def test_a_scale_that_begins_at_a_position_is_probed_there():
    model = tiny_model("llama4_text", **TEMPERATURE)
    require_exact(model)
    whole, alone = packed_and_alone(model, [ORIGINAL + 5, 30])
    assert (whole - alone).abs().max() < 2e-5
    require_exact_cache(share_weights(model), ORIGINAL // 2)  # no row gets there
    with pytest.raises(InferenceError, match="differ by"):
        require_exact_cache(share_weights(model), ORIGINAL + 1)


def test_a_scale_shows_in_bfloat16():
    model = tiny_model("llama4_text").bfloat16()
    require_exact(model)
    assert packing_of(model) == 0
    with pytest.raises(InferenceError, match="differ by"):
        require_exact_cache(share_weights(model))


def test_thresholds_are_put_back():
    model = tiny_model("llama4_text", **TEMPERATURE)
    before = model.config.to_dict()
    with within_reach(model):
        assert {model.config.floor_scale, model.model.layers[1].self_attn.floor_scale} == {5}
    assert model.config.to_dict() == before
    assert model.model.layers[1].self_attn.floor_scale == ORIGINAL
    assert model.model.layers[1].self_attn.attn_scale == before["attn_scale"]


@pytest.mark.parametrize("model_type", ["mamba", "recurrent_gemma"])
def test_a_family_that_forgets_or_reads_padding_is_not_sampled_from(model_type):
    with pytest.raises(InferenceError, match="cannot be sampled from in this process"):
        require_exact_cache(share_weights(tiny_model(model_type)))


def test_a_cache_of_another_name_is_used():
    model = tiny_model("mamba2")
    require_exact_cache(share_weights(model))
    request = SampleRequest("a", row(9).tolist(), SamplingParams(6, 1.0))
    turn = sample(share_weights(model), [request], seed=0)[0]
    whole = own_forward(model, np.array(request.prompt_ids + turn.token_ids))
    assert turn.logprobs == pytest.approx(whole[8:].tolist(), abs=2e-5)


def test_rows_without_shared_prefixes_are_said(caplog):
    with caplog.at_level(logging.WARNING):
        require_exact(tiny_model("gemma2"))
    assert "Gemma2ForCausalLM computes a prefix that samples of a group share once for each" in (
        caplog.text
    )
