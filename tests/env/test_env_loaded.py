"""Sessions of one configuration share its tasks, which are fetched once for a whole group."""

import asyncio
import threading
import time

import pytest

from agentrl.env import Environment, Task
from agentrl.env.protocol import CreateRequest, TaskSpec
from agentrl.env.sessions import loaded
from agentrl.env.sessions.manager import SessionManager
from agentrl.errors import EnvError

release = threading.Event()
asked: list[int] = []


class Library(Environment):
    id = "library"
    max_sessions = 1024

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        asked.append(index)
        if index == 13 and asked.count(13) == 1:
            raise EnvError("the first who asks finds nothing")
        if index == 99:
            release.wait(5)
        time.sleep(0.02)
        return Task(str(index), f"book {index}")


def run(scenario, environment=Library):
    async def main():
        manager = SessionManager(lambda _: environment)
        try:
            return await scenario(manager)
        finally:
            release.set()
            await manager.aclose()
            release.clear()
            assert manager.num_live == 0 and not manager._background.tasks

    asked.clear()
    return asyncio.run(main())


async def open_one(manager, index, timeout_s=5.0):
    request = CreateRequest("library", TaskSpec("train", index), timeout_s=timeout_s)
    (session,) = (await manager.create(request)).sessions
    return session.task_id


def test_the_members_of_a_group_share_one_get():
    async def scenario(manager):
        together = await asyncio.gather(*(open_one(manager, 7) for _ in range(8)))
        later = await open_one(manager, 7)
        return {*together, later, await open_one(manager, 8)}

    assert run(scenario) == {"7", "8"}
    assert asked == [7, 8]


def test_what_an_episode_writes_into_its_task_stays_there():
    seen = []

    class Scribbles(Library):
        def get(self, split, index):
            return Task(str(index), "write", reference=[1], metadata={"rows": [{"n": 0}]})

        async def reset(self, task, *, seed):
            rows = task.metadata["rows"]
            rows[0]["n"] += 1
            rows.append({})
            task.metadata["notes"] = "mine"
            task.reference.append(2)
            seen.append((rows[0]["n"], len(rows), self.task.reference))
            return task.prompt

    async def scenario(manager):
        request = CreateRequest("library", TaskSpec("train", 0))
        await asyncio.gather(*(manager.create(request) for _ in range(4)))

    run(scenario, Scribbles)
    assert seen == [(1, 2, [1, 2])] * 4


def test_what_failed_is_asked_for_again():
    async def scenario(manager):
        opening = (open_one(manager, 13) for _ in range(4))
        return await asyncio.gather(*opening, return_exceptions=True)

    outcomes = run(scenario)
    assert [type(outcome) for outcome in outcomes].count(EnvError) == 1
    assert outcomes.count("13") == 3
    assert asked == [13, 13]


def test_everybody_who_waits_has_a_deadline_of_his_own():
    async def scenario(manager):
        async def late(timeout_s):
            with pytest.raises(EnvError) as caught:
                await open_one(manager, 99, timeout_s)
            assert caught.value.code == "reset_timeout"

        await open_one(manager, 1)
        patient = asyncio.create_task(open_one(manager, 99, 60.0))
        await asyncio.gather(late(0.3), late(0.1))
        assert not patient.done()
        release.set()  # the environment answers again, and nobody finds an old failure
        assert await patient == await open_one(manager, 99) == "99"

    run(scenario)


def test_a_caller_that_goes_away_while_the_others_wait_leaves_them_their_task():
    async def scenario(manager):
        library = await manager.environments.load(Library, {}, 5.0)
        spec = TaskSpec("train", 5)
        first, second = (
            asyncio.create_task(manager.environments.task(library, spec)) for _ in range(2)
        )
        await asyncio.sleep(0.005)
        first.cancel()
        return (await second).id

    assert run(scenario) == "5"
    assert asked == [5, 5]


def test_only_the_last_tasks_are_kept(monkeypatch):
    monkeypatch.setattr(loaded, "MAX_TASKS", 2)

    async def scenario(manager):
        for index in (0, 1, 2, 2, 0):
            await open_one(manager, index)
        library = await manager.environments.load(Library, {}, 5.0)
        return list(library.tasks)

    assert run(scenario) == [("train", 2), ("train", 0)]
    assert asked == [0, 1, 2, 0]


def test_an_async_load_shared_is_awaited_on_the_loop_that_plays():
    closed = []

    class Connected(Library):
        @classmethod
        async def load_shared(cls, config):
            await asyncio.sleep(0)
            return asyncio.get_running_loop()

        @classmethod
        async def close_shared(cls, shared):
            closed.append(shared is asyncio.get_running_loop())

        async def reset(self, task, *, seed):
            assert self.shared is asyncio.get_running_loop()
            return task.prompt

    run(lambda manager: open_one(manager, 7), Connected)
    assert closed == [True]


def test_an_init_that_drops_what_the_framework_set_up_is_named():
    class Forgets(Library):
        def __init__(self, *args, **kwargs):
            self.count = 0

    async def scenario(manager):
        with pytest.raises(EnvError, match=r"Forgets.__init__ does not call super"):
            await open_one(manager, 7)

    run(scenario, Forgets)


@pytest.mark.parametrize("splits", [5, {"train": "10"}, {1: 10}, {"train": -1}, ["train"]])
def test_splits_of_a_wrong_type_are_named(splits):
    class Unsized(Library):
        def splits(self):
            return splits

    async def scenario(manager):
        with pytest.raises(EnvError, match=r"Unsized.splits\(\) returned .*; return a d") as caught:
            await open_one(manager, 7)
        assert caught.value.code == "env_error"

    run(scenario, Unsized)
