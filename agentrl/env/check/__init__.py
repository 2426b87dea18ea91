"""The conformance kit: `agentrl env check`, the pytest plugin, and `run_checks` for scripts.

A check is a plain function of `checks.py` that plays the environment (in this process through a
real session manager, or a server behind a URL) and returns what it looked at, raises `CheckFailed`
with what it saw and the remedy, or raises `CheckSkipped` with the reason.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from agentrl.env.check.checks import CHECKS
from agentrl.env.check.subject import (
    CheckFailed,
    CheckSkipped,
    Subject,
    load_subject,
)
from agentrl.errors import AgentRLError, ConfigError

__all__ = [
    "CHECKS",
    "CheckFailed",
    "CheckResult",
    "CheckSkipped",
    "Subject",
    "load_subject",
    "run_check",
    "run_checks",
    "select",
]

TIMEOUT_S = 120.0
"""A check that takes longer than this has failed; with `thorough`, ten times as long."""


@dataclass(slots=True, frozen=True)
class CheckResult:
    name: str
    asserts: str
    """What holds for an environment that passes."""
    status: Literal["pass", "fail", "skip"]
    detail: str
    """What was looked at; what was seen instead; or why it was not checked."""
    remedy: str
    """What the author can do about a failure, else empty."""
    seconds: float


def asserts(name: str) -> str:
    """The sentence a check stands for: the first paragraph of its docstring, on one line."""
    paragraph = (inspect.getdoc(CHECKS[name]) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def select(only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[str]:
    """The names of the checks to run, in their order.

    Raises:
        ConfigError: there is no check of a name.
    """
    only, skip = list(only), set(skip)
    for name in (*only, *skip):
        if name not in CHECKS:
            raise ConfigError(f"there is no check '{name}'; the checks are {', '.join(CHECKS)}")
    return [name for name in CHECKS if (not only or name in only) and name not in skip]


async def run_check(name: str, subject: Subject) -> CheckResult:
    started = time.monotonic()
    status: Literal["pass", "fail", "skip"] = "pass"
    remedy = ""
    timeout_s = TIMEOUT_S * (10 if subject.thorough else 1)
    try:
        async with asyncio.timeout(timeout_s):
            detail = await CHECKS[name](subject)
    except CheckSkipped as skipped:
        status, detail = "skip", str(skipped)
    except CheckFailed as failed:
        status, detail, remedy = "fail", str(failed), failed.remedy
    except TimeoutError:
        status, detail = "fail", f"did not finish within {timeout_s:g} s"
        remedy = "find the call that hangs with `agentrl env play`, and give it a deadline"
    except AgentRLError as error:
        status, detail = "fail", str(error)
        remedy = "the environment refused to be played at all; try `agentrl env play`"
    except Exception as error:  # whatever an author's code raises is a result of the check
        status, detail = "fail", f"{type(error).__name__}: {error}"
        remedy = "the environment's own code raised this outside a session; run it in a debugger"
    seconds = time.monotonic() - started
    return CheckResult(name, asserts(name), status, detail, remedy, seconds)


async def run_checks(
    subject: Subject,
    names: Iterable[str] | None = None,
    *,
    report: Callable[[CheckResult], None] = lambda result: None,
) -> list[CheckResult]:
    """Run checks one after another, all by default; `report` hears of each as it ends."""
    results = []
    for name in CHECKS if names is None else names:
        result = await run_check(name, subject)
        report(result)
        results.append(result)
    return results
