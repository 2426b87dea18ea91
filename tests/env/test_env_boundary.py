"""The boundary to code that does not stop."""

import asyncio
import gc

import pytest
from manager_calls import call, error_of, step, until

from agentrl.env import Environment, Task, tool
from agentrl.env.protocol import CreateRequest, TaskSpec
from agentrl.env.sessions.boundary import Background
from agentrl.env.sessions.manager import SessionManager
from agentrl.env.threads import call_timeout


async def catches_everything():
    while True:
        try:
            await asyncio.sleep(3600)
        except (Exception, asyncio.CancelledError):
            continue


async def waits_in_finally():
    try:
        await catches_everything()
    finally:
        await asyncio.sleep(3600)


async def never_gives_up():
    while True:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            # Collected after the event loop has ended, it would spin, for sleep raises then.
            if asyncio._get_running_loop() is None:
                raise


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", [catches_everything, waits_in_finally, never_gives_up])
def test_a_coroutine_that_ignores_its_cancellation_is_closed(call, monkeypatch):
    monkeypatch.setattr("agentrl.env.sessions.boundary.STOP_S", 0.2)

    async def main():
        background = Background()
        with pytest.raises(TimeoutError):
            async with call_timeout(0.02):
                await background.call(call(), "e")
        assert len(background.stuck) == len(background.tasks) == 1
        await until(lambda: not background.stuck)
        assert not background.tasks and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ignores", [catches_everything, never_gives_up])
def test_a_step_that_ignores_its_cancellation_counts_until_it_is_closed(ignores, monkeypatch):
    monkeypatch.setattr("agentrl.env.sessions.boundary.STOP_S", 0.2)
    reports = []

    class Wild(Environment):
        id = "wild"

        @tool
        async def act(self) -> str:
            await ignores()
            return ""

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        manager = SessionManager(lambda _: Wild)
        request = CreateRequest("wild", TaskSpec(inline=Task("t", "go")))
        (session,) = (await manager.create(request)).sessions
        await error_of(step(manager, session, 0, call("act"), timeout_s=0.02))
        assert len(manager._background.stuck) == 1 and manager.num_live == 1
        await until(lambda: not manager.num_live)
        assert not manager._background.stuck
        await manager.aclose()
        assert not manager._background.tasks

    asyncio.run(main())
    gc.collect()
    assert not reports  # asyncio reports an error that nobody looked at
