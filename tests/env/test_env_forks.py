"""Other episodes in the same session: reset in place, snapshot and fork, and the agent's calls."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_calls import call, error_of, run, step, until
from sample_envs import Dice, Workshop

from agentrl.env import protocol
from agentrl.env.protocol import (
    AgentCall,
    CreateRequest,
    ResetRequest,
    SnapshotRequest,
    TaskSpec,
)
from agentrl.env.session.snapshots import Snapshots
from agentrl.errors import EnvError


async def open_one(manager, env="dice", index=0, **rest):
    request = CreateRequest(env, TaskSpec("train", index), **rest)
    return (await manager.create(request)).sessions[0]


# Reset in place


def test_a_reset_starts_another_episode_and_the_index_goes_on():
    async def test(manager):
        session = await open_one(manager, seed=1)
        await step(manager, session, 0, call("roll"))
        closed = Dice.closed
        again = await manager.reset(session.id, ResetRequest(1))
        assert (again.id, again.step) == (session.id, 2)
        assert again.observation == session.observation and again.token == session.token
        await until(lambda: Dice.closed == closed + 1)
        assert (await error_of(step(manager, session, 1, call("roll")))).code == "step_conflict"
        reply = await step(manager, session, 2, call("roll"))
        assert reply.metrics["rolls"] == 2.0 and reply.step == 3  # nothing of the first is left
        other = await manager.reset(session.id, ResetRequest(3, TaskSpec("train", 5), seed=9))
        assert other.task_id == "train/5" and other.observation != session.observation
        await until(lambda: manager.num_live == 1)

    run(test)


def test_a_repeated_reset_runs_once_and_gives_the_same_reply():
    async def test(manager):
        session = await open_one(manager, env="workshop", config={"slow_reset_s": 0.05})
        request = ResetRequest(0, seed=4)
        first, second = await asyncio.gather(
            manager.reset(session.id, request), manager.reset(session.id, request)
        )
        assert first == second == await manager.reset(session.id, request)
        assert manager.stats.opened == {"workshop": 2} and manager.stats.replayed == 2
        error = await error_of(manager.reset(session.id, ResetRequest(0, seed=5)))
        assert error.code == "step_conflict"
        assert (await error_of(step(manager, session, 0, call("add")))).code == "step_conflict"
        assert (await step(manager, session, 1, call("add"))).step == 2

    run(test)


def test_a_step_during_a_reset_and_a_reset_during_a_step_conflict():
    async def test(manager):
        session = await open_one(manager, env="workshop", config={"slow_reset_s": 0.05})
        resetting = asyncio.ensure_future(manager.reset(session.id, ResetRequest(0)))
        await asyncio.sleep(0.01)
        assert (await error_of(step(manager, session, 0, call("add")))).code == "step_conflict"
        await resetting
        running = asyncio.ensure_future(step(manager, session, 1, call("wait", seconds=0.05)))
        await asyncio.sleep(0.01)
        error = await error_of(manager.reset(session.id, ResetRequest(1)))
        assert error.code == "step_conflict"
        await running

    run(test)


def test_an_ended_or_failed_episode_can_be_followed_by_another():
    async def test(manager):
        session = await open_one(manager, env="workshop")
        await step(manager, session, 0, call("submit", value=1))
        await until(lambda: manager.num_live == 0)
        assert (await manager.reset(session.id, ResetRequest(1))).step == 2
        error = await error_of(step(manager, session, 2, call("lose_grader")))
        assert error.code == "grader_error"
        assert (await manager.reset(session.id, ResetRequest(2))).step == 3
        assert (await step(manager, session, 3, call("add"))).step == 4
        assert manager.status(session.id).status == "live"
        await until(lambda: manager.num_live == 1)

    run(test)


def test_a_session_that_is_reset_keeps_its_place_on_a_full_server():
    async def test(manager):
        sessions = [await open_one(manager) for _ in range(2)]
        waiting = asyncio.ensure_future(open_one(manager))
        await asyncio.sleep(0.01)
        for index in range(3):
            await manager.reset(sessions[0].id, ResetRequest(index))
        assert not waiting.done()
        manager.delete(sessions[1].id)
        assert (await waiting).step == 0
        await until(lambda: manager.num_live == 2)

    run(test, max_sessions=2, max_wait_s=5.0)


def test_a_reset_that_is_refused_leaves_the_episode_and_one_that_fails_does_not():
    async def test(manager):
        session = await open_one(manager, env="workshop")
        await step(manager, session, 0, call("add"))
        error = await error_of(manager.reset(session.id, ResetRequest(1, TaskSpec("dev", 0))))
        assert error.code == "invalid_request"
        assert (await step(manager, session, 1, call("add"))).step == 2
        bad = TaskSpec(inline=protocol.InlineTask("t", "bad"))
        for _ in range(2):  # the same answer again
            error = await error_of(manager.reset(session.id, ResetRequest(2, bad)))
            assert error.code == "env_error" and "reset failed" in str(error)
        assert manager.status(session.id).status == "failed"
        assert (await error_of(step(manager, session, 2, call("add")))).code == "step_conflict"
        await until(lambda: manager.num_live == 0)
        assert (await manager.reset(session.id, ResetRequest(2))).step == 3

    run(test)


def test_a_session_closed_during_its_reset_leaves_nothing():
    async def test(manager):
        session = await open_one(manager, env="workshop", config={"slow_reset_s": 0.2})
        resetting = asyncio.ensure_future(manager.reset(session.id, ResetRequest(0)))
        await asyncio.sleep(0.05)
        manager.delete(session.id)
        assert (await error_of(resetting)).code == "session_expired"
        await until(lambda: manager.num_live == 0)

    run(test)


# Snapshots and forks


plan = st.lists(st.integers(1, 3), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(before=plan, after=plan, seed=st.integers(0, 2**63 - 1))
def test_a_fork_continues_exactly_as_the_original_would(before, after, seed):
    async def test(manager):
        session = await open_one(manager, seed=seed, index=3)
        for index, times in enumerate(before):
            await step(manager, session, index, call("roll", times=times))
        at = len(before)
        snapshot = await manager.snapshot(session.id, SnapshotRequest(at))
        assert snapshot.step == at
        request = CreateRequest("dice", from_snapshot=snapshot.snapshot, count=2)
        forks = (await manager.create(request)).sessions
        assert forks[0].step == at and forks[0].task_id == session.task_id
        assert forks[0].observation[: len(session.observation)] == session.observation
        assert len(forks[0].observation) == 1 + 2 * at  # prompt, then action and answer each
        outcomes = []
        for each in (session, *forks):
            replies = [
                await step(manager, each, at + index, call("roll", times=times))
                for index, times in enumerate(after)
            ]
            replies.append(await step(manager, each, at + len(after), call("stop")))
            outcomes.append((replies, manager.status(each.id).reward))
        assert outcomes[0] == outcomes[1] == outcomes[2]
        assert outcomes[0][0][-1].reward_components["num_actions"] > 0

    run(test)


def test_a_fork_of_a_fork_and_a_fork_after_a_reset():
    async def test(manager):
        session = await open_one(manager, seed=5)
        await manager.reset(session.id, ResetRequest(0, seed=6))
        await step(manager, session, 1, call("roll"))
        first = await manager.snapshot(session.id, SnapshotRequest(2))
        manager.delete(session.id)  # a snapshot outlives its session
        request = CreateRequest("dice", from_snapshot=first.snapshot)
        fork = (await manager.create(request, "key")).sessions[0]
        assert (await manager.create(request, "key")).sessions[0] == fork and fork.step == 2
        second = await manager.snapshot(fork.id, SnapshotRequest(2))
        request = CreateRequest("dice", from_snapshot=second.snapshot)
        grandchild = (await manager.create(request)).sessions[0]
        assert grandchild.observation == fork.observation
        replies = [await step(manager, each, 2, call("roll")) for each in (fork, grandchild)]
        assert replies[0] == replies[1]

    run(test)


def test_a_snapshot_is_refused_where_it_would_mean_nothing():
    async def test(manager):
        workshop, dice = await open_one(manager, env="workshop"), await open_one(manager)
        error = await error_of(manager.snapshot(workshop.id, SnapshotRequest(0)))
        assert (error.code, error.status) == ("not_supported", 422)
        error = await error_of(manager.snapshot(dice.id, SnapshotRequest(1)))
        assert error.code == "step_conflict"
        snapshot = await manager.snapshot(dice.id, SnapshotRequest(0))
        request = CreateRequest("workshop", from_snapshot=snapshot.snapshot)
        assert (await error_of(manager.create(request))).code == "invalid_request"
        request = CreateRequest("dice", from_snapshot="x" * 22)
        assert (await error_of(manager.create(request))).code == "session_expired"
        await step(manager, dice, 0, call("stop"))
        error = await error_of(manager.snapshot(dice.id, SnapshotRequest(1)))
        assert error.code == "episode_done"
        assert (await manager.info("dice")).capabilities == ["snapshot"]
        assert (await manager.info("workshop")).capabilities == []
        error = await error_of(open_one(manager, env="half-a-snapshot"))
        assert error.code == "not_found" and "need each other" in str(error)

    run(test)


def test_a_step_waits_for_a_snapshot_that_runs(monkeypatch):
    order = []

    async def snapshot(self):
        order.append("begins")
        await asyncio.sleep(0.05)
        order.append("ends")
        return {"rolls": self.rolls}

    async def roll(self, times=1):
        order.append("step")
        return "x"

    roll.__agentrl_tool__ = Dice.roll.__agentrl_tool__  # type: ignore[attr-defined]
    monkeypatch.setattr(Dice, "snapshot", snapshot)
    monkeypatch.setattr(Dice, "roll", roll)

    async def test(manager):
        session = await open_one(manager, lease_s=0.02)
        taking = asyncio.ensure_future(manager.snapshot(session.id, SnapshotRequest(0)))
        await asyncio.sleep(0.03)  # a running snapshot holds the lease, as a step does
        await step(manager, session, 0, call("roll"))
        assert (await taking).step == 0
        assert order == ["begins", "ends", "step"]

    run(test)


def test_an_environment_whose_snapshot_fails_says_so(monkeypatch):
    async def test(manager):
        session = await open_one(manager)
        for state, says in ((object(), "type object"), ({"x": float("nan")}, "nan")):
            monkeypatch.setattr(Dice, "snapshot", lambda self, state=state: state)
            error = await error_of(manager.snapshot(session.id, SnapshotRequest(0)))
            assert error.code == "env_error" and says in str(error)
        assert (await step(manager, session, 0, call("roll"))).step == 1  # no harm done

    run(test)


def test_a_snapshot_that_hangs_ends_its_session(monkeypatch):
    monkeypatch.setattr(Dice, "snapshot", lambda self: Workshop.release.wait(10))
    monkeypatch.setattr(Dice, "step_timeout_s", 0.05)

    async def test(manager):
        session = await open_one(manager)
        error = await error_of(manager.snapshot(session.id, SnapshotRequest(0)))
        assert error.code == "step_timeout"
        assert manager.status(session.id).status == "failed"

    run(test)


def test_snapshots_are_bounded_in_number_bytes_and_time():
    async def test(manager):
        session = await open_one(manager)
        manager._snapshots = manager._instances._snapshots = Snapshots(2, 100_000)
        short = await manager.snapshot(session.id, SnapshotRequest(0, lease_s=0.15))
        await manager.snapshot(session.id, SnapshotRequest(0))
        error = await error_of(manager.snapshot(session.id, SnapshotRequest(0)))
        assert error.code == "at_capacity" and error.retryable
        request = CreateRequest("dice", from_snapshot=short.snapshot)
        await asyncio.sleep(0.1)
        await manager.create(request)  # begins the lease anew
        await asyncio.sleep(0.1)
        await manager.create(request)
        await until(lambda: len(manager._snapshots) == 1, 2.0)
        assert (await error_of(manager.create(request))).code == "session_expired"
        manager._snapshots.clear()
        assert manager._snapshots.num_bytes == 0
        manager._snapshots = manager._instances._snapshots = Snapshots(2, 100)
        error = await error_of(manager.snapshot(session.id, SnapshotRequest(0)))
        assert error.code == "payload_too_large"

    run(test)


# The agent's plane


def test_the_agent_sees_tools_and_answers_and_the_trainer_the_rest():
    async def test(manager):
        session = await open_one(manager, env="workshop")
        tools = manager.agent_tools(session.id)
        assert tools.tools == session.tools and tools.step == 0
        reply = await manager.agent_call(session.id, AgentCall("add", {"number": 4}))
        assert (reply.content, reply.ended, reply.step) == ('{"count":4}', False, 1)
        wrong = await manager.agent_call(session.id, AgentCall("add", {"number": "x"}))
        assert "Wrong arguments" in wrong.content and wrong.step == 2
        last = await manager.agent_call(session.id, AgentCall("submit", {"value": 0.25}))
        assert last.ended
        seen = msgspec.to_builtins(last)
        assert set(seen) == {"content", "ended", "step"} and "0.25" not in str(seen)
        status = manager.status(session.id)
        assert status.status == "ended" and status.reward == 0.25 + 0.5 * 3
        assert status.last is not None and status.last.reward == status.reward
        error = await error_of(manager.agent_call(session.id, AgentCall("add")))
        assert error.code == "episode_done"

    run(test)


def test_an_agents_call_with_a_step_runs_once_and_those_without_run_in_turn():
    async def test(manager):
        session = await open_one(manager, env="workshop")
        calls = [AgentCall("wait", {"seconds": 0.01}, 0)] * 2
        replies = await asyncio.gather(*(manager.agent_call(session.id, each) for each in calls))
        assert [reply.content for reply in replies] == ["waited, count 1"] * 2
        parallel = [AgentCall("wait", {"seconds": 0.01}) for _ in range(3)]
        replies = await asyncio.gather(*(manager.agent_call(session.id, each) for each in parallel))
        assert [reply.content for reply in replies] == [f"waited, count {n}" for n in (2, 3, 4)]
        # the trainer takes the next step where the agent has got to
        assert (await step(manager, session, 4, call("add"))).step == 5

    run(test)


# Tokens, ids and frames


def test_tokens_belong_to_one_session_and_one_plane():
    async def test(manager):
        first, second = await open_one(manager), await open_one(manager)
        assert first.id.startswith("3-") and second.id.startswith("3-")
        secret = manager.secret
        assert first.token == protocol.session_token(secret, first.id) != second.token
        assert protocol.agent_session(secret, first.agent_token) == first.id
        mixed = f"{second.id}.{first.agent_token.rpartition('.')[2]}"
        for wrong in ("", ".", first.token, f"{first.id}.{first.token}", mixed, "ä.b"):
            assert protocol.agent_session(secret, wrong) is None
        assert protocol.agent_session(b"x" * 32, first.agent_token) is None
        snapshot = await manager.snapshot(first.id, SnapshotRequest(0))
        assert snapshot.snapshot.startswith("3-")

    run(test, secret=b"s" * 32, worker=3, num_workers=4)


def test_every_frame_does_what_its_call_does():
    async def test(manager):
        async def send(**frame):
            (decoded,) = protocol.decode_frames(msgspec.json.encode({"id": 1, **frame}))
            assert not isinstance(decoded, protocol.FrameError), decoded
            return msgspec.json.decode(await manager.handle(decoded))

        create = {"op": "create", "key": "k", "env": "dice", "task": {"split": "train", "index": 1}}
        opened = await send(**create)
        assert opened == await send(**(create | {"id": 2}))  # the id is not part of the request
        sid = opened["sessions"][0]["id"]
        action = {"tool_calls": [{"id": "c", "name": "roll", "arguments": {}}]}
        taken = {"op": "step", "sid": sid, "step": 0, "action": action}
        reply = await send(**taken)
        assert reply["step"] == 1 and not reply["replayed"]
        assert (await send(**taken))["replayed"]
        snapshot = await send(op="snapshot", sid=sid, step=1)
        fork = await send(op="create", env="dice", from_snapshot=snapshot["snapshot"])
        assert fork["sessions"][0]["step"] == 1
        assert (await send(op="reset", sid=sid, step=1))["step"] == 2
        assert (await send(op="renew", sid=sid, lease_s=5.0))["step"] == 2
        assert (await send(op="status", sid=sid))["status"] == "live"
        assert (await send(op="info", env="dice"))["splits"] == {"train": 100}
        assert await send(op="ping") == {}
        assert await send(op="delete", sid=sid) == {}
        with pytest.raises(EnvError) as caught:
            await send(**taken)
        assert caught.value.code == "session_expired"

    run(test)
