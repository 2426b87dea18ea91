"""Episodes by agents: the real endpoint, scheduler and environment around any engine."""

import asyncio

from agentrl.env.client import connect
from agentrl.rollout.agent.runner import Agents, CallableRunner
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.driver import Limits
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import GroupScheduler, TaskSource

LIMITS = Limits(max_turns=16, turn_timeout_s=20, step_timeout_s=20, episode_timeout_s=60)


async def play_groups(
    engine,
    renderer,
    runner,
    *,
    groups=1,
    group_size=1,
    env_id="math",
    env_config=None,
    limits=LIMITS,
    max_turn_tokens=64,
    max_context_tokens=4096,
    split_size=None,
    host="127.0.0.1",
):
    """The batch. `runner`: an async function (task, base_url, api_key), a runner, or None for the
    driver's own episodes."""
    agents = None
    if runner is not None:
        if callable(runner):
            runner = CallableRunner(runner)
        agents = Agents(AgentServer(host), runner)
        await agents.start()
    env = connect()
    scheduler = GroupScheduler(
        TokenPolicy(engine, renderer, max_turn_tokens, max_context_tokens),
        env,
        TaskSource("train", split_size, seed=1),
        env_id=env_id,
        env_config=env_config or {},
        group_size=group_size,
        max_concurrent=64,
        limits=limits,
        seed=1,
        agents=agents,
    )
    try:
        return await scheduler.collect(groups)
    finally:
        if agents is not None:
            await agents.aclose()
        await env.aclose()


def play(*args, **kwargs):
    return asyncio.run(play_groups(*args, **kwargs))


def require_exact(trajectory, prompts):
    """Every sampled token is trained once, in a row that begins with what the engine read.

    `prompts`: of the turns, in order.
    """
    assert len(prompts) == len(trajectory.turns)
    trained = set()
    for number, (turn, prompt) in enumerate(zip(trajectory.turns, prompts, strict=True)):
        row = trajectory.branches[turn.branch]
        assert row.token_ids[: turn.start] == prompt, f"turn {number} read other ids"
        places = range(turn.start, turn.start + turn.num_tokens)
        assert all(row.loss_mask[at] and row.turn_ids[at] == number for at in places)
        trained |= {(turn.branch, at) for at in places}
    marked = {
        (branch, at)
        for branch, row in enumerate(trajectory.branches)
        for at, mask in enumerate(row.loss_mask)
        if mask
    }
    assert marked == trained and len(trained) == trajectory.num_sampled_tokens


def require_recorded(trajectories, calls):
    """The turns are what an engine was asked and answered, bit for bit, each once.

    `calls`: (request id, prompt, generation).
    """
    for trajectory in trajectories:
        own = [
            (prompt, generation.token_ids, generation.logprobs)
            for request_id, prompt, generation in calls
            if request_id.startswith(f"{trajectory.trajectory_id}-")
        ]
        turns = []
        for turn in trajectory.turns:
            row, end = trajectory.branches[turn.branch], turn.start + turn.num_tokens
            sampled = slice(turn.start, end)
            turns.append(
                (row.token_ids[: turn.start], row.token_ids[sampled], row.rollout_logprobs[sampled])
            )
        assert sorted(turns) == sorted(own)
        require_exact(trajectory, [prompt for prompt, _, _ in turns])
