"""Runners, and the boundary to code that does not stop."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from sample_envs import Dice, FreeForm, HalfASnapshot, Hello

from agentrl.env import Environment, Task, tool
from agentrl.env.base import can_snapshot
from agentrl.env.protocol import (
    CreateRequest,
    InlineTask,
    SnapshotRequest,
    StepReply,
    StepRequest,
    TaskSpec,
    WireAction,
    WireCall,
    decode_reply,
    make_error,
)
from agentrl.env.session.boundary import Background
from agentrl.env.session.manager import SessionManager
from agentrl.env.session.runner import LocalRunner
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Action, ToolCall

ROLL = Action("thinking", tool_calls=(ToolCall("c", "roll", {}),))


def test_a_snapshot_is_json_and_restores_to_the_same_future():
    async def main():
        original = LocalRunner(Dice({"sides": 10**6}))
        first = await original.start(Task("t", "go", {"gold": 1}, {"m": [None]}), 7)
        await original.turn(ROLL, last=False)
        blob = await original.snapshot()
        state = json.loads(blob)
        assert state["author"] == {"rolls": original.environment.rolls}
        fork = LocalRunner(Dice({"sides": 10**6}))
        messages = await fork.restore(blob)
        assert messages[:1] == first and len(messages) == 3
        assert fork.environment.task == original.environment.task
        assert fork.environment.episode == original.environment.episode
        for last in (False, True):
            assert await fork.turn(ROLL, last=last) == await original.turn(ROLL, last=last)
        assert fork.environment.rng.getstate() == original.environment.rng.getstate()

    asyncio.run(main())


def test_what_can_be_snapshotted():
    assert can_snapshot(Dice) and not can_snapshot(Hello)
    with pytest.raises(ConfigError, match=r"defines snapshot\(\) alone"):
        can_snapshot(HalfASnapshot)

    async def main():
        runner = LocalRunner(FreeForm({}))
        await runner.start(Task("t", "go"), 0)
        with pytest.raises(EnvError) as caught:
            await runner.snapshot()
        assert caught.value.code == "not_supported"

    asyncio.run(main())


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
    monkeypatch.setattr("agentrl.env.session.boundary.STOP_S", 0.2)

    async def main():
        background = Background()
        late = make_error("reset_timeout", "too late")
        started = time.monotonic()
        with pytest.raises(EnvError) as caught:
            await background.call(call(), timeout_s=0.02, late=lambda: late, env_id="e")
        assert caught.value is late and time.monotonic() - started < 0.2
        assert len(background.stuck) == len(background.tasks) == 1
        while background.stuck:
            assert time.monotonic() - started < 3.0
            await asyncio.sleep(0.01)
        assert not background.tasks and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_that_ignores_its_cancellation_holds_its_slot_until_it_is_closed(monkeypatch):
    monkeypatch.setattr("agentrl.env.session.boundary.STOP_S", 0.2)

    class Wild(Environment):
        id = "wild"

        @tool
        async def act(self) -> str:
            await never_gives_up()
            return ""

    async def main():
        manager = SessionManager(lambda _: Wild)
        request = CreateRequest("wild", TaskSpec(inline=InlineTask("t", "go")))
        (session,) = (await manager.create(request)).sessions
        action = WireAction(tool_calls=[WireCall("c", "act", {})])
        started = time.monotonic()
        with pytest.raises(EnvError):
            await manager.step(session.id, StepRequest(0, action, timeout_s=0.02))
        assert manager.stats.stuck_calls == 1 and manager.num_live == 1
        while manager.num_live:
            assert time.monotonic() - started < 3.0
            await asyncio.sleep(0.01)
        assert manager.stats.stuck_calls == 0
        await manager.aclose()
        assert not manager._background.tasks

    asyncio.run(main())


class Own(Environment):
    """In a process of its own."""

    id = "own"
    isolation = "process"
    max_sessions = 8

    def splits(self):
        return {"train": 10}

    def get(self, split, index):
        return Task(f"{split}/{index}", "go", index)

    def reset(self, task, *, seed):
        self.rolls: list = []
        return f"{task.prompt} {os.getpid()}"

    @tool
    def roll(self) -> str:
        self.rolls.append(self.rng.randint(1, 10**9))
        return ",".join(map(str, self.rolls))

    @tool
    def hang(self) -> str:
        time.sleep(3600)
        return ""

    def snapshot(self):
        return {"rolls": self.rolls}

    def restore(self, blob):
        self.rolls = blob["rolls"]


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_session_in_a_process_of_its_own_follows_the_same_rules():
    def call(name):
        return WireAction(tool_calls=[WireCall("c", name, {})])

    async def main():
        before = children()
        manager = SessionManager(lambda _: Own)

        async def step(session, index, name, **rest):
            body = await manager.step(session.id, StepRequest(index, call(name), **rest))
            return decode_reply(body, StepReply)

        info = await manager.info("own")
        assert info.splits == {"train": 10} and info.capabilities == ["snapshot"]
        request = CreateRequest("own", TaskSpec("train", 1), count=2)
        one, two = (await manager.create(request)).sessions
        pids = {int(each.observation[0]["content"].split()[1]) for each in (one, two)}
        assert len(pids) == 2 and os.getpid() not in pids
        assert (await step(one, 0, "roll")).observation == (await step(two, 0, "roll")).observation
        assert (await step(one, 0, "roll")).replayed
        snapshot = await manager.snapshot(one.id, SnapshotRequest(1))
        fork = (
            await manager.create(CreateRequest("own", from_snapshot=snapshot.snapshot))
        ).sessions
        assert (await step(fork[0], 1, "roll")) == (await step(one, 1, "roll"))
        started = time.monotonic()
        with pytest.raises(EnvError) as caught:
            await step(two, 1, "hang", timeout_s=0.2)
        assert caught.value.code == "step_timeout" and time.monotonic() - started < 2.0
        while manager.num_live != 2:
            assert time.monotonic() - started < 10.0
            await asyncio.sleep(0.01)
        assert manager.stats.abandoned_threads == 0
        await manager.aclose()
        assert manager.num_live == 0 and children() == before
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert not left

    asyncio.run(main())
