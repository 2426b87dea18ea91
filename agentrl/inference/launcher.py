"""Starts a run's own inference servers, watches them, restarts them and stops them with the run.

A server has its own virtual environment, because it pins its own torch, and listens on loopback
only, because its control routes have no authentication. Every server runs below a guard process
(`runtime.guarded`), so that none of its processes outlives this one, even after SIGKILL.

A server that dies or hangs is restarted on the same port. It starts with the weights on its disk;
`ServerEngine.resync` sends it the current ones before its next request. Two parts can hang: the
process that answers HTTP (`Program.alive_path`), and the engine behind it (`Program.engine_path`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from agentrl.errors import InferenceError
from agentrl.inference.http import make_client
from agentrl.inference.program import Program, ServerSettings, server_environment, share_of_devices
from agentrl.inference.vllm_command import VLLM
from agentrl.runtime import guarded, kill_group, retry, run_guarded, start_group

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two checks of a server."""
HEALTH_TIMEOUT_S = 5.0
ENGINE_POLL_S = 5.0
"""Seconds between two requests to a server's engine, which answers only between its steps."""
GRACE_S = 8.0
"""Seconds between asking a server to end and killing it."""
MAX_RESTARTS_PER_HOUR = 6
"""Largest number of restarts of one server; restarts do not help a server that fails more often."""
MAX_BACKOFF_S = 60.0
TAIL_LINES = 12


@dataclass(slots=True)
class _Server:
    number: int
    port: int
    url: str
    log: Path
    http: httpx.AsyncClient
    process: subprocess.Popen[bytes] | None = None
    answered_at: float = 0.0
    """`time.monotonic()` of the last answer with status 200 from the HTTP process."""
    engine_asked_at: float = 0.0
    engine_answered_at: float = 0.0
    restarted_at: list[float] = field(default_factory=list)
    given_up: bool = False


class _NotReady(Exception):
    """The server is alive, but does not answer yet."""


class _GivenUp(Exception):
    """The server failed too often."""


class ServerLauncher:
    """Runs servers: call `start()`, use `urls`, call `aclose()`. Usable once."""

    def __init__(self, settings: ServerSettings, program: Program = VLLM) -> None:
        self.urls: list[str] = []
        self.restarts = 0
        """Number of restarts of all servers since the start."""
        self.failure: str | None = None
        """Reason why the last server was given up; None while one runs or is being restarted."""
        self._settings = settings
        self._program = program
        self._environment = server_environment(program, settings)
        self._platform = ""
        self._num_devices = 0
        self._servers: list[_Server] = []
        self._sockets_dir: str | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._may_start = asyncio.Event()
        self._may_start.set()

    async def start(self) -> None:
        """Starts all servers and returns when every one answers.

        Raises:
            InferenceError: the interpreter does not have the package, or a server ended or did not
                answer in time. The message has the last lines of the server's log and, if known,
                the remedy.
        """
        self._platform, self._num_devices = await self._require_package()
        # Adds the variables that only servers on this device need.
        of_platform = self._program.variables(self._settings, self._platform)
        self._environment = of_platform | self._environment
        log_dir = self._settings.log_dir
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InferenceError(f"{log_dir} cannot be created: {error}") from error
        # For sockets between a server's processes, which a killed server leaves behind.
        self._sockets_dir = tempfile.mkdtemp(prefix="agentrl-servers-")
        for number, port in enumerate(_free_ports(self._settings.num_servers)):
            url = f"http://127.0.0.1:{port}"
            log = log_dir / f"{self._program.package}-{number}.log"
            self._servers.append(_Server(number, port, url, log, make_client(url)))
            self.urls.append(url)
        try:
            for server in self._servers:
                self._spawn(server)
            await asyncio.gather(*map(self._until_ready, self._servers))
        except BaseException:
            await self.aclose()
            raise
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def aclose(self) -> None:
        """Ends all servers and every process that they started. Safe to call twice."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        await asyncio.gather(*map(self._stop, self._servers))
        for server in self._servers:
            await server.http.aclose()
        if self._sockets_dir is not None:
            shutil.rmtree(self._sockets_dir, ignore_errors=True)
            self._sockets_dir = None

    def hold(self) -> None:
        """Neither checks nor starts servers until `release`, because the trainer has their GPU."""
        self._may_start.clear()

    def release(self) -> None:
        """Checks servers again, after `hold`."""
        for server in self._servers:  # nothing was checked meanwhile
            server.answered_at = server.engine_answered_at = time.monotonic()
        self._may_start.set()

    async def stop(self, url: str) -> None:
        """Ends a server. The next check finds it missing and starts it again."""
        await self._stop(next(server for server in self._servers if server.url == url))

    async def _require_package(self) -> tuple[str, int]:
        """Returns the kind of device that servers compute on (`cpu`, `cuda`, ...) and how many
        devices they see."""
        python, package = self._settings.python, self._program.package
        remedy = (
            "set --inference.python to the interpreter of a virtual environment with "
            f"{self._program.name} ({self._program.install})"
        )
        if shutil.which(python) is None:
            raise InferenceError(f"cannot run {python} (no such program); {remedy}")
        timeout_s = self._settings.startup_timeout_s
        status, stdout, stderr = await run_guarded(
            [python, "-c", self._program.ask_platform],
            grace_s=0.0,
            timeout_s=timeout_s,
            env=self._environment,
        )
        if status is None:
            raise InferenceError(
                f"{python} did not import {package} within {timeout_s:g} s; "
                "raise inference.startup_timeout_s"
            )
        if status != 0:
            lines = stderr.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"status {status}"
            raise InferenceError(f"{python} cannot import {package} ({reason}); {remedy}")
        words = stdout.decode(errors="replace").split()[-2:]  # the import may print lines too
        return (words[0], int(words[1])) if len(words) == 2 else ("", 0)

    def _spawn(self, server: _Server) -> None:
        assert self._sockets_dir is not None
        settings = self._settings
        command = self._program.command(settings, server.port, self._platform)
        environment = dict(self._environment)
        if (variable := self._program.sockets_variable) is not None:
            environment[variable] = self._sockets_dir
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        if not visible and self._platform == "cuda":
            visible = ",".join(map(str, range(self._num_devices)))
        if visible and settings.num_servers > 1:
            environment["CUDA_VISIBLE_DEVICES"] = share_of_devices(
                visible, server.number, settings.num_servers
            )
        with server.log.open("ab") as log:
            log.write(f"--- {' '.join(command)}\n".encode())
            log.flush()
            server.process = start_group(
                guarded(command, GRACE_S, settings.python),
                stdin=subprocess.PIPE,  # the end of this process closes it, which ends the server
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    async def _until_ready(self, server: _Server) -> None:
        async def look(_: float) -> None:
            assert server.process is not None
            status = server.process.poll()
            if status is not None:
                raise InferenceError(self._startup_failure(server, f"ended with status {status}"))
            if not await _answers(server, "/health"):
                raise _NotReady

        timeout_s = self._settings.startup_timeout_s
        try:
            await retry(
                look,
                timeout_s=timeout_s,
                retry_after_s=lambda error: 0.0 if isinstance(error, _NotReady) else None,
                first_pause_s=POLL_S,
                max_pause_s=POLL_S,
            )
        except _NotReady:
            why = f"did not answer within {timeout_s:g} s (inference.startup_timeout_s)"
            raise InferenceError(self._startup_failure(server, why)) from None
        server.engine_asked_at = server.engine_answered_at = time.monotonic()

    async def _watch(self, server: _Server) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._may_start.wait()
            assert server.process is not None
            status = server.process.poll()
            if status is not None:
                reason = f"ended with status {status}"
            elif await _answers(server, self._program.alive_path):
                await _ask_engine(server, self._program.engine_path)
                silent_s = time.monotonic() - server.engine_answered_at
                if silent_s < self._settings.hung_after_s:
                    continue
                reason = (
                    f"has an engine that has not answered for {silent_s:.0f} s (if it was loading "
                    "weights, raise inference.hung_after_s)"
                )
            else:
                silent_s = time.monotonic() - server.answered_at
                if silent_s < self._settings.unhealthy_after_s:
                    continue
                reason = f"has not answered {self._program.alive_path} for {silent_s:.0f} s"
            if not await self._restart(server, reason):
                return

    async def _restart(self, server: _Server, reason: str) -> bool:
        """Restarts the server, repeatedly if need be. Returns False if it failed too often and is
        given up."""

        async def attempt(_: float) -> None:
            nonlocal reason
            logger.warning("%s server %s %s; restarting it", self._program.name, server.url, reason)
            await self._stop(server)
            self._count_restart(server, reason)
            await self._may_start.wait()
            try:
                self._spawn(server)
                await self._until_ready(server)
            except (InferenceError, OSError) as error:
                reason = f"did not come back ({error})"
                raise

        try:
            await retry(
                attempt,
                retry_after_s=lambda error: (
                    0.0 if isinstance(error, InferenceError | OSError) else None
                ),
                first_pause_s=2.0,
                max_pause_s=MAX_BACKOFF_S,
            )
        except _GivenUp as error:
            logger.error("%s; giving up on this server", error)
            server.given_up = True
            if all(each.given_up for each in self._servers):
                self.failure = str(error)
            return False
        return True

    def _count_restart(self, server: _Server, reason: str) -> None:
        now = time.monotonic()
        server.restarted_at = [at for at in server.restarted_at if at > now - 3600]
        if len(server.restarted_at) >= MAX_RESTARTS_PER_HOUR:
            raise _GivenUp(
                f"{self._program.name} server {server.url} {reason}, after "
                f"{MAX_RESTARTS_PER_HOUR} restarts within an hour; see {server.log}"
            )
        server.restarted_at.append(now)
        self.restarts += 1

    async def _stop(self, server: _Server) -> None:
        process = server.process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        deadline = time.monotonic() + GRACE_S + 10  # the guard needs less
        while process.poll() is None:
            if time.monotonic() > deadline:
                kill_group(process)
            await asyncio.sleep(0.05)

    def _startup_failure(self, server: _Server, what: str) -> str:
        """Returns the message for a server that did not start, with the last lines of its log.

        It quotes several lines, because tracebacks of other processes often follow the reason.
        """
        with contextlib.suppress(OSError):
            text = server.log.read_text(errors="replace")
            start = text.rfind("\n--- ") + 1  # restarts append to the log
            lines = [line for line in text[start:].splitlines() if line.strip()]
            remedy = next(
                (fix for sign, fix in self._program.remedies.items() if sign in text[start:]), None
            )
            shown = "\n".join(f"  {line[:200]}" for line in lines[-TAIL_LINES:])
            return (
                f"{self._program.name} server {server.url} {what}"
                + (f": {remedy}" if remedy else "")
                + f". End of {server.log}:\n{shown}"
            )
        return f"{self._program.name} server {server.url} {what}; it wrote no log to {server.log}"


async def _answers(server: _Server, path: str) -> bool:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            response = await server.http.get(path)
    except (httpx.TransportError, TimeoutError):
        return False
    if response.status_code != 200:
        return False
    server.answered_at = time.monotonic()
    return True


async def _ask_engine(server: _Server, path: str) -> None:
    """Asks the engine, unless it was asked recently, and notes the time if it answers."""
    if time.monotonic() < server.engine_asked_at + ENGINE_POLL_S:
        return
    server.engine_asked_at = time.monotonic()
    with contextlib.suppress(httpx.TransportError, TimeoutError):
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await server.http.get(path)
        server.engine_answered_at = time.monotonic()


def _free_ports(count: int) -> list[int]:
    """Returns distinct loopback ports on which nothing is listening now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
