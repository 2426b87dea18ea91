"""The order of control calls, and that no server stays paused."""

import asyncio

import pytest
from control_server import ControlServer, OneFile, error, failing, hanging, serving, tiny_model

from agentrl.errors import WeightSyncError
from agentrl.inference.http import make_client
from agentrl.inference.weights.control import RouteMissing, ServerUnreachable, VLLMControl
from agentrl.inference.weights.files import weights_path, write_weights

ROUTES = [
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
]
BETWEEN = ROUTES[1:-1]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights")
    write_weights(tiny_model(), weights_path(directory, 3))
    return directory


async def update(server, weights, *, timeout_s=5.0, on_update="keep"):
    async with make_client() as http:
        control = VLLMControl(http, server.url, timeout_s=timeout_s)
        transfer = OneFile(weights_path(weights, 3))
        await transfer.connect(control)
        return await control.update(lambda: transfer.send(control), version=3, on_update=on_update)


@pytest.mark.parametrize("on_update", ["keep", "wait", "abort"])
async def test_calls_come_in_the_safe_order(weights, on_update):
    async with serving(ControlServer()) as server:
        paused_s = await update(server, weights, on_update=on_update)
        assert server.routes() == ROUTES
        assert server.calls[1] == f"/pause?mode={on_update}&clear_cache=true"
        assert server.bodies[4] == {"weight_version": "3"}
        assert server.version == "3" and server.num_updates == 1 and not server.paused
        assert 0 < paused_s < 5


@pytest.mark.parametrize("route", BETWEEN)
@pytest.mark.parametrize("fault", ["status", "hang", "disconnect"])
async def test_a_server_is_resumed_when_an_update_fails(weights, route, fault):
    async with serving(ControlServer()) as server:

        async def disconnect():
            raise asyncio.CancelledError  # aiohttp closes the connection without an answer

        scripts = {"status": failing(500), "hang": hanging(), "disconnect": disconnect}
        server.answer[route] = scripts[fault]
        timeout_s = 0.3 if fault == "hang" else 5.0
        with pytest.raises(WeightSyncError, match=route) as caught:
            await update(server, weights, timeout_s=timeout_s)
        assert isinstance(caught.value, ServerUnreachable) == (fault == "disconnect")
        assert server.routes()[-1] == "/resume" and not server.paused


@pytest.mark.parametrize("route", BETWEEN)
async def test_a_server_is_resumed_when_the_caller_is_cancelled(weights, route):
    async with serving(ControlServer()) as server:
        reached = asyncio.Event()
        server.answer[route] = hanging(reached)
        task = asyncio.create_task(update(server, weights))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.routes()[-1] == "/resume" and not server.paused


async def test_a_cancellation_waits_for_the_resume_to_end(weights):
    async with serving(ControlServer()) as server:
        asked = asyncio.Event()

        async def slowly():
            asked.set()
            await asyncio.sleep(0.2)

        server.answer["/resume"] = slowly
        task = asyncio.create_task(update(server, weights))
        await asked.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not server.paused


async def test_a_resume_that_fails_once_is_repeated(weights):
    async with serving(ControlServer()) as server:
        failures = [failing(500)]

        async def once():
            return await failures.pop()() if failures else None

        server.answer["/resume"] = once
        await update(server, weights)
        assert server.routes().count("/resume") == 2 and not server.paused


async def test_a_server_that_cannot_be_resumed_is_named_with_the_first_error(weights):
    async with serving(ControlServer()) as server:
        server.answer["/update_weights"] = failing(500, "no memory left")
        server.answer["/resume"] = failing(500, "engine is dead")
        with pytest.raises(WeightSyncError) as caught:
            await update(server, weights)
        for part in ("no memory left", "PAUSED", "engine is dead", server.url):
            assert part in str(caught.value)


async def test_an_update_that_a_killed_trainer_left_open_is_closed(weights):
    async with serving(ControlServer()) as server:
        server.initialised, server.open_update = str(weights), True
        await update(server, weights)
        assert server.version == "3" and not server.open_update
        assert server.bodies[server.routes().index("/finish_weight_update")] == {}


async def test_a_server_that_dies_in_the_middle_is_unreachable_not_paused(weights):
    server = ControlServer()
    async with serving(server) as running:
        died = asyncio.Event()
        running.answer["/update_weights"] = hanging(died)
        task = asyncio.create_task(update(running, weights))
        await died.wait()
    with pytest.raises(ServerUnreachable) as caught:
        await task
    assert "PAUSED" not in str(caught.value)


async def test_a_server_without_the_routes_is_told_from_one_that_fails():
    async with serving(ControlServer()) as server, make_client() as http:
        control = VLLMControl(http, server.url, timeout_s=5)
        with pytest.raises(RouteMissing, match="VLLM_SERVER_DEV_MODE"):
            await control.post("/no_such_route")


async def test_what_the_worker_said_is_unwrapped(weights):
    async def wrapped():
        return error(
            500,
            "Call to collective_rpc method failed: Worker failed with error 'the file lacks x', "
            "please check the stack trace above for the root cause",
        )

    async with serving(ControlServer()) as server:
        server.answer["/update_weights"] = wrapped
        with pytest.raises(WeightSyncError, match=r"answered 500: the file lacks x$"):
            await update(server, weights)
