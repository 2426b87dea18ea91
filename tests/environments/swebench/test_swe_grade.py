"""Runs of the harness are classified correctly; no container engine is needed."""

import asyncio
import dataclasses
import importlib.util

import pytest
from patches import file_diff
from swe_rows import FAILED, INFRASTRUCTURE, instance_of, verdict

from agentrl.errors import EnvError
from agentrl_swebench import grade as grading
from agentrl_swebench.grade import GradingLimits, grade, judge
from agentrl_swebench.harness import Evidence, Watch

INSTANCE = instance_of()
LIMITS = GradingLimits()


def report(resolved, failed=1):
    tests = {"success": [], "failure": ["x"] * failed}
    return {"a__b-1": {"resolved": resolved, "tests_status": {"FAIL_TO_PASS": tests}}}


def evidence(**values):
    return Evidence(**({"container_end": "stopped"} | values))


RESOLVED = evidence(report=report(True), complete=True)
UNRESOLVED = {"report": report(False), "complete": True}
TROUBLE = ("infrastructure", True)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (RESOLVED, ("resolved", False)),
        (evidence(**UNRESOLVED), ("unresolved", False)),
        (evidence(error_kind="patch"), ("patch_failed", False)),
        # Forged or broken test runs are failures, tried again because they look like trouble.
        (evidence(report=report(False)), ("unresolved", True)),
        (evidence(error_kind="timeout", error="Test timed out"), ("unresolved", True)),
        (evidence(error_kind="engine", container_end="died"), ("unresolved", True)),
        (evidence(error_kind="memory"), ("unresolved", False)),
        (evidence(error_kind="decode"), ("unresolved", False)),
        # Trouble of the infrastructure never is one.
        (evidence(error_kind="image", container_end=""), TROUBLE),
        (evidence(error_kind="engine", container_end="lost"), TROUBLE),
        (evidence(error_kind="engine"), TROUBLE),
        (evidence(error_kind="no_engine", container_end=""), TROUBLE),
        (evidence(error_kind="engine", container_end="removed"), TROUBLE),
        (evidence(error_kind="disk"), TROUBLE),
        (evidence(error_kind="row"), TROUBLE),
        (evidence(error_kind="other"), TROUBLE),
        (evidence(report=report(False), container_end="lost"), TROUBLE),
        (evidence(**UNRESOLVED, container_end="removed"), TROUBLE),
        (evidence(**UNRESOLVED, least_free_bytes=1 << 20), TROUBLE),
        (evidence(error_kind="patch", least_free_bytes=0), TROUBLE),
        # A full disk fails tests; it makes none pass.
        (evidence(report=report(True), complete=True, least_free_bytes=0), ("resolved", False)),
    ],
)
def test_outcome_of_a_run(seen, expected):
    judgement = judge(INSTANCE, seen, LIMITS)
    assert (judgement.outcome, judgement.retry) == expected
    assert judgement.reason and "\n" not in judgement.reason


def test_out_of_memory_is_a_flag_and_the_tests_count():
    judgement = judge(INSTANCE, evidence(**UNRESOLVED, out_of_memory=True), LIMITS)
    assert (judgement.outcome, judgement.flags) == ("unresolved", ("out_of_memory",))


@pytest.mark.parametrize(
    ("values", "reward"),
    [
        ({}, 1.0),
        ({"flags": ("partly_covered", "retried: x")}, 1.0),
        ({"flags": ("withheld_inconclusive",)}, None),
        ({"flags": ("uncovered",)}, None),
        ({"flags": ("uncovered",), "pays_uncovered": True}, 1.0),
        ({"flags": ("wrong_values",), "pays_uncovered": True}, 0.0),
        (FAILED | {"flags": ("uncovered",)}, 0.0),
        ({"flags": ("wrong_values",)}, 0.0),
        (FAILED, 0.0),
        (FAILED | {"outcome": "refused"}, 0.0),
        (INFRASTRUCTURE, None),
        (INFRASTRUCTURE | {"flags": ("wrong_values",)}, None),
    ],
)
def test_reward_is_the_verdict_less_what_was_forged(values, reward):
    assert verdict(**values).reward == reward


# --- retries, with the harness' runs scripted -------------------------------------------------

images = []
"""Of the runs, in order."""


async def without_history(instance):
    return dataclasses.replace(instance, image="scrubbed"), "sha256:source"


def graded(monkeypatch, run, *, scrubs=without_history, patch=INSTANCE.patch, **arguments):
    """Grades with scripted runs of the harness."""
    monkeypatch.setattr(grading, "run_harness", run)
    monkeypatch.setattr(grading, "_without_history", scrubs)
    monkeypatch.setattr(grading, "_check_installed", lambda: None)
    monkeypatch.setattr(grading, "BACK_OFF_S", (0.0, 0.0, 0.0))
    arguments = {"policy": "strict", "run_id": "r", "timeout_s": 1.0} | arguments
    return grade(INSTANCE, patch, **arguments)


async def run_grade(monkeypatch, *runs, **arguments):
    calls = []
    images.clear()

    async def scripted(instance, patch, **values):
        calls.append(patch)
        images.append(instance.image)
        return runs[len(calls) - 1]

    return await graded(monkeypatch, scripted, **arguments), calls


async def test_infrastructure_is_retried_with_pauses_and_then_masked(monkeypatch):
    bad = evidence(error_kind="other", error="killed", seconds=2.0)
    result, calls = await run_grade(monkeypatch, bad, bad, bad, bad)
    assert (result.outcome, result.resolved, result.reward) == ("infrastructure", None, None)
    assert len(calls) == result.attempts == 4
    assert result.seconds == 8.0
    assert sum(grading.BACK_OFF_S) == 0 and len(result.flags) == 3


@pytest.mark.parametrize(("kind", "num_runs"), [("image", 2), ("row", 2), ("no_engine", 3)])
async def test_what_waiting_does_not_mend_is_not_waited_for(monkeypatch, kind, num_runs):
    failed = evidence(error_kind=kind, error="why")
    result, calls = await run_grade(monkeypatch, *[failed] * num_runs)
    assert (result.outcome, result.reward, len(calls)) == ("infrastructure", None, num_runs)


async def test_the_second_run_counts(monkeypatch):
    result, _ = await run_grade(monkeypatch, evidence(error_kind="other"), RESOLVED)
    assert (result.outcome, result.reward, result.attempts) == ("resolved", 1.0, 2)
    assert result.flags[0].startswith("retried: ")


async def test_a_second_timeout_is_a_failure(monkeypatch):
    slow = evidence(error_kind="timeout", error="Test timed out after 1 seconds.")
    result, _ = await run_grade(monkeypatch, slow, slow)
    assert (result.outcome, result.reward) == ("unresolved", 0.0)
    assert result.flags[-1] == "grade_timeout"


async def test_nothing_is_run_for_empty_and_refused_patches(monkeypatch):
    empty, calls = await run_grade(monkeypatch, patch="")
    assert (empty.outcome, empty.resolved, calls) == ("empty", False, [])
    forged = file_diff("conftest.py", None, "x = 1\n")
    refused, calls = await run_grade(monkeypatch, patch=forged)
    assert (refused.outcome, refused.resolved, calls) == ("refused", False, [])
    assert refused.dropped == (("conftest.py", "test file"),)


async def test_the_harness_gets_what_the_policy_left(monkeypatch):
    both = INSTANCE.patch + file_diff("conftest.py", None, "x = 1\n")
    strict, calls = await run_grade(monkeypatch, RESOLVED, patch=both)
    assert calls == [INSTANCE.patch] == [strict.graded_patch]
    official, calls = await run_grade(monkeypatch, RESOLVED, patch=both, policy="official")
    assert calls == [both]
    assert (strict.policy, official.policy) == ("strict-4", "official-1")


async def test_a_patch_can_not_fetch_the_fix_from_the_history(monkeypatch):
    """Under `strict`, and in every withheld run. The official verdict is the official image's."""
    good = dataclasses.replace(RESOLVED, image_id="sha256:scrubbed")
    strict, _ = await run_grade(monkeypatch, good)
    assert images == ["scrubbed"] and strict.image_id == "sha256:source"
    official, _ = await run_grade(monkeypatch, good, policy="official")
    assert images == [INSTANCE.image] and official.image_id == "sha256:scrubbed"
    seen = []

    async def prepare(instance, run, run_id):
        seen.append(instance.image)
        raise EnvError("no engine")

    monkeypatch.setattr(grading, "prepare", prepare)
    result, _ = await run_grade(monkeypatch, good, policy="official", withhold=True)
    assert images == [INSTANCE.image] and seen == ["scrubbed"]
    assert result.flags == ("withheld_inconclusive",)


async def test_an_image_that_can_not_be_scrubbed_is_no_verdict(monkeypatch):
    async def fails(instance):
        raise EnvError("the history can't be scrubbed")

    result, _ = await run_grade(monkeypatch, scrubs=fails)
    assert (result.outcome, result.reward) == ("infrastructure", None)
    assert "can't be scrubbed" in result.reason
    # The official verdict needs no scrubbed image; only its withheld run does.
    official = {"scrubs": fails, "policy": "official", "withhold": True}
    result, _ = await run_grade(monkeypatch, RESOLVED, **official)
    assert (result.outcome, result.flags) == ("resolved", ("withheld_inconclusive",))


async def test_gradings_share_the_cores(monkeypatch):
    cpus = []

    async def scripted(instance, patch, *, limits, **values):
        cpus.append(limits.cpus)
        return RESOLVED

    monkeypatch.setattr(grading.os, "sched_getaffinity", lambda pid: set(range(8)))
    for workers, limits in ((2, None), (32, None), (2, GradingLimits(cpus=3.0))):
        await graded(monkeypatch, scripted, limits=limits, workers=workers)
    assert cpus == [4.0, 1.0, 3.0]


async def test_no_more_gradings_at_once_than_workers(monkeypatch):
    running = most = 0

    async def scripted(instance, patch, **values):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.06)
        running -= 1
        return RESOLVED

    calls = (graded(monkeypatch, scripted, workers=2) for _ in range(8))
    assert all(each.resolved for each in await asyncio.gather(*calls))
    assert most == 2


# --- the engine's witness ----------------------------------------------------------------------

needs_docker_package = pytest.mark.skipif(
    importlib.util.find_spec("docker") is None, reason="the docker package is not installed"
)


class _Engine:
    """Gives the events of a container, and then breaks the connection."""

    def __init__(self, actions):
        self.api = self
        self.actions = actions

    def events(self, **arguments):
        yield from ({"Action": action} for action in self.actions)
        raise OSError("connection lost")


@needs_docker_package
@pytest.mark.parametrize(
    ("actions", "alive", "expected"),
    [
        (["start", "exec_die"], True, "stopped"),
        (["start", "kill", "die", "destroy"], False, "removed"),
        (["start", "pause"], True, "removed"),
        (["start", "pause", "unpause"], True, "removed"),
        (["start", "die", "destroy"], False, "died"),
        (["start", "exec_die"], False, "lost"),
        ([], False, "lost"),
    ],
)
def test_what_ended_the_container(actions, alive, expected):
    watch = Watch(_Engine(actions), "c1")
    watch.wait()
    assert (watch.end(alive=alive), watch.out_of_memory) == (expected, False)


@needs_docker_package
def test_out_of_memory_is_seen():
    watch = Watch(_Engine(["oom", "exec_die"]), "c1")
    watch.wait()
    assert (watch.end(alive=True), watch.out_of_memory) == ("stopped", True)
