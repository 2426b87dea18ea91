"""What a vLLM server is started with: its command line and its environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl.errors import InferenceError

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank may be."""
_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.+"
)
"""What torchrun tells a rank. In a server torch would wait for the store of the run's launcher."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerSettings:
    python: str
    """Interpreter of the virtual environment that holds vLLM."""
    model: str
    """Directory or hub name of the weights a server starts with."""
    log_dir: Path
    """Gets `vllm-<n>.log` of every server, appended to by restarts."""
    num_servers: int = 1
    """Each with the whole model. They share the visible GPUs evenly."""
    served_model_name: str = "policy"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_model_len: int | None = None
    """Tokens of prompt and reply; the model's own when None."""
    plugin_dir: Path | None = None
    """Directory with the weight-transfer plugin and its entry point (`agentrl.sync.plugin`)."""
    transfer_backend: str = "agentrl"
    """With the plugin: how new weights come, `agentrl` or one of vLLM's own."""
    align_rounding: bool = True
    """With the plugin, in bfloat16 and on a CPU: the server rounds where the trainer's model does
    (`agentrl.sync.vllm_plugin.rounding`), uncompiled."""
    adapter: Path | None = None
    """Folder of a low-rank adapter, which is then what is served as `served_model_name`; the bare
    model gets `-base` behind its name."""
    sleeps: bool = False
    """It can give its GPU's memory back while the trainer learns. A CPU has no such memory."""
    extra_args: Sequence[str] = ()
    """Further arguments of the server, after agentrl's own, which they override."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    startup_timeout_s: float = 600.0
    """Until all servers answer."""
    unhealthy_after_s: float = 30.0
    """Without an answer of /health, a living server is restarted."""
    hung_after_s: float = 300.0
    """The same for its engine. Longer than any of its steps takes, and than it needs to load
    weights, during which it answers nothing."""
    seed: int = 0
    """Of every server."""

    @property
    def aligns_rounding(self) -> bool:
        return self.align_rounding and self.dtype == "bfloat16" and self.plugin_dir is not None


def server_command(
    settings: ServerSettings, port: int, platform: str, *, host: str = "127.0.0.1"
) -> list[str]:
    """Returns the command line of a server.

    Args:
        platform: what vLLM computes on: `cpu`, `cuda`, ...
        host: address to listen on. The weight routes ask for no token.
    """
    path = Path(settings.model)
    adapter = settings.adapter
    command = [
        *(settings.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(path.resolve()) if path.is_dir() else settings.model),
        *("--served-model-name", settings.served_model_name + ("-base" if adapter else "")),
        *("--dtype", settings.dtype),
        *("--seed", str(settings.seed)),
        # Log-probabilities of the distribution that was sampled, after the temperature.
        *("--logprobs-mode", "processed_logprobs"),
        # Without the model's own sampling defaults.
        *("--generation-config", "vllm"),
        # The endpoint that takes and gives token ids and says which weights sampled them.
        "--enable-scale-out",
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
        *("--host", host),
    ]
    if settings.dtype == "bfloat16":
        # Logits in float32, as the trainer computes them: rounded to bfloat16, a logit of 20 is
        # off by up to 0.06.
        command += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
    if settings.max_model_len is not None:
        command += ["--max-model-len", str(settings.max_model_len)]
    if settings.plugin_dir is not None:
        backend = json.dumps({"backend": settings.transfer_backend})
        command += ["--weight-transfer-config", backend]
    if settings.sleeps and platform != "cpu":
        command.append("--enable-sleep-mode")
    if adapter is not None:
        command += _adapter_arguments(adapter, settings.served_model_name)
    # Compiled for a CPU, an adapter's layers do for every batch what the first one needed.
    if platform == "cpu" and (settings.aligns_rounding or adapter is not None):
        command.append("--enforce-eager")
    return [*command, *settings.extra_args, "--port", str(port)]


def server_environment(settings: ServerSettings) -> dict[str, str]:
    """Environment variables of every server, from this process's own."""
    environment = {
        **{name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)},
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),  # GiB
        **server_variables(settings, platform=""),
    }
    environment.pop("PYTHONHOME", None)
    return environment


def server_variables(settings: ServerSettings, platform: str) -> dict[str, str]:
    """Returns the environment variables that a server needs beside those of its machine.

    Args:
        platform: what vLLM computes on; empty where that is not known yet.
    """
    aligned = settings.aligns_rounding and platform == "cpu"
    return {
        "VLLM_NO_USAGE_STATS": "1",
        # The weight routes. They are open to everyone who can connect: loopback only.
        "VLLM_SERVER_DEV_MODE": "1",
        **({"AGENTRL_ALIGN_ROUNDING": "1"} if aligned else {}),
        **settings.env,
        # This interpreter's packages are not the server's.
        "PYTHONPATH": "" if settings.plugin_dir is None else str(settings.plugin_dir.resolve()),
    }


def share_of_devices(visible: str, number: int, num_servers: int) -> str:
    """The part of CUDA_VISIBLE_DEVICES that one of several servers gets.

    Raises:
        InferenceError: they cannot share the devices evenly.
    """
    devices = [device for device in visible.split(",") if device]
    share = len(devices) // num_servers
    if share * num_servers != len(devices):
        raise InferenceError(
            f"{num_servers} servers cannot share {len(devices)} GPUs ({visible}) evenly; change "
            "inference.num_servers or CUDA_VISIBLE_DEVICES"
        )
    return ",".join(devices[number * share : (number + 1) * share])


def _adapter_arguments(adapter: Path, name: str) -> list[str]:
    made = json.loads((adapter / "adapter_config.json").read_text())
    return [
        "--enable-lora",
        *("--max-loras", "1", "--max-cpu-loras", "1"),
        *("--max-lora-rank", str(min(rank for rank in _LORA_RANKS if rank >= made["r"]))),
        # Without the head: prompt log-probabilities of a head that might have an adapter kill a
        # server that has other requests in the same batch.
        *("--lora-target-modules", *made["target_modules"]),
        *("--lora-modules", f"{name}={adapter.resolve()}"),
    ]
