"""`agentrl doctor`: what a run would trip over, before it starts."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl.config import RunConfig

Status = Literal["ok", "note", "fix"]


@dataclass(slots=True, frozen=True)
class Finding:
    status: Status
    """`fix` makes the command exit with 1."""
    what: str
    detail: str


def doctor(run_file: Path | None, overrides: list[str]) -> int:
    """Print one line per check; exit status 1 when something must be fixed."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    marks = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "fix": "[red]fix [/]"}
    worst = 0
    for finding in _findings(run_file, overrides):
        line = f"{marks[finding.status]} {escape(finding.what)}: {escape(finding.detail)}"
        console.print(line, soft_wrap=True)  # a path or a command stays in one piece
        worst |= finding.status == "fix"
    return int(worst)


def _findings(run_file: Path | None, overrides: list[str]) -> Iterator[Finding]:
    yield from _machine()
    yield from _packages()
    yield from _environments()
    if run_file is not None:
        yield from _run(run_file, overrides)


def _machine() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Finding("ok" if good else "fix", "python", f"{version} ({sys.executable})")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield Finding("ok", "cores", str(cores))
    yield Finding("ok" if free > 2 else "note", "disk", f"{free:.1f} GiB free under {Path.cwd()}")
    try:
        import torch
    except ImportError:
        yield Finding("note", "torch", "not installed; training needs pip install 'agentrl[train]'")
        return
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"no GPU, {torch.get_num_threads()} threads"
    )
    yield Finding("ok", "torch", f"{torch.__version__}, {device}")


def _packages() -> Iterator[Finding]:
    """Installed packages against the bounds that agentrl itself declares."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("agentrl") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("note", "agentrl", "not installed, only on the path; pip install -e .")
        return
    wrong = []
    for line in declared:
        requirement = Requirement(line)
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if requirement.marker is None:
                wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} is outside {requirement.specifier}")
    if wrong:
        yield Finding("fix", "packages", "; ".join(sorted(set(wrong))))
    else:
        yield Finding("ok", "packages", "installed versions are within agentrl's bounds")


def _environments() -> Iterator[Finding]:
    found = importlib.metadata.entry_points(group="agentrl.environments")
    names = ", ".join(sorted(entry.name for entry in found)) or "none"
    yield Finding("ok" if found else "note", "environments", names)


def _run(run_file: Path, overrides: list[str]) -> Iterator[Finding]:
    from agentrl.config import load_config

    try:
        config = load_config(run_file, overrides)
    except AgentRLError as error:
        yield Finding("fix", str(run_file), str(error))
        return
    yield Finding("ok", str(run_file), "configuration is valid")
    try:
        asyncio.run(_check_environment(config))
        yield Finding("ok", f"environment {config.env.id}", f"a task of {config.env.split} opens")
    except AgentRLError as error:
        yield Finding("fix", f"environment {config.env.id}", str(error))
    if config.inference.backend == "openai":
        return
    try:
        from agentrl.rollout.render import Renderer
        from agentrl.train.model import load_tokenizer

        tokenizer = load_tokenizer(config.model.path)
        renderer = Renderer(tokenizer, template_kwargs=config.rollout.template)
        how = {
            "append_only": "its chat template never edits the past: one token row per episode",
            "fork": "its chat template edits the past, so token rows fork (rollout.history)",
        }[renderer.history]
        yield Finding("ok", f"model {config.model.path}", how)
    except AgentRLError as error:
        yield Finding("fix", f"model {config.model.path}", str(error))


async def _check_environment(config: RunConfig) -> None:
    """Open and close one session, in this process or on the server.

    Raises:
        AgentRLError: the environment is unknown, misconfigured or out of reach.
    """
    from agentrl.env.client import connect
    from agentrl.evaluate import split_size

    env = connect(config.env.url or None, token=config.env.token)
    try:
        await split_size(env, config, config.env.split)
        session = await env.session(
            config.env.id, split=config.env.split, index=0, seed=0, config=config.env.config
        )
        await session.close()
    finally:
        await env.aclose()
