"""Agents that play ahead of the trainer: who waits for whom, and the bound on staleness."""

import asyncio
import threading

import pytest
from agent_play import LIMITS
from openai import AsyncOpenAI
from rollout_scripted import ScriptedEngine, scheduler_of
from tokenizers_for_tests import make_tokenizer

from agentrl.env import Environment, Task, register
from agentrl.env.client import connect
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.runner import Agents, CallableRunner
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import TaskSource
from agentrl.rollout.stream import GroupStream

NUM_STEPS, MAX_STALENESS = 6, 2
released = threading.Event()


@register("agent-stream-test")
class AgentStreamTest(Environment):
    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(str(index), f"task {index}")

    async def on_text(self, text: str):
        self.finish(reward=float(text == "right"))


async def asked(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list = [{"role": "user", "content": task.prompt}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "sure?"}]
        return reply.choices[0].message.content


def blocking(task, base_url, api_key):
    if task.id == "0":
        released.wait(20)
    return asyncio.run(asked(task, base_url, api_key))


async def waiting(task, base_url, api_key):
    if task.id == "0":
        await asyncio.to_thread(released.wait, 20)
    return await asked(task, base_url, api_key)


@pytest.mark.parametrize("solve", [waiting, blocking])
async def test_a_slow_agent_holds_up_its_own_group_until_it_would_be_too_old_and_no_other(solve):
    """It sleeps until as many others were trained as the bound allows without it."""
    released.clear()
    engine = ScriptedEngine(Renderer(make_tokenizer()), lambda *_: "right", delay_s=0.01)
    engine.seats = 1_000_000  # a server takes whoever comes
    env = connect()
    agents = Agents(AgentServer(), CallableRunner(solve))
    await agents.start()
    scheduler = scheduler_of(
        TokenPolicy(engine, engine.renderer, 64, 4096),
        env,
        TaskSource("train", None, seed=1),
        env_id="agent-stream-test",
        group_size=2,
        limits=LIMITS,
        capacity=asyncio.Semaphore(16),
        agents=agents,
    )
    bounds = {"groups_per_step": 1, "num_steps": NUM_STEPS, "max_staleness": MAX_STALENESS}
    stream = GroupStream(scheduler, **bounds)
    batches = []
    try:
        for step in range(1, NUM_STEPS + 1):
            batch = await asyncio.wait_for(stream.next_batch(), 20)
            (group,) = batch.groups
            batches.append((step - 1, group))
            if step == MAX_STALENESS:
                released.set()
            engine.version = step
            stream.advance(step)
    finally:
        await stream.aclose()
        await agents.aclose()
        await env.aclose()
    order = [group.task_id for _, group in batches]
    assert sorted(order) == [str(index) for index in range(NUM_STEPS)]
    assert order.index("0") == MAX_STALENESS
    for version, group in batches:
        for trajectory in group.trajectories:
            assert trajectory.error is None and trajectory.reward == 1.0
            assert len(trajectory.turns) == 2 and len(trajectory.branches) == 1
            assert version - trajectory.oldest_version <= MAX_STALENESS
