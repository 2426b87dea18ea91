"""Makes the objects that play rollouts from the configuration."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from agentrl.config import RunConfig
from agentrl.env.client import EnvClient, connect
from agentrl.errors import ConfigError, DataError
from agentrl.images import count_images
from agentrl.inference.base import InferenceEngine, SamplingParams
from agentrl.model.text.renderer import Renderer
from agentrl.model.text.template import HIDDEN_TOOLS
from agentrl.rollout.driver import Limits
from agentrl.rollout.policy import Policy, TokenPolicy
from agentrl.rollout.scheduler import GroupScheduler, Room, Score, TaskSource, stable_seed

if TYPE_CHECKING:
    from agentrl.rollout.agent.runner import Agents


def load_renderer(config: RunConfig, path: str) -> Renderer:
    """Loads what writes prompts and reads turns of the model at `path`, as the run file says.

    Raises:
        ConfigError: there is no model, its chat template cannot be used, or it was made for fewer
            tokens than `rollout.max_context_tokens`.
    """
    from agentrl.model.load import load_processor, load_tokenizer, require_context

    tokenizer, rollout = load_tokenizer(path, config.model.chat_template), config.rollout
    require_context(path, rollout.max_context_tokens)
    return Renderer(
        tokenizer,
        history=rollout.history,
        template_kwargs=rollout.template,
        dialect=rollout.dialect,
        tools=rollout.tools,
        stop_token_ids=rollout.stop_token_ids,
        processor=load_processor(path, tokenizer),
    )


def token_policy(
    config: RunConfig, engine: InferenceEngine, renderer: Renderer, sampling: SamplingParams
) -> TokenPolicy:
    return TokenPolicy(
        engine=engine,
        renderer=renderer,
        max_turn_tokens=sampling.max_tokens,
        max_context_tokens=config.rollout.max_context_tokens,
        sampling=sampling,
        stop_strings=tuple(config.rollout.stop_strings),
    )


def make_scheduler(
    config: RunConfig,
    policy: Policy,
    env: EnvClient,
    source: TaskSource,
    *,
    group_size: int,
    score: Score | None,
    capacity: Room | None = None,
    id_prefix: str = "",
    agents: Agents | None = None,
    name: str = "",
) -> GroupScheduler:
    """Makes a scheduler of the configured environment; see `GroupScheduler` for the arguments.

    Args:
        name: this environment's name if there are several; part of its episodes' ids and seeds.
    """
    rollout = config.rollout
    return GroupScheduler(
        policy,
        env,
        source,
        env_id=config.env.id,
        env_config=config.env.config,
        group_size=group_size,
        max_concurrent=rollout.max_concurrent,
        limits=Limits(
            max_turns=rollout.max_turns,
            turn_timeout_s=rollout.turn_timeout_s,
            step_timeout_s=rollout.step_timeout_s,
            episode_timeout_s=rollout.episode_timeout_s,
        ),
        seed=stable_seed(config.run.seed, name) if name else config.run.seed,
        id_prefix=f"{id_prefix}{name}-" if name else id_prefix,
        score=score,
        capacity=capacity,
        agents=agents,
    )


@contextlib.asynccontextmanager
async def connected(config: RunConfig) -> AsyncIterator[dict[str, EnvClient]]:
    """Yields a client of each environment of the run, by name."""
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, EnvClient] = {}
        for name, alone in config.environments.items():
            client = connect(alone.env.url or None, token=alone.env.token)
            clients[name] = await stack.enter_async_context(contextlib.aclosing(client))
        yield clients


@contextlib.asynccontextmanager
async def running_agents(config: RunConfig) -> AsyncIterator[Agents | None]:
    """Yields the agents' endpoint with its runner; None if the policy plays itself.

    Raises:
        ConfigError: the agent cannot be found, or the endpoint's address cannot be bound.
    """
    if not config.plays_by_agent:
        yield None
        return
    if config.rollout.generate is not None:
        from agentrl.rollout.agent.generate import make_generating

        agents = make_generating(config.rollout.generate)
    else:
        from agentrl.rollout.agent.runner import make_agents

        agents = make_agents(config.agent, max_concurrent=config.rollout.max_concurrent)
    try:
        await agents.start()
        yield agents
    finally:
        await agents.aclose()


def scorer_of(config: RunConfig) -> Score | None:
    """Returns the reward functions of the run file as one function; None if all rewards come from
    the environment.

    Raises:
        ConfigError: a function is not found, or does not have the given options.
    """
    if not config.reward.functions:
        return None
    from agentrl_rewards.scoring import GroupScorer

    return GroupScorer(**config.reward.model_dump())


async def require_shown_tools(env: EnvClient, config: RunConfig, renderer: Renderer) -> None:
    """Checks that the model is told of the environment's tools.

    Raises:
        ConfigError: the environment has tools, but the prompt would not show them.
    """
    if config.rollout.tools != "template" or not renderer.template.hides_tools:
        return
    info = await env.info(config.env.id, config.env.config)
    specs = cast("list[dict[str, Any]]", info.tools)
    if specs:
        names = ", ".join(spec["function"]["name"] for spec in specs)
        raise ConfigError(f"environment {config.env.id!r} has tools ({names}), and {HIDDEN_TOOLS}")


async def require_shown_images(env: EnvClient, config: RunConfig, renderer: Renderer) -> None:
    """Raises:
    ConfigError: the first task shows an image, and the servers are not sent those of the model.
    """
    if renderer.processor is None or not config.inference.has_servers:
        return
    from agentrl.inference.backends import BACKENDS

    engine = BACKENDS[config.inference.backend].engine
    if renderer.processor.family in engine.image_families:
        return
    tasks = await env.tasks(config.env.id, config.env.split, 0, 1, config=config.env.config)
    prompts = [task.prompt for task in tasks if not isinstance(task.prompt, str)]
    if any(count_images(message["content"]) for prompt in prompts for message in prompt):
        raise ConfigError(
            f"environment {config.env.id!r} shows images, and {engine.name} is sent those of "
            f"{', '.join(engine.image_families) or 'no family'}, not of {renderer.processor.family}"
            "; set inference.backend = 'embedded'"
        )


async def split_size(env: EnvClient, config: RunConfig, split: str) -> int | None:
    """Returns the number of tasks of a split under `env.config`, which loads them; None if tasks
    are generated without end.

    Raises:
        EnvError: the environment refuses its configuration, or its data cannot be loaded.
        ConfigError: the environment has no such split.
        DataError: the split is empty.
    """
    info = await env.info(config.env.id, config.env.config)
    if split not in info.splits:
        raise ConfigError(
            f"environment {config.env.id!r} has no split {split!r}; it has "
            f"{', '.join(sorted(info.splits)) or 'none'} (env.split, eval.split)"
        )
    size = info.splits[split]
    if size == 0:
        raise DataError(f"split {split!r} of environment {config.env.id!r} is empty")
    return size
