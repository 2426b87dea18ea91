"""Episodes by agents: the real endpoint, scheduler and environment around any engine."""

import asyncio
import json
import re

from agentrl.env.client import connect
from agentrl.rollout.agent.runner import Agents, CallableRunner
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.driver import Limits
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import GroupScheduler, TaskSource
from agentrl.types import samples_of

LIMITS = Limits(max_turns=16, turn_timeout_s=20, step_timeout_s=20, episode_timeout_s=60)
TASKS = {
    "source": "arithmetic",
    "operators": "+-*",
    "min_digits": 2,
    "digits": 3,
    "instruction": "",
}
NUM_TURNS = 3


def calculated(expression):
    match = re.fullmatch(r"(\d+)([-+*])(\d+)", expression.replace(" ", ""))
    if match is None:
        return "error: not a+b, a-b or a*b"
    a, b = int(match[1]), int(match[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[match[2]])


async def openai_sdk(task, base_url, api_key):
    """A loop of the SDK; every other call is streamed."""
    from openai import AsyncOpenAI

    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "calculator", "parameters": parameters}}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list = [{"role": "user", "content": task.prompt}]
        for turn in range(NUM_TURNS):
            asked = {"model": "policy", "messages": messages, "tools": [tool]}
            if turn % 2:
                async with client.chat.completions.stream(**asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                expression = json.loads(call.function.arguments).get("expression", "")
                content = calculated(str(expression))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return message.content or ""


class Recording:
    """An engine, and all that it was asked and answered."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []

    async def generate(self, request_id, prompt_ids, sampling):
        generation = await self.engine.generate(request_id, prompt_ids, sampling)
        self.calls.append((request_id, list(prompt_ids), generation))
        return generation

    def __getattr__(self, name):
        return getattr(self.engine, name)


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
    roles=(),
    agents=None,
):
    """The batch. `runner`: an async function (task, base_url, api_key), a runner, or None for the
    driver's own episodes, or those of `agents`."""
    if runner is not None:
        if callable(runner):
            runner = CallableRunner(runner)
        agents = Agents(AgentServer(host, roles=roles), runner)
    if agents is not None:
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


def require_recorded(trajectories, calls, *, agent_stops=False):
    """The turns are what an engine was asked and answered, bit for bit, each once.

    `calls`: (request id, prompt, generation). `agent_stops`: the agent sends stop strings, which
    may leave the beginning of an answer.
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
        own.sort()
        if agent_stops:
            lengths = [len(ids) for _, ids, _ in sorted(turns)]
            own = [
                (prompt, ids[:length], logprobs[:length])
                for (prompt, ids, logprobs), length in zip(own, lengths, strict=True)
            ]
        assert sorted(turns) == own
        require_exact(trajectory, [prompt for prompt, _, _ in turns])


def require_trained_alike(model, trajectories, calls, *, agent_stops=False):
    """All that was sampled is trained, and the trainer's log-probabilities are the engine's.

    Returns what was seen as one line.
    """
    import torch

    require_recorded(trajectories, calls, agent_stops=agent_stops)
    samples = [sample for each in trajectories for sample in samples_of(each)]
    difference = 0.0
    for sample in samples:
        ids = torch.tensor(sample.token_ids[None].astype("int64"))
        with torch.no_grad():
            table = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        ours = table.gather(1, ids[0, 1:, None])[:, 0].numpy()
        trained = sample.loss_mask[1:].astype(bool)
        difference = max(difference, abs(ours - sample.rollout_logprobs[1:])[trained].max())
    sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    assert sum(sample.num_trained for sample in samples) == sampled
    assert difference < 1e-4
    return (
        f"{len(calls)} calls, {len(samples)} rows of {len(trajectories)} episodes, {sampled} "
        f"sampled = trained tokens, log-probabilities differ by {difference:.1e}"
    )
