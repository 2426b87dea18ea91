"""`agentrl proxy`: serves the agents' endpoint alone, for agents that another program starts.

Each episode is one line of JSON on the standard output: its task, its base URL and key, and the
URL that ends it. As many are open at a time as `rollout.max_concurrent`. They are
recorded as those of `agentrl rollout`, each group as soon as it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict
from pathlib import Path

from agentrl import api, runtime
from agentrl.cli.results import conclude
from agentrl.config import RunConfig
from agentrl.env.client import connect
from agentrl.errors import ConfigError
from agentrl.rollout.agent.command import AgentTask
from agentrl.rollout.agent.runner import Agents
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.log import TrajectoryLog
from agentrl.rollout.scheduler import GroupScheduler, RolloutBatch, TaskSource
from agentrl.rollout.setup import make_scheduler, scorer_of, split_size
from agentrl.train.evaluate import policy_of
from agentrl.types import Group, Trajectory
from agentrl.view.tracking import MetricsWriter


class Announced:
    """A runner that starts nothing: it prints the episode on standard output, and waits until the
    reader ends it."""

    async def run(self, task: AgentTask, base_url: str, api_key: str) -> str | float | None:
        end_url = base_url.removesuffix("/v1") + "/end"
        told = {"base_url": base_url, "api_key": api_key, "end_url": end_url}
        print(json.dumps(told | {"task": asdict(task)}), flush=True)
        await asyncio.Future()

    async def aclose(self) -> None:
        """Does nothing: there are no resources to release."""


def proxy_command(config: RunConfig, *, checkpoint: str | None, out: Path) -> int:
    """Serves the episodes of `eval` until all are over, or until interrupted.

    Raises:
        ConfigError: the policy cannot be recorded token by token; `out` already holds rollouts.
    """
    if config.inference.backend == "openai":
        raise ConfigError(
            "agents are recorded token by token, which a chat server cannot do; set "
            "inference.backend = 'vllm', 'sglang' or 'embedded'"
        )
    rollouts, interrupted = RolloutBatch([], []), False
    with MetricsWriter(out) as writer:
        (out / "config.toml").write_text(config.to_toml())
        started = time.perf_counter()
        try:
            runtime.run(_serve(config, checkpoint, out, rollouts))
        except KeyboardInterrupt:
            interrupted = True
        seconds = time.perf_counter() - started
        if not rollouts.trajectories:
            print("no episode ended", file=sys.stderr)
            return 130 if interrupted else 1
        played = api.measured(rollouts, seconds)
        writer.write(1, played.metrics)
    with contextlib.redirect_stdout(sys.stderr):  # the other is for programs
        status = conclude(out, played)
    return 130 if interrupted else status


async def _serve(
    config: RunConfig, checkpoint: str | None, out: Path, rollouts: RolloutBatch
) -> None:
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(
            aclosing(connect(config.env.url or None, token=config.env.token))
        )
        size = await split_size(env, config, config.eval.split)
        policy = await policy_of(config, checkpoint, stack, for_agents=True)
        server = AgentServer(
            config.agent.host or "127.0.0.1",
            config.agent.port,
            ended_by_request=True,
            leaves_out_tools=config.agent.leave_out_provider_tools,
            roles=config.agent.roles,
        )
        agents = await stack.enter_async_context(aclosing(Agents(server, Announced())))
        await agents.start()
        scheduler = make_scheduler(
            config,
            policy,
            env,
            TaskSource(config.eval.split, size, config.run.seed, shuffle=False),
            group_size=config.eval.samples_per_task,
            score=scorer_of(config),
            id_prefix="proxy-",
            agents=agents,
        )
        num_tasks = config.eval.num_tasks if size is None else min(size, config.eval.num_tasks)
        sessions = (await env.info(config.env.id, config.env.config)).max_sessions
        slots = asyncio.Semaphore(min(config.rollout.max_concurrent, sessions))
        print(
            f"endpoint {server.url}: {num_tasks * scheduler.group_size} episodes, each a line of "
            "JSON with its base_url and api_key;\nPOST to its end_url when it is over, with "
            '{"answer": TEXT} or {"reward": NUMBER}, or after '
            f"{config.rollout.episode_timeout_s:g} s it is given up (rollout.episode_timeout_s)",
            file=sys.stderr,
        )
        log = TrajectoryLog(out)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_tasks):
                tasks.create_task(_play_group(scheduler, slots, log, rollouts))


async def _play_group(
    scheduler: GroupScheduler,
    slots: asyncio.Semaphore,
    log: TrajectoryLog,
    rollouts: RolloutBatch,
) -> None:
    """Plays the next group and records the episodes that were played, even if cancelled."""
    trajectories: list[Trajectory] = []
    episodes = scheduler.group_at(scheduler.source.take())

    def record(trajectory: Trajectory) -> None:
        trajectories.append(trajectory)
        error = trajectory.error
        how = f"{error.code}: {error.message}" if error else f"reward {trajectory.reward:g}"
        print(f"{trajectory.trajectory_id}: {len(trajectory.turns)} turns, {how}", file=sys.stderr)

    async def play(number: int) -> None:
        async with slots:
            scheduler.policy.reserve(1)
            try:
                await scheduler.play(episodes[number], record)
            finally:
                scheduler.policy.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(episodes)):
                tasks.create_task(play(number))
        if scheduler.score is not None:
            await scheduler.score(trajectories)
    finally:
        if trajectories:
            trajectories.sort(key=lambda trajectory: trajectory.trajectory_id)
            log.append(1, trajectories)
            rollouts.trajectories += trajectories
            first = trajectories[0]
            rollouts.groups.append(Group(first.group_id, first.task_id, trajectories))
