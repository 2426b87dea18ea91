"""Waiting for slots in order, resets at a time, and the circuit breaker."""

import asyncio
import random
import threading
import time

import pytest
from sample_envs import Workshop

from agentrl.env import Environment
from agentrl.env.protocol import (
    CreateRequest,
    InlineTask,
    ResetRequest,
    StepRequest,
    TaskSpec,
    WireAction,
)
from agentrl.env.session import admission
from agentrl.env.session.admission import Admission
from agentrl.env.session.manager import SessionManager
from agentrl.errors import ConfigError, EnvError, EnvUnavailable


class Small(Environment):
    id = "small"
    max_sessions = 4


class Other(Environment):
    id = "other"
    max_sessions = 4


class Fragile(Environment):
    """Its reset does what the class is told."""

    id = "fragile"
    max_sessions = 64
    max_creating = 2
    behaviour = "fine"
    attempts = 0
    creating = 0
    most_creating = 0
    seconds = 0.0

    async def reset(self, task, *, seed):
        cls = Fragile
        cls.attempts += 1
        cls.creating += 1
        cls.most_creating = max(cls.most_creating, cls.creating)
        try:
            await asyncio.sleep(cls.seconds)
            if cls.behaviour == "broken":
                raise OSError("no space left on device")
            if cls.behaviour == "refuses":
                raise ConfigError("the task has no image; name one")
            return "go"
        finally:
            cls.creating -= 1


@pytest.fixture(autouse=True)
def _fine():
    Fragile.behaviour, Fragile.seconds = "fine", 0.0
    Fragile.attempts = Fragile.most_creating = 0


def run(test, **options):
    async def main():
        found = {each.id: each for each in (Small, Other, Fragile, Workshop)}
        manager = SessionManager(found.__getitem__, **options)
        try:
            await test(manager)
        finally:
            await manager.aclose()
        assert manager.num_live == 0 and manager._admission.num_waiting == 0
        assert not manager._background.tasks

    asyncio.run(main())


def request(env="fragile", count=1, **rest):
    return CreateRequest(env, TaskSpec(inline=InlineTask("t", "go")), count=count, **rest)


async def open_one(manager, env="fragile", **rest):
    return (await manager.create(request(env, **rest))).sessions[0]


async def error_of(awaitable) -> EnvError:
    with pytest.raises(EnvError) as caught:
        await awaitable
    return caught.value


# Slots


def test_slots_are_given_in_the_order_they_were_asked_for():
    async def test():
        gate, order = Admission(), []

        async def come(name, environment, count):
            await gate.acquire(environment, count, 10.0)
            order.append(name)

        await gate.acquire(Small, 4, 1.0)
        waiting = []
        for name, environment, count in (("large", Small, 3), ("one", Small, 1), ("o", Other, 4)):
            waiting.append(asyncio.ensure_future(come(name, environment, count)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert order == ["o"]  # another environment's queue is its own
        gate.release(Small, 2)
        await asyncio.sleep(0.01)
        assert order == ["o"]  # nobody overtakes the group, though one slot would be free
        gate.release(Small, 1)
        await asyncio.sleep(0.01)
        assert order == ["o", "large"]
        gate.release(Small, 3)
        await asyncio.gather(*waiting)
        assert order == ["o", "large", "one"] and gate.live == {"small": 2, "other": 4}

    asyncio.run(test())


def test_on_a_full_process_nobody_overtakes_at_all():
    async def test():
        gate, order = Admission(max_sessions=4), []

        async def come(name, environment, count):
            await gate.acquire(environment, count, 10.0)
            order.append(name)

        await gate.acquire(Small, 3, 1.0)
        waiting = [
            asyncio.ensure_future(come(name, environment, count))
            for name, environment, count in (("group", Other, 2), ("single", Small, 1))
        ]
        await asyncio.sleep(0.01)
        assert order == []
        gate.release(Small, 3)
        await asyncio.gather(*waiting)
        assert order == ["group", "single"]

    asyncio.run(test())


def test_waiting_is_bounded_in_time_and_length():
    async def test():
        gate = Admission(max_wait_s=0.5, max_waiting=2)
        await gate.acquire(Small, 4, 1.0)
        started = time.monotonic()
        waiting = [asyncio.ensure_future(gate.acquire(Small, 1, 60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        error = await error_of(gate.acquire(Small, 1, 60.0))
        assert "2 creations wait" in str(error) and time.monotonic() - started < 0.4
        for each in waiting:
            error = await error_of(each)
            assert isinstance(error, EnvUnavailable) and error.code == "at_capacity"
            assert error.status == 429 and error.retryable and error.retry_after_s
        assert gate.num_waiting == 0 and gate.live == {"small": 4}
        started = time.monotonic()
        await error_of(gate.acquire(Small, 1, 0.02))  # the rest of its time is for its reset
        assert time.monotonic() - started < 0.4
        assert (await error_of(gate.acquire(Small, 5, 1.0))).code == "invalid_request"

    asyncio.run(test())


def test_any_mix_of_callers_who_wait_leave_and_release_loses_no_slot():
    async def test(seed):
        gate, chance = Admission(max_sessions=6, max_wait_s=0.02), random.Random(seed)
        held = 0

        async def visit():
            nonlocal held
            environment, count = chance.choice((Small, Other)), chance.randint(1, 4)
            await gate.acquire(environment, count, 1.0)
            held += count
            try:
                assert held <= gate.num_live <= 6 and max(gate.live.values()) <= 4
                await asyncio.sleep(chance.random() * 0.004)
            finally:
                held -= count
                gate.release(environment, count)

        visits = []
        for _ in range(60):
            visits.append(asyncio.ensure_future(visit()))
            await asyncio.sleep(chance.random() * 0.002)
            if chance.random() < 0.3:
                chance.choice(visits).cancel()
        outcomes = await asyncio.gather(*visits, return_exceptions=True)
        assert all(
            outcome is None or isinstance(outcome, EnvUnavailable | asyncio.CancelledError)
            for outcome in outcomes
        )
        assert outcomes.count(None) > 10
        assert gate.num_live == 0 and gate.num_waiting == 0

    for seed in range(8):
        asyncio.run(test(seed))


def test_a_creation_waits_for_a_slot_and_draining_refuses_those_who_wait():
    async def test(manager):
        group = (await manager.create(request("small", 4))).sessions
        waiting = asyncio.ensure_future(manager.create(request("small")))
        await asyncio.sleep(0.01)
        assert manager.stats.waiting == 1 and not waiting.done()
        manager.delete(group[0].id)
        assert (await waiting).sessions
        waiting = asyncio.ensure_future(manager.create(request("small")))
        await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(manager.drain(0.05))
        assert (await error_of(waiting)).code == "draining"
        await draining
        assert manager.readiness() == "the server is shutting down"
        assert manager.stats.refused == {"draining": 1}

    run(test)


# Resets at a time


def test_so_many_resets_run_at_a_time():
    async def test(manager):
        Fragile.seconds = 0.02
        await asyncio.gather(*(manager.create(request(count=3)) for _ in range(3)))
        assert Fragile.attempts == 9 and Fragile.most_creating == 2

    run(test)


def test_a_creation_that_gets_no_place_in_time_is_at_capacity():
    async def test(manager):
        Fragile.seconds = 0.2
        first = asyncio.ensure_future(manager.create(request(count=2)))
        await asyncio.sleep(0.01)
        error = await error_of(manager.create(request(timeout_s=0.05)))
        assert error.code == "at_capacity" and "2 sessions at a time" in str(error)
        await first
        assert manager.num_live == 2 and manager.stats.breakers == {}

    run(test)


# The breaker


async def fail(manager, times):
    for _ in range(times):
        assert (await error_of(manager.create(request()))).code == "env_error"


def test_the_breaker_opens_gives_rest_and_closes_after_a_probe(monkeypatch):
    monkeypatch.setattr(admission, "BREAKER_FIRST_S", 0.1)

    async def test(manager):
        Fragile.behaviour = "broken"
        await fail(manager, admission.BREAKER_THRESHOLD)
        attempts = Fragile.attempts
        error = await error_of(manager.create(request()))
        assert (error.code, error.status, error.retryable) == ("unavailable", 503, True)
        assert error.retry_after_s and "given a rest" in str(error)
        assert Fragile.attempts == attempts  # it was not even tried
        assert manager.stats.breakers == {"fragile": "open"}
        assert (await open_one(manager, "small")).step == 0  # others are not concerned
        await asyncio.sleep(0.11)
        assert manager.stats.breakers == {"fragile": "half_open"}
        Fragile.seconds = 0.02
        outcomes = await asyncio.gather(
            *(manager.create(request()) for _ in range(5)), return_exceptions=True
        )
        assert Fragile.attempts == attempts + 1  # one probe
        assert sorted(each.code for each in outcomes) == ["env_error"] + ["unavailable"] * 4
        await asyncio.sleep(0.11)
        assert manager.stats.breakers == {"fragile": "open"}  # for twice as long now
        Fragile.behaviour = "fine"
        await asyncio.sleep(0.11)
        assert (await open_one(manager)).step == 0
        assert manager.stats.breakers == {}
        Fragile.behaviour = "broken"
        await fail(manager, admission.BREAKER_THRESHOLD - 1)  # it counts from the start
        assert manager.stats.breakers == {}

    run(test)


@pytest.mark.parametrize("whose", ["refuses", "impatient", "wrong task"])
def test_what_the_caller_did_wrong_does_not_open_the_breaker(whose):
    async def test(manager):
        Fragile.behaviour = "refuses" if whose == "refuses" else "fine"
        Fragile.seconds = 1.0 if whose == "impatient" else 0.0
        asked = request(timeout_s=0.01)
        if whose == "wrong task":
            asked = CreateRequest("fragile", TaskSpec("train", 0))
        for _ in range(admission.BREAKER_THRESHOLD + 1):
            assert (await error_of(manager.create(asked))).code != "unavailable"
        assert manager.stats.breakers == {}

    run(test)


def test_resets_in_place_pass_the_breaker_too():
    async def test(manager):
        session = await open_one(manager)
        Fragile.behaviour = "broken"
        await fail(manager, admission.BREAKER_THRESHOLD)
        error = await error_of(manager.reset(session.id, ResetRequest(0)))
        assert error.code == "unavailable"
        assert manager.status(session.id).status == "live"  # and nothing was lost

    run(test)


# Readiness


def test_a_process_full_of_hung_threads_is_not_ready():
    release, entered = threading.Event(), []

    class Hanging(Environment):
        id = "hanging"

        def step(self, action):
            entered.append(1)
            release.wait(60)
            return "released"

        def reset(self, task, *, seed):
            return "go"

    before = threading.enumerate()  # other tests' pools keep theirs

    async def main():
        manager = SessionManager(lambda _: Hanging, worker_threads=2)
        most = manager.workers.max_abandoned
        sessions = (await manager.create(request("hanging", 8 * most))).sessions

        async def hang(session):
            return await error_of(
                manager.step(session.id, StepRequest(0, WireAction("x"), timeout_s=0.05))
            )

        for session in sessions:  # on a busy machine a step may run out of time in the queue
            assert (await hang(session)).code == "step_timeout"
            while manager.workers.num_abandoned < len(entered):
                await asyncio.sleep(0.001)
            assert (manager.readiness() is None) == (2 * len(entered) < most)
            if len(entered) == most:
                break
        assert manager.stats.abandoned_threads == most
        assert "hang past their deadline" in str(manager.readiness())
        refused = await error_of(manager.create(request("hanging")))
        assert refused.code == "unavailable"
        release.set()
        while manager.workers.num_abandoned:
            await asyncio.sleep(0.01)
        assert manager.readiness() is None
        await manager.aclose()
        while any(
            each.name == "agentrl-env-worker" and each not in before
            for each in threading.enumerate()
        ):
            await asyncio.sleep(0.01)

    asyncio.run(main())
