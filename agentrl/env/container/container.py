"""A container for an episode: hardened, bounded, and gone when the process that made it is.

A container's first process is a shell that waits for the end of its input, which the engine closes
when the process that made the container is gone: a container outlives its owner by a second,
however that ended. That shell adopts and reaps orphans, and no signal from inside the container
reaches it, so `kill -9 -1` ends the agent's processes alone.

Each command is a process of its own. It ends when its shell does, whatever it left in the
background; at its deadline everything but the first process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from agentrl.env.container.engine import MAX_LIFE_S, Engine, EngineError, ImageMissing, remove
from agentrl.env.container.output import Clip, Streams, take_frames
from agentrl.errors import EnvError

if TYPE_CHECKING:
    from docker import DockerClient

MAX_COMMAND_CHARS = 60_000
"""An argument of a Linux process has at most 131,072 bytes."""
MAX_STREAM_BYTES = 64 << 20
"""A command that writes more is stopped."""
_MAX_FILE_BYTES = 4 << 30
_KILL_TIMEOUT_S = 20.0
_QUIET_POLL_S = 1.0

# From inside, a container's first process gets only signals that it handles, so those that bash
# handles are ignored. `read` gives 1 at the end of the input and more than 128 when its time is up;
# each round also reaps what has exited. A line on the input, which the agent could write, changes
# nothing.
_FIRST_PROCESS = (
    "trap '' HUP INT QUIT ILL TRAP ABRT BUS FPE SEGV SYS PIPE ALRM TERM XCPU XFSZ VTALRM "
    "USR1 USR2; "
    "while [ $SECONDS -lt {life_s} ]; do read -r -t 1; [ $? -eq 1 ] && exit 0; done; exit 0"
)

_FIRST_USER = "65533:65533"

# The docker package loses what a command writes before the package has read the head of the
# engine's answer, so each command first waits for a byte, which is sent after that. (`-p`: the
# agent's BASH_ENV runs in the shell of its command alone.)
_SHELL = ["/bin/bash", "-p", "-c"]
_WAIT = "read -r -N 1 || exit; exec </dev/null; "
# Out of memory, the kernel should take the agent's processes and not the container's first.
_COMMAND = _WAIT + 'echo 1000 > /proc/self/oom_score_adj; exec /bin/bash -c "$1" 2>&1'

_OOM_FILES = "cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events"


@dataclass(slots=True, frozen=True)
class ContainerSpec:
    """The image of containers and their limits. There are no mounts: nothing of the host,
    its engine's socket least of all, is ever in one."""

    image: str
    """Local, with /bin/bash in it."""
    workdir: str = "/tmp"
    """Where commands start; must be in the image or in `tmpfs`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of commands, beside the image's own."""
    user: str = "10001:10001"
    """Of commands. The first process has a user of its own, so that not even root without
    capabilities can trace it or write to its memory."""
    read_only: bool = True
    """Only what `tmpfs` names can be written."""
    tmpfs: tuple[str, ...] = ("/tmp",)
    """Folders in memory; what is in them counts as memory."""
    network: str = "none"
    """A network of the engine's; with any but `none` agents reach what it reaches."""
    capabilities: tuple[str, ...] = ()
    """Given back, after all are dropped."""
    memory_mb: int = 1024
    """Swap included."""
    cpus: float = 1.0
    """Cores, also in part."""
    max_processes: int = 256
    """Threads count as well."""
    disk_mb: int | None = None
    """Of what is written outside `tmpfs`; None: no limit. The engine must store on btrfs, where the
    image counts too, on zfs, or by overlay2 on xfs that is mounted with pquota."""
    life_s: int = MAX_LIFE_S
    """It ends by itself after this long."""


@dataclass(slots=True, frozen=True)
class CommandResult:
    """The result of a command of the agent's."""

    output: str
    """Its output and errors as they came; the middle of a long one is left out."""
    exit_code: int | None
    """None: it was killed at its deadline or for writing too much."""
    num_dropped: int = 0
    """Characters left out of the middle."""
    timed_out: bool = False
    flooded: bool = False
    """It wrote more than MAX_STREAM_BYTES and was killed."""
    out_of_memory: bool = False
    """A process of it was killed by the container's memory limit."""
    seconds: float = 0.0


def describe(ran: CommandResult, spec: ContainerSpec, timeout_s: float) -> str:
    """Returns what an agent is shown of a command: its output and how it ended."""
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


@dataclass(slots=True, frozen=True)
class ScriptResult:
    """The result of a script of agentrl's."""

    output: bytes
    errors: str
    exit_code: int | None
    """None: it was killed."""
    too_long: bool
    """Killed for writing more than `max_bytes`; else for its time."""


class ContainerGone(EnvError):
    """The container ended under a running episode: by the engine or by who can reach it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="container_gone")


class Container:
    """A running container; `create` makes one and `remove` ends it."""

    def __init__(self, engine: Engine, container_id: str, lease: Any, spec: ContainerSpec) -> None:
        self.id = container_id
        self.spec = spec
        self.started = time.monotonic()
        self.on_end: Callable[[], None] | None = None
        """Called once, when `remove` is."""
        self._engine = engine
        self._lease = lease
        self._oom_kills = 0

    @classmethod
    async def create(
        cls, engine: Engine, spec: ContainerSpec, container_labels: dict[str, str]
    ) -> Self:
        """Start a container of a local image.

        Raises:
            ImageMissing: there is no such image.
            EnvError: the engine refused or does not answer; nothing is left behind.
        """

        def start(client: DockerClient) -> tuple[str, Any]:
            container_id = client.containers.create(**_arguments(spec, container_labels)).id or ""
            lease = None
            try:
                # Made with StdinOnce, it reads the end of its input when this connection ends, by
                # whatever ends this process too.
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
                    f"disk_mb = {spec.disk_mb} is more than this engine can do ({error}): leave it "
                    "out, or have the engine store on btrfs, zfs, or xfs mounted with pquota",
                    code="no_disk_quota",
                ) from error
            if error.engine_status != 404:
                raise
            raise ImageMissing(
                f"no image {spec.image} on the Docker engine: `docker pull {spec.image}`"
            ) from error
        return cls(engine, container_id, lease, spec)

    async def run(
        self, command: str, *, timeout_s: float, max_chars: int = 10_000
    ) -> CommandResult:
        """Run a shell command in the working folder, with no input.

        Raises:
            ContainerGone: the container has ended.
            EnvError: the engine failed.
        """
        clip = Clip(max_chars)
        argv = [*_SHELL, _COMMAND, "bash", command]
        ran = await self._execute(argv, self.spec.environment, clip, timeout_s, MAX_STREAM_BYTES)
        output, num_dropped = clip.text()
        ran = replace(ran, output=output, num_dropped=num_dropped)
        # 137: killed. A shell reports so for its last process; others it names in its output.
        if ran.exit_code == 137 or "Killed" in ran.output[-2000:]:
            count = await self._count_oom_kills()
            if count > self._oom_kills:
                self._oom_kills = count
                ran = replace(ran, out_of_memory=True)
        return ran

    async def script(
        self,
        script: str,
        *arguments: str,
        timeout_s: float,
        max_bytes: int = 4 << 20,
        environment: Mapping[str, str] | None = None,
    ) -> ScriptResult:
        """Run a script of agentrl's, outside the agent's environment.

        Args:
            environment: variables of the script; with None, it has no home folder.

        Raises:
            ContainerGone: the container has ended.
            EnvError: the engine failed.
        """
        streams = Streams()
        argv = [*_SHELL, _WAIT + script, "bash", *arguments]
        variables = {"HOME": "/nonexistent"} if environment is None else environment
        ended = await self._execute(argv, variables, streams, timeout_s, max_bytes)
        errors = streams.errors.decode(errors="replace").strip()
        return ScriptResult(bytes(streams.output), errors, ended.exit_code, ended.flooded)

    async def alive(self) -> bool:
        """Tells whether it still runs; False where it is gone."""
        try:
            state = await self._call(lambda client: client.api.inspect_container(self.id))
        except ContainerGone:
            return False
        return bool(state["State"]["Running"])

    async def processes(self) -> list[str]:
        """Command lines of all processes but the first, as the host sees them."""
        top = await self._call(lambda client: client.api.top(self.id, "-eo pid,args"))
        return [" ".join(row[1:]) for row in top["Processes"]][1:]

    async def sweep(self) -> None:
        """Kill everything but the first process.

        Raises:
            ContainerGone: something would not die, so the container was removed.
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
        raise ContainerGone(f"{len(left)} processes of the agent could not be killed: {left[:3]}")

    async def end(self) -> None:
        """Remove it, also where this is cancelled, and a second time where the engine failed."""
        try:
            await asyncio.shield(self.remove())
        except EnvError:
            # Its input is closed, so it ends by itself; the engine is in trouble, not the work.
            with contextlib.suppress(EnvError):
                await self.remove()

    async def remove(self) -> None:
        """End it. Calling it twice is fine."""
        _close(self._lease)
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        await self._engine.call(lambda client: remove(client, self.id))

    async def _execute(
        self,
        argv: list[str],
        environment: Mapping[str, str],
        sink: Clip | Streams,
        timeout_s: float,
        max_bytes: int,
    ) -> CommandResult:
        """Run a program and sweep where it had to be given up; the output is the sink's."""
        cancelled = threading.Event()
        try:
            ended = await self._call(
                lambda client: self._attend(
                    client, argv, environment, sink, timeout_s, max_bytes, cancelled
                )
            )
        except asyncio.CancelledError:
            cancelled.set()
            raise
        if ended.timed_out or ended.flooded:
            await self.sweep()
        return ended

    def _attend(
        self,
        client: DockerClient,
        argv: list[str],
        environment: Mapping[str, str],
        sink: Clip | Streams,
        timeout_s: float,
        max_bytes: int,
        cancelled: threading.Event,
    ) -> CommandResult:
        """Run a program and read what it writes until it ends, has no time left or wrote too
        much."""
        started = time.monotonic()
        exec_id: str = client.api.exec_create(
            self.id,
            argv,
            stdin=True,
            environment=dict(environment),
            workdir=self.spec.workdir,
            user=self.spec.user,
        )["Id"]

        def ended(exit_code: int | None = None, *, flooded: bool = False) -> CommandResult:
            timed_out = exit_code is None and not flooded
            seconds = time.monotonic() - started
            return CommandResult(
                "", exit_code, timed_out=timed_out, flooded=flooded, seconds=seconds
            )

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
                    # A process left in the background may hold the output open. What the command
                    # wrote before it ended may still be on its way, so the pause comes twice.
                    if has_ended:
                        break
                    has_ended = not client.api.exec_inspect(exec_id)["Running"]
                    continue
                if not chunk:
                    break
                buffer += chunk
                for kind, payload in take_frames(buffer):
                    sink.add(kind, payload)
                    num_bytes += len(payload)
                if num_bytes > max_bytes:
                    return ended(flooded=True)
        finally:
            _close(stream)
        # The output can end a moment before the engine has noted the exit; a command that closed
        # its output itself runs on.
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
            # Perhaps the agent's processes are so many that there is no room for another.
            limit = {"PidsLimit": self.spec.max_processes + 16 * attempt}
            api.post(f"{api.base_url}/v{api.api_version}/containers/{self.id}/update", json=limit)
        # A shell's `kill -9 -1` spares itself and the first process, and nothing forks past it.
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

    async def _call(self, function: Callable[[DockerClient], Any]) -> Any:
        try:
            return await self._engine.call(function)
        except EngineError as error:
            # 404 and 409 of an exec say that the container is removed or not running.
            if error.engine_status in (404, 409):
                raise ContainerGone(f"container {self.id[:12]} has ended ({error})") from error
            raise


def hardened(*, memory: int | str, cpus: float, max_processes: int) -> dict[str, Any]:
    """Arguments for `client.containers.create`: no capabilities, nothing to gain them by, a file
    system that can't be written, and limits.

    Args:
        memory: in bytes, or as the engine reads it, such as `2g`; swap included.
    """
    return {
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": int(cpus * 1e9),
        "pids_limit": max_processes,
    }


def _arguments(spec: ContainerSpec, container_labels: dict[str, str]) -> dict[str, Any]:
    from docker.types import LogConfig, Ulimit

    memory = spec.memory_mb << 20
    limits = hardened(memory=memory, cpus=spec.cpus, max_processes=spec.max_processes)
    return limits | {
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


def _connection(stream: Any) -> Any:
    """The socket beneath what the docker package gives for one, which can only be read."""
    return getattr(stream, "_sock", stream)


def _close(stream: Any) -> None:
    connection = _connection(stream)
    if connection is not None:  # as after an earlier call
        connection.close()  # the descriptor is closed with the last of the two
    stream.close()
