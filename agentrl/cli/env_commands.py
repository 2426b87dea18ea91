"""The commands of `agentrl env`; `agentrl.cli.env` declares their arguments.

Each returns an exit status, and imports what it needs when it runs, so that `--help` stays fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


def init(arguments: argparse.Namespace) -> int:
    from agentrl.env.scaffold import make_project

    folder = make_project(arguments.name, template=arguments.template, path=arguments.path)
    module = arguments.name.replace("-", "_")
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


def list_environments(arguments: argparse.Namespace) -> int:
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


def check(arguments: argparse.Namespace) -> int:
    import dataclasses

    from rich.console import Console
    from rich.markup import escape

    from agentrl.env.check import CheckResult, select
    from agentrl.env.check.worker import run_in_worker

    names = select(arguments.only, arguments.skip)
    console = Console(highlight=False)
    colours = {"pass": "green", "fail": "bold red", "skip": "yellow"}

    def report(result: CheckResult) -> None:
        if arguments.json:
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

    def run(target: str, token: str | None, image: str | None) -> list[CheckResult]:
        return run_in_worker(
            target,
            names,
            report=report,
            config=_read_config(arguments.config),
            env_id=arguments.env,
            token=token,
            image=image,
            thorough=arguments.thorough,
        )

    if arguments.target.startswith("image:"):
        from agentrl.env.check.container import served_image

        image = arguments.target.removeprefix("image:")
        with served_image(image) as (url, token):
            results = run(url, token, image)
    else:
        results = run(arguments.target, arguments.token, None)
    failed = [result.name for result in results if result.status == "fail"]
    if not arguments.json:
        passed = sum(result.status == "pass" for result in results)
        seconds = sum(result.seconds for result in results)
        console.print(
            f"\n{passed} passed, {len(failed)} failed, {len(results) - passed - len(failed)} "
            f"skipped in {seconds:.1f} s"
        )
    return 1 if failed else 0


def play(arguments: argparse.Namespace) -> int:
    import asyncio

    from agentrl.env.play import play as play_episode

    reward = asyncio.run(
        play_episode(
            arguments.id,
            url=arguments.url,
            token=arguments.token,
            split=arguments.split,
            index=arguments.index,
            seed=arguments.seed,
            config=_read_config(arguments.config),
        )
    )
    return 1 if reward is None else 0


def demonstrate(arguments: argparse.Namespace) -> int:
    import asyncio

    from agentrl.env.demonstrate import demonstrate as write_solutions

    config = _read_config(arguments.config)
    writing = write_solutions(
        arguments.id, config, arguments.out, split=arguments.split, num_tasks=arguments.tasks
    )
    print(f"{arguments.out}: {asyncio.run(writing)} dialogues")
    return 0


def info(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.text import Text

    from agentrl.env import registry
    from agentrl.env.local import make

    environment = registry.resolve(arguments.id)
    env = make(environment, **_read_config(arguments.config)).sync
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


def serve(arguments: argparse.Namespace) -> int:
    import logging

    from agentrl.env import registry
    from agentrl.env.base import load_config
    from agentrl.env.protocol import TOKEN_VARIABLE
    from agentrl.env.server.access import usable_token
    from agentrl.env.server.supervisor import supervise

    config = _read_config(arguments.config)
    environments = [registry.resolve(name) for name in arguments.id]
    if config and len(environments) > 1:
        raise ConfigError(
            "--config applies to one environment only: serve each environment with its own command"
        )
    for environment in environments:
        load_config(environment, config)
    token = usable_token(arguments.token) or usable_token(os.environ.get(TOKEN_VARIABLE))
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    names = ", ".join(environment.id for environment in environments)
    ports = range(arguments.port, arguments.port + arguments.workers)
    if arguments.workers > 1 and not 0 < ports[0] <= ports[-1] < 2**16:
        raise ConfigError(
            f"--workers {arguments.workers} needs that many ports from --port {arguments.port} on, "
            "between 1 and 65535"
        )
    supervise(
        arguments.id,
        host=arguments.host,
        port=arguments.port,
        num_workers=arguments.workers,
        token=token,
        drain_s=arguments.drain_s,
        name=arguments.name,
        ready=lambda urls: print(f"serving {names} at {','.join(urls)}", flush=True),
        max_sessions=arguments.max_sessions,
        worker_threads=arguments.worker_threads,
        max_body_bytes=arguments.max_body * 2**20,
        config={environment.id: config for environment in environments},
    )
    return 0


def build(arguments: argparse.Namespace) -> int:
    import time

    from agentrl.env.container.engine import connect, engine_errors
    from agentrl.env.container.image import build_image

    extra: dict[str, str] = {}
    for entry in arguments.build_arg:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(f"--build-arg {entry}: write it as NAME=VALUE")
        extra[name] = value
    started = time.monotonic()
    tag = build_image(
        arguments.target,
        tag=arguments.tag,
        base_image=arguments.base_image,
        wheels=arguments.wheel,
        index_url=arguments.pip_index_url,
        extra_index_url=arguments.pip_extra_index_url,
        cert=Path(arguments.pip_cert) if arguments.pip_cert else None,
        build_args=extra,
        cache=not arguments.no_cache,
    )
    with engine_errors():
        size = connect().images.get(tag).attrs["Size"]
    print(f"built {tag}: {size / 1e6:,.0f} MB in {time.monotonic() - started:.0f} s")
    print(f"run it: agentrl env run {tag}")
    return 0


def run(arguments: argparse.Namespace) -> int:
    import secrets
    import signal

    from agentrl.env.container import serve as containers
    from agentrl.env.container.engine import connect, reap
    from agentrl.env.protocol import TOKEN_VARIABLE

    if not (arguments.target or arguments.reap):
        raise ConfigError("name what to run: agentrl env run ID|DIR|IMAGE")
    if arguments.port and arguments.port + arguments.count > 65536:
        raise ConfigError(
            f"--count {arguments.count} needs that many ports from --port {arguments.port} on, up "
            "to 65535"
        )
    removed = reap(connect())
    for line in removed:
        print(f"removed a leftover container: {line}", file=sys.stderr)
    if arguments.reap:
        print(f"{len(removed)} leftover containers removed")
        return 0
    token = arguments.token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    image = containers.find_image(arguments.target)
    servers: list[containers.Server] = []

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        for number in range(arguments.count):
            servers.append(
                containers.start_server(
                    image,
                    token=token,
                    port=arguments.port + number if arguments.port else 0,
                    memory=arguments.memory,
                    cpus=arguments.cpus,
                    max_processes=arguments.pids,
                    network=arguments.network,
                )
            )
        for server in servers:
            containers.wait_until_healthy(server, arguments.ready_timeout)
        print(f"serving {image} at {' '.join(server.url for server in servers)}")
        print(f"{TOKEN_VARIABLE}={token}", flush=True)
        return containers.follow(servers)
    except KeyboardInterrupt:
        return 0
    finally:
        # Ignore further signals, or containers could be left behind.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        containers.stop_servers(servers)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


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
