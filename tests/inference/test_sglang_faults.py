"""Faults of an SGLang server, played by the stand-in, end as they do with vLLM."""

from __future__ import annotations

import numpy as np
import pytest
from sglang_server import SGLangServer, serving
from test_sglang import PARITY, PROMPT, client, perturb, syncing, toy_model, worst

from agentrl.errors import InferenceError, WeightSyncError
from agentrl.inference.base import SamplingParams
from agentrl.inference.weights.sglang import FolderTransfer

SAMPLING = SamplingParams(4, 0.6)


@pytest.mark.parametrize("fault", ["reset", "500", "503"])
async def test_a_request_that_fails_is_sent_again(fault):
    server = SGLangServer(toy_model(), faults=[fault])
    with serving(server):
        async with client(server.url) as engine:
            generation = await engine.generate("a-m0", PROMPT, SAMPLING)
    assert worst(server.model, PROMPT, generation, 0.6) < PARITY and not server.faults


async def test_the_experts_of_every_token_are_read_or_missed():
    experts = np.random.default_rng(0).integers(0, 8, (4096, 3, 2), np.int32)
    asks = SamplingParams(4, 0.6, report_routes=True)
    server = SGLangServer(toy_model(), experts=experts)
    with serving(server):
        async with client(server.url) as engine:
            generation = await engine.generate("a-m0", PROMPT, asks)
            assert (await engine.generate("a-m1", PROMPT, SAMPLING)).routes is None
            server.experts = None
            with pytest.raises(InferenceError, match="--enable-return-routed-experts"):
                await engine.generate("a-m2", PROMPT, asks)
    num_computed = len(PROMPT) + len(generation.token_ids) - 1
    assert generation.routes is not None
    assert np.array_equal(generation.routes, experts[:num_computed].reshape(num_computed, 6))


async def test_a_server_that_hangs_is_left_for_the_other():
    one, other = SGLangServer(toy_model(), faults=["hang"]), SGLangServer(toy_model())
    with serving(one, other):
        async with client(one.url, other.url, request_timeout_s=5.0) as engine:
            await engine.start()
            assert len((await engine.generate("a-m0", PROMPT, SAMPLING)).token_ids) == 4
    assert "/abort_request" in one.calls, "it was not told that nobody waits any more"


async def test_a_restarted_server_has_the_weights_before_its_next_token(tmp_path):
    server, model = SGLangServer(toy_model()), toy_model()
    perturb(model, 1)
    with serving(server):
        sync = syncing(server.url, FolderTransfer(tmp_path))
        async with client(server.url) as engine:
            engine.resync = sync.push_to
            await sync.push(model, 1)
            engine.policy_version = 1
            await engine.generate("a-m0", PROMPT, SAMPLING)
            server.restart(toy_model())
            generation = await engine.generate("b-m0", PROMPT, SAMPLING)
        await sync.aclose()
    assert generation.versions == [1] * len(generation.token_ids)
    assert worst(model, PROMPT, generation, 0.6) < PARITY


async def test_a_server_that_dies_of_an_update_is_missed_where_another_is_there(tmp_path):
    good, bad = SGLangServer(toy_model()), SGLangServer(toy_model(), dies_of_updates=True)
    missed: list[str] = []
    with serving(good, bad):
        sync = syncing(good.url, FolderTransfer(tmp_path), on_missed=missed.append)
        sync._urls.append(bad.url)
        metrics = await sync.push(toy_model(), 1)
        await sync.aclose()
    assert metrics["sync/servers_missed"] == 1 and missed == [bad.url]
    assert good.version == "1" and bad.mode is None


async def test_a_server_that_is_restarted_while_it_sleeps_is_not_woken(tmp_path):
    server, model = SGLangServer(toy_model()), toy_model()
    with serving(server):
        sync = syncing(server.url, FolderTransfer(tmp_path))
        await sync.push(model, 1)
        assert await sync.sleep(keep_weights=False) == {}
        assert server.released == {"kv_cache", "weights"}
        server.restart(toy_model())
        await sync.push(model, 2)
        await sync.aclose()
    assert server.version == "2" and "/resume_memory_occupation" not in server.calls


async def test_an_update_of_another_shape_is_an_error_and_the_server_goes_on(tmp_path):
    server, wrong = SGLangServer(toy_model()), toy_model()
    wrong.model.norm.weight.data = wrong.model.norm.weight.data[:3].clone()
    with serving(server):
        transfer = FolderTransfer(tmp_path)
        sync = syncing(server.url, transfer)
        await sync.push(toy_model(), 1)
        await transfer.take(wrong, 2)
        with pytest.raises(WeightSyncError, match="shapes differ"):
            await sync.push_to(server.url)
        await sync.aclose()
    assert server.version == "1" and server.mode is None


async def test_logprobs_of_the_raw_logits_are_noticed_and_refused():
    server = SGLangServer(toy_model(), raw_logprobs=True)
    with serving(server):
        async with client(server.url) as engine:
            await engine.generate("a-m0", PROMPT, SamplingParams(2, 1.0))
            with pytest.raises(InferenceError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
                await engine.generate("a-m0", PROMPT, SAMPLING)


async def test_a_router_without_a_worker_is_an_error_at_the_start():
    router = SGLangServer(toy_model(), workers=[])
    with serving(router), pytest.raises(InferenceError, match=r"503|without a worker"):
        async with client(router.url, retry_for_s=0.1) as engine:
            await engine.start()
