"""SGLang's client, control routes and probe, on a stand-in and on a real server alike."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator

import pytest
import torch
from safetensors.torch import save_file
from samples_for_tests import sample_of
from sglang_fixture import TOY_MODEL, running_sglang
from sglang_server import SGLangServer, serving

from agentrl.errors import InferenceError, WeightSyncError
from agentrl.inference.base import SamplingParams
from agentrl.inference.http import make_client
from agentrl.inference.sglang import SGLangEngine
from agentrl.inference.weights.control import SGLangControl
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.sglang import (
    FolderTransfer,
    TensorTransfer,
    TorchTransfer,
    _buckets,
    _pickled,
)
from agentrl.model.load import load_model
from agentrl.model.logprobs import recomputed_logprobs
from agentrl.train.teacher import TeacherServer

PROMPT = [(7 * i) % 300 + 5 for i in range(24)]
LENGTH = {"stand-in": 60, "real": 250}
"""Of the sequence that an update meets."""
PARITY = 1e-4
"""Nats; server and trainer both compute in float32."""


def over_gloo(directory) -> TorchTransfer:
    """The way of NCCL, which works on a CPU."""
    return TorchTransfer("gloo")


WAYS = [FolderTransfer, TensorTransfer, over_gloo]


def toy_model():
    return load_model(str(TOY_MODEL), dtype=torch.float32, device="cpu", max_tokens=4096).eval()


def perturb(model, seed: int) -> None:
    """The next version, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * parameter.std().nan_to_num(0.1) * noise)


@pytest.fixture(
    scope="module",
    params=[
        "stand-in",
        pytest.param(
            "real", marks=[pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
        ),
    ],
)
def url(request, tmp_path_factory):
    if request.param == "real":
        with running_sglang(tmp_path_factory.mktemp("logs")) as launcher:
            yield launcher.urls[0]
        return
    server = SGLangServer(toy_model())
    with serving(server):
        yield server.url


@contextlib.asynccontextmanager
async def client(*urls: str, **settings) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(urls, **settings)
    try:
        yield engine
    finally:
        await engine.aclose()


def syncing(url: str, transfer, **settings) -> ServerWeightSync:
    settings = {"tolerance": PARITY, "timeout_s": 60.0, "temperature": 0.7} | settings
    return ServerWeightSync(
        [url], transfer=transfer, control=SGLangControl, probe_ids=PROMPT, **settings
    )


async def push(url: str, transfer, model, version: int, **settings) -> dict[str, float]:
    sync = syncing(url, transfer, **settings)
    try:
        return await sync.push(model, version)
    finally:
        await sync.aclose()


def worst(model, prompt, generation, temperature: float) -> float:
    expected = recomputed_logprobs(model, prompt, generation.token_ids, temperature)
    pairs = zip(generation.logprobs, expected, strict=True)
    return max(abs(got - wanted) for got, wanted in pairs)


async def busy(url: str) -> bool:
    """Returns whether the server has requests; it does not empty its cache while it has."""
    async with make_client(url) as http:
        return (await http.post("/flush_cache")).status_code != 200


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled(url, tmp_path, temperature):
    model = toy_model()
    await push(url, FolderTransfer(tmp_path), model, 1)
    prompts, sampling = [PROMPT[:n] for n in (1, 7, 24)], SamplingParams(24, temperature)
    async with client(url) as engine:
        await engine.start()
        assert engine.probe_result(url) == ("/generate", False)
        calls = [engine.generate(f"g-m{i}", p, sampling) for i, p in enumerate(prompts)]
        generations = await asyncio.gather(*calls)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.versions == [1] * len(generation.token_ids)
        assert worst(model, prompt, generation, temperature or 1.0) < PARITY


async def test_stop_tokens_end_a_turn_and_stay_in_it(url):
    async with client(url, stop_token_ids=(9,)) as engine:
        free = await engine.generate("a-m0", PROMPT, SamplingParams(30, 0.0))
        stop = free.token_ids[min(3, len(free.token_ids) - 1)]
        stopping = SamplingParams(30, 0.0, stop_token_ids=(stop,))
        generation = await engine.generate("b-m0", PROMPT, stopping)
    assert generation.finish_reason == "stop"
    assert generation.token_ids[-1] == stop and stop not in generation.token_ids[:-1]


async def test_a_cancelled_request_is_told_to_the_server(url):
    async with client(url) as engine:
        await engine.start()
        doomed = asyncio.create_task(
            engine.generate("a-m0", PROMPT, SamplingParams(3900, stop_token_ids=()))
        )
        async with asyncio.timeout(60):
            while not await busy(url):
                assert not doomed.done(), "it ended before it was cancelled"
                await asyncio.sleep(0.01)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            while await busy(url):
                await asyncio.sleep(0.01)


async def long_sequence(url: str, transfer, model, version: int, on_update: str, length: int):
    """One sequence that an update meets in its middle, after at least one token."""
    async with client(url) as engine, make_client(url) as http:
        engine.policy_version = version - 1
        running = asyncio.create_task(engine.generate("a-m0", PROMPT, SamplingParams(length, 1.0)))
        async with asyncio.timeout(60):
            while not await busy(url):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # some tokens later
        await push(url, transfer, model, version, on_update=on_update)
        assert (await http.get("/ready")).status_code == 200
        return await running


@pytest.mark.parametrize("on_update", ["keep", "abort"])
@pytest.mark.parametrize("kind", WAYS)
async def test_a_sequence_that_an_update_meets_is_exact_token_by_token(
    request, url, tmp_path, on_update, kind
):
    length = LENGTH[request.node.callspec.params["url"]]
    old, new = toy_model(), toy_model()
    perturb(new, 1)
    await push(url, FolderTransfer(tmp_path), old, 1)
    generation = await long_sequence(url, kind(tmp_path), new, 2, on_update, length)
    versions, ids = generation.versions, generation.token_ids
    assert len(versions) == len(ids) and versions == sorted(versions)
    expected = {
        version: recomputed_logprobs(model, PROMPT, ids, 1.0)
        for version, model in ((1, old), (2, new))
    }
    for position, (version, logprob) in enumerate(zip(versions, generation.logprobs, strict=True)):
        assert abs(logprob - expected[version][position]) < PARITY
    if len(ids) == length:
        assert versions[-1] == 2


@pytest.mark.parametrize("kind", WAYS)
async def test_names_that_no_parameter_has_are_answered_with_200_and_caught_by_the_probe(
    url, tmp_path, kind
):
    model = toy_model()
    await push(url, FolderTransfer(tmp_path), model, 1)
    transfer = kind(tmp_path)
    take = transfer.take

    async def renamed(model, version):
        real = dict(model.named_parameters())
        tensors = {f"model.unknown.{n}": t.data.clone() for n, t in enumerate(real.values())}
        await take(model, version)
        if kind is over_gloo:
            transfer._live = tensors
        else:
            save_file(tensors, transfer._path)
        if kind is TensorTransfer:
            transfer._bodies = [_pickled(part) for part in _buckets(transfer._path)]

    transfer.take = renamed
    perturb(model, 2)
    with pytest.raises(WeightSyncError, match="does not compute what the trainer does"):
        await push(url, transfer, model, 2)
    after = await push(url, FolderTransfer(tmp_path), model, 3)
    assert after["sync/probe_logprob_diff_max"] < PARITY


async def test_a_group_takes_several_versions_and_another_trainer_the_place_of_the_last(url):
    model = toy_model()
    for versions in ((10, 11, 12), (13, 14)):
        sync = syncing(url, over_gloo(None))  # never closed: the server keeps its group
        for version in versions:
            perturb(model, version)
            metrics = await sync.push(model, version)
            assert metrics["sync/probe_logprob_diff_max"] < PARITY


async def test_a_matrix_of_another_width_over_a_group_is_never_taken_for_the_policy(url, tmp_path):
    model = toy_model()
    transfer = over_gloo(None)
    take = transfer.take

    async def narrow(model, version):
        await take(model, version)
        name = next(name for name, tensor in transfer._live.items() if "gate_proj" in name)
        transfer._live[name] = transfer._live[name][:, 1:].contiguous()

    transfer.take = narrow
    perturb(model, 4)
    with pytest.raises(WeightSyncError, match=r"does not compute|Failed to update"):
        await push(url, transfer, model, 15)
    after = await push(url, FolderTransfer(tmp_path), model, 16)
    assert after["sync/probe_logprob_diff_max"] < PARITY


async def test_a_folder_that_is_missing_is_an_error_with_the_servers_words(url, tmp_path):
    class Empty(FolderTransfer):
        async def take(self, model, version):
            await super().take(model, version)
            shutil.rmtree(tmp_path / f"sglang-{version}")

    with pytest.raises(WeightSyncError, match="/update_weights_from_disk answered 400"):
        await push(url, Empty(tmp_path), toy_model(), 5)
    after = await push(url, FolderTransfer(tmp_path), toy_model(), 6)
    assert after["sync/probe_logprob_diff_max"] < PARITY


async def test_a_prompt_beyond_the_context_is_refused_in_the_servers_words(url):
    async with client(url) as engine:
        with pytest.raises(InferenceError, match=r"4100 prompt tokens.*refused with 400"):
            await engine.generate("a-m0", [5] * 4100, SamplingParams(8))


async def test_a_server_that_was_paused_and_forgotten_goes_on_after_the_next_push(url, tmp_path):
    async with make_client(url) as http:
        await http.post("/pause_generation", json={"mode": "retract"})
    await push(url, FolderTransfer(tmp_path), toy_model(), 8)
    async with client(url) as engine, asyncio.timeout(60):
        assert (await engine.generate("a-m0", PROMPT, SamplingParams(4))).versions[0] == 8


async def test_a_server_sleeps_with_nothing_to_do_and_wakes_for_the_next_version(url, tmp_path):
    model = toy_model()
    sync = syncing(url, FolderTransfer(tmp_path))
    async with client(url) as engine:
        await sync.push(model, 20)
        doomed = asyncio.create_task(
            engine.generate("a-m0", PROMPT, SamplingParams(3900, stop_token_ids=()))
        )
        async with asyncio.timeout(60):
            while not await busy(url):
                await asyncio.sleep(0.01)
        doomed.cancel()
        assert await sync.sleep(keep_weights=False) == {}
        perturb(model, 20)
        await sync.push(model, 21)
        perturb(model, 21)
        await sync.push(model, 22)  # awake already
        engine.policy_version = 22
        generation = await engine.generate("b-m0", PROMPT, SamplingParams(8))
    await sync.aclose()
    assert generation.versions == [22] * len(generation.token_ids)
    assert worst(model, PROMPT, generation, 1.0) < PARITY


async def test_a_teacher_is_asked_for_its_prompts_logprobs_alone(url, tmp_path):
    model = toy_model()
    await push(url, FolderTransfer(tmp_path), model, 9)
    ids = [*PROMPT, 30, 40, 50]
    mask = [0] * len(PROMPT) + [1] * 3
    sample = sample_of(ids, mask, trajectory_id="g-m0")
    got = await asyncio.to_thread(TeacherServer(url, model="policy").logprobs, [sample])
    expected = recomputed_logprobs(model, PROMPT, [30, 40, 50], 1.0)
    assert got[0].tolist() == pytest.approx(expected, abs=PARITY)
