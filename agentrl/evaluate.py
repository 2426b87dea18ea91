"""`agentrl eval` and `agentrl rollout`: play episodes with a model, a checkpoint or a server."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from agentrl import event_loop
from agentrl.config import RunConfig
from agentrl.env.client import connect
from agentrl.errors import ConfigError
from agentrl.rollout.evaluation import evaluate, summarise
from agentrl.rollout.log import TrajectoryLog
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.policy import Policy
from agentrl.rollout.render import Renderer
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.rollout.setup import running_agents, token_policy
from agentrl.statistics import EvalStatistics
from agentrl.tracking import MetricsWriter

if TYPE_CHECKING:
    from agentrl.inference.base import InferenceEngine


def evaluate_command(
    config: RunConfig, *, checkpoint: str | None, out: Path | None, as_json: bool
) -> int:
    """`agentrl eval`: evaluate, print a table or JSON, optionally keep the trajectories."""
    rollouts = _with_progress("eval", config, checkpoint)
    statistics = summarise(rollouts, config)
    if out is not None:
        TrajectoryLog(out).append(0, rollouts.trajectories)
    result = result_record(rollouts, statistics)
    if out is not None:
        (out / "eval.json").write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(config, result)
    return 0 if statistics is not None else 1


def rollout_command(config: RunConfig, *, checkpoint: str | None, out: Path) -> int:
    """`agentrl rollout`: play episodes and keep everything: trajectories, metrics, a report.

    Raises:
        ConfigError: `out` already holds rollouts.
    """
    from agentrl.view.report import report_run

    with MetricsWriter(out) as writer:
        (out / "config.toml").write_text(config.to_toml())
        started = time.perf_counter()
        rollouts = _with_progress("rollout", config, checkpoint)
        seconds = time.perf_counter() - started
        TrajectoryLog(out).append(1, rollouts.trajectories)
        metrics = rollout_metrics(rollouts) | {
            "time/rollout_s": seconds,
            "rollout/tokens_per_s": sum(t.num_sampled_tokens for t in rollouts.trajectories)
            / seconds,
        }
        writer.write(1, metrics)
    result = result_record(rollouts, None)
    print(
        f"{result['num_samples']} episodes of {result['num_tasks']} tasks in {seconds:.1f} s, "
        f"reward {metrics['reward/mean']:.3f}, {result['num_failed']} failed"
    )
    if result["num_failed"]:
        print(f"failed: {result['errors']}; first: {result['first_error']}")
    print(f"trajectories, metrics and report: {report_run(out)}")
    return 0 if result["num_failed"] < result["num_samples"] else 1


def _with_progress(what: str, config: RunConfig, checkpoint: str | None) -> RolloutBatch:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        bar = progress.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        return event_loop.run(_evaluate_once(config, checkpoint, show))


async def _evaluate_once(
    config: RunConfig, checkpoint: str | None, on_progress: Callable[[int, int], None]
) -> RolloutBatch:
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(
            aclosing(connect(config.env.url or None, token=config.env.token))
        )
        agents = await stack.enter_async_context(running_agents(config))
        policy = await _policy(config, checkpoint, stack)
        return await evaluate(config, policy, env, agents=agents, on_progress=on_progress)


async def _policy(config: RunConfig, checkpoint: str | None, stack: AsyncExitStack) -> Policy:
    """Whom the run file names; `stack` closes what it takes."""
    if config.inference.backend == "openai":
        return await stack.enter_async_context(aclosing(_chat_policy(config)))
    from agentrl.train.checkpoint import latest_checkpoint
    from agentrl.train.model import load_tokenizer
    from agentrl.train.sampling import evaluation_sampling
    from agentrl.train.setup import newest_run

    path = config.model.path
    if checkpoint == "latest":
        newest = newest_run(config)
        found = latest_checkpoint(newest) if newest is not None else None
        if found is None:
            raise ConfigError(f"no checkpoint under {config.run.path}; train first, or name one")
        path = str(found)
    elif checkpoint is not None:
        if not Path(checkpoint).is_dir():
            raise ConfigError(f"--checkpoint {checkpoint}: no such directory")
        path = checkpoint
    renderer = Renderer(
        load_tokenizer(path),
        history=config.rollout.history,
        template_kwargs=config.rollout.template,
        dialect=config.rollout.dialect,
    )
    sampling, said = evaluation_sampling(config, path)
    if said is not None:
        print(said, file=sys.stderr)
    engine = await _engine(config, path, stack)
    return token_policy(config, engine, renderer, sampling)


async def _engine(config: RunConfig, path: str, stack: AsyncExitStack) -> InferenceEngine:
    if config.inference.backend == "vllm":
        from agentrl.inference.vllm import VLLMEngine

        urls = config.inference.urls
        if not urls:
            from agentrl.train.serving import launcher_of, servable

            folder = Path(stack.enter_context(TemporaryDirectory(prefix="agentrl-vllm-")))
            base, adapter = servable(path, folder / "model")
            launcher = launcher_of(config, base, log_dir=folder, plugin_dir=None, adapter=adapter)
            await stack.enter_async_context(aclosing(launcher))
            await launcher.start()
            urls = launcher.urls
        engine = VLLMEngine(
            urls,
            model=config.inference.model,
            token=config.inference.token,
            retry_for_s=config.inference.retry_for_s,
        )
        return await stack.enter_async_context(aclosing(engine))
    from agentrl.train.model import load_model
    from agentrl.train.serving import embedded_engine
    from agentrl.train.setup import resolve_device, resolve_dtype

    model = load_model(
        path, dtype=resolve_dtype(config.model.dtype), device=resolve_device(config.model.device)
    )
    return await stack.enter_async_context(aclosing(embedded_engine(config, model)))


def _chat_policy(config: RunConfig) -> Policy:
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise ConfigError(
            "inference.backend = 'openai' needs the openai package: pip install 'agentrl[eval]'"
        ) from None
    from agentrl.rollout.chat import ChatPolicy
    from agentrl.rollout.dialects.choose import named_dialect

    base = config.inference.urls[0].rstrip("/")
    client = AsyncOpenAI(
        base_url=base if base.endswith("/v1") else f"{base}/v1",
        api_key=config.inference.token or os.environ.get("OPENAI_API_KEY") or "none",
        timeout=config.rollout.turn_timeout_s,
    )
    sampling = {"max_tokens": config.rollout.max_turn_tokens} | config.eval.sampling()
    return ChatPolicy(
        client,
        config.inference.model,
        sampling.pop("max_tokens"),
        sampling.pop("temperature", None),
        named_dialect(config.rollout.dialect),
        sampling=sampling,
    )


def result_record(rollouts: RolloutBatch, statistics: EvalStatistics | None) -> dict:
    """The evaluation as JSON: estimates with their intervals, and how many samples failed."""
    errors = Counter(t.error.code for t in rollouts.trajectories if t.error)
    record: dict = {
        "num_tasks": len(rollouts.groups),
        "num_samples": len(rollouts.trajectories),
        "num_failed": sum(errors.values()),
        "errors": dict(errors),
        "first_error": next((t.error.message for t in rollouts.trajectories if t.error), None),
    }
    if statistics is not None:
        record["confidence"] = statistics.confidence
        record[f"avg@{statistics.samples_per_task}"] = _interval(statistics.average)
        for k, estimate in statistics.pass_at.items():
            record[f"pass@{k}"] = _interval(estimate)
    return record


def _interval(estimate: object) -> dict:
    return {name: getattr(estimate, name) for name in ("value", "low", "high", "standard_error")}


def _print_table(config: RunConfig, result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{config.env.id}, split {config.eval.split}: {result['num_tasks']} tasks, "
        f"{result['num_samples']} samples, {result['num_failed']} failed"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "value", "95% interval (over tasks)"):
        table.add_column(heading)
    for name, entry in result.items():
        if "@" in name:
            shown = "-" if entry["low"] is None else f"{entry['low']:.3f} to {entry['high']:.3f}"
            table.add_row(name, f"{entry['value']:.3f}", shown)
    console = Console()
    console.print(table)
    if result["num_failed"]:
        console.print(f"failed: {result['errors']}; first: {result['first_error']}", markup=False)
