"""Whatever an agent does to the endpoint: one record, the right status, and never a 5xx."""

import asyncio
import json
import time
from dataclasses import replace

import pytest
from agent_play import LIMITS, require_exact
from test_agent_server import ASK, LOOK, played, post

from agentrl.rollout.agent import server as server_module


async def send(base_url, body, path="chat/completions", *, headers=(), hang_up=False, length=None):
    """Write bytes to the socket; the status, or None where nobody waited for it."""
    host, _, rest = base_url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    lines = [
        f"POST /{rest}/{path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    try:
        await writer.drain()
        if hang_up:
            return None
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


def user(text):
    return {"role": "user", "content": text}


async def parallel(url, key):
    replies = await asyncio.gather(
        *(post(url, key, {"messages": [user(f"sub-task {number}")]}) for number in range(200))
    )
    return [status for status, _, _ in replies], 200


async def compaction(url, key):
    """The history is summarised twice, and goes on from its beginning after that."""
    statuses, messages = [], [user("task")]
    for number in range(6):
        if number in (2, 4):
            messages = [user("task"), user(f"summary {number}")]
        status, text, _ = await post(url, key, {"messages": messages})
        statuses.append(status)
        messages += [json.loads(text)["choices"][0]["message"], user("go on")]
    return statuses, 6


async def disconnects(url, key):
    body = json.dumps(ASK).encode()
    for _ in range(20):
        await send(url, body, hang_up=True)  # before the answer
        await send(url, body[:10], hang_up=True, length=len(body))  # within the body
    await asyncio.sleep(0)
    return [await send(url, body)], None


async def duplicates(url, key):
    """The same request again and again, marked as a retry: one turn."""
    replies = await asyncio.gather(
        *(post(url, key, **{"x-stainless-retry-count": str(number)}) for number in range(1, 31))
    )
    assert len({json.loads(text)["id"] for _, text, _ in replies}) == 1
    return [status for status, _, _ in replies], 1


async def forked_children(url, key):
    """Ten go on from the same turn at once."""
    first = json.loads((await post(url, key))[1])["choices"][0]["message"]
    replies = await asyncio.gather(
        *(
            post(url, key, {"messages": [*ASK["messages"], first, user(f"child {number}")]})
            for number in range(10)
        )
    )
    return [status for status, _, _ in replies], 11


async def large_bodies(url, key):
    body = json.dumps({"messages": [user("x" * (1 << 20))]}).encode()
    statuses = [await send(url, body, path) for path in ("chat/completions", "messages")]
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert statuses == [413, 413]
    headers = ["Transfer-Encoding: chunked"]
    statuses.append(await send(url, chunked, headers=headers))
    return [*statuses, (await post(url, key))[0]], 1


async def a_long_prompt(url, key):
    """It is within the limit of a body and would take minutes to become tokens."""
    started = time.monotonic()
    text = "word " * 12_000_000
    statuses = []
    for path in ("chat/completions", "messages/count_tokens"):
        status, said, _ = await post(url, key, {"messages": [user(text)]}, path=path)
        assert "60000000 characters" in said and "rollout.max_context_tokens" in said
        statuses.append(status)
    assert statuses == [400, 400] and time.monotonic() - started < 30
    return [*statuses, (await post(url, key))[0]], None


BODIES = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b"[" * 100_000,
    b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    b'{"messages": [{"role": "user", "content": "q"}], "n": ' + b"9" * 400 + b"}",
    b'{"messages": [{"role": "user", "content": "q"}], "max_tokens": 1e400}',
)
WRONG = (
    {"messages": None},
    {"messages": {"role": "user"}},
    {"messages": [user(3)]},
    {"messages": [user([None])]},
    {"messages": [{"role": ["user"], "content": "q"}]},
    {"messages": [{"role": "assistant", "tool_calls": "x"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]},
    {"messages": [user("q")], "tools": "look"},
    {"messages": [user("q")], "tools": [None]},
    {"messages": [user("q")], "tools": [{"type": "function", "function": {"name": 3}}]},
    {"messages": [user("q")], "stop": 3},
    {"messages": [user("q")], "stream": "yes"},
    {"messages": [user("q")], "stream_options": "usage"},
    {"messages": [user("q")], "max_tokens": "5"},
    {"messages": [user("q")], "max_tokens": -1},
    {"messages": [user("q")], "tool_choice": 3, "input": []},
    {"input": [[]], "messages": [[]]},
    {"input": [{"type": ["message"]}], "messages": [user({"type": "text"})]},
)


async def wrong_types(url, key):
    statuses = []
    for path in ("chat/completions", "responses", "messages", "messages/count_tokens"):
        statuses += [await send(url, body, path) for body in BODIES]
        statuses += [(await post(url, key, body, path=path))[0] for body in WRONG]
    assert set(statuses) <= {200, 400}, "what one protocol does not know, another may not read"
    assert statuses.count(400) > 80
    return [*statuses, (await post(url, key))[0]], None


async def odd_schemas(url, key):
    """Tools that a template has to write out, however odd."""
    schemas = (
        {"type": "object", "properties": None},
        {"type": ["object", "null"], "properties": {"x": True}},
        {"$ref": "#/x", "x": {"deep": [[[{}]]]}},
        {"properties": {"x": {"enum": [None, 1e300, "\u2028"]}}},
    )
    statuses = []
    for schema in schemas:
        tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
        statuses.append((await post(url, key, {**ASK, "tools": [tool]}))[0])
    named = {"type": "function", "function": {"name": "<|im_end|>{{ x }}", "description": "\x00"}}
    statuses.append((await post(url, key, {**ASK, "tools": [named, *LOOK]}))[0])
    return statuses, 5


@pytest.mark.parametrize(
    "attack",
    [
        *(parallel, compaction, disconnects, duplicates, forked_children),
        *(large_bodies, wrong_types, odd_schemas, a_long_prompt),
    ],
)
def test_an_agent_that_does_its_worst_is_one_record(attack, monkeypatch):
    if attack is not a_long_prompt:
        monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 1 << 19)
    seen = []

    async def solve(task, base_url, api_key):
        statuses, num_turns = await attack(base_url, api_key)
        seen.append((statuses, num_turns))
        return "right"

    limits = replace(LIMITS, max_turns=500)
    trajectory, engine = played(solve, limits=limits, max_context_tokens=100_000)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    ((statuses, num_turns),) = seen
    assert all(status < 500 for status in statuses)
    assert statuses[-1] == 200, "it still serves"
    if num_turns is not None:
        assert len(trajectory.turns) == num_turns
    if attack is not disconnects:  # what a client left stays asked, and is not recorded
        require_exact(trajectory, list(engine.prompts.values()))
