"""Servers that sleep while the trainer learns, on one GPU whose memory is counted here."""

import asyncio
import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from control_server import PROBE_IDS, ControlServer, error, perturb, serving, tiny_model

from agentrl.errors import WeightSyncError
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer
from agentrl.train.serving import Serving


class Card:
    """The memory of one GPU, in GiB, and who has how much of it."""

    def __init__(self, total: float) -> None:
        self.total, self.held = total, {}
        self.peak = 0.0

    def fits(self, who: str, size: float) -> bool:
        others = sum(value for name, value in self.held.items() if name != who)
        if others + size > self.total:
            return False
        self.held[who] = size
        self.peak = max(self.peak, others + size)
        return True

    def take(self, who: str, size: float) -> None:
        assert self.fits(who, size), f"{who} needs {size} beside {self.held}"


CONTEXT, WEIGHTS, CACHE = 1.0, 16.0, 50.0
RESTING, AT_WORK = 8.0, 70.0


class SleepingServer(ControlServer):
    """Keeps the rules of vLLM 0.32's sleep; what it would crash of is a violation here."""

    def __init__(self, name: str, card: Card, launcher: "Launcher") -> None:
        super().__init__()
        self.name, self.card, self.launcher = name, card, launcher
        self.asleep: set[str] = set()
        self.dead = False
        self.dies_at: str | None = None
        """The route in whose middle its process is killed, once."""
        self.violations: list[str] = []
        self.boot()

    def boot(self) -> None:
        self.restart()
        self.asleep, self.dead = set(), False
        self.hold()

    def hold(self) -> None:
        size = CONTEXT + WEIGHTS * ("weights" not in self.asleep)
        self.card.take(self.name, size + CACHE * ("kv_cache" not in self.asleep))

    def die(self) -> None:
        self.dead = True
        self.card.take(self.name, 0)
        self.launcher.missed(self)

    async def handle(self, request: web.Request) -> web.Response:
        route = request.path + (f"?{request.query_string}" if request.query_string else "")
        if self.dies_at is not None and route.startswith(self.dies_at):
            self.dies_at = None
            self.die()
        if self.dead:
            request.transport.abort()
            return web.Response()
        return await super().handle(request)

    def do_sleep(self, body) -> web.Response:
        keeps = "level=1" in self.calls[-1]
        self.paused, self.asleep = True, {"weights", "kv_cache"}
        if not keeps:
            self.model = self.random_model(seed=77)  # what lies in memory that nobody filled
        self.hold()
        return web.json_response({})

    def do_wake_up(self, body) -> web.Response:
        part = self.calls[-1].partition("tags=")[2]
        if part in self.asleep:
            awake = self.asleep - {part}
            size = CONTEXT + WEIGHTS * ("weights" not in awake) + CACHE * ("kv_cache" not in awake)
            if not self.card.fits(self.name, size):
                return error(500, "CUDA Error: out of memory")
            self.asleep = awake
        if not self.asleep:
            self.paused = False
        return web.json_response({})

    def do_resume(self, body) -> web.Response:
        if self.asleep:
            self.violations.append("resumed without its memory")
        return super().do_resume(body)

    def do_update_weights(self, body) -> web.Response:
        if "weights" in self.asleep:
            self.violations.append("weights sent to a server that has no memory for them")
        return super().do_update_weights(body)

    def sample(self, ids, parameters):
        if self.asleep or self.paused:
            self.violations.append("sampled while asleep")
        return super().sample(ids, parameters)


class Launcher:
    """Starts dead servers again, but none while it is held."""

    def __init__(self) -> None:
        self.failure, self.held = None, False
        self.servers: list[SleepingServer] = []
        self.restarts = 0

    def missed(self, server: SleepingServer) -> None:
        if not self.held:
            asyncio.get_running_loop().call_later(0.01, self.start, server)

    def start(self, server: SleepingServer) -> None:
        if server.dead and not self.held:
            self.restarts += 1
            server.boot()

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        for server in self.servers:
            self.start(server)

    async def stop(self, url: str) -> None:
        next(server for server in self.servers if server.url == url).die()


@contextlib.asynccontextmanager
async def one_card(folder, num_servers: int = 1, total: float = 80.0):
    card, launcher = Card(total), Launcher()
    card.take("trainer", RESTING)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(num_servers):
            server = SleepingServer(f"server {number}", card, launcher)
            await stack.enter_async_context(serving(server))
            launcher.servers.append(server)
        sync = ServerWeightSync(
            [server.url for server in launcher.servers],
            transfer=FileTransfer(folder),
            probe_ids=PROBE_IDS,
            temperature=0.7,
            tolerance=1e-4,
            timeout_s=20.0,
            on_missed=lambda url: None,
        )
        engine: Any = SimpleNamespace(policy_version=0)
        fake: Any = launcher
        try:
            yield card, launcher, Serving(engine, sync, fake, sleeps=True)
        finally:
            await sync.aclose()


FAULTS = (
    *(["nothing"] * 4),
    *("dead before", "dead asleep", "refuses to sleep"),
    *(
        "/wake_up?tags=weights",
        "/update_weights",
        "/finish_weight_update",
        "/wake_up?tags=kv_cache",
    ),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cycles", [pytest.param(12, id="12"), pytest.param(200, id="200", marks=pytest.mark.slow)]
)
async def test_trainer_and_server_take_turns_whatever_fails(tmp_path, cycles):
    """No token comes from other weights than the policy's, and never both have the memory."""
    rng = random.Random(5)
    seen: dict[str, int] = {}

    async def refusal() -> web.Response:
        return error(500, "scripted")

    model = tiny_model(seed=0)
    async with one_card(tmp_path) as (card, launcher, serving_of):
        server = launcher.servers[0]
        await serving_of.push(model, 0)
        for step in range(1, cycles + 1):
            fault = rng.choice(FAULTS)
            seen[fault] = seen.get(fault, 0) + 1
            _, token_id, logprob = server.sample(PROBE_IDS, {"temperature": 0.7})
            logits = model(torch.tensor([PROBE_IDS])).logits[0, -1] / 0.7
            assert logprob == pytest.approx(logits.log_softmax(-1)[token_id].item(), abs=1e-4)
            assert server.version == str(step - 1)

            if fault == "dead before":
                server.die()
            elif fault == "refuses to sleep":
                server.answer["/sleep"] = refusal
            metrics = await serving_of.sleep(model)
            server.answer.clear()
            assert metrics["sync/not_asleep"] == (fault in ("dead before", "refuses to sleep"))
            await asyncio.sleep(0.02)  # a launcher that is not held would start it now
            card.take("trainer", AT_WORK)
            perturb(model, step)
            if fault == "dead asleep":
                server.die()
            card.take("trainer", RESTING)
            if fault.startswith("/"):
                server.dies_at = fault
            metrics = await serving_of.push(model, step)
            assert server.dies_at is None
            assert metrics["sync/server_restarts"] == launcher.restarts
        assert server.violations == []
        assert card.peak <= card.total
        assert launcher.restarts == sum(seen.values()) - seen["nothing"]
    print(seen)


async def test_a_server_that_finds_no_memory_when_it_wakes_ends_the_run_with_the_reason(tmp_path):
    model = tiny_model(seed=0)
    async with one_card(tmp_path) as (card, launcher, serving_of):
        await serving_of.push(model, 0)
        await serving_of.sleep(model)
        card.take("somebody else", 40)
        with pytest.raises(WeightSyncError, match=r"memory of its kv_cache.*lower --gpu-memory"):
            await serving_of.push(model, 1)
        server = launcher.servers[0]
        assert server.paused and server.asleep == {"kv_cache"}, "it samples without a cache"
        assert server.violations == []


@pytest.mark.parametrize("adapter", [False, True])
async def test_only_weights_that_no_update_brings_are_kept(tmp_path, adapter, monkeypatch):
    monkeypatch.setattr("agentrl.train.serving.has_adapter", lambda model: adapter)

    async with one_card(tmp_path) as (_, launcher, serving_of):
        await serving_of.sleep(tiny_model())
        assert f"/sleep?level={1 if adapter else 2}&mode=abort" in launcher.servers[0].calls
