"""The environment's tools in the hands of an agent: each call is one step of its session."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from agent_play import LIMITS, play, require_exact
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.env import Environment, Task, register, reward, tool
from agentrl.errors import EnvError
from agentrl.model.text.renderer import Renderer
from agentrl.types import StopReason

ASK = {"model": "m", "messages": [{"role": "user", "content": "question"}]}


BEGUN: list[int] = []
"""Of each call of `take` that the environment has begun, its coins."""


@register("agent-tools-test")
class AgentToolsTest(Environment):
    """Pays for each coin that is taken, and for the number of coins at the end."""

    def splits(self):
        return {"train": 5}

    def get(self, split, index):
        return Task(f"{split}-{index}", f"question {index}")

    @tool
    async def take(self, coins: int) -> str:
        """Take some.

        Args:
            coins: how many
        """
        BEGUN.append(coins)
        await asyncio.sleep(0.05)
        self.metrics["taken"] = self.metrics.get("taken", 0.0) + coins
        return f"you have {self.metrics['taken']:g}"

    @tool
    async def burn(self) -> str:
        raise EnvError("the mint burns")

    @tool(terminal=True)
    async def leave(self, with_coins: float) -> float:
        return with_coins

    @reward
    async def num_steps(self, episode) -> float:
        return float(episode.num_turns)

    async def on_text(self, text: str):
        self.finish(reward=10.0 * (text == "right"))


async def call(url, name="", arguments=None, method="POST", **headers):
    async with (
        aiohttp.ClientSession() as http,
        http.request(
            method, f"{url}/{name}" if name else url, json=arguments, headers=headers
        ) as reply,
    ):
        return reply.status, json.loads(await reply.text())


async def ask(base_url):
    return await call(f"{base_url}/chat/completions", arguments=ASK)


def played(solve, **options):
    renderer = Renderer(make_tokenizer())
    engine = ScriptedEngine(renderer, lambda *_: "right")
    batch = play(engine, renderer, solve, env_id="agent-tools-test", split_size=5, **options)
    (trajectory,) = batch.trajectories
    require_exact(trajectory, list(engine.prompts.values()))
    return trajectory


def test_each_call_is_one_step_and_all_of_them_are_noted():
    async def solve(task, base_url, api_key):
        status, listed = await call(task.tools_url, method="GET")
        assert (status, listed) == (200, task.tools)
        assert await call(task.tools_url, "take", {"coins": 2}) == (
            200,
            {"content": "you have 2", "terminated": False, "truncated": False},
        )
        await ask(base_url)
        # All at once, and one of them twice: a session takes one step at a time.
        again = {"Idempotency-Key": "k"}
        replies = await asyncio.gather(
            call(task.tools_url, "take", {"coins": 1}),
            call(task.tools_url, "take", {"coins": 1}, **again),
            call(task.tools_url, "take", {"coins": 1}, **again),
            call(task.tools_url, "take", {"coins": "many"}),
            call(task.tools_url, "steal", {}),
        )
        assert [status for status, _ in replies] == [200] * 5
        assert replies[1] == replies[2] and "coins" in replies[3][1]["content"]
        assert "steal" in replies[4][1]["content"], "it is the environment that says so"
        return "right"

    trajectory = played(solve)
    assert trajectory.error is None and trajectory.stop_reason is StopReason.TERMINATED
    assert trajectory.metrics["taken"] == 4.0
    # Five calls and the answer.
    assert trajectory.reward_components == {"num_steps": 6.0} and trajectory.reward == 16.0
    assert trajectory.turns[-1].reward == 16.0
    noted = trajectory.info["tool_calls"]
    assert [each["after_turn"] for each in noted] == [-1, 0, 0, 0, 0]
    assert noted[0] == {
        "after_turn": -1,
        "name": "take",
        "arguments": {"coins": 2},
        "content": "you have 2",
    }


def test_a_call_whose_client_is_gone_is_taken_once_before_the_answer_is_graded():
    async def solve(task, base_url, api_key):
        await ask(base_url)
        BEGUN.clear()
        begun = asyncio.create_task(call(task.tools_url, "take", {"coins": 3}))
        while not BEGUN:
            await asyncio.sleep(0.001)
        begun.cancel()
        return "right"

    trajectory = played(solve)
    assert trajectory.error is None and trajectory.metrics["taken"] == 3.0
    assert trajectory.reward == 12.0


@pytest.mark.parametrize("gives_up", [True, False])
def test_a_call_that_ends_the_episode_ends_it(gives_up):
    told = []

    async def solve(task, base_url, api_key):
        await ask(base_url)
        told.append(await call(task.tools_url, "leave", {"with_coins": 2.5}))
        told.append(await call(task.tools_url, "take", {"coins": 1}))
        told.append(await ask(base_url))
        if gives_up:
            raise RuntimeError("it cannot go on")
        return "right"

    trajectory = played(solve)
    assert trajectory.error is None and trajectory.stop_reason is StopReason.TERMINATED
    assert trajectory.reward == 3.5 and len(trajectory.turns) == 1
    assert told[0][1]["terminated"] is True
    assert [status for status, _ in told] == [200, 410, 410]
    assert "episode is over" in told[1][1]["error"]["message"]
    assert "ended this episode" in told[2][1]["error"]["message"]


def test_an_environment_that_fails_fails_the_episode_as_it_would_without_an_agent():
    async def solve(task, base_url, api_key):
        await ask(base_url)
        await call(task.tools_url, "burn")
        return "right"

    trajectory = played(solve)
    assert trajectory.error is not None and not trajectory.trainable
    assert trajectory.error.stage == "step" and "the mint burns" in trajectory.error.message


def test_nothing_of_an_episode_is_open_without_its_key():
    async def solve(task, base_url, api_key):
        await ask(base_url)
        root = base_url.split("/e/")[0]
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/e/sk-agentrl-x/tools"),
            ("POST", "/e/sk-agentrl-x/tools/take"),
            ("POST", "/e/sk-agentrl-x/mcp"),
        ):
            status, said = await call(root + path, method=method)
            assert (status, said["error"]["code"]) == (401, "invalid_api_key"), path
        async with aiohttp.ClientSession() as http, http.post(f"{root}/e/{api_key}/end") as reply:
            assert reply.status == 404, "an agent that agentrl runs cannot pay itself"

    assert played(solve).error is None


def test_limits_of_the_episode_hold_for_its_tools():
    async def solve(task, base_url, api_key):
        await ask(base_url)
        while True:
            await call(task.tools_url, "take", {"coins": 1})

    trajectory = played(solve, limits=replace(LIMITS, episode_timeout_s=1.0))
    assert trajectory.error.code == "episode_timeout"
