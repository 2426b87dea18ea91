"""Connects to the Docker engine, and labels containers with the process that owns them.

The client is the `docker` package. Its calls block, so an event loop makes them through `Engine`,
in threads.

The owner of a container is a process, named so that a reused process id is never mistaken for it
(`owner_name`). A process that sees the same process ids can tell whether the owner is alive; for
all others the label `agentrl.expires` gives the time after which a container is abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.errors import ConfigError, EnvError, EnvUnavailable

if TYPE_CHECKING:
    from docker import DockerClient

T = TypeVar("T")

logger = logging.getLogger("agentrl.env")

OWNER_LABEL = "agentrl.owner"
ROLE_LABEL = "agentrl.role"
RUN_LABEL = "agentrl.run"
EXPIRES_LABEL = "agentrl.expires"

MAX_LIFE_S = 6 * 3600
"""Default lifetime of a container in seconds. After it a container counts as abandoned, even if its
owner is alive."""

CALL_TIMEOUT_S = 120.0
"""Seconds in which the engine must answer a call."""
MAX_CALLS = 512
"""Most calls of one `Engine` at a time; a running command counts as one. Further calls wait."""


class EngineError(EnvError):
    """The engine refused a call; `engine_status` is the HTTP status of its answer."""

    def __init__(self, message: str, engine_status: int) -> None:
        super().__init__(message, code="engine_error")
        self.engine_status = engine_status


class ImageMissing(EnvError):
    """An image is not on the engine."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="image_missing")


def connect(timeout_s: float = CALL_TIMEOUT_S) -> DockerClient:
    """Returns a client of the engine that DOCKER_HOST names, by default the local socket.

    Args:
        timeout_s: seconds in which the engine must answer each call.

    Raises:
        ConfigError: the `docker` package is missing or DOCKER_HOST is malformed.
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
            f"DOCKER_HOST must be unix:///path or tcp://host:port, with certificates in the folder "
            f"DOCKER_CERT_PATH if it needs them: {error}"
        ) from error
    with engine_errors():
        # The package keeps a pool of connections per URL and drops the least recently used pool.
        # There must be enough pools that it never drops one that another thread is about to use.
        client = DockerClient(timeout=int(timeout_s), num_pools=2 * MAX_CALLS, **options)
        # Most URLs are specific to one container or command, so kept connections are not reused.
        client.api.headers["Connection"] = "close"
    return client


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Converts the `docker` package's errors, raised inside the context, into agentrl's.

    Raises:
        EngineError: the engine refused a call.
        EnvUnavailable: the engine does not answer.
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
            "start docker`), give this user access to its socket, or set DOCKER_HOST to another"
        ) from error


class Engine:
    """Calls the engine from event loops: a client that connects at the first call, and threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_CALLS, "docker")
        self._connecting = threading.Lock()
        self._client: DockerClient | None = None

    async def call(
        self,
        function: Callable[[DockerClient], T],
        *,
        undo: Callable[[DockerClient, T], Any] | None = None,
    ) -> T:
        """Calls `function` with the client in a thread and returns its result.

        Args:
            undo: called in a thread with the client and the result, if the caller was cancelled
                before the result came.

        Raises:
            EngineError: the engine refused a call.
            EnvUnavailable: the engine does not answer.
            ConfigError: the `docker` package is missing or DOCKER_HOST is malformed.
        """
        future = self._threads.submit(self._call, function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                # The interpreter waits for these threads at its end.
                self._threads.submit(self._call, lambda client: undo(client, future.result()))
            raise

    def _call(self, function: Callable[[DockerClient], T]) -> T:
        with self._connecting:
            if self._client is None:
                self._client = connect()
        with engine_errors():
            return function(self._client)


def is_podman(client: DockerClient) -> bool:
    """Returns True if the engine is Podman, behind its socket."""
    components = client.version().get("Components") or []
    return any("podman" in str(each.get("Name")).lower() for each in components)


def remove(client: DockerClient, container_id: str) -> None:
    """Kills and removes a container, which may be gone already or about to be."""
    from docker.errors import APIError

    try:
        try:
            client.api.remove_container(container_id, force=True, v=True)
        except APIError as error:
            if error.status_code != 409:
                raise
            # It has just ended, and the engine is removing it.
            client.api.wait(container_id, condition="removed")
    except APIError as error:
        if error.status_code != 404:
            raise


def reap(client: DockerClient, *, everything: bool = False) -> list[str]:
    """Removes agentrl's abandoned containers, and returns a line about each.

    Args:
        everything: also remove containers whose owner is alive or cannot be seen.

    Raises:
        EnvError: the engine failed or does not answer.
    """
    removed = []
    with engine_errors():
        for summary in client.api.containers(all=True, filters={"label": OWNER_LABEL}):
            its_labels: dict[str, str] = summary["Labels"]
            reason = "as requested" if everything else abandoned(its_labels, time.time())
            if reason is not None:
                remove(client, summary["Id"])
                removed.append(
                    f"{summary['Id'][:12]} {its_labels.get(ROLE_LABEL, '?')} "
                    f"{its_labels.get(RUN_LABEL, '?')}: {reason}"
                )
    return removed


def reap_abandoned(timeout_s: float | None = None) -> None:
    """Removes the containers that killed processes left, for the start of what makes containers.

    Containers of a process that is killed end by themselves if their first process watches its
    input (`container.py`); the rest are removed here, by their owner's end or their lifetime.

    Args:
        timeout_s: seconds in which the engine must answer each call; None: the default.

    Raises:
        ConfigError: the `docker` package is missing or DOCKER_HOST is malformed.
        EnvUnavailable: no engine answers.
    """
    client = connect() if timeout_s is None else connect(timeout_s)
    try:
        for line in reap(client):
            logger.info("removed an abandoned container: %s", line)
    finally:
        client.close()


def owner_name(pid: int) -> str:
    """Returns the name of a process, which no other one will ever have: the host's boot, the
    process-id namespace, the process id and the start time in clock ticks since boot."""
    return f"{_boot_id()}/{_pid_namespace()}/{pid}/{_start_ticks(pid)}"


def current_owner() -> str:
    """Returns the name of this process."""
    return owner_name(os.getpid())


def labels(
    run_id: str, role: str, *, owner: str | None = None, life_s: float | None = MAX_LIFE_S
) -> dict[str, str]:
    """Returns the labels of a container that this process owns.

    Args:
        run_id: name of the rollout, grading or image that it belongs to.
        role: its purpose: `episode`, `server`, `agent`, `grade` or `build`.
        owner: name of the process that owns it, if another.
        life_s: seconds after which it is abandoned even if its owner is alive; None: only when its
            owner is gone.
    """
    made = {
        OWNER_LABEL: owner or current_owner(),
        ROLE_LABEL: role,
        RUN_LABEL: run_id,
    }
    return made if life_s is None else made | {EXPIRES_LABEL: str(int(time.time() + life_s))}


def abandoned(its_labels: dict[str, str], now: float) -> str | None:
    """Returns why a container with these labels is abandoned; None if it may still be in use.

    Args:
        now: seconds since the epoch.
    """
    name = its_labels.get(OWNER_LABEL, "")
    place, _, pid = name.rpartition("/")[0].rpartition("/")
    # Another boot may be another host, and of another namespace no process can be seen from here.
    is_here = place == f"{_boot_id()}/{_pid_namespace()}"
    if is_here and pid.isdigit() and name != owner_name(int(pid)):
        return f"its owner, process {pid}, is gone"
    expires = its_labels.get(EXPIRES_LABEL, "")
    if expires.isdigit() and now > int(expires):
        return "its lifetime is over"
    return None


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def _pid_namespace() -> str:
    """Returns the inode of the process-id namespace, which a process cannot change for itself."""
    return os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")


def _start_ticks(pid: int) -> int | None:
    """Returns when a process started; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, the name in parentheses, may itself contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
