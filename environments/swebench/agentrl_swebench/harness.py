"""Runs of the official harness in our own containers.

The harness' own functions make the test script and the report (`official`). The steps between are
those of its `run_instance`, with its commands in its order: put the patch, apply it, show the
difference, put the script, run it within its time, show the difference, read the output. The
container has limits and no network, and ends with this process.

Which side is to blame for a run without a verdict is read from the engine's events, because a patch
can write to the output, but not to those.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import shlex
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.env.container.container import packed
from agentrl.env.container.engine import ImageMissing, engine_errors
from agentrl.errors import AgentRLError, EnvError, EnvUnavailable
from agentrl_swebench import images, official
from agentrl_swebench.containers import InstanceContainer, current_engine
from agentrl_swebench.dataset import Instance

if TYPE_CHECKING:
    from docker import DockerClient

WALL_GRACE_S = 180.0
"""Seconds that a run may take besides its tests: create, start, apply, remove."""
MAX_OUTPUT_BYTES = 512 << 20
"""A run whose tests write more than this has no report."""
_DISK_POLL_S = 1.0
_EVENTS_WAIT_S = 3.0
_END_S = 30.0

# The engine's own set, which tests may rely on.
_CAPABILITIES = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_RAW"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)


@dataclass(slots=True, frozen=True)
class GradingLimits:
    """Limits of one grading."""

    memory_bytes: int = 4 << 30
    """Memory of the container, swap included."""
    max_processes: int = 512
    cpus: float | None = None
    """Cores of the container, fractions allowed. None: `grade` shares the cores equally among the
    gradings that may run at once, at least one each; `run_harness` alone gives all."""
    network: Literal["none", "bridge"] = "none"
    """The official harness gives a network (`bridge`), which few instances' tests need."""
    sys_admin: bool = False
    """Grant CAP_SYS_ADMIN, as the official harness does. Browsers' sandboxes need it; it is close
    to root on the host."""
    min_free_bytes: int = 512 << 20
    """If the engine's disk ever has less free space, a verdict other than `resolved` is void."""


@dataclass(slots=True, frozen=True)
class Evidence:
    """The evidence of one run of the harness, on which a grading is judged."""

    report: dict[str, dict] | None = None
    """The official report by instance id; None if the harness made none."""
    statuses: dict[str, str] = field(default_factory=dict)
    """Status by test, for every test that the official parser found in the log."""
    complete: bool = False
    """True if the log has the marks of the tests' start and end."""
    reports: Sequence[str] = ()
    """What follows the mark that was asked for, by line of the log."""
    error_kind: str = ""
    """What ended a run without a report: `patch` (it does not apply), `timeout` (the tests took too
    long), `image` (it is missing), `no_engine` (it does not answer), `engine`, `memory` (too much
    output), `decode`, `disk`, `other`."""
    error: str = ""
    container_end: str = ""
    """End of the container: `stopped` (by this process), `removed` (killed or frozen from outside),
    `died` (its main process ended from inside), `lost` (the engine does not answer), or "" (there
    was no container)."""
    out_of_memory: bool = False
    least_free_bytes: int | None = None
    image_id: str = ""
    seconds: float = 0.0


class _Failed(Exception):
    """A run has ended without a report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


_FAILURES = (_Failed, AgentRLError, OSError, UnicodeError)


async def run_harness(
    instance: Instance,
    patch: str,
    *,
    run_id: str,
    timeout_s: float,
    limits: GradingLimits,
    model_name: str = "agentrl",
    skip_patch: bool = False,
    mark: str = "",
    logs: Path | None = None,
) -> Evidence:
    """Runs an instance's tests on a patch once, as the official `run_instance` does, in a container
    and a folder of its own.

    When this returns, no container of the run is left, unless the engine is gone.

    Args:
        run_id: label of the container; need not be unique.
        timeout_s: limit on the tests, in seconds, rounded to whole seconds.
        mark: return what follows this word in the lines of the tests' log.
        logs: folder that receives the files that the harness keeps of a run.
    """
    started = time.monotonic()
    try:
        folder = await official.folder()
    except OSError as error:
        return Evidence(error_kind="disk", error=str(error))
    prediction = {
        "instance_id": instance.instance_id,
        "model_name_or_path": model_name,
        "model_patch": patch,
    }
    run = _Run(instance, None if skip_patch else patch, folder, max(1, round(timeout_s)))
    made: dict[str, Any] = {}
    request = {"row": instance.row(), "folder": str(folder)}
    failure: Exception | None = None
    try:
        try:
            async with asyncio.timeout(timeout_s + WALL_GRACE_S):
                prepared = await official.ask("prepare", **request)
                async with _container(run, run_id, limits) as container:
                    await run.test(container, prepared)
        except _FAILURES as error:
            failure = error
        if run.output is not None:
            request |= {"prediction": prediction, "mark": mark, "ended": run.ended}
            made = await official.ask("report", **request)
        if failure is not None:
            raise failure
    except _FAILURES as error:
        made |= {"error_kind": _kind_of(error), "error": " ".join(str(error).split())[:500]}
    finally:
        if run.log_file is not None:
            run.log(made.get("error") or f"report: {made.get('report')}")
        if logs is not None:
            shutil.rmtree(logs, ignore_errors=True)
            logs.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, logs)
        shutil.rmtree(folder, ignore_errors=True)
    return Evidence(**made, **run.seen, seconds=time.monotonic() - started)


def _kind_of(error: Exception) -> str:
    if isinstance(error, (_Failed, official.HarnessError)):
        return error.kind
    kinds: tuple[tuple[str, type[Exception]], ...] = (
        ("image", ImageMissing),
        ("no_engine", EnvUnavailable),
        ("engine", AgentRLError),
        ("engine", TimeoutError),
        ("decode", UnicodeError),
    )
    return next((kind for kind, type_ in kinds if isinstance(error, type_)), "disk")


@contextlib.asynccontextmanager
async def _container(
    run: _Run, run_id: str, limits: GradingLimits
) -> AsyncIterator[InstanceContainer]:
    """Yields a container for a run, watches it and the engine's disk, and removes it."""
    engine, image = current_engine(), run.instance.image
    for lost in list(_left):
        with contextlib.suppress(EnvError):
            await lost.remove()
            _left.discard(lost)
    # As the harness does, a missing image is pulled.
    found = await engine.call(lambda client: images.pull(client, [image], min_free_bytes=0))
    run.seen["image_id"] = found[image]
    disk = asyncio.create_task(_watch_disk(run.seen, await engine.call(_disk_of)))
    container = None
    try:
        container = await InstanceContainer.start(
            found[image],
            run_id=run_id,
            role="grade",
            memory_mb=limits.memory_bytes >> 20,
            max_processes=limits.max_processes,
            cpus=limits.cpus or float(os.cpu_count() or 1),
            network=limits.network,
            capabilities=(*_CAPABILITIES, *(("SYS_ADMIN",) if limits.sys_admin else ())),
            new_privileges=True,
            life_s=run.timeout_s + int(WALL_GRACE_S) + 60,
        )
        watch = await engine.call(lambda client: Watch(client, container.id))
        try:
            yield container
        finally:
            run.seen["container_end"] = await _end_of(container, watch)
            if run.seen["container_end"] == "lost":
                _left.add(container)
            run.seen["out_of_memory"] = watch.out_of_memory
    finally:
        disk.cancel()
        if container is not None:
            with contextlib.suppress(TimeoutError):
                # An engine that hangs must not cost the verdict: the container ends by itself.
                await asyncio.wait_for(container.end(), _END_S)


_left: set[InstanceContainer] = set()
"""Containers of which the engine was gone at their end; the next run removes them."""


async def _end_of(container: InstanceContainer, watch: Watch) -> str:
    try:
        async with asyncio.timeout(_END_S):
            alive = await container.alive()
            return await asyncio.to_thread(watch.end, alive=alive)
    except (EnvError, TimeoutError):
        return "lost"


def _disk_of(client: DockerClient) -> str:
    """Returns a folder on the disk that containers write to."""
    folder = client.info().get("DockerRootDir", "")
    # If the folder is not visible here, the engine is on another machine or this process runs in a
    # container, whose root lies on the engine's disk.
    return folder if os.path.isdir(folder) else "/"


async def _watch_disk(seen: dict[str, Any], folder: str) -> None:
    """Records the least free space: a full disk fails tests as a wrong patch does."""
    seen["least_free_bytes"] = shutil.disk_usage(folder).free
    while True:
        await asyncio.sleep(_DISK_POLL_S)
        seen["least_free_bytes"] = min(seen["least_free_bytes"], shutil.disk_usage(folder).free)


class _Run:
    """One run: its files, and what is seen of its container."""

    def __init__(self, instance: Instance, patch: str | None, folder: Path, timeout_s: int) -> None:
        self.instance = instance
        self.timeout_s = timeout_s
        self.seen: dict[str, Any] = {}
        self.output: Path | None = None
        self.ended = False
        """True if the tests ended by themselves and the container outlived them."""
        self.log_file: Path | None = None
        self._patch = patch
        self._folder = folder

    def log(self, text: str) -> None:
        assert self.log_file is not None
        with self.log_file.open("a", errors="replace") as file:
            file.write(text + "\n")

    async def test(self, container: InstanceContainer, prepared: dict[str, Any]) -> None:
        """Applies the patch and runs the tests, whose output is written to `output`.

        Raises:
            _Failed: the patch does not apply, or the tests do not end.
            UnicodeError: a difference is not UTF-8, which the harness does not accept.
            EnvError: the container or the engine failed.
        """
        self.log_file = self._folder / prepared["log"]
        if self._patch is not None:
            content = self._patch.encode()
            (self._folder / "patch.diff").write_bytes(content)
            folder, name = os.path.split(prepared["patch_file"])
            await container.output_of(["mkdir", "-p", folder])
            await container.put(packed({name: content}), folder)
            await self._apply(container, prepared)
        before = await self._difference(container)
        self.log(f"Git diff before:\n{before}")
        script = prepared["script"].encode()
        (self._folder / "eval.sh").write_bytes(script)
        assets = sorted((self._folder / "image_assets").glob("*"))
        files = {f"image_assets/{each.name}": each.read_bytes() for each in assets}
        await container.put(packed({**files, "eval.sh": script}))
        await self._run_script(container, self._folder / prepared["output"])
        self.log(f"Git diff after:\n{await self._difference(container)}")
        self.ended = True

    async def _apply(self, container: InstanceContainer, prepared: dict[str, Any]) -> None:
        file, output = prepared["patch_file"], b""
        for number, command in enumerate(prepared["apply"]):
            if number:  # a failed attempt may leave a part of the patch
                await container.output_of(["/bin/bash", "-c", "git checkout -- . ; git clean -fd"])
            exit_code, output = await container.output_of([*shlex.split(command), file])
            if exit_code == 0:
                return self.log(f"{prepared['applied']}:\n{output.decode()}")
            self.log(f"Failed to apply patch to container: {command}")
        exit_code, _ = await container.output_of(["git", "apply", "--check", "--reverse", file])
        if exit_code != 0:
            raise _Failed("patch", f"{prepared['not_applied']}:\n{output.decode()}")
        return self.log(f"{prepared['applied']}: verified already applied")

    async def _difference(self, container: InstanceContainer) -> str:
        _, output = await container.output_of(["git", "-c", "core.fileMode=false", "diff"])
        return output.decode().strip()

    async def _run_script(self, container: InstanceContainer, output: Path) -> None:
        self.output = output
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        with output.open("w") as file:

            def add(kind: int, payload: bytes) -> None:
                file.write(decode(payload))

            ran = await container.execute(
                ["/bin/bash", "/eval.sh"],
                timeout_s=self.timeout_s,
                max_bytes=MAX_OUTPUT_BYTES,
                add=add,
            )
            file.write(decode(b"", True))
            if ran.timed_out:
                file.write(f"\n\nTimeout error: {self.timeout_s} seconds exceeded.")
                raise _Failed("timeout", f"Test timed out after {self.timeout_s} seconds.")
        if ran.flooded:
            raise _Failed("memory", f"the tests wrote more than {MAX_OUTPUT_BYTES >> 20} MiB")


class Watch:
    """Collects the engine's events about one container."""

    def __init__(self, client: DockerClient, container_id: str) -> None:
        self._actions: list[str] = []
        self._over = threading.Event()
        stream = client.api.events(filters={"container": [container_id]}, decode=True)
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Iterator[dict[str, Any]]) -> None:
        with contextlib.suppress(EnvError, ValueError), engine_errors():
            for event in stream:
                self._actions.append(event.get("Action", ""))
                if event.get("Action") == "destroy":
                    break
        self._over.set()

    def wait(self) -> None:
        """Waits a while for the container to be gone or the connection to break."""
        self._over.wait(_EVENTS_WAIT_S)

    @property
    def out_of_memory(self) -> bool:
        """True if a process in the container was killed for want of memory."""
        return "oom" in self._actions

    def end(self, *, alive: bool) -> str:
        """Returns what ended the container, or is to end it: a value of `Evidence.container_end`.

        Args:
            alive: the engine says that the container runs; if not, its last events are waited for.
        """
        if not alive:
            self.wait()
        for action in list(self._actions):
            if action in ("pause", "kill"):
                return "removed"
            if action == "die":
                return "died"
        return "stopped" if alive else "lost"
