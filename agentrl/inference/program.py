"""Describes how a server is started: settings, command line and environment variables.

`agentrl.inference.vllm_command` and `.sglang_command` each define one `Program`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agentrl.errors import InferenceError

_RANK_VARIABLE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.+"
)
"""Variables that torchrun sets for a rank. With them, a server's torch would wait for the store of
the run's own launcher."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerSettings:
    python: str
    """Interpreter of the virtual environment that holds the server's packages."""
    model: str
    """Directory or hub name of the weights that a server starts with."""
    log_dir: Path
    """Directory for the servers' logs, `vllm-<n>.log` or `sglang-<n>.log`. Restarts append."""
    num_servers: int = 1
    """Number of servers, each with the whole model. They share the visible GPUs evenly."""
    served_model_name: str = "policy"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_model_len: int | None = None
    """Largest number of tokens of a prompt and its reply; None takes the model's limit."""
    plugin_dir: Path | None = None
    """vLLM: directory with the weight-transfer plugin and its entry point
    (`agentrl.inference.weights.plugin`)."""
    transfer_backend: str = "agentrl"
    """vLLM, with the plugin: the backend that receives new weights, `agentrl` or one of vLLM's."""
    adapter: Path | None = None
    """vLLM: folder of a low-rank adapter to serve as `served_model_name`. The bare model is served
    under that name with `-base` appended."""
    sleeps: bool = False
    """Makes the server able to give back its GPU's memory while the trainer learns. Has no effect
    on a CPU."""
    extra_args: Sequence[str] = ()
    """Further command-line arguments. They follow agentrl's own, except --port, and override
    them."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    startup_timeout_s: float = 600.0
    """Seconds within which a server must answer after its start."""
    unhealthy_after_s: float = 30.0
    """Seconds without an answer from `Program.alive_path` after which a server is restarted."""
    hung_after_s: float = 300.0
    """Seconds without an answer from `Program.engine_path` after which a server is restarted. Must
    exceed the time of an engine's step, and of loading weights, during which it does not answer."""
    seed: int = 0
    """Random seed of every server."""


class MakesCommand(Protocol):
    def __call__(
        self, settings: ServerSettings, port: int, platform: str, *, host: str = "127.0.0.1"
    ) -> list[str]:
        """Returns the command line of a server.

        Args:
            platform: kind of device that the server computes on: `cpu`, `cuda`, ...
            host: address to listen on. Anyone who can reach it can use the weight routes, which
                need no token.
        """
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Program:
    """Serving software, as the launcher starts and watches it."""

    name: str
    package: str
    """Module that its virtual environment must have."""
    ask_platform: str
    """Python code that prints the kind of device it computes on and the number of devices."""
    command: MakesCommand
    variables: Callable[[ServerSettings, str], dict[str, str]]
    """Returns the environment variables that a server needs besides its machine's, given the kind
    of device (empty if not known yet)."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set unless this process has them."""
    sockets_variable: str | None = None
    """Environment variable for the folder of the sockets between a server's processes."""
    alive_path: str
    """Route that the HTTP process answers with 200, whatever its engine is doing."""
    engine_path: str
    """Route that the engine answers, between two steps."""
    remedies: Mapping[str, str]
    """Text in a log -> the remedy for what it reports."""
    install: str
    """Commands that create its virtual environment."""
    beside: Path
    """Interpreter that `make vllm` or `make sglang` creates, relative to the working directory."""
    python_variable: str
    """Environment variable that names an interpreter."""
    share_flag: str
    """Command-line flag for the share of a GPU's memory that a server takes."""


def server_environment(
    program: Program, settings: ServerSettings, platform: str = ""
) -> dict[str, str]:
    """Returns the environment variables of every server, based on this process's own.

    Args:
        platform: kind of device that the server computes on; empty if not known yet.
    """
    environment = {
        name: value for name, value in os.environ.items() if not _RANK_VARIABLE.fullmatch(name)
    }
    environment.pop("PYTHONHOME", None)
    return environment | own_variables(program, settings, platform)


def own_variables(program: Program, settings: ServerSettings, platform: str) -> dict[str, str]:
    """Returns the environment variables that every server gets besides its machine's: those that
    it needs, and the program's defaults, or what this process sets in their place."""
    defaults = {name: os.environ.get(name, value) for name, value in program.defaults.items()}
    return defaults | program.variables(settings, platform)


def share_of_devices(visible: str, number: int, num_servers: int) -> str:
    """Returns server `number`'s part of the devices `visible`, both as in CUDA_VISIBLE_DEVICES.

    Raises:
        InferenceError: the servers cannot share the devices evenly.
    """
    devices = [device for device in visible.split(",") if device]
    share = len(devices) // num_servers
    if share * num_servers != len(devices):
        raise InferenceError(
            f"{num_servers} servers cannot share {len(devices)} GPUs ({visible}) evenly; change "
            "inference.num_servers or CUDA_VISIBLE_DEVICES"
        )
    return ",".join(devices[number * share : (number + 1) * share])
