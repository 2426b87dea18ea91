import pytest
import torch
from transformers import (
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    T5Config,
)

from agentrl.errors import ConfigError
from agentrl.train.attention import (
    ATTENTION_NAME,
    packed_attention,
    packed_kwargs,
    require_full_attention,
)

SHAPE = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    max_position_embeddings=64,
)
LENGTHS = [7, 1, 12, 3]


def make_model(family: str, num_key_value_heads: int = 2):
    torch.manual_seed(0)
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    config = config_class(**SHAPE, num_key_value_heads=num_key_value_heads)
    return model_class(config)


def packed_row(lengths=LENGTHS):
    ids = torch.arange(sum(lengths))[None] * 31 % 50
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return ids, positions


def gradients_of(model, hidden):
    torch.manual_seed(1)
    (hidden * torch.randn_like(hidden)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("plain", ["sdpa", "eager"])
def test_equal_to_one_sequence_at_a_time(family, num_key_value_heads, plain):
    model = make_model(family, num_key_value_heads)
    ids, positions = packed_row()
    model.set_attn_implementation(plain)
    alone = torch.cat(
        [model.model(input_ids=part).last_hidden_state for part in ids.split(LENGTHS, dim=1)], dim=1
    )
    expected = gradients_of(model, alone)

    model.set_attn_implementation(ATTENTION_NAME)
    packed = model.model(
        input_ids=ids, position_ids=positions, use_cache=False, **packed_kwargs(LENGTHS)
    ).last_hidden_state
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    ours = gradients_of(model, packed)
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * float(scale))


def test_no_tensor_grows_with_the_square_of_the_row():
    lengths = [40] * 20
    model = make_model("qwen3")
    model.set_attn_implementation(ATTENTION_NAME)
    ids, positions = packed_row(lengths)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            outputs = result if isinstance(result, tuple | list) else (result,)
            sizes = [out.numel() for out in outputs if isinstance(out, torch.Tensor)]
            largest = max([largest, *sizes])
            return result

    with Watch():
        model.model(
            input_ids=ids, position_ids=positions, use_cache=False, **packed_kwargs(lengths)
        ).last_hidden_state.sum().backward()
    assert largest <= sum(lengths) * SHAPE["intermediate_size"]
    assert largest < sum(lengths) ** 2


def test_generation_still_works_under_the_same_name():
    model = make_model("qwen3").eval()
    ids = torch.tensor([[0, 0, 5, 9], [3, 8, 1, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    texts = []
    for name in ("sdpa", ATTENTION_NAME):
        model.set_attn_implementation(name)
        texts.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        )
    assert torch.equal(*texts)


def test_a_decoder_that_drops_the_segments_fails_loudly():
    model = make_model("qwen3")
    model.set_attn_implementation(ATTENTION_NAME)
    ids, positions = packed_row()
    kwargs = packed_kwargs(LENGTHS)
    del kwargs["segment_lengths"]
    with pytest.raises(RuntimeError):
        model.model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs)


def test_segments_that_do_not_cover_the_row_are_refused():
    query = torch.randn(1, 2, 10, 8)
    with pytest.raises(RuntimeError, match="split"):
        packed_attention(torch.nn.Module(), query, query, query, None, segment_lengths=[4, 5])


@pytest.mark.parametrize(
    "extra", [{"sliding_window": 4}, {"softcap": 30.0}, {"s_aux": torch.ones(2)}, {"dropout": 0.1}]
)
def test_layers_that_want_more_than_causal_attention_are_refused(extra):
    query = torch.randn(1, 2, 9, 8)
    with pytest.raises(ConfigError, match=next(iter(extra))):
        packed_attention(
            torch.nn.Module(), query, query, query, None, segment_lengths=[4, 5], **extra
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        (Qwen3NextConfig(), "linear_attention"),
        (MistralConfig(sliding_window=4096), "sliding"),
        (T5Config(), "encoder-decoder"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_layer_types_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        require_full_attention(config)


@pytest.mark.parametrize(
    "config", [Qwen3Config(), Qwen2Config(), LlamaConfig(), MistralConfig(sliding_window=None)]
)
def test_full_attention_is_accepted(config):
    require_full_attention(config)
