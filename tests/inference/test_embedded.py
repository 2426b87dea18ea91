from __future__ import annotations

import asyncio
import random
import threading

import pytest
import torch
from contract_server import CONTEXT, VOCAB_SIZE, make_model, reference_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import InferenceError
from agentrl.inference.base import Generation, SamplingParams
from agentrl.inference.embedded import EmbeddedEngine
from agentrl.inference.embedded_sampling import SampleRequest, sample, share_weights

SAMPLING = SamplingParams(max_tokens=10)


def prompt_of(episode: int, turn: int) -> list[int]:
    rng = random.Random(f"{episode // 2}/{turn}")  # two episodes share their prompts, as groups do
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]


async def play(engine: EmbeddedEngine, episode: int, num_turns: int, delay_s) -> list[Generation]:
    """An episode of several turns whose environment takes `delay_s()` before each of them."""
    generations = []
    history: list[int] = []
    try:
        for turn in range(num_turns):
            await asyncio.sleep(delay_s())
            history += prompt_of(episode, turn)
            request_id = f"step0-g{episode // 2}-m{episode % 2}-t{turn}"
            generations.append(await engine.generate(request_id, history, SAMPLING))
            history = history + generations[-1].token_ids
    finally:
        engine.release()
    return generations


async def play_all(seed: int, timing: int, num_episodes: int = 6) -> list[list[Generation]]:
    engine = EmbeddedEngine(make_model(max_position_embeddings=512), seed=seed)
    rng = random.Random(timing)
    engine.reserve(num_episodes)
    episodes = list(range(num_episodes))
    rng.shuffle(episodes)  # the order of arrival
    tasks = {
        e: asyncio.create_task(play(engine, e, 1 + e % 3, lambda: rng.choice([0, 0, 0.001, 0.01])))
        for e in episodes
    }
    await asyncio.wait_for(asyncio.gather(*tasks.values()), 30)
    await engine.aclose()
    return [tasks[e].result() for e in range(num_episodes)]


async def test_timing_of_environments_changes_no_bit():
    first = await play_all(seed=1, timing=0)
    for timing in range(1, 6):
        assert await play_all(seed=1, timing=timing) == first  # ids, log-probabilities, versions
    assert await play_all(seed=2, timing=0) != first


async def test_a_new_engine_goes_on_where_a_killed_one_stopped():
    """The engine has no state of its own between rounds, so there is none to save."""

    async def rounds(numbers: range) -> list[list[Generation]]:
        engine, outcomes = EmbeddedEngine(make_model(), seed=8), []
        for number in numbers:
            calls = [
                engine.generate(f"step{number}-m{i}", prompt_of(i, number), SAMPLING)
                for i in range(5)
            ]
            outcomes.append(await asyncio.gather(*calls))
        await engine.aclose()
        return outcomes

    assert (await rounds(range(4)))[2:] == await rounds(range(2, 4))


async def test_a_round_waits_for_every_reserved_episode():
    engine = EmbeddedEngine(make_model(), seed=0)
    engine.reserve(3)
    early = [asyncio.create_task(engine.generate(f"m{i}", [i], SAMPLING)) for i in range(2)]
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in early)
    engine.release()  # the third will send nothing
    await asyncio.wait_for(asyncio.gather(*early), 10)
    with pytest.raises(ValueError, match="only 2"):
        engine.release(3)
    await engine.aclose()


async def test_a_reserved_episode_that_is_cancelled_does_not_wedge_the_others():
    engine = EmbeddedEngine(make_model(), seed=0)
    engine.reserve(2)
    lost = asyncio.create_task(play(engine, 0, 1, lambda: 0))
    other = asyncio.create_task(play(engine, 1, 2, lambda: 0.05))
    await asyncio.sleep(0.02)
    lost.cancel()  # pending; its release lets the other one go on alone
    generations = await asyncio.wait_for(other, 10)
    await engine.aclose()
    assert len(generations) == 2


async def test_an_optimiser_step_is_seen_at_once_and_nothing_of_the_old_weights_survives():
    model = make_model()
    engine = EmbeddedEngine(model, seed=0)
    prompt, with_old = list(range(20)), make_model()
    before = await engine.generate("a", prompt, SamplingParams(20))
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    model.train()
    model(input_ids=torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
    optimizer.step()
    after = await engine.generate("a", prompt, SamplingParams(20))
    await engine.aclose()
    assert model.training  # the engine left the trainer's mode alone
    old = reference_logprobs(with_old, prompt, before.token_ids)
    new = reference_logprobs(model, prompt, after.token_ids)
    assert before.logprobs == pytest.approx(old, abs=1e-5)
    assert after.logprobs == pytest.approx(new, abs=1e-5)
    stale = reference_logprobs(with_old, prompt, after.token_ids)
    assert max(abs(x - y) for x, y in zip(stale, new, strict=True)) > 0.05


def test_the_weights_are_shared_not_copied_and_attention_is_the_engines_own():
    model = make_model()
    model.set_attn_implementation("eager")
    twin = share_weights(model, "sdpa")
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert model.config._attn_implementation == "eager"
    assert twin.config._attn_implementation == "sdpa"
    model.train()
    assert not twin.training


async def test_replaced_parameters_are_noticed():
    model = make_model()
    engine = EmbeddedEngine(model, seed=0)
    model.get_input_embeddings().weight = torch.nn.Parameter(torch.zeros(VOCAB_SIZE, 32))
    with pytest.raises(InferenceError, match="replaced Parameters"):
        await engine.generate("a", [1], SAMPLING)
    await engine.aclose()


async def test_the_trainers_random_state_and_the_engines_do_not_touch():
    engine, sampled = EmbeddedEngine(make_model(), seed=3), []
    for draws in (0, 1000):
        torch.manual_seed(99)
        torch.rand(draws)
        state = torch.get_rng_state()
        sampled.append(await engine.generate("a", [1, 2], SamplingParams(30)))
        assert torch.equal(torch.get_rng_state(), state)
    await engine.aclose()
    assert sampled[0] == sampled[1]


async def test_a_crash_while_sampling_reaches_every_request_and_the_engine_goes_on():
    model = make_model()
    engine = EmbeddedEngine(model, seed=0)
    norm = engine._model.get_submodule("model.norm")

    def crash(*_):
        raise RuntimeError("out of memory in a kernel")

    handle = norm.register_forward_hook(crash)
    calls = [engine.generate(f"m{i}", [i], SAMPLING) for i in range(3)]
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    handle.remove()
    healthy = await asyncio.wait_for(engine.generate("m0", [0], SAMPLING), 10)
    await engine.aclose()
    assert len(healthy.token_ids) == 10
    for outcome in outcomes:
        assert isinstance(outcome, InferenceError)
        assert "3 requests" in str(outcome) and "out of memory in a kernel" in str(outcome)
        assert isinstance(outcome.__cause__, RuntimeError)


async def test_diverged_weights_are_an_error_not_a_sample():
    model = make_model()
    engine = EmbeddedEngine(model, seed=0)
    with torch.no_grad():
        model.get_input_embeddings().get_parameter("weight")[5] = float("nan")
    with pytest.raises(InferenceError, match="not finite"):
        await engine.generate("a", [5], SAMPLING)
    await engine.aclose()


@pytest.mark.parametrize(
    ("prompt_ids", "sampling", "reason"),
    [
        ([], SAMPLING, "prompt is empty"),
        ([1, VOCAB_SIZE], SAMPLING, f"the model has {VOCAB_SIZE}"),
        ([-1], SAMPLING, "token ids from -1"),
        ([1], SamplingParams(0), "max_tokens is 0"),
        ([1] * 90, SamplingParams(10), f"90 prompt tokens and max_tokens 10.*{CONTEXT}"),
        ([1], SamplingParams(5, temperature=-1.0), "temperature is -1"),
        ([1], SamplingParams(5, temperature=float("nan")), "temperature is nan"),
    ],
)
async def test_a_bad_request_is_refused_without_spoiling_the_round(prompt_ids, sampling, reason):
    engine = EmbeddedEngine(make_model(), seed=0)
    good = asyncio.create_task(engine.generate("good", [1], SAMPLING))
    try:
        with pytest.raises(InferenceError, match=reason):
            await engine.generate("bad", prompt_ids, sampling)
        assert len((await good).token_ids) == 10
    finally:
        await engine.aclose()


async def test_two_pending_requests_need_two_ids():
    engine = EmbeddedEngine(make_model(), seed=0)
    first = asyncio.create_task(engine.generate("a", [1], SAMPLING))
    await asyncio.sleep(0)
    with pytest.raises(InferenceError, match="unique"):
        await engine.generate("a", [1], SAMPLING)
    await first
    await engine.aclose()


async def test_closing_ends_a_running_round_and_what_waits():
    model = make_model(max_position_embeddings=100_000)
    engine = EmbeddedEngine(model, seed=0)
    running = asyncio.create_task(engine.generate("a", [1], SamplingParams(90_000)))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(engine.generate("b", [1], SAMPLING))
    await asyncio.sleep(0)
    await asyncio.wait_for(engine.aclose(), 10)
    for task in (running, waiting):
        with pytest.raises(InferenceError, match="closed"):
            await asyncio.wait_for(task, 1)
    with pytest.raises(InferenceError, match="closed"):
        await engine.generate("c", [1], SAMPLING)


async def test_a_round_nobody_waits_for_any_more_is_given_up():
    engine = EmbeddedEngine(make_model(max_position_embeddings=100_000), seed=0)
    abandoned = asyncio.create_task(engine.generate("a", [1], SamplingParams(90_000)))
    await asyncio.sleep(0.05)
    abandoned.cancel()
    after = await asyncio.wait_for(engine.generate("b", [1], SAMPLING), 10)
    await engine.aclose()
    assert len(after.token_ids) == 10


def test_an_engine_outlives_the_event_loop_that_died_during_its_round():
    engine = EmbeddedEngine(make_model(max_position_embeddings=100_000), seed=0)

    async def abandon():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate("a", [1], SamplingParams(90_000)), 0.05)

    async def go_on():
        generation = await asyncio.wait_for(engine.generate("b", [1], SAMPLING), 10)
        await engine.aclose()
        return generation

    asyncio.run(abandon())
    assert len(asyncio.run(go_on()).token_ids) == 10


async def test_weights_cannot_change_during_a_round():
    engine = EmbeddedEngine(make_model(max_position_embeddings=1000), seed=0)
    call = asyncio.create_task(engine.generate("a", [1], SamplingParams(400)))
    async with asyncio.timeout(10):
        while not engine.weights_lock.locked():
            await asyncio.sleep(0.001)

    def change() -> None:
        with engine.weights_lock:
            engine.policy_version = 1

    changing = asyncio.create_task(asyncio.to_thread(change))
    generation = await call
    await changing
    following = await engine.generate("b", [1], SAMPLING)
    await engine.aclose()
    assert (set(generation.versions), set(following.versions)) == ({0}, {1})


@settings(max_examples=25)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 8), st.sampled_from([0.0, 0.6, 1.0])),
        min_size=1,
        max_size=7,
    ),
    max_batch_tokens=st.sampled_from([1, 40, 32768]),
    stops=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=3),
)
def test_batching_never_changes_what_a_request_samples(lengths, max_batch_tokens, stops):
    """Alone or together, padded or not, in one batch or many: the same tokens, and log-probs equal
    up to rounding, each with its own temperature, length and stop tokens."""
    model = make_model()
    requests = [
        SampleRequest(
            f"m{i}",
            [(7 * i + k) % VOCAB_SIZE for k in range(length)],
            SamplingParams(max_tokens, temperature=temperature, stop_token_ids=tuple(stops)),
        )
        for i, (length, max_tokens, temperature) in enumerate(lengths)
    ]
    together = sample(model, requests, seed=4, max_batch_tokens=max_batch_tokens)
    assert len(together) == len(requests)
    for request, turn in zip(requests, together, strict=True):
        alone = sample(model, [request], seed=4)[0]
        assert turn.token_ids == alone.token_ids
        assert turn.finish_reason == alone.finish_reason
        expected = reference_logprobs(
            model, request.prompt_ids, turn.token_ids, request.sampling.temperature or 1.0
        )
        assert turn.logprobs == pytest.approx(expected, abs=1e-5)
        stopped = turn.token_ids[-1] in stops
        assert (turn.finish_reason == "stop") == stopped
        assert stopped or len(turn.token_ids) == request.sampling.max_tokens


def shaped(logits: torch.Tensor, seen: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Log-probs (V,) of the distribution that the parameters describe, one rule after the other."""
    for token in set(seen):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits = logits / sampling.temperature
    if sampling.top_k > 0:
        logits[logits < logits.sort().values[-sampling.top_k]] = -torch.inf
    probabilities, order = logits.softmax(-1).sort(descending=True)
    above = probabilities.cumsum(-1) - probabilities
    logits[order[above >= sampling.top_p]] = -torch.inf
    probabilities = logits.softmax(-1)
    logits[probabilities < sampling.min_p * probabilities.max()] = -torch.inf
    return logits.log_softmax(-1)


SHAPES = [
    *({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.4}, {"repetition_penalty": 1.8}),
    {"top_k": 9, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.3},
]


def test_truncation_and_repetition_shape_the_distribution():
    """Together in one call with a request that is not shaped, and with prompts of any length."""
    model = make_model()
    prompts = [[5, 5, 9], [1, 2, 3, 4, 5, 6, 7, 8], [11]]
    requests = [
        SampleRequest(f"{number}-{prompt[0]}", prompt, SamplingParams(24, 0.8, **shape))
        for number, shape in enumerate([{}, *SHAPES])
        for prompt in prompts
    ]
    turns = sample(model, requests, seed=7)
    assert turns[:3] == sample(model, requests[:3], seed=7)
    left_out = 0
    for request, turn in zip(requests, turns, strict=True):
        ids = request.prompt_ids + turn.token_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        for place in range(len(request.prompt_ids), len(ids)):
            wanted = shaped(logits[place - 1].clone(), ids[:place], request.sampling)
            logprob = turn.logprobs[place - len(request.prompt_ids)]
            assert logprob == pytest.approx(wanted[ids[place]].item(), abs=1e-4), request
            left_out += int(wanted.isinf().sum())
    assert left_out > 1000


def test_the_ids_that_truncation_kept_are_reported():
    model = make_model()
    prompt, truncated = [5, 5, 9], {"top_k": 9, "top_p": 0.8, "min_p": 0.2}
    shapes = [{}, *({**truncated, "report_kept": each} for each in (True, False))]
    requests = [SampleRequest("a", prompt, SamplingParams(24, 0.8, **shape)) for shape in shapes]
    whole, told, untold = sample(model, requests, seed=7)
    assert whole.kept_ids is None and untold.kept_ids is None
    assert told.token_ids == untold.token_ids and told.kept_ids is not None
    ids = prompt + told.token_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    sizes = set()
    for place, kept in zip(range(len(prompt), len(ids)), told.kept_ids, strict=True):
        wanted = shaped(logits[place - 1].clone(), ids[:place], requests[1].sampling)
        assert kept.tolist() == wanted.isfinite().nonzero()[:, 0].tolist()
        sizes.add(len(kept))
    assert len(sizes) > 1 and max(sizes) <= 9


def test_a_seed_of_its_own_repeats_a_request_on_any_engine():
    def drawn(engine_seed: int, own: int | None) -> list[int]:
        request = SampleRequest("a", [1, 2], SamplingParams(12, seed=own))
        return sample(make_model(), [request], seed=engine_seed)[0].token_ids

    assert drawn(1, own=5) == drawn(2, own=5) != drawn(1, own=6)
    assert drawn(5, own=None) == drawn(1, own=5)


def test_a_stopped_sample_raises():
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(InferenceError, match="closed"):
        sample(make_model(), [SampleRequest("a", [1], SAMPLING)], seed=0, stopped=stopped)
