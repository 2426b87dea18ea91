"""Builds the command line and environment variables of an SGLang server."""

from __future__ import annotations

from pathlib import Path

from agentrl.inference.program import Program, ServerSettings

_CPU_TOKENS = 8192
"""Smallest number of tokens in the cache of keys and values on a CPU. Without a limit SGLang takes
most of the memory."""


def server_command(
    settings: ServerSettings, port: int, platform: str, *, host: str = "127.0.0.1"
) -> list[str]:
    """Returns the command line of an SGLang server; see `MakesCommand`."""
    path = Path(settings.model)
    command = [settings.python, "-m", "sglang.launch_server"]
    command += ["--model-path", str(path.resolve()) if path.is_dir() else settings.model]
    command += ["--served-model-name", settings.served_model_name, "--dtype", settings.dtype]
    command += ["--random-seed", str(settings.seed)]
    command += ["--sampling-defaults", "openai"]  # not the model's own
    command += ["--log-level-http", "warning", "--host", host]
    if settings.dtype == "bfloat16":
        # Compute logits in float32, as the trainer does.
        command.append("--enable-fp32-lm-head")
    if settings.max_model_len is not None:
        command += ["--context-length", str(settings.max_model_len)]
    if platform == "cpu":
        num_tokens = max(_CPU_TOKENS, 4 * (settings.max_model_len or 0))
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--disable-overlap-schedule"]
        command += ["--max-total-tokens", str(num_tokens)]
    elif settings.sleeps:
        command.append("--enable-memory-saver")
    return [*command, *settings.extra_args, "--port", str(port)]


def server_variables(settings: ServerSettings, platform: str) -> dict[str, str]:
    """Returns the environment variables of an SGLang server; see `Program.variables`."""
    return {
        **({"SGLANG_USE_CPU_ENGINE": "1"} if platform == "cpu" else {}),
        "TOKENIZERS_PARALLELISM": "false",
        **settings.env,
        # Keep this interpreter's packages out of the server.
        "PYTHONPATH": "",
    }


SGLANG = Program(
    name="SGLang",
    package="sglang",
    ask_platform="import sglang, torch; "
    "print('cuda' if torch.cuda.is_available() else 'cpu', torch.cuda.device_count())",
    command=server_command,
    variables=server_variables,
    # Not /health, which samples a token and waits while the server is paused.
    alive_path="/model_info",
    engine_path="/server_info",
    remedies={
        "unrecognized arguments": "this SGLang is too old for these flags; install 0.5.23 or newer",
        "Not enough memory": "lower --mem-fraction-static in inference.args, or free the device",
        "out of memory": "lower --mem-fraction-static in inference.args, or free the device",
        "address already in use": "another process took the port; start again",
    },
    install="python -m venv sglang-env && sglang-env/bin/pip install sglang; "
    "`make sglang` without a GPU",
    beside=Path(".venv-sglang/bin/python"),
    python_variable="AGENTRL_SGLANG_PYTHON",
    share_flag="--mem-fraction-static",
)
