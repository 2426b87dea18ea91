"""Many sessions while some steps never return: the others hardly notice, and nothing is left."""

import asyncio
import gc
import os
import threading
import time

import pytest

from agentrl.env import Environment, Task, tool
from agentrl.env.protocol import CreateRequest, StepFrame, TaskSpec, WireAction, WireCall
from agentrl.env.session.boundary import STOP_S
from agentrl.env.session.manager import SessionManager
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
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    @tool
    async def clean_up_for_ever(self) -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(3600)
        return ""

    @tool
    def hang(self) -> str:
        release.wait()
        return "released"


def call(name):
    return WireAction(tool_calls=[WireCall("c", name, {})])


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


async def play(manager, episodes, sessions, quick, hangs, timeout_s):
    """Play so many episodes in so many sessions at a time; every hundredth step hangs.

    Returns:
        Sorted, how long each of the other steps took, in seconds, and how many hung.
    """
    latencies, numbers, hung = [], iter(range(episodes)), 0

    async def player():
        nonlocal hung
        for number in numbers:
            request = CreateRequest("hanging", TaskSpec("train", number))
            (session,) = (await manager.create(request)).sessions
            for turn in range(TURNS):
                bad = bool(hangs) and (number * TURNS + turn) % 100 == 37
                action = call(hangs[hung % len(hangs)] if bad else quick)
                started = time.perf_counter()
                frame = StepFrame(turn, action, timeout_s if bad else 60.0, id=0, sid=session.id)
                try:
                    await manager.handle(frame)
                except EnvError as error:
                    assert bad and error.code == "step_timeout", error
                    hung += 1
                    break
                assert not bad
                latencies.append(time.perf_counter() - started)
            manager.delete(session.id)

    await asyncio.gather(*(player() for _ in range(sessions)))
    return sorted(latencies), hung


def p99(latencies):
    return latencies[int(0.99 * len(latencies))]


async def compare(quick, hangs, episodes, sessions):
    """The others' p99 in seconds without and with steps that hang; the best of three pairs, for a
    machine that is busy with something else slows either."""
    manager = SessionManager(lambda _: Hanging)
    await play(manager, sessions, sessions, quick, (), 1.0)
    pairs = []
    for _ in range(3):
        clean, _ = await play(manager, episodes, sessions, quick, (), 1.0)
        with_hung, hung = await play(manager, episodes, sessions, quick, hangs, 0.5)
        # an episode ends where it hangs, so that a few of the planned ones are never reached
        assert hung >= 0.9 * episodes * TURNS / 100
        pairs.append((p99(clean), p99(with_hung)))
        if pairs[-1][1] <= 2 * pairs[-1][0]:
            break
        release.set()
        await until(lambda: not manager.stats.abandoned_threads, 5.0)
        release.clear()
    pair = min(pairs, key=lambda pair: pair[1] / pair[0])
    print(f"\n{quick}: p99 {1e3 * pair[0]:.1f} ms, with 1% {hangs} {1e3 * pair[1]:.1f} ms")
    return manager, pair


async def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.02)


def num_left():
    gc.collect()
    return sum(isinstance(each, Hanging) for each in gc.get_objects())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_coroutines_that_never_return_cost_the_others_little_and_leave_nothing():
    async def main():
        threads, descriptors = threading.active_count(), open_descriptors()
        hangs = ("ignore_cancel", "clean_up_for_ever")
        manager, (clean, with_hung) = await compare("look", hangs, 1000, 512)
        assert with_hung <= 2 * clean
        await until(lambda: manager.num_live == 0, 3 * STOP_S)
        await until(lambda: not manager.stats.stuck_calls, 3 * STOP_S)
        assert not manager._sessions and manager.readiness() is None
        assert sum(manager.stats.opened.values()) == sum(manager.stats.closed.values())
        await until(lambda: num_left() == 1, 5.0)  # the one that knows the tasks
        await manager.aclose()
        assert len(asyncio.all_tasks()) == 1
        await until(lambda: threading.active_count() == threads, 5.0)
        assert open_descriptors() == descriptors

    asyncio.run(main())


@pytest.mark.slow
def test_threads_that_never_return_are_bounded_and_come_back_when_they_do():
    async def main():
        release.clear()
        threads = threading.active_count()
        manager, (clean, with_hung) = await compare("look_in_thread", ("hang",), 1000, 512)
        assert with_hung <= 2 * clean
        hung = manager.stats.abandoned_threads
        assert 45 <= hung <= manager.workers.max_abandoned
        most = manager.workers.max_threads + manager.workers.max_abandoned
        assert threading.active_count() - threads <= most
        await until(lambda: manager.num_live == 0, 5.0)
        assert (manager.readiness() is None) == (2 * hung < manager.workers.max_abandoned)
        release.set()
        await until(lambda: not manager.stats.abandoned_threads, 5.0)
        assert manager.readiness() is None
        await manager.aclose()
        await until(lambda: threading.active_count() == threads, 5.0)

    try:
        asyncio.run(main())
    finally:
        release.set()
