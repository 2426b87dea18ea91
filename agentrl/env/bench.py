"""`agentrl env bench`: measures steps per second of an environment, their latency and CPU time.

Until the time is up, plays `num_sessions` episodes at once, over and over on the same 16 tasks,
with the environment's oracle or else with calls sampled from its tools' schemas. Latencies are
measured by the client, over HTTP. An environment given by name is served by a separate process, so
that its CPU time can be measured; for a URL only the client's side is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.env.check.subject import Subject, load_subject
from agentrl.env.client import EnvClient, connect
from agentrl.env.protocol import TOKEN_VARIABLE, TaskSpec
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON, Action

STEP_TIMEOUT_S = 60.0
"""Seconds for a step."""
NUM_TASKS = 16
"""Number of different tasks that are played."""


@dataclass(slots=True)
class BenchResult:
    """The measurements. Those of the server are None for a URL and without /proc."""

    sessions: int
    """Number of episodes played at once."""
    seconds: float
    """Seconds that were measured."""
    episodes: int
    """Number of episodes that were played without an error."""
    steps: int
    errors: dict[str, int]
    """Number of failed episodes by error code."""
    steps_per_s: float
    step_p50_ms: float
    """Median latency of a step in milliseconds, as the client sees it."""
    step_p99_ms: float
    """99th percentile of the latency of a step in milliseconds."""
    open_p50_ms: float
    """Median milliseconds for opening a session, including its reset."""
    server_cpu_us_per_step: float | None
    """The server's CPU microseconds per step, including resets."""
    server_threads: int | None
    """Number of threads of the server's processes."""
    server_memory_mb: float | None
    """Resident memory of the server's processes in MiB."""


@dataclass(slots=True)
class _Times:
    steps: list[float] = field(default_factory=list)
    opens: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    episodes: int = 0


async def bench(
    target: str,
    *,
    num_sessions: int = 64,
    seconds: float = 5.0,
    config: Mapping[str, JSON] | None = None,
    env_id: str | None = None,
    token: str | None = None,
) -> BenchResult:
    """Plays as many episodes as fit into the time, `num_sessions` at once.

    Args:
        target: a name for `agentrl.env.registry.resolve`, which is then served by a separate
            process, or the URL of a server.
        seconds: how long to measure; episodes that are being played then are finished.
        env_id: the environment of the URL, if it has several.

    Raises:
        ConfigError: the environment cannot be found, or takes fewer sessions.
        EnvError: no step succeeded.
    """
    subject = await load_subject(target, config=config, env_id=env_id, token=token)
    if num_sessions > subject.info.max_sessions:
        await subject.aclose()
        raise ConfigError(
            f"'{subject.env_id}' takes at most {subject.info.max_sessions} sessions: --sessions "
            f"{num_sessions} is too many"
        )
    try:
        episodes = [(spec, await subject.moves(spec)) for spec in subject.specs(NUM_TASKS)]
    finally:
        await subject.aclose()
    if subject.url is None:
        serving = _served(target, config or {})
    else:
        serving = contextlib.nullcontext((subject.url, None))
    times = _Times()
    with serving as (url, pid):
        async with connect(url, token=token) as client:
            await client.info(subject.env_id, subject.config)
            await _play(subject, client, *episodes[0], _Times())  # warm-up
            before, started = _usage(pid), time.monotonic()

            async def player(first: int) -> None:
                number = first
                while time.monotonic() < started + seconds:
                    await _play(subject, client, *episodes[number % len(episodes)], times)
                    number += 1

            await asyncio.gather(*(player(first) for first in range(num_sessions)))
            elapsed = time.monotonic() - started
            after = _usage(pid)
    num_steps = len(times.steps)
    if not num_steps:
        raise EnvError(
            f"no step succeeded in {elapsed:.1f} s; errors by code: {times.errors or 'none'}"
        )
    return BenchResult(
        sessions=num_sessions,
        seconds=round(elapsed, 3),
        episodes=times.episodes,
        steps=num_steps,
        errors=times.errors,
        steps_per_s=round(num_steps / elapsed, 1),
        step_p50_ms=_percentile_ms(times.steps, 0.5),
        step_p99_ms=_percentile_ms(times.steps, 0.99),
        open_p50_ms=_percentile_ms(times.opens, 0.5),
        server_cpu_us_per_step=(
            round((after[0] - before[0]) / num_steps * 1e6, 1) if before and after else None
        ),
        server_threads=after[1] if after else None,
        server_memory_mb=after[2] if after else None,
    )


async def _play(
    subject: Subject, client: EnvClient, spec: TaskSpec, actions: list[Action], times: _Times
) -> None:
    clock = time.perf_counter
    try:
        started = clock()
        session = await client.session(
            subject.env_id, split=spec.split, index=spec.index, config=subject.config
        )
        times.opens.append(clock() - started)
        try:
            for number, action in enumerate(actions):
                started = clock()
                result = await session.step(
                    action, timeout_s=STEP_TIMEOUT_S, last=number + 1 == len(actions)
                )
                times.steps.append(clock() - started)
                if result.terminated or result.truncated:
                    break
            times.episodes += 1
        finally:
            await session.close()
    except EnvError as error:  # counted in the report
        times.errors[error.code] = times.errors.get(error.code, 0) + 1
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def _served(target: str, config: Mapping[str, JSON]) -> Iterator[tuple[str, int]]:
    """Runs a server process for the environment on a free loopback port.

    Yields:
        Its URL and process id.

    Raises:
        ConfigError: it did not start.
    """
    command = [sys.executable, "-m", "agentrl", "env", "serve", target, "--port", "0"]
    if config:
        command += ["--config", json.dumps(config)]
    variables = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if " at http" not in line:
            raise ConfigError(f"`agentrl env serve {target}` did not start; run it to see why")
        yield line.split()[-1], process.pid
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _percentile_ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000, 2)


def _usage(pid: int | None) -> tuple[float, int, float] | None:
    """Measures a process and its living descendants.

    Returns:
        CPU seconds, number of threads and resident memory in MiB, or None without /proc.
    """
    if pid is None or not Path("/proc/self/stat").exists():
        return None
    ticks = threads = pages = 0
    pids = [pid]
    for each in pids:  # the list grows meanwhile
        with contextlib.suppress(OSError):  # it has ended
            for listing in Path(f"/proc/{each}/task").glob("*/children"):
                pids += map(int, listing.read_text().split())
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            threads += int(fields[17])
            pages += int(fields[21])
    megabytes = round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return ticks / os.sysconf("SC_CLK_TCK"), threads, megabytes
