"""`agentrl launch`: a run on one machine, in a Slurm job or on a Ray cluster.

It starts the files of `examples/cluster`, which can also be used by hand: it fills in the number of
machines and GPUs, and checks the run file before anything is submitted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.cli.examples import example_file
from agentrl.errors import ConfigError


@dataclass(slots=True, frozen=True)
class Launch:
    """A command to start, with the environment variables that it needs besides this process's."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        """Returns the command as a shell line."""
        set_to = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*set_to, shlex.join(self.command)])


def plan(
    run_file: Path,
    overrides: Sequence[str],
    *,
    on: str,
    nodes: int = 1,
    gpus: int | None = None,
    server_nodes: int = 0,
) -> Launch:
    """Returns the command that starts a run.

    Args:
        nodes: machines that train.
        gpus: of each machine, and ranks; those of this one when not given, or 8 elsewhere.
        server_nodes: machines of a Slurm job that serve vLLM beside them.

    Raises:
        ConfigError: the run file is invalid, or the machines do not exist there.
    """
    from agentrl.config import load_config

    config = load_config(run_file, overrides)
    if nodes < 1 or (gpus is not None and gpus < 1) or server_nodes < 0:
        raise ConfigError("--nodes and --gpus are at least 1, and --server-nodes at least 0")
    if server_nodes and on != "slurm":
        raise ConfigError(
            f"--server-nodes needs --on slurm; with --on {on} name servers in inference.urls"
        )
    if server_nodes and (config.inference.backend == "sglang" or config.model.lora.rank):
        raise ConfigError(
            f"the servers that --on {on} starts are vLLM with whole weights, and the run file has "
            + ("model.lora.rank" if config.model.lora.rank else "inference.backend = 'sglang'")
            + "; change that, or start a file of your own (examples/cluster)"
        )
    rest = [str(run_file), *overrides]
    if on == "local":
        if nodes > 1:
            raise ConfigError("--on local is this machine alone; leave --nodes out")
        ranks = {"NPROC": str(gpus or _gpus_here())}
        return Launch(["bash", str(example_file("cluster/torchrun.sh")), *rest], ranks)
    gpus = gpus or 8
    if on == "slurm":
        script = str(example_file("cluster/slurm.sbatch"))
        size = [f"--nodes={nodes + server_nodes}", f"--gpus-per-node={gpus}"]
        variables = {"TRAINERS": str(nodes), "NPROC": str(gpus)}
        if config.run.dir is not None:
            variables["RUN_DIR"] = str(config.run.dir)
        return Launch(["sbatch", *size, script, *rest], variables)
    script = str(example_file("cluster/ray_train.py"))
    return Launch([sys.executable, script, rest[0], str(nodes * gpus), *rest[1:]])


def _gpus_here() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def start(
    run_file: Path,
    overrides: Sequence[str],
    *,
    on: str,
    nodes: int,
    gpus: int | None,
    server_nodes: int,
    dry_run: bool,
) -> int:
    """Becomes the process that starts a run; with `dry_run` prints its command and returns 0.

    Raises:
        ConfigError: see `plan`; or the place's program is not on this machine.
    """
    launch = plan(run_file, overrides, on=on, nodes=nodes, gpus=gpus, server_nodes=server_nodes)
    if dry_run:
        print(launch.shown())
        return 0
    # The scripts call torchrun and agentrl: those of this environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        os.execvpe(
            launch.command[0], launch.command, {**os.environ, "PATH": path, **launch.variables}
        )
    except FileNotFoundError:
        raise ConfigError(
            f"--on {on} needs {launch.command[0]!r}, which is not on this machine's PATH"
        ) from None


def print_server(
    run_file: Path,
    overrides: Sequence[str],
    host: str,
    port: int,
    platform: str,
    plugin_dir: Path | None,
) -> int:
    """Prints the command of a server of a run, with the environment that the run would give it.

    Raises:
        ConfigError: the run file is invalid, or trains an adapter.
    """
    from agentrl.config import load_config
    from agentrl.inference.backends import BACKENDS
    from agentrl.inference.program import own_variables
    from agentrl.inference.weights.plugin import write_plugin
    from agentrl.train.serving import server_settings

    config = load_config(run_file, overrides)
    if not config.inference.has_servers:  # the command is for a change to servers
        inference = config.inference.model_copy(update={"backend": "vllm"})
        config = config.model_copy(update={"inference": inference})
    program = BACKENDS[config.inference.backend].program
    if config.model.lora.rank:
        raise ConfigError(
            "a server for an adapter needs the adapter's folder, which the run writes when it "
            "starts: let the run start its servers, or see docs/vllm.md, Adapters"
        )
    plugin_dir = plugin_dir or config.run.path / "plugin"
    settings = server_settings(
        config,
        config.model.path,
        log_dir=config.run.path / "logs",
        plugin_dir=None if program.package != "vllm" else write_plugin(plugin_dir),
        transfer_backend="agentrl" if config.inference.transfer == "file" else "nccl",
        python=config.inference.python or "python",
    )
    variables = own_variables(program, settings, platform)
    command = program.command(settings, port, platform, host=host)
    print(shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *command]))
    return 0
