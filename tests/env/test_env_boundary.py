"""The boundary to an author's code: what it raises, and code that does not stop."""

import asyncio
import gc

import pytest
from manager_calls import call, error_of, managed, step, until

from agentrl.env import Environment, Task, reward, tool
from agentrl.env.protocol import CreateRequest, TaskSpec


class Mine(BaseException):
    def __str__(self):
        raise Mine


RAISED = [
    Mine(),
    BaseExceptionGroup("several", [Mine()]),
    GeneratorExit(),
    KeyboardInterrupt(),
    SystemExit(4),
    asyncio.CancelledError(),
    StopIteration(3),
    StopAsyncIteration(),
]
PLACES = ["load_shared", "get", "reset", "tool", "async_tool", "reward", "close", "splits", "offer"]


class Raising(Environment):
    id = "raising"
    where = ""
    error: BaseException = Mine()

    @classmethod
    def at(cls, place):
        if cls.where == place:
            raise cls.error

    @classmethod
    def load_shared(cls, config):
        cls.at("load_shared")

    def splits(self):
        self.at("splits")
        return {"train": 1}

    def get(self, split, index):
        self.at("get")
        return Task("0", "go")

    async def reset(self, task, *, seed):
        self.at("reset")
        return "go"

    def offered_tools(self):
        self.at("offer")
        return super().offered_tools()

    @tool
    def act(self) -> str:
        self.at("tool")
        return ""

    @tool
    async def act_async(self) -> str:
        self.at("async_tool")
        self.finish()
        return ""

    @reward
    async def graded(self, episode) -> float:
        self.at("reward")
        return 1.0

    def close(self):
        self.at("close")


async def play(manager):
    (session,) = (await manager.create(CreateRequest("raising", TaskSpec("train", 0)))).sessions
    for index, name in enumerate(("act", "act_async")):
        await step(manager, session, index, call(name))
    manager.delete(session.id)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", PLACES)
async def test_whatever_an_author_raises_ends_only_its_session(place, error, monkeypatch):
    monkeypatch.setattr(Raising, "where", place)
    monkeypatch.setattr(Raising, "error", error)
    async with managed(lambda _: Raising) as manager, asyncio.timeout(20):
        ordinary = isinstance(error, Exception)
        if place == "close" or (ordinary and place in ("tool", "async_tool")):
            await play(manager)  # a tool's ordinary error is answered to the agent
        else:
            expected = "grader_error" if ordinary and place == "reward" else "env_error"
            assert (await error_of(play(manager))).code == expected
        await until(lambda: not manager.num_live)
        assert manager.num_hung == 0
        Raising.where = ""
        await play(manager)


async def test_a_step_that_ignores_its_cancellation_is_counted_until_it_ends():
    reports = []
    patient = True

    class Wild(Environment):
        id = "wild"

        @tool
        async def act(self) -> str:
            while patient:
                try:
                    await asyncio.sleep(0.05)
                except BaseException:
                    continue
            return ""

    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    async with managed(lambda _: Wild) as manager:
        request = CreateRequest("wild", TaskSpec(inline=Task("t", "go")))
        (session,) = (await manager.create(request)).sessions
        error = await error_of(step(manager, session, 0, call("act"), timeout_s=0.02))
        assert error.code == "step_timeout" and manager.num_hung == manager.num_live == 1
        patient = False
        await until(lambda: not manager.num_live)
        assert manager.num_hung == 0
    gc.collect()
    assert not reports  # asyncio reports an error that nobody looked at
