"""The client: the same episode in-process and over HTTP, and what it does when things go wrong."""

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest
import sample_envs
from aiohttp import ClientSession
from env_servers import in_process_of_its_own
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_proxy import Cut, LossyProxy, read_http
from manager_calls import call, error_of, until
from sample_envs import Hello, Workshop

from agentrl.env import (
    Action,
    EnvConfig,
    Environment,
    Task,
    ToolCall,
    connect,
    make,
    register,
    tool,
)
from agentrl.env import client as client_module
from agentrl.env import transport as transport_module
from agentrl.env.scaffold import make_project
from agentrl.env.sessions.manager import SessionManager
from agentrl.errors import ConfigError, EnvError, EnvUnavailable, GraderError


async def record(client, env, actions, **where):
    """Everything an episode shows, errors included."""
    session = await client.session(env, seed=11, **where)
    seen = [session.task_id, session.messages, session.tools]
    for action in actions:
        try:
            seen.append(await session.step(action, timeout_s=5))
        except EnvError as error:
            seen.append((type(error), error.code, error.status, error.retryable, str(error)))
    await session.close()
    return seen


def here_and_there(url, env, actions, **where):
    """The same episode in this process and over HTTP."""

    async def main():
        async with connect() as here, connect(url) as there:
            return [await record(client, env, actions, **where) for client in (here, there)]

    return asyncio.run(main())


TRANSPORTS = ["in-process", "http"]


@register("unfolding")
class Unfolding(Environment):
    """Each task begins with tools of its own, and `open_door` brings others."""

    def splits(self):
        return {"train": 2}

    def get(self, split, index):
        return Task(f"{split}/{index}", "Find it.")

    def reset(self, task, *, seed):
        self.inside = False
        return task.prompt

    def offered_tools(self):
        if self.task is None or self.task.id == "train/0":
            return ["take", "look"] if getattr(self, "inside", False) else ["open_door"]
        return ["look"]

    @tool
    async def open_door(self) -> str:
        self.inside = True
        return "it is open"

    @tool
    async def look(self) -> str:
        return "a box"

    @tool(terminal=True)
    async def take(self) -> float:
        return 1.0


def names(session):
    return [spec["function"]["name"] for spec in session.tools]


def connect_by(transport, url):
    return connect() if transport == "in-process" else connect(url)


@settings(max_examples=15, deadline=None)
@given(
    numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    end=st.sampled_from(["stop", "cut", "wrong", "nan", "\ud800"]),
)
def test_an_episode_is_the_same_in_process_and_on_a_server(served, numbers, end):
    actions = [Action(text=repr(number)) for number in numbers] + [Action(text=end)] * 2
    here, there = here_and_there(served, "free-form", actions, split="train", index=1)
    assert there == here
    rewards = [result.reward for result in here[3 : 3 + len(numbers)]]
    assert list(map(repr, rewards)) == list(map(repr, numbers))  # the sign of zero too


def test_tools_errors_and_tasks_are_the_same_in_process_and_on_a_server(served):
    actions = [
        call("add", number=2),
        call("add", number="x"),
        call("greet"),
        Action(parse_error="not JSON"),
        Action(text="plain", reasoning="hm"),
        Action(tool_calls=(ToolCall("a", "add", {}), ToolCall("b", "fail", {"message": "é😀"}))),
        call("lose_grader"),
        call("add"),
    ]
    task = Task("mine", "do it", {"gold": [1, None]}, {"x": 1.5})
    for where in ({"split": "train", "index": 7}, {"task": task}):
        here, there = here_and_there(served, "workshop", actions, **where)
        assert there == here
        assert here[-2][:2] == (GraderError, "grader_error")
        assert here[-1][1] == "step_conflict"


async def test_configuration_and_information(served):
    for client in (connect(), connect(served)):
        async with client:
            session = await client.session(
                "workshop", split="train", index=0, config={"greeting": "hey"}
            )
            result = await session.step(call("greet"), timeout_s=5)
            assert result.observation[0]["content"] == "hey"
            info = await client.info("workshop")
            assert info.splits == {"train": 1000} and len(info.tools) > 5
            info = await client.info("workshop", {"num_tasks": 9, "offer": ["add"]})
            assert info.splits == {"train": 9} and len(info.tools) == 1
            error = await error_of(client.info("nowhere"))
            assert (error.code, error.exit_code) == ("not_found", 2)
            with pytest.raises(ConfigError, match="either split and index, or a task"):
                await client.session("hello", split="train")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"greting": "x"}, "there is no key 'greting'; did you mean greeting?"),
        ({"fail_loading": "data"}, "rows.jsonl, line 3: there is no column 'question'"),
        ({"fail_loading": "config"}, "it needs a package; install it"),
    ],
)
def test_wrong_configuration_and_data_keep_their_meaning(served, config, says):
    async def main(client):
        async with client:
            yes = dict(split="train", index=0, config=config)
            return [
                await error_of(client.info("workshop", config)),
                await error_of(client.session("workshop", **yes)),
            ]

    for client in (connect(), connect(served)):
        for error in asyncio.run(main(client)):
            assert (error.code, error.status, error.exit_code) == ("invalid_request", 422, 2)
            assert str(error).endswith(says) and len(str(error).splitlines()) == 1


def test_the_last_turn_is_the_same_in_process_and_on_a_server(served):
    async def main(client):
        async with client:
            session = await client.session("workshop", split="train", index=0)
            return await session.step(call("add"), timeout_s=5, last=True)

    here, there = (asyncio.run(main(client)) for client in (connect(), connect(served)))
    assert here == there and here.truncated and not here.terminated and here.reward == 0.5


async def test_a_long_loading_is_waited_for_by_short_calls(served, monkeypatch):
    monkeypatch.setattr(client_module, "INFO_CALL_S", 0.1)
    for client in (connect(), connect(served)):
        async with client:
            config = {"slow_load_s": 0.5}
            assert (await client.info("workshop", config)).splits == {"train": 1000}
            config = {"slow_load_s": 0.6}
            error = await error_of(client.info("workshop", config, timeout_s=0.2))
            assert error.code == "reset_timeout"


async def test_nothing_is_shared_with_the_environment():
    """Changes a result and the caller's task: neither change reaches the environment."""
    async with connect() as client:
        arguments = {"number": 1}
        session = await client.session("workshop", split="train", index=0)
        session.tools.clear()
        session.messages.clear()
        result = await session.step(
            Action(tool_calls=(ToolCall("c", "add", arguments),)), timeout_s=5
        )
        result.observation.clear()
        arguments["number"] = 99
        other = await client.session("workshop", split="train", index=0)
        assert other.tools and other.messages


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tools_follow_the_task_and_the_turn(serve_environments, transport):
    with serve_environments(["unfolding"]) as (url, _):
        async with connect_by(transport, url) as client:
            first = await client.session("unfolding", split="train", index=0)
            second = await client.session("unfolding", split="train", index=1)
            assert (names(first), names(second)) == (["open_door"], ["look"])
            await second.step(call("look"), timeout_s=5)
            assert names(second) == ["look"]
            result = await first.step(call("take"), timeout_s=5)
            assert not result.terminated, "it is not offered yet"
            await first.step(call("open_door"), timeout_s=5)
            assert names(first) == ["take", "look"]
            await first.step(call("look"), timeout_s=5)
            assert names(first) == ["take", "look"]
            assert (await first.step(call("take"), timeout_s=5)).reward == 1.0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_environment_answers_to_the_name_it_was_served_under(
    serve_environments, tmp_path, transport
):
    """`--env.id my_tool.env:MyTool` needs no change when `--env.url` is added to it."""
    file = make_project(f"named-{transport}", template="text", path=tmp_path)
    class_name = "".join(part.capitalize() for part in file.name.split("-"))
    served_as = f"{file / file.name.replace('-', '_') / 'env.py'}:{class_name}"
    with serve_environments([served_as, "sample_envs:Hello"]) as (url, _):
        async with connect_by(transport, url) as client:
            for name in (served_as, file.name, "sample_envs:Hello", "hello"):
                assert (await client.info(name)).splits["train"] is None
                assert len(await client.tasks(name, "test", 0, 2)) == 2
                session = await client.session(name, split="test", index=2)
                assert session.task_id == "test/2"
                await session.step(Action(text="3"), timeout_s=5)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tasks_are_listed(served, transport):
    async with connect_by(transport, served) as client:
        tasks = await client.tasks("hello", "test", 1)
        assert [(task.index, task.prompt) for task in tasks] == [
            (1, "What is 1 + 1?"),
            (2, "What is 2 + 1?"),
        ]
        assert len(await client.tasks("workshop", "train")) == 20
        assert (await error_of(client.tasks("hello", "nowhere"))).code == "invalid_request"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_client_without_await(served, transport):
    with connect_by(transport, served).sync as client:
        assert client.info("hello").splits == {"train": None, "test": 3}
        assert len(client.tasks("hello", "test")) == 3
        session = client.session("workshop", split="train", index=5)
        assert session.task_id == "train/5" and session.tools and session.id
        assert session.step(call("add"), timeout_s=5).observation[0]["content"] == '{"count":1}'
        assert session.messages[1]["content"].startswith("task 5 ")
        session.close()
        with pytest.raises(EnvError, match="nowhere"):
            client.session("nowhere", split="train", index=0)
    client.close()


# Faults


def answer(status, body, *headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


BUSY = b'{"title":"","status":%d,"detail":"busy","code":"at_capacity","retryable":true,'
BUSY += b'"retry_after_s":0.05}'
OURS = "Agentrl-Protocol: 1"
ANSWERS = {
    "503": answer("503 Service Unavailable", BUSY % 503, OURS),
    "429": answer("429 Too Many Requests", BUSY % 429, OURS),
    "bad gateway": answer("502 Bad Gateway", b"<html>"),
    "something else": answer("200 OK", b"<html>"),
}


class Proxy(LossyProxy):
    """Passes requests on to a server, except that each may meet the next fault of the script."""

    def __init__(self, url, script):
        super().__init__(url, share=0.0, seed=0, pages=False)
        self.script, self.num_requests = list(script), 0

    async def _exchange(self, reader, writer, server_reader, server_writer):
        request = await read_http(reader)
        self.num_requests += 1
        fault = self.script.pop(0) if self.script else "none"
        if fault in ANSWERS:
            writer.write(ANSWERS[fault])
            return
        if fault == "drop before":
            raise Cut
        if fault == "hang":
            await asyncio.sleep(60)
        server_writer.write(request)
        response = await read_http(server_reader)
        if fault == "drop after":
            raise Cut
        if fault == "half":
            body = response.partition(b"\r\n\r\n")[2]
            response = answer("200 OK", body[: len(body) // 2], OURS)
        writer.write(response)


FAULTS = ["drop before", "drop after", "503", "429", "bad gateway", "half"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_step_that_met_a_fault_is_taken_once(served, fault):
    async with (
        Proxy(served, ["none", fault, fault]) as proxy,
        connect(proxy.url) as client,
    ):
        session = await client.session("workshop", split="train", index=0)
        first = await session.step(call("add", number=1), timeout_s=10)
        second = await session.step(call("add", number=1), timeout_s=10)
        assert first.observation[0]["content"] == '{"count":1}'
        assert second.observation[0]["content"] == '{"count":2}'
        assert proxy.num_requests == 1 + 3 + 1


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_create_that_met_a_fault_opens_once(serve_environments, fault):
    with serve_environments(["hello"]) as (url, manager):
        async with Proxy(url, [fault]) as proxy, connect(proxy.url) as client:
            await client.session("hello", split="train", index=0)
            assert manager.num_live == 1


def num_files():
    return len(os.listdir("/proc/self/fd"))


async def test_a_server_that_hangs_costs_no_more_files_with_each_time_out(monkeypatch):
    """Its kernel accepts connections, and nothing is ever answered."""
    monkeypatch.setattr(client_module, "GRACE_S", 0.05)

    async def give_up(client):
        with pytest.raises((TimeoutError, EnvError)):
            async with asyncio.timeout(0.02):
                await client.session("hello", split="train", index=0)

    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        async with connect(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            before = num_files()
            most = 0
            for _ in range(20):
                await asyncio.gather(*(give_up(client) for _ in range(8)))
                most = max(most, num_files() - before)
            await until(lambda: num_files() - before <= 2)
            assert most <= 8 * 6, most  # of 160


async def test_a_server_that_answers_no_health_check_is_passed_over(served, monkeypatch):
    monkeypatch.setattr(transport_module, "PATIENCE_S", 0.1)
    monkeypatch.setattr(transport_module, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with connect([silent, served]) as client:
            for number in range(4):
                await client.session("hello", split="train", index=number)
            assert [endpoint.load for endpoint in client._endpoints] == [0, 4]


async def test_what_is_not_retryable_is_not_retried(served):
    async with Proxy(served, []) as proxy, connect(proxy.url) as client:
        session = await client.session("workshop", split="train", index=0)
        await error_of(session.step(call("lose_grader"), timeout_s=5))
        assert proxy.num_requests == 2


async def test_the_deadline_bounds_retries_and_hanging_servers(served, monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_S", 0.2)
    async with (
        Proxy(served, ["none"] + ["503"] * 100) as proxy,
        connect(proxy.url) as client,
    ):
        session = await client.session("workshop", split="train", index=0)
        started = time.monotonic()
        error = await error_of(session.step(call("add"), timeout_s=0.3))
        assert time.monotonic() - started < 20
        assert isinstance(error, EnvUnavailable) and error.code == "at_capacity"
    async with (
        Proxy(served, ["none", "hang"]) as proxy,
        connect(proxy.url) as client,
    ):
        session = await client.session("workshop", split="train", index=0)
        started = time.monotonic()
        error = await error_of(session.step(call("add"), timeout_s=0.3))
        assert time.monotonic() - started < 20
        assert isinstance(error, EnvUnavailable) and "did not answer" in str(error)


async def test_an_unreachable_server_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(client_module, "UNREACHABLE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused_port = listener.getsockname()[1]
    started = time.monotonic()
    async with connect(f"http://127.0.0.1:{unused_port}") as client:
        error = await error_of(client.session("hello", split="train", index=0))
    assert isinstance(error, EnvUnavailable) and time.monotonic() - started < 8
    assert f"127.0.0.1:{unused_port}" in str(error) and "agentrl env serve" in str(error)
    assert "Connection refused" in str(error)


async def test_a_server_that_is_something_else_is_recognised(served):
    async with Proxy(served, ["something else"]) as proxy, connect(proxy.url) as client:
        error = await error_of(client.info("hello"))
    assert "is not an agentrl environment server" in str(error)
    with pytest.raises(ConfigError, match="is not a URL"):
        connect("localhost:8700")


async def test_a_token_is_sent(serve_environments, monkeypatch):
    with serve_environments(["hello"], token="t0k") as (url, _):
        for token in ("t0k", None):
            async with connect(url, token=token) as client:
                assert (await client.info("hello")).id == "hello"
            monkeypatch.setenv("AGENTRL_ENV_TOKEN", "t0k")
        async with connect(url, token="wrong") as client:
            error = await error_of(client.info("hello"))
            assert error.code == "unauthorized" and "Bearer" in str(error)


async def test_a_full_environment_is_waited_for():
    async with connect() as client:
        held = [await client.session("workshop", split="train", index=0) for _ in range(16)]
        waiting = asyncio.ensure_future(client.session("workshop", split="train", index=1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await held[0].close()
        assert (await waiting).task_id == "train/1"
        error = await error_of(client.session("workshop", split="train", index=1, timeout_s=0.2))
        assert error.code == "at_capacity"


async def test_several_servers_share_the_load_and_stand_in_for_each_other(serve_environments):
    with serve_environments(["workshop"]) as (second, other):
        with serve_environments(["workshop"]) as (first, one):
            async with connect(f"{first},{second}") as client:
                sessions = [
                    await client.session("workshop", split="train", index=index)
                    for index in range(6)
                ]
                assert [manager.num_live for manager in (one, other)] == [3, 3]
                assert (await client.info("workshop")).max_sessions == 32
                for session in sessions:  # each goes back to the one that opened it
                    await session.step(call("add"), timeout_s=5)
        await until(lambda: other.num_live == 0)
        async with connect([first, second]) as client:
            started = time.monotonic()
            assert (await client.info("workshop")).max_sessions == 16
            for number in range(4):
                await client.session("workshop", split="train", index=number)
            assert other.num_live == 4 and time.monotonic() - started < 8


async def test_a_burst_is_shared_and_what_a_killed_server_held_starts_over(monkeypatch):
    monkeypatch.setattr(client_module, "UNREACHABLE_S", 0.2)

    async def num_live(url):
        async with ClientSession() as http, http.get(f"{url}/healthz") as answer:
            return (await answer.json())["sessions"]

    serve = ("-m", "agentrl", "env", "serve", f"{sample_envs.__file__}:Hello", "--port", "0")
    with (
        in_process_of_its_own(*serve) as (first, first_url),
        in_process_of_its_own(*serve) as (_, second_url),
    ):
        async with connect([first_url, second_url]) as client:

            async def start(index):
                return await client.session("hello", split="train", index=index)

            async def finish(index, session):
                right = call("answer", text=str(index + 1))
                try:
                    return False, await session.step(right, timeout_s=10)
                except EnvUnavailable:
                    await session.close()
                    return True, await (await start(index)).step(right, timeout_s=10)

            sessions = await asyncio.gather(*map(start, range(100)))
            counts = [await num_live(url) for url in (first_url, second_url)]
            assert sum(counts) == 100 and max(counts) <= 55, counts
            first.kill()
            first.wait()
            results = await asyncio.gather(*map(finish, range(100), sessions))
            assert [result.reward for _, result in results] == [1.0] * 100
            assert sum(started_over for started_over, _ in results) == counts[0]


async def test_servers_that_differ_are_refused(served, serve_environments):
    with serve_environments(["workshop"], config={"workshop": {"num_tasks": 4}}) as (other, _):
        async with connect([served, other]) as client:
            with pytest.raises(ConfigError, match="different splits or tools for 'workshop'"):
                await client.info("workshop")
            assert (await client.info("workshop", {"num_tasks": 3})).splits == {"train": 3}


async def test_idle_sessions_are_kept_alive_by_a_living_client(served, monkeypatch):
    monkeypatch.setattr(client_module, "LEASE_S", 1.5)
    async with connect(served) as client:
        session = await client.session("workshop", split="train", index=0)
        await asyncio.sleep(2.5)
        result = await session.step(call("add"), timeout_s=5)
        assert result.observation[0]["content"] == '{"count":1}'


class SlowRenewals(transport_module.InProcess):
    async def renew(self, session_id, timeout_s):
        await asyncio.sleep(0.05)
        await super().renew(session_id, timeout_s)


async def test_many_idle_sessions_of_a_living_client_do_not_expire(monkeypatch):
    monkeypatch.setattr(client_module, "LEASE_S", 2.0)
    transport = SlowRenewals(SessionManager(lambda _: Hello))
    async with client_module.EnvClient([transport]) as client:
        opening = (client.session("hello", split="train", index=0) for _ in range(200))
        sessions = await asyncio.gather(*opening)
        await asyncio.sleep(4.0)
        assert transport.manager.num_live == len(sessions) == 200


def test_a_dead_client_leaves_nothing_behind(serve_environments, monkeypatch):
    monkeypatch.setattr(client_module, "LEASE_S", 0.2)

    async def die(url):
        client = connect(url)
        for number in range(3):
            await client.session("workshop", split="train", index=number)
        client._renewer.cancel()  # as if the process were gone: no renewal, no close
        await client._endpoints[0].transport.aclose()

    with serve_environments(["workshop"]) as (url, manager):
        asyncio.run(die(url))
        asyncio.run(until(lambda: manager.num_live == 0))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_cancelled_opening_frees_its_session(serve_environments, transport):
    with serve_environments(["workshop"]) as (url, manager):
        async with connect_by(transport, url) as client:
            if transport == "in-process":
                manager = client._endpoints[0].transport.manager
            opening = asyncio.ensure_future(
                client.session("workshop", split="train", index=0, config={"slow_reset_s": 0.5})
            )
            await until(lambda: manager.num_live == 1)
            opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled()
            await until(lambda: manager.num_live == 0)


async def test_a_cancelled_step_does_not_keep_close_from_freeing_the_session():
    async with connect() as client:
        manager = client._endpoints[0].transport.manager
        session = await client.session("workshop", split="train", index=0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session.step(call("wait", seconds=60), timeout_s=90)
        await session.close()
        await session.close()
        await until(lambda: manager.num_live == 0)


# By hand


async def test_make_plays_one_session_at_a_time():
    closed = Workshop.closed
    env = make("workshop", greeting="hi")
    with pytest.raises(EnvError, match="call reset"):
        await env.step("x")
    prompt = await env.reset()
    assert prompt[1]["content"].startswith("task 0 ")
    assert (await env.call("greet")).observation[0]["content"] == "hi"
    assert await env.reset("train", 0) == prompt
    again = await env.reset(task=Task("t", "mine"), seed=4)
    assert again[1]["content"].startswith("mine ")
    assert (await env.call("submit", value=1.0)).reward == 1.5
    await env.close()
    assert Workshop.closed == closed + 3


def test_make_starts_from_its_own_configuration():
    class Renamed(Workshop):
        def splits(self):
            return {f"set-{self.config.num_tasks}": self.config.num_tasks}

    env = make(Renamed, num_tasks=2).sync
    assert env.info().splits == {"set-2": 2}
    env.reset()
    assert env.step("anything", last=True).truncated
    env.close()
    with pytest.raises(ConfigError, match="did you mean num_tasks"):
        make(Renamed, num_task=2)


def test_make_has_a_synchronous_twin():
    env = make(Hello).sync
    assert env.reset("test", 2)[0]["content"] == "What is 2 + 1?"
    assert env.step("three").terminated is False
    assert env.call("answer", text="3").reward == 1.0
    assert env.info().splits == {"train": None, "test": 3}
    env.close()
    with pytest.raises(RuntimeError, match="was closed; make a new one"):
        env.reset("test", 2)


def test_make_says_what_it_takes_and_what_an_environment_without_tasks_needs():
    with pytest.raises(ConfigError, match=r"such as make\(Hello\), not an instance"):
        make(Hello())
    env = make(type("Bare", (Environment,), {})).sync
    with pytest.raises(ConfigError, match=r"define splits\(\)"):
        env.reset()
    env.close()


@pytest.mark.parametrize("scheme", ["http://no-such-host.invalid:1", "https"])
async def test_a_name_or_certificate_that_is_wrong_is_final_at_once(scheme, served):
    started = time.monotonic()
    async with connect(scheme if ":" in scheme else served.replace("http", scheme)) as client:
        error = await error_of(client.session("hello", split="train", index=0))
    assert isinstance(error, EnvUnavailable) and not error.retryable
    assert time.monotonic() - started < 5


class Sized(Hello):
    class Config(EnvConfig):
        size: int = 3

    def splits(self):
        return {"train": self.config.size}


async def test_a_server_that_comes_back_with_another_configuration_is_noticed():
    one, other = (
        transport_module.InProcess(
            SessionManager(lambda _: Sized, config={Sized.id: {"size": size}})
        )
        for size in (3, 4)
    )
    async with client_module.EnvClient([one]) as client:
        await (await client.session("sized", split="train", index=0)).close()
        await (await client.session("sized", split="train", index=0)).close()
        client._endpoints[0].transport = other
        with pytest.raises(ConfigError):
            await client.session("sized", split="train", index=0)
        await until(lambda: not other.manager.num_live)
    await one.aclose()


class Skips(transport_module.InProcess):
    async def step(self, session_id, request, timeout_s):
        reply = await super().step(session_id, request, timeout_s)
        reply.step += 1
        return reply


async def test_an_answer_to_another_step_is_refused():
    transport = Skips(SessionManager(lambda _: Hello))
    async with client_module.EnvClient([transport]) as client:
        session = await client.session("hello", split="train", index=0)
        error = await error_of(session.step(Action(text="hi"), timeout_s=5))
        assert error.code == "env_error"


def test_a_program_that_forgets_to_close_its_environment_ends():
    program = "from agentrl.env import make\nprint(make('math').sync.info().id)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, b"math")
