"""Sessions of one configuration share its tasks, which are fetched once for a whole group."""

import asyncio
import threading
import time

import pytest
from manager_calls import error_of, managed, open_group, with_manager

from agentrl.env import Environment, Task
from agentrl.env.protocol import CreateRequest, TaskSpec
from agentrl.env.sessions import loaded
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


with_library = with_manager(lambda _: Library)


@pytest.fixture(autouse=True)
def nothing_asked_yet():
    asked.clear()
    release.clear()


async def open_one(manager, index, timeout_s=5.0):
    request = CreateRequest("library", TaskSpec("train", index), timeout_s=timeout_s)
    (session,) = (await manager.create(request)).sessions
    return session.task_id


@with_library
async def test_the_members_of_a_group_share_one_get(manager):
    together = await asyncio.gather(*(open_one(manager, 7) for _ in range(8)))
    later = await open_one(manager, 7)
    assert {*together, later, await open_one(manager, 8)} == {"7", "8"}
    assert asked == [7, 8]


async def test_what_an_episode_writes_into_its_task_stays_there():
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

    async with managed(lambda _: Scribbles) as manager:
        await open_group(manager, CreateRequest("library", TaskSpec("train", 0)), 4)
    assert seen == [(1, 2, [1, 2])] * 4


@with_library
async def test_what_failed_is_asked_for_again(manager):
    opening = (open_one(manager, 13) for _ in range(4))
    outcomes = await asyncio.gather(*opening, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(EnvError) == 1
    assert outcomes.count("13") == 3
    assert asked == [13, 13]


@with_library
async def test_everybody_who_waits_has_a_deadline_of_his_own(manager):
    async def late(timeout_s):
        assert (await error_of(open_one(manager, 99, timeout_s))).code == "reset_timeout"

    await open_one(manager, 1)
    patient = asyncio.create_task(open_one(manager, 99, 60.0))
    await asyncio.gather(late(0.3), late(0.1))
    assert not patient.done()
    release.set()  # the environment answers again, and nobody finds an old failure
    assert await patient == await open_one(manager, 99) == "99"


@with_library
async def test_a_caller_that_goes_away_while_the_others_wait_leaves_them_their_task(manager):
    library = await manager.environments.load(Library, {}, 5.0)
    spec = TaskSpec("train", 5)
    first, second = (
        asyncio.create_task(manager.environments.task(library, spec)) for _ in range(2)
    )
    await asyncio.sleep(0.005)
    first.cancel()
    assert (await second).id == "5"
    assert asked == [5, 5]


@with_library
async def test_only_the_last_tasks_are_kept(manager, monkeypatch):
    monkeypatch.setattr(loaded, "MAX_TASKS", 2)
    for index in (0, 1, 2, 2, 0):
        await open_one(manager, index)
    library = await manager.environments.load(Library, {}, 5.0)
    assert list(library.tasks) == [("train", 2), ("train", 0)]
    assert asked == [0, 1, 2, 0]


async def test_an_async_load_shared_is_awaited_on_the_loop_that_plays():
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

    async with managed(lambda _: Connected) as manager:
        await open_one(manager, 7)
    assert closed == [True]


async def test_an_init_that_drops_what_the_framework_set_up_is_named():
    class Forgets(Library):
        def __init__(self, *args, **kwargs):
            self.count = 0

    async with managed(lambda _: Forgets) as manager:
        with pytest.raises(EnvError, match=r"Forgets.__init__ does not call super"):
            await open_one(manager, 7)


@pytest.mark.parametrize("splits", [5, {"train": "10"}, {1: 10}, {"train": -1}, ["train"]])
async def test_splits_of_a_wrong_type_are_named(splits):
    class Unsized(Library):
        def splits(self):
            return splits

    async with managed(lambda _: Unsized) as manager:
        with pytest.raises(EnvError, match=r"Unsized.splits\(\) returned .*; return a d") as caught:
            await open_one(manager, 7)
        assert caught.value.code == "env_error"
