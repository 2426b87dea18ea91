"""The Docker engine: how it is reached, and the labels by which a container's owner is known.

An owner is a process: host boot, process-id namespace, process id and start time name it for good,
so that a reused process id is never taken for it. Whoever can see the same process ids can tell
whether the owner lives; to all others the label `agentrl.expires` says when a container is
abandoned.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl.errors import ConfigError, EnvUnavailable

if TYPE_CHECKING:
    import docker

OWNER_LABEL = "agentrl.owner"
ROLE_LABEL = "agentrl.role"
RUN_LABEL = "agentrl.run"
EXPIRES_LABEL = "agentrl.expires"

MAX_LIFE_S = 6 * 3600
"""A container is abandoned after this long, whatever became of its owner."""

DEFAULT_HOST = "unix:///var/run/docker.sock"
_REMEDY = (
    "start one (`dockerd`, or `systemctl start docker`), let this user reach its socket, or name "
    "another in DOCKER_HOST"
)


def connect(timeout_s: float = 60.0) -> docker.DockerClient:
    """A client of the engine that DOCKER_HOST names (by default the local socket).

    `timeout_s` is for each answer of the engine.

    Raises:
        ConfigError: the `docker` package is missing or DOCKER_HOST can't be read.
        EnvUnavailable: no engine answers there. (An `EnvError`, and retryable.)
    """
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise ConfigError(
            "SWE-bench needs the docker package: pip install 'agentrl[swebench]'"
        ) from error
    host = engine_host()
    try:
        client = docker.from_env(timeout=int(timeout_s), version="auto")
        client.ping()
    except (DockerException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EnvUnavailable(f"no Docker engine answers at {host} ({reason}): {_REMEDY}") from error
    return client


def engine_host() -> str:
    """The engine's address, `unix:///path` or `tcp://host:port`.

    Raises:
        ConfigError: DOCKER_HOST is neither.
    """
    host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    parts = urlsplit(host)
    if (parts.scheme == "unix" and parts.path) or (parts.scheme == "tcp" and parts.hostname):
        return host
    raise ConfigError(f"DOCKER_HOST={host} must be unix:///path or tcp://host:port")


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
        """Whether the process runs; None: it can't be seen from here."""
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


def labels(run_id: str, role: str, *, owner: Owner | None = None) -> dict[str, str]:
    """Labels of a container that this process (or `owner`) answers for.

    Args:
        run_id: names the rollout or grading it belongs to.
        role: `agent`, `grade`, `build`.
    """
    return {
        OWNER_LABEL: str(owner or current_owner()),
        ROLE_LABEL: role,
        RUN_LABEL: run_id,
        EXPIRES_LABEL: str(int(time.time()) + MAX_LIFE_S),
    }


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
