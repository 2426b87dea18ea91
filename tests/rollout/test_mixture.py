"""Several environments in one run: shares, kills, a slow one among others."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from rollout_scripted import scheduler_of
from test_stream import TimedPolicy

from agentrl.config import RolloutSection, load_config, weight_at
from agentrl.env.client import connect
from agentrl.errors import ConfigError
from agentrl.rollout.mixture import Capacity, Mixture, Part, Quotas, environment_metrics, merged
from agentrl.rollout.sampler import make_sampler
from agentrl.rollout.scheduler import TaskSource
from agentrl.train.batch import zero_variance

MODEL = {"path": "some/model"}


@pytest.mark.parametrize("groups_per_step", [8, 7, 1])
def test_the_shares_of_a_thousand_steps_are_exact(groups_per_step):
    weights = [5.0, 3.0, 2.0]
    quotas = Quotas(weights, groups_per_step)
    played = [0, 0, 0]
    for step in range(1, 1001):
        given = quotas(step)
        assert sum(given) == groups_per_step and min(given) >= 0
        played = [a + b for a, b in zip(played, given, strict=True)]
        for share, count in zip((0.5, 0.3, 0.2), played, strict=True):
            assert abs(count - share * groups_per_step * step) < 1
    assert played == [100 * groups_per_step * weight for weight in (5, 3, 2)]
    assert Quotas(weights, groups_per_step)(737) == quotas(737), "a resumed run asks for later ones"


def test_a_weight_may_be_a_schedule_and_a_weight_of_0_plays_nothing():
    falling = [(10, 1.0), (110, 0.0)]
    assert [weight_at(falling, step) for step in (1, 10, 60, 110, 500)] == [1, 1, 0.5, 0, 0]
    quotas = Quotas([1.0, falling], 4)
    assert quotas(5) == [2, 2] and quotas(110) == [4, 0] and quotas(400) == [4, 0]
    owed = sum(4 * w / (1 + w) for w in (weight_at(falling, step) for step in range(1, 201)))
    assert abs(sum(quotas(step)[1] for step in range(1, 201)) - owed) < 1


def test_each_environment_has_its_own_limits_rewards_and_overrides():
    tables = [
        {"name": "sums", "id": "math", "max_turns": 3, "config": {"digits": 2}},
        {"id": "search", "token": "secret", "reward": {"functions": ["f1"]}},
    ]
    source = {"model": MODEL, "env": tables, "reward": {"functions": ["math"]}}
    config = load_config(source, ["--env.sums.config.digits", "4", "--env.search.weight", "2"])
    sums, search = config.environments.values()
    assert list(config.environments) == ["sums", "search"]
    assert (sums.rollout.max_turns, search.rollout.max_turns) == (3, 8)
    assert (sums.reward.functions, search.reward.functions) == (["math"], ["f1"])
    assert sums.env.config == {"digits": 4} and config.envs[1].weight == 2
    assert search.envs == [] and load_config(search.to_json()) == search.model_copy(
        update={"env": search.env.model_copy(update={"token": None})}
    )
    assert "secret" not in config.to_toml() and "envs" not in config.to_json()
    assert load_config(config.to_json()).environments.keys() == config.environments.keys()


@pytest.mark.parametrize(
    ("tables", "overrides", "expected"),
    [
        ([{"id": "a"}, {"id": "a"}], [], "two [[env]] tables are named 'a'"),
        ([{"id": "a", "max_turnz": 1}], [], "env.0.max_turnz: unknown key; did you mean env.max_"),
        ([{"id": "a"}], ["--env.weight", "2"], "write --env.NAME.KEY, where NAME is one of a"),
        ([{"id": "a.py:B"}], [], "give this environment a name"),
        ([{"id": "a", "weight": 0}], [], "at step 1 the weights of all [[env]] are 0"),
        ([{"id": "a", "weight": [[9, 1.0], [2, 1.0]]}], [], "with increasing steps"),
        ([{"id": "a", "max_turn_tokens": 9999}], [], "exceeds rollout.max_context_tokens"),
    ],
)
def test_wrong_tables_are_named(tables, overrides, expected):
    with pytest.raises(ConfigError) as raised:
        load_config({"model": MODEL, "env": tables}, overrides)
    assert expected in str(raised.value)


@contextlib.asynccontextmanager
async def mixture(
    policies, *, weights, groups_per_step, saved=None, keep=None, size=None, sampler=None, **config
):
    """A mixture with a stream for each policy; `saved` is (step, position)."""
    step, position = saved or (0, None)
    env, shared = connect(None), asyncio.Semaphore(64)
    parts = [
        Part(
            name,
            SimpleNamespace(),
            scheduler_of(
                policy,
                env,
                TaskSource(
                    "train", size, seed=1, sampler=sampler and make_sampler(sampler, size, seed=1)
                ),
                env_id="stream-test",
                group_size=2,
                id_prefix=f"{name}-",
                capacity=Capacity(asyncio.Semaphore(64), shared),
            ),
        )
        for name, policy in policies.items()
    ]
    made = Mixture(parts, Quotas(weights, groups_per_step), keep)
    if position is not None:
        made.restore(position)
    rollout = {
        "max_waves": 1, "oversample_groups": 0, "stragglers": None, "max_staleness": 2,
    }  # fmt: skip
    made.start(
        SimpleNamespace(
            run=SimpleNamespace(num_steps=60), rollout=SimpleNamespace(**(rollout | config))
        ),
        step,
    )
    try:
        yield made
    finally:
        await made.aclose()
        await env.aclose()


def test_shares_are_exact_over_kills_and_no_task_is_lost_or_repeated():
    weights, groups_per_step, num_steps = [3.0, 2.0, 1.0], 5, 60
    rng = random.Random(4)
    quotas = Quotas(weights, groups_per_step)
    trained = {name: Counter() for name in "abc"}
    saved, num_kills = (0, None), 0

    async def live(until):
        """Train until a kill, from the newest checkpoint."""
        nonlocal saved
        say = lambda trajectory_id: (rng.randint(1, 4), 0.0, "1.0")  # noqa: E731
        policies = {name: TimedPolicy(say) for name in "abc"}
        for policy in policies.values():
            policy.version = saved[0]
        async with mixture(
            policies, weights=weights, groups_per_step=groups_per_step, saved=saved
        ) as made:
            for step in range(saved[0] + 1, until + 1):
                batches = await asyncio.wait_for(made.collect(step, lambda *_: None), 60)
                counts = [len(batch.groups) for batch in batches.values()]
                assert counts == quotas(step)
                for name, batch in batches.items():
                    for group in batch.groups:
                        assert {t.group_id for t in group.trajectories} == {group.group_id}
                        assert group.group_id.startswith(f"{name}-")
                        trained[name][group.group_id] += 1
                for policy in policies.values():
                    policy.version = step
                made.advance(step)
                saved = (step, made.data_position())
                await asyncio.sleep(0)

    while saved[0] < num_steps:
        num_kills += 1
        asyncio.run(live(min(num_steps, saved[0] + rng.randint(1, 3))))
    assert num_kills >= 20
    for number, name in enumerate("abc"):
        total = sum(quotas(step)[number] for step in range(1, num_steps + 1))
        assert trained[name] == Counter({f"{name}-g{n:07d}": 1 for n in range(total)})


@pytest.mark.parametrize("oversample", [0, 3])
def test_a_sampler_keeps_what_it_chose_over_kills_and_learns_each_group_once(oversample):
    """With rollouts that play ahead, replaced groups, and groups cancelled for their age."""
    rng, num_steps = random.Random(7), 24
    tasks: dict[str, str] = {}
    told = Counter()
    saved, num_kills = (0, None), 0

    def say(trajectory_id):  # the same reward whenever it is played
        paid = random.Random(trajectory_id).random() < 0.5
        return rng.randint(1, 4), 0.0, "1.0" if paid else "0.0"

    async def live(until):
        nonlocal saved
        policy = TimedPolicy(say)
        policy.version = saved[0]
        async with mixture(
            {"a": policy}, weights=[1.0], groups_per_step=3, saved=saved, size=9,
            sampler=RolloutSection(sampler="difficulty"), max_waves=2,
            keep=zero_variance, oversample_groups=oversample,
        ) as made:  # fmt: skip
            for step in range(saved[0] + 1, until + 1):
                batches = await asyncio.wait_for(made.collect(step, lambda *_: None), 60)
                for trajectory in batches["a"].trajectories:
                    group_id, task_id = trajectory.group_id, trajectory.task_id
                    assert tasks.setdefault(group_id, task_id) == task_id
                told.update({t.group_id for t in batches["a"].trajectories})
                metrics = made.take_in(batches)
                assert 1 <= metrics["env/a/sampler/tasks"] <= 9
                policy.version = step
                made.advance(step)
                saved = (step, json.loads(json.dumps(made.data_position())))
                chosen = {position for position, _ in saved[1]["a"]["sampler"]["chosen"]}
                assert chosen == set(saved[1]["a"]["returned"]), "what no step has told of"
                await asyncio.sleep(0)

    while saved[0] < num_steps:
        num_kills += 1
        asyncio.run(live(min(num_steps, saved[0] + rng.randint(1, 2))))
    assert num_kills >= 12 and max(told.values()) == 1
    counts = sum(count for _, count, _ in saved[1]["a"]["sampler"]["played"])
    assert counts == len(told)


async def test_a_slow_environment_does_not_hold_up_the_others():
    class Waiting(TimedPolicy):
        may_go = asyncio.Event()

        async def act(self, trajectory, tools):
            await self.may_go.wait()
            return await super().act(trajectory, tools)

    fast, slow = TimedPolicy(), Waiting()
    async with mixture({"fast": fast, "slow": slow}, weights=[1.0, 1.0], groups_per_step=4) as made:
        step = asyncio.create_task(made.collect(1, lambda *_: None))
        stream = made.parts[0].stream
        while stream.num_ended.total() < 12:  # its 2 groups of 2, of three steps
            await asyncio.sleep(0)
        assert not step.done()
        slow.may_go.set()
        batches = await asyncio.wait_for(step, 60)
        assert [len(batch.groups) for batch in batches.values()] == [2, 2]
        metrics = environment_metrics(batches)
        assert metrics["env/slow/reward/mean"] == 1.0
        assert metrics["env/fast/rollout/trajectories"] == 4
        assert len(merged(batches).trajectories) == 8


async def test_a_cancelled_step_leaves_every_group_to_be_played_again():
    never = TimedPolicy(lambda trajectory_id: (1, 3600.0, "1.0"))
    async with mixture(
        {"fast": TimedPolicy(), "never": never}, weights=[1.0, 1.0], groups_per_step=4
    ) as made:
        step = asyncio.create_task(made.collect(1, lambda *_: None))
        while made.parts[0].stream.num_ended.total() < 12:
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait({step})
        for position in made.data_position().values():
            assert sorted(position["returned"]) == list(range(6))
