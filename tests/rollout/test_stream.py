"""Rollouts that go on while the trainer works: bounds, refills, stragglers, exactly-once."""

import asyncio
import contextlib
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_scripted import scheduler_of

from agentrl.env import Environment, Task, register
from agentrl.env.client import connect
from agentrl.rollout.scheduler import TaskSource
from agentrl.rollout.stream import GroupStream
from agentrl.types import Action, StopReason, TokenRow, Turn


@register("stream-test")
class StreamTest(Environment):
    """Rewards what the policy says its reward is."""

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(str(index), f"task {index}")

    async def on_text(self, text: str):
        self.finish(reward=float(text))


class TimedPolicy:
    """Samples `num_tokens` tokens, each under the version of its moment, `pause_s` apart."""

    def __init__(self, say=lambda trajectory_id: (1, 0.0, "1.0")):
        self.say = say
        self.version = 0
        self.playing = 0
        self.most_playing = 0

    def read(self, trajectory, observation, tools, *, tools_changed):
        if not trajectory.branches:
            row = TokenRow()
            row.append_context([1, 2, 3], 0)
            row.messages = list(observation)
            trajectory.branches.append(row)
        return True

    async def act(self, trajectory, tools):
        num_tokens, pause_s, text = self.say(trajectory.trajectory_id)
        self.playing += 1
        self.most_playing = max(self.most_playing, self.playing)
        try:
            row = trajectory.branches[-1]
            start = len(row)
            for _ in range(num_tokens):
                row.append_sampled([5], [-0.5], [self.version], 0)
                await asyncio.sleep(pause_s)
        finally:
            self.playing -= 1
        row.messages.append({"role": "assistant", "content": text})
        trajectory.turns.append(Turn(0, start, num_tokens, "stop", "text", message=1))
        return Action(text)

    def reserve(self, num_episodes):
        pass

    def release(self, num_episodes=1):
        pass

    async def aclose(self):
        pass


@contextlib.asynccontextmanager
async def streaming(policy, *, source=None, group_size=2, max_concurrent=64, score=None, **stream):
    """Yields a stream over the policy, and its scheduler; in the end every episode has ended."""
    env = connect(None)
    scheduler = scheduler_of(
        policy,
        env,
        source or TaskSource("train", None, seed=1),
        env_id="stream-test",
        group_size=group_size,
        max_concurrent=max_concurrent,
        score=score,
        capacity=asyncio.Semaphore(max_concurrent),
    )
    made = GroupStream(scheduler, **stream)
    try:
        yield made, scheduler
    finally:
        await made.aclose()
        await env.aclose()
        assert sum(made.num_ended.values()) == made.num_dispatched
        assert not scheduler.live
        assert len(asyncio.all_tasks()) == 1


async def first_batch(policy, **options):
    async with streaming(policy, **{"num_steps": 1, "max_staleness": 0} | options) as (stream, _):
        return await stream.next_batch()


async def train(stream, policy, num_steps, train_s=lambda: 0.0):
    """Trains as the loop does; returns the batches and the version each was trained under."""
    batches = []
    for step in range(1, num_steps + 1):
        batch = await asyncio.wait_for(stream.next_batch(), 20)
        batches.append((step - 1, batch))
        await asyncio.sleep(train_s())
        policy.version = step
        stream.advance(step)
    return batches


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    num_steps=st.integers(1, 6),
    max_concurrent=st.integers(1, 12),
)
def test_no_token_is_staler_than_the_bound_and_every_task_is_trained_once(
    seed, groups_per_step, max_staleness, num_steps, max_concurrent
):
    """Heavy-tailed episodes and an uneven trainer; nothing is dropped to keep the bound."""
    chance = random.Random(seed)
    policy = TimedPolicy(
        lambda _: (chance.choice([1, 1, 2, 12]), chance.choice([0, 0, 0.001]), "1.0")
    )

    async def play():
        bounds = {"groups_per_step": groups_per_step, "max_staleness": max_staleness}
        limits = {"num_steps": num_steps, "max_concurrent": max_concurrent}
        async with streaming(policy, **bounds, **limits) as (stream, _):
            return await train(stream, policy, num_steps, lambda: chance.choice([0, 0.003]))

    batches = asyncio.run(play())
    trained = []
    for version, batch in batches:
        assert len(batch.groups) == groups_per_step and not batch.dropped
        for group in batch.groups:
            assert len(group.trajectories) == 2
            trained.append(group.group_id)
            for trajectory in group.trajectories:
                assert trajectory.group_id == group.group_id and trajectory.error is None
                assert version - trajectory.oldest_version <= max_staleness
    # Each task exactly once, and none is begun that no step would train on.
    assert sorted(trained) == [f"g{n:07d}" for n in range(num_steps * groups_per_step)]
    assert policy.most_playing <= max_concurrent


@pytest.mark.parametrize(("max_staleness", "begun"), [(0, [3, 6, 9]), (2, [9, 12, 15])])
async def test_the_stream_plays_ahead_as_far_as_the_bound_allows(max_staleness, begun):
    bounds = {"groups_per_step": 3, "num_steps": 100, "max_staleness": max_staleness}
    async with streaming(TimedPolicy(), **bounds) as (stream, scheduler):
        await stream.next_batch()
        for step, position in enumerate(begun, 1):
            await asyncio.sleep(0.02)
            assert scheduler.source.position == position
            stream.advance(step)
            await stream.next_batch()


async def test_a_batch_waits_for_a_long_episode_only_when_it_would_become_too_old():
    slow = "g0000000-m000"
    policy = TimedPolicy(lambda name: (40, 0.005, "1.0") if name == slow else (1, 0.0, "1.0"))

    bounds = {"groups_per_step": 1, "num_steps": 5, "max_staleness": 2}
    async with streaming(policy, **bounds) as (stream, _):
        batches = await train(stream, policy, 5, lambda: 0.02)
    order = [batch.groups[0].group_id for _, batch in batches]
    assert sorted(order[:2]) == ["g0000001", "g0000002"]  # whichever was ready first
    assert order[2:] == ["g0000000", "g0000003", "g0000004"]
    (long,) = (t for _, b in batches for t in b.trajectories if t.trajectory_id == slow)
    # It crossed two updates, and says so token by token.
    assert set(long.branches[0].policy_versions[3:]) == {0, 1, 2}


async def test_dropped_groups_are_replaced_at_once_and_only_so_often():
    """Every group of an odd task is dropped; max_waves = 2 replaces it once."""

    def keep(group):
        return "odd" if int(group.group_id[1:]) % 2 else None

    batch = await first_batch(TimedPolicy(), groups_per_step=4, keep=keep, max_waves=2)
    positions = sorted(int(group.group_id[1:]) for group in batch.groups)
    assert all(position % 2 == 0 for position in positions)
    assert batch.dropped["odd"] == 6 - len(batch.groups)  # 4 first, 2 replacements
    assert len(batch.trajectories) == 12  # dropped ones are recorded too


async def test_a_dropped_group_is_marked_and_its_task_is_not_lost_before_a_step_told_of_it():
    def keep(group):
        return "first" if int(group.group_id[1:]) < 4 else None

    bounds = {"groups_per_step": 2, "num_steps": 1, "max_staleness": 0, "max_waves": 4}
    async with streaming(TimedPolicy(), keep=keep, **bounds) as (stream, _):
        stream.advance(0)
        while stream.num_ended.total() < 12:  # two groups of two, and a replacement for each
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sorted(stream.outstanding()) == [0, 1, 2, 3, 4, 5]
        batch = await stream.next_batch()
        assert stream.outstanding() == []
    marks = {t.group_id: t.info.get("dropped") for t in batch.trajectories}
    assert marks == {f"g{n:07d}": "first" if n < 4 else None for n in range(6)}


async def test_stragglers_are_cut_and_excluded_and_the_rest_of_the_group_trains():
    slow = "g0000000-m003"
    policy = TimedPolicy(lambda name: (1000, 1.0, "1.0") if name == slow else (1, 0.0, "1.0"))

    cutting = {"min_group_size": 3, "straggler_timeout_s": 0.05}
    batch = await first_batch(policy, group_size=4, groups_per_step=2, **cutting)
    assert [len(group.trajectories) for group in batch.groups] == [4, 4]
    cut = [t for t in batch.trajectories if t.error is not None]
    assert [(t.trajectory_id, t.error.code, t.error.stage) for t in cut] == [
        (slow, "straggler", "generate")
    ]
    assert not cut[0].trainable and cut[0].stop_reason is StopReason.CANCELLED


async def test_a_member_that_waits_for_capacity_is_no_straggler():
    policy = TimedPolicy(lambda _: (1, 0.05, "1.0"))
    cutting = {"min_group_size": 1, "straggler_timeout_s": 0.03}
    batch = await first_batch(policy, group_size=4, max_concurrent=1, groups_per_step=2, **cutting)
    # One at a time: a member that waits while others play is not late yet.
    assert len(batch.trajectories) == 8
    codes = Counter(t.error.code if t.error else "ok" for t in batch.trajectories)
    assert codes["ok"] >= 6


async def test_oversampling_takes_what_is_ready_and_plays_the_rest_again_later():
    first_try = Counter()

    def say(name):
        first_try[name] += 1
        slow = name.startswith("g0000000") and first_try[name] == 1
        return (200, 0.01, "1.0") if slow else (1, 0.0, "1.0")

    policy = TimedPolicy(say)

    bounds = {"groups_per_step": 2, "num_steps": 3, "max_staleness": 0, "oversample": 1}
    async with streaming(policy, **bounds) as (stream, scheduler):
        batches = await train(stream, policy, 3)
        returned = scheduler.source.returned
    trained = [group.group_id for _, batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 6
    assert "g0000000" not in trained[:2] and "g0000000" in trained
    for version, batch in batches:
        for group in batch.groups:
            assert all(t.oldest_version == version for t in group.trajectories)
    assert len(returned) <= 1


async def test_what_no_step_took_is_handed_out_again_after_a_kill():
    policy = TimedPolicy(lambda _: (1, 0.001, "1.0"))
    bounds = {"groups_per_step": 2, "max_staleness": 1}
    async with streaming(policy, num_steps=9, **bounds) as (stream, scheduler):
        batch = await stream.next_batch()
        stream.advance(1)
        await asyncio.sleep(0.01)
        taken = [int(group.group_id[1:]) for group in batch.groups]
        outstanding, position = stream.outstanding(), scheduler.source.position
    assert sorted(taken + outstanding) == list(range(position))

    resumed = TaskSource("train", None, seed=1, position=position)
    resumed.returned.extend(outstanding)
    policy.version = 0
    async with streaming(policy, source=resumed, num_steps=3, **bounds) as (stream, _):
        batches = await train(stream, policy, 3)
    again = [int(group.group_id[1:]) for _, batch in batches for group in batch.groups]
    assert sorted(taken + again) == list(range(8))


async def test_groups_are_scored_before_the_filter_and_a_broken_scorer_ends_the_run():
    async def score(trajectories):
        for trajectory in trajectories:
            trajectory.reward = 7.0

    def keep(group):
        return None if group.trajectories[0].reward == 7.0 else "not scored"

    batch = await first_batch(TimedPolicy(), groups_per_step=1, score=score, keep=keep)
    assert [t.reward for t in batch.trajectories] == [7.0, 7.0]

    async def broken(trajectories):
        raise LookupError("a bug in the scorer")

    with pytest.raises(LookupError, match="a bug in the scorer"):
        await first_batch(TimedPolicy(), groups_per_step=1, score=broken)


async def test_closing_cancels_what_is_in_flight_and_records_it():
    policy = TimedPolicy(lambda _: (1000, 1.0, "1.0"))
    bounds = {"groups_per_step": 2, "num_steps": 4, "max_staleness": 1}
    async with streaming(policy, **bounds) as (stream, _):
        stream.advance(0)
        while policy.playing < 8:
            await asyncio.sleep(0.01)
        await stream.aclose()
        assert stream.num_ended == {"cancelled": 8}
    assert policy.playing == 0
