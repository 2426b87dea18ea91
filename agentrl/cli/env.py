"""Declares the arguments of `agentrl env ...`; `commands.py` has the commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.cli import env_commands as commands

_NAME_HELP = "a registered id, module:Class, or path/to/env.py:Class"
_SHARED: dict[str, dict[str, Any]] = {
    "--config": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE|JSON",
        "help": "configuration of the environment, repeatable: key=value, where the value is JSON "
        "or else text, or a whole JSON object",
    },
    "--env": {"metavar": "ID", "help": "environment of the server, if it has several"},
    "--token": {"help": "the server's token (default: the variable AGENTRL_ENV_TOKEN)"},
    "--json": {"action": "store_true", "help": "print JSON"},
}
"""Options that several commands have."""


def add_env_commands(parsers: argparse._SubParsersAction) -> None:
    """Adds `env` and its subcommands. Each sets `handler`, which returns an exit status."""
    env = parsers.add_parser(
        "env",
        help="write, check, play and serve environments",
        description="Write, check, play and serve environments.",
    )
    subcommands = env.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_init(subcommands)
    _add_list_and_info(subcommands)
    _add_check(subcommands)
    _add_play(subcommands)
    _add_demonstrate(subcommands)
    _add_serve(subcommands)
    _add_build(subcommands)
    _add_run(subcommands)


def _command(
    subcommands: argparse._SubParsersAction,
    name: str,
    handler: Callable[[argparse.Namespace], int],
    *shared: str,
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    command = subcommands.add_parser(name, help=help, description=description)
    command.set_defaults(handler=handler)
    for option in shared:
        command.add_argument(option, **_SHARED[option])
    return command


def _number(
    command: argparse.ArgumentParser,
    option: str,
    kind: Callable[[str], float],
    default: float,
    help: str,
) -> None:
    command.add_argument(
        option, type=kind, default=default, metavar="N", help=f"{help} (default: {default})"
    )


def _add_init(subcommands: argparse._SubParsersAction) -> None:
    init = _command(
        subcommands,
        "init",
        commands.init,
        help="write the project of a new environment",
        description="Write a working project: an environment, its tests, packaging and a "
        "Dockerfile.",
    )
    init.add_argument("name", metavar="NAME", help="name of the environment, such as word-game")
    init.add_argument(
        "--template",
        default="tool",
        help="tool: the agent calls tools; text: it answers in text; docker: its tools run in a "
        "container for each episode (default: %(default)s)",
    )
    init.add_argument(
        "--path",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder in which to make the project's folder (default: the working directory)",
    )


def _add_list_and_info(subcommands: argparse._SubParsersAction) -> None:
    _command(
        subcommands,
        "list",
        commands.list_environments,
        help="list the installed environments",
        description="List the environments of installed packages; `agentrl env info ID` shows "
        "more about one. Your own need no installation: name them as module:Class or "
        "path/to/env.py:Class.",
    )
    info = _command(
        subcommands,
        "info",
        commands.info,
        "--config",
        help="show an environment's class, task splits, tools and configuration",
        description="Load an environment in this process and show its class, its task splits, its "
        "tools as an agent sees them, and the keys of its configuration.",
    )
    info.add_argument("id", metavar="ID", help=_NAME_HELP)


def _add_check(subcommands: argparse._SubParsersAction) -> None:
    check = _command(
        subcommands,
        "check",
        commands.check,
        *("--config", "--env", "--token", "--json"),
        help="run the conformance checks on an environment",
        description="Run the conformance checks: play the environment, alone and in many sessions "
        "at once, and report each problem with a fix. Exit status 1 if a check fails.",
    )
    check.add_argument(
        "target",
        metavar="TARGET",
        help=f"{_NAME_HELP}; the URL of a server that may be stressed; or image:NAME, for an image "
        "that `env build` built",
    )
    for option, text in (("--only", "run only this check"), ("--skip", "leave this check out")):
        check.add_argument(
            option, action="append", default=[], metavar="NAME", help=f"{text}; repeatable"
        )
    check.add_argument(
        "--thorough", action="store_true", help="play many more episodes, which may take minutes"
    )


def _add_play(subcommands: argparse._SubParsersAction) -> None:
    play = _command(
        subcommands,
        "play",
        commands.play,
        *("--config", "--token"),
        help="play an episode yourself",
        description="Take the agent's place for one episode in the terminal. Type a tool's name to "
        "be asked for its arguments, a tool's name and a JSON object, or text. Exit status 1 if "
        "you gave up.",
    )
    play.add_argument("id", metavar="ID", help=f"{_NAME_HELP}; with --url, one of that server")
    play.add_argument("--url", help="play on this server")
    play.add_argument("--split", help="task set (default: the first)")
    _number(play, "--index", int, 0, "index of the task in the split")
    _number(play, "--seed", int, 0, "seed of the environment's randomness")


def _add_demonstrate(subcommands: argparse._SubParsersAction) -> None:
    demonstrate = _command(
        subcommands,
        "demonstrate",
        commands.demonstrate,
        "--config",
        help="write an environment's solutions as dialogues for agentrl sft",
        description="Play the actions of the environment's oracle(), with the prompts, tools and "
        "observations that a policy sees, and write a dialogue per line. Exit status 1 if a "
        "solution does not earn 1.",
    )
    demonstrate.add_argument("id", metavar="ID", help=_NAME_HELP)
    demonstrate.add_argument(
        "--out", type=Path, required=True, metavar="DEMOS.jsonl", help="file to write"
    )
    demonstrate.add_argument("--split", default="train", help="task set (default: %(default)s)")
    _number(demonstrate, "--tasks", _positive, 64, "number of tasks, from the first")


def _add_serve(subcommands: argparse._SubParsersAction) -> None:
    serve = _command(
        subcommands,
        "serve",
        commands.serve,
        "--config",
        help="serve environments over HTTP",
        description="Serve environments over HTTP until interrupted. After SIGTERM new sessions "
        "are refused, and open ones may continue for --drain-s seconds. The API is described at "
        "/docs and /openapi.json.",
    )
    serve.add_argument("id", metavar="ID", nargs="+", help=_NAME_HELP)
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; one that other machines can reach needs a token "
        "(default: %(default)s)",
    )
    _number(serve, "--port", int, 8700, "port to listen on; 0 takes a free one")
    serve.add_argument(
        "--token",
        help="token that clients must send; prefer the variable AGENTRL_ENV_TOKEN, which other "
        "users of the machine cannot read",
    )
    serve.add_argument(
        "--max-sessions",
        type=_positive,
        metavar="N",
        help="the most live sessions of all environments together, per worker (default: only each "
        "environment's limit)",
    )
    _number(
        serve,
        "--worker-threads",
        _positive,
        1024,
        "the most threads for environment methods that are not async, per worker; threads start "
        "when they are needed",
    )
    _number(
        serve,
        "--max-body",
        _positive,
        2,
        "largest request in MiB; reading a large one delays other sessions",
    )
    _number(
        serve,
        "--workers",
        _positive,
        1,
        "serve from N processes, on --port and the N-1 ports after it, and restart any that die; "
        "give clients the printed list of URLs",
    )
    serve.add_argument(
        "--name",
        default="",
        help="prefix of session ids, which tells a proxy in front of several servers which of them "
        "holds a session (default: none; with --workers the worker's number)",
    )
    _number(
        serve, "--drain-s", _seconds, 5.0, "seconds that open sessions may continue after SIGTERM"
    )


def _add_build(subcommands: argparse._SubParsersAction) -> None:
    build = _command(
        subcommands,
        "build",
        commands.build,
        help="build the container image of an environment",
        description="Build an image that serves an environment: an installed one by its id, or the "
        "project in a folder, as `agentrl env init` writes it.",
    )
    build.add_argument("target", metavar="ID|DIR", help="such as math, or . for this project")
    build.add_argument(
        "--tag", help="tag of the image (default: agentrl-ID, or the project's name)"
    )
    build.add_argument(
        "--base-image",
        metavar="IMAGE",
        help="Debian-based image with python3, python3-venv and ca-certificates (default: the "
        "Dockerfile's, python:3.12-slim)",
    )
    for name, variable, text in (
        ("index-url", "PIP_INDEX_URL", "package index"),
        ("extra-index-url", "PIP_EXTRA_INDEX_URL", "additional package index"),
        ("cert", "PIP_CERT", "file with the certificate authorities to trust while building"),
    ):
        build.add_argument(
            f"--pip-{name}",
            default=os.environ.get(variable),
            metavar="FILE" if name == "cert" else "URL",
            help=f"{text} (default: the variable {variable})",
        )
    build.add_argument(
        "--wheel",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="wheel to install instead of agentrl or another package from the index; repeatable",
    )
    build.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another build argument for the Dockerfile; repeatable",
    )
    build.add_argument("--no-cache", action="store_true", help="rebuild every layer")


def _add_run(subcommands: argparse._SubParsersAction) -> None:
    run = _command(
        subcommands,
        "run",
        commands.run,
        help="run an environment's image in a hardened container",
        description="Serve an environment from one or more containers until interrupted. They have "
        "no capabilities, a read-only file system, limits on memory, CPU and processes, and can be "
        "reached from this machine only.",
    )
    run.add_argument(
        "target", metavar="ID|DIR|IMAGE", nargs="?", help="an environment that `env build` built"
    )
    _number(
        run,
        "--port",
        int,
        8700,
        "port on this machine, and of further containers the ports after it; 0 takes free ones",
    )
    run.add_argument(
        "--token",
        help="token that clients must send (default: the variable AGENTRL_ENV_TOKEN, or a new one)",
    )
    run.add_argument(
        "--memory", default="2g", help="memory of a container, such as 512m (default: 2g)"
    )
    _number(run, "--cpus", float, 2.0, "CPU cores of a container")
    _number(run, "--pids", _positive, 256, "the most processes and threads in a container")
    run.add_argument(
        "--network", default="bridge", help="network of the engine to use (default: bridge)"
    )
    _number(run, "--count", _positive, 1, "number of containers")
    _number(run, "--ready-timeout", float, 60.0, "seconds for a container to become healthy")
    run.add_argument(
        "--reap",
        action="store_true",
        help="only remove leftover containers of agentrl processes that have ended",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600")
    return seconds
