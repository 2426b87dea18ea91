"""OpenEnv both ways: its servers played from agentrl, agentrl environments played by its client."""

import asyncio
import contextlib
import inspect
import socket
import threading
from functools import partial

import pytest

openenv = pytest.importorskip("openenv", reason="needs openenv: see `make test-adapters`")

import aiohttp  # noqa: E402
import uvicorn  # noqa: E402
from openenv.core import GenericEnvClient  # noqa: E402
from openenv.core.env_server import create_fastapi_app  # noqa: E402
from openenv.core.env_server.interfaces import Environment as TheirEnvironment  # noqa: E402
from openenv.core.env_server.mcp_environment import MCPEnvironment  # noqa: E402
from openenv.core.env_server.types import Action as TheirAction  # noqa: E402
from openenv.core.env_server.types import Observation as TheirObservation  # noqa: E402
from openenv.core.env_server.types import State  # noqa: E402

from agentrl.env import Action, Environment, Task, ToolCall, connect, make, tool  # noqa: E402
from agentrl.errors import EnvError, EnvUnavailable, GraderError  # noqa: E402
from agentrl_adapters.openenv_env import OpenEnvEnvironment  # noqa: E402
from agentrl_adapters.openenv_server import make_openenv_app  # noqa: E402


class Guess(TheirAction):
    number: int
    note: str = ""


class Hint(TheirObservation):
    text: str = ""
    detail: dict = {}  # noqa: RUF012


class Guessing(TheirEnvironment):
    """Find a number under 100 that follows from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    live = 0

    def __init__(self):
        super().__init__()
        self.count = None
        type(self).live += 1

    def reset(self, seed=None, episode_id=None, secret=None, **kwargs):
        self.secret = seed % 100 if secret is None else secret
        self.count = 0
        return Hint(text="guess", detail={"seed": seed})

    def step(self, action, timeout_s=None, **kwargs):
        if self.count is None:
            raise RuntimeError("never reset")
        if action.number == -1:
            raise ValueError("a bug of the environment")
        self.count += 1
        if action.number == -2:
            return Hint(text="odd", done=True, reward=float("nan"))
        right = action.number == self.secret
        text = "right" if right else "higher" if action.number < self.secret else "lower"
        return Hint(
            text=text, detail={"count": self.count}, done=right, reward=1.0 if right else -0.1
        )

    @property
    def state(self):
        return State(step_count=self.count or 0)

    def close(self):
        type(self).live -= 1


def make_calculator():
    from fastmcp import FastMCP

    server = FastMCP("calculator")

    @server.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    class Calculator(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **kwargs):
            return TheirObservation(done=False, reward=0.0)

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return TheirObservation(done=False, reward=0.0)

        @property
        def state(self):
            return State()

    return Calculator


@contextlib.contextmanager
def running(app, **options):
    """Serve an ASGI application from a thread; yields its URL and the server."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(15)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def guessing():
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
    with running(app, ws_ping_interval=0.2, ws_ping_timeout=0.4) as (url, _):
        yield url


def call(tool_name, **arguments):
    return Action(tool_calls=(ToolCall("c", tool_name, arguments),))


@pytest.fixture
def play(opened):
    return partial(opened, OpenEnvEnvironment)


# An OpenEnv server, used from agentrl


def test_their_environment_is_played_by_its_own_schema(play, guessing):
    env = play(url=guessing, observation_field="text", fixed_fields={"note": "x"}, prompt="Hello.")
    (spec,) = env.info().tools
    parameters = spec["function"]["parameters"]
    assert list(parameters["properties"]) == ["number"] and parameters["required"] == ["number"]
    messages = env.reset(task=Task("t", "Hello.", metadata={"reset": {"secret": 50}}))
    assert messages == [{"role": "user", "content": "Hello.\n\nguess"}]
    low, high = env.step(call("act", number=1)), env.step(call("act", number=99))
    assert [each.observation[0]["content"] for each in (low, high)] == ["higher", "lower"]
    assert (low.reward, low.terminated) == (-0.1, False)
    right = env.step(call("act", number=50))
    assert (right.reward, right.terminated, right.truncated) == (1.0, True, False)


def test_several_calls_in_a_turn_stop_at_the_end(play, guessing):
    env = play(url=guessing, observation_field="text", reset={"secret": 5})
    env.reset()
    calls = [ToolCall(f"c{n}", "act", {"number": n}) for n in (4, 5, 6)]
    result = env.step(Action(tool_calls=tuple(calls)))
    contents = [message["content"] for message in result.observation]
    assert contents == ["higher", "right", "Not run: the episode had ended."]
    assert result.reward == pytest.approx(0.9)


def test_what_the_agent_does_wrong_is_answered(play, guessing):
    env = play(url=guessing)
    env.reset()
    for action in (call("act", number="many"), call("act"), call("nope"), Action(parse_error="x")):
        result = env.step(action)
        assert not result.terminated
    assert result.metrics["invalid_calls"] == 4
    assert "Call one of the tools: act" in env.step("hello").observation[0]["content"]


def test_seeds_and_indices_reach_reset(play, guessing):
    env = play(url=guessing, observation_field="detail.seed")
    first, again, other = (env.reset("train", index, seed=3) for index in (0, 0, 1))
    assert first == again != other
    env = play(url=guessing, index_field="secret", observation_field="text", num_tasks=9)
    env.reset("train", 7)
    assert env.step(call("act", number=7)).terminated
    assert env.info().splits == {"train": 9}


def test_text_becomes_a_field():
    class Said(TheirAction):
        message: str

    class Echo(Guessing):
        def step(self, action, timeout_s=None, **kwargs):
            return Hint(text=action.message[::-1], reward=0.5)

    with running(create_fastapi_app(Echo, Said, Hint)) as (url, _):
        env = make(OpenEnvEnvironment, url=url, actions="text", observation_field="text").sync
        env.reset()
        result = env.step("abc")
        assert (result.observation[0]["content"], result.reward) == ("cba", 0.5)
        env.close()


def test_their_mcp_tools_are_tools(play):
    calculator = make_calculator()
    app = create_fastapi_app(calculator, TheirAction, TheirObservation, max_concurrent_envs=4)
    with running(app) as (url, _):
        env = make(OpenEnvEnvironment, url=url, actions="mcp", prompt="Add.").sync
        (spec,) = env.info().tools
        assert spec["function"]["name"] == "add"
        assert set(spec["function"]["parameters"]["properties"]) == {"a", "b"}
        env.reset()
        result = env.step(call("add", a=2, b=40))
        assert result.observation[0]["content"] == "42"
        env.close()


def test_a_bug_of_theirs_ends_the_session(play, guessing):
    env = play(url=guessing)
    env.reset()
    with pytest.raises(EnvError, match="a bug of the environment"):
        env.step(call("act", number=-1))


def test_a_reward_of_nan_is_a_grader_error(play, guessing):
    env = play(url=guessing)
    env.reset()
    with pytest.raises(GraderError, match="reward null"):
        env.step(call("act", number=-2))
    lenient = play(url=guessing, missing_reward=0.0)
    lenient.reset()
    assert lenient.step(call("act", number=-2)).reward == 0.0


def test_a_thinking_agent_keeps_its_connection(play, guessing):
    """Their server pings every 0.2 s and hangs up after 0.4 s."""
    import time

    env = play(url=guessing, reset={"secret": 1})
    env.reset()
    time.sleep(1.5)
    assert env.step(call("act", number=1)).terminated


def test_a_lost_connection_is_never_a_fresh_environment():
    """Their server is killed and another started at the same address between two steps."""
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
    with running(app, timeout_graceful_shutdown=1) as (url, _):
        env = make(OpenEnvEnvironment, url=url).sync
        env.reset()
        env.step(call("act", number=500))
    listener = socket.create_server(("127.0.0.1", int(url.rpartition(":")[2])))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    for _ in range(2):
        with pytest.raises(EnvError) as caught:
            env.step(call("act", number=500))
        assert caught.value.code == "session_lost"
    env.close()
    server.should_exit = True
    thread.join(15)
    listener.close()


async def test_a_server_that_is_not_there_is_unavailable():
    env = make(OpenEnvEnvironment, url="http://127.0.0.1:9", actions="text")

    with pytest.raises(EnvUnavailable, match="cannot be reached"):
        await env._client.session(
            "openenv", split="train", index=0, config={"url": "http://127.0.0.1:9"}, timeout_s=1
        )


async def test_a_full_server_is_waited_for():
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=1)

    with running(app) as (url, _):
        config = {"url": url, "reset": {"secret": 1}, "observation_field": "text"}
        async with connect() as client:
            first = await client.session("openenv", split="train", index=0, config=config)
            waiting = asyncio.create_task(
                client.session("openenv", split="train", index=0, config=config, timeout_s=20)
            )
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await first.close()
            second = await waiting
            assert (await second.step(call("act", number=1), timeout_s=5)).terminated


def test_sessions_are_apart_and_are_closed(guessing, serve_environments):
    """Through a real agentrl server in front of the real OpenEnv server."""

    async def episode(client, secret):
        config = {"url": guessing, "observation_field": "text", "reset": {"secret": secret}}
        session = await client.session("openenv", split="train", index=0, config=config)
        seen = []
        for number in range(secret + 1):
            result = await session.step(call("act", number=number), timeout_s=20)
            seen.append(result.observation[0]["content"])
        await session.close()
        return seen

    async def main(url):
        async with connect(url) as client:
            return await asyncio.gather(*(episode(client, secret) for secret in range(6)))

    with serve_environments([OpenEnvEnvironment]) as (url, _):
        seen = asyncio.run(main(url))
    assert seen == [["higher"] * secret + ["right"] for secret in range(6)]
    for _ in range(50):
        if Guessing.live <= 0:
            break
        threading.Event().wait(0.1)
    assert Guessing.live <= 0


# An agentrl environment, used by OpenEnv's client


class Adder(Environment):
    """Sums."""

    live = 0

    def splits(self):
        return {"train": 10, "test": None}

    def get(self, split, index):
        return Task(f"{split}/{index}", f"What is {index} + 1?", reference=index + 1)

    def reset(self, task, *, seed):
        type(self).live += 1
        return f"{task.prompt} Seed {seed}."

    @tool
    def count(self, number: int) -> str:
        """Say the number after this one."""
        if number == 13:
            raise EnvError("unlucky")
        return str(number + 1)

    @tool(terminal=True)
    def answer(self, number: int) -> float:
        """Give the answer."""
        return float(number == self.task.reference)

    def close(self):
        type(self).live -= 1


SENDS_HEADERS = "headers" in inspect.signature(GenericEnvClient.__init__).parameters  # since 0.4
TOKEN = "secret" if SENDS_HEADERS else None


@pytest.fixture(scope="module")
def served_to_them():
    with running(make_openenv_app(Adder, token=TOKEN, max_sessions=6)) as (url, _):
        yield url


def their_client(url):
    options = {"headers": {"Authorization": f"Bearer {TOKEN}"}} if SENDS_HEADERS else {}
    return GenericEnvClient(base_url=url, **options)


async def test_their_client_plays(served_to_them):
    async with their_client(served_to_them) as client:
        first = await client.reset(index=4, seed=9)
        assert first.observation["text"] == "What is 4 + 1? Seed 9."
        listed = await client.step({"type": "list_tools"})
        assert [each["name"] for each in listed.observation["tools"]] == ["count", "answer"]
        result = await client.step(
            {"type": "call_tool", "tool_name": "count", "arguments": {"number": 4}}
        )
        assert result.observation["result"] == "5"
        result = await client.step({"text": "I think it is 5."})
        assert "Call one of the tools" in result.observation["text"] and not result.done
        assert (await client.state())["step_count"] == 2
        last = await client.step({"tool_calls": [{"name": "answer", "arguments": {"number": 5}}]})
        assert (last.reward, last.done) == (1.0, True)
        with pytest.raises(RuntimeError, match="episode_done"):
            await client.step({"text": "more"})
        again = await client.reset(seed=23)
        assert again.observation["task_id"] == "train/3"


async def test_their_mistakes_are_errors(served_to_them):
    async with their_client(served_to_them) as client:
        for action, problem in [
            ({"text": "x"}, "not_reset"),
            ({}, "VALIDATION_ERROR"),
            ({"tool_calls": [3]}, "VALIDATION_ERROR"),
        ]:
            with pytest.raises(RuntimeError, match=problem):
                await client.step(action)
            await client.reset()
        for arguments in ({"split": "nope"}, {"index": 10}, {"index": "x"}, {"config": {"a": 1}}):
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                await client.reset(**arguments)
        await client.reset()
        with pytest.raises(RuntimeError, match="unlucky"):
            bad = {"type": "call_tool", "tool_name": "count", "arguments": {"number": 13}}
            await client.step(bad)
        with pytest.raises(RuntimeError):  # the failed session is not a fresh one
            await client.step({"text": "x"})


def test_sockets_are_environments_of_their_own_and_closing_frees_them(served_to_them):
    async def episode(index):
        async with their_client(served_to_them) as client:
            await client.reset(index=index)
            await asyncio.sleep(0.1)
            return (
                await client.step(
                    {"tool_calls": [{"name": "answer", "arguments": {"number": index + 1}}]}
                )
            ).reward

    async def abandon():
        async with their_client(served_to_them) as client:
            await client.reset(index=0)
            await client._ws.close()

    async def main():
        assert await asyncio.gather(*(episode(index) for index in range(5))) == [1.0] * 5
        await abandon()
        for _ in range(50):
            if Adder.live == 0:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{Adder.live} environments are still open")

    asyncio.run(main())


async def test_a_full_server_says_so(served_to_them):
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(their_client(served_to_them)) for _ in range(7)]
        for client in clients[:6]:
            await client.reset()
        with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
            await clients[6].reset()


@pytest.mark.parametrize(
    "token, right, wrong",
    [
        ("secret", {"Authorization": "Bearer secret"}, [{}, {"Authorization": "Bearer wrong"}]),
        (
            None,
            {},
            [{"Origin": "http://evil"}, {"Host": "evil:8000", "Origin": "http://evil:8000"}],
        ),
        ("", {}, [{"Host": "evil:8000", "Authorization": "Bearer "}]),
    ],
)
def test_who_may_not_play_does_not(token, right, wrong):
    async def main(url):
        async with aiohttp.ClientSession() as client:
            for headers in wrong:
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await client.ws_connect(url, headers=headers)
            async with client.ws_connect(url, headers=right) as socket:
                await socket.send_str('{"type": "reset"}')
                assert "What is" in await socket.receive_str()

    with running(make_openenv_app(Adder, token=token)) as (url, _):
        asyncio.run(main(f"{url}/ws"))


def test_agentrl_plays_agentrl_through_openenv():
    """Both adapters, one against the other."""
    with running(make_openenv_app(Adder)) as (url, _):
        env = make(
            OpenEnvEnvironment,
            url=url,
            actions="mcp",
            observation_field="text",
            index_field="index",
        ).sync
        assert env.reset("train", 3)[0]["content"].startswith("What is 3 + 1?")
        assert env.step(call("count", number=3)).observation[0]["content"] == "4"
        assert env.step(call("answer", number=4)).reward == 1.0
        env.close()


async def test_many_frames_of_garbage_leave_the_socket_open():
    with running(make_openenv_app(Adder)) as (url, _):
        async with aiohttp.ClientSession() as client, client.ws_connect(f"{url}/ws") as socket:
            for text in [
                "",
                "{",
                "[]",
                "3",
                '{"type": 3}',
                '{"type":"step"}',
                '{"type":"reset","data":3}',
                '{"type":"reset","data":{"seed":"x"}}',
                '{"type":"step","data":{"text":5}}',
            ]:
                await socket.send_str(text)
                assert '"error"' in await socket.receive_str(timeout=20), text
            await socket.send_str('{"type":"reset"}')
            assert '"observation"' in await socket.receive_str(timeout=20)
