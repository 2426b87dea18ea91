"""Plays the tasks of `[eval]` once, with a model, a checkpoint or a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from agentrl import runtime
from agentrl.config import RunConfig
from agentrl.env.client import connect
from agentrl.errors import ConfigError, InferenceError
from agentrl.evaluate.episodes import EpisodeLog, Shard
from agentrl.evaluate.measure import evaluate
from agentrl.rollout.policy import Policy, TokenPolicy
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.rollout.setup import (
    load_renderer,
    require_shown_images,
    require_shown_tools,
    running_agents,
    token_policy,
)

if TYPE_CHECKING:
    from agentrl.inference.base import InferenceEngine
    from agentrl.rollout.chat import ChatPolicy

SERVERS_WAIT_S = 10.0
"""Seconds in which a server that is just starting may begin to answer."""

Progress = Callable[[int, int], None]
"""Called with (episodes ended, episodes dispatched)."""


def play(
    config: RunConfig,
    checkpoint: str | None,
    on_progress: Progress | None,
    *,
    out: Path | None = None,
    resume: bool = False,
    shard: Shard | None = None,
) -> RolloutBatch:
    """Plays the tasks of `[eval]`.

    Args:
        checkpoint: a directory, or `latest` of the run directory; None: `model.path`, or the
            model that the servers of `[inference]` hold.
        out: a folder that gets every episode when it ends; None keeps them in memory alone.
        resume: play only episodes that are missing in the folder, or that failed for a reason that
            may have passed.
        shard: the part of the tasks that is played.

    Raises:
        ConfigError: the checkpoint does not exist, a package is missing, or the folder holds
            another evaluation.
        AgentRLError: see `agentrl.evaluate.measure.evaluate`.
    """
    if shard and out is None:
        raise ConfigError("--shard writes episodes for others to take over: give --out DIR")
    if config.envs:
        names = ", ".join(env.name for env in config.envs)
        raise ConfigError(f"there are several environments; take one: config.environments, {names}")
    return runtime.run(_play(config, checkpoint, on_progress, out, resume, shard))


async def _play(
    config: RunConfig,
    checkpoint: str | None,
    on_progress: Progress | None,
    out: Path | None,
    resume: bool,
    shard: Shard | None,
) -> RolloutBatch:
    log = None
    if out is not None:
        path = model_path(config, checkpoint)
        model = config.model.model_copy(update={"path": path})
        log = EpisodeLog(
            out, config.model_copy(update={"model": model}), resume=resume, shard=shard
        )
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(
            aclosing(connect(config.env.url or None, token=config.env.token))
        )
        agents = await stack.enter_async_context(running_agents(config))
        for_agents = config.plays_by_agent
        policy = await policy_of(config, checkpoint, stack, for_agents=for_agents)
        if isinstance(policy, TokenPolicy):
            await require_shown_tools(env, config, policy.renderer)
            await require_shown_images(env, config, policy.renderer)
        return await evaluate(
            config, policy, env, agents=agents, on_progress=on_progress, log=log, shard=shard
        )


async def policy_of(
    config: RunConfig, checkpoint: str | None, stack: AsyncExitStack, *, for_agents: bool
) -> Policy:
    """Makes the policy that the run file names; `stack` closes its resources.

    Args:
        for_agents: the policy is called by agents, which may pause long between two calls; other
            episodes should not wait for them.
    """
    if config.inference.backend == "openai":
        policy = await stack.enter_async_context(aclosing(_chat_policy(config)))
        await policy.require_server()
        return policy
    from agentrl.train.sampling import evaluation_sampling

    path = model_path(config, checkpoint)
    renderer = load_renderer(config, path)
    sampling, said = evaluation_sampling(config, path)
    if said is not None:
        print(said, file=sys.stderr)
    engine = await _engine(config, path, stack, for_agents=for_agents)
    return token_policy(config, engine, renderer, sampling)


def model_path(config: RunConfig, checkpoint: str | None) -> str:
    """Returns the path of the model that plays.

    Raises:
        ConfigError: the checkpoint does not exist.
    """
    if checkpoint is None:
        return config.model.path
    if checkpoint != "latest":
        if not Path(checkpoint).is_dir():
            raise ConfigError(f"--checkpoint {checkpoint}: no such directory")
        return checkpoint
    from agentrl.train.checkpoint import latest_checkpoint
    from agentrl.train.setup import newest_run

    newest = newest_run(config)
    found = latest_checkpoint(newest) if newest is not None else None
    if found is None:
        raise ConfigError(f"no checkpoint under {config.run.path}; train first, or name one")
    print(f"plays {found}, the newest checkpoint", file=sys.stderr)
    return str(found)


async def _engine(
    config: RunConfig, path: str, stack: AsyncExitStack, *, for_agents: bool
) -> InferenceEngine:
    if config.inference.has_servers:
        from agentrl.inference.backends import BACKENDS
        from agentrl.model.load import model_config

        urls = config.inference.urls
        if not urls:
            from agentrl.inference.launcher import ServerLauncher
            from agentrl.train.serving import servable, server_settings

            folder = Path(stack.enter_context(TemporaryDirectory(prefix="agentrl-servers-")))
            base, adapter = servable(path, folder / "model")
            if adapter is not None and config.inference.backend == "sglang":
                raise ConfigError(
                    f"{path} is an adapter, which is not served with SGLang: merge it (`agentrl "
                    "export`), or set inference.backend = 'vllm'"
                )
            settings = server_settings(
                config, base, log_dir=folder, plugin_dir=None, adapter=adapter
            )
            launcher = ServerLauncher(settings, BACKENDS[config.inference.backend].program)
            await stack.enter_async_context(aclosing(launcher))
            await launcher.start()
            urls = launcher.urls
        engine = BACKENDS[config.inference.backend].engine(
            urls,
            model=config.inference.model,
            token=config.inference.token,
            retry_for_s=config.inference.retry_for_s,
            vocab_size=model_config(path).get_text_config().vocab_size,
        )
        await stack.enter_async_context(aclosing(engine))
        await runtime.retry(  # so that no episode is played against a server that never answers
            lambda _: engine.start(),
            timeout_s=SERVERS_WAIT_S,
            retry_after_s=lambda error: 1.0 if isinstance(error, InferenceError) else None,
        )
        return engine
    from agentrl.model.build import build
    from agentrl.train.serving import embedded_engine

    model = build(path, "sampler", config).module
    engine = embedded_engine(config, model, for_agents=for_agents)
    return await stack.enter_async_context(aclosing(engine))


def _chat_policy(config: RunConfig) -> ChatPolicy:
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise ConfigError(
            "inference.backend = 'openai' needs the openai package: pip install 'agentrl-gym[eval]'"
        ) from None
    from agentrl.model.text.template import named_dialect
    from agentrl.rollout.chat import ChatPolicy

    if config.rollout.stop_token_ids:
        raise ConfigError(
            "rollout.stop_token_ids: a chat server answers with texts and ends turns itself; "
            "leave it out with inference.backend = 'openai'"
        )
    base = config.inference.urls[0].rstrip("/")
    client = AsyncOpenAI(
        base_url=base if base.endswith("/v1") else f"{base}/v1",
        api_key=config.inference.token or os.environ.get("OPENAI_API_KEY") or "none",
        timeout=config.rollout.turn_timeout_s,
        max_retries=0,  # the policy itself retries, for `inference.retry_for_s`
    )
    sampling = {"max_tokens": config.rollout.max_turn_tokens} | config.eval.sampling()
    return ChatPolicy(
        client,
        config.inference.model,
        sampling.pop("max_tokens"),
        named_dialect(config.rollout.dialect),
        sampling=sampling,
        retry_for_s=config.inference.retry_for_s,
        needs_usage=config.eval.max_total_tokens is not None,
    )
