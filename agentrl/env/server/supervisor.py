"""Keeps several servers on consecutive ports alive: `agentrl env serve ID --workers N`.

Each is an ordinary server with its own sessions, port and URL; a client takes all the URLs and
spreads its sessions over them. A server that dies is restarted: its sessions are lost, and those of
the others go on. On Linux the servers end with the process that started them, however it ends.
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
from agentrl.runtime import die_with_parent

logger = logging.getLogger("agentrl.env")

FIRST_PAUSE_S = 0.5
"""Seconds before the first restart of a server."""
SERVES = b"serving "
"""Prefix of the line that a server prints once it listens. Other lines, such as an environment's
own, are passed on to standard error."""
SUPERVISOR_VARIABLE = "AGENTRL_SUPERVISOR_PID"
"""Environment variable with the id of the process that a server's process ends with."""
MAX_PAUSE_S = 30.0
"""The pause before a restart doubles up to this, and starts over once a server lived longer."""


def supervise(
    commands: Sequence[Sequence[str]],
    *,
    ready: Callable[[], None],
    environ: Mapping[str, str] | None = None,
) -> None:
    """Runs one process per command until SIGTERM or SIGINT, and passes the signal on to them.

    Must be called in the main thread.

    Args:
        commands: each prints a line that begins with `SERVES` once it serves.
        ready: called once all of them serve.
        environ: environment variables of the processes; None: those of this process.

    Raises:
        ConfigError: a process ended before it served; the others are stopped.
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
    """Makes a process that `supervise` started end with the supervisor, even if that is killed.

    Its port is then free for the next start. Does nothing in other processes, nor off Linux.
    """
    pid = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if pid is not None and sys.platform == "linux":
        die_with_parent(int(pid))


class _Worker(threading.Thread):
    """Runs a command's process, and restarts it when it ends."""

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
            # Read everything: a server that prints into a full pipe would block.
            for line in process.stdout:
                if line.startswith(SERVES) and not self.serves.done():
                    self.serves.set_result(None)
                elif not line.startswith(SERVES):
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()
            status = process.wait()
            process.stdout.close()
            if not self.serves.done() and not self._stopping.is_set():
                message = f"server {self._number} could not be started; its output above says why"
                self.serves.set_exception(ConfigError(message))
                return
            if not self._stopping.is_set():
                logger.error("server %d ended with status %d; restarting", self._number, status)
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
