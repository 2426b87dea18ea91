"""Agents that die, hang and lose their sockets: one record per episode, no token twice, nothing
left running, memory flat."""

import asyncio
import gc
import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from agent_play import LIMITS, require_exact
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.env.client import connect
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.runner import Agents, CallableRunner, CommandRunner
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import GroupScheduler, TaskSource
from agentrl.types import StopReason

MATHS = {"source": "arithmetic", "operators": "+", "digits": 2, "instruction": ""}
MARKED = {"x-stainless-retry-count": "1"}
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
FAULTS = (
    *("none", "none", "dropped before", "dropped after", "dropped unread", "retried at once"),
    *("limit", "two dialogues", "dies", "process killed", "hangs"),
)


class Recording(ScriptedEngine):
    """Keeps what it answered."""

    def __init__(self, renderer, say):
        super().__init__(renderer, say)
        self.answered = Counter()

    async def generate(self, request_id, prompt_ids, sampling):
        self.delay_s = random.random() * 0.01
        generation = await super().generate(request_id, prompt_ids, sampling)
        self.prompts.clear()
        key = request_id.rsplit("-", 2)[0], tuple(prompt_ids), tuple(generation.token_ids)
        self.answered[key] += 1
        return generation


class FaultyRunner:
    """An agent with one of the faults, by the task's number."""

    def __init__(self):
        self.callables = CallableRunner(self.solve)
        self.killed = CommandRunner([sys.executable, "-c", KILLED])
        self.faults = Counter()
        self.chance = random.Random(7)

    async def run(self, task, base_url, api_key):
        # Processes and deadlines take longest, so there are fewer of them.
        fault = self.chance.choice(FAULTS[: -1 if self.chance.random() < 0.9 else None])
        if fault == "process killed" and self.chance.random() < 0.5:
            fault = "dies"
        self.faults[fault] += 1
        if fault == "process killed":
            return await self.killed.run(task, base_url, api_key)
        return await self.callables.run(replace(task, id=fault), base_url, api_key)

    async def solve(self, task, base_url, api_key):
        fault, chance = task.id, random.Random(api_key)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:

            async def ask(messages, **headers):
                body = json.dumps({"messages": messages}).encode()
                async with http.post(
                    f"{base_url}/chat/completions", data=body, headers=headers
                ) as reply:
                    return await reply.json()

            async def lose(messages, seconds):
                """Send the request, and close the socket so long afterwards, unread."""
                host, port = http_address(base_url)
                _, writer = await asyncio.open_connection(host, port)
                body = json.dumps({"messages": messages}).encode()
                path = base_url.split(str(port), 1)[1]
                head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
                await asyncio.sleep(seconds)
                writer.transport.abort()

            messages = [{"role": "user", "content": task.prompt}]
            for number in range(chance.randint(1, 4) if fault != "limit" else 99):
                if fault == "dropped before":
                    await lose(messages, chance.random() * 0.004)
                elif fault in ("dropped after", "dropped unread"):
                    await lose(messages, 0.05)
                if fault == "dropped unread":
                    told = await ask(messages)  # unmarked: a sample of its own
                elif fault == "retried at once":
                    replies = await asyncio.gather(*(ask(messages, **MARKED) for _ in range(3)))
                    assert replies[0] == replies[1] == replies[2]
                    told = replies[0]
                else:
                    told = await ask(messages, **MARKED)
                if "error" in told:
                    assert fault in ("limit", "two dialogues"), told
                    assert told["error"]["code"] == "max_turns"
                    raise RuntimeError("no more turns")
                messages += [told["choices"][0]["message"], {"role": "user", "content": "go on"}]
                if fault == "two dialogues":
                    other = [{"role": "user", "content": f"another {number}"}]
                    await asyncio.gather(ask(other), ask(other), ask(messages))
                if fault == "dies":
                    raise ValueError("dead")
                if fault == "hangs":
                    await asyncio.sleep(60)
        return "#### 1"

    async def aclose(self):
        await self.callables.aclose()


def http_address(url):
    host, port = url.split("/")[2].split(":")
    return host, int(port)


def resident_mb():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def children():
    while True:
        try:
            tasks = Path("/proc/self/task").iterdir()
            return {pid for task in tasks for pid in (task / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
            continue


@pytest.mark.parametrize(
    "num_episodes",
    [
        60,
        pytest.param(400, marks=[pytest.mark.slow, pytest.mark.promise, pytest.mark.timeout(600)]),
    ],
)
async def test_faults_leave_one_record_each_and_every_token_once(num_episodes):
    renderer = Renderer(make_tokenizer())
    engine = Recording(renderer, lambda request_id, _: random.Random(request_id).choice("abcdefgh"))
    runner, at_a_time = FaultyRunner(), 20
    before = children()

    agents, env = Agents(AgentServer(), runner), connect()
    await agents.start()
    scheduler = GroupScheduler(
        TokenPolicy(engine, renderer, 32, 4096),
        env,
        TaskSource("train", None, seed=1),
        env_id="math",
        env_config=MATHS,
        group_size=4,
        max_concurrent=at_a_time,
        limits=replace(LIMITS, max_turns=12, episode_timeout_s=5),
        seed=1,
        agents=agents,
    )
    seen, reasons, sizes = set(), Counter(), []
    for _ in range(num_episodes // at_a_time):
        batch = await scheduler.collect(at_a_time // 4)
        engine_said = Counter(engine.answered)
        for trajectory in batch.trajectories:
            assert trajectory.trajectory_id not in seen
            seen.add(trajectory.trajectory_id)
            reasons[str(trajectory.stop_reason)] += 1
            assert trajectory.trainable == (trajectory.error is None)
            prompts = []
            for turn in trajectory.turns:
                ids = trajectory.branches[turn.branch].token_ids
                prompts.append(ids[: turn.start])
                sampled = ids[turn.start : turn.start + turn.num_tokens]
                key = trajectory.trajectory_id, tuple(prompts[-1]), tuple(sampled)
                engine_said[key] -= 1
                assert engine_said[key] >= 0, "recorded more often than it was sampled"
            require_exact(trajectory, prompts)
        engine.answered.clear()
        sizes.append(resident_mb())
    assert len(seen) == num_episodes and not scheduler.live and not agents.server._live
    await agents.aclose()
    await env.aclose()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    print(f"\n{num_episodes} episodes: {dict(reasons)}; faults {dict(runner.faults)}")
    print(f"resident memory {sizes[0]:.0f} MB, then {sizes[len(sizes) // 3]:.0f}, {sizes[-1]:.0f}")
    assert not tasks and engine.seats == 0 and children() <= before
    assert reasons[StopReason.ERROR] == runner.faults["dies"] + runner.faults["process killed"]
    assert reasons[StopReason.MAX_TURNS] >= runner.faults["limit"]
    assert reasons[StopReason.TIMEOUT] == runner.faults["hangs"]
    assert sizes[-1] - sizes[len(sizes) // 3] < 12
