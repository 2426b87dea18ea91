"""`agentrl env ...`: writes, checks, plays and serves environments.

Commands import what they need, so that `--help` stays quick.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from agentrl.cli.app import Json, make_app
from agentrl.errors import ConfigError

Id = Annotated[str, Parameter(help="A registered id, module:Class, or path/to/env.py:Class.")]
Config = Annotated[
    tuple[str, ...],
    Parameter(
        help="Configuration of the environment, KEY=VALUE, where the value is JSON or else text, "
        "or a whole JSON object; repeatable."
    ),
]
Url = Annotated[
    str | None, Parameter(help="Play on this server, which has an environment of this id.")
]
Token = Annotated[
    str | None,
    Parameter(help="The server's token; by default the variable AGENTRL_ENV_TOKEN."),
]
Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Seconds = Annotated[float, Parameter(validator=Number(gte=0, lt=3600))]

app = make_app("env", "Write, check, play and serve environments.")


@app.command
def init(
    name: str,
    /,
    *,
    template: str = "tool",
    path: Path = Path(),
) -> int:
    """Write the project of a new environment.

    A working project: an environment, its tests, packaging and a Dockerfile.

    Args:
        name: Name of the environment, such as word-game.
        template: tool: the agent calls tools; text: it answers in text; docker: its tools run in a
            container for each episode.
        path: Folder in which to make the project's folder.
    """
    from agentrl.env.scaffold import make_project

    folder = make_project(name, template=template, path=path)
    module = name.replace("-", "_")
    name = "".join(part.capitalize() for part in module.split("_"))
    print(f"wrote {folder}; now\n")
    for command in (
        f"cd {folder}",
        f"agentrl env play {module}.env:{name}",
        f"agentrl env check {module}.env:{name}",
        "pytest",
    ):
        print(f"  {command}")
    print(f"\n{module}/env.py is the environment; README.md says how to train on it and serve it")
    return 0


@app.command(name="list")
def list_environments() -> int:
    """List the installed environments.

    `agentrl env info ID` shows more about one. Your own need no installation: name them as
    module:Class or path/to/env.py:Class.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from agentrl.env import registry
    from agentrl.env.tools import tools_of

    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("tools", max_width=24)
    table.add_column("sessions", justify="right")
    table.add_column("description")
    for name in registry.available():
        try:
            environment = registry.resolve(name)
            tools, sessions = ", ".join(tools_of(environment)), f"{environment.max_sessions:,}"
            description = (environment.__doc__ or "").strip().partition("\n")[0]
        except ConfigError as error:  # list the others even if one lacks a package
            tools, sessions, description = "", "", str(error)
        table.add_row(name, tools, sessions, escape(description))
    Console().print(table)
    return 0


@app.command
def info(id: Id, /, *, config: Config = ()) -> int:
    """Show an environment's class, task splits, tools and configuration.

    Loads the environment in this process.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.text import Text

    from agentrl.env import registry
    from agentrl.env.local import make

    environment = registry.resolve(id)
    env = make(environment, **_read_config(config)).sync
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
    console.print(f"{environment.__module__}:{environment.__qualname__}", style="dim")
    if info.description:
        console.print(escape(info.description))
    console.print("\n[bold]task splits[/bold]")
    for name, size in info.splits.items():
        entry(f"{name}: {'unlimited' if size is None else f'{size:,} tasks'}", "")
    if not info.splits:
        entry("none; each session must bring its own task", "")
    if info.tools:
        console.print("\n[bold]tools[/bold]")
    for spec in info.tools:
        function: Any = spec["function"]
        parameters = ", ".join(function["parameters"]["properties"])
        entry(f"{function['name']}({parameters})", function["description"])
    keys: Any = info.config_schema.get("properties", {})
    if keys:
        console.print("\n[bold]configuration keys and their defaults[/bold]")
    for name, schema in keys.items():
        default = f"= {json.dumps(schema['default'])}" if "default" in schema else "(required)"
        entry(f"{name} {default}", schema.get("description", ""))
    console.print(f"\nat most {info.max_sessions:,} sessions at a time in one process")
    return 0


@app.command
def check(
    target: str,
    /,
    *,
    config: Config = (),
    env: str | None = None,
    token: Token = None,
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    thorough: bool = False,
    json_: Json = False,
) -> int:
    """Run the conformance checks on an environment.

    Plays the environment, alone and in many sessions at once, and reports each problem with a fix.
    The exit status is 1 if a check fails.

    Args:
        target: A registered id, module:Class, path/to/env.py:Class, or the URL of a server that may
            be stressed.
        env: Environment of the server, if it has several.
        only: Run only this check; repeatable.
        skip: Leave this check out; repeatable.
        thorough: Play many more episodes, which may take minutes.
    """
    import dataclasses

    from rich.console import Console
    from rich.markup import escape

    from agentrl.env.check import CheckResult, select
    from agentrl.env.check.worker import run_in_worker

    names = select(only, skip)
    console = Console(highlight=False)
    colours = {"pass": "green", "fail": "bold red", "skip": "yellow"}

    def report(result: CheckResult) -> None:
        if json_:
            print(json.dumps(dataclasses.asdict(result), ensure_ascii=False), flush=True)
            return
        console.print(
            f"[{colours[result.status]}]{result.status}[/]  {result.name:<12}"
            f"{result.seconds:6.2f} s  {escape(result.detail)}",
            soft_wrap=True,
        )
        if result.remedy:
            console.print(
                f"      should hold: {escape(result.asserts)}", style="dim", soft_wrap=True
            )
            console.print(f"      remedy: {escape(result.remedy)}", soft_wrap=True)

    results = run_in_worker(
        target,
        names,
        report=report,
        config=_read_config(config),
        env_id=env,
        token=token,
        thorough=thorough,
    )
    failed = [result.name for result in results if result.status == "fail"]
    if not json_:
        passed = sum(result.status == "pass" for result in results)
        seconds = sum(result.seconds for result in results)
        console.print(
            f"\n{passed} passed, {len(failed)} failed, {len(results) - passed - len(failed)} "
            f"skipped in {seconds:.1f} s"
        )
    return 1 if failed else 0


@app.command
def attack(
    id: Id,
    /,
    *,
    config: Config = (),
    url: Url = None,
    token: Token = None,
    split: str | None = None,
    tasks: Positive = 8,
    success: float = 1.0,
    json_: Json = False,
) -> int:
    """Play cheaters against an environment.

    Each does none of the work: it says nothing, repeats the question, gives every answer, writes
    programs that equal everything, orders a judge about, misuses tools. Tools get shell commands
    that write rewards, so play only environments whose tools run in a sandbox. The exit status is
    1 if a cheater is paid in full on half of the tasks.

    Args:
        split: Task split; test, or the first where there is no such split.
        tasks: Number of tasks, from the first.
        success: Reward that counts as paid in full.
    """
    import asyncio
    import dataclasses

    from rich.console import Console
    from rich.table import Table

    from agentrl.evaluate.red_team import attack_environment

    found = asyncio.run(
        attack_environment(
            id,
            _read_config(config),
            url=url,
            token=token,
            split=split,
            num_tasks=tasks,
            success=success,
        )
    )
    if json_:
        for each in found:
            print(json.dumps(dataclasses.asdict(each) | {"is_paid": each.is_paid}))
        return int(any(each.is_paid for each in found))
    table = Table("cheater", box=None, pad_edge=False)
    for name in ("mean reward", "paid in full", "failed"):
        table.add_column(name, justify="right")
    for each in found:
        failed = ", ".join(f"{count} {code}" for code, count in each.errors.items())
        full = f"{each.num_full} of {each.num_tasks}"
        style = "bold red" if each.is_paid else None
        table.add_row(each.name, f"{each.average:.3g}", full, failed, style=style)
    Console().print(table)
    if paid := [each.name for each in found if each.is_paid]:
        print(f"\npaid without work: {', '.join(paid)}; mend the grader before you train on it")
    return int(bool(paid))


@app.command
def play(
    id: Id,
    /,
    *,
    config: Config = (),
    url: Url = None,
    token: Token = None,
    split: str | None = None,
    index: int = 0,
    seed: int = 0,
) -> int:
    """Play an episode yourself.

    Take the agent's place for one episode in the terminal. Type a tool's name to be asked for its
    arguments, a tool's name and a JSON object, or text. The exit status is 1 if you gave up.

    Args:
        split: Task split; the first if not given.
        index: Index of the task in the split.
        seed: Seed of the environment's randomness.
    """
    import asyncio

    from agentrl.env.play import play as play_episode

    reward = asyncio.run(
        play_episode(
            id,
            url=url,
            token=token,
            split=split,
            index=index,
            seed=seed,
            config=_read_config(config),
        )
    )
    return 1 if reward is None else 0


@app.command
def demonstrate(
    id: Id, /, *, out: Path, config: Config = (), split: str = "train", tasks: Positive = 64
) -> int:
    """Write an environment's solutions as dialogues for `agentrl sft`.

    Plays the actions of the environment's oracle(), with the prompts, tools and observations that a
    policy sees, and writes a dialogue per line. The exit status is 1 if a solution does not earn 1.

    Args:
        out: File to write, such as demos.jsonl.
        split: Task split.
        tasks: Number of tasks, from the first.
    """
    import asyncio

    from agentrl.env.demonstrate import demonstrate as write_solutions

    settings = _read_config(config)
    writing = write_solutions(id, settings, out, split=split, num_tasks=tasks)
    print(f"{out}: {asyncio.run(writing)} dialogues")
    return 0


@app.command
def serve(
    *id: Id,
    config: Config = (),
    host: str = "127.0.0.1",
    port: int = 8700,
    token: str | None = None,
    max_sessions: Positive | None = None,
    worker_threads: Positive = 1024,
    max_body: Positive = 2,
    workers: Positive = 1,
    name: str = "",
    drain_s: Seconds = 5.0,
) -> int:
    """Serve environments over HTTP.

    Serves until interrupted. After SIGTERM new sessions are refused, and open ones may continue for
    --drain-s seconds. The API is described at /docs and /openapi.json.

    Args:
        host: Address to listen on; one that other machines can reach needs a token.
        port: Port to listen on; 0 takes a free one.
        token: Token that clients must send. Prefer the variable AGENTRL_ENV_TOKEN, which other
            users of the machine cannot read.
        max_sessions: Largest number of live sessions of all environments together, per worker; by
            default only each environment's limit holds.
        worker_threads: Largest number of threads for environment methods that are not async, per
            worker; threads start when they are needed.
        max_body: Largest request in MiB; reading a large one delays other sessions.
        workers: Serve from this many processes, on --port and the ports after it, and restart any
            that die. Give clients the printed list of URLs.
        name: Prefix of session ids, which shows a proxy in front of several servers which of them
            holds a session; with --workers the worker's number.
        drain_s: Seconds that open sessions may continue after SIGTERM.
    """
    import logging

    from agentrl.env import registry
    from agentrl.env.base import load_config
    from agentrl.env.protocol import TOKEN_VARIABLE
    from agentrl.env.server.access import usable_token
    from agentrl.env.server.supervisor import supervise

    if not id:
        raise ConfigError("name an environment to serve: agentrl env serve ID")
    settings = _read_config(config)
    environments = [registry.resolve(each) for each in id]
    if settings and len(environments) > 1:
        raise ConfigError(
            "--config applies to one environment only: serve each environment with its own command"
        )
    for environment in environments:
        load_config(environment, settings)
    token = usable_token(token) or usable_token(os.environ.get(TOKEN_VARIABLE))
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    names = ", ".join(environment.id for environment in environments)
    ports = range(port, port + workers)
    if workers > 1 and not 0 < ports[0] <= ports[-1] < 2**16:
        raise ConfigError(
            f"--workers {workers} needs that many ports from --port {port} on, between 1 and 65535"
        )
    supervise(
        [*id],
        host=host,
        port=port,
        num_workers=workers,
        token=token,
        drain_s=drain_s,
        name=name,
        ready=lambda urls: print(f"serving {names} at {','.join(urls)}", flush=True),
        max_sessions=max_sessions,
        worker_threads=worker_threads,
        max_body_bytes=max_body * 2**20,
        config={environment.id: settings for environment in environments},
    )
    return 0


@app.command
def build(
    target: str,
    /,
    *,
    tag: str | None = None,
    base_image: str | None = None,
    pip_index_url: Annotated[str | None, Parameter(env_var="PIP_INDEX_URL")] = None,
    pip_extra_index_url: Annotated[str | None, Parameter(env_var="PIP_EXTRA_INDEX_URL")] = None,
    pip_cert: Annotated[Path | None, Parameter(env_var="PIP_CERT")] = None,
    wheel: tuple[Path, ...] = (),
    build_arg: tuple[str, ...] = (),
    no_cache: bool = False,
) -> int:
    """Build the container image of an environment.

    The image serves an installed environment, named by its id, or the project in a folder, as
    `agentrl env init` writes it.

    Args:
        target: An id such as math, or a folder such as . for this project.
        tag: Tag of the image; by default agentrl-ID, or the project's name.
        base_image: Debian-based image with python3, python3-venv and ca-certificates; by default
            the Dockerfile's, python:3.12-slim.
        pip_index_url: Package index.
        pip_extra_index_url: Additional package index.
        pip_cert: File with the certificate authorities to trust while building.
        wheel: Wheel to install instead of agentrl or another package from the index; repeatable.
        build_arg: Another build argument for the Dockerfile, NAME=VALUE; repeatable.
        no_cache: Build every layer again.
    """
    import time

    from agentrl.env.container.engine import connect, engine_errors
    from agentrl.env.container.image import build_image

    extra: dict[str, str] = {}
    for entry in build_arg:
        key, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(f"--build-arg {entry}: write it as NAME=VALUE")
        extra[key] = value
    started = time.monotonic()
    tag = build_image(
        target,
        tag=tag,
        base_image=base_image,
        wheels=[*wheel],
        index_url=pip_index_url,
        extra_index_url=pip_extra_index_url,
        cert=pip_cert,
        build_args=extra,
        cache=not no_cache,
    )
    with engine_errors():
        size = connect().images.get(tag).attrs["Size"]
    print(f"built {tag}: {size / 1e6:,.0f} MB in {time.monotonic() - started:.0f} s")
    print(f"run it: agentrl env run {tag}")
    return 0


@app.command
def run(
    target: str | None = None,
    /,
    *,
    port: int = 8700,
    token: str | None = None,
    memory: str = "2g",
    cpus: float = 2.0,
    pids: Positive = 256,
    network: str = "bridge",
    count: Positive = 1,
    ready_timeout: float = 60.0,
    reap: bool = False,
) -> int:
    """Run an environment's image in a hardened container.

    Serves an environment from one or more containers until interrupted. They have no capabilities,
    a read-only file system, limits on memory, CPU and processes, and can be reached from this
    machine only.

    Args:
        target: An environment that `env build` built: its id, folder or image.
        port: Port on this machine, and of further containers the ports after it; 0 takes free ones.
        token: Token that clients must send; the variable AGENTRL_ENV_TOKEN or a new one
            if not given.
        memory: Memory of a container, such as 512m.
        cpus: CPU cores of a container.
        pids: Largest number of processes and threads in a container.
        network: Network of the engine to use.
        count: Number of containers.
        ready_timeout: Seconds for a container to become healthy.
        reap: Only remove leftover containers of agentrl processes that have ended.
    """
    import secrets

    from agentrl.env.container import serve as containers
    from agentrl.env.container.engine import connect
    from agentrl.env.container.engine import reap as reap_containers
    from agentrl.env.protocol import TOKEN_VARIABLE

    if not target and not reap:
        raise ConfigError("name what to run: agentrl env run ID|DIR|IMAGE")
    if port and port + count > 65536:
        raise ConfigError(
            f"--count {count} needs that many ports from --port {port} on, up to 65535"
        )
    removed = reap_containers(connect())
    for line in removed:
        print(f"removed a leftover container: {line}", file=sys.stderr)
    if reap:
        print(f"{len(removed)} leftover containers removed")
        return 0
    assert target is not None
    return containers.serve(
        containers.find_image(target),
        count,
        port=port,
        token=token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24),
        ready_timeout_s=ready_timeout,
        memory=memory,
        cpus=cpus,
        max_processes=pids,
        network=network,
    )


def _read_config(entries: Sequence[str]) -> dict[str, Any]:
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
