"""A policy behind a chat server: what the server read itself, and what it left in the text."""

import json

import pytest
from aiohttp import web
from openai import AsyncOpenAI
from web_servers import listening

from agentrl.errors import InferenceError
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
        policy = ChatPolicy(client, "m", 64, DIALECTS[dialect])
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


TOLD = {"role": "assistant", "content": "done"}
CHOICE = {"index": 0, "finish_reason": "stop", "message": TOLD}
WHOLE = {"id": "x", "object": "chat.completion", "choices": [CHOICE]}


async def ask(*answers, **settings):
    """Returns the policy's action where a server gives these answers in turn, and the requests.

    An answer is a body, or (status, body, headers).
    """
    left, asked = list(answers), []

    async def complete(request):
        asked.append(await request.json())
        answer = left.pop(0) if len(left) > 1 else left[0]
        status, body, headers = answer if isinstance(answer, tuple) else (200, answer, {})
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(
            status=status, text=text, headers=headers, content_type="application/json"
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    trajectory = Trajectory("e", "g", "env", "t", 0)
    async with listening(app) as url:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        policy = ChatPolicy(client, "m", 64, DIALECTS["hermes"], **settings)
        policy.read(trajectory, [ASKED], [], tools_changed=False)
        try:
            return await policy.act(trajectory, []), asked
        finally:
            await policy.aclose()


def said(**message):
    return {**WHOLE, "choices": [{**CHOICE, "message": {"role": "assistant", **message}}]}


BUSY = (429, {"error": {"message": "slow down", "code": "rate_limit_exceeded"}})


@pytest.mark.parametrize(
    "passing",
    [
        *((*BUSY, {"Retry-After": after}) for after in ("0", "-3", "abc", "inf")),
        (500, {"error": {"message": "boom"}}, {}),
        {"error": {"message": "Provider returned error", "code": 502}},
        "<html>login</html>",
        {**WHOLE, "choices": []},
        {**WHOLE, "choices": None},
        {**WHOLE, "choices": [{**CHOICE, "message": None}]},
        {**WHOLE, "choices": [{**CHOICE, "finish_reason": "error"}]},
        [1],
        "[" * 100_000,
    ],
)
async def test_what_may_pass_is_asked_again(passing):
    action, asked = await ask(passing, passing, WHOLE, retry_for_s=20.0)
    assert action.text == "done" and len(asked) == 3
    with pytest.raises(InferenceError, match=r"127\.0\.0\.1"):
        await ask(passing, retry_for_s=0.2)


@pytest.mark.parametrize(
    "final",
    [
        (401, {"error": {"message": "Incorrect API key provided"}}, {}),
        (400, {"error": {"code": "context_length_exceeded", "message": "8192 tokens"}}, {}),
        (429, {"error": {"message": "quota", "code": "insufficient_quota"}}, {}),
        (*BUSY, {"Retry-After": "1e9"}),
    ],
)
async def test_what_does_not_pass_ends_the_episode_at_once(final):
    with pytest.raises(InferenceError, match=final[1]["error"]["message"]):
        await ask(final, retry_for_s=600.0)


async def test_a_server_that_wants_another_name_of_the_limit_gets_it():
    message = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    refusal = (400, {"error": {"message": message, "param": "max_tokens"}}, {})
    action, asked = await ask(refusal, WHOLE)
    assert action.text == "done"
    assert [each.get("max_tokens") for each in asked] == [64, None]
    assert asked[1]["max_completion_tokens"] == 64


@pytest.mark.parametrize(
    ("message", "text", "reasoning"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab", ""),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
            "",
            "hm",
        ),
        ({"content": None, "refusal": "I can't."}, "I can't.", ""),
        ({"content": None}, "", ""),
        ({"content": "\ud800 lone"}, "? lone", ""),
        ({"content": "x", "reasoning": {"summary": ["y"]}}, "x", ""),
    ],
)
async def test_contents_in_other_forms_are_read(message, text, reasoning):
    action, _ = await ask(said(**message))
    assert (action.text, action.reasoning) == (text, reasoning)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"id": "c", "function": {"name": "look", "arguments": {"k": 1}}}, {"k": 1}),
        ({"id": "c", "function": {"name": "look", "arguments": None}}, {}),
        ({"function": {"name": "look", "arguments": ""}}, {}),
        ({"id": None, "function": {"name": "look", "arguments": '{"k": "\ud800"}'}}, {"k": "?"}),
        ({"id": "c", "function": {"name": "look", "arguments": json.dumps('{"k": 1}')}}, None),
        ({"id": "c", "function": {"name": "look", "arguments": "[1]"}}, None),
        ({"id": "c", "function": {"name": None, "arguments": "{}"}}, None),
        ({"id": "c", "function": None}, None),
        ({"id": "c", "type": "custom", "custom": {"name": "look", "input": "1"}}, None),
        ("look", None),
    ],
)
async def test_calls_in_other_forms_are_read_or_malformed(call, arguments):
    action, _ = await ask(said(content=None, tool_calls=[call]))
    if arguments is None:
        assert action.tool_calls == () and action.parse_error.startswith("tool call 1: ")
    else:
        (read,) = action.tool_calls
        assert (read.arguments, bool(read.id)) == (arguments, True)


async def test_two_calls_never_share_an_id():
    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    action, _ = await ask(said(content=None, tool_calls=[call, call]))
    assert len({each.id for each in action.tool_calls}) == 2


async def test_a_limit_of_tokens_needs_a_server_that_counts():
    with pytest.raises(InferenceError, match=r"eval.max_total_tokens"):
        await ask({**WHOLE, "usage": None}, needs_usage=True, retry_for_s=600.0)
    counted = {**WHOLE, "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    assert (await ask(counted, needs_usage=True))[0].text == "done"
