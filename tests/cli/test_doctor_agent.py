"""`agentrl doctor --play` with an agent: its finding for good agents and for faulty ones."""

import asyncio
import itertools
import json
import sys
from pathlib import Path

import aiohttp
import pytest
from agent_play import openai_sdk
from tokenizers_for_tests import make_tokenizer

from agentrl.cli.doctor_agent import ANSWER, agent_findings, check, report
from agentrl.config import AgentSection, load_config
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.command import CommandRunner
from agentrl.rollout.agent.runner import Agents, CallableRunner
from agentrl.rollout.agent.server import AgentServer

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "how": {"enum": ["up", "down"]}},
        },
    },
}
CLOCK = itertools.count()
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"


async def ask(base_url, api_key, body):
    headers = {"Authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/chat/completions", json=body, headers=headers) as reply,
    ):
        return await reply.json()


def agent(retell=lambda message: message, system=lambda: "work", **extra):
    """A loop that goes on as long as tools are called."""

    async def solve(task, base_url, api_key):
        history = []
        for turn in range(5):
            first = [{"role": "system", "content": system()}, *task.messages]
            body = {"messages": first + history, "tools": [TOOL]}
            body |= {key: value(turn) for key, value in extra.items()}
            message = (await ask(base_url, api_key, body))["choices"][0]["message"]
            history.append(retell(message))
            for call in message.get("tool_calls") or []:
                assert json.loads(call["function"]["arguments"]) == {"word": "x", "how": "up"}
                history.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
            if not message.get("tool_calls"):
                return message["content"]

    return solve


def checked(runner, section=None):
    """The report, and whether nothing is to be changed."""
    runner = CallableRunner(runner) if callable(runner) else runner
    agents = Agents(AgentServer(), runner)
    renderer = Renderer(make_tokenizer())
    played = asyncio.run(check(agents, renderer, prompt="q", timeout_s=30))
    text = report(played, section or AgentSection(run="a.py:b"))
    return text, all(each.is_clean for each in played)


def test_an_agent_that_keeps_its_history_is_one_row_per_script():
    for solve in (agent(), openai_sdk):
        text, is_clean = checked(solve)
        assert is_clean
        assert "What to set" not in text and f"it answers {ANSWER!r}" in text
        assert "1 calls, 1 rows, 1 dialogues" in text


def without_text(message):
    """In fewer words than what CrewAI leaves out, and with other ids, so that it is not known."""
    calls = [{**call, "id": f"x{call['id']}"} for call in message.get("tool_calls") or []]
    return {**message, "content": "", "tool_calls": calls} if calls else message


def other_arguments(message):
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls") or []:
        call["function"]["arguments"] = "{}"
    return message


@pytest.mark.parametrize(
    ("solve", "says"),
    [
        (
            agent(system=lambda: f"It is second {next(CLOCK)}."),
            ["message 0 (system) came back with another text: ", "a time or an id"],
        ),
        (agent(without_text), ["message 2 (assistant) came back with another text: 'Let me"]),
        (agent(other_arguments), ["message 2 (assistant) came back with other calls"]),
        (
            agent(tools=lambda turn: [TOOL] * (1 + turn % 2)),
            ["call 2 begins a new row: its tools differ", "the same tools in the same order"],
        ),
    ],
)
def test_the_first_message_that_differs_is_shown_and_how(solve, says):
    text, is_clean = checked(solve)
    assert not is_clean
    for each in says:
        assert each in text, text


def test_refusals_left_out_tools_and_unused_parameters_are_said():
    text, is_clean = checked(
        agent(tools=lambda turn: [TOOL, {"type": "web_search"}], temperature=lambda turn: 0.5)
    )
    assert is_clean and "web_search, which is left out" in text and "temperature" in text
    assert "switch off the tools" in text

    async def refused(task, base_url, api_key):
        await ask(base_url, api_key, {"messages": task.messages, "n": 2})

    text, is_clean = checked(refused)
    assert not is_clean and "refused 1 times: unsupported: n > 1" in text
    assert "OPENAI_BASE_URL" in text


def test_calls_that_are_served_are_said():
    async def titled(task, base_url, api_key):
        title = {"messages": [{"role": "system", "content": "title"}, *task.messages]}
        await ask(base_url, api_key, title)
        return await agent()(task, base_url, api_key)

    text, is_clean = checked(titled)
    assert is_clean and "served and not trained: 1 calls" in text and "[[agent.roles]]" in text
    assert "2 calls, 2 rows, 2 dialogues" in text


PROGRAM = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers))))
print("Tokens: 5k")
"""


def test_a_command_whose_last_line_is_no_answer_is_told_so():
    command = [sys.executable, "-c", PROGRAM]
    text, is_clean = checked(CommandRunner(command), AgentSection(command=command))
    assert is_clean and "it answers 'Tokens: 5k'" in text
    assert 'agent.answer = "policy"' in text and "offers none" in text


@pytest.mark.slow  # torch is loaded
def test_a_run_s_agent_is_a_finding(tmp_path):
    file = tmp_path / "solve.py"
    file.write_text(
        "async def solve(task, base_url, api_key):\n"
        "    from openai import AsyncOpenAI\n"
        "    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:\n"
        "        reply = await client.chat.completions.create(model='m', messages=task.messages)\n"
        "    return reply.choices[0].message.content\n"
        "def silent(*_):\n"
        "    return ''\n"
    )
    for name, status, said in (
        ("solve", "ok", "1 calls, 1 rows"),
        ("silent", "fix", "without a call"),
    ):
        config = load_config(QUICKSTART, ["--agent.run", f"{file}:{name}"])
        ((found, what, detail),) = agent_findings(config)
        assert (found, what) == (status, "agent") and said in detail
