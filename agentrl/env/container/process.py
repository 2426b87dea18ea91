"""Runs programs on this machine, below a guard, in a folder of their own.

Nothing keeps the programs in: they may read and write what this process may. `put` and `get` reach
the box's folder alone. What the programs start ends with them and with this process, and the folder
is removed at the end.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from agentrl.env.container.box import MAX_STREAM_BYTES, Box, ProgramResult, Sink
from agentrl.errors import EnvError
from agentrl.runtime import run_guarded

GRACE_S = 5.0
"""Seconds that a program which is told to stop may take."""


class ProcessBox(Box):
    """A folder, made at once, in which programs run.

    Of their output only the last `max_bytes` are read: nothing is killed for writing more."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """
        Args:
            environ: all variables of programs.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-box-"))
        """Holds the working folder, and what its maker puts beside that."""
        self.environ = dict(environ)
        self._work = self.folder / "work"
        self._work.mkdir()

    @property
    def workdir(self) -> str:
        return str(self._work)

    @property
    def variables(self) -> Mapping[str, str]:
        return self.environ

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
        if user is not None or not self._work.is_dir():
            raise EnvError("the box has ended, or its programs should run as another user")
        started = time.monotonic()
        status, output, errors = await run_guarded(
            argv,
            grace_s=GRACE_S,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            cwd=self._work,
            env={**self.environ, **(environment or {})},
        )
        if add is not None:
            add(1, output)
            add(2, errors)
            output = errors = b""
        text = errors.decode(errors="replace").strip()
        seconds = time.monotonic() - started
        return ProgramResult(output, text, status, timed_out=status is None, seconds=seconds)

    async def put(self, archive: bytes | IO[bytes], folder: str = "/") -> None:
        file = io.BytesIO(archive) if isinstance(archive, bytes) else archive
        with tarfile.open(fileobj=file) as opened:
            await asyncio.to_thread(opened.extractall, self._inside(folder), filter="data")

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        file = self._inside(path)
        if not file.is_file() or file.stat().st_size > max_bytes:
            return None
        return file.read_bytes()

    def _inside(self, path: str) -> Path:
        inside = (self._work / path).resolve()
        if not inside.is_relative_to(self.folder.resolve()):
            raise EnvError(f"{path} is outside of the box, which is a folder of this machine")
        return inside

    async def end(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
