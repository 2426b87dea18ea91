"""The settings, command line and environment that a server is started with.

`agentrl.inference.vllm_command` and `.sglang_command` each describe one `Program`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agentrl.errors import InferenceError

_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.+"
)
"""What torchrun tells a rank. In a server torch would wait for the store of the run's launcher."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerSettings:
    python: str
    """Interpreter of the virtual environment that holds the server's packages."""
    model: str
    """Directory or hub name of the weights a server starts with."""
    log_dir: Path
    """Gets `vllm-<n>.log` or `sglang-<n>.log` of every server, appended to by restarts."""
    num_servers: int = 1
    """Each with the whole model. They share the visible GPUs evenly."""
    served_model_name: str = "policy"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_model_len: int | None = None
    """Tokens of prompt and reply; the model's own when None."""
    plugin_dir: Path | None = None
    """vLLM: directory with the weight-transfer plugin and its entry point
    (`agentrl.sync.plugin`)."""
    transfer_backend: str = "agentrl"
    """With the plugin: how new weights come, `agentrl` or one of vLLM's own."""
    align_rounding: bool = True
    """With the plugin, in bfloat16 and on a CPU: the server rounds where the trainer's model does
    (`agentrl.sync.vllm_plugin.rounding`), uncompiled."""
    adapter: Path | None = None
    """vLLM: folder of a low-rank adapter, which is then what is served as `served_model_name`; the
    bare model gets `-base` behind its name."""
    sleeps: bool = False
    """It can give its GPU's memory back while the trainer learns. A CPU has no such memory."""
    extra_args: Sequence[str] = ()
    """Further arguments of the server, after agentrl's own, which they override."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    startup_timeout_s: float = 600.0
    """Time until all servers have to answer."""
    unhealthy_after_s: float = 30.0
    """A living server that has not answered `Program.alive_path` for so long is restarted."""
    hung_after_s: float = 300.0
    """The same for its engine and `Program.engine_path`. Longer than any of its steps takes, and
    than it needs to load weights, during which it answers nothing."""
    seed: int = 0
    """The random seed of every server."""

    @property
    def aligns_rounding(self) -> bool:
        return self.align_rounding and self.dtype == "bfloat16" and self.plugin_dir is not None


class MakesCommand(Protocol):
    def __call__(
        self, settings: ServerSettings, port: int, platform: str, *, host: str = "127.0.0.1"
    ) -> list[str]:
        """Returns the command line of a server.

        Args:
            platform: what the server computes on: `cpu`, `cuda`, ...
            host: address to listen on. The weight routes ask for no token.
        """
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Program:
    """A serving software, as the launcher starts and watches it."""

    name: str
    package: str
    """The module that its virtual environment must hold."""
    ask_platform: str
    """Python that prints the device it computes on and how many of them it sees."""
    command: MakesCommand
    variables: Callable[[ServerSettings, str], dict[str, str]]
    """Environment variables that a server needs beside those of its machine, by what it computes
    on (empty where that is not known yet)."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Further ones, unless this process has them."""
    sockets_variable: str | None = None
    """Names the folder of the sockets between a server's processes."""
    alive_path: str
    """Answered with 200 by the process that answers HTTP, whatever its engine does."""
    engine_path: str
    """Answered by the engine, between two steps."""
    remedies: Mapping[str, str]
    """What the end of a log says, and what to do about it."""
    install: str
    """How its virtual environment is made."""
    beside: Path
    """The interpreter that `make vllm` or `make sglang` leaves beside a checkout."""
    python_variable: str
    """Environment variable that names an interpreter."""
    share_flag: str
    """The command-line flag for the share of a GPU's memory that it takes."""


def server_environment(
    program: Program, settings: ServerSettings, platform: str = ""
) -> dict[str, str]:
    """Environment variables of every server, from this process's own.

    Args:
        platform: what the server computes on; empty where that is not known yet.
    """
    environment = {
        name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)
    }
    environment.pop("PYTHONHOME", None)
    defaults = {name: value for name, value in program.defaults.items() if name not in environment}
    return environment | defaults | program.variables(settings, platform)


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
