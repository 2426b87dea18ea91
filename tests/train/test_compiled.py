"""Compiled layers compute what plain ones do, rows of any length in one form, packed rows alone."""

import shutil

import pytest
import torch
from families import save_tiny_model
from test_families import gradients_of, make_samples
from test_loop import require_same, run, tensors_of
from test_model import qwen3, save
from test_prefixes import assert_same, large_groups, make_model, step
from test_ranks_runs import logprob_free, played, train
from torch._inductor import config as inductor

from agentrl.config import LoraSection
from agentrl.errors import ConfigError
from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded_sampling import SampleRequest, sample, share_weights
from agentrl.model import compile as compiled
from agentrl.model.attention import SHARED_ATTENTION_NAME
from agentrl.model.compile import compile_layers
from agentrl.model.load import load_model, set_gradient_checkpointing
from agentrl.model.logprobs import decoder_of, sample_logprobs
from agentrl.model.lora import add_adapter
from agentrl.model.rows import pack
from agentrl.view.tracking import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    compiled._compiled.cache_clear()
    torch.compiler.reset()


def compile_policy(model) -> None:
    compile_layers(
        model, decoder_of(model), lambda micro: sample_logprobs(model, micro, temperature=1.0)[0]
    )


CASES = ["plain", "recomputed", "adapter"]


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance", "case"),
    [
        # Compiling takes half a minute for each, so bfloat16 is tried with the plain case alone.
        *(("cpu", torch.float32, 5e-6, case) for case in CASES),
        ("cpu", torch.bfloat16, 5e-2, "plain"),
        *(
            pytest.param("cuda", dtype, tolerance, case, marks=pytest.mark.gpu)
            for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2))
            for case in CASES
        ),
    ],
)
def test_the_gradient_is_that_of_plain_layers_whatever_the_rows(device, dtype, tolerance, case):
    model, samples = make_model(dtype, device), large_groups()
    model.set_attn_implementation(SHARED_ATTENTION_NAME)
    if case == "adapter":
        add_adapter(model, LoraSection(rank=4), path="")
    expected = [step(model, samples, 1000, share=share) for share in (True, False)]
    model.zero_grad()
    set_gradient_checkpointing(model, case == "recomputed")
    compile_policy(model)
    assert_same(step(model, samples, 1000, share=True), expected[0], tolerance)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(step(model, samples, 400, share=True), expected[0], tolerance)
        assert_same(step(model, samples, 700, share=False), expected[1], tolerance)


@pytest.mark.parametrize(
    ("family", "changes"),
    # A scale by position in the row lets segments not share one.
    [("gpt_oss", {}), ("llama4_text", {"attn_temperature_tuning": False})],
)
def test_windows_sinks_chunks_and_experts(family, changes, tmp_path):
    path = save_tiny_model(tmp_path, family, **changes)
    model = load_model(path, dtype=torch.float32, device="cpu")
    micro = pack(make_samples(), range(5))
    expected = gradients_of(model, sample_logprobs(model, micro, temperature=1.0)[0])
    compile_policy(model)
    found = gradients_of(model, sample_logprobs(model, micro, temperature=1.0)[0])
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_whoever_samples_from_the_weights_gets_plain_layers(tmp_path):
    model = load_model(save(qwen3(), tmp_path), dtype=torch.float32, device="cpu")
    requests = [SampleRequest("a", [5, 9, 17], SamplingParams(max_tokens=12, temperature=1.0))]
    expected = sample(share_weights(model), requests, seed=3)
    compile_policy(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert sample(share_weights(model), requests, seed=3) == expected


def test_what_cannot_be_compiled_is_refused_with_the_remedy(tmp_path):
    path = save_tiny_model(tmp_path / "recurrent", "nemotron_h")
    model = load_model(path, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match=r"one segment at a time.*set model.compile = false"):
        compile_policy(model)

    model = load_model(save(qwen3(), tmp_path / "model"), dtype=torch.float32, device="cpu")
    without = {"cpp.cxx": (None, "/no/such/compiler"), "force_disable_caches": True}
    with (
        inductor.patch(without),
        pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*set model.compile = false"),
    ):
        compile_policy(model)


class _NoGradient(torch.autograd.Function):
    """As it is, with a gradient that is not a number."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * float("nan")


@pytest.mark.parametrize("wrong", [lambda hidden: 1.5 * hidden, _NoGradient.apply])
def test_layers_that_compute_something_else_are_refused(tmp_path, monkeypatch, wrong):
    model = load_model(save(qwen3(), tmp_path), dtype=torch.float32, device="cpu")

    def compile(forward, **options):
        return lambda layer, *args, **kwargs: wrong(forward(layer, *args, **kwargs))

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(ConfigError, match="differs from itself by"):
        compile_policy(model)


def test_a_run_resumes_bit_for_bit_and_learns_what_a_plain_one_does(tmp_path):
    settings = ["--objective.preset", "ppo", "--train.warmup_steps", "0"]
    plain = run(tmp_path / "plain", *settings)
    settings += ["--model.compile", "true"]
    whole = run(tmp_path / "whole", *settings)
    parted = run(tmp_path / "parted", *settings, "--run.num_steps", "2")
    compiled._compiled.cache_clear()
    torch.compiler.reset()
    run(parted, *settings, "--run.resume")
    require_same(parted, whole, 3)
    assert {"critic.safetensors", "critic_optimizer.safetensors"} < tensors_of(whole, 3).keys()
    assert played(whole) == played(plain)
    for mine, its in zip(*(logprob_free(read_metrics(d)) for d in (whole, plain)), strict=True):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)


def test_ranks_compile_their_shards(tmp_path):
    steps = ["--run.num_steps", "3", "--model.gradient_checkpointing", "true"]
    one = train(1, tmp_path / "one", *steps)
    two = train(2, tmp_path / "two", *steps, "--model.compile", "true")
    assert played(two) == played(one)
    for mine, its in zip(*(logprob_free(read_metrics(d)) for d in (two, one)), strict=True):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)
