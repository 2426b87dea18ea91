"""Runs of the official harness, each in a process, a folder and a container of its own.

A worker (`grade_worker`) is forked from a host process that has imported the harness: the import
costs more of a processor than the tests of a small instance. Host and workers end with this
process, by whatever it ends, because connections to it close.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.env.container.engine import connect, labels, reap
from agentrl.errors import EnvError
from agentrl_swebench.dataset import Instance
from agentrl_swebench.evidence import Evidence
from agentrl_swebench.grade_worker import (
    FOLDER_PREFIX,
    GRADING_LABEL,
    LOG_FILE,
    REQUEST_FILE,
    RESULT_FILE,
)

WALL_GRACE_S = 180.0
"""What a run may take besides its tests: create, start, apply, stop, remove."""
_TAIL_CHARS = 500


@dataclass(slots=True, frozen=True)
class GradingLimits:
    """Limits of one grading."""

    memory_bytes: int = 4 << 30
    """Of the container, swap included."""
    max_processes: int = 512
    cpus: float | None = None
    """Cores, also in part; None: an equal share for each grading that may run at once, and no less
    than one."""
    network: Literal["none", "bridge"] = "none"
    """The official harness grants a network; few instances' tests need it."""
    sys_admin: bool = False
    """The official harness grants CAP_SYS_ADMIN, which browsers' sandboxes need and which is
    close to root on the host."""
    worker_memory_bytes: int = 4 << 30
    """Address space of the worker, which collects the tests' whole output."""
    min_free_bytes: int = 512 << 20
    """With less on the engine's disk at any time, a verdict that is not `resolved` is void."""


async def run_harness(
    instance: Instance,
    patch: str,
    *,
    run_id: str,
    timeout_s: float,
    limits: GradingLimits,
    model_name: str = "agentrl",
    skip_patch: bool = False,
    look: bool = False,
    logs: Path | None = None,
) -> Evidence:
    """Run the official `run_instance` once, in a process, a folder and under a run id of its own.

    With `look`, a resolved run's evidence says what the tests changed of what runs tests.

    No container of the run is left when this returns, unless the engine is gone.
    """
    # Two runs with one id: the second kills the first's container, and finds the first's report.
    grading = f"{re.sub('[^a-zA-Z0-9_.-]', '-', run_id)[:40]}-{secrets.token_hex(6)}"
    options = {
        "network_mode": limits.network,
        # Without an init, the main process ignores the signal to end.
        "init": True,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "pids_limit": limits.max_processes,
        "labels": labels(run_id, "grade") | {GRADING_LABEL: grading},
    }
    if limits.cpus is not None:
        # By time, since the engine refuses more cores than its machine has.
        options |= {"cpu_period": 100_000, "cpu_quota": int(limits.cpus * 100_000)}
    request = {
        "row": instance.row(),
        "patch": patch,
        "model_name_or_path": model_name,
        "grading": grading,
        "timeout_s": max(1, round(timeout_s)),
        "skip_patch": skip_patch,
        "look": look,
        "container": {"arguments": options, "sys_admin": limits.sys_admin},
        "worker_memory_bytes": limits.worker_memory_bytes,
        # Of this process now, which need not be what the host's were when it started.
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
            _unclean.add(grading)  # perhaps the harness could not remove it, if there was one
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
            await reader.read()  # to the worker's end
        if (folder / RESULT_FILE).is_file():
            ended = "done"
    except TimeoutError:
        ended = "wall_limit"
    finally:
        if ended != "done":
            await asyncio.shield(_clean_up(reader, pid, grading))
        writer.close()  # a worker that is forked only now ends for it
    return ended


async def _clean_up(reader: asyncio.StreamReader, pid: int, grading: str) -> None:
    if pid and not reader.at_eof():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        await reader.read()

    _unclean.add(grading)
    await asyncio.to_thread(_remove_containers)


_unclean: set[str] = set()
"""Runs of which a container may be left: where the engine was gone, the next run removes it."""


def _remove_containers() -> None:
    for grading in list(_unclean):
        with contextlib.suppress(EnvError):
            reap(connect(10), label=f"{GRADING_LABEL}={grading}", everything=True)
            _unclean.discard(grading)


class _Host:
    """The process that workers are forked from; started at the first run, and again if it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asking: socket.socket | None = None

    def fork_worker(self, folder: Path) -> socket.socket:
        """Ask for a worker in `folder`. The answer is a connection that it holds: it writes its
        process id, a line, and nothing else, and each side ends when the other does."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._process is None or self._asking is None or self._process.poll() is not None:
                self._asking = self._start()
            # A host that ends just now leaves a connection that is closed: the worker crashed.
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
