"""Runs the conformance checks of `agentrl env check` and the pytest plugin.

A check is an async function that plays the environment, through a session manager in this process
or on a server behind a URL. It returns a summary of what it checked, raises `CheckFailed` with what
it saw and a remedy, or raises `CheckSkipped` with the reason. The first paragraph of its docstring
is the statement that it checks, which reports show to the user.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from agentrl.env.check.answers import check_canary, check_oracle
from agentrl.env.check.episodes import (
    check_bad_actions,
    check_close,
    check_determinism,
    check_ends,
    check_episodes,
    check_isolation,
    check_tool_calls,
)
from agentrl.env.check.process import check_event_loop, check_globals
from agentrl.env.check.subject import CheckFailed, CheckSkipped, Subject, load_subject
from agentrl.env.check.tasks import check_schema, check_tasks, check_tools
from agentrl.errors import AgentRLError, ConfigError

__all__ = [
    "CHECKS",
    "CheckFailed",
    "CheckResult",
    "CheckSkipped",
    "Subject",
    "load_subject",
    "run_check",
    "select",
]

HUNG = "did not finish"
"""Beginning of the detail of a check that did not end."""
_WITHOUT_EPISODES = ("tasks", "tools")
"""Checks that still run after an episode has hung."""

CHECKS: dict[str, Callable[[Subject], Awaitable[str]]] = {
    "tasks": check_tasks,
    "tools": check_tools,
    "event_loop": check_event_loop,
    "close": check_close,
    "schema": check_schema,
    "episodes": check_episodes,
    "ends": check_ends,
    "tool_calls": check_tool_calls,
    "bad_actions": check_bad_actions,
    "determinism": check_determinism,
    "isolation": check_isolation,
    "globals": check_globals,
    "canary": check_canary,
    "oracle": check_oracle,
}
"""Name -> check, in the order in which the checks run."""


@dataclass(slots=True, frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    """A key of `CHECKS`."""
    asserts: str
    """The statement that holds for an environment that passes."""
    status: Literal["pass", "fail", "skip"]
    """`skip`: the check does not apply to this environment."""
    detail: str
    """What was checked, what was seen instead, or why it was skipped."""
    remedy: str
    """What the author can do about a failure; else empty."""
    seconds: float
    """Wall time."""
    cause: str = ""
    """The cause of a failure, such as an exception's message; failures with the same cause are
    reported in full only once."""


def asserts(name: str) -> str:
    """Returns the statement of a check: the first paragraph of its docstring, on one line."""
    paragraph = (inspect.getdoc(CHECKS[name]) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def hung(name: str, seconds: float) -> CheckResult:
    """Returns the result of a check that did not end."""
    detail = f"{HUNG} within {seconds:.0f} s"
    remedy = "find the call that hangs with `agentrl env play`, and give it a time limit"
    return CheckResult(name, asserts(name), "fail", detail, remedy, seconds, detail)


def select(only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[str]:
    """Returns the names of the checks to run, in the order in which they run.

    Args:
        only: names of the checks to run; none: all of them.
        skip: names of checks to leave out.

    Raises:
        ConfigError: there is no check of that name.
    """
    only, skip = list(only), set(skip)
    for name in (*only, *skip):
        if name not in CHECKS:
            raise ConfigError(f"there is no check '{name}'; the checks are {', '.join(CHECKS)}")
    return [name for name in CHECKS if (not only or name in only) and name not in skip]


async def run_check(name: str, subject: Subject) -> CheckResult:
    """Runs one check and returns its result.

    Every call of the author's code has a time limit; code that blocks the event loop can only be
    stopped from another process, see `worker`.
    """
    started = time.monotonic()
    status: Literal["pass", "fail", "skip"] = "pass"
    remedy, cause = "", ""
    if subject.hangs and name not in _WITHOUT_EPISODES:
        detail = "a call of this environment hangs or blocks, so no further episodes were played"
        return CheckResult(name, asserts(name), "skip", detail, "", 0.0)
    try:
        detail = await CHECKS[name](subject)
    except CheckSkipped as skipped:
        status, detail = "skip", str(skipped)
    except CheckFailed as failed:
        status, detail, remedy, cause = "fail", str(failed), failed.remedy, failed.cause
    except AgentRLError as error:
        status, detail = "fail", str(error)
        remedy, cause = "the environment could not be played; try `agentrl env play`", detail
    except (Exception, SystemExit) as error:  # an author's code may raise anything
        status, detail = "fail", f"{type(error).__name__}: {error}"
        remedy = "the environment's own code raised this outside a session; run it in a debugger"
        cause = detail
    seconds = time.monotonic() - started
    return CheckResult(name, asserts(name), status, detail, remedy, seconds, cause)


def shorten_repeat(results: Iterable[CheckResult], result: CheckResult) -> CheckResult:
    """Returns the result, shortened to a reference if an earlier one failed for the same cause."""
    if result.status == "fail":
        for earlier in results:
            if earlier.status == "fail" and earlier.cause == result.cause:
                return dataclasses.replace(result, detail=f"as in {earlier.name}", remedy="")
    return result
