"""A program of the OpenAI Agents SDK with a tool of its own, for `agent.toml`. A task, the URL of
the model and a key come from outside; nothing else in it was changed for training."""

from typing import Literal

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def calculate(left: float, operator: Literal["+", "-", "*", "/"], right: float) -> str:
    """Calculate `left operator right`."""
    if operator == "/" and right == 0:
        return "error: division by zero"
    results = {"+": left + right, "-": left - right, "*": left * right}
    return f"{results[operator] if operator in results else left / right:.10g}"


async def solve(task, base_url: str, api_key: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(
            name="mathematician",
            instructions="Solve the problem step by step. Leave every calculation to the tool.",
            tools=[calculate],
            model=OpenAIChatCompletionsModel("policy", client),
        )
        result = await Runner.run(agent, task.prompt, max_turns=8)
        return result.final_output
