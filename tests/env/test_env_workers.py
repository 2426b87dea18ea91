"""The pool of threads: bounded, with deadlines by abandonment."""

import asyncio
import threading
import time

import pytest

from agentrl.env.threads import WorkerPool
from agentrl.errors import EnvUnavailable


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


async def abandon(pool, release):
    """Start a call that waits for `release`, and give it up once it runs."""
    running = threading.Event()

    def call():
        running.set()
        release.wait(20)

    waiting = asyncio.ensure_future(pool.run(call))
    await asyncio.to_thread(running.wait, 5)
    waiting.cancel()
    started = time.monotonic()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled() and time.monotonic() - started < 2


def num_workers():
    return sum(thread.name == "agentrl-env-worker" for thread in threading.enumerate())


@pytest.fixture
def pool():
    pool = WorkerPool(2, max_abandoned=3)
    yield pool
    pool.close()


def test_results_and_exceptions_come_back(pool):
    async def main():
        assert await pool.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await pool.run(next, iter(()))
        with pytest.raises(SystemExit):
            await pool.run(exit, 3)
        assert await pool.run(int, "5") == 5  # the threads live on

    asyncio.run(main())


def test_many_calls_share_few_threads(pool):
    running, most, lock = 0, 0, threading.Lock()

    def call():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1

    async def main():
        await asyncio.gather(*(pool.run(call) for _ in range(60)))

    before = num_workers()
    asyncio.run(main())
    assert most == 2
    assert num_workers() - before <= 2


def test_a_hung_call_is_abandoned_and_its_place_taken(pool):
    release = threading.Event()

    async def main():
        for _ in range(2):
            await abandon(pool, release)
        assert pool.num_abandoned == 2
        # both threads hang, and the pool is as wide as before
        barrier = threading.Barrier(2, timeout=5)
        await asyncio.gather(pool.run(barrier.wait), pool.run(barrier.wait))

    before = num_workers()
    asyncio.run(main())
    release.set()
    wait_until(lambda: pool.num_abandoned == 0)
    wait_until(lambda: num_workers() - before <= 2)  # those that came back in excess have ended


def test_abandoned_threads_are_bounded(pool):
    release = threading.Event()

    async def main():
        for _ in range(3):
            await abandon(pool, release)
        with pytest.raises(EnvUnavailable, match="3 calls of this process hang"):
            await pool.run(int)
        release.set()
        await asyncio.to_thread(wait_until, lambda: pool.num_abandoned == 0)
        assert await pool.run(int) == 0

    asyncio.run(main())


def test_a_call_cancelled_in_the_queue_never_runs(pool):
    release, ran = threading.Event(), []

    async def main():
        blockers = [asyncio.ensure_future(pool.run(release.wait, 20)) for _ in range(2)]
        await asyncio.sleep(0.05)
        queued = asyncio.ensure_future(pool.run(ran.append, 1))
        await asyncio.sleep(0.01)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        release.set()
        await asyncio.gather(*blockers)
        assert await pool.run(int) == 0
        assert ran == [] and pool.num_abandoned == 0

    asyncio.run(main())


def test_a_pool_serves_several_loops_and_outlives_them(pool):
    for _ in range(3):
        assert asyncio.run(pool.run(int)) == 0


def test_close_ends_the_threads():
    pool, before = WorkerPool(4), num_workers()

    async def main():
        await asyncio.gather(*(pool.run(time.sleep, 0.01) for _ in range(4)))

    asyncio.run(main())
    pool.close()
    wait_until(lambda: num_workers() <= before)
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(pool.run(int))
