"""Runs checks in another process and watches it from this one.

An environment's code may crash its process or block it forever. Then the check that was running has
failed, and the remaining checks run in a new process.
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
    CheckResult,
    asserts,
    hung,
    load_subject,
    run_check,
    shorten_repeat,
)
from agentrl.errors import AgentRLError, ConfigError
from agentrl.runtime import how_ended, signal_group

ALIVE_S = 1.0
"""Seconds between two messages of the process that say that its event loop runs."""
BLOCKED_S = 5.0
"""Seconds without a message after which the event loop counts as blocked forever; ten times that
with `thorough`."""
STOP_S = 5.0
"""Seconds that the process may take to end."""
LOAD_TIMEOUT_S = 1800.0
"""Seconds that an environment may take to load, such as to download a dataset."""


def run_in_worker(
    target: str,
    names: Sequence[str],
    *,
    thorough: bool,
    report: Callable[[CheckResult], None],
    **options: Any,
) -> list[CheckResult]:
    """Runs checks on `load_subject(target, **options)` in another process.

    Args:
        names: the checks to run, in order.
        report: called with each result as soon as it is known.

    Raises:
        ConfigError: the environment cannot be loaded.
    """
    results: list[CheckResult] = []
    remaining = list(names)
    spawn = multiprocessing.get_context("spawn")  # a process that inherits no state of this one
    request = {"target": target, "thorough": thorough, **options}
    while remaining:
        messages, writer = spawn.Pipe(duplex=False)
        worker = spawn.Process(target=_work, args=(writer, remaining, request))
        worker.start()
        writer.close()  # so that the messages end when the worker does
        try:
            for result in _watch(worker, messages, remaining, thorough):
                result = shorten_repeat(results, result)
                report(result)
                results.append(result)
                remaining.remove(result.name)
                request["hangs"] = request.get("hangs", False) or result.detail.startswith(HUNG)
        finally:
            assert worker.pid is not None
            signal_group(worker.pid, signal.SIGKILL)
            worker.kill()  # it may not have its own process group yet
            worker.join()
            messages.close()
    return results


def _watch(
    worker: SpawnProcess, messages: Connection, names: Sequence[str], thorough: bool
) -> Iterator[CheckResult]:
    """Yields results as they come. If the worker hangs or dies in a check, the last result is a
    failure of that check."""
    waiting = list(names)
    started, silence_s = time.monotonic(), LOAD_TIMEOUT_S
    while waiting:
        if not messages.poll(silence_s):
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
        started, silence_s = time.monotonic(), BLOCKED_S * (10 if thorough else 1)
    worker.join(STOP_S)  # while it calls close_shared


def _died(name: str, worker: SpawnProcess, seconds: float) -> CheckResult:
    worker.join(STOP_S)
    worker.kill()  # it may have closed its end of the pipe without ending
    worker.join()
    assert worker.exitcode is not None
    detail = f"the process {how_ended(worker.exitcode)} during this check"
    remedy = (
        "find the call that ends the process; run code that may crash in a child process, or serve "
        "the environment in its own process with `agentrl env serve`"
    )
    return CheckResult(name, asserts(name), "fail", detail, remedy, seconds, detail)


# In the worker


def _work(messages: Connection, names: Sequence[str], request: dict[str, Any]) -> None:
    os.setsid()  # its group is killed as a whole, and Ctrl-C reaches only the parent
    os.dup2(2, 1)  # the environment's own prints must not mix with the report
    # Checks provoke errors on purpose, and report what they find.
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
    send({"loaded": True})  # from here on, the time limit is that of each check
    alive = asyncio.ensure_future(say_alive())
    for name in names:
        send(dataclasses.asdict(await run_check(name, subject)))
    alive.cancel()
    await subject.aclose()
