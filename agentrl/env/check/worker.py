"""Checks in a process of their own, watched from this one.

An environment's code may crash its process or block it for ever. Then the check that was running
has failed, and the remaining ones go on in a new process.

    echo '{"target": ..., "names": [...], ...}' | python -m agentrl.env.check.worker

prints one JSON line per result.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from agentrl.env.check import (
    STOP_S,
    CheckResult,
    asserts,
    hung,
    load_subject,
    once,
    run_check,
    timeout_of,
)
from agentrl.env.sessions.fork_host import how_ended
from agentrl.errors import AgentRLError, ConfigError

LOAD_TIMEOUT_S = 1800.0
"""How long an environment may load, such as a dataset that is downloaded."""


def run_in_worker(
    target: str,
    names: Sequence[str],
    *,
    thorough: bool,
    report: Callable[[CheckResult], None],
    **options: Any,
) -> list[CheckResult]:
    """Run checks on `load_subject(target, **options)` in another process.

    Raises:
        ConfigError: the environment cannot be loaded.
    """
    results: list[CheckResult] = []
    remaining = list(names)
    while remaining:
        request = {"target": target, "names": remaining, "thorough": thorough, **options}
        worker = subprocess.Popen(
            [sys.executable, "-m", "agentrl.env.check.worker"],
            stdin=subprocess.PIPE,  # and not an argument: everybody may read those, and the token
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # killed with all that it started; Ctrl-C is for the parent
        )
        try:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"sys_path": sys.path, **request}).encode() + b"\n")
            for result in _watch(worker, remaining, timeout_of(thorough)):
                result = once(results, result)
                report(result)
                results.append(result)
                remaining.remove(result.name)
        finally:
            _kill(worker)
    return results


def _watch(
    worker: subprocess.Popen[bytes], names: Sequence[str], timeout_s: float
) -> Iterator[CheckResult]:
    """Results as they come; the last is made here if the worker hangs or dies in a check."""
    assert worker.stdout is not None
    waiting = list(names)
    started = time.monotonic()
    limit_s = LOAD_TIMEOUT_S
    while waiting:
        message = _read(worker.stdout, started + limit_s - time.monotonic())
        if message is None:
            yield hung(waiting[0], limit_s)
            return
        if not message:
            yield _died(waiting[0], worker, time.monotonic() - started)
            return
        if "error" in message:
            raise ConfigError(message["error"])
        if "name" in message:
            result = CheckResult(**message)
            waiting.remove(result.name)
            yield result
        started, limit_s = time.monotonic(), timeout_s + 2 * STOP_S


def _read(lines: IO[bytes], timeout_s: float) -> dict[str, Any] | None:
    """The worker's next message; empty when it has ended; None when none came in time."""
    with selectors.DefaultSelector() as selector:
        selector.register(lines, selectors.EVENT_READ)
        if not selector.select(max(timeout_s, 0.0)):
            return None
    line = lines.readline()
    return json.loads(line) if line.endswith(b"\n") else {}


def _died(name: str, worker: subprocess.Popen[bytes], seconds: float) -> CheckResult:
    try:
        status = worker.wait(STOP_S)
    except subprocess.TimeoutExpired:  # it closed its output and goes on
        worker.kill()
        status = worker.wait()
    detail = f"the process {how_ended(status)} during this check"
    remedy = "find the call that ends the process; isolation = 'process' keeps it from others"
    return CheckResult(name, asserts(name), "fail", detail, remedy, seconds, detail)


def _kill(worker: subprocess.Popen[bytes]) -> None:
    """Kill the worker's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        assert pipe is not None
        pipe.close()


async def _work(request: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
    names = request.pop("names")
    try:
        subject = await load_subject(**request)
    except AgentRLError as error:
        write({"error": str(error)})
        return
    write({"loaded": True})  # from here on each check has its time
    for name in names:
        write(dataclasses.asdict(await run_check(name, subject)))
    await subject.aclose()


def _end_with_parent() -> None:
    """Wait for the end of the standard input, which comes when the parent ends."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    # What the environment prints must not come between the results.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # What the checks provoke is no news; what they find is in the report.
    logging.getLogger("agentrl.env").setLevel(logging.CRITICAL)

    def write(message: dict[str, Any]) -> None:
        results.write(json.dumps(message) + "\n")
        results.flush()

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = request.pop("sys_path")
    asyncio.run(_work(request, write))


if __name__ == "__main__":
    main()
