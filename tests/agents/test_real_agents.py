"""Agents as their frameworks make them, unmodified, against the endpoint: exact rows from each.

`make test-agents` installs the frameworks in an environment of their own. `pytest -s` prints the
rows, tokens and log-probabilities of each.
"""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("agents", reason="see `make test-agents`")
pytest.importorskip("langgraph")
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}

from agent_play import (
    LIMITS,
    NUM_TURNS,
    TASKS,
    Recording,
    calculated,
    openai_sdk,
    play,
    require_recorded,
    require_trained_alike,
)
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.config import AgentRole
from agentrl.inference.embedded import EmbeddedEngine
from agentrl.model.load import load_model, load_tokenizer, resolve_dtype
from agentrl.model.text.renderer import Renderer

MODEL = str(Path(__file__).parents[2] / "examples" / "quickstart" / "model")


async def openai_agents(task, base_url, api_key, stream=False):
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def calculator(expression: str) -> str:
        return calculated(expression)

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent(name="a", tools=[calculator], model=model)
        if not stream:
            return (await Runner.run(agent, task.prompt, max_turns=NUM_TURNS)).final_output
        run = Runner.run_streamed(agent, task.prompt, max_turns=NUM_TURNS)
        async for _ in run.stream_events():
            pass
        return run.final_output


async def openai_agents_streamed(task, base_url, api_key):
    return await openai_agents(task, base_url, api_key, stream=True)


async def openai_agents_responses(task, base_url, api_key):
    """The SDK's own wire, streamed."""
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def calculator(expression: str) -> str:
        return calculated(expression)

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(name="a", tools=[calculator], model=OpenAIResponsesModel("policy", client))
        run = Runner.run_streamed(agent, task.prompt, max_turns=NUM_TURNS)
        async for _ in run.stream_events():
            pass
        return run.final_output


async def anthropic_tool_runner(task, base_url, api_key):
    """The SDK's own loop, which continues a thread by the id of its last answer."""
    from anthropic import AsyncAnthropic, beta_async_tool

    @beta_async_tool
    async def calculator(expression: str) -> str:
        """Evaluates an expression."""
        return calculated(expression)

    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        runner = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=100,
            max_iterations=NUM_TURNS,
            tools=[calculator],
            messages=[{"role": "user", "content": task.prompt}],
        )
        reply = await runner.until_done()
        return "".join(block.text for block in reply.content if block.type == "text")


async def anthropic_sdk(task, base_url, api_key):
    """A loop over Anthropic's messages; every other call is streamed."""
    from anthropic import AsyncAnthropic

    schema = {"type": "object", "properties": {"expression": {"type": "string"}}}
    asked = {
        "model": "policy",
        "max_tokens": 100,
        "tools": [{"name": "calculator", "description": "c", "input_schema": schema}],
    }
    root = base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=root, api_key=api_key) as client:
        messages: list = [{"role": "user", "content": task.prompt}]
        for number in range(NUM_TURNS):
            if number % 2:
                reply = await client.messages.create(messages=messages, **asked)
            else:
                async with client.messages.stream(messages=messages, **asked) as stream:
                    reply = await stream.get_final_message()
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": calculated(str(block.input.get("expression", ""))),
                }
                for block in reply.content
                if block.type == "tool_use"
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})
        return "".join(block.text for block in reply.content if block.type == "text")


async def langgraph(task, base_url, api_key):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def calculator(expression: str) -> str:
        """Evaluate an expression."""
        return calculated(expression)

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    agent = create_react_agent(model, [calculator])
    result = await agent.ainvoke(
        {"messages": [("user", task.prompt)]}, {"recursion_limit": 2 * NUM_TURNS + 1}
    )
    return result["messages"][-1].content


async def pydantic_ai(task, base_url, api_key):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel("policy", provider=provider))

    @agent.tool_plain
    def calculator(expression: str) -> str:
        return calculated(expression)

    return (await agent.run(task.prompt)).output


def mini_swe_agent(task, base_url, api_key):
    """Through litellm, as it comes; only its shell is replaced."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel

    class Shell:
        config = None

        def execute(self, action, cwd=""):
            return {"output": "found it", "returncode": 0, "exception_info": ""}

        def get_template_vars(self, **kwargs):
            return {}

        def serialize(self):
            return {}

    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": base_url, "api_key": api_key},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        Shell(),
        system_template="You can use a shell.",
        instance_template="{{task}}",
        step_limit=NUM_TURNS,
    )
    return str(agent.run(task.prompt).get("submission", ""))


def smolagents(task, base_url, api_key):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def calculator(expression: str) -> str:
        """Evaluate an expression.

        Args:
            expression: such as 1+2
        """
        return calculated(expression)

    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(
        tools=[calculator], model=model, max_steps=NUM_TURNS, verbosity_level=0
    )
    return str(agent.run(task.prompt))


AGENTS = {
    each.__name__: each
    for each in (
        *(openai_sdk, openai_agents, openai_agents_streamed, openai_agents_responses),
        *(anthropic_sdk, anthropic_tool_runner, langgraph, pydantic_ai, mini_swe_agent, smolagents),
    )
}


def without_failing(solve):
    """An untrained model drives frameworks into errors of their own; the rows are what counts."""

    async def run(*arguments):
        try:
            if asyncio.iscoroutinefunction(solve):
                return await solve(*arguments)
            return await asyncio.to_thread(solve, *arguments)
        except Exception as error:
            print(f"  {type(error).__name__}: {str(error)[:100]}")
            return ""

    return run


def require_played(trajectories):
    """An agent that could not reach the endpoint would have failed unseen, and played nothing."""
    for trajectory in trajectories:
        assert trajectory.error is None and trajectory.turns, trajectory.error


STOPPING = {"smolagents"}
"""Agents that send stop strings."""


@pytest.mark.parametrize("name", AGENTS)
def test_sixteen_episodes_on_the_quickstarts_model_are_exact(name):
    model = load_model(MODEL, dtype=resolve_dtype("float32"), device="cpu")
    engine = Recording(EmbeddedEngine(model, seed=1, patience_s=0.2))
    batch = play(
        engine,
        Renderer(load_tokenizer(MODEL)),
        without_failing(AGENTS[name]),
        groups=16,
        # smolagents asks once more in other words where its steps are over: compared as well.
        roles=[AgentRole(role="trained")],
        env_config=TASKS,
        limits=replace(LIMITS, max_turns=8, turn_timeout_s=200, episode_timeout_s=400),
        max_turn_tokens=24,
        max_context_tokens=model.config.max_position_embeddings,
    )
    assert len(batch.trajectories) == 16
    require_played(batch.trajectories)
    stops = name in STOPPING
    told = require_trained_alike(model, batch.trajectories, engine.calls, agent_stops=stops)
    print(f"\n{name}: {told}")


@pytest.mark.parametrize("name", AGENTS)
def test_thoughts_and_calls_that_are_sent_again_stay_in_one_row(name):
    """Whatever the framework makes of them; smolagents rewrites calls as text, and asks anew."""
    tool, key = ("bash", "command") if name == "mini_swe_agent" else ("calculator", "expression")
    call = json.dumps({"name": tool, "arguments": {key: "17*3"}})

    def say(request_id, prompt):
        if prompt.count(call[:20]) >= 2 or "found it" in prompt or "51" in prompt:
            return "<think>so it is</think>#### 51"
        return f"<think>I count</think>Let me see.<tool_call>{call}</tool_call>"

    renderer = Renderer(make_tokenizer())
    engine = Recording(ScriptedEngine(renderer, say))
    batch = play(
        engine,
        renderer,
        without_failing(AGENTS[name]),
        groups=2,
        env_config=TASKS,
        limits=replace(LIMITS, max_turns=NUM_TURNS),
        max_turn_tokens=400,
        max_context_tokens=100_000,
    )
    require_recorded(batch.trajectories, engine.calls, agent_stops=name in STOPPING)
    require_played(batch.trajectories)
    for trajectory in batch.trajectories:
        assert len(trajectory.turns) >= 2
        if name != "smolagents":
            first, second = trajectory.turns[:2]
            assert (second.branch, second.parent) == (first.branch, 0)
