"""The vLLM client against a real server that can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator

import numpy as np
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
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import InferenceError
from agentrl.inference import remote as engine_module
from agentrl.inference.base import Generation, SamplingParams
from agentrl.inference.vllm import VLLMEngine

PROMPT = [3, 14, 15]
SAMPLING = SamplingParams(max_tokens=6)


@pytest.fixture(autouse=True)
def one_thread():
    """The servers of these tests run a tiny model: a second thread only waits for the first, and
    on a busy machine long enough to miss the deadlines below."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.asynccontextmanager
async def client(*servers: ContractServer, **arguments) -> AsyncIterator[VLLMEngine]:
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(running(server))
        engine = VLLMEngine([server.url for server in servers], **arguments)
        stack.push_async_callback(engine.aclose)
        yield engine


async def generate_one(
    server: ContractServer, sampling=SAMPLING, policy_version=0, **arguments
) -> Generation:
    async with client(server, **arguments) as engine:
        engine.policy_version = policy_version
        return await asyncio.wait_for(engine.generate("g-m0", PROMPT, sampling), 20)


both_endpoints = pytest.mark.parametrize("scale_out", [True, False])


@both_endpoints
async def test_a_turn_is_clipped_to_the_servers_context_and_that_is_said_once(scale_out, caplog):
    async with client(ContractServer(make_model(), scale_out=scale_out)) as engine:
        assert engine.context_tokens is None
        for member in range(2):
            sampling = SamplingParams(10 * CONTEXT)
            generation = await engine.generate(f"g-m{member}", PROMPT, sampling)
            assert len(generation.token_ids) == CONTEXT - len(PROMPT)
            assert generation.finish_reason == "length"
        assert engine.context_tokens == CONTEXT
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@both_endpoints
async def test_every_parameter_is_sent_and_the_endpoint_is_chosen_once(scale_out):
    server = ContractServer(make_model(), scale_out=scale_out, api_key="secret")

    async with client(server, token="secret", seed=1, stop_token_ids=(9,)) as engine:
        await engine.start()
        calls = [
            engine.generate(f"g-m{i}", PROMPT, SamplingParams(4, 0.5, stop_token_ids=(2,)))
            for i in range(5)
        ]
        await asyncio.gather(*calls)
        shaped = SamplingParams(
            4, 0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, seed=3
        )
        await engine.generate("g-m0", PROMPT, shaped)
    path = "/inference/v1/generate" if scale_out else "/v1/completions"
    sent = [body for body in server.bodies if body["path"] == path]
    assert len(sent) == len(server.bodies) == 7  # one probe, six requests
    last = sent.pop()["sampling_params"] if scale_out else sent.pop()
    shaped = {"top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
    assert {key: last[key] for key in shaped} == shaped
    for body in sent[1:]:
        parameters = body["sampling_params"] if scale_out else body
        assert body["token_ids" if scale_out else "prompt"] == PROMPT
        assert body["model"] == "policy"
        expected = {
            "max_tokens": 4,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "stop_token_ids": [2, 9],
        }
        assert {key: parameters[key] for key in expected} == expected
    parameters = [body["sampling_params"] if scale_out else body for body in sent[1:]]
    assert len({p["seed"] for p in parameters} | {last["seed"]}) == 6


@both_endpoints
@pytest.mark.parametrize("fault", ["429", "503", "500", "reset", "cut", "malformed"])
async def test_a_passing_fault_is_retried(scale_out, fault):
    model = make_model()
    server = ContractServer(model, scale_out=scale_out, faults=[fault, fault])
    generation = await generate_one(server)
    assert not server.faults
    expected = reference_logprobs(model, PROMPT, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=1e-5)


async def test_a_retry_uses_an_id_the_server_does_not_hold_and_the_same_seed():
    server = ContractServer(make_model(), faults=["reset", "500"])
    await generate_one(server, seed=2)
    attempts = server.bodies[1:]
    assert [body["request_id"] for body in attempts] == ["g-m0", "g-m0-retry1", "g-m0-retry2"]
    assert len({body["sampling_params"]["seed"] for body in attempts}) == 1


@pytest.mark.slow
async def test_a_server_that_keeps_failing_is_an_error_that_names_it():
    server = ContractServer(make_model(), faults=["500"] * 10)
    with pytest.raises(InferenceError, match=r"127.0.0.1:\d+: status 500: EngineCore died; 6 att"):
        await generate_one(server)
    assert len(server.faults) == 4


@both_endpoints
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        # Might pass, and so is asked for again, several times.
        pytest.param("nan", "is not JSON|log-probability nan", marks=pytest.mark.slow),
        ("sentinel", "-9999 at sampled token 0, which stands for NaN"),
        ("null", "1 of 6 log-probabilities are null"),
        ("positive", "log-probability 0.5 at sampled token 0"),
        ("short", "6 tokens came with"),
        ("missing", "no log-probabilities"),
        ("reason", "finish_reason 'error'"),
        ("empty", "0 choices"),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_an_error_that_names_the_server(
    scale_out, fault, reason
):
    server = ContractServer(make_model(), scale_out=scale_out, faults=[fault] * 6)
    with pytest.raises(InferenceError, match=rf"http://127.0.0.1:\d+.*({reason})"):
        await generate_one(server)


@both_endpoints
@pytest.mark.parametrize("strange", [-1, VOCAB_SIZE, 5000, 2**31, 2**40, 2**70])
async def test_an_id_outside_the_vocabulary_is_an_error(scale_out, strange):
    server = ContractServer(make_model(), scale_out=scale_out, faults=[f"id{strange}"])
    with pytest.raises(InferenceError, match=r"id -?[0-9]+ is not|another shape"):
        await generate_one(server, vocab_size=VOCAB_SIZE)


async def test_the_last_id_of_the_vocabulary_is_none():
    last = ContractServer(make_model(), faults=[f"id{VOCAB_SIZE - 1}"])
    assert (await generate_one(last, vocab_size=VOCAB_SIZE)).token_ids[0] == VOCAB_SIZE - 1
    kept = SamplingParams(6, top_k=5, report_kept=True)
    with pytest.raises(InferenceError, match=f"id {VOCAB_SIZE} is not"):
        server = ContractServer(make_model(), keeps_beside=[VOCAB_SIZE])
        await generate_one(server, kept, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(("sent", "refused"), [(3, True), (4, False), (None, False)])
async def test_weights_that_this_run_did_not_send_are_another_trainers(sent, refused):
    """A label may be one ahead during an update, and any if nothing is sent: an evaluation."""
    server = ContractServer(make_model(), weight_version="4")
    async with client(server) as engine:
        engine.policy_version, engine.sent_version = 3, sent
        if not refused:
            assert (await engine.generate("g-m0", PROMPT, SAMPLING)).versions == [4] * 6
            return
        with pytest.raises(InferenceError, match=r"version 4.*second trainer"):
            await engine.generate("g-m0", PROMPT, SAMPLING)


async def test_an_answer_to_another_prompt_is_an_error():
    server = ContractServer(make_model(), scale_out=False, faults=["prompt"])
    with pytest.raises(InferenceError, match="another prompt"):
        await generate_one(server)


async def test_retry_after_is_honoured():
    server = ContractServer(make_model(), faults=["429"], retry_after="0.6")
    start = time.monotonic()
    await generate_one(server)
    assert 0.6 <= time.monotonic() - start < 5


async def test_waiting_ends_with_retry_for_s_and_with_the_callers_deadline():
    full = ContractServer(make_model(), faults=["503"] * 1000, retry_after="0.1")
    with pytest.raises(InferenceError, match=r"status 503: too many requests; gave up after 0.3"):
        await generate_one(full, retry_for_s=0.3)
    async with client(full) as engine:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await engine.generate("g-m0", PROMPT, SAMPLING)
        assert time.monotonic() - start < 1.3


async def test_a_server_that_comes_back_is_waited_for():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    engine = VLLMEngine([f"http://127.0.0.1:{port}"])
    call = asyncio.create_task(engine.generate("g-m0", PROMPT, SAMPLING))
    await asyncio.sleep(0.5)
    assert not call.done()
    async with running(ContractServer(make_model()), port):
        back_at = time.monotonic()
        generation = await asyncio.wait_for(call, 10)
        waited = time.monotonic() - back_at
    await engine.aclose()
    assert len(generation.token_ids) == 6
    assert waited < 5


async def test_an_idle_connection_the_server_closed_is_not_an_error():
    """A restart between two requests leaves a dead connection in the client's pool."""
    model = make_model()
    first = ContractServer(model)
    async with running(first):
        engine = VLLMEngine([first.url])
        await engine.generate("a-m0", PROMPT, SAMPLING)
    port = int(first.url.rpartition(":")[2])
    async with running(ContractServer(model), port):
        generation = await asyncio.wait_for(engine.generate("a-m1", PROMPT, SAMPLING), 10)
    await engine.aclose()
    assert len(generation.token_ids) == 6


async def test_another_server_takes_over_from_one_that_hangs():
    model = make_model()
    hanging = ContractServer(model, faults=["hang"] * 100)
    healthy = ContractServer(model)
    async with client(hanging, healthy, request_timeout_s=2.0) as engine:
        start = time.monotonic()
        await asyncio.gather(*(engine.generate(f"g{i}-m0", PROMPT, SAMPLING) for i in range(6)))
        assert time.monotonic() - start < 4  # one timeout, not two
        await engine.generate("g0-m1", PROMPT, SAMPLING)
        await engine.generate("g1-m1", PROMPT, SAMPLING)
        async with asyncio.timeout(1.5):  # a new group does not try the silent server first
            await engine.generate("g6-m0", PROMPT, SAMPLING)
    assert len(hanging.faults) == 97  # half of the first six, none of the later ones


async def test_a_hanging_server_alone_is_an_error_after_the_request_timeout():
    server = ContractServer(make_model(), faults=["hang"])
    start = time.monotonic()
    with pytest.raises(InferenceError, match=r"no answer within 0\.3 s to g-m0"):
        await generate_one(server, request_timeout_s=0.3)
    assert time.monotonic() - start < 2


async def test_cancelling_closes_the_connection_so_that_the_server_drops_the_request():
    server = ContractServer(make_model(), faults=["hang"])
    async with client(server) as engine:
        call = asyncio.create_task(engine.generate("g-m0", PROMPT, SAMPLING))
        while server.faults:
            await asyncio.sleep(0.01)
        assert server.disconnects == 0
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(1):
            while server.disconnects == 0:
                await asyncio.sleep(0.01)
        assert engine._pool.servers[0].in_flight == 0


async def test_a_group_stays_on_one_server_and_groups_spread():
    model = make_model()
    servers = [ContractServer(model) for _ in range(2)]
    async with client(*servers) as engine:
        await engine.start()
        calls = [
            engine.generate(f"step0-g{group}-m{member}-t{turn}", PROMPT, SAMPLING)
            for group in range(4)
            for member in range(3)
            for turn in range(2)
        ]
        await asyncio.gather(*calls)
    first, second = [{b["request_id"].split("-m")[0] for b in s.bodies[1:]} for s in servers]
    assert not first & second
    assert len(first) == len(second) == 2


async def test_spans_of_the_server_become_versions_of_the_tokens():
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 6}]
    server = ContractServer(make_model())
    async with client(server) as engine:
        engine.policy_version = 4
        await engine.start()
        server.version_spans = spans
        assert (await engine.generate("g-m0", PROMPT, SAMPLING)).versions == [4, 4, 5, 5, 5, 5]


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([{"version": "1", "start": 0, "end": 5}], "cover 5 of 6"),
        ([{"version": "1", "start": 1, "end": 6}], "have gaps"),
        (
            [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 3, "end": 6}],
            "have gaps",
        ),
    ],
)
async def test_spans_that_do_not_cover_the_tokens_are_an_error(spans, reason):
    server = ContractServer(make_model())
    async with client(server) as engine:
        await engine.start()
        server.version_spans = spans
        with pytest.raises(InferenceError, match=reason):
            await engine.generate("g-m0", PROMPT, SAMPLING)


@pytest.mark.parametrize("label", [None, "default"])
async def test_the_policy_version_stands_in_where_the_server_labels_nothing(label):
    server = ContractServer(make_model(), weight_version=label)
    assert (await generate_one(server, policy_version=3)).versions == [3] * 6


@pytest.mark.parametrize(("label", "reason"), [("2", "version 2.*at version 3"), ("x", "restart")])
async def test_a_server_restarted_with_old_weights_is_noticed(label, reason):
    server = ContractServer(make_model(), weight_version="3")
    async with client(server) as engine:
        engine.policy_version = 3
        good = await engine.generate("g-m0", PROMPT, SAMPLING)
        assert good.versions == [3] * 6
        server.weight_version = label
        with pytest.raises(InferenceError, match=reason):
            await engine.generate("g-m1", PROMPT, SAMPLING)


@both_endpoints
async def test_raw_logprobs_are_refused_unless_the_temperature_is_one(scale_out):
    server = ContractServer(make_model(), scale_out=scale_out, processed_logprobs=False)
    assert len((await generate_one(server)).token_ids) == 6
    with pytest.raises(InferenceError, match="--logprobs-mode processed_logprobs"):
        await generate_one(server, SamplingParams(6, temperature=0.7))


async def test_what_a_truncated_distribution_kept_is_read_where_the_server_says_it():
    truncated = SamplingParams(6, top_k=5, report_kept=True)
    server = ContractServer(make_model(), keeps_beside=[2, 7], faults=["abort2"])
    generation = await generate_one(server, truncated)
    assert len(generation.token_ids) == 6 and generation.kept_ids is not None
    kept = [ids.tolist() for ids in generation.kept_ids]
    assert kept == [sorted({token, 2, 7}) for token in generation.token_ids]
    assert (await generate_one(ContractServer(make_model()), truncated)).kept_ids is None
    with pytest.raises(InferenceError, match="not among the ids of its sampling_mask"):
        await generate_one(ContractServer(make_model(), faults=["mask"]), truncated)
    with pytest.raises(InferenceError, match="nor of a truncated one"):
        await generate_one(ContractServer(make_model(), processed_logprobs=False), truncated)


@both_endpoints
@pytest.mark.parametrize("faults", [[], ["abort2"]])
async def test_the_experts_of_every_token_are_read(scale_out, faults):
    experts = np.random.default_rng(0).integers(0, 8, (CONTEXT, 3, 2), np.uint8)
    server = ContractServer(make_model(), scale_out=scale_out, experts=experts, faults=faults)
    generation = await generate_one(server, SamplingParams(6, report_routes=True))
    assert len(generation.token_ids) == 6 and generation.routes is not None
    num_computed = len(PROMPT) + 6 - 1
    assert np.array_equal(generation.routes, experts[:num_computed].reshape(num_computed, 6))
    assert generation.routes.dtype == np.int16


@both_endpoints
async def test_a_server_without_the_experts_of_every_token_is_refused(scale_out):
    asks = SamplingParams(6, report_routes=True)
    with pytest.raises(InferenceError, match="--enable-return-routed-experts"):
        await generate_one(ContractServer(make_model(), scale_out=scale_out), asks)
    experts = np.zeros((CONTEXT, 3, 2), np.uint8)
    faulty = ContractServer(make_model(), scale_out=scale_out, experts=experts, faults=["routes"])
    with pytest.raises(InferenceError, match="routed_experts"):
        await generate_one(faulty, asks)


async def test_a_wrong_token_and_a_wrong_server_are_named_at_the_start():
    server = ContractServer(make_model(), api_key="right")
    async with client(server, token="wrong") as engine:
        with pytest.raises(InferenceError, match=r"401: Unauthorized; check.*token"):
            await engine.start()
        elsewhere = VLLMEngine([server.url + "/other"])
        with pytest.raises(InferenceError, match="is it a vLLM server"):
            await elsewhere.start()
        await elsewhere.aclose()


@pytest.mark.parametrize(
    ("deadline_s", "arguments", "error"),
    [(0.5, {}, TimeoutError), (60, {"request_timeout_s": 0.5}, InferenceError)],
)
async def test_trickled_bytes_do_not_move_a_deadline(deadline_s, arguments, error):
    """F3: a timeout between two bytes would never fire."""
    server = ContractServer(make_model(), faults=["trickle"] * 4)
    async with client(server, **arguments) as engine:
        await engine.start()
        begin = time.monotonic()
        with pytest.raises(error):
            async with asyncio.timeout(deadline_s):
                await engine.generate("g-m0", PROMPT, SAMPLING)
        assert 0.5 <= time.monotonic() - begin < 1.0


@both_endpoints
async def test_thirty_per_cent_faults_lose_no_request(scale_out):
    """F4, on both endpoints, with the weights confirmed after each lost connection."""
    server = ContractServer(make_model(), scale_out=scale_out, weight_version="3")
    kinds = ["429", "503", "reset", "cut", "malformed", "500"]
    dice = random.Random(0)
    server.faults = [dice.choice(kinds) if dice.random() < 0.3 else "none" for _ in range(10000)]
    async with client(server) as engine:
        engine.resync, pushes = make_resync(server, version=3)
        engine.policy_version = 3
        async with asyncio.timeout(20):
            calls = [engine.generate(f"g{i}-m0", PROMPT, SAMPLING) for i in range(60)]
            assert len(await asyncio.gather(*calls)) == 60
    assert len(server.faults) < 10000 - 72
    assert pushes == []  # a lost connection alone pushes no weights


def make_resync(*servers: ContractServer, version: int, delay_s: float = 0.0, model=None):
    """Returns a push of `version`, and of `model` if given, and the urls it was called with."""
    calls: list[str] = []

    async def resync(url: str) -> None:
        calls.append(url)
        await asyncio.sleep(delay_s)
        next(server for server in servers if server.url == url).update(version, model)

    return resync, calls


async def test_a_server_that_died_gets_its_weights_before_its_first_token():
    """F1: requests in flight and new ones wait for it, and none sees the weights of its disk."""
    current, on_disk = make_model(0), make_model(1)
    server = ContractServer(current, weight_version="5", faults=["hang"] * 3)
    resync, pushes = make_resync(server, version=5, delay_s=0.2, model=current)
    async with running(server):
        port = int(server.url.rpartition(":")[2])
        engine = VLLMEngine([server.url])
        engine.policy_version, engine.resync = 5, resync
        calls = [
            asyncio.create_task(engine.generate(f"g{i}-m0", PROMPT, SAMPLING)) for i in range(6)
        ]
        while server.faults:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    late = asyncio.create_task(engine.generate("late-m0", PROMPT, SAMPLING))
    await asyncio.sleep(2.5)
    num_before = len(server.bodies)
    assert not late.done()
    server.restart(on_disk)
    async with running(server, port), asyncio.timeout(5):
        generations = await asyncio.gather(*calls, late)
    await engine.aclose()
    for generation in generations:
        assert generation.versions == [5] * 6
        expected = reference_logprobs(current, PROMPT, generation.token_ids)
        assert generation.logprobs == pytest.approx(expected, abs=1e-5)
    assert pushes == [server.url] and len(server.bodies) - num_before >= 4


async def test_answers_of_old_weights_are_thrown_away_and_asked_for_again():
    """F5: a restart between two requests, which no connection tells of."""
    current, old = make_model(0), make_model(1)
    server = ContractServer(current, weight_version="3")
    async with client(server) as engine:
        engine.policy_version = 3
        engine.resync, pushes = make_resync(server, version=3, delay_s=0.1, model=current)
        first = await engine.generate("a-m0", PROMPT, SAMPLING)
        for restarted in (lambda: server.restart(old), lambda: server.update(2, old)):
            restarted()
            calls = [engine.generate(f"b-m{i}", PROMPT, SAMPLING) for i in range(5)]
            for generation in [first, *await asyncio.gather(*calls)]:
                assert generation.versions == [3] * 6
                expected = reference_logprobs(current, PROMPT, generation.token_ids)
                assert generation.logprobs == pytest.approx(expected, abs=1e-5)
        assert len(pushes) == 2  # once per restart, not once per request


async def test_a_trajectory_that_moves_to_a_server_behind_its_own_is_continued_by_newer_weights():
    """One server has the update already and dies; the other one gets it before the next turn."""
    ahead = ContractServer(make_model(0), weight_version="2")
    behind = ContractServer(make_model(1), weight_version="1")
    async with running(behind):
        async with running(ahead):
            engine = VLLMEngine([ahead.url, behind.url])
            engine.policy_version = 1
            engine.resync, pushes = make_resync(ahead, behind, version=2, model=make_model(0))
            first = await engine.generate("g-m0-t000", PROMPT, SAMPLING)
        longer = PROMPT + first.token_ids
        second = await asyncio.wait_for(engine.generate("g-m0-t001", longer, SAMPLING), 20)
        await engine.aclose()
    assert (first.versions, second.versions) == ([2] * 6, [2] * 6)
    assert pushes == [behind.url]


async def test_a_server_that_a_push_did_not_reach_gets_its_weights_before_its_next_token():
    """Also where no request of its own told the engine that it was away."""
    missed, current = [ContractServer(make_model(), weight_version="4") for _ in range(2)]
    async with client(missed, current) as engine:
        engine.resync, calls = make_resync(missed, current, version=5)
        engine.policy_version = 4
        await engine.generate("before-m0", PROMPT, SAMPLING)
        assert calls == []
        current.update(5)
        engine.distrust(missed.url + "/")
        engine.policy_version = 5
        generations = await asyncio.gather(
            *(engine.generate(f"g{i}-m0", PROMPT, SAMPLING) for i in range(4))
        )
        assert calls == [missed.url]
        assert [generation.versions for generation in generations] == [[5] * 6] * 4
        # The probe, before, two of the four groups; none thrown away.
        assert len(missed.bodies) == 1 + 1 + 2


async def test_a_server_whose_engine_hangs_is_not_asked_again_soon(monkeypatch):
    """A push did not get through to it; its HTTP side goes on answering."""
    monkeypatch.setattr(engine_module, "LABEL_TIMEOUT_S", 0.3)
    hangs, current = [ContractServer(make_model(), weight_version="5") for _ in range(2)]
    hangs.engine_hangs = True
    async with client(hangs, current) as engine:
        engine.resync, calls = make_resync(hangs, current, version=5)
        engine.policy_version = 5
        engine.distrust(hangs.url)
        for number in range(4):
            generation = await engine.generate(f"g{number}-m0", PROMPT, SAMPLING)
            assert generation.versions == [5] * 6
        assert hangs.num_label_questions == 1
        assert calls == [] and len(hangs.bodies) == 1  # the probe


async def test_a_server_without_labels_holds_version_zero_while_weights_can_be_sent():
    """The trainer resumed at version 4; the server has never had an update."""
    server = ContractServer(make_model(), weight_version="default")
    async with client(server) as engine:
        engine.resync, calls = make_resync(server, version=4)
        first = await engine.generate("a-m0", PROMPT, SAMPLING)
        engine.policy_version = 4
        second = await engine.generate("a-m1", PROMPT, SAMPLING)
        assert (first.versions, second.versions, len(calls)) == ([0] * 6, [4] * 6, 1)


async def test_cancelled_callers_do_not_stop_a_push():
    server = ContractServer(make_model(), weight_version="default")
    async with client(server) as engine:
        engine.resync, calls = make_resync(server, version=1, delay_s=0.5)
        engine.policy_version = 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await engine.generate("a-m0", PROMPT, SAMPLING)
        generation = await engine.generate("a-m1", PROMPT, SAMPLING)
        assert (generation.versions, len(calls)) == ([1] * 6, 1)


async def test_weights_that_cannot_be_sent_are_an_error_in_the_end():
    async def resync(url: str) -> None:
        raise InferenceError("the disk is full")

    server = ContractServer(make_model(), weight_version="default")
    async with client(server, retry_for_s=0.5) as engine:
        engine.resync, engine.policy_version = resync, 1
        with pytest.raises(InferenceError, match="weights could not be sent: the disk is full"):
            await engine.generate("a-m0", PROMPT, SAMPLING)


@settings(max_examples=25)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=5),
    faults=st.lists(st.sampled_from(["none", "reset", "429"]), max_size=2),
    max_tokens=st.integers(1, 20),
    scale_out=st.booleans(),
    versions=st.lists(st.integers(0, 1), min_size=8, max_size=8),
)
def test_an_aborted_request_is_continued_into_one_generation(
    cuts, faults, max_tokens, scale_out, versions
):
    """Wherever it is cut: as many tokens as asked for, each with its log-probability and version,
    and no part samples with the random numbers of another."""
    model = make_model()
    labels = [sum(versions[: i + 1]) for i in range(len(versions))]  # never decreasing

    class Updating(ContractServer):
        async def _payload(self, path, prompt_ids, parameters, fault):
            if not parameters["ignore_eos"]:
                self.weight_version = str(labels[min(len(served), len(labels) - 1)])
                served.append((prompt_ids, parameters))
            return await super()._payload(path, prompt_ids, parameters, fault)

    served: list[tuple[list[int], dict]] = []

    server = Updating(model, scale_out=scale_out, retry_after="0")
    server.faults = [*faults, *(f"abort{cut}" for cut in cuts)]
    generation = asyncio.run(generate_one(server, SamplingParams(max_tokens), seed=3))
    assert generation.finish_reason == "length"
    assert len(generation.token_ids) == max_tokens
    expected = reference_logprobs(model, PROMPT, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=1e-5)
    starts = [len(prompt) - len(PROMPT) for prompt, _ in served]
    for (prompt, parameters), start in zip(served, starts, strict=True):
        assert prompt == PROMPT + generation.token_ids[:start]
        assert parameters["max_tokens"] == max_tokens - start
    seeds = {
        start: parameters["seed"] for start, (_, parameters) in zip(starts, served, strict=True)
    }
    assert len(set(seeds.values())) == len(seeds)
    if scale_out:
        wanted: list[int] = []
        for number, end in enumerate([*starts[1:], max_tokens]):
            wanted += [labels[min(number, len(labels) - 1)]] * (end - len(wanted))
        assert generation.versions == wanted
    else:
        assert generation.versions == [0] * max_tokens


async def test_a_request_that_is_aborted_for_ever_ends_with_the_callers_deadline():
    async with client(ContractServer(make_model(), faults=["abort0"] * 1000)) as engine:
        await engine.start()
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await engine.generate("g-m0", PROMPT, SAMPLING)
        assert time.monotonic() - begin < 1.0


async def test_a_continuation_never_goes_back_to_older_weights():
    """Aborted on a server that was already updated, continued on one that was not yet."""
    updated = ContractServer(make_model(), weight_version="2", faults=["abort3", "503"])
    behind = ContractServer(make_model(), weight_version="1")
    updated.retry_after = "30"
    async with client(updated, behind) as engine:
        engine.policy_version = 1
        engine.resync, calls = make_resync(updated, behind, version=2)
        generation = await engine.generate("g-m0", PROMPT, SAMPLING)
        assert generation.versions == [2] * 6 and calls == [behind.url]
