"""Several servers on consecutive ports, kept alive: `agentrl env serve ID --workers N`.

Each is a server like any other, with sessions, a port and a URL of its own; a client takes all the
URLs and spreads its sessions over them. One that dies is started again; its sessions are lost, and
those of the others go on. On Linux all end with the process that started them, however it ends.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future

from agentrl.errors import ConfigError
from agentrl.processes import die_with_parent

logger = logging.getLogger("agentrl.env")

FIRST_PAUSE_S = 0.5
SERVES = b"serving "
"""How the line begins that a server prints once it listens. What else it prints, as the code of an
environment may, goes to standard error."""
SUPERVISOR_VARIABLE = "AGENTRL_SUPERVISOR_PID"
"""Tells a server's process whose end is its own."""
MAX_PAUSE_S = 30.0
"""Pauses before starting a server again double up to this, and begin anew once it lived longer."""


def supervise(
    commands: Sequence[Sequence[str]],
    *,
    ready: Callable[[], None],
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run one process per command until SIGTERM or SIGINT, which is passed on to them. For the main
    thread.

    Args:
        commands: each prints a line that begins with `SERVES` once it serves.
        ready: called once all do.
        environ: environment variables of the processes; None: this one's.

    Raises:
        ConfigError: one ended before it served; the others are stopped.
    """
    stopping = threading.Event()
    workers = [_Worker(number, each, environ, stopping) for number, each in enumerate(commands)]

    def stop(number: int, _frame: object = None) -> None:
        stopping.set()
        for worker in workers:
            worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.serves.result()
        ready()
    except CancelledError:
        pass  # stopped before all served
    except ConfigError:
        stop(signal.SIGTERM)
        raise
    finally:
        for worker in workers:
            worker.join()


def end_with_supervisor() -> None:
    """In a process that `supervise` started, end with the one that called it, even if that one is
    killed: its ports are then free for the next."""
    pid = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if pid is not None and sys.platform == "linux":
        die_with_parent(int(pid))


class _Worker(threading.Thread):
    """Keeps the process of one command alive."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environ: Mapping[str, str] | None,
        stopping: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self.serves: Future[None] = Future()
        self._number = number
        self._command = command
        self._environ = {**(environ or os.environ), SUPERVISOR_VARIABLE: str(os.getpid())}
        self._stopping = stopping
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while (process := self._begin()) is not None:
            started = time.monotonic()
            assert process.stdout is not None
            # Read to the end: a pipe that is full would stop the server that prints into it.
            for line in process.stdout:
                if line.startswith(SERVES) and not self.serves.done():
                    self.serves.set_result(None)
                elif not line.startswith(SERVES):
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()
            status = process.wait()
            process.stdout.close()
            if not self.serves.done() and not self._stopping.is_set():
                message = f"server {self._number} could not be started; see what it says above"
                self.serves.set_exception(ConfigError(message))
                return
            if not self._stopping.is_set():
                logger.error("server %d ended with %d; starting it again", self._number, status)
            if time.monotonic() - started > MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        self.serves.cancel()

    def _begin(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, env=self._environ
            )
            return self._process

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self._process is not None:
                self._process.send_signal(number)
