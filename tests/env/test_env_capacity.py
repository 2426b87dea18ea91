"""Waiting for capacity in order, resets at a time, and readiness."""

import asyncio
import random
import threading
import time

import pytest
from manager_calls import error_of, open_group, until, with_manager
from sample_envs import Workshop

from agentrl.env import Environment
from agentrl.env.protocol import CreateRequest, StepRequest, TaskSpec
from agentrl.env.sessions import capacity as capacity_module
from agentrl.env.sessions.capacity import Capacity
from agentrl.env.sessions.manager import SessionManager
from agentrl.errors import EnvUnavailable
from agentrl.types import Action, Task


class Small(Environment):
    id = "small"
    max_sessions = 4


class Other(Environment):
    id = "other"
    max_sessions = 4


class Slow(Environment):
    id = "slow"
    max_sessions = 64
    max_creating = 2
    attempts = 0
    creating = 0
    most_creating = 0
    seconds = 0.0

    async def reset(self, task, *, seed):
        cls = Slow
        cls.attempts += 1
        cls.creating += 1
        cls.most_creating = max(cls.most_creating, cls.creating)
        try:
            await asyncio.sleep(cls.seconds)
            return "go"
        finally:
            cls.creating -= 1


@pytest.fixture(autouse=True)
def _fine():
    Slow.seconds = 0.0
    Slow.attempts = Slow.most_creating = 0


ENVIRONMENTS = {each.id: each for each in (Small, Other, Slow, Workshop)}
with_environments = with_manager(ENVIRONMENTS.__getitem__, max_wait_s=10.0)


def request(env="slow", **rest):
    return CreateRequest(env, TaskSpec(inline=Task("t", "go")), **rest)


async def open_one(manager, env="slow", **rest):
    return (await manager.create(request(env, **rest))).sessions[0]


# Order


async def fill(capacity, environment, count):
    for _ in range(count):
        await capacity.acquire(environment, 1.0)


async def test_capacity_is_given_in_the_order_it_was_asked_for():
    capacity, order = Capacity(), []

    async def come(name, environment):
        await capacity.acquire(environment, 10.0)
        order.append(name)

    await fill(capacity, Small, 4)
    waiting = []
    for name, environment in (("one", Small), ("two", Small), ("other", Other)):
        waiting.append(asyncio.ensure_future(come(name, environment)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert order == ["other"]  # another environment's queue is its own
    capacity.release(Small)
    await asyncio.sleep(0.01)
    assert order == ["other", "one"]
    capacity.release(Small)
    await asyncio.gather(*waiting)
    assert order == ["other", "one", "two"] and capacity.live == {"small": 4, "other": 1}


async def test_on_a_full_process_nobody_overtakes_at_all():
    capacity, order = Capacity(max_sessions=4), []

    async def come(name, environment):
        await capacity.acquire(environment, 10.0)
        order.append(name)

    await fill(capacity, Small, 4)
    waiting = [
        asyncio.ensure_future(come(name, environment))
        for name, environment in (("other", Other), ("small", Small))
    ]
    await asyncio.sleep(0.01)
    assert order == []
    capacity.release(Small)
    await asyncio.sleep(0.01)
    assert order == ["other"]
    capacity.release(Small)
    await asyncio.gather(*waiting)
    assert order == ["other", "small"]


async def test_waiting_is_bounded_in_time_and_length(monkeypatch):
    monkeypatch.setattr(capacity_module, "MAX_WAITING", 2)
    capacity = Capacity(max_wait_s=0.5)
    await fill(capacity, Small, 4)
    started = time.monotonic()
    waiting = [asyncio.ensure_future(capacity.acquire(Small, 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    error = await error_of(capacity.acquire(Small, 60.0))
    assert "2 creations are waiting" in str(error) and time.monotonic() - started < 0.4
    for each in waiting:
        error = await error_of(each)
        assert isinstance(error, EnvUnavailable) and error.code == "at_capacity"
        assert error.status == 429 and error.retryable and error.retry_after_s
    assert capacity.num_waiting == 0 and capacity.live == {"small": 4}
    started = time.monotonic()
    await error_of(capacity.acquire(Small, 0.02))  # the rest of its time is for its reset
    assert time.monotonic() - started < 0.4


@pytest.mark.parametrize("seed", range(8))
async def test_any_mix_of_callers_who_wait_leave_and_release_loses_no_capacity(seed):
    capacity, chance = Capacity(max_sessions=6, max_wait_s=0.02), random.Random(seed)
    held = 0

    async def visit():
        nonlocal held
        environment = chance.choice((Small, Other))
        await capacity.acquire(environment, 1.0)
        held += 1
        try:
            assert held <= capacity.num_live <= 6 and max(capacity.live.values()) <= 4
            await asyncio.sleep(chance.random() * 0.004)
        finally:
            held -= 1
            capacity.release(environment)

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
    assert capacity.num_live == 0 and capacity.num_waiting == 0


@with_environments
async def test_a_creation_waits_for_capacity_and_draining_refuses_those_who_wait(manager):
    group = await open_group(manager, request("small"), 4)
    waiting = asyncio.ensure_future(manager.create(request("small")))
    await asyncio.sleep(0.01)
    assert manager._capacity.num_waiting == 1 and not waiting.done()
    manager.delete(group[0].id)
    assert (await waiting).sessions
    waiting = asyncio.ensure_future(manager.create(request("small")))
    await asyncio.sleep(0.01)
    draining = asyncio.ensure_future(manager.drain(0.5))
    await asyncio.sleep(0)
    manager.delete(group[1].id)  # its place is given to nobody
    assert (await error_of(waiting)).code == "draining"
    await draining
    assert manager.readiness() == "the server is shutting down"
    assert b'creations_refused_total{code="draining"} 1.0' in manager.metrics_text()


# Resets at a time


@with_environments
async def test_so_many_resets_run_at_a_time(manager):
    Slow.seconds = 0.02
    await open_group(manager, request(), 9)
    assert Slow.attempts == 9 and Slow.most_creating == 2


@with_environments
async def test_a_creation_that_gets_no_place_in_time_is_at_capacity(manager):
    Slow.seconds = 0.2
    first = asyncio.ensure_future(open_group(manager, request(), 2))
    await asyncio.sleep(0.01)
    error = await error_of(manager.create(request(timeout_s=0.05)))
    assert error.code == "at_capacity" and "2 sessions at a time" in str(error)
    await first
    assert manager.num_live == 2


# Readiness


async def test_a_process_full_of_hung_threads_is_not_ready():
    release = threading.Event()

    class Hanging(Environment):
        id = "hanging"

        def step(self, action):
            release.wait(60)
            return "released"

        def reset(self, task, *, seed):
            return "go"

    manager = SessionManager(lambda _: Hanging)
    manager.workers.max_hung = most = 4
    sessions = await open_group(manager, request("hanging"), most)
    for number, session in enumerate(sessions, start=1):
        step = StepRequest(0, Action("x"), timeout_s=0.3)
        assert (await error_of(manager.step(session.id, step))).code == "step_timeout"
        await until(lambda number=number: manager.num_hung == number)
        assert (manager.readiness() is None) == (2 * number < most)
    assert "hang past their deadline" in str(manager.readiness())
    assert (await error_of(manager.create(request("hanging")))).code == "unavailable"
    release.set()
    while manager.workers.num_hung:
        await asyncio.sleep(0.01)
    assert manager.readiness() is None
    await manager.aclose()
