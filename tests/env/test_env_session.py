"""The rules of sessions: exactly once, deadlines, leases, capacity, errors."""

import asyncio
import gc
import json
import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_calls import call, error_of, open_group, step, until, with_manager
from sample_envs import Workshop

from agentrl.env.protocol import CreateRequest, TaskSpec
from agentrl.env.values import to_content
from agentrl.errors import EnvUnavailable, GraderError
from agentrl.types import Task


def create(env="workshop", index=0, split="train", **rest):
    return CreateRequest(env, TaskSpec(split, index), **rest)


async def open_one(manager, *args, **kwargs):
    return (await manager.create(create(*args, **kwargs))).sessions[0]


# Opening


@with_manager()
async def test_a_group_starts_from_one_task_and_seed_and_goes_its_own_ways(manager):
    group = await open_group(manager, create(seed=3), 4)
    assert len({session.id for session in group}) == 4
    assert all(session.observation == group[0].observation for session in group)
    for number, session in enumerate(group):
        await step(manager, session, 0, call("add", number=number))
    contents = [
        (await step(manager, session, 1, call("add", number=0))).observation[0]["content"]
        for session in group
    ]
    assert contents == [f'{{"count":{number}}}' for number in range(4)]


@with_manager()
async def test_the_authors_own_error_stays_the_cause_of_a_failed_reset(manager):
    failing = CreateRequest("workshop", TaskSpec(inline=Task("t", "bad")))
    error = await error_of(manager.create(failing))
    assert isinstance(error.__cause__, RuntimeError)


@with_manager()
async def test_what_sessions_share_is_loaded_once_per_configuration(manager):
    loads, closed = Workshop.loads, Workshop.shared_closed
    await asyncio.gather(*(manager.create(create()) for _ in range(5)))
    assert Workshop.loads == loads + 1
    other = await open_one(manager, config={"greeting": "moin"})
    assert Workshop.loads == loads + 2
    reply = await step(manager, other, 0, call("greet"))
    assert reply.observation[0]["content"] == "moin"
    await manager.aclose()
    assert Workshop.shared_closed == closed + 2


@with_manager()
async def test_configurations_nobody_uses_are_dropped(manager, monkeypatch):
    monkeypatch.setattr("agentrl.env.sessions.loaded.MAX_LOADED", 3)
    kept = await open_one(manager, config={"greeting": "kept"})
    closed = Workshop.shared_closed
    for number in range(6):
        session = await open_one(manager, config={"greeting": str(number)})
        manager.delete(session.id)
        await until(lambda: manager.num_live == 1)
    assert len(manager.environments) <= 3
    await until(lambda: Workshop.shared_closed > closed)
    reply = await step(manager, kept, 0, call("greet"))
    assert reply.observation[0]["content"] == "kept"


@with_manager(config={"workshop": {"greeting": "ahoi"}})
async def test_the_server_side_configuration_is_what_a_request_starts_from(manager):
    plain = await open_one(manager)
    assert (await step(manager, plain, 0, call("greet"))).observation[0]["content"] == "ahoi"
    own = await open_one(manager, config={"greeting": "hey"})
    assert (await step(manager, own, 0, call("greet"))).observation[0]["content"] == "hey"


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (create("nowhere"), "not_found", "no environment 'nowhere'"),
        (create(split="dev"), "invalid_request", "no split 'dev'; it has train"),
        (create(index=1000), "invalid_request", "has 1000 tasks"),
        (create(config={"x": 1}), "invalid_request", "no key 'x'; the keys are greeting"),
        (create(config={"greting": 1}), "invalid_request", "did you mean greeting?"),
        (create(config={"greeting": 1}), "invalid_request", "greeting: Input should be"),
        (create(config={"fail_loading": "data"}), "invalid_request", "rows.jsonl, line 3"),
        (create(config={"fail_loading": "config"}), "invalid_request", "install it"),
        (create(config={"offer": ["fly"]}), "invalid_request", "offered_tools() names 'fly'"),
        (create(index=666), "env_error", "no such task in the file"),
        (
            CreateRequest("workshop", TaskSpec(inline=Task("t", "bad"))),
            "env_error",
            "reset failed",
        ),
        (create(config={"slow_reset_s": 9.0}, timeout_s=0.5), "reset_timeout", "ran out of time"),
    ],
)
@with_manager()
async def test_a_session_that_cannot_be_opened_says_why_and_holds_no_capacity(
    manager, request_, code, says
):
    error = await error_of(manager.create(request_))
    assert error.code == code and says in str(error)
    await until(lambda: manager.num_live == 0)


@with_manager()
async def test_a_failed_loading_is_tried_again(manager, monkeypatch):
    fails = [True]
    load = Workshop.load_shared.__func__

    def flaky(cls, config):
        if fails.pop():
            raise OSError("disk on fire")
        return load(cls, config)

    monkeypatch.setattr(Workshop, "load_shared", classmethod(flaky))
    error = await error_of(manager.create(create()))
    assert error.code == "env_error" and "OSError: disk on fire" in str(error)
    fails.append(False)
    assert (await open_one(manager)).step == 0


@with_manager(max_sessions=4)
async def test_capacity_counts_live_environments_only(manager):
    group = await open_group(manager, create(), 4)
    error = await error_of(manager.create(create()))
    assert isinstance(error, EnvUnavailable) and error.code == "at_capacity"
    assert error.retryable and error.retry_after_s
    assert (await step(manager, group[0], 0, call("submit", value=1))).terminated
    await until(lambda: manager.num_live == 3)  # the ended session only keeps its reply
    await manager.create(create())
    assert manager.num_live == 4


@with_manager()
async def test_a_repeated_create_opens_once_and_nothing_once_that_was_closed(manager):
    request = create()
    first, second = await asyncio.gather(
        manager.create(request, "key"), manager.create(request, "key")
    )
    third = await manager.create(request, "key")
    assert first == second == third and manager.num_live == 1
    error = await error_of(manager.create(create(seed=1), "key"))
    assert error.code == "idempotency_conflict"
    assert (await manager.create(request, "other")) != first
    for session in first.sessions:
        manager.delete(session.id)
    assert list(manager._creations) == ["other"]  # replies are forgotten with their sessions
    await until(lambda: manager.num_live == 1)
    error = await error_of(manager.create(request, "key"))  # a late one opens nothing
    assert error.code == "session_expired" and "fresh key" in str(error)
    assert manager.num_live == 1


@with_manager(max_sessions=1)
async def test_a_create_that_failed_may_be_repeated_with_its_key(manager):
    full = await open_one(manager)
    assert (await error_of(manager.create(create(), "key"))).code == "at_capacity"
    assert not manager._creations
    manager.delete(full.id)
    await until(lambda: manager.num_live == 0)
    assert (await manager.create(create(), "key")).sessions


@with_manager()
async def test_draining_refuses_new_sessions_and_serves_the_open_ones(manager):
    session = await open_one(manager)
    draining = asyncio.ensure_future(manager.drain(5.0))
    await asyncio.sleep(0.01)
    assert (await error_of(manager.create(create()))).code == "draining"
    assert (await step(manager, session, 0, call("add"))).step == 1
    assert not draining.done()
    await step(manager, session, 1, call("submit", value=1))
    await asyncio.wait_for(draining, 2)


@with_manager()
async def test_information_waits_for_loading_as_long_as_it_is_told(manager):
    config = {"slow_load_s": 0.3}
    error = await error_of(manager.info("workshop", config, timeout_s=0.05))
    assert error.code == "reset_timeout" and error.retryable
    loads = Workshop.loads
    assert (await manager.info("workshop", config, timeout_s=5.0)).splits == {"train": 1000}
    assert Workshop.loads == loads  # it was the same loading, which had gone on


# The last turn


@with_manager()
async def test_a_last_turn_that_ends_the_episode_by_itself_is_not_truncated(manager):
    session = await open_one(manager)
    reply = await step(manager, session, 0, call("submit", value=1), last=True)
    assert (reply.terminated, reply.truncated, reply.reward) == (True, False, 1.5)
    error = await error_of(step(manager, session, 0, call("submit", value=1)))
    assert error.code == "step_conflict"


@with_manager()
async def test_a_grader_that_fails_on_the_last_turn_is_an_error(manager):
    session = await open_one(manager)
    error = await error_of(step(manager, session, 0, call("add", number=13), last=True))
    assert isinstance(error, GraderError) and "ZeroDivisionError: unlucky" in str(error)


# Exactly once


@with_manager()
async def test_a_repeated_step_waits_for_the_one_that_runs(manager):
    session = await open_one(manager)
    first, second = await asyncio.gather(
        step(manager, session, 0, call("wait", seconds=0.05)),
        step(manager, session, 0, call("wait", seconds=0.05)),
    )
    assert (first.replayed, second.replayed) == (False, True)
    assert first.observation == second.observation
    assert first.observation[0]["content"] == "waited, count 1"


@with_manager()
async def test_a_caller_who_goes_away_disturbs_nobody(manager):
    session = await open_one(manager)
    leaver = asyncio.ensure_future(step(manager, session, 0, call("wait", seconds=0.05)))
    stayer = asyncio.ensure_future(step(manager, session, 0, call("wait", seconds=0.05)))
    await asyncio.sleep(0.01)
    leaver.cancel()
    assert (await stayer).observation[0]["content"] == "waited, count 1"
    assert (await step(manager, session, 0, call("wait", seconds=0.05))).replayed


@with_manager()
async def test_after_the_end_there_are_replays_and_no_fresh_environment(manager):
    session = await open_one(manager)
    last = await step(manager, session, 0, call("submit", value=2.0))
    assert last.terminated and last.reward == 2.5
    await until(lambda: manager.num_live == 0)
    error = await error_of(step(manager, session, 1, call("add")))
    assert error.code == "episode_done" and error.status == 409
    assert (await step(manager, session, 0, call("submit", value=2.0))).reward == 2.5
    assert manager.status(session.id).status == "ended"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=15
    )
)
def test_any_order_of_calls_executes_each_index_once(calls):
    """Random offsets from the current index, random actions, some doubled: the count the
    environment keeps is always that of the steps a model of the rules accepts."""

    @with_manager()
    async def test(manager):
        session = await open_one(manager)
        index, count, taken = 0, 0, {}
        for offset, number, doubled in calls:
            wanted = index + offset
            if wanted < 0:
                continue
            accepted = wanted == index or (wanted == index - 1 and taken[wanted] == number)
            attempts = [
                step(manager, session, wanted, call("add", number=number))
                for _ in range(1 + doubled)
            ]
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            if not accepted:
                assert all(getattr(each, "code", "") == "step_conflict" for each in outcomes)
                continue
            if wanted == index:
                index, count, taken[wanted] = index + 1, count + number, number
                assert [each.replayed for each in outcomes] == [False, True][: len(outcomes)]
            else:
                assert all(each.replayed for each in outcomes)
            assert {each.step for each in outcomes} == {index}
            content = f'{{"count":{count}}}'
            assert all(each.observation[0]["content"] == content for each in outcomes)

    asyncio.run(test())


# Deadlines


@pytest.mark.parametrize("action", [call("wait", seconds=9), call("hang"), call("ignore_cancel")])
@with_manager()
async def test_a_deadline_is_kept_whatever_the_environment_does(manager, action):
    session = await open_one(manager)
    started = time.monotonic()
    error = await error_of(step(manager, session, 0, action, timeout_s=0.1))
    assert time.monotonic() - started < 0.6
    assert error.code == "step_timeout" and error.status == 504 and not error.retryable
    again = await error_of(step(manager, session, 0, action, timeout_s=0.1))
    assert again.code == "step_timeout"
    assert (await error_of(step(manager, session, 0, call("add")))).code == "step_conflict"
    assert manager.status(session.id).status == "failed"
    Workshop.release.set()
    await until(lambda: manager.num_live == 0)


# Errors


@pytest.mark.parametrize(
    ("action", "code", "says"),
    [
        (call("leave"), "env_error", "raised SystemExit: 3"),
        (call("cancel_itself"), "env_error", "cancelled its own call"),
        (call("strange"), "env_error", "which cannot become JSON"),
        (call("submit_nan"), "env_error", r"nan: rewards and metrics must be finite"),
        (call("lose_grader"), "grader_error", "the grader is gone"),
        (call("lose_backend"), "unavailable", "the search index is down"),
    ],
)
@with_manager()
async def test_a_failed_step_fails_the_session_with_its_reason(manager, action, code, says, caplog):
    session = await open_one(manager)
    error = await error_of(step(manager, session, 0, action))
    assert error.code == code and says in str(error) and not error.retryable
    assert isinstance(error, GraderError) == (code == "grader_error")
    assert (await error_of(step(manager, session, 0, action))).code == code
    await until(lambda: manager.num_live == 0)


@with_manager()
async def test_every_episode_leaves_one_log_line(manager, caplog):
    caplog.set_level(logging.INFO, "agentrl.env")
    ended, failed, left = [await open_one(manager, index=n, seed=n) for n in range(3)]
    await step(manager, ended, 0, call("submit", value=1))
    await error_of(step(manager, failed, 0, call("lose_grader")))
    manager.delete(left.id)
    for session in (ended, failed):
        manager.delete(session.id)
    lines = [json.loads(record.message) for record in caplog.records if "{" in record.message]
    assert [(line["task"], line["outcome"]) for line in lines] == [
        ("train/0", "terminated"),
        ("train/1", "grader_error"),
        ("train/2", "abandoned"),
    ]
    assert lines[0]["reward"] == 1.5 and lines[0]["turns"] == 1 and lines[0]["seed"] == 0
    assert "the grader is gone" in lines[1]["error"]


# Leases and the end


@with_manager()
async def test_a_lease_runs_out_and_its_session_is_closed(manager):
    closed = Workshop.closed
    session = await open_one(manager, lease_s=0.05)
    await until(lambda: manager.num_live == 0)
    assert Workshop.closed == closed + 1
    error = await error_of(step(manager, session, 0, call("add")))
    assert error.code == "session_expired" and error.status == 410
    manager.delete(session.id)  # still no error


@with_manager()
async def test_every_call_renews_and_a_running_step_holds_the_lease(manager):
    session = await open_one(manager, lease_s=0.4)
    reply = await step(manager, session, 0, call("wait", seconds=0.5))
    assert reply.step == 1
    for _ in range(3):
        await asyncio.sleep(0.15)
        manager.status(session.id)
    for _ in range(3):
        await asyncio.sleep(0.15)
        manager.renew(session.id, None)
    assert (await step(manager, session, 1, call("add"))).step == 2
    renewed = manager.renew(session.id, 50.0)
    assert abs(renewed.lease_expires_at - time.time() - 50.0) < 1.0


@with_manager()
async def test_closing_cancels_the_step_that_runs(manager):
    session = await open_one(manager)
    running = asyncio.ensure_future(step(manager, session, 0, call("wait", seconds=20)))
    await asyncio.sleep(0.02)
    manager.delete(session.id)
    assert (await error_of(running)).code == "session_expired"
    await until(lambda: manager.num_live == 0)


@with_manager()
async def test_hundreds_of_episodes_leave_nothing_behind(manager):
    async def episode(number):
        session = await open_one(manager, index=number % 10)
        await step(manager, session, 0, call("add"))
        if number % 3:
            await step(manager, session, 1, call("submit", value=1))
        manager.delete(session.id)

    for start in range(0, 500, 10):
        await asyncio.gather(*(episode(start + n) for n in range(10)))
        await until(lambda: manager.num_live == 0)
    assert not manager._sessions
    gc.collect()
    left = sum(isinstance(each, Workshop) for each in gc.get_objects())
    assert left <= 1 + 10  # the source, and what the last tasks still hold


def test_a_set_is_shown_in_an_order_of_its_own():
    for value in ({"x", "yy", "zzz"}, {"a": [frozenset({"x", "yy", "zzz"})]}):
        assert '["x","yy","zzz"]' in str(to_content(value))
