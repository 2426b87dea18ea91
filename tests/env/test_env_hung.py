"""Many sessions while some steps never return: the others go on, and nothing is left."""

import asyncio
import contextlib
import gc
import os
import re
import threading

import pytest
from manager_calls import call, until

from agentrl.env import Environment, Task, tool
from agentrl.env.protocol import CreateRequest, StepRequest, TaskSpec
from agentrl.env.sessions.manager import SessionManager
from agentrl.errors import EnvError

TURNS = 5
release = threading.Event()


class Hanging(Environment):
    id = "hanging"
    max_sessions = 1024

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(f"{split}/{index}", "go")

    async def reset(self, task, *, seed):
        return "go"

    @tool
    async def look(self) -> str:
        await asyncio.sleep(0)
        return "something"

    @tool
    def look_in_thread(self) -> str:
        return "something"

    @tool
    async def ignore_cancel(self) -> str:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return ""

    @tool
    async def clean_up_for_ever(self) -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            while not release.is_set():
                await asyncio.sleep(0.05)
        return ""

    @tool
    def hang(self) -> str:
        release.wait()
        return "released"


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


async def play(manager, quick, hangs, episodes=400, sessions=128):
    """Play so many episodes in so many sessions at a time; every hundredth step hangs.

    Returns how many hung; all others had their answer.
    """
    numbers, hung = iter(range(episodes)), 0

    async def player():
        nonlocal hung
        for number in numbers:
            request = CreateRequest("hanging", TaskSpec("train", number))
            (session,) = (await manager.create(request)).sessions
            for turn in range(TURNS):
                bad = (number * TURNS + turn) % 100 == 37
                action = call(hangs[hung % len(hangs)] if bad else quick)
                request = StepRequest(turn, action, 0.5 if bad else 60.0)
                try:
                    await manager.step(session.id, request)
                except EnvError as error:
                    assert bad and error.code == "step_timeout", error
                    hung += 1
                    break
                assert not bad
            manager.delete(session.id)

    await asyncio.gather(*(player() for _ in range(sessions)))
    return hung


def num_left():
    gc.collect()
    return sum(isinstance(each, Hanging) for each in gc.get_objects())


@pytest.mark.promise
@pytest.mark.slow
async def test_coroutines_that_ignore_their_deadline_leave_nothing_once_they_end():
    release.clear()
    threads, descriptors = threading.active_count(), open_descriptors()
    manager = SessionManager(lambda _: Hanging)
    assert await play(manager, "look", ("ignore_cancel", "clean_up_for_ever")) == 20
    assert manager.num_hung == 20 and manager.readiness() is None
    release.set()
    await until(lambda: manager.num_live == 0 and not manager.num_hung)
    assert not manager._sessions and manager.readiness() is None
    text = manager.metrics_text()
    assert b'sessions_opened_total{env="hanging"} 400.0' in text
    assert sum(map(float, re.findall(rb"sessions_closed_total\{.*\} (.*)", text))) == 400
    await until(lambda: num_left() == 1)  # the one that knows the tasks
    await manager.aclose()
    assert len(asyncio.all_tasks()) == 1
    # Fewer where a thread of an earlier test has ended meanwhile.
    await until(lambda: threading.active_count() <= threads)
    assert open_descriptors() <= descriptors


async def test_threads_that_never_return_come_back_when_they_do():
    release.clear()
    threads = threading.active_count()
    manager = SessionManager(lambda _: Hanging)
    try:
        assert await play(manager, "look_in_thread", ("hang",)) == 20
        assert manager.workers.num_hung == 20
        await until(lambda: manager.num_live == 0)
        assert manager.readiness() is None
    finally:
        release.set()
    await until(lambda: not manager.workers.num_hung)
    await manager.aclose()
    await until(lambda: threading.active_count() <= threads)
