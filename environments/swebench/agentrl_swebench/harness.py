"""Runs of the official harness, each in a process, a folder and a container of its own.

A worker (`grade_worker`) is forked from a host process that has imported the harness, because the
import takes more CPU time than the tests of a small instance. Host and workers end when this
process does, however it ends, because their connections to it close.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.env.container.engine import connect, labels, reap
from agentrl.errors import EnvError
from agentrl_swebench.dataset import Instance
from agentrl_swebench.grade_worker import (
    FOLDER_PREFIX,
    GRADING_LABEL,
    LOG_FILE,
    REQUEST_FILE,
    RESULT_FILE,
)

WALL_GRACE_S = 180.0
"""Seconds that a run may take besides its tests: create, start, apply, stop, remove."""
_TAIL_CHARS = 500


@dataclass(slots=True, frozen=True)
class GradingLimits:
    """Limits of one grading."""

    memory_bytes: int = 4 << 30
    """Memory of the container, swap included."""
    max_processes: int = 512
    cpus: float | None = None
    """Cores of the container, fractions allowed. None: `grade` shares the cores equally among the
    gradings that may run at once, at least one each; `run_harness` alone sets no limit."""
    network: Literal["none", "bridge"] = "none"
    """The official harness gives a network (`bridge`), which few instances' tests need."""
    sys_admin: bool = False
    """Grant CAP_SYS_ADMIN, as the official harness does. Browsers' sandboxes need it; it is close
    to root on the host."""
    worker_memory_bytes: int = 4 << 30
    """Address space of the worker, which keeps the tests' whole output in memory."""
    min_free_bytes: int = 512 << 20
    """If the engine's disk ever has less free space, a verdict other than `resolved` is void."""


@dataclass(slots=True, frozen=True)
class Evidence:
    """The evidence of one run of the harness, on which a grading is judged."""

    ended: Literal["done", "wall_limit", "crashed"]
    """End of the worker: it gave a result, was killed for taking too long, or ended without a
    result."""
    report: dict[str, dict] | None = None
    """The official report by instance id; None if the harness made none."""
    statuses: dict[str, str] = field(default_factory=dict)
    """Status by test, for every test that the official parser found in the log."""
    complete: bool = False
    """True if the log has the marks of the tests' start and end."""
    reports: Sequence[str] = ()
    """What follows the mark that was asked for, by line of the log."""
    error_kind: str = ""
    error: str = ""
    container_end: str = ""
    out_of_memory: bool = False
    least_free_bytes: int | None = None
    image_id: str = ""
    log_dir: str = ""
    """The harness' log folder, relative to the worker's folder."""
    seconds: float = 0.0


async def run_harness(
    instance: Instance,
    patch: str,
    *,
    run_id: str,
    timeout_s: float,
    limits: GradingLimits,
    model_name: str = "agentrl",
    skip_patch: bool = False,
    mark: str = "",
    logs: Path | None = None,
) -> Evidence:
    """Runs the official `run_instance` once, in its own process and folder and under its own run
    id.

    When this returns, no container of the run is left, unless the engine is gone.

    Args:
        run_id: label of the container; need not be unique.
        timeout_s: limit on the tests, in seconds, rounded to whole seconds.
        mark: return what follows this word in the lines of the tests' log.
        logs: folder that receives the harness' log folder.
    """
    # If two runs had one id, the second would kill the first's container and find its report.
    grading = f"{re.sub('[^a-zA-Z0-9_.-]', '-', run_id)[:40]}-{secrets.token_hex(6)}"
    options = {
        "network_mode": limits.network,
        # Without an init, the container's main process ignores SIGTERM.
        "init": True,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "pids_limit": limits.max_processes,
        "labels": labels(run_id, "grade") | {GRADING_LABEL: grading},
    }
    if limits.cpus is not None:
        # As a quota of time: the engine refuses a number of cores above its machine's.
        options |= {"cpu_period": 100_000, "cpu_quota": int(limits.cpus * 100_000)}
    request = {
        "row": instance.row(),
        "patch": patch,
        "model_name_or_path": model_name,
        "grading": grading,
        "timeout_s": max(1, round(timeout_s)),
        "skip_patch": skip_patch,
        "mark": mark,
        "container": {"arguments": options, "sys_admin": limits.sys_admin},
        "worker_memory_bytes": limits.worker_memory_bytes,
        # This process's variables may have changed since the host started.
        "environment": {k: v for k, v in os.environ.items() if k.startswith("DOCKER_")},
    }
    if _unclean:
        await asyncio.to_thread(_remove_containers)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name:
        folder = Path(name)
        (folder / REQUEST_FILE).write_text(json.dumps(request))
        ended = await _run_worker(folder, grading, timeout_s + WALL_GRACE_S)
        result: dict[str, Any] = {}
        if ended == "done":
            result = json.loads((folder / RESULT_FILE).read_text())
        elif (folder / LOG_FILE).is_file():
            result = {"error": (folder / LOG_FILE).read_text(errors="replace")[-_TAIL_CHARS:]}
        evidence = Evidence(ended=ended, seconds=time.monotonic() - started, **result)
        if not evidence.complete or evidence.container_end in ("", "lost"):
            _unclean.add(grading)  # the harness may have left its container
        if logs is not None and evidence.log_dir and (folder / evidence.log_dir).is_dir():
            shutil.rmtree(logs, ignore_errors=True)
            logs.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder / evidence.log_dir, logs)
    return evidence


async def _run_worker(
    folder: Path, grading: str, wall_s: float
) -> Literal["done", "wall_limit", "crashed"]:
    reader, writer = await asyncio.open_unix_connection(sock=_host.fork_worker(folder))
    pid = 0
    ended: Literal["done", "wall_limit", "crashed"] = "crashed"
    try:
        async with asyncio.timeout(wall_s):
            pid = int(await reader.readline() or 0)
            await reader.read()  # returns when the worker ends
        if (folder / RESULT_FILE).is_file():
            ended = "done"
    except TimeoutError:
        ended = "wall_limit"
    finally:
        if ended != "done":
            await asyncio.shield(_clean_up(reader, pid, grading))
        writer.close()  # a worker that is forked only now sees this and ends
    return ended


async def _clean_up(reader: asyncio.StreamReader, pid: int, grading: str) -> None:
    if pid and not reader.at_eof():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        await reader.read()

    _unclean.add(grading)
    await asyncio.to_thread(_remove_containers)


_unclean: set[str] = set()
"""Runs that may have left a container because the engine was gone; the next run removes it."""


def _remove_containers() -> None:
    for grading in list(_unclean):
        with contextlib.suppress(EnvError):
            reap(connect(10), label=f"{GRADING_LABEL}={grading}", everything=True)
            _unclean.discard(grading)


class _Host:
    """The process that workers are forked from. It starts at the first run, and again if it
    ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asking: socket.socket | None = None

    def fork_worker(self, folder: Path) -> socket.socket:
        """Asks for a worker in `folder` and returns a connection to it. The worker writes one line,
        its process id, and holds the connection until it ends; it ends when this side closes."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._process is None or self._asking is None or self._process.poll() is not None:
                self._asking = self._start()
            # If the host ends just now, the connection is closed, which counts as a crashed worker.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._asking, [os.fsencode(folder)], [theirs.fileno()])
        return ours

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        source = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(source),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrl_swebench.grade_worker"],
                cwd="/",
                env=environment,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        return ours


_host = _Host()
