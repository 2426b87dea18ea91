import asyncio
import time

import pytest

from agentrl.rollout.deadline import Deadline


def run_block(*moves, work_s):
    """Seconds until a block ended whose deadline was moved, once every 20 ms; whether by it."""

    async def block():
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with Deadline() as deadline:
                for seconds in moves:
                    deadline.move(started + seconds)
                    await asyncio.sleep(0.02)
                await asyncio.sleep(work_s)
        except TimeoutError:
            return loop.time() - started, True
        return loop.time() - started, False

    return asyncio.run(block())


@pytest.mark.parametrize(
    ("moves", "due_s"),
    [
        ((0.1,), 0.1),
        ((0.1, 0.3), 0.3),  # the alarm of the first goes off and finds the second
        ((0.05, 0.2, 0.4), 0.4),
        ((5.0, 0.15), 0.15),  # earlier than the alarm that stands
        ((0.3, 5.0, 0.1), 0.1),
        ((0.0,), 0.0),
        ((-1.0,), 0.0),  # past already
    ],
)
def test_it_goes_off_when_it_is_due_however_it_was_moved(moves, due_s):
    seconds, late = run_block(*moves, work_s=3)
    assert late
    assert due_s <= seconds < due_s + 0.1


def test_a_block_that_ends_in_time_leaves_no_timer():
    async def block():
        async with Deadline() as deadline:
            deadline.move(asyncio.get_running_loop().time() + 60)
        return [each for each in asyncio.get_running_loop()._scheduled if not each.cancelled()]

    assert asyncio.run(block()) == []


def test_without_a_move_there_is_no_deadline():
    assert run_block(work_s=0.05)[1] is False


def test_another_cancellation_is_no_timeout_not_even_together_with_it():
    async def block(together):
        entered = asyncio.Event()

        async def wait():
            async with Deadline() as deadline:
                due = asyncio.get_running_loop().time() + (0.01 if together else 60)
                deadline.move(due)
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(wait())
        await entered.wait()
        if together:  # both are asked for before the task runs again
            time.sleep(0.02)
            asyncio.get_running_loop().call_soon(
                lambda: asyncio.get_running_loop().call_soon(task.cancel)
            )
        else:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(block(together=False))
    asyncio.run(block(together=True))


def test_a_block_that_is_quicker_than_its_alarm_goes_on():
    async def block():
        loop = asyncio.get_running_loop()
        async with Deadline() as deadline:
            done = loop.create_future()
            loop.call_later(0.01, done.set_result, None)
            deadline.move(loop.time() + 0.011)
            time.sleep(0.02)  # the alarm goes off in the same turn of the loop, after `done`
            await done
            deadline.move(loop.time() + 60)
            await asyncio.sleep(0.03)
            return True

    assert asyncio.run(block())


def test_an_error_of_the_block_is_its_own():
    async def block():
        async with Deadline() as deadline:
            deadline.move(asyncio.get_running_loop().time() + 60)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        asyncio.run(block())
