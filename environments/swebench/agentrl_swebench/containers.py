"""An agent's container: what it may use, how a command runs in it, how it ends.

The container's first process is a shell that waits for the end of its input, which the engine
closes when the process that made the container is gone: an agent's container outlives its owner by
a second, however that ended. That shell adopts and reaps orphans, and no signal from inside the
container reaches it, so `kill -9 -1` ends the agent's processes alone.

Each command is a process of its own. It ends when its shell does, whatever it left in the
background; at its deadline everything but the first process is killed.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
import re
import tarfile
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl.errors import EnvError
from agentrl_swebench.api import EngineAPI, EngineError
from agentrl_swebench.engine import MAX_LIFE_S, labels

WORKDIR = "/testbed"
MAX_COMMAND_CHARS = 60_000
"""An argument of a Linux process has at most 131,072 bytes."""
MAX_STREAM_BYTES = 64 << 20
"""A command that writes more is stopped."""
_MAX_FILE_BYTES = 4 << 30
_SWEEP_TIMEOUT_S = 20.0
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

# Out of memory, the kernel should take the agent's processes and not the container's first.
_COMMAND = 'echo 1000 > /proc/self/oom_score_adj; exec /bin/bash -c "$1" 2>&1'

_OOM_FILES = "cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events"

_READ_FILE = r"""
path=$(realpath -e -- "$1") && [ -f "$path" ] \
    && printf '%s\0%s\0' "$(stat -c %a -- "$path")" "$path" && cat -- "$path"
"""

_ENVIRONMENT = [
    "BASH_ENV=/root/.bashrc",  # where SWE-bench's images activate the project's environment
    "PAGER=cat",
    "GIT_PAGER=cat",
    "MANPAGER=cat",
    "TERM=dumb",
    "PIP_PROGRESS_BAR=off",
    "PIP_DISABLE_PIP_VERSION_CHECK=1",
    "TQDM_DISABLE=1",
    "PYTHONUNBUFFERED=1",
]


@dataclass(slots=True, frozen=True)
class Limits:
    """Of an agent's container."""

    memory_mb: int = 4096
    """Swap included."""
    cpus: float = 2.0
    max_processes: int = 512
    life_s: int = MAX_LIFE_S


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
class File:
    path: str
    """Absolute, without links."""
    mode: int
    content: bytes


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
    """A running container; `start` makes one and `remove` ends it."""

    def __init__(
        self, api: EngineAPI, container_id: str, lease: asyncio.StreamWriter, limits: Limits
    ) -> None:
        self.id = container_id
        self._limits = limits
        self._api = api
        self._lease = lease
        self._oom_kills = 0

    @classmethod
    async def start(
        cls,
        api: EngineAPI,
        image: str,
        *,
        run_id: str,
        limits: Limits | None = None,
        role: Literal["agent", "build"] = "agent",
    ) -> Container:
        """Start a container of a local image. No agent acts in one with the role `build`, which
        may change the owner of files.

        Raises:
            EnvError: the engine refused or does not answer; nothing is left behind.
        """
        limits = limits or Limits()
        body = _description(image, limits, labels(run_id, role))
        if role == "build":
            body["HostConfig"]["CapAdd"] = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]
        container_id: str = (await api.call("POST", "/containers/create", body))["Id"]
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
        return cls(api, container_id, lease, limits)

    async def run(self, command: str, *, timeout_s: float, max_chars: int) -> Ran:
        """Run a shell command in the repository, with no input.

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

    async def read_file(self, path: str, max_bytes: int) -> File | None:
        """A regular file; None: there is none, or it is larger."""
        wrote = await self.script(_READ_FILE, path, timeout_s=30, max_bytes=max_bytes + 4096)
        if wrote.exit_code != 0:
            return None
        mode, real_path, content = wrote.output.split(b"\0", 2)
        if len(content) > max_bytes:
            return None
        return File(real_path.decode(errors="surrogateescape"), int(mode, 8), content)

    async def write_file(self, file: File) -> None:
        """Write a file, whose folder exists, through the engine.

        Raises:
            EnvError: the container or the engine failed.
        """
        folder, _, name = file.path.rpartition("/")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(file.content), file.mode, int(time.time())
            archive.addfile(member, io.BytesIO(file.content))
        await self._call(
            "PUT",
            f"/containers/{self.id}/archive",
            packed.getvalue(),
            query={"path": folder or "/"},
        )

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
                room = {"PidsLimit": self._limits.max_processes + 16 * attempt}
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
            "Env": _ENVIRONMENT if environment is None else environment,
            "WorkingDir": WORKDIR,
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


def _description(image: str, limits: Limits, container_labels: dict[str, str]) -> dict[str, Any]:
    memory = limits.memory_mb << 20
    return {
        "Image": image,
        "Entrypoint": ["/bin/bash", "-c", _FIRST_PROCESS.format(life_s=limits.life_s)],
        "Cmd": [],
        "User": "root",
        "WorkingDir": WORKDIR,
        "Labels": container_labels,
        "Healthcheck": {"Test": ["NONE"]},
        "AttachStdin": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "Tty": False,
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "none",
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(limits.cpus * 1e9),
            "PidsLimit": limits.max_processes,
            "CapDrop": ["ALL"],
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
