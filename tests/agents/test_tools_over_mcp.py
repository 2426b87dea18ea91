"""An environment's tools over MCP, called by the package's own client and by a framework."""

import json

import pytest

pytest.importorskip("mcp", reason="see `make test-agents`")
pytest.importorskip("agents")

from agent_play import play, require_exact
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.env import Environment, Task, register, tool
from agentrl.model.text.renderer import Renderer
from agentrl.types import StopReason


@register("agent-mcp-test")
class AgentMCPTest(Environment):
    """A safe, whose combination is asked for and tried."""

    def splits(self):
        return {"train": 5}

    def get(self, split, index):
        return Task(f"{split}-{index}", f"open safe {index}")

    @tool
    async def look(self, where: str) -> str:
        """Look somewhere.

        Args:
            where: the place
        """
        self.metrics["looks"] = self.metrics.get("looks", 0.0) + 1
        return f"under the {where}: 1234"

    @tool(terminal=True)
    async def dial(self, number: int) -> float:
        """Try a combination."""
        return float(number == 1234)


def played(solve, say=lambda *_: "done"):
    renderer = Renderer(make_tokenizer())
    engine = ScriptedEngine(renderer, say)
    (trajectory,) = play(
        engine, renderer, solve, env_id="agent-mcp-test", split_size=5, max_turn_tokens=400
    ).trajectories
    require_exact(trajectory, list(engine.prompts.values()))
    return trajectory


def test_the_packages_own_client_lists_and_calls():
    from mcp.client import Client
    from openai import AsyncOpenAI

    async def solve(task, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
            messages = [{"role": "user", "content": task.prompt}]
            await model.chat.completions.create(model="policy", messages=messages)
        async with Client(task.mcp_url) as client:
            listed = (await client.list_tools()).tools
            assert [each.name for each in listed] == ["look", "dial"]
            specs = {each["function"]["name"]: each["function"] for each in task.tools}
            assert all(each.input_schema == specs[each.name]["parameters"] for each in listed)
            looked = await client.call_tool("look", {"where": "mat"})
            assert not looked.is_error and looked.content[0].text == "under the mat: 1234"
            await client.call_tool("dial", {"number": 1234})
            late = await client.call_tool("look", {"where": "mat"})
            assert late.is_error and "episode is over" in late.content[0].text

    trajectory = played(solve)
    assert trajectory.error is None and trajectory.stop_reason is StopReason.TERMINATED
    assert trajectory.reward == 1.0 and trajectory.metrics["looks"] == 1.0
    assert [each["name"] for each in trajectory.info["tool_calls"]] == ["look", "dial"]


def test_openai_agents_plays_with_them():
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from agents.mcp import MCPServerStreamableHttp
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    def say(request_id, prompt):
        name, arguments = "look", {"where": "mat"}
        if "under the mat" in prompt:
            name, arguments = "dial", {"number": 1234}
        call = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>{call}</tool_call>"

    async def solve(task, base_url, api_key):
        async with (
            AsyncOpenAI(base_url=base_url, api_key=api_key) as client,
            MCPServerStreamableHttp(params={"url": task.mcp_url}) as tools,
        ):
            model = OpenAIChatCompletionsModel("policy", client)
            agent = Agent(name="burglar", mcp_servers=[tools], model=model)
            # Once the safe is open, its next call is refused; it gives up, and that is fine.
            await Runner.run(agent, task.prompt)

    trajectory = played(solve, say)
    assert trajectory.error is None and trajectory.stop_reason is StopReason.TERMINATED
    assert (trajectory.reward, len(trajectory.turns), len(trajectory.branches)) == (1.0, 2, 1)
    assert trajectory.metrics["looks"] == 1.0
