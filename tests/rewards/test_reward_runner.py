"""The runner: names, weights, deadlines, failures that are never 0, the alarm."""

import asyncio
import logging
import math
import re
import subprocess
import sys
import time

import pytest

from agentrl.errors import ConfigError, GraderError
from agentrl_rewards.runner import RewardInput, RewardRunner


def always(value):
    def reward(text, reference):
        return value

    return reward


async def lengths(samples, *, scale=1.0):
    longest = max(len(sample.text) for sample in samples)
    return [scale * (len(sample.text) == longest) for sample in samples]


def test_resolving_and_importing_is_lazy():
    code = (
        "import sys, agentrl_rewards.runner as r\n"
        "assert not {'aiohttp', 'torch', 'agentrl_rewards.code'} & set(sys.modules)\n"
        "[r.resolve(name) for name in r.REWARDS]\n"
        "assert not {'torch', 'math_verify', 'sympy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


async def test_group_rewards_see_all_samples():
    runner = RewardRunner(["em", lengths], options={"lengths": {"scale": 2.0}})
    results = await runner.score_group([RewardInput("a", "a"), RewardInput("long", "a")])
    assert [result.reward for result in results] == [1.0, 2.0]
    for bad in (always_short_list, always_a_text):
        results = await RewardRunner([bad]).score_group([RewardInput("a"), RewardInput("b")])
        assert all(isinstance(result, GraderError) for result in results)


async def group_by_turn(samples):
    return [[1.0, 2.0], 3.0]


def wrong_length(text, reference, *, turns):
    return [1.0] * (len(turns) + 1)


def turns_and_a_text(text, reference, *, turns):
    return [1.0, "x"]


TURNS = [
    [{"role": "assistant", "content": "ab"}, {"role": "user", "content": "go on"}],
    [{"role": "assistant", "content": "abc"}],
]


async def test_a_group_reward_may_reward_every_turn():
    answers = [RewardInput("x", turns=TURNS), RewardInput("y", turns=TURNS[:1])]
    results = await RewardRunner([group_by_turn]).score_group(answers)
    assert [[t.reward for t in each.turns] for each in results] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize(
    ("function", "turns"),
    [
        (wrong_length, TURNS),
        (turns_and_a_text, TURNS),
        (always([1.0]), TURNS[:1]),
        (always([1.0, 2.0]), TURNS),
    ],
)
async def test_a_list_that_does_not_fit_the_turns_is_a_grader_error(function, turns):
    with pytest.raises(GraderError):
        await RewardRunner([function]).score(RewardInput("x", turns=turns))


async def test_functions_get_the_final_answer_and_may_ask_for_the_whole_text():
    got = {}

    def both(text, reference, *, whole_text):
        got.update(text=text, whole_text=whole_text)
        return 0.0

    whole = "<think>Paris?</think>\n\nRome"
    await RewardRunner([both]).score(RewardInput(whole))
    assert got == {"text": "Rome", "whole_text": whole}
    runner = RewardRunner(["math", "format", "deepscaler"])
    result = await runner.score(RewardInput("<think>Paris</think><answer>7</answer>", "7"))
    assert result.components == {"math": 1.0, "format": 1.0, "deepscaler": 1.0}
    paris = await RewardRunner(["substring"]).score(RewardInput("<think>Paris</think>no", "Paris"))
    unfinished = await RewardRunner(["em"]).score(RewardInput("<think>Paris", "Paris"))
    assert (paris.reward, unfinished.reward) == (0.0, 0.0)


async def always_short_list(samples):
    return [1.0]


async def always_a_text(samples):
    return "10"


async def raises(text, reference):
    raise RuntimeError("broken")


async def hangs(text, reference):
    await asyncio.sleep(60)


def blocks(text, reference):
    time.sleep(60)


def exits(text, reference):
    raise GraderError("my own words")


async def own_timeout(text, reference):
    raise TimeoutError("inside")


@pytest.mark.parametrize(
    "function",
    [
        raises,
        hangs,
        blocks,
        exits,
        own_timeout,
        always(None),
        always(math.nan),
        always(math.inf),
        always("high"),
        always({"score": "1"}),
        always({}),
        always({"score": 1, "part": math.nan}),
        always(10**400),
    ],
)
async def test_failures_are_grader_errors_and_never_0(function):
    runner = RewardRunner(["em", function], deadline_s=0.2)
    start = time.monotonic()
    with pytest.raises(GraderError):
        await runner.score(RewardInput("a", "a"))
    assert time.monotonic() - start < 2.0


async def test_the_alarm_rises_above_one_percent_and_is_said_once(caplog):
    def fails_on_x(text, reference):
        return 1.0 / (text != "x")

    with caplog.at_level(logging.ERROR, logger="agentrl.rewards"):
        runner = RewardRunner([fails_on_x])

        async def num_alarms(good, bad):
            texts = ["a"] * good + ["x"] * bad
            await runner.score_group([RewardInput(text) for text in texts])
            return len(caplog.records)

        assert await num_alarms(5, 1) == 0  # one failure alone is no alarm
        assert await num_alarms(194, 1) == 0  # 2 of 201
        assert await num_alarms(0, 1) == 1  # 3 of 202
        assert await num_alarms(0, 5) == 1
        assert await num_alarms(1000, 0) == 1  # they left the window
        assert await num_alarms(0, 11) == 2


async def test_concurrency_is_bounded_and_waiting_costs_no_deadline():
    running = peak = 0

    async def slow(text, reference):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.05)
        running -= 1
        return 1.0

    runner = RewardRunner([slow], max_concurrency=3, deadline_s=0.3)
    results = await runner.score_group([RewardInput("a")] * 30)
    assert not any(isinstance(result, GraderError) for result in results)
    assert peak == 3


async def test_a_function_in_a_file(tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "def short(text, reference):\n    return float(len(text) < 9)\n"
    )
    runner = RewardRunner([f"{tmp_path}/my_rewards.py:short"])
    assert (await runner.score(RewardInput("brief"))).reward == 1.0


@pytest.mark.parametrize(
    ("functions", "options", "named"),
    [
        ([], {}, "reward.functions"),
        (["maths"], {}, "maths"),
        (["no_such_pkg.mod:fn"], {}, "no_such_pkg"),
        (["agentrl_rewards.qa:nothing"], {}, "nothing"),
        (["agentrl_rewards.choice:_LETTER"], {}, "_LETTER"),
        (["em"], {"em": {"loud": 1}}, "loud"),
        (["em"], {"f1": {}}, "reward.options"),
        (["remote_rm"], {}, "url"),
        (["em", "em"], {}, "reward.functions"),
    ],
)
def test_wrong_settings_show_at_once(functions, options, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        RewardRunner(functions, options=options)
    for weights in ([1, 2], [math.nan]):
        with pytest.raises(ConfigError, match=r"reward\.weights"):
            RewardRunner(["em"], weights=weights)


async def test_a_cancellation_from_inside_a_function_is_its_failure():
    async def cancelled(text, reference):
        raise asyncio.CancelledError

    async def inner(text, reference):
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task

    for function in (cancelled, inner):
        results = await RewardRunner([function]).score_group([RewardInput("a"), RewardInput("b")])
        assert [type(result) for result in results] == [GraderError, GraderError]
        assert "CancelledError" in str(results[0])


async def test_cancelling_the_runner_cancels_its_calls():
    started = asyncio.Event()

    async def waits(text, reference):
        started.set()
        await asyncio.sleep(60)

    scoring = asyncio.ensure_future(RewardRunner([waits]).score_group([RewardInput("a")]))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
