"""`agentrl inference command`: how the servers of a run are started on other machines.

A run that starts its servers itself uses the same settings, so the two cannot drift apart.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from agentrl.errors import ConfigError


def add_inference_commands(commands: argparse._SubParsersAction) -> None:
    """Adds the `inference` command to the command line."""
    inference = commands.add_parser(
        "inference",
        help="print how a run's servers are started on other machines",
        description="Servers that a run does not start itself.",
    )
    actions = inference.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = actions.add_parser(
        "command",
        help="the command line of a server for a run file",
        description="Print the command, with its environment, that starts a server which this "
        "run can train against; name its address in inference.urls. Keys of the run file are "
        "options, such as --inference.python vllm-env/bin/python. The weight routes ask for no "
        "token: listen where only the trainer can connect.",
        allow_abbrev=False,
    )
    command.add_argument("run_file", type=Path, metavar="RUN.toml", help="configuration of the run")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; 127.0.0.1")
    command.add_argument("--port", type=int, default=8000, help="8000")
    command.add_argument(
        "--platform",
        choices=["cuda", "cpu"],
        default="cuda",
        help="what the server computes on; cuda",
    )
    command.add_argument(
        "--plugin-dir",
        type=Path,
        metavar="DIR",
        help="where the servers' half of a weight update is written, on a disk that they see; "
        "plugin in the run's directory",
    )
    command.set_defaults(handler=_print_command, takes_overrides=True)


def _print_command(arguments: argparse.Namespace) -> int:
    from agentrl.config import load_config
    from agentrl.inference.backends import BACKENDS
    from agentrl.inference.weights.plugin import write_plugin
    from agentrl.train.serving import server_settings

    config = load_config(arguments.run_file, arguments.overrides)
    if not config.inference.has_servers:  # the command is for a change to servers
        inference = config.inference.model_copy(update={"backend": "vllm"})
        config = config.model_copy(update={"inference": inference})
    program = BACKENDS[config.inference.backend].program
    if config.model.lora.rank:
        raise ConfigError(
            "a server for an adapter needs the adapter's folder, which the run writes when it "
            "starts: let the run start its servers, or see docs/vllm.md, Adapters"
        )
    plugin_dir = arguments.plugin_dir or config.run.path / "plugin"
    settings = server_settings(
        config,
        config.model.path,
        log_dir=config.run.path / "logs",
        plugin_dir=None if program.package != "vllm" else write_plugin(plugin_dir),
        transfer_backend="agentrl" if config.inference.transfer == "file" else "nccl",
        python=config.inference.python or "python",
    )
    variables = program.variables(settings, arguments.platform)
    command = program.command(settings, arguments.port, arguments.platform, host=arguments.host)
    print(shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *command]))
    return 0
