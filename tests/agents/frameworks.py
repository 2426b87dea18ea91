"""Small agents of frameworks that need an environment of their own, as each makes them.

    python frameworks.py NAME

reads a line of JSON `[prompt, base_url, api_key]` per episode and answers with one, `[answer]`. It
begins with a line that says the framework's version. It imports nothing of agentrl.
"""

import asyncio
import importlib.metadata
import inspect
import json
import os
import re
import sys

NUM_TURNS = 5


def calculator(expression: str) -> str:
    """Evaluate an expression.

    Args:
        expression: such as 1+2
    """
    match = re.fullmatch(r"(\d+)([-+*])(\d+)", expression.replace(" ", ""))
    if match is None:
        return "error: not a+b, a-b or a*b"
    a, b = int(match[1]), int(match[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[match[2]])


async def ag2(prompt, base_url, api_key):
    from ag2.agent import Agent
    from ag2.config.openai import OpenAIConfig

    config = OpenAIConfig("policy", api_key=api_key, base_url=base_url)
    reply = await Agent("a", config=config, tools=[calculator]).ask(prompt)
    return str(reply.response.content)


async def agno(prompt, base_url, api_key):
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id="policy", base_url=base_url, api_key=api_key)
    run = await Agent(model=model, tools=[calculator], telemetry=False).arun(prompt)
    return str(run.content)


async def autogen(prompt, base_url, api_key):
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able = {"vision": False, "function_calling": True, "json_output": False}
    info = {**able, "family": "unknown", "structured_output": False}
    client = OpenAIChatCompletionClient(
        model="policy", base_url=base_url, api_key=api_key, model_info=info
    )
    agent = AssistantAgent(
        "a", client, tools=[calculator], max_tool_iterations=NUM_TURNS, reflect_on_tool_use=True
    )
    return str((await agent.run(task=prompt)).messages[-1].content)


def crewai(prompt, base_url, api_key):
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    model = LLM(model="openai/policy", base_url=base_url, api_key=api_key)
    agent = Agent(
        role="mathematician",
        goal="calculate",
        backstory="You calculate.",
        llm=model,
        tools=[tool("calculator")(calculator)],
        max_iter=NUM_TURNS,
    )
    task = Task(description=prompt, expected_output="a number", agent=agent)
    return str(Crew(agents=[agent], tasks=[task]).kickoff())


def dspy(prompt, base_url, api_key):
    """Its own text protocol: no tools of the API."""
    import dspy

    model = dspy.LM("openai/policy", api_base=base_url, api_key=api_key, cache=False)
    with dspy.context(lm=model):
        react = dspy.ReAct("question -> answer", tools=[calculator], max_iters=NUM_TURNS)
        return str(react(question=prompt).answer)


async def google_adk(prompt, base_url, api_key):
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    model = LiteLlm(model="openai/policy", api_base=base_url, api_key=api_key)
    runner = InMemoryRunner(LlmAgent(name="a", model=model, tools=[calculator]), app_name="a")
    session = await runner.session_service.create_session(app_name="a", user_id="u")
    said = types.Content(role="user", parts=[types.Part(text=prompt)])
    answer = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=said):
        for part in (event.content and event.content.parts) or ():
            answer = part.text or answer
    return answer


async def haystack(prompt, base_url, api_key):
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    model = OpenAIChatGenerator(Secret.from_token(api_key), "policy", api_base_url=base_url)
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(calculator)])
    return (await agent.run_async([ChatMessage.from_user(prompt)]))["last_message"].text


def instructor(prompt, base_url, api_key):
    """Structured output by a forced call, asked for anew where it does not validate."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Result(BaseModel):
        value: int

    client = instructor.from_openai(OpenAI(base_url=base_url, api_key=api_key))
    messages = [{"role": "user", "content": prompt}]
    create = client.chat.completions.create
    return str(
        create(model="policy", response_model=Result, messages=messages, max_retries=3).value
    )


async def llama_index(prompt, base_url, api_key):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="policy",
        api_base=base_url,
        api_key=api_key,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    return str(await FunctionAgent(tools=[calculator], llm=model, streaming=True).run(prompt))


def openhands(prompt, base_url, api_key):
    from openhands.sdk import LLM, Agent, Conversation
    from openhands.sdk.conversation.response_utils import get_agent_final_response

    model = LLM(model="openai/policy", base_url=base_url, api_key=api_key, usage_id="agent")
    conversation = Conversation(Agent(llm=model, tools=[]), workspace=os.getcwd(), visualizer=None)
    conversation.send_message(prompt)
    conversation.run()
    return get_agent_final_response(conversation.state.events)


async def semantic_kernel(prompt, base_url, api_key):
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Tools:
        @kernel_function
        def calculator(self, expression: str) -> str:
            return calculator(expression)

    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    service = OpenAIChatCompletion(ai_model_id="policy", async_client=client)
    agent = ChatCompletionAgent(service=service, plugins=[Tools()])
    return str(await agent.get_response(messages=prompt))


async def strands(prompt, base_url, api_key):
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(None, {"base_url": base_url, "api_key": api_key}, model_id="policy")
    agent = Agent(model=model, tools=[tool(calculator)], callback_handler=None)
    return str(await agent.invoke_async(prompt))


DISTRIBUTIONS = {
    "agno": "agno",
    "ag2": "ag2",
    "autogen": "autogen-agentchat",
    "crewai": "crewai",
    "dspy": "dspy",
    "google_adk": "google-adk",
    "haystack": "haystack-ai",
    "instructor": "instructor",
    "llama_index": "llama-index-core",
    "openhands": "openhands-sdk",
    "semantic_kernel": "semantic-kernel",
    "strands": "strands-agents",
}


def main():
    name = sys.argv[1]
    # Frameworks print; the replies have the standard output for themselves.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(importlib.metadata.version(DISTRIBUTIONS[name]), file=replies, flush=True)
    solve = globals()[name]
    for line in sys.stdin:
        try:
            answer = solve(*json.loads(line))
            if inspect.iscoroutine(answer):
                answer = asyncio.run(answer)
        except Exception as error:  # an untrained model drives frameworks into errors of their own
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            answer = ""
        print(json.dumps([answer]), file=replies, flush=True)


if __name__ == "__main__":
    main()
