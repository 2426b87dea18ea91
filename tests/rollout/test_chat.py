"""A policy behind a chat server: what the server read itself, and what it left in the text."""

import json

from aiohttp import web
from openai import AsyncOpenAI
from web_servers import listening

from agentrl.model.text.table import DIALECTS
from agentrl.rollout.chat import ChatPolicy
from agentrl.types import Trajectory

CALL = {"name": "look", "arguments": '{"word": "fox"}'}
ASKED = {"role": "user", "content": "Which animal?"}


async def act(*replies, dialect="hermes"):
    """Returns the policy's action on each of a server's replies, and the messages it sent."""
    left, sent = list(replies), []

    async def complete(request):
        sent.append((await request.json())["messages"])
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant"} | left.pop(0),
        }
        told = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        return web.json_response(told | {"choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    trajectory = Trajectory("e", "g", "env", "t", 0)
    async with listening(app) as url:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x")
        policy = ChatPolicy(client, "m", 64, 0.0, DIALECTS[dialect])
        policy.read(trajectory, [ASKED], [], tools_changed=False)
        actions = [await policy.act(trajectory, []) for _ in replies]
        await policy.aclose()
    return actions, trajectory, sent


async def test_what_a_server_leaves_in_the_text_is_read_here():
    call = '<tool_call>{"name": "look", "arguments": {"word": "fox"}}</tool_call>'
    (thought, called), trajectory, _ = await act(
        {"content": f"<think>I could {call}</think>No."}, {"content": f"<think>so</think>{call}"}
    )
    assert (thought.text, thought.tool_calls) == ("No.", ()) and call in thought.reasoning
    assert [(c.name, c.arguments) for c in called.tool_calls] == [("look", {"word": "fox"})]
    assert [turn.parse_status for turn in trajectory.turns] == ["text", "tool_calls"]


async def test_reasoning_and_calls_that_a_server_read_come_back_to_it():
    calls = [{"id": "c1", "type": "function", "function": CALL}]
    for key in ("reasoning", "reasoning_content"):
        (action, _), trajectory, sent = await act(
            {"content": None, "tool_calls": calls, key: "hm"}, {"content": "done"}
        )
        assert (action.reasoning, action.text) == ("hm", "")
        assert action.tool_calls[0].arguments == {"word": "fox"}
        assert trajectory.messages[1]["reasoning"] == "hm"
        said = sent[1][1]
        assert said["reasoning"] == "hm"
        assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"word": "fox"}


async def test_arguments_that_are_no_object_are_malformed():
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "[1"}}]
    (action,), trajectory, _ = await act({"content": "<think>a</think>b", "tool_calls": calls})
    assert action.tool_calls == () and "arguments are not a JSON object" in action.parse_error
    assert (action.reasoning, action.text) == ("a", "b")
    assert trajectory.turns[0].parse_status == "malformed"
