"""Asks the official harness for specifications of tests and for reports (`official_worker`)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import EnvError
from agentrl.runtime import kill_group, start_group

FOLDER_PREFIX = "agentrl-grade-"
MEMORY_BYTES = 4 << 30
"""Address space of the harness' process, which reads the whole output of the tests."""
_TAIL_CHARS = 300


class HarnessError(EnvError):
    """The harness failed; `kind` is as in `Evidence.error_kind`."""

    def __init__(self, message: str, kind: str = "other") -> None:
        super().__init__(message, code="harness_failed")
        self.kind = kind


class _Harness:
    """The process. It starts with the first request, and again if it ended; it ends when this
    process does, because its input closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._folder: Path | None = None

    def folder(self) -> Path:
        """Returns the folder for runs, which is removed when this process ends."""
        with self._lock:
            self._start()
            assert self._folder is not None
            return self._folder

    def ask(self, request: dict[str, Any], timeout_s: float) -> Any:
        with self._lock:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(timeout_s, kill_group, [process])
            timer.start()
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            finally:
                timer.cancel()
                timer.join()
            if not line:
                kill_group(process)
                raise HarnessError(f"the process of the harness ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise HarnessError(answer["error"], answer["kind"])
        return answer["result"]

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._folder is None or not self._folder.is_dir():
            self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-P", "-m", "agentrl_swebench.official_worker"]
        with (self._folder / "worker.log").open("ab") as log:
            self._process = start_group(
                [*command, str(self._folder), str(MEMORY_BYTES)],
                cwd="/",
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self._process

    def _last_words(self) -> str:
        assert self._folder is not None
        text = (self._folder / "worker.log").read_text(errors="replace")
        return " ".join(text[-_TAIL_CHARS:].split()) or "killed, or out of time"


_harness = _Harness()


async def folder() -> Path:
    """Returns a new folder for a run, which is removed at the latest when this process ends."""
    return Path(tempfile.mkdtemp(dir=await asyncio.to_thread(_harness.folder)))


async def ask(
    action: Literal["prepare", "report", "run_report"], *, timeout_s: float = 120.0, **values: Any
) -> Any:
    """Calls a function of `official_worker` and returns its result.

    Raises:
        HarnessError: it raised an error, or its process was killed or took too long.
    """
    return await asyncio.to_thread(_harness.ask, {"action": action, **values}, timeout_s)
