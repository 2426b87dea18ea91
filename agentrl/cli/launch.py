"""`agentrl launch`: a run on one machine, in a Slurm job, on a Ray cluster or on Kubernetes.

It starts the files of `examples/cluster`, which can also be used by hand: it fills in the number of
machines and GPUs, and checks the run file before anything is submitted.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.cli.examples import example_file
from agentrl.errors import ConfigError

PLACES = ("local", "slurm", "ray", "k8s")


@dataclass(slots=True, frozen=True)
class Launch:
    """A command to start, with the environment variables that it needs besides this process's."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    manifest: str = ""
    """For Kubernetes: the text of the file that `command` names last."""

    def shown(self) -> str:
        """Returns the command as a shell line, after the manifest if there is one."""
        set_to = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        line = " ".join([*set_to, shlex.join(self.command)])
        return f"{self.manifest}# {line}" if self.manifest else line


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
            f"--server-nodes is that of --on slurm; with --on {on} "
            + ("one pod serves" if on == "k8s" else "name servers in inference.urls")
        )
    serves = on == "k8s" or server_nodes > 0
    if serves and (config.inference.backend == "sglang" or config.model.lora.rank):
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
    if on == "ray":
        script = str(example_file("cluster/ray_train.py"))
        return Launch([sys.executable, script, rest[0], str(nodes * gpus), *rest[1:]])
    name = re.sub(r"[^\w.-]", "-", config.run.name)
    manifest = _jobset(example_file("cluster/jobset.yaml").read_text(), name, rest, nodes, gpus)
    return Launch(["kubectl", "apply", "-f", f"{name}.jobset.yaml"], manifest=manifest)


def _jobset(text: str, name: str, rest: list[str], nodes: int, gpus: int) -> str:
    """Returns the manifest for this number of machines and GPUs, a run of this name and a run file
    in the volume."""
    run_file = shlex.quote(Path(rest[0]).name)
    options = "".join(f" {shlex.quote(each)}" for each in rest[1:])
    for old, new in (
        ("completions: 2", f"completions: {nodes}"),
        ("parallelism: 2", f"parallelism: {nodes}"),
        ("--nnodes 2 --nproc-per-node 8", f"--nnodes {nodes} --nproc-per-node {gpus}"),
        ("nvidia.com/gpu: 8", f"nvidia.com/gpu: {gpus}"),
        ("/runs/run/checkpoints", f"/runs/{name}/checkpoints"),
        # A folder of its own: the checkpoints of another run would be gone on with.
        ("--run.dir /runs/run ", f"--run.dir /runs/{name} "),
        ("/runs/run.toml", f"/runs/{run_file}{options}"),
    ):
        if old not in text:
            raise ConfigError(f"examples/cluster/jobset.yaml has no {old!r} any more")
        text = text.replace(old, new)
    return text


def _gpus_here() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def add_launch_command(commands: argparse._SubParsersAction) -> None:
    """Adds the `launch` command to the command line."""
    command = commands.add_parser(
        "launch",
        help="start a run on several GPUs, in Slurm, on Ray or on Kubernetes",
        description="Check a run file and start its ranks by the files of examples/cluster. Keys "
        "of the run file are options, such as --run.seed 2. Slurm reads partition, account and "
        "time limit from its own variables (SBATCH_PARTITION, ...), Ray its cluster from "
        "RAY_ADDRESS; on Kubernetes the run file and its model lie in the volume that the "
        "manifest names (docs/scaling.md).",
        allow_abbrev=False,
    )
    command.add_argument("run_file", type=Path, metavar="RUN.toml", help="configuration of the run")
    command.add_argument("--on", choices=PLACES, default="local", help="where; local")
    command.add_argument("--nodes", type=int, default=1, help="machines that train; 1")
    command.add_argument(
        "--gpus", type=int, help="of each machine; all of this one, or 8 elsewhere"
    )
    command.add_argument(
        "--server-nodes", type=int, default=0, help="machines of a Slurm job that serve vLLM; 0"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print what would be started, and stop"
    )
    command.set_defaults(handler=_launch, takes_overrides=True)


def _launch(arguments: argparse.Namespace) -> int:
    launch = plan(
        arguments.run_file,
        arguments.overrides,
        on=arguments.on,
        nodes=arguments.nodes,
        gpus=arguments.gpus,
        server_nodes=arguments.server_nodes,
    )
    if arguments.dry_run:
        print(launch.shown())
        return 0
    if launch.manifest:
        Path(launch.command[-1]).write_text(launch.manifest)
    # The scripts call torchrun and agentrl: those of this environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        os.execvpe(
            launch.command[0], launch.command, {**os.environ, "PATH": path, **launch.variables}
        )
    except FileNotFoundError:
        raise ConfigError(
            f"--on {arguments.on} needs {launch.command[0]!r}, which is not on this machine's PATH"
        ) from None
