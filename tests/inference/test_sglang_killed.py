"""Real SGLang servers that are killed, stopped or poisoned, alone and behind the real router."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from sglang_fixture import running_router, running_sglang
from test_sglang import PARITY, PROMPT, busy, client, perturb, syncing, toy_model, worst
from vllm_fixture import tree

from agentrl.errors import InferenceError
from agentrl.inference.base import SamplingParams
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.weights.sglang import FolderTransfer, TensorTransfer, _pickled

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 500.0
"""For a server that is started again, on a machine with other work."""
SAMPLING = SamplingParams(8, 0.7)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    with running_sglang(
        tmp_path_factory.mktemp("logs"), num_servers=2, hung_after_s=20.0
    ) as launcher:
        yield launcher


def processes(launcher: ServerLauncher, number: int, named: str = "") -> list[int]:
    guard = launcher._servers[number].process
    assert guard is not None
    pids = tree(guard.pid)
    return [pid for pid in pids if named in Path(f"/proc/{pid}/comm").read_text()]


def exact(model, generation, version: int) -> bool:
    right = worst(model, PROMPT, generation, 0.7) < PARITY
    return right and generation.versions == [version] * len(generation.token_ids)


def pushed_to_all(launcher: ServerLauncher, directory: Path, **settings):
    sync = syncing(launcher.urls[0], FolderTransfer(directory), timeout_s=WAIT_S, **settings)
    sync._urls = list(launcher.urls)
    return sync


def test_one_of_two_is_killed_while_it_samples_and_misses_an_update(launcher, tmp_path):
    model = toy_model()
    perturb(model, 1)
    restarts = launcher.restarts

    async def go():
        async with client(*launcher.urls, retry_for_s=WAIT_S) as engine:
            sync = pushed_to_all(launcher, tmp_path, on_missed=engine.distrust)
            engine.resync = sync.push_to
            await sync.push(model, 1)
            engine.policy_version = 1
            calls = [
                engine.generate(f"g{n}-m0-t0", PROMPT, SamplingParams(300, 0.7)) for n in range(6)
            ]
            running = asyncio.gather(*calls)
            async with asyncio.timeout(60):
                while not (await busy(launcher.urls[0]) and await busy(launcher.urls[1])):
                    await asyncio.sleep(0.01)
            for pid in processes(launcher, 0):
                os.kill(pid, signal.SIGKILL)
            first = await running
            assert all(exact(model, each, 1) for each in first)
            perturb(model, 2)
            metrics = await sync.push(model, 2)
            engine.policy_version = 2
            calls = [engine.generate(f"h{n}-m0-t0", PROMPT, SAMPLING) for n in range(6)]
            second = await asyncio.gather(*calls)
            # Back again, with the weights that it missed before its first token.
            async with asyncio.timeout(WAIT_S):
                while not await answers(launcher.urls[0]):
                    await asyncio.sleep(0.2)
            engine.distrust(launcher.urls[0])
            calls = [engine.generate(f"i{n}-m0-t0", PROMPT, SAMPLING) for n in range(6)]
            third = await asyncio.gather(*calls)
            await sync.aclose()
            return metrics, second + third

    metrics, generations = asyncio.run(go())
    assert metrics["sync/servers_missed"] == 1 and launcher.restarts == restarts + 1
    assert all(exact(model, each, 2) for each in generations)


async def answers(url: str) -> bool:
    async with httpx.AsyncClient() as http:
        try:
            return (await http.get(f"{url}/model_info")).status_code == 200
        except httpx.TransportError:
            return False


def test_an_update_that_kills_the_server_is_sent_again_when_it_is_back(launcher, tmp_path):
    model = toy_model()
    perturb(model, 3)
    restarts = launcher.restarts
    transfer = TensorTransfer(tmp_path)
    send = transfer.send

    async def poisoned(control):
        transfer.send, right = send, transfer._bodies
        name, tensor = "model.norm.weight", model.model.norm.weight.data[:3].clone()
        transfer._bodies = [_pickled([(name, tensor)])]
        try:
            await send(control)
        finally:
            transfer._bodies = right

    async def go():
        transfer.send = poisoned
        sync = syncing(launcher.urls[0], transfer, timeout_s=WAIT_S)
        await sync.push(model, 3)
        await sync.aclose()
        async with client(launcher.urls[0], retry_for_s=WAIT_S) as engine:
            engine.policy_version = 3
            return await engine.generate("a-m0", PROMPT, SAMPLING)

    assert exact(model, asyncio.run(go()), 3)
    assert launcher.restarts == restarts + 1


def test_an_engine_that_hangs_is_left_for_the_other_and_started_again(launcher, tmp_path):
    model = toy_model()
    perturb(model, 4)
    restarts = launcher.restarts

    async def go():
        settings = {"request_timeout_s": 20.0, "retry_for_s": WAIT_S}
        async with client(*launcher.urls, **settings) as engine:
            sync = pushed_to_all(launcher, tmp_path)
            engine.resync = sync.push_to
            await sync.push(model, 4)
            engine.policy_version = 4
            for pid in processes(launcher, 0, "schedul"):
                os.kill(pid, signal.SIGSTOP)
            calls = [engine.generate(f"g{n}-m0-t0", PROMPT, SAMPLING) for n in range(4)]
            generations = await asyncio.gather(*calls)
            async with asyncio.timeout(WAIT_S):
                while launcher.restarts == restarts or not await answers(launcher.urls[0]):
                    await asyncio.sleep(0.5)
        async with client(launcher.urls[0], retry_for_s=WAIT_S) as engine:
            engine.resync, engine.policy_version = sync.push_to, 4
            engine.distrust(launcher.urls[0])
            generations.append(await engine.generate("h-m0", PROMPT, SAMPLING))
        await sync.aclose()
        return generations

    assert all(exact(model, each, 4) for each in asyncio.run(go()))


async def test_behind_the_router_both_get_the_weights_and_a_cancellation(launcher, tmp_path):
    model = toy_model()
    perturb(model, 5)

    with running_router(tmp_path / "router.log", *launcher.urls) as router:
        async with client(router, retry_for_s=WAIT_S) as engine:
            await engine.start()
            assert sorted(engine._workers[router]) == sorted(launcher.urls)
            sync = pushed_to_all(launcher, tmp_path)
            await sync.push(model, 5)
            await sync.aclose()
            engine.policy_version = 5
            calls = [engine.generate(f"g{n}-m0-t0", PROMPT, SAMPLING) for n in range(6)]
            generations = await asyncio.gather(*calls)
            doomed = asyncio.create_task(engine.generate("h-m0", PROMPT, SamplingParams(3900)))
            async with asyncio.timeout(60):
                while not any([await busy(url) for url in launcher.urls]):
                    assert not doomed.done(), "it ended before it was cancelled"
                    await asyncio.sleep(0.01)
                doomed.cancel()
                while any([await busy(url) for url in launcher.urls]):
                    await asyncio.sleep(0.01)
    assert all(exact(model, each, 5) for each in generations)


async def test_a_router_without_a_worker_is_an_error_at_the_start(tmp_path):
    expected = pytest.raises(InferenceError, match=r"503|without a worker")
    with running_router(tmp_path / "router.log") as router, expected:
        async with client(router, retry_for_s=0.1) as engine:
            await engine.start()


def test_a_server_of_raw_logprobs_is_noticed_and_refused(tmp_path):
    variables = {"OMP_NUM_THREADS": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}

    async def go(url: str):
        async with client(url) as engine:
            await engine.start()
            assert engine.probe_result(url) == ("/generate", True)
            await engine.generate("a-m0", PROMPT, SAMPLING)

    expected = pytest.raises(InferenceError, match="SGLANG_RETURN_ORIGINAL_LOGPROB")
    with running_sglang(tmp_path, env=variables) as launcher, expected:
        asyncio.run(go(launcher.urls[0]))
