"""Evaluates predictions and writes the official report, unchanged, and our report beside it.

`agentrl_swebench.grade` grades every prediction; the harness then makes the official report from
its own logs. Our report has what the official one lacks: withheld values, files that the policy
left out, failures of the infrastructure, and images.

    DIR/MODEL.RUN.json                  the official report
    DIR/MODEL.RUN.agentrl.json          our report
    DIR/MODEL.RUN.predictions.jsonl     the predictions as they were graded
    DIR/logs/...                        the harness' logs, where the harness keeps them
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import ConfigError, DataError
from agentrl_swebench import official
from agentrl_swebench.dataset import Instance, Prediction, write_rows, write_text
from agentrl_swebench.grade import (
    HARNESS_VERSION,
    PARTLY_COVERED,
    UNCONFIRMED,
    WRONG_VALUES,
    GradingLimits,
    Verdict,
    grade,
    num_cores,
)
from agentrl_swebench.policy import POLICY_VERSIONS, Policy

T = TypeVar("T")

SCHEMA_VERSION = 2
_REPORT_TIMEOUT_S = 600.0


@dataclass(slots=True, frozen=True)
class Evaluation:
    verdicts: list[Verdict]
    """Verdicts in the order of the predictions."""
    report: Path
    """Path of the official report."""
    our_report: Path
    num_reused: int
    """Number of verdicts that an earlier, interrupted call with this run id left."""


async def evaluate(
    instances: Sequence[Instance],
    predictions: Sequence[Prediction],
    *,
    run_id: str,
    out: Path,
    dataset: str,
    split: str = "test",
    policy: Policy = "official",
    withhold: bool = False,
    timeout_s: float = 1800.0,
    limits: GradingLimits | None = None,
    workers: int | None = None,
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> Evaluation:
    """Grades predictions and writes the reports.

    An interrupted call may be repeated. It grades an instance again unless the row, the graded
    patch and all settings are those of the verdict on disk.

    Args:
        instances: the whole dataset, or the selected part; instances without a prediction are
            `incomplete` in the official report.
        predictions: predictions of one model.
        dataset: name of the dataset for the harness' record of the run; `split` likewise.
        workers: number of gradings at once; one per core by default.
        progress: called with every verdict as soon as it is known.

    Raises:
        ConfigError: the run id cannot name a file, or the harness is missing.
        DataError: a verdict on disk is damaged.
        EnvError: there is no engine, or the harness could not write its report.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", run_id):
        raise ConfigError(f"run id {run_id!r} may hold letters, digits, '.', '_' and '-'")
    limits = limits or GradingLimits()
    by_id = {instance.instance_id: instance for instance in instances}
    model = predictions[0].model_name_or_path
    name = f"{model.replace('/', '__')}.{run_id}"
    state = out / "logs" / "agentrl" / name
    state.mkdir(parents=True, exist_ok=True)
    reused = 0
    # Hundreds of tasks that poll would fill a core.
    gate = asyncio.Semaphore(workers or num_cores())

    async def one(prediction: Prediction) -> Verdict:
        nonlocal reused
        instance = by_id[prediction.instance_id]
        settings = [POLICY_VERSIONS[policy], withhold, timeout_s, dataclasses.asdict(limits)]
        content = json.dumps([instance.row(), prediction.row(), settings, HARNESS_VERSION])
        digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
        path = state / f"{instance.instance_id}.json"
        verdict = _read_verdict(path, digest)
        if verdict is not None:
            reused += 1
        else:
            async with gate:
                verdict = await grade(
                    instance,
                    prediction.model_patch,
                    policy=policy,
                    run_id=run_id,
                    timeout_s=timeout_s,
                    withhold=withhold,
                    limits=limits,
                    workers=workers,
                    model_name=model,
                    logs=state / instance.instance_id,
                )
            _write(path, {"digest": digest, "verdict": dataclasses.asdict(verdict)})
        progress(verdict)
        return verdict

    verdicts = await _all([one(prediction) for prediction in predictions])
    graded = [
        Prediction(verdict.instance_id, model, verdict.graded_patch).row() for verdict in verdicts
    ]
    write_rows(out / f"{name}.predictions.jsonl", graded)
    report = out / await official.ask(
        "run_report",
        timeout_s=_REPORT_TIMEOUT_S,
        rows=[instance.row() for instance in instances],
        predictions=graded,
        logs={each: str((state / each).resolve()) for each in by_id},
        void=[each.instance_id for each in verdicts if each.outcome == "infrastructure"],
        run_id=run_id,
        dataset=dataset,
        split=split,
        out=str(out.resolve()),
        environment={k: v for k, v in os.environ.items() if k.startswith("DOCKER_")},
    )
    our_report = out / f"{name}.agentrl.json"
    ours = make_report(verdicts, run_id=run_id, model=model, policy=policy, withhold=withhold)
    _write(our_report, ours | {"limits": dataclasses.asdict(limits), "timeout_s": timeout_s})
    return Evaluation(verdicts, report, our_report, reused)


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of all calls. If one fails or this is cancelled, the others are cancelled
    and awaited, because a call that is still cleaning up when its loop ends leaves a container."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def make_report(
    verdicts: Sequence[Verdict], *, run_id: str, model: str, policy: Policy, withhold: bool
) -> dict[str, Any]:
    """Returns our report as JSON values. Its `resolved_ids` are those of the official report."""
    flagged = {
        flag: sorted(each.instance_id for each in verdicts if flag in each.flags)
        for flag in (WRONG_VALUES, PARTLY_COVERED, *sorted(UNCONFIRMED), "grade_timeout")
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "harness": f"swebench {HARNESS_VERSION}",
        "run_id": run_id,
        "model_name_or_path": model,
        "policy": POLICY_VERSIONS[policy],
        "withhold": withhold,
        "outcomes": dict(sorted(Counter(each.outcome for each in verdicts).items())),
        "resolved_ids": sorted(each.instance_id for each in verdicts if each.resolved),
        "rewarded_ids": sorted(each.instance_id for each in verdicts if each.reward),
        "infrastructure_ids": sorted(
            each.instance_id for each in verdicts if each.outcome == "infrastructure"
        ),
        "flagged_ids": {flag: ids for flag, ids in flagged.items() if ids},
        "instances": {
            each.instance_id: {
                "outcome": each.outcome,
                "reason": each.reason,
                "resolved": each.resolved,
                "reward": each.reward,
                "flags": list(each.flags),
                "withheld": each.withheld,
                "notes": list(each.notes),
                "dropped": [list(pair) for pair in each.dropped],
                "image_id": each.image_id,
                "attempts": each.attempts,
                "seconds": round(each.seconds, 2),
            }
            for each in verdicts
        },
    }


def _read_verdict(path: Path, digest: str) -> Verdict | None:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); delete it to grade it again") from error
    values = content["verdict"]
    if content["digest"] != digest or values["outcome"] == "infrastructure":
        return None
    for name in ("flags", "notes"):
        values[name] = tuple(values[name])
    values["dropped"] = tuple((path, reason) for path, reason in values["dropped"])
    return Verdict(**values)


def _write(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


@dataclass(slots=True, frozen=True)
class Validation:
    """Gradings that tell whether an instance can be used here."""

    instance_id: str
    gold: tuple[Verdict, ...]
    empty: Verdict
    """Verdict on the tests without any patch."""
    keeps_uncovered: bool = False

    @property
    def reason(self) -> str:
        """Reason for which the instance is not valid; "" if it is valid."""
        for verdict in (*self.gold, self.empty):
            if verdict.outcome == "infrastructure":
                return verdict.reason
        num_resolved = sum(bool(verdict.resolved) for verdict in self.gold)
        if num_resolved < len(self.gold):
            return f"the reference solution resolves it {num_resolved} times of {len(self.gold)}"
        if self.empty.resolved:
            return "it is resolved without a patch"
        for verdict in self.gold:
            why = "".join(note for note in verdict.notes if note.startswith("withheld: "))
            if verdict.reward == 0.0:
                return f"the reference solution's values differ between runs ({why})"
            if verdict.reward is None and not self.keeps_uncovered:
                flag = sorted(UNCONFIRMED & {*verdict.flags})[0]
                return f"{flag}: forged results would not be noticed ({why})"
        return ""

    @property
    def slowest_s(self) -> float:
        return max(verdict.seconds for verdict in (*self.gold, self.empty))


async def validate(
    instances: Sequence[Instance],
    *,
    run_id: str,
    repeats: int = 3,
    withhold: bool = False,
    keep_uncovered: bool = False,
    timeout_s: float = 1800.0,
    limits: GradingLimits | None = None,
    workers: int | None = None,
    progress: Callable[[Validation], None] = lambda validation: None,
) -> list[Validation]:
    """Grades each instance's reference solution `repeats` times and no patch once.

    Args:
        withhold: an instance is valid only if withheld values confirm its reference solution.
        keep_uncovered: with `withhold`, an instance without such values is valid, too.
    """

    gate = asyncio.Semaphore(workers or num_cores())

    async def graded(
        instance: Instance, patch: str, *, withhold: bool, skip_patch: bool
    ) -> Verdict:
        async with gate:
            return await grade(
                instance,
                patch,
                policy="official",
                run_id=run_id,
                timeout_s=timeout_s,
                limits=limits,
                workers=workers,
                withhold=withhold,
                skip_patch=skip_patch,
            )

    async def one(instance: Instance) -> Validation:
        golds = [
            # One withheld run shows whether the instance has values to withhold.
            graded(instance, instance.patch, withhold=withhold and number == 0, skip_patch=False)
            for number in range(repeats)
        ]
        *gold, empty = await _all([*golds, graded(instance, "", withhold=False, skip_patch=True)])
        validation = Validation(instance.instance_id, tuple(gold), empty, keep_uncovered)
        progress(validation)
        return validation

    return await _all([one(instance) for instance in instances])
