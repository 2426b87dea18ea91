"""A real vLLM server for the tests of weight sync, run by AGENTRL_VLLM_PYTHON."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from agentrl.inference.weights.plugin import write_plugin
from agentrl.runtime import signal_group, start_group

START_S = 1200.0


def python_of_vllm() -> str | None:
    return os.environ.get("AGENTRL_VLLM_PYTHON")


@contextlib.contextmanager
def vllm_server(
    model: Path,
    work_dir: Path,
    *,
    dtype: str = "float32",
    backend: str = "agentrl",
    flags: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[str]:
    """The address of a server on loopback; its whole process group ends with the block."""
    python = python_of_vllm()
    if python is None:
        raise RuntimeError("set AGENTRL_VLLM_PYTHON to the python of an environment with vLLM")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_path = work_dir / f"vllm-{port}.log"
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", "4096", "--max-num-seqs", "64"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-scale-out", "--enable-prefix-caching"),
        "--enforce-eager",  # nothing to compile: half the time to start
        *("--weight-transfer-config", f'{{"backend": "{backend}"}}', *flags),
    ]
    if dtype == "bfloat16":
        command += ["--hf-overrides", '{"head_dtype": "float32"}']
    settings = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(write_plugin(work_dir / "plugin")),
    }
    with log_path.open("wb") as log:
        process = start_group(
            command, stdout=log, stderr=subprocess.STDOUT, env=settings | (environment or {})
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_healthy(url, process, log_path)
            yield url
        finally:
            _stop(process)


def _wait_until_healthy(url: str, process: subprocess.Popen, log_path: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    lines = log_path.read_text(errors="replace").splitlines()[-40:]
    raise RuntimeError("vLLM did not start:\n" + "\n".join(lines))


def _stop(process: subprocess.Popen) -> None:
    signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()
