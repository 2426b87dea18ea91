"""A real SGLang for tests: found by the environment variable AGENTRL_SGLANG_PYTHON."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from vllm_fixture import START_S, launched
from web_servers import in_thread

from agentrl.inference.launcher import ServerLauncher, _free_ports
from agentrl.inference.program import ServerSettings
from agentrl.inference.sglang_command import SGLANG

TOY_MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def sglang_python() -> str:
    """The interpreter of SGLang's virtual environment; skips the test where there is none."""
    python = os.environ.get("AGENTRL_SGLANG_PYTHON", "")
    if not python:
        pytest.skip("no SGLang: set AGENTRL_SGLANG_PYTHON to its virtual environment's python")
    return python


@contextlib.contextmanager
def running_sglang(log_dir: Path, **settings) -> Iterator[ServerLauncher]:
    """Servers of the quickstart's model in float32 that live as long as the block, watched by a
    thread of their own."""
    arguments = dict(
        python=sglang_python(),
        model=str(TOY_MODEL),
        dtype="float32",
        max_model_len=4096,
        log_dir=log_dir,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        startup_timeout_s=600.0,
    )
    known = ServerSettings(**arguments | settings)  # pyright: ignore[reportArgumentType]
    with in_thread(launched(ServerLauncher(known, SGLANG)), START_S) as launcher:
        yield launcher


@contextlib.contextmanager
def running_router(log: Path, *workers: str) -> Iterator[str]:
    """A real sglang-router that lives as long as the block and has these workers."""
    port, metrics = _free_ports(2)
    command = [
        *(sglang_python(), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(port), "--prometheus-port", str(metrics), "--policy", "round_robin"),
        *(["--worker-urls", *workers] if workers else []),
    ]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        router = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if len(httpx.get(f"{url}/workers").json()["workers"]) == len(workers):
                    break
            assert router.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        router.kill()
        router.wait()
