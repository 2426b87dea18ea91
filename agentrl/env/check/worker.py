"""Checks in a process of their own, watched from this one.

An environment's code may crash its process or block it for ever. Then the check that was running
has failed, and the remaining ones go on in a new process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from agentrl.env.check import (
    HUNG,
    SLOW,
    STOP_S,
    CheckResult,
    asserts,
    hung,
    load_subject,
    once,
    run_check,
    timeout_of,
)
from agentrl.errors import AgentRLError, ConfigError
from agentrl.processes import how_ended, signal_group

ALIVE_S = 1.0
"""The process says so often that its event loop runs."""
BLOCKED_S = 15.0
"""An event loop that says nothing for so long is blocked for ever; ten times as long when
thorough."""
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
    spawn = multiprocessing.get_context("spawn")  # a process that has nothing of this one
    request = {"target": target, "thorough": thorough, **options}
    while remaining:
        messages, writer = spawn.Pipe(duplex=False)
        worker = spawn.Process(target=_work, args=(writer, remaining, request))
        worker.start()
        writer.close()  # the worker's own is the last, and its end the end of the messages
        try:
            for result in _watch(worker, messages, remaining, thorough):
                result = once(results, result)
                report(result)
                results.append(result)
                remaining.remove(result.name)
                request["hangs"] = request.get("hangs", False) or result.detail.startswith(HUNG)
        finally:
            assert worker.pid is not None
            signal_group(worker.pid, signal.SIGKILL)
            worker.kill()  # it may not lead a group yet
            worker.join()
            messages.close()
    return results


def _watch(
    worker: SpawnProcess, messages: Connection, names: Sequence[str], thorough: bool
) -> Iterator[CheckResult]:
    """Results as they come; the last is made here if the worker hangs or dies in a check."""
    waiting = list(names)
    started = time.monotonic()
    limit_s, silence_s = LOAD_TIMEOUT_S, LOAD_TIMEOUT_S
    while waiting:
        if not messages.poll(silence_s) or time.monotonic() - started > limit_s:
            yield hung(waiting[0], time.monotonic() - started)
            return
        try:
            message = json.loads(messages.recv_bytes())
        except EOFError:
            yield _died(waiting[0], worker, time.monotonic() - started)
            return
        if "error" in message:
            raise ConfigError(message["error"])
        if "alive" in message:
            continue
        if "name" in message:
            result = CheckResult(**message)
            waiting.remove(result.name)
            yield result
        started, limit_s = time.monotonic(), SLOW * timeout_of(thorough) + 2 * STOP_S
        silence_s = BLOCKED_S * (10 if thorough else 1)
    worker.join(STOP_S)  # its close_shared


def _died(name: str, worker: SpawnProcess, seconds: float) -> CheckResult:
    worker.join(STOP_S)
    worker.kill()  # where it only closed its end of the pipe
    worker.join()
    assert worker.exitcode is not None
    detail = f"the process {how_ended(worker.exitcode)} during this check"
    remedy = (
        "find the call that ends the process; start code that may crash as a process of its own, "
        "or serve the environment apart with `agentrl env serve`"
    )
    return CheckResult(name, asserts(name), "fail", detail, remedy, seconds, detail)


# In the worker


def _work(messages: Connection, names: Sequence[str], request: dict[str, Any]) -> None:
    os.setsid()  # killed with all that it started; Ctrl-C is for the parent
    os.dup2(2, 1)  # what the environment prints is no part of the report
    # What the checks provoke is no news; what they find is in the report.
    logging.getLogger("agentrl.env").setLevel(logging.CRITICAL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_check(messages, names, request))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    signal_group(os.getpid(), signal.SIGKILL)


async def _check(messages: Connection, names: Sequence[str], request: dict[str, Any]) -> None:
    def send(message: dict[str, Any]) -> None:
        messages.send_bytes(json.dumps(message).encode())

    async def say_alive() -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            send({"alive": True})

    hangs = request.pop("hangs", False)
    try:
        subject = await load_subject(**request)
    except AgentRLError as error:
        send({"error": str(error)})
        return
    subject.hangs = hangs
    send({"loaded": True})  # from here on each check has its time
    alive = asyncio.ensure_future(say_alive())
    for name in names:
        send(dataclasses.asdict(await run_check(name, subject)))
    alive.cancel()
    await subject.aclose()
