"""`agentrl doctor RUN.toml --play N`: plays a few episodes as the run would and tries a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl.cli.doctor_servers import Finding
from agentrl.config import RunConfig
from agentrl.env.client import EnvClient, connect
from agentrl.errors import TrainingError
from agentrl.evaluate.measure import evaluate
from agentrl.evaluate.statistics import proportion_estimate
from agentrl.model.text.template import HIDDEN_TOOLS
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.setup import running_agents, split_size
from agentrl.train.evaluate import policy_of
from agentrl.train.preflight import FirstRewards, rate_is_unusual
from agentrl.types import Sample, Trajectory, samples_of
from agentrl.view.rules import Evidence, findings

COMPARED = 16
"""Number of training tasks and of test tasks whose prompts are compared."""
ABOUT_REWARDS = ("never_rewarded", "equal_rewards")
"""Rules that a few episodes cannot answer; `FirstRewards` judges those of a run's beginning."""


@dataclass(slots=True)
class Played:
    trajectories: list[Trajectory]
    prompt: str
    """The first prompt, as the model sees it."""
    tools: list[str]
    """Names of the tools that the environment offers."""
    hides_tools: bool
    seconds: float
    common: int
    """Number of prompts that the first COMPARED tasks of both splits have in common."""


def play_findings(config: RunConfig, num_episodes: int) -> Iterator[Finding]:
    """Plays episodes, trains on them once and yields what the rules find.

    Args:
        num_episodes: number of episodes, two per task, to see whether rewards differ within a
            group.
    """
    if config.inference.backend == "openai":
        yield "fix", "playing", "a chat server cannot be trained; set another inference.backend"
        return
    if config.agent.is_on:
        from agentrl.cli.doctor_agent import agent_findings

        yield from agent_findings(config)
    played = asyncio.run(_play(config, max(num_episodes // 2, 1)))
    shown = played.prompt if len(played.prompt) <= 2000 else f"{played.prompt[:2000]} ..."
    yield "ok", "the first prompt", f"\n{shown}"
    if played.hides_tools:
        yield "fix", "tools", HIDDEN_TOOLS
    scored = [t for t in played.trajectories if t.trainable]
    if scored:
        yield from _rewards(scored, played.trajectories, config)
    calls = sum(t.metrics.get("tool_calls", 0.0) for t in scored)
    if played.tools and not calls:
        yield (
            "note",
            "tools",
            f"none was called in {len(scored)} episodes; look at the model's texts, check "
            "rollout.dialect, or train on demonstrations first (agentrl env demonstrate, "
            "agentrl sft)",
        )
    if played.common > COMPARED // 2:
        yield (
            "fix",
            "test tasks",
            f"{played.common} of the first {COMPARED} tasks of split {config.eval.split!r} are "
            f"also in {config.env.split!r}, so memorised answers would look like progress; hold "
            "out other tasks",
        )
    samples = [sample for t in scored for sample in samples_of(t)]
    measured = {}
    if samples:
        gap, largest, seconds, num_parameters = _train_once(config, samples)
        said = f"differ by {gap:.2g} nats per token in {config.model.dtype}, {largest:.2g} at most"
        if config.model.quantization:
            said += "; computed here without 4-bit weights"
        else:
            measured["policy/fresh_diff_mean"] = gap
        yield "ok", "sampler and trainer", said
        yield _speed(config, played, samples, seconds)
        if wrong := rate_is_unusual(config, num_parameters):
            yield "note", "learning rate", wrong
    yield from _found(played.trajectories, config, measured)


def _found(
    trajectories: list[Trajectory], config: RunConfig, measured: dict[str, float]
) -> Iterator[Finding]:
    errors = [t.error.message for t in trajectories if t.error is not None]
    seen = Evidence.of_batch(trajectories, config.model_dump(), measured)
    for rule, finding in findings(seen).values():
        if rule.id in ABOUT_REWARDS:
            continue
        said = f"{finding.text}: {rule.fix}"
        if rule.metric == "rollout/error_fraction" and errors:
            said += f"; the first failed with: {errors[0]}"
        yield ("fix" if finding.share >= 0.5 else "note"), rule.id.replace("_", " "), said


async def _play(config: RunConfig, num_tasks: int) -> Played:
    """Plays the first tasks of the training split, with the sampling of training."""
    from agentrl.train.sampling import training_sampling

    rollout = config.rollout
    keys: dict[str, Any] = {
        "split": config.env.split,
        "num_tasks": num_tasks,
        "samples_per_task": 2,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "repetition_penalty": 1.0,
        "sets": {},
        "max_tokens": rollout.max_turn_tokens,
    }
    as_training = config.model_copy(update={"eval": config.eval.model_copy(update=keys)})
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(
            aclosing(connect(config.env.url or None, token=config.env.token))
        )
        agents = await stack.enter_async_context(running_agents(config))
        policy = await policy_of(as_training, None, stack, for_agents=config.plays_by_agent)
        assert isinstance(policy, TokenPolicy)
        # Evaluation does not request the kept ids; routes need a model prepared to replay them.
        sampling = replace(training_sampling(config), report_routes=False)
        policy = replace(policy, sampling=sampling)
        started = time.perf_counter()
        batch = await evaluate(as_training, policy, env, agents=agents)
        seconds = time.perf_counter() - started
        renderer = policy.renderer
        first = next((t.branches[0] for t in batch.trajectories if t.branches), None)
        ids = [] if first is None else first.token_ids[: _prompt_length(first.loss_mask)]
        info = await env.info(config.env.id, config.env.config)
        specs: Any = info.tools
        return Played(
            trajectories=batch.trajectories,
            prompt=renderer.tokenizer.decode(ids, skip_special_tokens=False),
            tools=[spec["function"]["name"] for spec in specs],
            hides_tools=rollout.tools == "template" and renderer.template.hides_tools,
            seconds=seconds,
            common=await _in_both_splits(env, config),
        )


def _prompt_length(loss_mask: Sequence[int]) -> int:
    return next((place for place, sampled in enumerate(loss_mask) if sampled), len(loss_mask))


async def _in_both_splits(env: EnvClient, config: RunConfig) -> int:
    splits = (await env.info(config.env.id, config.env.config)).splits
    if config.eval.split == config.env.split or config.eval.split not in splits:
        return 0
    prompts = []
    for split in (config.env.split, config.eval.split):
        size = await split_size(env, config, split)
        found = set()
        for index in range(COMPARED if size is None else min(COMPARED, size)):
            session = await env.session(
                config.env.id, split=split, index=index, seed=0, config=config.env.config
            )
            found.add(repr([message["content"] for message in session.messages]))
            await session.close()
        prompts.append(found)
    return len(prompts[0] & prompts[1])


def _rewards(
    scored: list[Trajectory], trajectories: list[Trajectory], config: RunConfig
) -> Iterator[Finding]:
    """Yields what the episodes earned, and what a run would say of its first rewards."""
    tasks: dict[str, list[float]] = {}
    for trajectory in scored:
        tasks.setdefault(trajectory.group_id, []).append(trajectory.reward)
    passed = [
        np.mean([r >= config.eval.success_threshold for r in each]) for each in tasks.values()
    ]
    rate = proportion_estimate(np.array(passed), len(scored))
    within = "" if rate.low is None else f" [{rate.low:.2f}, {rate.high:.2f}]"
    differ = sum(len(set(each)) > 1 for each in tasks.values())
    yield (
        "ok",
        "episodes",
        f"{len(scored)} episodes pass {rate.value:.2f}{within}, mean reward "
        f"{np.mean([t.reward for t in scored]):.3f}; rewards differ within {differ} of "
        f"{len(tasks)} tasks",
    )
    try:
        if warning := FirstRewards(True).look(trajectories, config):
            yield "note", "rewards", warning
    except TrainingError as error:
        yield "fix", "rewards", str(error)


def _train_once(config: RunConfig, samples: list[Sample]) -> tuple[float, float, float, int]:
    """Runs one forward and backward pass over all samples.

    Returns:
        The mean and the largest difference between the sampler's and the trainer's
        log-probabilities, the seconds it took, and the number of trainable parameters.
    """
    from agentrl.model.build import build
    from agentrl.model.load import set_gradient_checkpointing
    from agentrl.model.logprobs import sample_logprobs
    from agentrl.model.lora import add_adapter
    from agentrl.model.rows import pack, plan_micro_batches

    model = build(config.model.path, "sampler", config).module
    if config.model.lora.rank:
        add_adapter(model, config.model.lora, path=config.model.path)
    set_gradient_checkpointing(model, config.model.gradient_checkpointing)
    started, gaps = time.perf_counter(), []
    for rows in plan_micro_batches([len(s) for s in samples], config.train.token_budget):
        logprobs, _ = sample_logprobs(
            model, pack(samples, rows), temperature=config.rollout.temperature
        )
        logprobs.sum().backward()
        told = np.concatenate(
            [samples[row].rollout_logprobs[samples[row].loss_mask.astype(bool)] for row in rows]
        )
        gaps.append(np.abs(logprobs.detach().float().cpu().numpy() - told))
    seconds = time.perf_counter() - started
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = np.concatenate(gaps)
    return float(everything.mean()), float(everything.max()), seconds, learning


def _speed(config: RunConfig, played: Played, samples: list[Sample], seconds: float) -> Finding:
    sampled = sum(t.num_sampled_tokens for t in played.trajectories)
    tokens = sum(map(len, samples))
    episodes = config.rollout.groups_per_step * config.rollout.group_size
    times = episodes / len(played.trajectories)
    return (
        "ok",
        "speed",
        f"{sampled / played.seconds:.0f} tokens sampled and {tokens / seconds:.0f} trained per "
        f"second; a step of {episodes} such episodes has {tokens * times:.0f} tokens and takes at "
        f"most about {played.seconds * times:.0f} s of rollout and {seconds * times:.0f} s of "
        "training (larger batches are faster, and shared prompts are computed once)",
    )
