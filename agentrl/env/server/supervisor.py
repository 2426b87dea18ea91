"""Keeps the servers of `agentrl env serve ID --workers N` alive, one or many.

Each is a process with its own sessions, port and URL (consecutive ports); a client takes all the
URLs and spreads its sessions over them. A server that dies, or that is not ready for `UNREADY_S`
because its code hangs or holds the interpreter's lock, is killed with the processes of its group
and started again: its sessions are lost and played again, and those of the others go on. On Linux
the servers end with the process that started them, however it ends.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from agentrl.env.protocol import TOKEN_VARIABLE
from agentrl.env.server.serve import CLOSE_S, DRAIN_S, check_exposure, claim
from agentrl.errors import ConfigError
from agentrl.runtime import how_ended, kill_group, start_group

logger = logging.getLogger("agentrl.env")

UNREADY_S = 30.0
"""Seconds without a good answer of `/readyz` after which a server is killed."""
START_S = 600.0
"""Seconds that a server may take until it first answers, for slow imports."""
FIRST_PAUSE_S = 0.5
"""Seconds before the first restart of a server."""
MAX_PAUSE_S = 30.0
"""The pause before a restart doubles up to this, and starts over once a server lived longer."""
_PROBE_S = 5.0
_POLL_S = 0.5
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def supervise(
    environments: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8700,
    num_workers: int = 1,
    token: str | None = None,
    drain_s: float = DRAIN_S,
    name: str = "",
    ready: Callable[[list[str]], None],
    **options: Any,
) -> None:
    """Runs servers until SIGTERM or SIGINT, and passes the signal on to them.

    Must be called in the main thread.

    Args:
        environments: names for `agentrl.env.registry.resolve`.
        port: port of the first; with one worker, 0 takes a free one.
        name: prefix of the session ids; with several workers, by default each one's number.
        ready: called with the URLs once all of them serve.
        options: further options of `agentrl.env.server.app.make_app`, which must be JSON.

    Raises:
        ConfigError: `host` is not a loopback address and there is no token; an address cannot be
            listened on; or a server ended before it served, and the others are stopped.
    """
    check_exposure(host, token)
    stopping = threading.Event()
    workers: list[_Worker] = []
    for number in range(num_workers):
        with claim(host, port + number if port else 0) as claimed:
            address = claimed.getsockname()
        settings = {
            **options,
            "environments": list(environments),
            "host": host,
            "port": address[1],
            "drain_s": drain_s,
            "name": name or (str(number) if num_workers > 1 else ""),
        }
        workers.append(_Worker(number, address[0], settings, token, stopping))

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
        ready([worker.url for worker in workers])
    except CancelledError:
        pass  # stopped before all served
    except ConfigError:
        stop(signal.SIGTERM)
        raise
    finally:
        for worker in workers:
            worker.join()


class _Worker(threading.Thread):
    """Runs a server's process, and starts another one when it ends or hangs."""

    def __init__(
        self,
        number: int,
        address: str,
        settings: Mapping[str, Any],
        token: str | None,
        stopping: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self.serves: Future[None] = Future()
        host = settings["host"]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{settings['port']}"
        self._number = number
        self._address = _ANY_ADDRESS.get(address, address), settings["port"]
        self._stop_s = settings["drain_s"] + CLOSE_S + _PROBE_S
        text = json.dumps({**settings, "supervisor": os.getpid()})
        self._command = [sys.executable, "-m", "agentrl.env.server.worker", text]
        self._environ = {**os.environ, TOKEN_VARIABLE: token or ""}
        self._stopping = stopping
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while (process := self._begin()) is not None:
            started = time.monotonic()
            self._watch(process)
            kill_group(process)  # also what an environment left behind
            if self._stopping.is_set():
                break
            if not self.serves.done():
                message = f"server {self._number} could not be started; its output above says why"
                self.serves.set_exception(ConfigError(message))
                return
            how = how_ended(process.returncode)
            logger.error("server %d %s; starting it again", self._number, how)
            if time.monotonic() - started > MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        self.serves.cancel()

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self._process is not None:
                self._process.send_signal(number)

    def _begin(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            # What it prints is no answer of `env serve`, and no pipe has to be read to its end.
            self._process = start_group(self._command, stdout=2, env=self._environ)
            return self._process

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Returns when the process has ended, which is not waited for yet, or has to be killed."""
        good, patience_s = time.monotonic(), START_S
        is_stopping = False
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if self._stopping.is_set():
                if not is_stopping:
                    is_stopping, good, patience_s = True, time.monotonic(), self._stop_s
            elif self._is_ready():
                good, patience_s = time.monotonic(), UNREADY_S
                if not self.serves.done():
                    self.serves.set_result(None)
            if time.monotonic() - good > patience_s:
                logger.error("server %d hangs: %.0f s unready", self._number, patience_s)
                return
            time.sleep(_POLL_S if self.serves.done() and not is_stopping else 0.05)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(*self._address, timeout=_PROBE_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
