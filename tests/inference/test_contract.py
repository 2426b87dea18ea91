"""Every inference engine keeps the same contract, asserted over real sampled tokens."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import pytest
import torch
from contract_server import (
    CONTEXT,
    VOCAB_SIZE,
    ContractServer,
    make_model,
    reference_logprobs,
    running,
)

from agentrl.errors import InferenceError
from agentrl.inference.base import InferenceEngine, SamplingParams
from agentrl.inference.embedded import EmbeddedEngine
from agentrl.inference.vllm import VLLMEngine

PROMPT = [3, 14, 15, 9, 26]


@contextlib.asynccontextmanager
async def engine_of(kind: str, model, stop_token_ids=()) -> AsyncIterator[InferenceEngine]:
    async with contextlib.AsyncExitStack() as stack:
        engine: InferenceEngine
        if kind == "embedded":
            engine = EmbeddedEngine(model, seed=5, stop_token_ids=stop_token_ids)
        else:
            server = ContractServer(model, scale_out=kind == "vllm generate")
            await stack.enter_async_context(running(server))
            engine = VLLMEngine([server.url], seed=5, stop_token_ids=stop_token_ids)
        stack.push_async_callback(engine.aclose)
        yield engine


pytestmark = pytest.mark.parametrize("kind", ["embedded", "vllm generate", "vllm completions"])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_a_plain_forward(kind, temperature):
    model = make_model()
    prompts = [PROMPT[:n] for n in (1, 2, 5)] + [list(range(40))]
    sampling = SamplingParams(max_tokens=12, temperature=temperature)
    async with engine_of(kind, model) as engine:
        calls = [engine.generate(f"g-m{i}", p, sampling) for i, p in enumerate(prompts)]
        generations = await asyncio.gather(*calls)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert len(generation.token_ids) == 12
        expected = reference_logprobs(model, prompt, generation.token_ids, temperature or 1.0)
        assert generation.logprobs == pytest.approx(expected, abs=1e-5)


async def test_temperature_zero_takes_the_likeliest_token(kind):
    model = make_model()
    async with engine_of(kind, model) as engine:
        generation = await engine.generate("g-m0", PROMPT, SamplingParams(8, temperature=0.0))
    tokens = generation.token_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


async def test_stop_tokens_end_a_turn_and_stay_in_it(kind):
    sampling = SamplingParams(max_tokens=60, stop_token_ids=(11, 12))
    async with engine_of(kind, make_model(), stop_token_ids=(7,)) as engine:
        calls = [engine.generate(f"g-m{i}", PROMPT, sampling) for i in range(16)]
        generations = await asyncio.gather(*calls)
    stopped = [g for g in generations if g.finish_reason == "stop"]
    assert len(stopped) >= 8  # three of 48 symbols within 60 tokens
    last = {generation.token_ids[-1] for generation in stopped}
    assert 7 in last and last & {11, 12}  # the engine's own and the request's
    for generation in stopped:
        assert generation.token_ids[-1] in (7, 11, 12)
    for generation in generations:
        assert not set(generation.token_ids[:-1]) & {7, 11, 12}
        if generation.finish_reason == "length":
            assert len(generation.token_ids) == 60


async def test_every_token_carries_the_policy_version(kind):
    async with engine_of(kind, make_model()) as engine:
        first = await engine.generate("a-m0", PROMPT, SamplingParams(3))
        engine.policy_version = 9
        second = await engine.generate("b-m0", PROMPT, SamplingParams(4))
    assert (first.versions, second.versions) == ([0] * 3, [9] * 4)


async def test_requests_with_different_parameters_share_the_engine(kind):
    model, requests = make_model(), [(PROMPT, 0.5, 1), (PROMPT, 2.0, 20), (PROMPT[:2], 0.0, 7)]
    async with engine_of(kind, model) as engine:
        calls = [
            engine.generate(f"a-m{number}", prompt, SamplingParams(length, temperature=temperature))
            for number, (prompt, temperature, length) in enumerate(requests)
        ]
        generations = await asyncio.gather(*calls)
    for generation, (prompt, temperature, length) in zip(generations, requests, strict=True):
        assert len(generation.token_ids) == length
        expected = reference_logprobs(model, prompt, generation.token_ids, temperature or 1.0)
        assert generation.logprobs == pytest.approx(expected, abs=1e-5)


async def test_the_same_seed_and_id_sample_the_same_tokens_and_others_do_not(kind):
    async with engine_of(kind, make_model()) as engine:
        sampling = SamplingParams(16)
        ids = ["a-m0", "a-m1", "a-m0"]
        first, other, again = [(await engine.generate(i, PROMPT, sampling)).token_ids for i in ids]
    assert first == again
    assert first != other


async def test_the_sampled_distribution_is_the_models(kind):
    """First tokens against the model's probabilities: chi-square over the likely symbols."""
    model = make_model()
    count = 2000 if kind == "embedded" else 250
    async with engine_of(kind, model) as engine:
        calls = [engine.generate(f"g-m{i}", PROMPT, SamplingParams(1)) for i in range(count)]
        drawn = [g.token_ids[0] for g in (await asyncio.gather(*calls))]
    expected = [
        math.exp(reference_logprobs(model, PROMPT, [t])[0]) * count for t in range(VOCAB_SIZE)
    ]
    likely = [t for t in range(VOCAB_SIZE) if expected[t] >= 5]
    rest = [t for t in range(VOCAB_SIZE) if expected[t] < 5]
    bins = [(drawn.count(t), expected[t]) for t in likely]
    bins.append((sum(drawn.count(t) for t in rest), sum(expected[t] for t in rest)))
    chi_square = sum((seen - mean) ** 2 / mean for seen, mean in bins)
    freedom = len(bins) - 1
    assert freedom >= 5
    # Mean `freedom`, variance twice that; five deviations for a test with fixed seeds.
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


async def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(kind):
    async with engine_of(kind, make_model()) as engine:
        with pytest.raises(InferenceError, match=f"{CONTEXT + 4} prompt tokens.*10.*{CONTEXT}"):
            await engine.generate("a-m0", [1] * (CONTEXT + 4), SamplingParams(10))


async def test_a_cancelled_call_does_not_disturb_the_others(kind):
    async with engine_of(kind, make_model()) as engine:
        sampling = SamplingParams(40)
        doomed = asyncio.create_task(engine.generate("a-m0", PROMPT, sampling))
        kept = asyncio.create_task(engine.generate("a-m1", PROMPT, sampling))
        await asyncio.sleep(0.01)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        generation = await asyncio.wait_for(kept, 10)
        after = await asyncio.wait_for(engine.generate("a-m0", PROMPT, sampling), 10)
    assert len(generation.token_ids) == len(after.token_ids) == 40
