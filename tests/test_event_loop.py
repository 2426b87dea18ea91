"""The loop that runs and servers share: what it sets holds for as long as it runs."""

import asyncio
import gc

import pytest

from agentrl import event_loop


async def threshold() -> int:
    return gc.get_threshold()[0]


async def fails() -> None:
    raise OSError("of the work")


async def beside_another() -> int:
    return event_loop.run(threshold())


def test_garbage_is_collected_rarely_while_it_runs():
    before = gc.get_threshold()
    assert event_loop.run(threshold()) > before[0]
    assert asyncio.run(beside_another()) > before[0], "in a thread, since a loop runs already"
    with pytest.raises(OSError, match="of the work"):
        event_loop.run(fails())
    assert gc.get_threshold() == before
