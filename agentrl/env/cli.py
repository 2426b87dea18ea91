"""`agentrl env ...`. Handlers import what they need, so that `--help` stays quick."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from agentrl.errors import ConfigError

_NAME_HELP = "a registered id, module:Class, or path/to/env.py:Class"


def add_env_commands(commands: argparse._SubParsersAction) -> None:
    """Add `env` and its subcommands. Each sets `handler`, which returns an exit status."""
    env = commands.add_parser(
        "env",
        help="list, inspect and serve environments",
        description="List, inspect and serve environments.",
    )
    subcommands = env.add_subparsers(title="commands", metavar="COMMAND", required=True)

    listing = subcommands.add_parser(
        "list",
        help="show the environments that are installed",
        description="Show the environments that installed packages offer. One of your own needs "
        "no installation: name it as module:Class or path/to/env.py:Class.",
    )
    listing.set_defaults(handler=_list)

    info = subcommands.add_parser(
        "info",
        help="show an environment's task splits, tools and configuration",
        description="Load an environment in this process and show its task splits, its tools as "
        "the agent sees them, and the keys of its configuration.",
    )
    info.add_argument("id", metavar="ID", help=_NAME_HELP)
    _add_config(info)
    info.set_defaults(handler=_info)

    serve = subcommands.add_parser(
        "serve",
        help="serve environments over HTTP",
        description="Serve environments over HTTP until interrupted. SIGTERM drains: open "
        "sessions may go on for a few seconds, new ones are refused. The API is described at "
        "/openapi.json.",
    )
    serve.add_argument("id", metavar="ID", nargs="+", help=_NAME_HELP)
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; one that other machines can reach needs a token "
        "(default: %(default)s)",
    )
    serve.add_argument(
        "--port", type=int, default=8700, help="0 takes a free one (default: %(default)s)"
    )
    serve.add_argument(
        "--token",
        help="what clients must present; better set the variable AGENTRL_ENV_TOKEN, which other "
        "users of the machine cannot read",
    )
    serve.add_argument(
        "--max-sessions",
        type=_positive,
        metavar="N",
        help="live sessions over all environments (default: each environment's own limit)",
    )
    serve.add_argument(
        "--worker-threads",
        type=_positive,
        default=32,
        metavar="N",
        help="threads for environment methods that are not async (default: %(default)s)",
    )
    _add_config(serve)
    serve.set_defaults(handler=_serve)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE|JSON",
        help="configuration of the environment, repeatable: key=value, the value being JSON or "
        "else text, or a whole JSON object",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _list(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from agentrl.env.registry import available

    table = Table(box=None, pad_edge=False)
    for heading in ("id", "class"):
        table.add_column(heading, overflow="fold")
    for name, target in available().items():
        table.add_row(name, target)
    Console().print(table)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.text import Text

    from agentrl.env.client import make

    env = make(arguments.id, **_read_config(arguments.config)).sync
    try:
        info = env.info()
    finally:
        env.close()
    console = Console(highlight=False)

    def entry(head: str, text: str) -> None:
        console.print(f"  {escape(head)}", soft_wrap=True)
        if text:
            console.print(Padding(Text(" ".join(text.split())), (0, 0, 0, 6), expand=False))

    console.print(f"[bold]{escape(info.id)}[/bold]")
    if info.description:
        console.print(escape(info.description))
    console.print("\n[bold]task splits[/bold]")
    for name, size in info.splits.items():
        entry(f"{name}: {'generated without end' if size is None else f'{size:,} tasks'}", "")
    if not info.splits:
        entry("none; sessions bring their own task", "")
    if info.tools:
        console.print("\n[bold]tools[/bold]")
    for spec in info.tools:
        function: Any = spec["function"]
        parameters = ", ".join(function["parameters"]["properties"])
        entry(f"{function['name']}({parameters})", function["description"])
    keys = info.config_schema.get("properties", {})
    if keys:
        console.print("\n[bold]configuration keys and their defaults[/bold]")
    for name, schema in keys.items():
        default = f"= {json.dumps(schema['default'])}" if "default" in schema else "(required)"
        entry(f"{name} {default}", schema.get("description", ""))
    console.print(f"\nat most {info.max_sessions:,} sessions at a time in one process")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    import logging

    from agentrl.env import registry, server
    from agentrl.env.base import load_config
    from agentrl.env.protocol import TOKEN_VARIABLE

    config = _read_config(arguments.config)
    environments = [registry.resolve(name) for name in arguments.id]
    if config and len(environments) > 1:
        raise ConfigError("--config belongs to one environment: serve the others on other ports")
    for environment in environments:
        load_config(environment, config)
    token = arguments.token or os.environ.get(TOKEN_VARIABLE)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    app = server.make_app(
        environments,
        token=token,
        loopback_only=server.is_loopback(arguments.host),
        max_sessions=arguments.max_sessions,
        worker_threads=arguments.worker_threads,
        config={environment.id: config for environment in environments},
    )
    names = ", ".join(environment.id for environment in environments)
    server.serve(
        app,
        host=arguments.host,
        port=arguments.port,
        token=token,
        ready=lambda url: print(f"serving {names} at {url}", flush=True),
    )
    return 0


def _read_config(entries: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for entry in entries:
        if entry.lstrip().startswith("{"):
            try:
                config |= json.loads(entry)
            except ValueError as error:
                raise ConfigError(f"--config {entry}: not valid JSON ({error})") from error
            continue
        key, separator, value = entry.partition("=")
        if not separator or not key:
            raise ConfigError(f"--config {entry}: write KEY=VALUE or a JSON object")
        try:
            config[key] = json.loads(value)
        except ValueError:
            config[key] = value
    return config
