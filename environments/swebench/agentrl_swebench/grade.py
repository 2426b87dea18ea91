"""Grades a patch with the official harness in a fresh container and derives a reward.

`grade` applies the submission policy, runs the harness' tests and its report functions
(`harness`), and maps what happened to an outcome:

    what happened                                       first time   again
    report: resolved                                    resolved
    report: not resolved, the tests ran to their end    unresolved
    the patch does not apply                            patch_failed
    nothing to grade / no submission                    empty / refused
    the tests ran into their time limit                 retried      unresolved + flag grade_timeout
    the patch killed the tests' shell or container      retried      unresolved
    engine gone, image missing, disk full, container
    removed or frozen from outside, harness' process
    killed or stuck                                     retried      infrastructure

A failure of the infrastructure is retried with pauses that grow to minutes. It never counts as a
verdict: `resolved` and `reward` are None, and a trainer masks the rollout. Which side is to blame
is read from the engine's events and from the step that failed, not from logs, because the patch can
write to the logs.

`resolved` is the official verdict on the graded patch and nothing else. `reward` is never higher:
it is 0 if a withheld run (`withheld_run`) reports a wrong value, and None if there is no such run.

If the caller allows it, a withheld run that judges every required test stands for the official run:
`resolved` is then its verdict, and there is no official report (flag `no_official_run`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.env.container.engine import EngineError
from agentrl.errors import ConfigError, EnvError, EnvUnavailable
from agentrl.runtime import retry
from agentrl_swebench import images
from agentrl_swebench.dataset import Instance
from agentrl_swebench.harness import Evidence, GradingLimits, run_harness
from agentrl_swebench.policy import POLICY_VERSIONS, Policy, Submission, make_submission
from agentrl_swebench.withheld_run import Withheld, prepare

Outcome = Literal["resolved", "unresolved", "patch_failed", "empty", "refused", "infrastructure"]

HARNESS_VERSION = "5.0.2"

WRONG_VALUES = "wrong_values"
"""Flag of a grading in which a withheld value is not the reference solution's."""
UNCONFIRMED = frozenset({"uncovered", "withheld_inconclusive"})
"""Flags of a grading whose verdict no withheld value confirms: no test to fix has one, or the
infrastructure failed."""
PARTLY_COVERED = "partly_covered"
"""Flag of a grading in which some tests to fix have no withheld value, so that the official verdict
alone judges them."""
NO_OFFICIAL_RUN = "no_official_run"
OfficialRun = Literal["always", "uncovered"]
"""When the official run is made: always, or only if the withheld run does not judge every required
test. The withheld run comes first and also ends a grading that it finds wrong."""

BACK_OFF_S = (3.0, 15.0, 60.0, 120.0)
"""Pauses in seconds before each retry after a failure of the infrastructure."""
_NUM_RETRIES = {"image": 1, "row": 1, "no_engine": 2}
"""Most retries by `Evidence.error_kind`: waiting mends neither a missing image nor a row that
cannot be read, and an engine that is silent after the first two pauses is not just starting."""


@dataclass(slots=True, frozen=True)
class Judgement:
    outcome: Outcome
    reason: str
    retry: bool = False
    """True if a second run is worthwhile; if it ends the same way, the outcome stands."""
    flags: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class Verdict:
    instance_id: str
    resolved: bool | None
    """The official verdict on the graded patch; None if there is none."""
    outcome: Outcome
    reason: str
    """One line."""
    report: dict
    """The official report by instance id; {} if the harness made none."""
    seconds: float
    """Seconds of the harness' runs of the patch, with retries, without waiting for a worker."""
    flags: tuple[str, ...]
    policy: str = ""
    """Name and version of the policy."""
    graded_patch: str = ""
    dropped: tuple[tuple[str, str], ...] = ()
    """Files that the policy left out of the patch, each with the reason."""
    notes: tuple[str, ...] = ()
    """What a reviewer should see, such as the tests whose values are wrong or not withheld. They do
    not affect the reward."""
    image_id: str = ""
    attempts: int = 0
    pays_uncovered: bool = False
    withheld: str = ""
    """How many withheld values are right, such as `7 of 9 values`; "" without a withheld run."""

    @property
    def reward(self) -> float | None:
        """1.0, 0.0, or None, in which case the rollout is to be masked."""
        if self.resolved is None:
            return None
        if self.resolved and not self.pays_uncovered and UNCONFIRMED & set(self.flags):
            return None
        return float(self.resolved and WRONG_VALUES not in self.flags)


class _Slots:
    """Limits the gradings that run at once in this process, across event loops.

    With more gradings than cores each takes longer, until tests time out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0

    @contextlib.asynccontextmanager
    async def one(self, limit: int) -> AsyncIterator[None]:
        while not self._take(limit):
            await asyncio.sleep(0.05)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def _take(self, limit: int) -> bool:
        with self._lock:
            if self._running >= limit:
                return False
            self._running += 1
            return True


_slots = _Slots()


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


async def grade(
    instance: Instance,
    model_patch: str,
    *,
    policy: Policy,
    run_id: str,
    timeout_s: float,
    withhold: bool = False,
    official_run: OfficialRun = "always",
    pay_uncovered: bool = False,
    limits: GradingLimits | None = None,
    workers: int | None = None,
    model_name: str = "agentrl",
    skip_patch: bool = False,
    logs: Path | None = None,
) -> Verdict:
    """Grades one patch.

    Args:
        workers: number of gradings in this process, by all callers together, at which this one
            waits; one per core by default.
        run_id: label of the containers. It need not be unique: every run of the harness gets an id
            of its own.
        timeout_s: limit on the tests, in seconds.
        policy: under `strict`, and for withheld runs, the image's history is scrubbed as it is for
            agents, so that a patch cannot fetch the fix from it.
        withhold: first run the patch on tests without expected values (`withheld_run`), and reward
            it only if it gives the right ones.
        official_run: when the official run is made if `withhold` is set.
        pay_uncovered: also reward a resolved run that no withheld value confirms. A patch that
            forges results is then paid.
        skip_patch: run the tests without any patch; `model_patch` is ignored.
        logs: folder that receives the harness' log folder of the last attempt.

    Raises:
        ConfigError: the harness is not installed.
    """
    _check_installed()
    limits = limits or GradingLimits()
    workers = workers or num_cores()
    if limits.cpus is None:
        share = num_cores() / workers
        limits = dataclasses.replace(limits, cpus=max(1.0, share))
    submission = Submission("") if skip_patch else make_submission(instance, model_patch, policy)
    base = Verdict(
        instance_id=instance.instance_id,
        resolved=False,
        outcome="empty",
        reason="the patch is empty",
        report={},
        seconds=0.0,
        flags=(),
        policy=POLICY_VERSIONS[policy],
        graded_patch=submission.patch,
        dropped=submission.dropped,
    )
    if submission.refused:
        return dataclasses.replace(base, outcome="refused", reason=submission.refused)
    if not submission.patch and not skip_patch:
        return base

    safe, source_id = instance, ""
    problem = ""
    if policy == "strict" or withhold:
        try:
            safe, source_id = await _without_history(instance)
        except EnvError as error:
            problem = str(error)
            if policy == "strict":
                return dataclasses.replace(
                    base, resolved=None, outcome="infrastructure", reason=f"image: {error}"
                )
    options: dict[str, Any] = {"run_id": run_id, "timeout_s": timeout_s}
    confirmed = _Confirmed(flags=("withheld_inconclusive",), note=problem)
    if withhold and not problem:
        confirmed = await _confirm(safe, submission.patch, limits, workers, options)
    flags = list(confirmed.flags) if withhold else []
    notes = (f"withheld: {confirmed.note}",) if withhold and confirmed.note else ()
    settled = confirmed.settled if official_run == "uncovered" else None
    if settled is None:
        settled = await _settled(
            safe if policy == "strict" else instance,
            submission.patch,
            limits,
            workers,
            **options,
            model_name=model_name,
            skip_patch=skip_patch,
            logs=logs,
        )
        official, seconds = settled.evidence.report or {}, confirmed.seconds + settled.seconds
    else:
        official, seconds = {}, confirmed.seconds
        flags.append(NO_OFFICIAL_RUN)
    judgement = settled.judgement
    infrastructure = judgement.outcome == "infrastructure"
    return dataclasses.replace(
        base,
        resolved=None if infrastructure else judgement.outcome == "resolved",
        outcome=judgement.outcome,
        reason=judgement.reason,
        report=official,
        seconds=seconds,
        flags=(*(f"retried: {reason}" for reason in settled.retried), *judgement.flags, *flags),
        notes=notes,
        image_id=source_id or settled.evidence.image_id,
        attempts=len(settled.retried) + 1,
        pays_uncovered=pay_uncovered,
        withheld=confirmed.figure,
    )


@dataclass(slots=True, frozen=True)
class _Confirmed:
    """The result of a withheld run."""

    flags: tuple[str, ...] = ()
    note: str = ""
    figure: str = ""
    seconds: float = 0.0
    settled: _Settled | None = None
    """Set if no official run is needed: the run judges every required test, or a value is wrong."""


async def _confirm(
    instance: Instance, patch: str, limits: GradingLimits, workers: int, options: dict[str, Any]
) -> _Confirmed:
    """Runs a patch on tests without expected values and compares what they report."""

    async def run(of: Instance, patch: str, mark: str) -> Evidence:
        settled = await _settled(of, patch, limits, workers, **options, mark=mark)
        if settled.judgement.outcome == "infrastructure":
            raise EnvError(f"the withheld tests could not be tried: {settled.judgement.reason}")
        return settled.evidence

    try:
        withheld: Withheld = await prepare(instance, run, options["run_id"])
    except EnvError as error:
        return _Confirmed(("withheld_inconclusive",), str(error))
    if not withheld.covers:
        return _Confirmed(("uncovered",), "no test to fix has a value that cannot be guessed")
    settled = await _settled(
        withheld.instance, patch, limits, workers, **options, mark=withheld.mark
    )
    judgement, seconds = settled.judgement, settled.seconds
    if judgement.outcome == "infrastructure":
        return _Confirmed(("withheld_inconclusive",), judgement.reason, seconds=seconds)
    compared, passes = withheld.judge(settled.evidence)
    flags: tuple[str, ...] = (PARTLY_COVERED,) if withheld.uncovered else ()
    note = f"not covered: {', '.join(withheld.uncovered)}" if withheld.uncovered else ""
    if compared.wrong:
        names = ", ".join(filter(None, (".".join(filter(None, each)) for each in compared.wrong)))
        flags, note = (*flags, WRONG_VALUES), f"wrong in {names}"
        if judgement.outcome == "resolved":
            judgement = Judgement("unresolved", f"{compared} are right", flags=judgement.flags)
        settled = dataclasses.replace(settled, judgement=judgement)
    elif not withheld.suffices:
        return _Confirmed(flags, note, str(compared), seconds)
    else:
        reason = "all withheld values are right" if passes else "a required test does not pass"
        judgement = Judgement("resolved" if passes else "unresolved", reason)
        settled = dataclasses.replace(settled, judgement=judgement)
    return _Confirmed(flags, note, str(compared), seconds, settled)


async def _without_history(instance: Instance) -> tuple[Instance, str]:
    """Returns the instance with its scrubbed image, and the id of the row's own image."""
    made = await retry(
        lambda _: images.scrubbed_of(instance.image),
        retry_after_s=lambda e: 0.0 if isinstance(e, EnvUnavailable | EngineError) else None,
        first_pause_s=BACK_OFF_S[0],
        max_pause_s=BACK_OFF_S[-1],
        max_attempts=1 + _NUM_RETRIES["no_engine"],
    )
    tag = images.scrubbed_tag(made.source_id)
    return dataclasses.replace(instance, image=tag), made.source_id


@dataclass(slots=True, frozen=True)
class _Settled:
    evidence: Evidence
    judgement: Judgement
    seconds: float
    retried: list[str]
    """The reason of each retry."""


async def _settled(
    instance: Instance, patch: str, limits: GradingLimits, workers: int, **options: Any
) -> _Settled:
    """Runs the harness until its result stands. A failure that the patch may have caused is retried
    once, a failure of the infrastructure with growing pauses, during which other gradings run."""
    seconds = 0.0
    retried: list[str] = []
    while True:
        async with _slots.one(workers):
            evidence = await run_harness(instance, patch, limits=limits, **options)
        seconds += evidence.seconds
        judgement = judge(instance, evidence, limits)
        limit = 1
        if judgement.outcome == "infrastructure":
            limit = min(len(BACK_OFF_S), _NUM_RETRIES.get(evidence.error_kind, len(BACK_OFF_S)))
        if not judgement.retry or len(retried) == limit:
            return _Settled(evidence, judgement, seconds, retried)
        await asyncio.sleep(BACK_OFF_S[len(retried)])
        retried.append(judgement.reason)


def judge(instance: Instance, evidence: Evidence, limits: GradingLimits) -> Judgement:
    """Returns the outcome of one run of the harness. A pure function."""
    flags: list[str] = []
    if evidence.out_of_memory:
        flags.append("out_of_memory")

    def judgement(outcome: Outcome, reason: str, *, retry: bool = False) -> Judgement:
        return Judgement(outcome, " ".join(reason.split()), retry, tuple(flags))

    def infrastructure(reason: str) -> Judgement:
        return judgement("infrastructure", reason, retry=True)

    report = (evidence.report or {}).get(instance.instance_id)
    if report is not None and report["resolved"]:
        return judgement("resolved", "all required tests pass")

    # From here on the run failed: decide whether the patch or the infrastructure is to blame.
    free = evidence.least_free_bytes
    if free is not None and free < limits.min_free_bytes:
        return infrastructure(f"the engine's disk is full ({free >> 20} MiB free)")
    if evidence.container_end == "removed":
        return infrastructure("the container was killed or frozen from outside")
    if report is not None:
        if evidence.complete:
            parts = report.get("tests_status", {}).values()
            failed = sum(len(part["failure"]) for part in parts)
            none = "the tests gave no results the harness accepts"
            return judgement("unresolved", f"{failed} required tests fail" if failed else none)
        if evidence.container_end == "lost":
            return infrastructure("the engine went away during the tests")
        return judgement("unresolved", "the tests' shell ended before them", retry=True)
    if evidence.error_kind == "patch":
        return judgement("patch_failed", "the patch does not apply")
    if evidence.error_kind == "timeout":
        flags.append("grade_timeout")
        return judgement("unresolved", evidence.error, retry=True)
    if evidence.error_kind in ("engine", "no_engine") and evidence.container_end == "died":
        return judgement("unresolved", "a process of the tests ended the container", retry=True)
    if evidence.error_kind in ("memory", "decode"):
        # The patch caused endless output or a difference that is not UTF-8; a retry ends the same.
        return judgement("unresolved", f"the harness could not read the output: {evidence.error}")
    return infrastructure(f"{evidence.error_kind}: {evidence.error}")


def _check_installed() -> None:
    if importlib.util.find_spec("swebench") is None:
        raise ConfigError("the official harness is missing: pip install 'agentrl-gym[swebench]'")
