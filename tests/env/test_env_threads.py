"""The pool of threads: it grows with calls that block, and replaces threads that hang."""

import asyncio
import threading
import time

import pytest
from manager_calls import wait_until

from agentrl.env import threads
from agentrl.env.threads import WorkerPool
from agentrl.errors import EnvUnavailable


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
    pool = WorkerPool(2, max_hung=3)
    yield pool
    pool.close()


async def test_results_and_exceptions_come_back(pool):
    assert await pool.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.run(next, iter(()))
    with pytest.raises(SystemExit):
        await pool.run(exit, 3)
    assert await pool.run(int, "5") == 5  # the threads live on


async def test_quick_calls_share_few_threads():
    most, pool = 0, WorkerPool()

    async def one():
        nonlocal most
        await pool.run(int)
        most = max(most, pool.num_threads)

    await asyncio.gather(*(one() for _ in range(1280)))
    pool.close()
    # Beside other work a call may wait long enough to be taken for one behind calls that block.
    assert most <= 128


async def test_threads_grow_with_calls_that_block_which_do_not_hold_up_others():
    release, pool = threading.Event(), WorkerPool()
    blocking = [asyncio.ensure_future(pool.run(release.wait, 60)) for _ in range(256)]
    for _ in range(20):
        assert await asyncio.wait_for(pool.run(int), 20) == 0
    assert not any(call.done() for call in blocking)
    release.set()
    await asyncio.gather(*blocking)
    assert 257 <= pool.num_threads <= 276
    pool.close()
    wait_until(lambda: pool.num_threads == 0)


async def test_idle_threads_end(monkeypatch):
    monkeypatch.setattr(threads, "IDLE_S", 0.05)
    pool, before = WorkerPool(4), num_workers()
    for _ in range(2):  # others take their place
        await asyncio.gather(*(pool.run(int) for _ in range(9)))
        wait_until(lambda: pool.num_threads == 0 and num_workers() <= before)
    pool.close()


async def test_a_hung_call_is_abandoned_and_its_place_taken(pool):
    release, before = threading.Event(), num_workers()
    for _ in range(2):
        await abandon(pool, release)
    assert pool.num_hung == 2
    # both threads hang, and the pool is as wide as before
    barrier = threading.Barrier(2, timeout=5)
    await asyncio.gather(pool.run(barrier.wait), pool.run(barrier.wait))
    release.set()
    wait_until(lambda: pool.num_hung == 0)
    wait_until(lambda: num_workers() - before <= 2)  # those that came back in excess have ended


async def test_abandoned_threads_are_bounded(pool):
    release = threading.Event()
    for _ in range(3):
        await abandon(pool, release)
    with pytest.raises(EnvUnavailable, match="3 calls in this process hang"):
        await pool.run(int)
    release.set()
    await asyncio.to_thread(wait_until, lambda: pool.num_hung == 0)
    assert await pool.run(int) == 0


async def test_a_call_cancelled_in_the_queue_never_runs(pool, caplog):
    release, ran = threading.Event(), []
    blockers = [asyncio.ensure_future(pool.run(release.wait, 20)) for _ in range(2)]
    await asyncio.sleep(0.05)
    queued = asyncio.ensure_future(pool.run(ran.append, 1))
    await asyncio.sleep(0.01)
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    release.set()
    await asyncio.gather(*blockers)
    assert await pool.run(int) == 0
    assert ran == [] and pool.num_hung == 0
    assert "are busy" in caplog.text


def test_a_call_that_an_ending_loop_cancels_is_not_blamed_on_busy_threads(monkeypatch, caplog):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)  # slower than the loop's end
    pool = WorkerPool(4)

    async def leave_behind():
        left = asyncio.ensure_future(pool.run(int))
        await asyncio.sleep(0)
        assert pool.num_waiting == 1 and not left.done()

    asyncio.run(leave_behind())
    assert pool.num_waiting == 0 and not caplog.records


def test_a_pool_serves_several_loops_and_outlives_them(pool):
    for _ in range(3):
        assert asyncio.run(pool.run(int)) == 0


async def test_close_cancels_calls_that_wait_for_a_thread():
    release, pool = threading.Event(), WorkerPool(1)
    calls = [asyncio.ensure_future(pool.run(release.wait, 20)) for _ in range(2)]
    await asyncio.sleep(0)
    while pool.num_waiting != 1:  # the first has its thread
        await asyncio.sleep(0)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await calls[1]
    release.set()
    assert await calls[0]


async def test_close_ends_the_threads():
    pool, before = WorkerPool(4), num_workers()
    await asyncio.gather(*(pool.run(time.sleep, 0.01) for _ in range(4)))
    pool.close()
    wait_until(lambda: num_workers() <= before)
    with pytest.raises(RuntimeError, match="closed"):
        await pool.run(int)
