"""The embedded engine's cache and attention compute what transformers' own do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded_sampling import SampleRequest, sample, share_weights
from agentrl.model import cache as embedded_cache
from agentrl.model.cache import grouped_attention, make_cache

CONFIG = LlamaConfig(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=50,
)


@settings(max_examples=50)
@given(
    st.lists(
        st.one_of(st.integers(1, 40), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
        min_size=1,
        max_size=12,
    )
)
def test_the_cache_holds_what_transformers_holds(steps):
    """Numbers append so many tokens; lists keep those rows, repeated and reordered as they say."""
    ours, theirs = make_cache(CONFIG), DynamicCache(config=CONFIG)
    rows = 3
    for number, step in enumerate(steps):
        if isinstance(step, list):
            kept = torch.tensor([row % rows for row in step])
            if ours.get_seq_length():
                ours.reorder_cache(kept)
                theirs.reorder_cache(kept)
                rows = len(kept)
            continue
        new = torch.arange(rows * 2 * step * 8.0).reshape(rows, 2, step, 8) + 1000 * number
        got, expected = ours.update(new, -new, 0), theirs.update(new, -new, 0)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_heads_of_a_group_attend_as_with_copied_keys(num_new, masked):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    query = torch.randn(4, 6, num_new, 8)
    key, value = torch.randn(4, 2, 17, 8), torch.randn(4, 2, 17, 8)
    mask = torch.ones(4, 1, num_new, 17, dtype=torch.bool) if masked else None
    if mask is not None:
        for row in range(4):
            mask[row, ..., :row] = False  # padding on the left
    given = {"scaling": 0.3, "is_causal": False}
    got, _ = grouped_attention(module, query, key, value, mask, **given)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, **given)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_sampling_attends_so_and_nothing_else_does(monkeypatch):
    asked = []

    def counted(module, query, *args, **kwargs):
        asked.append(query.shape[2])
        return grouped_attention(module, query, *args, **kwargs)

    monkeypatch.setattr(embedded_cache, "grouped_attention", counted)
    model = LlamaForCausalLM(CONFIG)
    turns = sample(share_weights(model), [SampleRequest("a", [1, 2, 3], SamplingParams(4))], seed=0)
    assert asked == [3, 3, 1, 1, 1, 1, 1, 1]  # two layers: the prompt, then each new token
    model(torch.tensor([turns[0].token_ids]))
    assert len(asked) == 8
