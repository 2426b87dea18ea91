"""The Docker engine: its HTTP interface on the event loop, and the labels that name an owner.

No thread waits for a command: those of agents run for minutes and by the dozen.

An owner is a process: host boot, process-id namespace, process id and start time name it for good,
so that a reused process id is never taken for it. Whoever can see the same process ids can tell
whether the owner lives; to all others the label `agentrl.expires` says when a container is
abandoned.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentrl.errors import ConfigError, EnvError, EnvUnavailable

OWNER_LABEL = "agentrl.owner"
ROLE_LABEL = "agentrl.role"
RUN_LABEL = "agentrl.run"
EXPIRES_LABEL = "agentrl.expires"

MAX_LIFE_S = 6 * 3600
"""A container is abandoned after this long, whatever became of its owner."""

DEFAULT_HOST = "unix:///var/run/docker.sock"
CALL_TIMEOUT_S = 120.0


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


class EngineError(EnvError):
    """The engine refused a call; `engine_status` is its HTTP status."""

    def __init__(self, message: str, engine_status: int) -> None:
        super().__init__(message, code="engine_error")
        self.engine_status = engine_status


class EngineAPI:
    """One engine, for one event loop."""

    def __init__(self) -> None:
        """
        Raises:
            ConfigError: DOCKER_HOST can't be read.
        """
        self._host = engine_host()
        parts = urlsplit(self._host)
        self._tls = _tls() if parts.scheme == "tcp" else None
        if parts.scheme == "unix":
            self._base = "http://docker"
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(path=parts.path, limit=0)
        else:
            self._base = (
                f"{'https' if self._tls else 'http'}://{parts.hostname}:{parts.port or 2375}"
            )
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
        )

    async def aclose(self) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """The decoded reply; None where it is empty. `body` is sent as JSON, or as it is if bytes.

        Raises:
            EngineError: the engine refused.
            EnvUnavailable: it does not answer, or not in time.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open(method, path, body, query) as response,
            ):
                content = await response.read()
        except TimeoutError as error:
            raise EnvUnavailable(
                f"the Docker engine at {self._host} did not answer {method} {path} within "
                f"{timeout_s:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise self._unavailable(error) from error
        return json.loads(content) if content else None

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of a POST's reply while it grows.

        Raises:
            EngineError: the engine refused.
            EnvUnavailable: it does not answer.
        """
        try:
            async with self._open("POST", path, body, None) as response:
                try:
                    yield response.content
                finally:
                    response.close()  # the connection is the stream's; it is not used again
        except aiohttp.ClientError as error:
            raise self._unavailable(error) from error

    async def hold_stdin(self, container_id: str) -> asyncio.StreamWriter:
        """Attach to a container's input and hold it open. Made with StdinOnce, the container reads
        the end of its input when the writer is closed, by whatever ends this process too.

        Raises:
            EngineError: the engine refused.
            EnvUnavailable: it does not answer.
        """
        parts = urlsplit(self._host)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if parts.scheme == "unix":
                    reader, writer = await asyncio.open_unix_connection(parts.path)
                else:
                    reader, writer = await asyncio.open_connection(
                        parts.hostname, parts.port or 2375, ssl=self._tls
                    )
                writer.write(
                    f"POST /containers/{container_id}/attach?stream=1&stdin=1 HTTP/1.1\r\n"
                    "Host: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                    "Content-Length: 0\r\n\r\n".encode()
                )
                head = await reader.readuntil(b"\r\n\r\n")
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise self._unavailable(error) from error
        status = int(head.split(b" ", 2)[1])
        if status not in (101, 200):
            writer.close()
            raise EngineError(f"the engine refused to attach to {container_id[:12]}", status)
        return writer

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.request(
            method,
            self._base + path,
            json=None if isinstance(body, bytes) else body,
            data=body if isinstance(body, bytes) else None,
            params=query,
        ) as response:
            if response.status >= 400:
                text = (await response.content.read(10_000)).decode(errors="replace")
                with suppress(ValueError, KeyError, TypeError):
                    text = str(json.loads(text)["message"])
                reason = " ".join(text.split())[:300]
                raise EngineError(f"Docker engine: {reason}", response.status)
            yield response

    def _unavailable(self, error: Exception) -> EnvUnavailable:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return EnvUnavailable(f"no Docker engine answers at {self._host}: {reason}")


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


def _tls() -> ssl.SSLContext | None:
    """What DOCKER_TLS_VERIFY and DOCKER_CERT_PATH ask for, as with the docker command."""
    if not os.environ.get("DOCKER_TLS_VERIFY"):
        return None
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    return context
