"""Containers for episodes: hardened, bounded, and gone when who made them is gone.

    box = ContainerSpec("python:3.12-slim", memory_mb=512)

    class Shell(Environment):
        @classmethod
        def load_shared(cls, config):
            return ContainerPool(box, ready=4)
        async def reset(self, task, *, seed):
            self.container = await self.shared.acquire()
        @tool(timeout_s=40)
        async def bash(self, command: str) -> str:
            return (await self.container.run(command, timeout_s=30)).output
        async def close(self):
            await self.container.remove()
        @classmethod
        def close_shared(cls, shared):
            shared.close()

A container's first process is a shell that waits for the end of its input, which the engine closes
when the process that made the container is gone: a container outlives its owner by a second,
however that ended. That shell adopts and reaps orphans, and no signal from inside the container
reaches it, so `kill -9 -1` ends the agent's processes alone.

Each command is a process of its own. It ends when its shell does, whatever it left in the
background; at its deadline everything but the first process is killed.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import json
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from agentrl.env.container.engine import (
    MAX_LIFE_S,
    OWNER_LABEL,
    ROLE_LABEL,
    RUN_LABEL,
    EngineAPI,
    EngineError,
    abandoned,
    labels,
)
from agentrl.errors import ConfigError, EnvError, EnvUnavailable

logger = logging.getLogger(__name__)

MAX_COMMAND_CHARS = 60_000
"""An argument of a Linux process has at most 131,072 bytes."""
MAX_STREAM_BYTES = 64 << 20
"""A command that writes more is stopped."""
_MAX_FILE_BYTES = 4 << 30
_SWEEP_TIMEOUT_S = 20.0
_QUIET_POLL_S = 1.0
_MAX_PAUSE_S = 30.0
"""Before a container is started again after failures."""

# From inside, a container's first process gets only signals that it handles, so those that bash
# handles are ignored. `read` gives 1 at the end of the input and more than 128 when its time is up;
# each round also reaps what has exited. A line on the input, which the agent could write, changes
# nothing.
_FIRST_PROCESS = (
    "trap '' HUP INT QUIT ILL TRAP ABRT BUS FPE SEGV SYS PIPE ALRM TERM XCPU XFSZ VTALRM "
    "USR1 USR2; "
    "while [ $SECONDS -lt {life_s} ]; do read -r -t 1; [ $? -eq 1 ] && exit 0; done; exit 0"
)

# Out of memory, the kernel should take the agent's processes and not the container's first.
_COMMAND = 'echo 1000 > /proc/self/oom_score_adj; exec /bin/bash -c "$1" 2>&1'

_OOM_FILES = "cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events"


@dataclass(slots=True, frozen=True)
class ContainerSpec:
    """What containers are made of and what they may use. There are no mounts: nothing of the host,
    its engine's socket least of all, is ever in one."""

    image: str
    """Local, with /bin/bash in it."""
    workdir: str = "/tmp"
    """Where commands start; must be in the image or in `tmpfs`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of commands, beside the image's own."""
    user: str = "10001:10001"
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
    max_processes: int = 256
    life_s: int = MAX_LIFE_S
    """It ends by itself after this long."""


@dataclass(slots=True, frozen=True)
class Ran:
    """What a command did."""

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


@dataclass(slots=True, frozen=True)
class Wrote:
    """What a script of ours gave."""

    output: bytes
    errors: str
    exit_code: int | None
    """None: it was killed."""
    too_long: bool
    """Killed for writing more than `max_bytes`; else for its time."""


@dataclass(slots=True, frozen=True)
class _Ended:
    exit_code: int | None
    timed_out: bool
    flooded: bool
    seconds: float


class ContainerGone(EnvError):
    """The container ended under a running episode: by the engine or by who can reach it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="container_gone")


class Container:
    """A running container; `create` makes one and `remove` ends it."""

    def __init__(
        self, api: EngineAPI, container_id: str, lease: asyncio.StreamWriter, spec: ContainerSpec
    ) -> None:
        self.id = container_id
        self.spec = spec
        self.started = time.monotonic()
        self.on_end: Callable[[], None] | None = None
        """Called once, when `remove` is."""
        self._api = api
        self._lease = lease
        self._oom_kills = 0

    @classmethod
    async def create(
        cls, api: EngineAPI, spec: ContainerSpec, container_labels: dict[str, str]
    ) -> Self:
        """Start a container of a local image.

        Raises:
            EnvError: the engine refused or does not answer; nothing is left behind.
        """
        body = _description(spec, container_labels)
        try:
            container_id: str = (await api.call("POST", "/containers/create", body))["Id"]
        except EngineError as error:
            if error.engine_status != 404:
                raise
            raise EnvError(
                f"no image {spec.image} on the Docker engine: `docker pull {spec.image}`",
                code="image_missing",
            ) from error
        lease: asyncio.StreamWriter | None = None
        try:
            lease = await api.hold_stdin(container_id)
            await api.call("POST", f"/containers/{container_id}/start")
        except BaseException:
            if lease is not None:
                lease.close()
            with contextlib.suppress(EnvError):
                await asyncio.shield(_remove(api, container_id))
            raise
        return cls(api, container_id, lease, spec)

    async def run(self, command: str, *, timeout_s: float, max_chars: int = 10_000) -> Ran:
        """Run a shell command in the working folder, with no input.

        Raises:
            ContainerGone: the container has ended.
            EnvError: the engine failed.
        """
        clip = Clip(max_chars)
        ended = await self._execute(
            ["/bin/bash", "-c", _COMMAND, "bash", command],
            timeout_s=timeout_s,
            sink=clip,
        )
        output, num_dropped = clip.text()
        ran = Ran(
            output,
            ended.exit_code,
            num_dropped=num_dropped,
            timed_out=ended.timed_out,
            flooded=ended.flooded,
            seconds=ended.seconds,
        )
        # 137: killed. A shell reports so for its last process; others it names in its output.
        if ran.exit_code == 137 or "Killed" in ran.output[-2000:]:
            count = await self._count_oom_kills()
            if count > self._oom_kills:
                self._oom_kills = count
                ran = replace(ran, out_of_memory=True)
        return ran

    async def script(
        self, script: str, *arguments: str, timeout_s: float, max_bytes: int = 4 << 20
    ) -> Wrote:
        """Run a script of ours, outside the agent's environment.

        Raises:
            ContainerGone: the container has ended.
            EnvError: the engine failed.
        """
        sink = _Collect()
        ended = await self._execute(
            ["/bin/bash", "--noprofile", "--norc", "-c", script, "bash", *arguments],
            timeout_s=timeout_s,
            sink=sink,
            max_bytes=max_bytes,
            environment=["HOME=/nonexistent"],
        )
        errors = sink.errors.decode(errors="replace").strip()
        return Wrote(bytes(sink.output), errors, ended.exit_code, ended.flooded)

    async def write_bytes(self, path: str, content: bytes, *, timeout_s: float = 60.0) -> None:
        """Write a file, in a folder that exists and that the container's user may write to.

        Raises:
            ContainerGone: the container has ended.
            EnvError: the file can't be written, or the engine failed.
        """
        packed = base64.b64encode(content).decode()
        # An argument of a process is limited, so a long file goes in pieces; 4 characters are 3
        # bytes, so a piece ends at a whole byte.
        pieces = [
            packed[start : start + MAX_COMMAND_CHARS]
            for start in range(0, len(packed), MAX_COMMAND_CHARS)
        ]
        for number, piece in enumerate(pieces or [""]):
            arrow = ">>" if number else ">"
            wrote = await self.script(
                f'printf %s "$2" | base64 -d {arrow} "$1"', path, piece, timeout_s=timeout_s
            )
            if wrote.exit_code != 0:
                raise EnvError(f"{path} can't be written in the container: {wrote.errors[-200:]}")

    async def read_bytes(
        self, path: str, *, max_bytes: int = 4 << 20, timeout_s: float = 60.0
    ) -> bytes | None:
        """A file's content; None: there is none, it can't be read, or it is larger.

        Raises:
            ContainerGone: the container has ended.
            EnvError: the engine failed.
        """
        wrote = await self.script(
            '[ -f "$1" ] && cat -- "$1"', path, timeout_s=timeout_s, max_bytes=max_bytes
        )
        return wrote.output if wrote.exit_code == 0 else None

    async def alive(self) -> bool:
        try:
            state = await self._api.call("GET", f"/containers/{self.id}/json")
        except EngineError as error:
            if error.engine_status != 404:
                raise
            return False
        return bool(state["State"]["Running"])

    async def processes(self) -> list[str]:
        """Command lines of all processes but the first, as the host sees them."""
        top = await self._call(
            "GET", f"/containers/{self.id}/top", query={"ps_args": "-eo pid,args"}
        )
        lines = [" ".join(row[1:]) for row in top["Processes"]]
        return lines[1:]

    async def sweep(self) -> None:
        """Kill everything but the first process.

        Raises:
            ContainerGone: something would not die, so the container was removed.
        """
        for attempt in range(4):
            if attempt:
                # Perhaps the agent's processes are so many that there is no room for ours.
                room = {"PidsLimit": self.spec.max_processes + 16 * attempt}
                await self._call("POST", f"/containers/{self.id}/update", room)
            # A shell's `kill -9 -1` spares itself and the first process, and nothing forks past it.
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(_SWEEP_TIMEOUT_S):
                    await self._exec_once(["/bin/bash", "--norc", "-c", "kill -9 -1; exit 0"])
            if not await self.processes():
                return
            await asyncio.sleep(0.2)
        left = await self.processes()
        await self.remove()
        raise ContainerGone(f"{len(left)} processes of the agent could not be killed: {left[:3]}")

    async def remove(self) -> None:
        """End it. Calling it twice is fine."""
        self._lease.close()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        await _remove(self._api, self.id)

    async def _execute(
        self,
        argv: list[str],
        *,
        timeout_s: float,
        sink: Clip | _Collect,
        max_bytes: int = MAX_STREAM_BYTES,
        environment: list[str] | None = None,
    ) -> _Ended:
        started = time.monotonic()
        body = {
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": argv,
            "Env": _variables(self.spec) if environment is None else environment,
            "WorkingDir": self.spec.workdir,
        }
        exec_id = (await self._call("POST", f"/containers/{self.id}/exec", body))["Id"]
        exit_code = None
        timed_out = flooded = False
        try:
            async with asyncio.timeout(timeout_s):
                flooded = not await self._read(exec_id, sink, max_bytes)
                if not flooded:
                    exit_code = await self._exit_code(exec_id)
        except TimeoutError:
            timed_out = True
        except EngineError as error:
            raise self._gone(error) from error
        if timed_out or flooded:
            await self.sweep()
        return _Ended(exit_code, timed_out, flooded, time.monotonic() - started)

    async def _read(self, exec_id: str, sink: Clip | _Collect, max_bytes: int) -> bool:
        """Read the output until the command's shell ends; False: it is more than `max_bytes`."""
        num_bytes = 0
        async with self._api.stream(
            f"/exec/{exec_id}/start", {"Detach": False, "Tty": False}
        ) as content:
            frames = _Frames()
            while True:
                try:
                    async with asyncio.timeout(_QUIET_POLL_S):
                        chunk = await content.readany()
                except TimeoutError:
                    # A process left in the background may hold the output open.
                    if not (await self._call("GET", f"/exec/{exec_id}/json"))["Running"]:
                        return True
                    continue
                if not chunk:
                    return True
                for kind, payload in frames.feed(chunk):
                    sink.add(kind, payload)
                    num_bytes += len(payload)
                if num_bytes > max_bytes:
                    return False

    async def _exit_code(self, exec_id: str) -> int:
        while True:
            state = await self._call("GET", f"/exec/{exec_id}/json")
            # The output can end a moment before the engine has noted the exit; a command that
            # closed its output itself runs on.
            if not state["Running"]:
                if state["ExitCode"] is None:
                    raise ContainerGone(f"container {self.id[:12]} ended during a command")
                return state["ExitCode"]
            await asyncio.sleep(0.02)

    async def _exec_once(self, argv: list[str]) -> None:
        body = {"AttachStdout": True, "Cmd": argv}
        exec_id = (await self._call("POST", f"/containers/{self.id}/exec", body))["Id"]
        await self._call("POST", f"/exec/{exec_id}/start", {"Detach": True})
        await self._exit_code(exec_id)

    async def _count_oom_kills(self) -> int:
        wrote = await self.script(_OOM_FILES, timeout_s=10)
        counts = re.findall(rb"^oom_kill (\d+)$", wrote.output, re.MULTILINE)
        return max(map(int, counts), default=0)

    async def _call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        try:
            return await self._api.call(method, path, body, **options)
        except EngineError as error:
            raise self._gone(error) from error

    def _gone(self, error: EngineError) -> EnvError:
        """404 and 409 of an exec say that the container is removed or not running."""
        if error.engine_status in (404, 409):
            return ContainerGone(f"container {self.id[:12]} has ended ({error})")
        return error


async def _remove(api: EngineAPI, container_id: str) -> None:
    try:
        await api.call(
            "DELETE", f"/containers/{container_id}", query={"force": "true", "v": "true"}
        )
    except EngineError as error:
        # 404: it is gone already. 409: the engine is removing it.
        if error.engine_status not in (404, 409):
            raise


def _variables(spec: ContainerSpec) -> list[str]:
    return [f"{name}={value}" for name, value in spec.environment.items()]


def _description(spec: ContainerSpec, container_labels: dict[str, str]) -> dict[str, Any]:
    memory = spec.memory_mb << 20
    return {
        "Image": spec.image,
        "Entrypoint": ["/bin/bash", "-c", _FIRST_PROCESS.format(life_s=spec.life_s)],
        "Cmd": [],
        "User": spec.user,
        "WorkingDir": spec.workdir,
        "Labels": container_labels,
        "Healthcheck": {"Test": ["NONE"]},
        "AttachStdin": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "Tty": False,
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": spec.network,
            "ReadonlyRootfs": spec.read_only,
            "Tmpfs": dict.fromkeys(spec.tmpfs, f"rw,exec,nosuid,nodev,size={memory // 2}"),
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(spec.cpus * 1e9),
            "PidsLimit": spec.max_processes,
            "CapDrop": ["ALL"],
            "CapAdd": list(spec.capabilities),
            "SecurityOpt": ["no-new-privileges"],
            "LogConfig": {"Type": "none"},
            "Ulimits": [
                {"Name": "fsize", "Soft": _MAX_FILE_BYTES, "Hard": _MAX_FILE_BYTES},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
        },
    }


class _Frames:
    """Splits the engine's stream: a frame is its kind, three zeros, a length and the payload."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[tuple[int, bytes]]:
        """Frames that are whole by now: 1 or 2 for output or errors, and the payload."""
        buffer = self._buffer
        buffer += chunk
        frames = []
        start = 0
        while len(buffer) - start >= 8:
            length = int.from_bytes(buffer[start + 4 : start + 8], "big")
            if len(buffer) - start < 8 + length:
                break
            frames.append((buffer[start], bytes(buffer[start + 8 : start + 8 + length])))
            start += 8 + length
        del buffer[:start]
        return frames


class Clip:
    """Text from bytes as they come: its first and last `max_chars / 2` characters, and how many
    stood between."""

    def __init__(self, max_chars: int) -> None:
        self._half = max(max_chars // 2, 1)
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._head = ""
        self._tail = ""
        self._num_chars = 0

    def add(self, kind: int, payload: bytes) -> None:
        self._add(self._decode(payload))

    def text(self) -> tuple[str, int]:
        """The text with a line for what was left out, and how many characters that is."""
        self._add(self._decode(b"", True))
        self._tail = self._tail[-self._half :]
        dropped = self._num_chars - len(self._head) - len(self._tail)
        if not dropped:
            return self._head + self._tail, 0
        return f"{self._head}\n[... {dropped:,} characters left out ...]\n{self._tail}", dropped

    def _add(self, text: str) -> None:
        self._num_chars += len(text)
        room = self._half - len(self._head)
        if room > 0:
            self._head += text[:room]
            text = text[room:]
        self._tail += text
        if len(self._tail) > 4 * self._half:
            self._tail = self._tail[-self._half :]


class _Collect:
    """All output, and the errors, as bytes."""

    def __init__(self) -> None:
        self.output = bytearray()
        self.errors = bytearray()

    def add(self, kind: int, payload: bytes) -> None:
        (self.errors if kind == 2 else self.output).extend(payload)


class ContainerPool:
    """Containers started ahead, so that an episode does not wait the second that a start takes.

    For one event loop at a time. A container is used once: whoever acquires it removes it, and the
    pool starts another. `close`, as from `close_shared`, ends all; without it they end with the
    process.
    """

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        ready: int = 2,
        max_containers: int = 64,
        max_starting: int = 4,
    ) -> None:
        """
        Args:
            ready: containers kept waiting, beside those in use.
            max_containers: in use at a time; further callers wait.
            max_starting: starts at a time; an engine that is asked for dozens slows to a crawl.
        """
        if ready < 0 or max_containers < 1 or max_starting < 1:
            raise ConfigError("ready is at least 0, max_containers and max_starting at least 1")
        self.spec = spec
        self._ready = ready
        self._max_containers = max_containers
        self._max_starting = max_starting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._api: EngineAPI | None = None
        self._known: set[Container] = set()
        self._reset()

    def _reset(self) -> None:
        self._room = asyncio.Semaphore(self._max_containers)
        self._idle: deque[Container] = deque()
        self._waiting: deque[asyncio.Future[Container]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_starting = 0
        self._num_failures = 0
        self._paused = False
        self._closed = False

    @property
    def num_ready(self) -> int:
        return len(self._idle)

    @property
    def num_live(self) -> int:
        """Containers there are, those in use and those waiting."""
        return len(self._known)

    async def warm(self, timeout_s: float = 60.0) -> None:
        """Wait until as many are ready as should be; the first `acquire` starts them otherwise.

        Raises:
            EnvUnavailable: they were not in time.
        """
        self._bind()
        self._pump()
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._idle) < self._ready:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise EnvUnavailable(
                f"{len(self._idle)} of {self._ready} containers of {self.spec.image} were ready "
                f"after {timeout_s:g} s"
            ) from None

    async def acquire(self, *, timeout_s: float = 60.0) -> Container:
        """A fresh container; the caller removes it.

        Raises:
            EnvUnavailable: all are in use for `timeout_s`, or the engine does not answer.
            EnvError: the engine refused; says why.
        """
        self._bind()
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.acquire()
                try:
                    container = await self._next()
                except BaseException:
                    self._room.release()
                    raise
        except TimeoutError:
            raise EnvUnavailable(
                f"no container of {self.spec.image} within {timeout_s:g} s; "
                f"{self._max_containers} may be in use at a time, {self._max_starting} start",
                retry_after_s=1.0,
            ) from None
        room = self._room

        def end() -> None:
            self._known.discard(container)
            room.release()

        container.on_end = end
        return container

    @asynccontextmanager
    async def container(self, *, timeout_s: float = 60.0) -> AsyncIterator[Container]:
        """`acquire`, and `remove` at the end."""
        container = await self.acquire(timeout_s=timeout_s)
        try:
            yield container
        finally:
            await container.remove()

    async def aclose(self) -> None:
        """Remove all containers, those in use too."""
        self._closed = True
        for future in self._waiting:
            future.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        known, self._known = self._known, set()
        await asyncio.gather(*(container.remove() for container in known), return_exceptions=True)
        if self._api is not None:
            await self._api.aclose()
        self._api = self._loop = None

    def close(self) -> None:
        """`aclose` from another thread than the loop's."""
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result(60)
        elif self._known:
            asyncio.run(self._remove_known())

    async def _remove_known(self) -> None:
        """Of a loop that is over, whose connections can't be used any more."""
        known, self._known = self._known, set()
        api = EngineAPI()
        try:
            for container in known:
                with contextlib.suppress(EnvError):
                    await _remove(api, container.id)
        finally:
            await api.aclose()

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise EnvError("a ContainerPool belongs to one event loop: make another for this one")
        self._reset()
        self._loop = loop
        self._api = EngineAPI()
        if self._known:
            self._spawn(self._remove_known())
        self._spawn(self._reap())

    async def _reap(self) -> None:
        assert self._api is not None
        try:
            for line in await reap(self._api):
                logger.info("removed an abandoned container: %s", line)
        except EnvError as error:  # whoever acquires a container hears of it
            logger.warning("abandoned containers can't be removed: %s", error)

    async def _next(self) -> Container:
        while self._idle:
            container = self._idle.popleft()
            self._pump()
            age = time.monotonic() - container.started
            if age < self.spec.life_s / 2 and await container.alive():
                return container
            self._discard(container)
        future: asyncio.Future[Container] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._idle.append(future.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(future)

    def _pump(self) -> None:
        """Start as many as are wanted and may start."""
        refill = 0 if self._paused else max(0, self._ready - len(self._idle))
        wanted = len(self._waiting) + refill
        while not self._closed and self._num_starting < min(wanted, self._max_starting):
            self._num_starting += 1
            self._spawn(self._start())

    async def _start(self) -> None:
        assert self._api is not None
        try:
            container = await Container.create(self._api, self.spec, labels("pool", "episode"))
        except EnvError as error:
            self._num_starting -= 1
            self._failed(error)
            return
        except BaseException:
            self._num_starting -= 1
            raise
        self._num_starting -= 1
        self._num_failures = 0
        self._known.add(container)
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(container)
                break
        else:
            self._idle.append(container)
        self._pump()

    def _failed(self, error: EnvError) -> None:
        """Tell one who waits; where nobody does, try again after a pause."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
                break
        else:
            logger.warning("a container of %s did not start: %s", self.spec.image, error)
        self._num_failures += 1
        if not self._paused:
            self._paused = True
            self._spawn(self._resume(min(2.0**self._num_failures, _MAX_PAUSE_S)))
        self._pump()

    async def _resume(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._paused = False
        self._pump()

    def _discard(self, container: Container) -> None:
        self._known.discard(container)
        self._spawn(_end(container))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end(container: Container) -> None:
    with contextlib.suppress(EnvError):
        await container.remove()


async def reap(api: EngineAPI) -> list[str]:
    """Remove containers whose owner is gone; a line about each.

    Raises:
        EnvError: the engine failed or does not answer.
    """
    found = await api.call(
        "GET",
        "/containers/json",
        query={"all": "true", "filters": json.dumps({"label": [OWNER_LABEL]})},
    )
    removed = []
    for summary in found:
        its_labels: dict[str, str] = summary["Labels"]
        reason = abandoned(its_labels, time.time())
        if reason is not None:
            await _remove(api, summary["Id"])
            removed.append(
                f"{summary['Id'][:12]} {its_labels.get(ROLE_LABEL, '?')} "
                f"{its_labels.get(RUN_LABEL, '?')}: {reason}"
            )
    return removed
