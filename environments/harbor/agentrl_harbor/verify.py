"""Runs a task's health check, and its tests in the container that holds the agent's work."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass, field

from agentrl.env.container.box import Box
from agentrl.errors import DataError, EnvError
from agentrl_harbor.sandbox import SCRIPT_FAILED, as_root
from agentrl_harbor.task import Healthcheck, Step, pack

MAX_REWARD_BYTES = 1 << 16
_CLEAR = (
    "rm -rf -- /logs/verifier /tests /solution && mkdir -p -- /logs/verifier /tests /logs/agent "
    "/logs/artifacts && chmod 777 /logs/verifier /logs/agent /logs/artifacts"
)
_CLEAR_BUNDLED = _CLEAR.replace(" /tests", "")
_RUN = "/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"


@dataclass(slots=True)
class Verified:
    """Result of a verifier."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by name; empty if the tests wrote none."""
    problem: str = ""
    """Reason for which there are no rewards; "" if there are."""
    output: str = ""
    """The last 4,000 characters of the tests' output."""
    left_out: list[str] = field(default_factory=list)
    """Changes of the agent that the verifier did not see, as `PATH: reason`."""


async def verify(
    container: Box, step: Step, environment: dict[str, str], *, timeout_s: float
) -> Verified:
    """Runs a step's tests in a container that holds the agent's work, and reads the reward.

    Args:
        environment: variables of the tests.
        timeout_s: limit on the tests, in seconds.

    Raises:
        EnvError: the container or the engine failed.
        DataError: the tests' files cannot be packed.
    """
    bundled = step.bundled is not None or (
        step.separate
        and step.verifier.environment is not None
        and step.verifier.environment.docker_image is not None
    )
    await as_root(container, _CLEAR_BUNDLED if bundled else _CLEAR, code=SCRIPT_FAILED)
    if not bundled:
        await container.put(pack(step.folders), "/tests")
    ran = await container.script(_RUN, timeout_s=timeout_s, environment=environment)
    log = await container.get("/logs/verifier/test-stdout.txt", 16 << 20)
    output = (log or b"").decode(errors="replace")[-4000:]
    if ran.exit_code is None:
        return Verified(problem=f"the tests ran longer than {timeout_s:g} s", output=output)
    try:
        rewards = await _read(container)
    except DataError as error:
        return Verified(problem=str(error), output=output)
    return Verified(rewards, output=output)


async def wait_healthy(container: Box, check: Healthcheck | None) -> None:
    """Waits until a task's health check passes; returns at once without a check.

    Raises:
        EnvError: the check failed `retries` times after its start period.
    """
    if check is None:
        return
    loop = asyncio.get_running_loop()
    grace_over, failures = loop.time() + check.start_period_sec, 0
    while True:
        ran = await container.run(check.command, timeout_s=check.timeout_sec, max_chars=500)
        if ran.exit_code == 0:
            return
        in_grace = loop.time() < grace_over
        failures += not in_grace
        if failures >= check.retries:
            raise EnvError(
                f"the task's health check failed {failures} times: {ran.output.strip()}",
                code="unhealthy",
            )
        await asyncio.sleep(check.start_interval_sec if in_grace else check.interval_sec)


async def _read(container: Box) -> dict[str, float]:
    whole = await container.get("/logs/verifier/reward.json", MAX_REWARD_BYTES)
    text = await container.get("/logs/verifier/reward.txt", MAX_REWARD_BYTES)
    if whole is None and text is None:
        raise DataError("the tests wrote neither /logs/verifier/reward.txt nor reward.json")
    try:
        values = json.loads(whole) if whole is not None else float((text or b"").decode())
        given = values if isinstance(values, dict) else {"reward": values}
        # Tests may run the agent's code, so the agent may have written anything there.
        rewards = {
            name: float(value) if isinstance(value, int | float) else math.nan
            for name, value in given.items()
        }
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"the reward file can't be read: {error}") from error
    for name, value in rewards.items():
        if not math.isfinite(value):
            raise DataError(f"reward {name!r} is {str(given[name])[:80]!r}, not a finite number")
    return rewards
