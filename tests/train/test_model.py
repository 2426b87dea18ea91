import json

import numpy as np
import pytest
import torch
from families import save_tiny_model, tiny_model
from huggingface_hub import constants as hub
from safetensors.torch import load_file, save_file
from samples_for_tests import sample_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers_for_tests import CHATML
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import ConfigError
from agentrl.model.attention import SHARED_ATTENTION_NAME
from agentrl.model.load import freeze_named, load_model, load_tokenizer, set_gradient_checkpointing
from agentrl.model.logprobs import (
    backbone_hidden,
    logit_shape,
    packing_of,
    require_exact,
    sample_logprobs,
    trained_matrix,
)
from agentrl.model.rows import pack
from agentrl.model.text.template import RAW
from agentrl.types import Sample

SHAPE = dict(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def qwen3(**changes) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 8, **changes}))


def save_tokenizer(
    directory, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}"
):
    words = {f"w{index}": index for index in range(60)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")))
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)


def save(model, directory, **tokenizer_options) -> str:
    model.save_pretrained(directory)
    save_tokenizer(directory, **tokenizer_options)
    return str(directory)


def make_samples(lengths=(9, 4, 14), seed=0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        mask = (rng.random(length) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        samples.append(sample_of(rng.integers(0, 60, length), mask))
    return samples


def plain_logprobs(model, samples, temperature=1.0):
    """Trained tokens' log-probs and entropy by transformers' forward on each sample alone."""
    logprobs, entropies = [], []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        table = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
        keep = torch.from_numpy(sample.loss_mask[1:] > 0)
        logprobs.append(table.gather(1, ids[0, 1:, None]).squeeze(1)[keep])
        entropies.append(-(table.exp() * table).sum(-1)[keep])
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize(
    ("model_type", "temperature"),
    [("qwen3", 1.0), ("qwen3", 0.6), ("cohere", 0.8), ("granite", 0.8)],  # two scale their logits
)
def test_logprobs_and_entropy_equal_a_plain_forward(tmp_path, model_type, temperature):
    path = save_tiny_model(tmp_path, model_type)
    model = load_model(path, dtype=torch.float32, device="cpu")
    samples = make_samples()
    logprobs, entropy = sample_logprobs(
        model, pack(samples, [2, 0, 1]), temperature=temperature, with_entropy=True
    )
    expected = plain_logprobs(model, [samples[row] for row in (2, 0, 1)], temperature)
    torch.testing.assert_close(logprobs, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-5, atol=1e-5)
    assert logprobs.requires_grad


def test_loaded_model_keeps_the_weights_and_the_type(tmp_path):
    original = qwen3()
    model = load_model(save(original, tmp_path), dtype=torch.bfloat16, device="cpu")
    assert model.dtype == torch.bfloat16
    weights = dict(model.named_parameters())
    for name, parameter in original.named_parameters():
        assert torch.equal(weights[name], parameter.bfloat16())


def test_a_head_that_does_more_than_a_product_is_found_out(tmp_path):
    model = load_model(save(qwen3(), tmp_path), dtype=torch.float32, device="cpu")
    forward = model.forward

    def capped(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 0.2 * torch.tanh(output.logits / 0.2)
        return output

    model.forward = capped
    with pytest.raises(ConfigError, match="differs from its own forward"):
        require_exact(model)


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path):
    model = load_model(save(qwen3(), tmp_path), dtype=torch.float32, device="cpu")
    micro = pack(make_samples(), [0, 1, 2])
    gradients, saved = [], []
    for layers in (False, True, 0.5, False):
        set_gradient_checkpointing(model, layers)
        num_saved = 0

        def count(tensor):
            nonlocal num_saved
            num_saved += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            logprobs, _ = sample_logprobs(model, micro, temperature=1.0)
        logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        saved.append(num_saved)
        model.zero_grad()
    assert saved[1] < saved[0] / 2 and saved[1] < saved[2] < saved[0]
    assert saved[3] == saved[0]
    for plain, *recomputed in zip(*gradients, strict=True):
        for each in recomputed:
            torch.testing.assert_close(each, plain, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_without_trained_tokens_has_zero_gradients(tmp_path):
    model = load_model(save(qwen3(), tmp_path), dtype=torch.float32, device="cpu")
    sample = make_samples([5])[0]
    sample.loss_mask[:] = 0
    logprobs, _ = sample_logprobs(model, pack([sample], [0]), temperature=1.0)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_backbone_hidden_is_after_the_final_norm(tmp_path):
    model = load_model(save(qwen3(), tmp_path), dtype=torch.float32, device="cpu")
    sample = make_samples([9])[0]
    hidden = backbone_hidden(model, pack([sample], [0]))
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    expected = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_trained_matrix_left_aligns_and_carries_gradients():
    samples = make_samples()
    micro = pack(samples, [1, 2])
    values = torch.arange(1.0, micro.num_trained + 1, requires_grad=True)
    matrix = trained_matrix(micro, values)
    counts = [samples[1].num_trained, samples[2].num_trained]
    assert matrix.shape == (2, max(counts))
    flat = iter(range(1, micro.num_trained + 1))
    for row, count in zip(matrix.tolist(), counts, strict=True):
        assert row[:count] == [next(flat) for _ in range(count)]
        assert not any(row[count:])
    (gradient,) = torch.autograd.grad((2 * matrix).sum(), values)
    assert gradient.tolist() == [2.0] * micro.num_trained


@pytest.mark.parametrize("path", ["/no/such/model", "./no/such", "~/no-such-model", "a/b/c"])
def test_a_missing_directory_is_named(path):
    with pytest.raises(ConfigError, match=f"{path} does not exist"):
        load_model(path, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("name", ["no-such-directory", "organisation/model"])
def test_a_name_needs_the_hub_which_is_asked_once(monkeypatch, name):
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=f"model.path = '{name}' is not a directory here.*cannot be"
    ):
        load_model(name, dtype=torch.float32, device="cpu")


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_tokenizer(str(tmp_path))


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    qwen3().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")


def without_a_tensor(weights):
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda weights: weights.unlink(), "cannot be loaded"),
        (lambda weights: weights.write_bytes(weights.read_bytes()[:-100]), "cannot be loaded"),
        (without_a_tensor, r"lack 1 tensors, first model\.layers\.1\.mlp\.up_proj"),
    ],
    ids=["none", "damaged", "lacks a tensor"],
)
def test_weights_that_are_not_whole_are_refused(tmp_path, spoil, says):
    path = save(qwen3(), tmp_path)
    spoil(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=says):
        load_model(path, dtype=torch.float32, device="cpu")


def quantised(method):
    config = {"quant_method": method, "load_in_4bit": True, "bits": 4}
    return {"quantization_config": config}, rf"is quantised \({method}\).*set model\.path"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "nonesuch"}, r"family 'nonesuch'.*set model\.path"),
        *map(quantised, ["fp8", "bitsandbytes", "gptq", "mxfp4"]),
    ],
)
def test_a_checkpoint_that_cannot_be_trained_is_refused_in_one_line(tmp_path, changed, says):
    path = save(qwen3(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ConfigError, match=says) as raised:
        load_model(path, dtype=torch.float32, device="cpu")
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path):
    path = save(qwen3(), tmp_path, chat_template=None)
    with pytest.raises(ConfigError, match=r"no chat template; .*model\.chat_template"):
        load_tokenizer(path)
    load_model(path, dtype=torch.float32, device="cpu")
    assert load_tokenizer(path, "none").chat_template == RAW
    own = tmp_path / "own.jinja"
    own.write_text(CHATML)
    assert load_tokenizer(path, str(own)).chat_template == CHATML
    own.write_text(" ")
    for wrong, said in ((own, "is empty"), (tmp_path / "no.jinja", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            load_tokenizer(path, str(wrong))


def test_dropout_is_switched_off_and_said(tmp_path, caplog):
    model = load_model(
        save(qwen3(attention_dropout=0.1), tmp_path), dtype=torch.float32, device="cpu"
    )
    assert "attention_dropout = 0.1 is set to 0" in caplog.text
    assert model.config.attention_dropout == 0 and not model.training
    samples = make_samples()
    logprobs, _ = sample_logprobs(model, pack(samples, [0, 1, 2]), temperature=1.0)
    torch.testing.assert_close(logprobs, plain_logprobs(model, samples)[0], rtol=1e-5, atol=1e-5)


def test_a_family_that_is_exact_in_no_way_is_refused_with_its_reasons(tmp_path, monkeypatch):
    """A recurrent state that lives in the module carries over from one forward to the next."""
    model = load_model(save(qwen3(), tmp_path), dtype=torch.float32, device="cpu")
    state = torch.zeros(32)

    def remember(module, inputs, output):
        state.add_(output.detach().mean((0, 1)))
        return output + state

    model.model.embed_tokens.register_forward_hook(remember)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM cannot be trained exactly: .*models"):
        require_exact(model)


def test_a_leak_between_segments_costs_the_packed_row(tmp_path, caplog):
    """A convolution over neighbouring tokens, as recurrent layers begin with. In one row the first
    token of the second segment sees the last of the first."""
    model = load_model(save(qwen3(), tmp_path), dtype=torch.float32, device="cpu")
    assert model.config._attn_implementation == SHARED_ATTENTION_NAME

    def mixed(module, inputs, output):
        return output + torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    model.model.layers[0].input_layernorm.register_forward_hook(mixed)
    require_exact(model)
    assert model.config._attn_implementation == "sdpa"
    assert "one segment at a time" in caplog.text and "see the one before" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "changes", "shape"),
    [
        ("qwen3", {}, (1.0, None)),
        ("granite", {"logits_scaling": 8.0}, (0.125, None)),
        ("gemma2", {"final_logit_softcapping": 5.0}, (1.0, 5.0)),
        ("minicpm3", {}, (0.5, None)),
        # What other families multiply by, and this one does not read.
        ("qwen3", {"logit_scale": 3.0, "logits_scaling": 7.0}, (1.0, None)),
    ],
)
def test_what_stands_behind_the_head_is_measured(model_type, changes, shape):
    model = tiny_model(model_type)
    for name, value in changes.items():
        setattr(model.config, name, value)
        setattr(model, name, value)
    factor, cap = logit_shape(model)
    assert (factor, cap) == (pytest.approx(shape[0]), shape[1] and pytest.approx(shape[1]))
    require_exact(model)


def test_parameters_are_frozen_by_name():
    model = tiny_model("qwen3")
    freeze_named(model, ["*.embed_tokens.*", "model.layers.0.*"])
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert "model.embed_tokens.weight" in frozen
    assert all(name.startswith(("model.embed_tokens.", "model.layers.0.")) for name in frozen)
    with pytest.raises(ConfigError, match=r"'layers\.0', which matches no parameter.*layers"):
        freeze_named(model, ["layers.0"])
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        freeze_named(model, ["*"])


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("modernbert-decoder", "changes hidden states before its head"),
        ("bert-generation", "lets a token see later ones"),
        ("xlnet", "lets a token see later ones"),
    ],
)
def test_a_family_that_is_no_causal_decoder_is_refused_in_words(model_type, reason):
    with pytest.raises(ConfigError, match=f"cannot be trained exactly: .*{reason}"):
        require_exact(tiny_model(model_type))


def test_keys_of_several_tokens_cost_the_packed_row(caplog):
    """DeepSeek V4 makes one key of 128 tokens, more than a probe has."""
    model = tiny_model("deepseek_v4")
    require_exact(model)
    assert packing_of(model) == 0
    assert "make one key of several tokens" in caplog.text
