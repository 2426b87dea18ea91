"""The conformance kit: each check catches what is broken in its way, and nothing else."""

import asyncio
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import odd_envs
import pytest
from broken_envs import (
    BROKEN,
    CloseHangs,
    Good,
    LooksUpTheReference,
    SleepsOnTheLoop,
    ToolLosesItsBackend,
)

from agentrl.cli.main import main
from agentrl.env import Environment, tool
from agentrl.env.check import (
    CHECKS,
    fresh,
    load_subject,
    run_check,
    select,
    shorten_repeat,
    subject,
)
from agentrl.env.check.worker import run_in_worker
from agentrl.env.tools import tools_of
from agentrl.errors import ConfigError

CASES = [(check, broken) for check, classes in BROKEN.items() for broken in classes]
WAITS = {
    CloseHangs,
    SleepsOnTheLoop,
}
"""Seconds go by until what they do wrong is certain."""


def name_of(each: object) -> str:
    return getattr(each, "__name__", str(each))


@pytest.fixture(autouse=True)
def few_episodes(monkeypatch):
    monkeypatch.setattr(subject, "CLOSE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(fresh, "run_twice", not_compared)
    monkeypatch.chdir(os.getcwd())  # which ends with the test, whatever an environment changed
    monkeypatch.setenv("EPISODE_SEED", "")


async def not_compared(subject):
    """Two fresh processes take seconds."""


async def check(target, names, **options):
    subject = await load_subject(target, **options)
    results = []
    for name in names or CHECKS:
        results.append(shorten_repeat(results, await run_check(name, subject)))
    return results


def outcomes(target, names, status="fail", **options):
    results = asyncio.run(check(target, names, **options))
    return {result.name: result for result in results if result.status == status}


def test_every_check_has_something_broken():
    assert BROKEN.keys() == CHECKS.keys()


def test_a_good_environment_passes_every_check():
    results = asyncio.run(check(Good, None))
    assert {result.name for result in results} == set(CHECKS)
    assert not [result for result in results if result.status != "pass"]


@pytest.mark.parametrize(
    ("name", "broken"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[1] in WAITS else []) for case in CASES],
    ids=name_of,
)
def test_a_check_catches_what_is_broken_in_its_way(name, broken):
    result = outcomes(broken, [name])[name]
    assert result.detail and result.remedy and result.asserts


@pytest.mark.slow
@pytest.mark.parametrize(("name", "broken"), CASES, ids=name_of)
def test_no_other_check_fails(name, broken):
    failed = outcomes(broken, list(CHECKS))
    assert {each.name for each in failed.values() if not each.detail.startswith("as in")} == {name}


@pytest.mark.parametrize("config", [{}, {"tools": True}, {"source": "sample", "tools": True}])
def test_math_passes(config):
    results = asyncio.run(check("math", None, config=config))
    assert [result for result in results if result.status == "fail"] == []
    assert {"oracle", "canary"} <= {result.name for result in results if result.status == "pass"}


def test_what_is_shared_is_loaded_once():
    loads = []

    class Counted(Good):
        @classmethod
        def load_shared(cls, config):
            loads.append(1)

    asyncio.run(check(Counted, ["tasks", "schema", "close", "oracle"]))
    assert loads == [1]


@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("tasks", odd_envs.TestIsTrain, "20 of 20 tasks of split 'test' are tasks of 'train'"),
        ("tasks", odd_envs.TestIsPartOfTrain, "20 of 20 tasks"),
        ("tools", odd_envs.EndsOnlyByATool, "answer calls self.finish()"),
        ("canary", odd_envs.ReferenceInADescription, "the reference"),
        ("canary", odd_envs.ReferenceInCapitals, "the reference"),
        ("globals", odd_envs.Prints, "prints 'adding"),
        ("globals", odd_envs.SeedsRandom, "seeds the module random"),
    ],
    ids=name_of,
)
def test_what_looks_sound_is_caught(name, broken, says):
    assert says in outcomes(broken, [name])[name].detail


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_looks_sound_is_caught_and_what_looks_odd_is_not(monkeypatch, tmp_path):
    """Whole checks in processes of their own, of environments that do not know each other."""
    monkeypatch.setenv("ODD_ENVS", str(tmp_path))

    def failures(environment):
        started, results = time.monotonic(), []
        names = select()
        target = f"odd_envs:{environment.__name__}"
        run_in_worker(target, names, thorough=False, report=results.append)
        failed = [f"{each.name}: {each.detail}" for each in results if each.status == "fail"]
        return failed, time.monotonic() - started

    broken = [*odd_envs.LISTED, *odd_envs.UNLISTED]
    environments = [*broken, *odd_envs.UNUSUAL]
    with ThreadPoolExecutor(3) as threads:
        ended = dict(zip(environments, threads.map(failures, environments), strict=True))
    assert len(broken) >= 25 and len(odd_envs.UNUSUAL) >= 20
    assert not {each.__name__ for each in broken if not ended[each][0]}
    alarms = {each.__name__: ended[each][0] for each in odd_envs.UNUSUAL if ended[each][0]}
    assert not alarms
    slowest = max(ended.values(), key=lambda each: each[1])
    assert slowest[1] < 90  # half of it on a machine that does nothing else


def test_a_server_is_checked_over_http(serve_environments):
    with serve_environments([Good, ToolLosesItsBackend]) as (url, _):
        passed = outcomes(url, None, "pass", env_id="Good")
        assert {"tasks", "determinism", "isolation", "bad_actions", "tool_calls"} <= set(passed)
        assert outcomes(url, None, env_id="Good") == {}
        for env_id, says in [(None, "say which one"), ("Other", "no 'Other'")]:
            with pytest.raises(ConfigError, match=says):
                asyncio.run(load_subject(url, env_id=env_id))
        failed = outcomes(url, ["episodes"], env_id="ToolLosesItsBackend")
        assert failed.keys() == {"episodes"}


def test_a_server_out_of_reach_is_a_result(serve_environments):
    with serve_environments([Good]) as (url, _):
        subject = asyncio.run(load_subject(url))
    result = asyncio.run(run_check("episodes", subject))
    assert result.status == "fail" and "cannot be reached" in result.detail


def test_select():
    assert select() == list(CHECKS)
    assert select(["oracle", "tasks"]) == ["tasks", "oracle"]
    assert "ends" not in select(skip=["ends"])
    with pytest.raises(ConfigError, match="no check 'speed'; the checks are tasks"):
        select(["speed"])


def test_samples_fit_their_schemas():
    import random
    from typing import Annotated, Literal

    from pydantic import Field

    from agentrl.env import tool

    class Wide(Environment):
        @tool
        def all(
            self,
            a: Annotated[int, Field(ge=3, le=5)],
            b: Annotated[float, Field(lt=-2)],
            c: Literal["x", "y"],
            d: list[dict[str, int]],
            e: Annotated[str, Field(min_length=4, max_length=6)],
            f: bool,
            g: int | None = None,
            h: Annotated[int, Field(gt=0, multiple_of=7)] = 7,
        ) -> str:
            return ""

    spec = tools_of(Wide)["all"]
    for seed in range(200):
        (action,) = subject.sample_calls([spec.spec], random.Random(seed), 1)
        arguments = action.tool_calls[0].arguments
        assert isinstance(spec.validate(arguments), dict), (arguments, spec.validate(arguments))


@pytest.mark.slow
def test_the_command(capsys):
    status = main(["env", "check", "broken_envs:Good", "--only", "tasks", "--only", "bad_actions"])
    out = capsys.readouterr().out
    assert status == 0 and "2 passed, 0 failed, 0 skipped" in out

    status = main(["env", "check", "broken_envs:MeanOfNothing", "--only", "bad_actions", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert status == 1 and result["status"] == "fail" and "nan" in result["detail"]
    assert result["asserts"].startswith("An agent's mistakes")

    assert main(["env", "check", "broken_envs:Nothing"]) == 2
    assert main(["env", "check", "broken_envs:Good", "--only", "speed"]) == 2


class BlocksForLong(Good):
    @tool
    async def add(self, number: int) -> str:
        time.sleep(0.2)
        return super().add(number)


def test_after_a_call_that_blocks_for_long_no_more_episodes_are_played():
    results = asyncio.run(check(BlocksForLong, ["event_loop", "episodes", "tasks"]))
    assert [each.status for each in results] == ["fail", "skip", "pass"]


def test_a_lookup_by_reference_is_honest():
    assert outcomes(LooksUpTheReference, ["canary", "oracle", "episodes"], "pass").keys() == {
        "canary",
        "oracle",
        "episodes",
    }


def test_one_cause_is_printed_once():
    failed = outcomes(ToolLosesItsBackend, ["episodes", "bad_actions", "tool_calls", "episodes"])
    assert failed["episodes"].detail == "as in episodes"


def in_a_worker(name, names):
    results = []
    run_in_worker(f"broken_envs:{name}", names, thorough=False, report=results.append)
    return {result.name: result for result in results}


@pytest.mark.slow
def test_a_check_that_ends_the_process_has_failed_and_the_others_go_on():
    results = in_a_worker("EndsTheProcess", ["tools", "episodes", "bad_actions"])
    assert [result.status for result in results.values()] == ["pass", "fail", "fail"]
    assert "the process ended with exit status 3 during this check" in results["episodes"].detail


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SwallowsCancellation", "BlocksForEver"])
def test_a_check_that_hangs_is_named_and_those_without_episodes_go_on(name):
    results = in_a_worker(name, ["tools", "schema", "tasks", "episodes"])
    assert [each.status for each in results.values()] == ["pass", "fail", "pass", "skip"]
    assert ("did not finish" if name == "BlocksForEver" else "had not returned") in results[
        "schema"
    ].detail
