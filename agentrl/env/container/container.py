"""Runs a container for an episode, hardened and limited, that ends with the process that made it.

A container's first process is a shell that waits for the end of its input. The engine closes that
input when the process that made the container is gone, so a container outlives its owner by about
a second, however the owner ended. The shell also adopts and reaps orphans. No signal from inside
the container ends it, so `kill -9 -1` kills the agent's processes only.

Each command runs as a process of its own. It is over when its shell ends, even if processes are
left in the background; at its deadline everything but the first process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import re
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, Self

from agentrl.env.container.box import MAX_STREAM_BYTES, Box, CommandResult, ProgramResult, Sink
from agentrl.env.container.engine import (
    MAX_LIFE_S,
    Engine,
    EngineError,
    ImageMissing,
    is_podman,
    labels,
    remove,
)
from agentrl.env.container.output import take_frames
from agentrl.env.container.system_calls import seccomp_options
from agentrl.errors import EnvError

if TYPE_CHECKING:
    from docker import DockerClient

MAX_COMMAND_CHARS = 60_000
"""Longest command: Linux limits an argument of a process to 131,072 bytes."""
_MAX_FILE_BYTES = 4 << 30
_KILL_TIMEOUT_S = 20.0
_QUIET_POLL_S = 1.0

# Inside a container, signals reach the first process only if it handles them, so it ignores all
# those that bash handles. `read` returns 1 at the end of the input and more than 128 when its time
# is up; each round also reaps exited processes. A line on the input, which the agent could write,
# has no effect.
_FIRST_PROCESS = (
    "trap '' HUP INT QUIT ILL TRAP ABRT BUS FPE SEGV SYS PIPE ALRM TERM XCPU XFSZ VTALRM "
    "USR1 USR2; "
    "while [ $SECONDS -lt {life_s} ]; do read -r -t 1; [ $? -eq 1 ] && exit 0; done; exit 0"
)

_FIRST_USER = "65533:65533"

# The docker package loses output that a command writes before the package has read the head of the
# engine's answer. So each command first waits for a byte, which is sent after that.
_SHELL = ["/bin/bash", "-p", "-c"]
_WAIT = 'read -r -N 1 || exit; exec </dev/null; exec "$@"'

_OOM_FILES = "cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events"


@dataclass(slots=True, frozen=True)
class ContainerSpec:
    """The image of a container and its limits.

    Containers have no mounts: no file of the host, and never the engine's socket, is inside one.
    """

    image: str
    """A local image that has /bin/bash."""
    workdir: str = "/tmp"
    """Folder in which commands start; it must be in the image or in `tmpfs`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of commands, in addition to the image's own."""
    user: str = "10001:10001"
    """User and group of commands. The first process has another user, so that not even a root user
    without capabilities can trace it or write to its memory."""
    read_only: bool = True
    """Allow writing only to the folders in `tmpfs`."""
    tmpfs: tuple[str, ...] = ("/tmp",)
    """Folders kept in memory; their content counts towards `memory_mb`."""
    network: str = "none"
    """One of the engine's networks. With any but `none`, agents can reach whatever it reaches."""
    capabilities: tuple[str, ...] = ()
    """Capabilities that the container keeps; all others are dropped."""
    new_privileges: bool = False
    """Allow programs such as `sudo` to gain the container's capabilities."""
    memory_mb: int = 1024
    """Limit in MiB, swap included."""
    cpus: float = 1.0
    """Cores; fractions are allowed."""
    max_processes: int = 256
    """Limit of processes and threads together."""
    disk_mb: int | None = None
    """Limit in MB on files written outside `tmpfs`; None: no limit. The engine must store on btrfs
    (where the image counts too), on zfs, or with overlay2 on xfs mounted with pquota."""
    life_s: int = MAX_LIFE_S
    """Seconds after which the container ends by itself."""


def describe(ran: CommandResult, spec: ContainerSpec, timeout_s: float) -> str:
    """Returns what an agent is shown of a command's result: the output, and how it ended."""
    killed = "every process in the container was killed"
    if ran.timed_out:
        end = f"stopped after {timeout_s:g} seconds; {killed}"
    elif ran.flooded:
        end = f"stopped because it wrote more than {MAX_STREAM_BYTES >> 20} MiB; {killed}"
    else:
        end = f"exit code {ran.exit_code}"
    if ran.out_of_memory:
        end += f"; a process was killed for want of memory ({spec.memory_mb} MiB)"
    separator = "" if not ran.output or ran.output.endswith("\n") else "\n"
    return f"{ran.output}{separator}[{end}]"


class ContainerGone(EnvError):
    """The container ended during an episode: the engine, or somebody else, removed it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="container_gone")


class Container(Box):
    """A running container: `create` starts one and `remove` ends it."""

    def __init__(self, engine: Engine, container_id: str, lease: Any, spec: ContainerSpec) -> None:
        self.id = container_id
        self.spec = spec
        self.started = time.monotonic()
        self._engine = engine
        self._lease = lease
        self._oom_kills = 0

    @classmethod
    async def create(
        cls,
        engine: Engine,
        spec: ContainerSpec,
        container_labels: dict[str, str] | None = None,
    ) -> Self:
        """Starts a container of a local image, which the caller must remove.

        Args:
            container_labels: from `labels`; by default those of an episode.

        Raises:
            ImageMissing: there is no such image.
            EnvError: the engine refused, such as for a missing network, or does not answer. No
                container is left behind.
        """

        its_labels = container_labels or labels("environment", "episode")

        def start(client: DockerClient) -> tuple[str, Any]:
            container_id = client.containers.create(**_arguments(client, spec, its_labels)).id or ""
            lease = None
            try:
                # It was created with StdinOnce, so it reads the end of its input when this
                # connection closes, which also happens when this process is killed.
                lease = client.api.attach_socket(container_id, params={"stdin": 1, "stream": 1})
                client.api.start(container_id)
            except BaseException:
                end(client, (container_id, lease))
                raise
            return container_id, lease

        def end(client: DockerClient, started: tuple[str, Any]) -> None:
            container_id, lease = started
            if lease is not None:
                _close(lease)
            remove(client, container_id)

        try:
            container_id, lease = await engine.call(start, undo=end)
        except EngineError as error:
            if spec.disk_mb and "storage-opt" in str(error):
                raise EnvError(
                    f"disk_mb = {spec.disk_mb} is more than this engine can do ({error}): remove "
                    "disk_mb, or let the engine store on btrfs, zfs, or xfs mounted with pquota",
                    code="no_disk_quota",
                ) from error
            # 404 is also the status of a missing network, which the engine's own message names.
            if error.engine_status != 404 or re.search(r"network .* not found", str(error)):
                raise
            raise ImageMissing(
                f"image {spec.image} is not on the Docker engine: `docker pull {spec.image}`"
            ) from error
        return cls(engine, container_id, lease, spec)

    @property
    def workdir(self) -> str:
        """Folder in which programs start."""
        return self.spec.workdir

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables of an agent's commands."""
        return self.spec.environment

    async def run(
        self, command: str, *, timeout_s: float, max_chars: int = 10_000
    ) -> CommandResult:
        """As `Box.run`; also tells whether the container's memory ran out."""
        ran = await super().run(command, timeout_s=timeout_s, max_chars=max_chars)
        # 137 means that the shell's last process was killed; for others it prints "Killed".
        if ran.exit_code == 137 or "Killed" in ran.output[-2000:]:
            count = await self._count_oom_kills()
            if count > self._oom_kills:
                self._oom_kills = count
                ran = replace(ran, out_of_memory=True)
        return ran

    async def execute(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_bytes: int = MAX_STREAM_BYTES,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        add: Sink | None = None,
    ) -> ProgramResult:
        """As `Box.execute`."""
        kept, cancelled = {1: bytearray(), 2: bytearray()}, threading.Event()
        take = add or (lambda kind, payload: kept[kind].extend(payload))
        options = {
            "cmd": [*_SHELL, _WAIT, "bash", *argv],
            "environment": dict(environment or {}),
            "user": user or self.spec.user,
        }
        try:
            ended = await self.call(
                lambda client: self._attend(client, options, take, timeout_s, max_bytes, cancelled)
            )
        except asyncio.CancelledError:
            cancelled.set()
            raise
        errors = kept[2].decode(errors="replace").strip()
        return replace(ended, output=bytes(kept[1]), errors=errors)

    async def put(self, archive: bytes | IO[bytes], folder: str = "/") -> None:
        """As `Box.put`."""
        await self.call(lambda client: client.api.put_archive(self.id, folder, archive))

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """As `Box.get`; the engine reads the file, and no program in the container."""
        path = posixpath.join(self.workdir, path)

        def read(client: DockerClient) -> bytes | None:
            with archive_of(client, self.id, path) as archive:
                member = archive.next() if archive is not None else None
                if archive is None or member is None or not member.isreg():
                    return None
                file = archive.extractfile(member)
                return file.read() if file is not None and member.size <= max_bytes else None

        return await self.call(read)

    async def changes(self) -> dict[str, int]:
        """Returns what differs from the image, as the engine lists it: 0 by path for a changed
        file, 1 for an added and 2 for a deleted one.

        Raises:
            EnvError: the container or the engine failed.
        """
        found = await self.call(lambda client: client.api.diff(self.id)) or []
        return {each["Path"]: each["Kind"] for each in found}

    async def alive(self) -> bool:
        """Returns True if the container is running.

        Raises:
            EnvError: the engine failed.
        """
        try:
            state = await self.call(lambda client: client.api.inspect_container(self.id))
        except ContainerGone:
            return False
        return bool(state["State"]["Running"])

    async def processes(self) -> list[str]:
        """Returns the command lines of all processes but the first, as the host sees them.

        Raises:
            ContainerGone: the container has ended.
            EnvError: the engine failed.
        """

        def top(client: DockerClient) -> list[list[str]]:
            # With options Podman runs ps inside the container, where a sweep kills it.
            columns = "pid,args" if is_podman(client) else "-eo pid,args"
            return client.api.top(self.id, columns)["Processes"]

        return [" ".join(row[1:]) for row in await self.call(top)][1:]

    async def sweep(self) -> None:
        """Kills everything but the first process.

        Raises:
            ContainerGone: the container has ended, or a process could not be killed, so that the
                container was removed.
            EnvError: the engine failed.
        """
        left = []
        for attempt in range(4):
            with contextlib.suppress(EngineError):
                await self._engine.call(lambda client, n=attempt: self._kill_all(client, n))
            left = await self.processes()
            if not left:
                return
            await asyncio.sleep(0.2)
        await self.remove()
        raise ContainerGone(
            f"container {self.id[:12]} was removed, because {len(left)} processes of the agent "
            f"could not be killed: {left[:3]}"
        )

    async def end(self) -> None:
        """Removes the container even if this call is cancelled, and tries again if that fails."""
        try:
            await asyncio.shield(self.remove())
        except EnvError:
            # Its input is closed, so it ends by itself. An engine's failure must not fail the work.
            with contextlib.suppress(EnvError):
                await self.remove()

    async def remove(self) -> None:
        """Kills and removes the container. May be called more than once.

        Raises:
            EnvError: the engine failed.
        """
        _close(self._lease)
        await self._engine.call(lambda client: remove(client, self.id))

    def _attend(
        self,
        client: DockerClient,
        options: Mapping[str, Any],
        add: Sink,
        timeout_s: float,
        max_bytes: int,
        cancelled: threading.Event,
    ) -> ProgramResult:
        """Runs a program and reads its output until it ends, its time is up, it wrote more than
        `max_bytes`, or `cancelled` is set. Blocks; the result has no output."""
        started = time.monotonic()
        exec_id: str = client.api.exec_create(
            self.id, stdin=True, workdir=self.spec.workdir, **options
        )["Id"]

        def ended(exit_code: int | None = None, *, flooded: bool = False) -> ProgramResult:
            timed_out = exit_code is None and not flooded
            seconds = time.monotonic() - started
            return ProgramResult(b"", "", exit_code, timed_out, flooded, seconds)

        stream = client.api.exec_start(exec_id, socket=True)
        try:
            connection = _connection(stream)
            connection.sendall(b"\n")
            buffer = bytearray()
            num_bytes = 0
            has_ended = False
            while True:
                left_s = started + timeout_s - time.monotonic()
                if left_s <= 0 or cancelled.is_set():
                    return ended()
                connection.settimeout(min(left_s, _QUIET_POLL_S))
                try:
                    chunk = connection.recv(1 << 16)
                except TimeoutError:
                    # A process left in the background may hold the output open. Output that the
                    # command wrote before it ended may still be in transit, so wait twice.
                    if has_ended:
                        break
                    has_ended = not client.api.exec_inspect(exec_id)["Running"]
                    continue
                if not chunk:
                    break
                buffer += chunk
                for kind, payload in take_frames(buffer):
                    add(kind, payload)
                    num_bytes += len(payload)
                if num_bytes > max_bytes:
                    return ended(flooded=True)
        finally:
            _close(stream)
        # The output may end shortly before the engine records the exit, and a command that closed
        # its own output runs on.
        while (state := client.api.exec_inspect(exec_id))["Running"]:
            if time.monotonic() - started > timeout_s or cancelled.is_set():
                return ended()
            time.sleep(0.02)
        if state["ExitCode"] is None:
            raise ContainerGone(f"container {self.id[:12]} ended during a command")
        return ended(state["ExitCode"])

    def _kill_all(self, client: DockerClient, attempt: int) -> None:
        api = client.api
        if attempt:
            # The agent's processes may be so many that the limit leaves no room for one more.
            limit = {"PidsLimit": self.spec.max_processes + 16 * attempt}
            api.post(f"{api.base_url}/v{api.api_version}/containers/{self.id}/update", json=limit)
        # `kill -9 -1` spares the calling shell and the first process; no fork can escape it.
        exec_id = api.exec_create(self.id, [*_SHELL, "kill -9 -1; exit 0"], user=self.spec.user)[
            "Id"
        ]
        api.exec_start(exec_id, detach=True)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while api.exec_inspect(exec_id)["Running"] and time.monotonic() < deadline:
            time.sleep(0.02)

    async def _count_oom_kills(self) -> int:
        wrote = await self.script(_OOM_FILES, timeout_s=10)
        counts = re.findall(rb"^oom_kill (\d+)$", wrote.output, re.MULTILINE)
        return max(map(int, counts), default=0)

    async def call(self, function: Callable[[DockerClient], Any]) -> Any:
        """Calls `function` with the engine's client in a thread and returns its result.

        Raises:
            ContainerGone: the engine has no such container, or it is not running.
            EnvError: the engine failed.
        """
        try:
            return await self._engine.call(function)
        except EngineError as error:
            # For a command, 404 and 409 mean that the container was removed or is not running.
            if error.engine_status in (404, 409):
                raise ContainerGone(f"container {self.id[:12]} has ended ({error})") from error
            raise


def hardened(
    client: DockerClient, *, memory: int | str, cpus: float, max_processes: int
) -> dict[str, Any]:
    """Returns arguments for `client.containers.create` that drop all capabilities and every way to
    regain them, make the file system read-only, and limit system calls and resources.

    Args:
        memory: in bytes, or as text that the engine reads, such as `2g`; swap included.
        cpus: cores; fractions are allowed.
    """
    return {
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", *seccomp_options(client)],
        "mem_limit": memory,
        "memswap_limit": memory,
        # As a quota of time: the engine refuses a number of cores above its machine's.
        "cpu_period": 100_000,
        "cpu_quota": int(cpus * 100_000),
        "pids_limit": max_processes,
    }


def _arguments(
    client: DockerClient, spec: ContainerSpec, container_labels: dict[str, str]
) -> dict[str, Any]:
    from docker.types import LogConfig, Ulimit

    memory = spec.memory_mb << 20
    limits = hardened(client, memory=memory, cpus=spec.cpus, max_processes=spec.max_processes)
    sys_admin = "SYS_ADMIN" in spec.capabilities
    return limits | {
        "security_opt": [
            *(() if spec.new_privileges else ("no-new-privileges",)),
            *seccomp_options(client, sys_admin=sys_admin),
        ],
        "image": spec.image,
        "entrypoint": ["/bin/bash", "-c", _FIRST_PROCESS.format(life_s=spec.life_s)],
        "user": _FIRST_USER,
        "working_dir": spec.workdir,
        "labels": container_labels,
        "healthcheck": {"test": ["NONE"]},
        "stdin_open": True,
        "auto_remove": True,
        "network_mode": spec.network,
        "read_only": spec.read_only,
        "tmpfs": dict.fromkeys(spec.tmpfs, f"rw,exec,nosuid,nodev,size={memory // 2}"),
        "cap_add": list(spec.capabilities),
        "storage_opt": {"size": f"{spec.disk_mb}M"} if spec.disk_mb else None,
        "log_config": LogConfig(type="none"),
        "ulimits": [
            Ulimit(name="fsize", soft=_MAX_FILE_BYTES, hard=_MAX_FILE_BYTES),
            Ulimit(name="core", soft=0, hard=0),
        ],
    }


def packed(files: Mapping[str, bytes], *, mode: int = 0o644) -> bytes:
    """Returns a tar archive of files by their paths, relative to where it is unpacked."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(content), mode, int(time.time())
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


@contextlib.contextmanager
def archive_of(
    client: DockerClient, container_id: str, path: str
) -> Iterator[tarfile.TarFile | None]:
    """Yields a container's path as a streamed tar archive; None if there is nothing at the path."""
    from docker.errors import NotFound

    try:
        chunks, _ = client.api.get_archive(container_id, path)
    except NotFound as error:
        if "such container" in str(error).lower():
            raise
        yield None
        return
    with contextlib.closing(chunks), tarfile.open(fileobj=_Chunks(chunks), mode="r|") as archive:
        yield archive


class _Chunks(io.RawIOBase):
    """Presents an iterator of bytes as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int = sys.maxsize) -> bytes:
        while len(self._rest) < size and (chunk := next(self._chunks, None)) is not None:
            self._rest += chunk
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _connection(stream: Any) -> Any:
    """Returns the socket inside the docker package's wrapper, which itself can only be read."""
    return getattr(stream, "_sock", stream)


def _close(stream: Any) -> None:
    connection = _connection(stream)
    if connection is not None:  # None after an earlier call
        connection.close()  # the descriptor is closed once both are
    stream.close()
