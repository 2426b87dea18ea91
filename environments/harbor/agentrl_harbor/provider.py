"""Runs tasks in sandboxes of Harbor's providers instead of containers of a Docker engine.

Harbor needs Python 3.12 and many packages, so a separate process in Harbor's Python
(`provider_worker.py`) holds the sandboxes and answers requests, which are lines of JSON. When this
process ends, however it ends, the worker's input ends, and the worker stops all sandboxes.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import math
import os
import posixpath
import re
import shlex
import subprocess
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from agentrl.env.container.box import MAX_STREAM_BYTES, ROOT, Box, ProgramResult, Sink
from agentrl.env.container.container import ContainerSpec
from agentrl.errors import ConfigError, EnvError
from agentrl.runtime import start_group
from agentrl.types import JSON
from agentrl_harbor.sandbox import MAX_CARRIED_BYTES, SCRIPT_FAILED, TOO_LARGE, as_root, is_hidden
from agentrl_harbor.task import EnvironmentTable

logger = logging.getLogger("agentrl.env")

_MAX_COMMAND_BYTES = 120_000
"""Longest command in bytes: providers pass it to a program as one argument."""
_BOUNDED = 'timeout -k 2 "$1" "${@:3}" </dev/null 2>&1 | head -c "$2"; exit ${PIPESTATUS[0]}'
"""Limits a command's time and output, because not every provider enforces a deadline and none
limits output."""
_TAR = "/tmp/.agentrl.tar"


class Provider:
    """A worker process that holds the sandboxes of one provider."""

    def __init__(self, name: str, options: Mapping[str, JSON], python: str) -> None:
        """Starts the worker.

        Args:
            name: a name that `harbor run --env` knows, or `module:Class`.
            options: the provider's options.
            python: path of a Python that has Harbor.

        Raises:
            ConfigError: that Python cannot be run, or the provider does not work here.
        """
        worker = Path(__file__).with_name("provider_worker.py")
        try:
            # Ctrl-C does not reach it: it would end before it could stop its sandboxes.
            self._process = start_group(
                [python, str(worker), name, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"HARBOR_TELEMETRY": "off", "DO_NOT_TRACK": "1"},
            )
        except OSError as error:
            raise ConfigError(f"harbor_python = {python!r} can't be run: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        first = self._replies.readline()
        if not first or "error" in json.loads(first):
            said = json.loads(first)["error"] if first else "see its output above"
            raise ConfigError(f"Harbor's provider {name} does not work here: {said}")
        self._name = name
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict]] = {}
        self._lock = threading.Lock()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True, name="harbor-provider").start()

    def close(self) -> None:
        """Stops all sandboxes and waits until that is done."""
        self._requests.close()
        self._process.wait()

    async def ask(self, operation: str, **values: Any) -> dict:
        """Sends a request to the worker and returns its answer.

        Raises:
            EnvError: the provider failed, or the worker has ended.
        """
        future: Future[dict] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            line = json.dumps({"number": number, "operation": operation, **values})
            try:
                if self._ended:
                    raise OSError
                self._requests.write(line + "\n")
                self._requests.flush()
            except (OSError, ValueError) as error:
                del self._waiting[number]
                raise EnvError(f"the process of Harbor's provider {self._name} ended") from error
        answer = await asyncio.wrap_future(future)
        if "error" in answer:
            raise EnvError(f"Harbor's provider {self._name}: {answer['error']}", code="provider")
        return answer

    def _listen(self) -> None:
        for line in self._replies:
            answer = json.loads(line)
            with self._lock:
                future = self._waiting.pop(answer["number"])
            if future.set_running_or_notify_cancel():
                future.set_result(answer)
        with self._lock:
            left, self._waiting, self._ended = self._waiting, {}, True
        for future in left.values():
            if future.set_running_or_notify_cancel():
                future.set_result({"error": "its process ended"})


@dataclass(slots=True)
class ProviderSandbox(Box):
    """A running sandbox. Its output and errors are one stream, which comes at the end."""

    provider: Provider
    id: str
    spec: ContainerSpec

    @classmethod
    async def start(
        cls,
        provider: Provider,
        folder: Path,
        table: EnvironmentTable,
        *,
        name: str,
        network: str,
        user: str | int | None,
        environment: Mapping[str, str],
        upload: bool,
    ) -> ProviderSandbox:
        """Starts a sandbox from a folder with a Dockerfile, or from the image that the table names.

        Args:
            upload: put the folder's files into the working folder if no image is built from them.

        Raises:
            EnvError: the provider refused; no sandbox is left.
        """
        keys = ("docker_image", "build_timeout_sec", "cpus", "memory_mb", "storage_mb", "workdir")
        given = table.model_dump(include=set(keys), exclude_none=True)
        sandbox_id = f"agentrl-{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{uuid.uuid4().hex[:12]}"
        spec = ContainerSpec(
            str(folder), environment=environment, user="" if user is None else str(user)
        )
        sandbox = cls(provider, sandbox_id, spec)
        try:
            started = await provider.ask(
                "start",
                id=sandbox_id,
                folder=str(folder.resolve()),
                name=name,
                config=given,
                network="no-network" if network == "none" else "public",
                environment=dict(environment),
                upload=upload,
            )
        except BaseException:
            await sandbox.end()
            raise
        sandbox.spec = replace(spec, workdir=started["workdir"])
        return sandbox

    @property
    def workdir(self) -> str:
        return self.spec.workdir

    @property
    def variables(self) -> Mapping[str, str]:
        return self.spec.environment

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
        started, seconds = time.monotonic(), math.ceil(timeout_s)
        command = shlex.join(
            ["/bin/bash", "-c", _BOUNDED, "bash", str(seconds), str(max_bytes), *argv]
        )
        if len(command.encode()) > _MAX_COMMAND_BYTES:
            output, code = "bash: the command is too long for this sandbox\n", 126
        else:
            ran = await self.provider.ask(
                "execute",
                id=self.id,
                command=command,
                seconds=seconds,
                cwd=self.workdir,
                env=dict(environment or {}),
                user="root" if user == ROOT else user or self.spec.user or None,
            )
            output, code = ran["output"] + ran["errors"], ran["exit_code"]
        taken_s = time.monotonic() - started
        timed_out = taken_s >= seconds and code in (124, 137)
        content = output.encode()
        flooded = len(content) >= max_bytes
        if add is not None:
            add(1, content)
            content = b""
        ended = None if timed_out or flooded else code
        return ProgramResult(content, "", ended, timed_out, flooded, taken_s)

    async def put(self, archive: bytes | IO[bytes], folder: str = "/") -> None:
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            file.write(archive if isinstance(archive, bytes) else archive.read())
            file.flush()
            await self.provider.ask("upload", id=self.id, source=file.name, target=_TAR)
        await as_root(self, 'tar -xf "$2" -C "$1" && rm -f -- "$2"', folder, _TAR)

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        read = '[ -f "$1" ] && [ ! -L "$1" ] || exit 0; echo +; head -c "$2" -- "$1" | base64'
        found = await as_root(self, read, path, str(max_bytes + 1), code=SCRIPT_FAILED)
        content = base64.b64decode(found.partition(b"+")[2])
        return content if found.startswith(b"+") and len(content) <= max_bytes else None

    async def carry_folders(self, target: Box, paths: Sequence[str]) -> list[str]:
        """Copies files and folders to the same paths in another sandbox; missing ones are skipped.

        Returns:
            What was left out, as `PATH: reason`.

        Raises:
            EnvError: they are too large, their archive cannot be read, or the provider failed.
        """
        there = (
            'tar="$1"; limit="$2"; shift 2; cd /; for each; do [ -e "$each" ] && printf "%s\\0" '
            '".$each"; done | tar -c --null -T - -f - | head -c "$limit" > "$tar"; exit 0'
        )
        limit = str(MAX_CARRIED_BYTES + 1)
        await as_root(self, there, _TAR, limit, *paths, code=SCRIPT_FAILED)
        left_out: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "work.tar"
            await self.provider.ask("download", id=self.id, source=_TAR, target=str(file))
            if file.stat().st_size > MAX_CARRIED_BYTES:
                raise EnvError(
                    f"the agent changed more than {MAX_CARRIED_BYTES >> 20} MiB", code=TOO_LARGE
                )
            chosen = file.with_name("chosen.tar")
            try:
                await asyncio.to_thread(_choose, file, chosen, paths, left_out)
            except tarfile.TarError as error:
                raise EnvError(f"its archive can't be read: {error}", code=SCRIPT_FAILED) from error
            with chosen.open("rb") as opened:
                await target.put(opened)
        return left_out

    async def end(self) -> None:
        """Removes the sandbox, even if this call is cancelled."""
        try:
            await asyncio.shield(self.provider.ask("stop", id=self.id))
        except EnvError as error:
            logger.warning(
                "sandbox %s could not be removed and stays until this process ends: %s",
                self.id,
                error,
            )


def _choose(source: Path, target: Path, paths: Sequence[str], left_out: list[str]) -> None:
    """Copies the members of an archive from an agent's sandbox that belong to `paths`; appends the
    others to `left_out`, as `PATH: reason`."""
    links: set[str] = set()
    with (
        tarfile.open(source) as given,
        tarfile.open(target, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in given:
            path = posixpath.normpath("/" + member.name)
            above = itertools.accumulate(path.split("/")[1:], lambda a, b: f"{a}/{b}", initial="")
            reason = None
            if not any(path == each or path.startswith(f"{each}/") for each in paths):
                reason = "not one of the artifacts"
            elif not links.isdisjoint(above):
                reason = "behind a link"
            elif not (member.isreg() or member.isdir() or member.issym()):
                reason = "neither a file, a folder nor a link"
            reason = reason or is_hidden(path, member, b"")
            if reason:
                left_out.append(f"{path}: {reason}")
                continue
            if member.issym():
                links.add(path)
            member.name, member.pax_headers = path[1:], {}
            archive.addfile(member, given.extractfile(member) if member.isreg() else None)
