"""MCP both ways: a server's tools as an environment, and an environment served as an MCP server."""

import asyncio
import json
import sys

import pytest

pytest.importorskip("mcp.client.client", reason="see `make test-adapters`")

import uvicorn

from agentrl.env import Action, Environment, Task, connect, make, register, resolve, tool
from agentrl.env.check import load_subject, run_check
from agentrl.errors import DataError, EnvError
from agentrl_adapters.mcp_server import make_mcp_app, make_mcp_server

SERVER = '''
import os, sys
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shelf")
books = []

@server.tool()
def put(title: str, copies: int = 1) -> str:
    """Put a book on the shelf."""
    books.extend([title] * copies)
    return f"{len(books)} books"

@server.tool()
def burn(title: str) -> str:
    """Burn a book."""
    raise ToolError(f"no, not {title}")

@server.tool()
def leave() -> str:
    """Leave."""
    os._exit(3)

server.run()
'''
ROWS = [
    {"prompt": "Put Emma on the shelf.", "reference": "1 books", "shelf": "A"},
    {"id": "two", "prompt": [{"role": "user", "content": "Put two."}], "reference": "2 books"},
]


ODD = '''
from mcp.server import MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent

server = MCPServer("odd")
image = ImageContent(type="image", data="AAAA", mime_type="image/png")

@server.tool()
def count() -> CallToolResult:
    """Count."""
    return CallToolResult(content=[], structured_content={"books": 3})

@server.tool()
def fail() -> CallToolResult:
    """Fail."""
    return CallToolResult(content=[], structured_content={"why": "full"}, is_error=True)

@server.tool()
def look() -> CallToolResult:
    """Look."""
    return CallToolResult(content=[TextContent(type="text", text="a shelf"), image])

server.run()
'''


@pytest.fixture
def shelf(tmp_path):
    """`mcp:COMMAND`, and the file of its tasks."""
    (tmp_path / "shelf.py").write_text(SERVER)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"mcp:{sys.executable} {tmp_path / 'shelf.py'}", str(tasks)


async def test_a_command_is_an_environment_in_one_line(shelf):
    name, tasks = shelf

    async with connect() as client:
        info = await client.info(name, {"tasks": tasks, "tools": ["put", "burn"]})
        assert info.splits == {"train": 2}
        specs = {each["function"]["name"]: each["function"] for each in info.tools}
        assert specs.keys() == {"put", "burn"}
        assert specs["put"]["parameters"]["required"] == ["title"]
    env = make(resolve(name), tasks=tasks)
    assert (await env.reset("train", 0))[0]["content"] == "Put Emma on the shelf."
    for count in (1, 2):
        result = await env.call("put", title="Emma")
        assert result.observation[0]["content"] == f"{count} books"
    failed = await env.call("burn", title="Emma")
    assert "no, not Emma" in failed.observation[0]["content"]
    assert failed.metrics["tool_errors"] == 1.0
    wrong = await env.call("put", copies="many")
    assert "title" in wrong.observation[0]["content"]
    ended = await env.step("It holds 1 books")
    assert ended.terminated and ended.reward == 0.0
    assert ended.info == {
        "reference": "1 books",
        "metadata": {"shelf": "A"},
        "answer": "It holds 1 books",
    }
    messages = await env.reset("train", 1)
    assert messages == ROWS[1]["prompt"]
    result = await env.call("put", title="Emma")
    assert result.observation[0]["content"] == "1 books", "each episode has its own server"
    last = await env.step("not yet", last=True)
    assert last.info["reference"] == "2 books"
    await env.close()


async def test_structured_results_and_broken_images_reach_the_agent(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "q"}) + "\n")

    name = f"mcp:{sys.executable} {tmp_path / 'odd.py'}"
    env = make(resolve(name), tasks=str(tasks), show_images=True)
    await env.reset("train", 0)
    said = {
        each: (await env.call(each)).observation[0]["content"] for each in ("count", "fail", "look")
    }
    await env.close()
    assert json.loads(said["count"]) == {"books": 3}
    assert "full" in said["fail"]
    assert "a shelf" in str(said["look"]) and "cannot be read" in str(said["look"])


async def test_the_last_turn_gives_the_reference_though_the_episode_goes_on(shelf):
    name, tasks = shelf

    async with connect() as client:
        session = await client.session(name, split="train", index=0, config={"tasks": tasks})
        from agentrl.env import ToolCall

        call = Action(tool_calls=(ToolCall("c", "put", {"title": "Emma"}),))
        result = await session.step(call, timeout_s=60, last=True)
        assert result.truncated and result.info["reference"] == "1 books"
        await session.close()


async def test_a_server_that_dies_loses_the_session_and_no_process_is_left(shelf):
    name, tasks = shelf

    env = make(resolve(name), tasks=tasks)
    await env.reset("train", 0)
    with pytest.raises(EnvError) as caught:
        await env.call("leave")
    assert caught.value.code == "session_lost"
    await env.close()


@pytest.mark.parametrize(
    "name, config, says",
    [
        ("mcp:http://127.0.0.1:9/mcp", {}, "MCP server http://127.0.0.1:9/mcp"),
        ("mcp:no-such-program-7391", {}, "no-such-program-7391"),
        ("mcp", {}, "no MCP server is given"),
        (None, {"tasks": "missing.jsonl"}, "missing.jsonl"),
        (None, {"tools": ["fly"]}, "has no tool fly"),
    ],
)
async def test_what_is_wrong_is_named(shelf, name, config, says):
    with pytest.raises(EnvError, match=says):
        async with connect() as client:
            await client.info(
                name or shelf[0], config, timeout_s=3 if name and "http" in name else 60
            )


@register("mcp-safe")
class Safe(Environment):
    """A safe to open."""

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(f"{split}/{index}", f"Open safe {index}.", reference=index)

    def reset(self, task, *, seed):
        self.tries = 0
        return task.prompt

    @tool
    def listen(self) -> str:
        """Hear something."""
        self.tries += 1
        return f"{self.tries} clicks"

    @tool(terminal=True)
    def dial(self, number: int) -> float:
        """Try a number."""
        return float(number == self.task.reference)


def text_of(result):
    return result.content[0].text


async def play_over_mcp(client):
    listed = {each.name: each.input_schema for each in (await client.list_tools()).tools}
    assert listed.keys() == {"start_episode", "say", "end_episode", "listen", "dial"}
    assert listed["dial"]["required"] == ["episode_id", "number"]
    ids = []
    for index in (3, 4):
        started = text_of(
            await client.call_tool("start_episode", {"split": "train", "index": index})
        )
        assert started.endswith(f"Open safe {index}.")
        ids.append(started.split()[1])
    for count in (1, 2):  # each episode counts for itself
        for each in ids:
            heard = await client.call_tool("listen", {"episode_id": each})
            assert text_of(heard) == f"{count} clicks"
    ended = text_of(await client.call_tool("dial", {"episode_id": ids[0], "number": 3}))
    assert "The episode has ended." in ended and "reward" not in ended
    after = await client.call_tool("listen", {"episode_id": ids[0]})
    assert after.is_error and "start_episode" in text_of(after)
    wrong = await client.call_tool("start_episode", {"split": "nowhere"})
    assert wrong.is_error and "nowhere" in text_of(wrong)
    await client.call_tool("end_episode", {"episode_id": ids[1]})


async def test_an_environment_is_an_mcp_server_in_process_and_over_stdio():
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters

    server = make_mcp_server(Safe)
    async with Client(server) as client:
        await play_over_mcp(client)
    await server.aclose_episodes()
    arguments = ["-m", "agentrl_adapters.mcp_server", f"{__file__}:Safe"]
    async with Client(StdioServerParameters(command=sys.executable, args=arguments)) as client:
        await play_over_mcp(client)


async def test_an_environment_is_an_mcp_server_over_http_and_asks_for_its_token(monkeypatch):
    monkeypatch.setenv("SAFE_TOKEN", "t0k")

    config = uvicorn.Config(make_mcp_app(Safe, token="t0k"), port=0, log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        with pytest.raises(EnvError, match="MCP server"):
            async with connect() as client:
                await client.info(f"mcp:{url}", timeout_s=3)
        async with connect() as client:  # agentrl plays agentrl over MCP
            info = await client.info(f"mcp:{url}", {"token": "SAFE_TOKEN"})
            assert {each["function"]["name"] for each in info.tools} >= {"dial", "listen"}
            session = await client.session(
                f"mcp:{url}", task=Task("1", "Open one."), config={"token": "SAFE_TOKEN"}
            )
            from agentrl.env import ToolCall

            call = ToolCall("c", "start_episode", {"split": "train", "index": 9})
            result = await session.step(Action(tool_calls=(call,)), timeout_s=60)
            assert "Open safe 9." in result.observation[0]["content"]
            await session.close()
    finally:
        server.should_exit = True
        await serving


async def test_it_passes_the_conformance_kit(shelf):
    name, tasks = shelf

    subject = await load_subject(name, config={"tasks": tasks, "tools": ["put"]})
    names = ["tasks", "tools", "close", "bad_actions"]  # each episode starts a process
    results = [await run_check(each, subject) for each in names]
    assert {each.status for each in results} == {"pass"}, results


@pytest.mark.parametrize("ids", [(1, "1"), ("a", "a")])
def test_two_tasks_of_one_id_are_refused(tmp_path, ids):
    from agentrl_adapters.rows_env import read_tasks

    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": "q", "id": each}) + "\n" for each in ids))
    with pytest.raises(DataError, match="line 2"):
        read_tasks("train", file)


def test_a_null_id_is_no_id(tmp_path):
    from agentrl_adapters.rows_env import read_tasks

    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "q", "id": null}\n{"prompt": "q", "id": 0}\n')
    assert [task.id for task in read_tasks("train", file)] == ["train/0", "0"]


def test_an_image_that_cannot_be_read_is_shown_as_a_text():
    from types import SimpleNamespace

    from agentrl_adapters.mcp_env import _shown

    for data in ("!!", "AAAA"):
        block = SimpleNamespace(type="image", mime_type="image/png", data=data)
        assert "cannot be read" in _shown(block)
