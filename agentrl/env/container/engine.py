"""The Docker engine: one client, and the labels that say to whom a container belongs.

The client is the `docker` package. It blocks, so an event loop calls it through `Engine`, in
threads.

An owner is a process: host boot, process-id namespace, process id and start time name it for good,
so that a reused process id is never taken for it. Whoever can see the same process ids can tell
whether the owner lives; to all others the label `agentrl.expires` says when a container is
abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.errors import ConfigError, EnvError, EnvUnavailable

if TYPE_CHECKING:
    from docker import DockerClient

T = TypeVar("T")

OWNER_LABEL = "agentrl.owner"
ROLE_LABEL = "agentrl.role"
RUN_LABEL = "agentrl.run"
EXPIRES_LABEL = "agentrl.expires"

MAX_LIFE_S = 6 * 3600
"""A container is abandoned after this long, whatever became of its owner."""

CALL_TIMEOUT_S = 120.0
MAX_CALLS = 512
"""Calls of one `Engine` at a time, a running command being one; further ones wait."""


class EngineError(EnvError):
    """The engine refused a call; `engine_status` is its HTTP status."""

    def __init__(self, message: str, engine_status: int) -> None:
        super().__init__(message, code="engine_error")
        self.engine_status = engine_status


class ImageMissing(EnvError):
    """An image is not on the engine."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="image_missing")


def connect(timeout_s: float = CALL_TIMEOUT_S) -> DockerClient:
    """A client of the engine that DOCKER_HOST names (by default the local socket).

    `timeout_s` is for each answer of the engine.

    Raises:
        ConfigError: the `docker` package is missing or DOCKER_HOST can't be read.
        EnvUnavailable: no engine answers there.
    """
    try:
        from docker import DockerClient
        from docker.errors import DockerException
        from docker.utils import kwargs_from_env, parse_host
    except ImportError as error:
        raise ConfigError(
            "containers need the docker package: pip install 'agentrl-gym[containers]'"
        ) from error
    try:
        parse_host(os.environ.get("DOCKER_HOST"))
        options = kwargs_from_env()
    except DockerException as error:
        raise ConfigError(
            f"DOCKER_HOST must be unix:///path or tcp://host:port, with the certificates that "
            f"DOCKER_CERT_PATH names: {error}"
        ) from error
    with engine_errors():
        # The package keeps connections by URL, and drops those of the URL that was unused longest,
        # which must not be one that another thread is about to use.
        client = DockerClient(timeout=int(timeout_s), num_pools=2 * MAX_CALLS, **options)
        # A URL names one container or command, so a connection that is kept is not used again.
        client.api.headers["Connection"] = "close"
    return client


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Turns the `docker` package's errors into agentrl's.

    Raises:
        EngineError: the engine refused.
        EnvUnavailable: it does not answer.
    """
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except APIError as error:
        reason = " ".join(str(error.explanation or error).split())[:300]
        raise EngineError(f"Docker engine: {reason}", error.status_code or 500) from error
    except (DockerException, RequestException, HTTPError, OSError) as error:
        host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvUnavailable(
            f"no Docker engine answers at {host} ({reason}): start one (`dockerd`, or `systemctl "
            "start docker`), let this user reach its socket, or name another in DOCKER_HOST"
        ) from error


class Engine:
    """One engine for event loops: a client that connects at the first call, and its threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_CALLS, "docker")
        self._connecting = threading.Lock()
        self._client: DockerClient | None = None
        self._undoing: set[Future[Any]] = set()

    async def call(
        self,
        function: Callable[[DockerClient], T],
        *,
        undo: Callable[[DockerClient, T], Any] | None = None,
    ) -> T:
        """Calls `function` with the client in a thread and returns its result.

        Args:
            undo: called in a thread with the client and the result, where the caller was cancelled
                before that came.

        Raises:
            EngineError: the engine refused.
            EnvUnavailable: it does not answer.
            ConfigError: the `docker` package is missing or DOCKER_HOST can't be read.
        """
        future = self._threads.submit(self._call, function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                undoing = self._threads.submit(
                    self._call, lambda client: undo(client, future.result())
                )
                self._undoing.add(undoing)
                undoing.add_done_callback(self._undoing.discard)
            raise

    async def settle(self, timeout_s: float = 30.0) -> None:
        """Wait until what cancelled callers asked for is undone."""
        undoing = [asyncio.wrap_future(each) for each in list(self._undoing)]
        if undoing:
            done = asyncio.gather(*undoing, return_exceptions=True)
            await asyncio.wait([done], timeout=timeout_s)

    def _call(self, function: Callable[[DockerClient], T]) -> T:
        with self._connecting:
            if self._client is None:
                self._client = connect()
        with engine_errors():
            return function(self._client)


def remove(client: DockerClient, container_id: str) -> None:
    """Kill and remove a container; it may be gone, or going, already."""
    from docker.errors import APIError

    try:
        try:
            client.api.remove_container(container_id, force=True, v=True)
        except APIError as error:
            if error.status_code != 409:
                raise
            # The engine is removing it: it ended a moment ago.
            client.api.wait(container_id, condition="removed")
    except APIError as error:
        if error.status_code != 404:
            raise


def reap(client: DockerClient, *, label: str = OWNER_LABEL, everything: bool = False) -> list[str]:
    """Remove containers of agentrl's whose owner is gone; a line about each.

    Args:
        label: only those that have it, `NAME` or `NAME=VALUE`.
        everything: also those whose owner lives or cannot be seen.

    Raises:
        EnvError: the engine failed or does not answer.
    """
    removed = []
    with engine_errors():
        for summary in client.api.containers(all=True, filters={"label": label}):
            its_labels: dict[str, str] = summary["Labels"]
            reason = "asked for" if everything else abandoned(its_labels, time.time())
            if reason is not None:
                remove(client, summary["Id"])
                removed.append(
                    f"{summary['Id'][:12]} {its_labels.get(ROLE_LABEL, '?')} "
                    f"{its_labels.get(RUN_LABEL, '?')}: {reason}"
                )
    return removed


@dataclass(slots=True, frozen=True)
class Owner:
    """A process, named so that the name is never reused."""

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int
    """When it started, in clock ticks since boot."""

    def __str__(self) -> str:
        return f"{self.boot_id}/{self.pid_namespace}/{self.pid}/{self.start_ticks}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The owner whose `str` this is; None if it is none's."""
        parts = text.split("/")
        if len(parts) != 4 or not parts[2].isdigit() or not parts[3].isdigit():
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    def alive(self) -> bool | None:
        """Tells whether the process runs; None: it can't be seen from here."""
        if self.boot_id != _boot_id():
            # Another boot of this host is over; another host's engine can't be told from it.
            return None
        if self.pid_namespace != _pid_namespace():
            return None
        return _start_ticks(self.pid) == self.start_ticks


def current_owner() -> Owner:
    """This process."""
    pid = os.getpid()
    return Owner(_boot_id(), _pid_namespace(), pid, _start_ticks(pid) or 0)


def labels(
    run_id: str, role: str, *, owner: Owner | None = None, life_s: float | None = MAX_LIFE_S
) -> dict[str, str]:
    """Labels of a container that this process (or `owner`) answers for.

    Args:
        run_id: names the rollout, grading or image it belongs to.
        role: what it is for: `episode`, `server`, `check`, `agent`, `grade` or `build`.
        life_s: after which it is abandoned; None: never while its owner may be alive.
    """
    made = {
        OWNER_LABEL: str(owner or current_owner()),
        ROLE_LABEL: role,
        RUN_LABEL: run_id,
    }
    return made if life_s is None else made | {EXPIRES_LABEL: str(int(time.time() + life_s))}


def abandoned(its_labels: dict[str, str], now: float) -> str | None:
    """Why a container with these labels has nobody any more; None: it may have."""
    owner = Owner.parse(its_labels.get(OWNER_LABEL, ""))
    alive = owner.alive() if owner else None
    if alive is False:
        return f"its owner, process {owner.pid}, is gone" if owner else None
    expires = its_labels.get(EXPIRES_LABEL, "")
    if expires.isdigit() and now > int(expires):
        return "its maximal life is over"
    return None


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def _pid_namespace() -> str:
    """Inode of the process-id namespace; a process does not change its own."""
    return os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")


def _start_ticks(pid: int) -> int | None:
    """None: there is no such process, or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, the name in parentheses, may hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
