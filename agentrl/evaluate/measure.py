"""Measures a policy on the first tasks of a split, k samples each: avg@k and pass@k.

Episodes are played by the same driver as in training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl.config import RunConfig
from agentrl.env.client import EnvClient
from agentrl.evaluate.episodes import EpisodeLog, Shard
from agentrl.evaluate.statistics import EvalStatistics, evaluation_statistics
from agentrl.rollout.metrics import error_codes
from agentrl.rollout.policy import Policy
from agentrl.rollout.scheduler import RolloutBatch, Room, TaskSource
from agentrl.rollout.setup import make_scheduler, scorer_of, split_size

if TYPE_CHECKING:
    from agentrl.rollout.agent.runner import Agents

logger = logging.getLogger("agentrl.rollout")


async def evaluate(
    config: RunConfig,
    policy: Policy,
    env: EnvClient,
    *,
    id_prefix: str = "eval-",
    capacity: Room | None = None,
    agents: Agents | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    log: EpisodeLog | None = None,
    shard: Shard | None = None,
) -> RolloutBatch:
    """Plays `eval.num_tasks` tasks of `eval.split`, `eval.samples_per_task` times each.

    Args:
        capacity: shared with training rollouts that run at the same time.
        agents: play the episodes, and call the policy.
        on_progress: called with (episodes ended, episodes dispatched).
        log: episodes in it are not played again; new ones are added to it.
        shard: the part of the tasks that is played.
    """
    size = await split_size(env, config, config.eval.split)
    scheduler = make_scheduler(
        config,
        policy,
        env,
        TaskSource(config.eval.split, size, config.run.seed, shuffle=False),
        group_size=config.eval.samples_per_task,
        score=scorer_of(config),
        capacity=capacity,
        id_prefix=id_prefix,
        agents=agents,
    )
    num_tasks = config.eval.num_tasks if size is None else min(size, config.eval.num_tasks)
    takes = shard.has if shard else lambda position: True
    batch = await scheduler.collect(
        num_tasks,
        on_progress=on_progress,
        log=log,
        takes=takes,
        max_total_tokens=config.eval.max_total_tokens,
    )
    if batch.num_left_out:
        logger.warning(
            "eval.max_total_tokens = %d is reached: %d episodes were not played; raise it, and go "
            "on with --resume",
            config.eval.max_total_tokens,
            batch.num_left_out,
        )
    if log is not None:
        log.finish(batch.trajectories)
    return batch


def summarise(rollouts: RolloutBatch, config: RunConfig) -> EvalStatistics | None:
    """Computes statistics over the samples that have a reward; None without any.

    A task with failed samples counts with its other samples, and limits the k of pass@k."""
    rewards = {
        group.group_id: [t.reward for t in group.trajectories if t.scored]
        for group in rollouts.groups
    }
    rewards = {task: values for task, values in rewards.items() if values}
    if not rewards:
        return None
    fewest = min(len(values) for values in rewards.values())
    return evaluation_statistics(
        rewards,
        success_threshold=config.eval.success_threshold,
        ks=[k for k in config.eval.pass_k if k <= fewest],
    )


def evaluation_metrics(
    rollouts: RolloutBatch, config: RunConfig, name: str = ""
) -> dict[str, float]:
    """Computes avg@k, pass@k for every k, and the fraction of failed samples. Their names begin
    with `eval/` or, for a named set, `eval/NAME/`."""
    prefix = f"eval/{name}/" if name else "eval/"
    num_failed = sum(error_codes(rollouts.trajectories).values())
    statistics = summarise(rollouts, config)
    if statistics is None:
        return {f"{prefix}error_fraction": 1.0}
    metrics = {
        # One name for a curve, also where a sample failed and a task has fewer.
        f"{prefix}avg@{config.eval.samples_per_task}": statistics.average.value,
        f"{prefix}error_fraction": num_failed / len(rollouts.trajectories),
    }
    return metrics | {f"{prefix}pass@{k}": e.value for k, e in statistics.pass_at.items()}
