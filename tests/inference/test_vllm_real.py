"""Client and launcher against a real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from agent_play import TASKS, Recording, openai_sdk, play_groups, require_trained_alike
from contract_server import ContractServer, make_model, running
from test_launcher import server_pid
from vllm_fixture import ROOT, TOY_MODEL, differences, running_vllm, sample_many, vllm_python

from agentrl.cli.doctor import doctor
from agentrl.inference.base import Generation, SamplingParams
from agentrl.inference.http import make_client
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.vllm import VLLMEngine
from agentrl.inference.weights.plugin import write_plugin
from agentrl.model.load import load_model, load_tokenizer
from agentrl.model.text.renderer import Renderer
from agentrl.rollout import read_trajectories

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_KILLS = 2
PROMPT = [5, 17, 23, 40, 8, 77, 120]
EOS = 2
NEVER_ENDS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerLauncher]:
    vllm_python()
    directory = tmp_path_factory.mktemp("vllm")
    with running_vllm(directory, plugin_dir=write_plugin(directory / "plugin")) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def float32_model():
    return load_model(str(TOY_MODEL), dtype=torch.float32, device="cpu").eval()


@contextlib.asynccontextmanager
async def client(*urls: str, **settings) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(urls, **settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.aclose()


async def call(url: str, method: str, path: str, body: object = None) -> dict:
    async with make_client(url) as http:
        response = await http.request(method, path, json=body)
    assert response.status_code == 200, response.text
    return json.loads(response.content or b"{}")


async def metric(url: str, name: str) -> float:
    async with make_client(url) as http:
        text = (await http.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))


async def set_version(url: str, version: int) -> None:
    await call(url, "POST", "/update_weight_version", {"new_version": str(version)})


async def until(condition, timeout_s: float = 10.0) -> float:
    begin = time.monotonic()
    while not await condition():
        assert time.monotonic() - begin < timeout_s, "it never came true"
        await asyncio.sleep(0.01)
    return time.monotonic() - begin


def test_doctor_finds_nothing_to_fix(server, capsys):
    overrides = [f"--inference.urls={server.urls[0]}", "--rollout.temperature=0.8"]
    status = doctor(None, overrides)
    shown = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{shown}")
    lines = [line for line in shown.splitlines() if server.urls[0] in line]
    assert status == 0
    assert len(lines) == 6
    assert all(line.startswith("ok") for line in lines)


@pytest.mark.promise
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float32_logprobs_are_the_trainers(server, float32_model, temperature, capsys):
    prompts, generations = sample_many(server.urls[0], temperature)
    found = differences(float32_model, prompts, generations, temperature)
    with capsys.disabled():
        print(f"\nfloat32, T={temperature}: max {max(found):.2e} nats over {len(found)} tokens")
    assert len(found) >= 100
    assert max(found) < 1e-4


async def test_what_is_sampled_for_an_agent_is_what_is_trained(server, float32_model, capsys):
    engine = Recording(VLLMEngine(server.urls, seed=1))
    try:
        batch = await play_groups(
            engine,
            Renderer(load_tokenizer(str(TOY_MODEL))),
            openai_sdk,
            groups=8,
            group_size=2,
            env_config=TASKS,
            max_turn_tokens=24,
            max_context_tokens=1024,
        )
    finally:
        await engine.engine.aclose()
    trajectories, calls = batch.trajectories, engine.calls
    assert len(trajectories) == 16 and all(each.error is None for each in trajectories)
    said = require_trained_alike(float32_model, trajectories, calls)
    with capsys.disabled():
        print(f"\n{said}")
    assert len(calls) > 16


def test_each_episode_is_there_once_after_kills_and_shards_make_the_same(server, tmp_path, capsys):
    run = str(ROOT / "examples" / "quickstart" / "run.toml")
    served = ["--inference.backend", "vllm", "--inference.urls", server.urls[0]]
    size = ["--eval.num_tasks", "48", "--eval.samples_per_task", "4"]
    size += ["--rollout.max_concurrent", "4"]

    def start(folder, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "agentrl", "eval", run, *size, *served, *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        out = ["--out", str(tmp_path / folder)]
        return subprocess.Popen([*command, *out], env=environment, stdout=subprocess.DEVNULL)

    def written(folder) -> int:
        return sum(path.stat().st_size for path in (tmp_path / folder).glob("trajectories/step_*"))

    assert start("whole").wait() == 0
    for number in range(NUM_KILLS):
        more = ["--resume"] if number else []
        before, process = written("killed"), start("killed", *more)
        while written("killed") <= before:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start("killed", "--resume").wait() == 0
    for shard in ("1/2", "2/2"):
        assert start("shards", "--shard", shard).wait() == 0
    assert start("shards", "--resume").wait() == 0
    results = {}
    for folder in ("whole", "killed", "shards"):
        ids = Counter(t.trajectory_id for _, t in read_trajectories(tmp_path / folder))
        assert set(ids.values()) == {1} and len(ids) == 192, folder
        results[folder] = json.loads((tmp_path / folder / "eval.json").read_text())
        assert results[folder]["num_failed"] == 0
    averages = {folder: result["avg@4"] for folder, result in results.items()}
    with capsys.disabled():
        print({folder: average["value"] for folder, average in averages.items()})
    for other in ("killed", "shards"):
        apart = abs(averages[other]["value"] - averages["whole"]["value"])
        assert apart < 4 * averages["whole"]["standard_error"]


@pytest.mark.parametrize("endpoint", ["/inference/v1/generate", "/v1/completions"])
async def test_both_endpoints_keep_stop_tokens_and_repeat_with_a_seed(server, endpoint):
    async with client(server.urls[0], seed=4) as engine:
        [state] = engine._pool.servers
        assert (state.endpoint, state.raw_logprobs) == ("/inference/v1/generate", False)
        state.endpoint = endpoint
        sampling = SamplingParams(200, 1.5, stop_token_ids=(12, 30, 41))
        ids = [f"g-m{i}" for i in range(8)]
        first = await asyncio.gather(*(engine.generate(i, PROMPT, sampling) for i in ids))
        again = await asyncio.gather(*(engine.generate(i, PROMPT, sampling) for i in ids))
        with_zero = await engine.generate("z-m0", [0, 0, 5], SamplingParams(3))
    assert [g.token_ids for g in first] == [g.token_ids for g in again]
    assert len({tuple(g.token_ids) for g in first}) > 1
    assert {g.finish_reason for g in first} <= {"stop", "length"}
    stopped = [g for g in first if g.finish_reason == "stop"]
    assert stopped
    for generation in stopped:
        assert generation.token_ids[-1] in (EOS, 12, 30, 41)
        assert not {EOS, 12, 30, 41} & set(generation.token_ids[:-1])
    assert len(with_zero.token_ids) == 3 or with_zero.finish_reason == "stop"
    assert with_zero.versions == [0] * len(with_zero.token_ids)


def test_the_first_token_id_can_be_sampled(server):
    async def go():
        parameters = {"max_tokens": 3, "allowed_token_ids": [0], "logprobs": 0, **NEVER_ENDS}
        body = {"model": "policy", "token_ids": PROMPT, "sampling_params": parameters}
        return await call(server.urls[0], "POST", "/inference/v1/generate", body)

    assert asyncio.run(go())["choices"][0]["token_ids"] == [0, 0, 0]


async def test_cancelling_frees_the_engine_long_before_the_sequence_would_end(server, capsys):
    url = server.urls[0]

    async def num_running() -> float:
        return await metric(url, "vllm:num_requests_running")

    async def is_running() -> bool:
        return await num_running() > 0

    async def is_free() -> bool:
        return await num_running() == 0

    async with client(url) as engine:
        task = asyncio.create_task(long_sequence(engine, "g-m0"))
        await until(is_running)
        task.cancel()
        took = await until(is_free)
    with capsys.disabled():
        print(f"\ncancelled: the engine was free after {1e3 * took:.0f} ms")
    assert took < 3


async def long_sequence(engine: VLLMEngine, request_id: str, max_tokens: int = 1500) -> Generation:
    """One that does not end by itself: the probability of EOS is small but not zero."""
    real = engine._sampling_of

    def without_end(part_id, sampling):
        parameters = real(part_id, sampling)
        parameters.ignore_eos = True
        return parameters

    engine._sampling_of = without_end
    return await engine.generate(request_id, PROMPT, SamplingParams(max_tokens))


async def test_an_aborted_sequence_is_continued_and_exact(server, float32_model):
    """Paused with `abort` twice while one sequence grows; the versions say where."""

    url = server.urls[0]
    async with client(url, seed=9) as engine:
        task = asyncio.create_task(long_sequence(engine, "g-m0"))
        for version in (1, 2):
            await asyncio.sleep(0.4)
            await call(url, "POST", "/pause?mode=abort")
            await set_version(url, version)
            engine.policy_version = version
            await call(url, "POST", "/resume")
        generation = await task
    assert len(generation.token_ids) == 1500
    assert generation.finish_reason == "length"
    assert set(generation.versions) == {0, 1, 2}
    assert generation.versions == sorted(generation.versions)
    # The label "default" of the first part is stamped with the policy's version, 0.
    assert max(differences(float32_model, [PROMPT], [generation], 1.0)) < 1e-4


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_every_pause_empties_the_prefix_cache(server, mode):
    """An update is exact without a salt, which would cost prefix hits between turns."""
    prompt = [(11 * i) % 340 + 3 for i in range(300)]

    url = server.urls[0]
    hits = []
    async with client(url) as engine:
        for pause in (False, False, True):
            if pause:
                await call(url, "POST", f"/pause?mode={mode}")
                await call(url, "POST", "/resume")
            before = await metric(url, "vllm:prefix_cache_hits_total")
            await engine.generate("g-m0", prompt, SamplingParams(1))
            hits.append(await metric(url, "vllm:prefix_cache_hits_total") - before)
    _, second, after_pause = hits
    assert second >= 256
    assert after_pause == 0


async def test_a_stopped_server_is_left_by_its_deadline(server, capsys):
    """F2. SIGSTOP: the kernel still accepts connections, nobody answers."""

    pid = server_pid(server.urls[0])
    async with (
        running(ContractServer(make_model())) as healthy,
        client(server.urls[0], healthy.url, request_timeout_s=2.0) as engine,
    ):
        os.kill(pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            calls = [engine.generate(f"g{i}-m0", [3, 4, 5], SamplingParams(4)) for i in range(6)]
            await asyncio.gather(*calls)
            took = time.monotonic() - begin
        finally:
            os.kill(pid, signal.SIGCONT)
    with capsys.disabled():
        print(f"\nF2: request timeout 2 s, everything answered after {took:.2f} s")
    assert 2 <= took < 10


async def test_a_restarted_server_gets_its_weights_before_its_first_token(server, capsys):
    """F1 and F5: the server is killed in the middle of requests and comes back with the weights
    of its disk; requests wait, none fails, none is answered from those."""

    url = server.urls[0]
    pushes = []

    async def resync(at: str) -> None:
        pushes.append(await call(at, "GET", "/weight_info"))
        await set_version(at, 7)

    async with client(url, retry_for_s=300) as engine:
        engine.resync = resync
        engine.policy_version = 7
        before = await engine.generate("a-m0", PROMPT, SamplingParams(8))
        calls = [asyncio.create_task(long_sequence(engine, f"g{i}-m0", 3000)) for i in range(4)]
        await asyncio.sleep(0.3)
        assert not any(call.done() for call in calls)
        killed_at = time.monotonic()
        os.kill(server_pid(url), signal.SIGKILL)
        health = make_client(url)

        async def is_back() -> bool:
            with contextlib.suppress(Exception):
                return (await health.get("/health")).status_code == 200
            return False

        await asyncio.sleep(1)
        await until(is_back, 200)
        back_at = time.monotonic()
        first = asyncio.create_task(engine.generate("b-m0", PROMPT, SamplingParams(8)))
        await first
        recovered_at = time.monotonic()
        generations = [*await asyncio.gather(*calls), first.result()]
        await health.aclose()
    pushes, generations, away_s, recovery_s = (
        pushes,
        [before, *generations],
        back_at - killed_at,
        recovered_at - back_at,
    )
    with capsys.disabled():
        print(f"\nF1: away {away_s:.1f} s, first answer {recovery_s:.2f} s after it was back")
    # Once because it answered with a word instead of version 7, once after the restart.
    assert [push["weight_version"] for push in pushes][-1] == "default"
    assert len(pushes) == 2
    assert server.restarts == 1
    assert all(set(generation.versions) == {7} for generation in generations)
    assert recovery_s < 60
