"""`agentrl doctor`: finds problems of a run before it starts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.doctor_servers import Finding, check_server
from agentrl.errors import AgentRLError, ConfigError

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.model.text.renderer import Renderer


def doctor(run_file: Path | None, overrides: list[str], num_played: int = 0) -> int:
    """Prints one line per check and returns the exit status: 1 if something has to be fixed.

    Without a run file, it checks the machine and the servers of `--inference.urls`, if given.

    Args:
        num_played: number of episodes to play with the run file's settings.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    marks = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "fix": "[red]fix [/]"}
    worst = 0
    for status, what, detail in _findings(run_file, overrides, num_played):
        line = f"{marks[status]} {escape(what)}: {escape(detail)}"
        console.print(line, soft_wrap=True)  # does not break paths and commands
        worst |= status == "fix"
    return int(worst)


def _findings(run_file: Path | None, overrides: list[str], num_played: int) -> Iterator[Finding]:
    yield from _machine()
    yield _packages()
    found = importlib.metadata.entry_points(group="agentrl.environments")
    names = ", ".join(sorted(entry.name for entry in found)) or "none"
    yield "ok" if found else "note", "environments", names
    if run_file is not None:
        yield from _run(run_file, overrides, num_played)
    elif overrides:
        yield from _servers(_config_without_a_file(overrides))


def _machine() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield "ok" if good else "fix", "python", f"{platform.python_version()} ({sys.executable})"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "ok", "cores", str(cores)
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield "ok" if free > 2 else "note", "disk", f"{free:.1f} GiB free under {Path.cwd()}"
    try:
        import torch
    except ImportError:
        yield "note", "torch", "not installed; training needs pip install 'agentrl-gym[train]'"
        return
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"no GPU, {torch.get_num_threads()} threads"
    )
    yield "ok", "torch", f"{torch.__version__}, {device}"


def _packages() -> Finding:
    """Compares installed packages with the versions that agentrl requires."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("agentrl-gym") or []
    except importlib.metadata.PackageNotFoundError:
        return "note", "agentrl", "not installed, only importable; run pip install -e ."
    wrong = set()
    for requirement in map(Requirement, declared):
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if requirement.marker is None:
                wrong.add(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.add(f"{requirement.name} {installed} is outside {requirement.specifier}")
    if wrong:
        return "fix", "packages", "; ".join(sorted(wrong))
    return "ok", "packages", "installed versions are within agentrl's bounds"


def _run(run_file: Path, overrides: list[str], num_played: int) -> Iterator[Finding]:
    from agentrl.config import load_config

    try:
        config = load_config(run_file, overrides)
    except AgentRLError as error:
        yield "fix", str(run_file), str(error)
        return
    yield "ok", str(run_file), "configuration is valid"
    opened = {}
    for name, alone in config.environments.items():
        what = f"environment {name or alone.env.id}"
        try:
            asyncio.run(_open_a_task(alone))
            opened[what] = alone
            yield "ok", what, f"a task of {alone.env.split} opens"
        except AgentRLError as error:
            yield "fix", what, str(error)
    if config.inference.backend == "openai":
        return
    model, renderer = _model(config)
    yield model
    if renderer is None:
        return  # the next checks would load it again, and wait for an unreachable hub
    for what, alone in opened.items():
        try:
            asyncio.run(_show(alone, renderer))
        except AgentRLError as error:
            yield "fix", what, str(error)
    yield _memory(config)
    yield from _memory_of_sampling(config)
    try:
        import torch

        if torch.cuda.is_available():
            there = torch.cuda.mem_get_info()[1]
            yield from _memory_of_servers(config, there, torch.cuda.device_count())
    except ImportError:
        pass
    yield from _servers(config)
    for name, alone in config.environments.items() if num_played else ():
        from agentrl.cli.doctor_play import play_findings

        try:
            for status, what, detail in play_findings(alone, num_played):
                yield status, f"{name}: {what}" if name else what, detail
        except AgentRLError as error:
            yield "fix", f"playing {name or alone.env.id}", str(error)


def _model(config: RunConfig) -> tuple[Finding, Renderer | None]:
    """Loads the tokenizer and the chat template; the renderer is None if a run would fail."""
    what = f"model {config.model.path}"
    try:
        from agentrl.rollout.setup import load_renderer
        from agentrl.train.optimizer import require_optimizer

        require_optimizer(config.train)
        renderer = load_renderer(config, config.model.path)
        how = {
            "append_only": "its chat template never edits the past: one token row per episode",
            "fork": "its chat template edits the past, so token rows fork (rollout.history)",
        }[renderer.history]
        how += f"; dialect {renderer.dialect.name}, {renderer.template.note}"
        return ("ok", what, how), renderer
    except AgentRLError as error:
        return ("fix", what, str(error)), None


def _memory(config: RunConfig) -> Finding:
    """Checks that training fits into memory, and suggests settings if it does not."""
    parallel = config.train.parallel
    num_ranks = (parallel.data or 1) * parallel.of_a_row
    what = "memory of training" if num_ranks == 1 else f"memory of each of {num_ranks} ranks"
    try:
        from agentrl.model.load import resolve_device
        from agentrl.train import memory

        device = resolve_device(config.model.device).type
        there = memory.device_memory(device) // (num_ranks if device == "cpu" else 1)
        chosen = ""
        if memory.chooses_token_budget(config, device):
            budget = memory.fitting_token_budget(
                config, there, device_type=device, num_ranks=num_ranks
            )
            config = memory.with_token_budget(config, budget)
            chosen = f", with train.token_budget = {budget}, chosen to fit"
        needed = memory.estimate(config, device_type=device, num_ranks=num_ranks)
        said = f"{needed}, of {there / 2**30:.1f} GiB{chosen}"
        if config.model.compile:
            said += "; activations are counted without model.compile, which needs less"
        room = memory.room_for_training(config, there)
        if needed.total <= room:
            return "ok", what, said
        settings = []
        for setting, smaller in memory.remedies(config, device_type=device, num_ranks=num_ranks):
            settings.append(setting)
            if smaller.total <= room:
                then = f"with {', '.join(settings)} it takes {smaller.total / 2**30:.1f} GiB"
                return "fix", what, f"{said}; {then}"
    except (AgentRLError, OSError, ValueError) as error:
        return "note", what, f"not estimated: {str(error).splitlines()[0]}"
    except (NotImplementedError, RuntimeError):
        return "note", what, "not estimated: the model's layers cannot be counted without weights"
    said += "; no setting makes it fit; use a smaller model, or more devices"
    return "fix", what, f"{said} (train.parallel.data, started by torchrun)"


def _memory_of_sampling(config: RunConfig) -> Iterator[Finding]:
    """Computes the memory that the embedded engine needs for keys and values while sampling."""
    if config.inference.backend != "embedded":
        return
    from transformers import AutoConfig

    rollout = config.rollout
    try:
        text = AutoConfig.from_pretrained(config.model.path).get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except (AttributeError, OSError, ValueError):  # some model families have no heads
        return
    itemsize = 4 if config.model.dtype == "float32" else 2
    together = min(rollout.max_concurrent, rollout.groups_per_step * rollout.group_size)
    tokens = min(config.inference.max_batch_tokens, together * rollout.max_context_tokens)
    needed = 2 * itemsize * heads * size * text.num_hidden_layers * tokens / 2**30
    said = (
        f"{needed:.2f} GiB of keys and values at most, for {tokens} tokens at once "
        f"(inference.max_batch_tokens = {config.inference.max_batch_tokens}), free again before "
        "training"
    )
    yield "ok", "memory of sampling", said


def _memory_of_servers(config: RunConfig, there: int, num_gpus: int) -> Iterator[Finding]:
    """Checks that training and the servers that a run starts fit on the GPU that they share.

    Args:
        there: memory of each GPU in bytes.
        num_gpus: number of GPUs; servers share the trainer's GPU only if it is the only one.
    """
    from agentrl.inference.backends import BACKENDS
    from agentrl.train import memory

    inference, num_ranks = config.inference, config.train.parallel.data or 1
    starts = inference.has_servers and not inference.urls
    if not starts or num_gpus != 1 or num_ranks * config.train.parallel.of_a_row > 1:
        return
    what, each = "memory of servers", f"{inference.num_servers} on the GPU that trains"
    left = memory.share_for_servers(config, there, device_type="cuda")
    flag = BACKENDS[inference.backend].program.share_flag
    share = memory.share_in_arguments(inference.args, flag)
    turns = ", in turns" if inference.share == "sleep" else ""
    least = 0.1
    try:
        quantization = config.model.quantization or inference.quantization
        least = max(least, memory.bytes_of_weights(config, quantization) / there + 0.05)
    except (NotImplementedError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        yield (
            "note",
            what,
            f"the size of the weights cannot be read ({reason}): a server is supposed to need a "
            f"share of {least:g}",
        )
    if share is None:
        said = f"{each}{turns}: training leaves a share of {left:.2f} for each"
        if left >= least:
            yield "ok", what, f"{said} ({flag})"
            return
        said += f", but its weights and a small cache need {least:.2f}"
        if not turns:
            alone = inference.model_copy(update={"share": "sleep"})
            config = config.model_copy(update={"inference": alone})
            in_turns = memory.share_for_servers(config, there, device_type="cuda")
            if in_turns >= least:
                said += f"; with inference.share = 'sleep' it is {in_turns:.2f}"
        yield "fix", what, said
    elif share > left:
        yield (
            "fix",
            what,
            f"{each}: inference.args gives each a share of {share:g}, but training leaves only "
            f"{left:.2f}; lower {flag}, or leave it out",
        )
    else:
        yield "ok", what, f"{each}: a share of {share:g} for each; training leaves {left:.2f}"


async def _open_a_task(config: RunConfig) -> None:
    """Opens and closes one session, in this process or on the server."""
    from agentrl.env.client import connect
    from agentrl.rollout.setup import split_size

    async with contextlib.aclosing(connect(config.env.url or None, token=config.env.token)) as env:
        await split_size(env, config, config.env.split)
        session = await env.session(
            config.env.id, split=config.env.split, index=0, seed=0, config=config.env.config
        )
        await session.close()


async def _show(config: RunConfig, renderer: Renderer) -> None:
    """Checks that the model would see the environment's tools and images, as a run does."""
    from agentrl.env.client import connect
    from agentrl.rollout.setup import require_shown_images, require_shown_tools

    async with contextlib.aclosing(connect(config.env.url or None, token=config.env.token)) as env:
        await require_shown_tools(env, config, renderer)
        await require_shown_images(env, config, renderer)


def _config_without_a_file(overrides: list[str]) -> RunConfig:
    """Makes a configuration from overrides alone, to check the servers."""
    from agentrl.config import apply_overrides, load_config

    given = apply_overrides({}, overrides)
    if not given & {"inference.urls", "inference"}:
        raise ConfigError("without a run file, only servers can be checked; give --inference.urls")
    defaults = {"model.path": "none", "inference.backend": "vllm", "rollout.max_turn_tokens": "1"}
    extra = [f"--{key}={value}" for key, value in defaults.items() if key not in given]
    return load_config(Path(os.devnull), overrides + extra)


def _servers(config: RunConfig) -> Iterator[Finding]:
    if not config.inference.has_servers:
        return

    async def findings(url: str) -> list[Finding]:
        return [(status, url, detail) async for status, detail in check_server(url, config)]

    for url in config.inference.urls:
        yield from asyncio.run(findings(url.rstrip("/")))
