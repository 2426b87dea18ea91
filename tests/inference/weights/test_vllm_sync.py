"""Pushing versions of a model to servers, against a stand-in that computes real log-probs."""

import asyncio
import math

import pytest
import torch
from aiohttp import web
from control_server import (
    PROBE_IDS,
    ControlServer,
    failing,
    hanging,
    perturb,
    serving,
    syncing,
    tiny_model,
)

from agentrl.errors import WeightSyncError
from agentrl.inference.weights import control as control_module
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer


def names(directory):
    return sorted(path.name for path in directory.iterdir())


async def test_every_version_reaches_every_server(tmp_path):
    model = tiny_model()
    servers = ControlServer(), ControlServer()
    async with syncing(FileTransfer(tmp_path), *servers) as sync:
        for version in (0, 1, 2):
            metrics = await sync.push(model, version)
            for server in servers:
                assert server.version == str(version)
                for name, tensor in model.state_dict().items():
                    assert torch.equal(server.model.state_dict()[name], tensor)
            assert names(tmp_path) == [f"policy-{version}.safetensors"]
            assert 0 <= metrics["sync/probe_logprob_diff_max"] < 1e-5
            assert 0 < metrics["sync/paused_s"] <= metrics["sync/seconds"]
            assert 0 < metrics["sync/write_s"] <= metrics["sync/seconds"]
            perturb(model, seed=version)
    assert names(tmp_path) == []


async def test_servers_are_updated_at_the_same_time(tmp_path):
    servers, together = [ControlServer() for _ in range(3)], asyncio.Barrier(3)

    async def wait_for_the_others():
        await together.wait()

    for server in servers:
        server.answer["/update_weights"] = wait_for_the_others
    async with syncing(FileTransfer(tmp_path), *servers) as sync, asyncio.timeout(10):
        await sync.push(tiny_model(), 1)


async def test_a_half_update_is_caught(tmp_path):
    def without_head(tensors):
        return {name: t for name, t in tensors.items() if name != "lm_head.weight"}

    server = ControlServer()
    server.model = tiny_model(seed=99, tied=False)
    model = tiny_model(tied=False)
    async with syncing(FileTransfer(tmp_path), server) as sync:
        await sync.push(model, 1)
        server.after_load = without_head
        perturb(model, seed=1, scale=0.02)
        with pytest.raises(WeightSyncError) as caught:
            await sync.push(model, 2)
        for part in (server.url, "version 2", "11 prompt tokens", "0.7", "0.0001"):
            assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embed_tokens.weight", (PROBE_IDS[2], 3)),
        ("model.layers.1.mlp.down_proj.weight", (0, 3)),
        ("model.norm.weight", 3),
    ],
)
async def test_one_element_left_behind_is_caught(tmp_path, name, place):
    def stale(tensors):
        tensors[name][place] += 0.5
        return tensors

    server = ControlServer()
    server.after_load = stale
    async with syncing(FileTransfer(tmp_path), server) as sync:
        with pytest.raises(WeightSyncError, match="does not compute"):
            await sync.push(tiny_model(), 1)


async def test_raw_logprobs_are_caught_by_the_sampled_token(tmp_path):
    server = ControlServer()
    honest = server.sample

    def raw(ids, parameters):
        return honest(ids, parameters | {"temperature": 1.0})

    server.sample = raw
    async with syncing(FileTransfer(tmp_path), server) as sync:
        with pytest.raises(WeightSyncError, match="logprobs-mode"):
            await sync.push(tiny_model(), 1)


async def test_nan_weights_end_in_an_error_not_in_an_update(tmp_path):
    server, model = ControlServer(), tiny_model()
    model.model.norm.weight.data[0] = math.nan
    async with syncing(FileTransfer(tmp_path), server) as sync:
        with pytest.raises(WeightSyncError, match="not finite"):
            await sync.push(model, 1)
        assert server.calls == []


async def test_a_label_of_another_trainer_is_refused(tmp_path):
    server = ControlServer()

    async def relabel():
        server.version = "12"

    server.answer["/inference/v1/generate"] = relabel
    async with syncing(FileTransfer(tmp_path), server) as sync:
        with pytest.raises(WeightSyncError, match="version 12"):
            await sync.push(tiny_model(), 1)


async def test_a_restarted_server_gets_what_was_pushed_not_what_is_trained(tmp_path):
    server = ControlServer()
    model = tiny_model()
    async with syncing(FileTransfer(tmp_path), server) as sync:
        with pytest.raises(WeightSyncError, match="nothing was pushed"):
            await sync.push_to(server.url)
        await sync.push(model, 4)
        pushed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        perturb(model, seed=1)
        server.restart()
        await sync.push_to(server.url + "/")
        assert server.version == "4" and server.initialised == str(tmp_path)
        for name, tensor in pushed.items():
            assert torch.equal(server.model.state_dict()[name], tensor)


async def test_one_server_that_fails_does_not_stop_the_others(tmp_path):
    good, bad, worse = ControlServer(), ControlServer(), ControlServer()
    bad.answer["/update_weights"] = failing(500, "out of memory")
    worse.answer["/finish_weight_update"] = failing(500, "engine is dead")
    async with syncing(FileTransfer(tmp_path), good, bad, worse) as sync:
        with pytest.raises(WeightSyncError) as caught:
            await sync.push(tiny_model(), 1)
        assert "out of memory" in str(caught.value) and "engine is dead" in str(caught.value)
        assert good.version == "1"
        assert not (good.paused or bad.paused or worse.paused)
        bad.answer.clear()
        worse.answer.clear()
        worse.open_update = True
        await sync.push(tiny_model(seed=1), 2)
        assert {good.version, bad.version, worse.version} == {"2"}
        assert names(tmp_path) == ["policy-2.safetensors"]


async def test_a_push_that_is_cancelled_leaves_all_servers_running(tmp_path):
    servers = ControlServer(), ControlServer()
    reached = asyncio.Event()
    servers[0].answer["/update_weights"] = hanging(reached)
    servers[1].answer["/pause"] = hanging()
    async with syncing(FileTransfer(tmp_path), *servers) as sync:
        task = asyncio.create_task(sync.push(tiny_model(), 1))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(server.paused for server in servers)
        assert all(server.routes()[-1] == "/resume" for server in servers)


async def test_a_server_that_is_away_is_waited_for(tmp_path):
    server = ControlServer()
    async with serving(server):
        port = int(server.url.rpartition(":")[2])
    async with syncing(FileTransfer(tmp_path), server.url, timeout_s=20.0) as sync:
        push = asyncio.create_task(sync.push(tiny_model(), 1))
        await asyncio.sleep(0.3)
        assert not push.done()
        async with serving(server, port):
            await push
            assert server.version == "1"


@pytest.mark.parametrize("route", ["/update_weights", "/resume", "/inference/v1/generate"])
async def test_a_server_whose_engine_dies_in_the_middle_is_waited_for(tmp_path, route):
    """vLLM answers 500, and 503 on /health, until its process is replaced."""
    model, server = tiny_model(), ControlServer()
    died = False

    async def dies():
        nonlocal died
        died = True
        server.answer = {route: failed, "/resume": failed, "/health": fails_for_the_last_time}
        return await failed()

    async def failed():
        return web.json_response({"error": "EngineCore encountered an issue"}, status=503)

    async def fails_for_the_last_time():
        server.answer = {}
        server.restart()
        return await failed()

    async with syncing(FileTransfer(tmp_path), server, timeout_s=10.0) as sync:
        await sync.push(model, 0)
        perturb(model, seed=1)
        server.answer = {route: dies}
        await sync.push(model, 1)
        assert died and server.version == "1" and not server.paused


async def test_a_server_that_stays_away_ends_the_push(tmp_path):
    async with syncing(FileTransfer(tmp_path), "http://127.0.0.1:9", timeout_s=0.6) as sync:
        with pytest.raises(WeightSyncError, match="no answer"):
            await sync.push(tiny_model(), 1)


async def test_a_server_that_is_away_does_not_hold_up_the_others(tmp_path):
    """Told of, left out as long as it is away, and brought up to date when it is back."""
    model, here, away, missed = tiny_model(), ControlServer(), ControlServer(), []
    patient = {"on_missed": missed.append, "timeout_s": 20.0}
    async with syncing(FileTransfer(tmp_path), here, away, **patient) as sync:
        assert (await sync.push(model, 1))["sync/servers_missed"] == 0
    url, port = away.url, int(away.url.rpartition(":")[2])
    async with syncing(FileTransfer(tmp_path), here, url, **patient) as sync:
        for version in (2, 3):
            perturb(model, seed=version)
            metrics = await sync.push(model, version)
            assert metrics["sync/servers_missed"] == 1
            assert metrics["sync/seconds"] < 2
            assert here.version == str(version) and away.version == "1"
        assert missed == [url] * 2
        with pytest.raises(WeightSyncError, match="no answer"):
            await asyncio.wait_for(sync.push_to(url), 2)
        away.restart()
        async with serving(away, port):
            await sync.push_to(url)
            assert away.version == "3"
            pushed = model.state_dict()
            for name, tensor in away.model.state_dict().items():
                assert torch.equal(tensor, pushed[name])
            assert (await sync.push(model, 4))["sync/servers_missed"] == 0
            assert away.version == here.version == "4"
            assert missed == [url] * 2


@pytest.mark.parametrize("route", ["/update_weights", "/resume", "/inference/v1/generate"])
async def test_a_server_whose_engine_dies_does_not_hold_up_the_others(tmp_path, route):
    model, here, dies, missed = tiny_model(), ControlServer(), ControlServer(), []
    patient = {"on_missed": missed.append, "timeout_s": 20.0}
    async with syncing(FileTransfer(tmp_path), here, dies, **patient) as sync:
        await sync.push(model, 1)
        perturb(model, seed=1)
        dead = failing(503, "EngineCore encountered an issue")
        dies.answer = {key: dead for key in (route, "/resume", "/health")}
        metrics = await sync.push(model, 2)
        assert metrics["sync/servers_missed"] == 1 and metrics["sync/seconds"] < 4
        assert missed == [dies.url] and here.version == "2"


@pytest.mark.parametrize(
    "route",
    ["/init_weight_transfer_engine", pytest.param("/update_weights", marks=pytest.mark.slow)],
)
async def test_a_server_that_hangs_holds_up_the_others_once(tmp_path, monkeypatch, route):
    monkeypatch.setattr(control_module, "RESUME_TIMEOUT_S", 0.1)
    monkeypatch.setattr(control_module, "ENGINE_TIMEOUT_S", 0.1)

    model, here, hangs, missed = tiny_model(), ControlServer(), ControlServer(), []
    async with syncing(
        FileTransfer(tmp_path), here, hangs, on_missed=missed.append, timeout_s=2.0
    ) as sync:
        await sync.push(model, 1)
        # Its engine does; /health is answered.
        hangs.answer = {key: hanging() for key in (route, "/resume", "/weight_info")}
        for version, seconds in ((2, 5.0), (3, 1.0), (4, 1.0)):
            perturb(model, seed=version)
            metrics = await sync.push(model, version)
            assert metrics["sync/servers_missed"] == 1
            assert metrics["sync/seconds"] < seconds
            assert here.version == str(version)
        assert missed == [hangs.url] * 3
        with pytest.raises(WeightSyncError, match="did not answer"):
            await asyncio.wait_for(sync.push_to(hangs.url), 1)
        hangs.answer = {}
        await sync.push_to(hangs.url)
        assert hangs.version == "4" and not hangs.paused


async def test_only_a_server_out_of_reach_is_left_out(tmp_path):
    """One that refuses the weights ends the push; so does the wait when all are out of reach."""
    here, refuses, missed = ControlServer(), ControlServer(), []
    refuses.answer["/update_weights"] = failing(500, "out of memory")
    async with syncing(FileTransfer(tmp_path), here, refuses, on_missed=missed.append) as sync:
        with pytest.raises(WeightSyncError, match="out of memory"):
            await sync.push(tiny_model(), 1)
    gone, hasty = ("http://127.0.0.1:9", "http://127.0.0.1:10"), {"timeout_s": 0.6}
    async with syncing(FileTransfer(tmp_path), *gone, on_missed=missed.append, **hasty) as sync:
        with pytest.raises(WeightSyncError, match=r"127.0.0.1:9/.*127.0.0.1:10/"):
            await sync.push(tiny_model(), 1)
    assert missed == []


async def test_a_server_without_the_token_endpoint_is_probed_through_completions(tmp_path):
    server = ControlServer()
    server.offers_generate = False
    async with syncing(FileTransfer(tmp_path), server) as sync:
        metrics = await sync.push(tiny_model(), 1)
        assert metrics["sync/probe_logprob_diff_max"] < 1e-5
        assert server.routes()[-1] == "/v1/completions"


async def test_a_probe_that_is_aborted_ends_in_an_error(tmp_path):
    async def aborted():
        choice = {"token_ids": [], "finish_reason": "abort", "logprobs": {"content": []}}
        return web.json_response({"choices": [choice], "prompt_logprobs": [None]})

    server = ControlServer()
    server.answer["/inference/v1/generate"] = aborted
    async with syncing(FileTransfer(tmp_path), server) as sync:
        with pytest.raises(WeightSyncError, match="aborted the probe"):
            await sync.push(tiny_model(), 1)


async def test_probes_share_no_cache_and_calls_carry_the_token(tmp_path):
    server = ControlServer()
    async with syncing(FileTransfer(tmp_path), server, token="secret") as sync:
        await sync.push(tiny_model(), 1)
        await sync.push_to(server.url)
    salts = [body["cache_salt"] for body in server.bodies if "cache_salt" in body]
    assert len(salts) == len(set(salts)) == 2
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)


async def test_a_full_disk_is_named_and_the_servers_stay_untouched(tmp_path):
    server = ControlServer()
    async with syncing(FileTransfer(tmp_path), server) as sync:
        (tmp_path / ".policy-1.safetensors.tmp").mkdir()
        with pytest.raises(WeightSyncError, match=str(tmp_path)):
            await sync.push(tiny_model(), 1)
        assert server.calls == []
        (tmp_path / ".policy-1.safetensors.tmp").rmdir()


def test_what_a_killed_run_left_is_removed_at_the_start(tmp_path):
    directory = tmp_path / "made" / "on_demand"
    make_sync(directory, PROBE_IDS)
    (directory / "policy-41.safetensors").write_bytes(b"old")
    (directory / ".policy-42.safetensors.tmp").write_bytes(b"half")
    make_sync(directory, PROBE_IDS)
    assert names(directory) == []


def make_sync(directory, probe_ids):
    transfer, probe = FileTransfer(directory), {"temperature": 1.0, "tolerance": 1e-4}
    return ServerWeightSync(["http://x"], transfer=transfer, probe_ids=probe_ids, **probe)


def test_a_probe_of_one_token_is_refused(tmp_path):
    with pytest.raises(ValueError, match="two tokens"):
        make_sync(tmp_path, [1])
