"""The endpoint over HTTP: parity with the driver, and every line of its table of failures."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from agent_play import LIMITS, play, require_exact
from openai import AsyncOpenAI
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.config import AgentSection
from agentrl.env import Environment, Task, register, tool
from agentrl.errors import ConfigError, HistoryError, InferenceError
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent import server as server_module
from agentrl.rollout.agent.command import AgentTask, CommandRunner, filled
from agentrl.rollout.agent.recorder import Recorder
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import StopReason, Trajectory

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
QUICKSTART = {
    "source": "arithmetic", "operators": "+-*", "min_digits": 2, "digits": 3, "tools": True,
    "instruction": "",
}  # fmt: skip
CALL = '<tool_call>{"name": "look", "arguments": {"word": "w"}}</tool_call>'
LOOK = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ASK = {"model": "m", "messages": [{"role": "user", "content": "question"}]}


@register("agent-test")
class AgentTest(Environment):
    """Rewards the answer `right`, and goes on without end unless it is told to stop."""

    def splits(self):
        return {"train": 5}

    def get(self, split, index):
        return Task(f"{split}-{index}", f"question {index}", public={"level": index})

    @tool
    async def look(self, word: str) -> str:
        return f"found {word}"

    async def on_text(self, text: str):
        if text == "open":
            return "go on"
        self.finish(reward=float(text == "right"))


def scripted(say=lambda *_: "right", **options):
    renderer = Renderer(make_tokenizer())
    return ScriptedEngine(renderer, say, **options), renderer


def played(solve, say=lambda *_: "right", delay_s=0.0, **options):
    """The only trajectory, and the engine."""
    engine, renderer = scripted(say, delay_s=delay_s)
    batch = play(engine, renderer, solve, env_id="agent-test", split_size=5, **options)
    assert engine.seats == 0, "every seat is given back"
    (trajectory,) = batch.trajectories
    return trajectory, engine


async def post(base_url, api_key, body=ASK, path="chat/completions", **headers):
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{base_url}/{path}",
            json=body,
            headers={"Authorization": f"Bearer {api_key}", **headers},
        ) as reply,
    ):
        return reply.status, await reply.text(), reply.headers


class NumberedByTurn:
    """An engine whose requests are numbered as the driver's are, so that the same is sampled:
    an episode on one path asks for one turn after the other."""

    def __init__(self, engine):
        self.engine, self.num_turns = engine, defaultdict(int)

    async def generate(self, request_id, prompt_ids, sampling):
        trajectory_id = "-".join(request_id.split("-")[:2])
        number, self.num_turns[trajectory_id] = (
            self.num_turns[trajectory_id],
            (self.num_turns[trajectory_id] + 1),
        )
        return await self.engine.generate(f"{trajectory_id}-t{number:03d}", prompt_ids, sampling)

    def __getattr__(self, name):
        return getattr(self.engine, name)


async def solve_quickstart(task, base_url, api_key):
    from agentrl_math.calculator import calculate, show

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list = list(task.messages)
        for _ in range(3):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=task.tools
            )
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                try:
                    found = show(calculate(json.loads(call.function.arguments)["expression"]))
                except (ValueError, KeyError) as error:
                    found = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return message.content or ""


def test_episodes_on_one_path_give_the_rows_of_the_driver_bit_for_bit():
    """Sampled by the real engine with the quickstart's model."""
    from agentrl.inference.embedded import EmbeddedEngine
    from agentrl.model.load import load_model, load_tokenizer, resolve_dtype

    renderer = Renderer(load_tokenizer(str(MODEL)))
    model = load_model(str(MODEL), dtype=resolve_dtype("float32"), device="cpu")
    batches = []
    for solve in (None, solve_quickstart):
        engine = EmbeddedEngine(model, seed=1)
        batches.append(
            play(
                NumberedByTurn(engine) if solve else engine,
                renderer,
                solve,
                groups=8,
                group_size=4,
                env_config=QUICKSTART,
                limits=replace(LIMITS, max_turns=3),
                max_turn_tokens=24,
                max_context_tokens=256,
            )
        )
    native, by_agent = (batch.trajectories for batch in batches)
    assert max(len(trajectory.turns) for trajectory in native) > 1
    for mine, its in zip(native, by_agent, strict=True):
        assert its.error is None and (mine.task_id, mine.reward) == (its.task_id, its.reward)
        for one, other in zip(mine.branches, its.branches, strict=True):
            for name, array in one.arrays().items():
                assert array.tobytes() == other.arrays()[name].tobytes(), name
        spans = [(turn.branch, turn.start, turn.num_tokens, turn.parent) for turn in mine.turns]
        assert spans == [(t.branch, t.start, t.num_tokens, t.parent) for t in its.turns]


@pytest.mark.parametrize(
    ("gives", "reward"), [("right", 1.0), ("wrong", 0.0), (0.25, 0.25), (None, 1.0)]
)
def test_a_text_is_graded_a_number_is_the_reward_and_none_is_what_was_said_last(gives, reward):
    async def solve(task, base_url, api_key):
        assert (await post(base_url, api_key))[0] == 200
        return gives

    trajectory, engine = played(solve)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TERMINATED, reward)
    assert trajectory.turns[-1].reward == reward and trajectory.trainable
    require_exact(trajectory, list(engine.prompts.values()))


def test_a_function_that_blocks_is_an_agent_too():
    from openai import OpenAI

    def solve(task, base_url, api_key):
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [{"role": "user", "content": task.prompt}]
            reply = client.chat.completions.create(model="m", messages=messages)
            return reply.choices[0].message.content

    assert played(solve)[0].reward == 1.0


@pytest.mark.parametrize("how", ["raises", "exits", "returns a list", "asks nothing", "timeout"])
def test_an_agent_that_fails_has_no_reward(how):
    async def solve(task, base_url, api_key):
        if how == "asks nothing":
            return "right"
        await post(base_url, api_key)
        if how == "raises":
            raise ValueError("a bug in the agent")
        if how == "exits":
            sys.exit(3)
        if how == "timeout":
            raise TimeoutError("its own")
        return ["right"]

    trajectory, _ = played(solve)
    assert (trajectory.stop_reason, trajectory.error.stage) == (StopReason.ERROR, "agent")
    assert not trajectory.trainable and trajectory.reward == 0.0
    assert {
        "raises": "a bug in the agent",
        "exits": "exited with 3",
        "returns a list": "returned list; return its answer as a text",
        "asks nothing": "without a call",
        "timeout": "its own",
    }[how] in trajectory.error.message


def test_an_agent_that_hangs_is_cut_by_the_episodes_deadline():
    async def solve(task, base_url, api_key):
        await post(base_url, api_key)
        await asyncio.sleep(60)

    started = time.perf_counter()
    trajectory, _ = played(solve, limits=replace(LIMITS, episode_timeout_s=0.5))
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert (trajectory.error.stage, trajectory.error.code) == ("agent", "episode_timeout")
    assert time.perf_counter() - started < 5


def test_a_process_does_not_wait_for_a_function_that_does_not_end():
    """One that retries for hours keeps its thread, and must not keep the run from ending."""
    program = """
import asyncio, time
from agentrl.rollout.agent.runner import CallableRunner

async def main():
    runner = CallableRunner(lambda *_: time.sleep(600))
    call = asyncio.ensure_future(runner.run(None, "", ""))
    await asyncio.sleep(0.2)
    call.cancel()
    await asyncio.wait([call])
    await runner.aclose()
    print("closed", flush=True)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"closed\n", b"")


@contextlib.contextmanager
def episode(server):
    engine, renderer = scripted()
    engine.reserve(1)
    recorder = Recorder(Trajectory("t", "g", "e", "k", 0), TokenPolicy(engine, renderer, 9, 99))
    with server.episode(recorder, max_turns=9, turn_timeout_s=9) as live:
        yield live


async def test_keys_are_told_apart_and_end_with_their_episode():
    async with contextlib.aclosing(AgentServer()) as server:
        await server.start()
        with episode(server) as live:
            root, refused = live.url.split("/e/")[0] + "/v1", (401, "invalid_api_key")
            for url, headers, expected in (
                (root, {"Authorization": f"Bearer {live.key}"}, (200, None)),
                (live.url, {"Authorization": "Bearer other"}, (200, None)),
                (root, {"x-api-key": live.key, "Authorization": ""}, (200, None)),
                (root, {"api-key": live.key, "Authorization": ""}, (200, None)),
                (root, {"Authorization": ""}, refused),
                (root, {"Authorization": f"Bearer {live.key[:-1]}"}, refused),
                (root, {"Authorization": "Bearer \xe9"}, refused),
            ):
                status, text, sent = await post(url, "", **headers)
                assert (status, json.loads(text).get("error", {}).get("code")) == expected, headers
                assert sent.get("x-should-retry", "false") == "false"
        status, text, _ = await post(root, live.key)
        assert status == 410 and "episode_over" in text
        status, text, _ = await post(live.url, "", path="audio")
        assert status == 404 and "/v1/chat/completions" in text


def test_what_of_a_call_is_not_used_is_said_once(caplog):
    body = {
        **ASK,
        "temperature": 0.1,
        "top_p": 0.5,
        "seed": None,
        "max_tokens": 10_000,
        "response_format": {"type": "json_object"},
        "tools": [*LOOK, {"type": "web_search"}],
    }

    async def solve(task, base_url, api_key):
        for _ in range(2):
            assert (await post(base_url, api_key, body))[0] == 200

    trajectory, _ = played(solve)
    assert [turn.num_tokens for turn in trajectory.turns] == [trajectory.turns[0].num_tokens] * 2
    assert "refused_calls" not in trajectory.info
    said = [r.getMessage() for r in caplog.records if "an agent " in r.getMessage()]
    assert len(said) == 5
    for text in ("temperature,", "top_p,", "response_format,", "10000 tokens;", "web_search,"):
        assert len([line for line in said if text in line]) == 1, text


async def test_tools_of_a_provider_are_refused_by_name_where_they_are_not_to_be_left_out():
    offered = {"tools": [{"type": "web_search"}, {"type": "custom", "name": "patch"}]}
    async with contextlib.aclosing(AgentServer(leaves_out_tools=False)) as server:
        await server.start()
        with episode(server) as live:
            status, text, _ = await post(live.url, live.key, {**ASK, **offered})
    message = json.loads(text)["error"]["message"]
    assert status == 400 and "web_search, custom patch" in message
    assert "agent.leave_out_provider_tools" in message


def test_a_limit_of_the_caller_shortens_its_turn_and_no_other():
    said = ["one two STOP three four", "one two STOP three four", "right"]

    async def solve(task, base_url, api_key):
        messages = list(task.messages)
        for limit in ({"max_tokens": 3}, {"stop": ["STOP", "three"]}, {}):
            status, text, _ = await post(base_url, api_key, {"messages": messages, **limit})
            assert status == 200
            choice = json.loads(text)["choices"][0]
            told.append((choice["message"]["content"], choice["finish_reason"]))
            messages += [choice["message"], {"role": "user", "content": "?"}]

    told = []
    trajectory, engine = played(solve, lambda *_: said.pop(0))
    assert trajectory.reward == 1.0
    assert [how for _, how in told] == ["length", "stop", "stop"]
    assert told[1][0] == "one two " and told[2][0] == "right"
    assert trajectory.turns[0].num_tokens == 3 < trajectory.turns[1].num_tokens
    assert len(trajectory.branches) == 1, "the shortened texts are known again"
    require_exact(trajectory, list(engine.prompts.values()))


def test_a_refusal_that_the_agent_swallows_is_logged_once_counted_and_a_metric(caplog):
    async def solve(task, base_url, api_key):
        for _ in range(3):
            assert (await post(base_url, api_key, {**ASK, "n": 2}))[0] == 400
        assert (await post(base_url, api_key, {**ASK, "functions": [{}]}))[0] == 400
        assert (await post(base_url, api_key, path="audio"))[0] == 404
        await post(base_url, api_key)
        return "wrong"

    engine, renderer = scripted()
    batch = play(engine, renderer, solve, env_id="agent-test", split_size=5)
    (trajectory,) = batch.trajectories
    assert trajectory.error is None
    counts = {text.split(":")[0]: n for text, n in trajectory.info["refused_calls"].items()}
    assert sorted(trajectory.info["refused_calls"].values()) == [1, 1, 3], counts
    assert rollout_metrics(batch)["rollout/refused_calls"] == 5
    said = [r.getMessage() for r in caplog.records if "refused with" in r.getMessage()]
    assert len(said) == len(set(said)) == 3


@pytest.mark.parametrize("raises", [True, False])
def test_an_agent_whose_every_call_was_refused_fails_with_the_refusal(raises):
    async def solve(task, base_url, api_key):
        await post(base_url, api_key, {**ASK, "logit_bias": {"5": 1}})
        if raises:
            raise RuntimeError("no model")
        return "right"

    trajectory, _ = played(solve)
    assert trajectory.error.stage == "agent"
    assert "every call" in trajectory.error.message
    assert "logit_bias is not served" in trajectory.error.message


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v1/models/policy", 200, '"id": "policy"'),
        ("GET", "/v1/chat/completions", 405, "Method Not Allowed"),
        ("DELETE", "/tools", 405, "Method Not Allowed"),
        ("GET", "/nothing", 404, "Not Found"),
        ("POST", "/v1/embeddings", 404, "/v1/chat/completions"),
    ],
)
def test_whatever_path_is_asked_for_is_answered_in_json(method, path, status, says):
    told = []

    async def solve(task, base_url, api_key):
        url = base_url.removesuffix("/v1") + path
        async with aiohttp.ClientSession() as http, http.request(method, url, data=b"{}") as reply:
            told.append((reply.status, await reply.text(), reply.content_type))
        await post(base_url, api_key)

    played(solve)
    ((got, text, kind),) = told
    assert (got, kind) == (status, "application/json") and says in text
    assert status == 200 or json.loads(text)["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_body_that_is_too_large_is_refused_in_the_words_of_its_protocol(path, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 1 << 20)
    told = []

    async def solve(task, base_url, api_key):
        told.append(await post(base_url, api_key, {**ASK, "x": "y" * (1 << 20)}, path=path))
        await post(base_url, api_key)

    trajectory, _ = played(solve)
    ((status, text, _),) = told
    assert status == 413 and "larger than 1 MiB" in json.loads(text)["error"]["message"]
    assert (json.loads(text).get("type") == "error") == (path == "messages")
    assert len(trajectory.turns) == 1


def test_tokens_are_counted_without_taking_a_turn():
    counted = []

    async def solve(task, base_url, api_key):
        body = {"messages": [{"role": "user", "content": task.prompt}], "max_tokens": 5}
        counted.append(await post(base_url, api_key, body, path="messages/count_tokens"))
        counted.append(await post(base_url, api_key, body, path="messages"))
        counted.append(await post(base_url, api_key, {}, path="messages/count_tokens"))

    trajectory, _ = played(solve, limits=replace(LIMITS, max_turns=1))
    (status, text, _), (_, whole, _), (refused, error, _) = counted
    assert status == 200
    assert json.loads(text) == {"input_tokens": json.loads(whole)["usage"]["input_tokens"]}
    assert refused == 400 and json.loads(error)["type"] == "error"
    assert len(trajectory.turns) == 1 and trajectory.stop_reason is StopReason.TERMINATED


def test_a_second_call_may_name_the_first_response():
    """As Vercel's SDK does by references to items, and OpenAI's by the response's id."""

    async def solve(task, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            first = await client.responses.create(model="m", input=task.prompt)
            second = await client.responses.create(
                model="m", input="?", previous_response_id=first.id
            )
            items = [
                {"role": "user", "content": task.prompt},
                {"type": "item_reference", "id": first.output[0].id},
                {"role": "user", "content": "?"},
                {"type": "item_reference", "id": second.output[0].id},
                {"role": "user", "content": "??"},
            ]
            await client.responses.create(model="m", input=items)

    trajectory, engine = played(solve)
    assert trajectory.error is None
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert len(trajectory.branches) == 1
    require_exact(trajectory, list(engine.prompts.values()))


@pytest.mark.parametrize("says", ["right and so on", "wrong and so on"])
def test_an_agent_that_gives_up_over_a_cut_turn_earns_what_the_driver_does(says):
    """Codex, and the SDK's `parse`, end on an answer that is incomplete."""

    async def solve(task, base_url, api_key):
        reply = json.loads((await post(base_url, api_key))[1])["choices"][0]
        if reply["finish_reason"] == "length":
            raise RuntimeError("the answer is incomplete")
        return reply["message"]["content"]

    renderer = Renderer(make_tokenizer())
    num_right = len(renderer.tokenizer.encode("right", add_special_tokens=False))
    one_turn = {"max_turn_tokens": num_right, "limits": replace(LIMITS, max_turns=1)}
    ends = []
    for runner in (None, solve):
        trajectory, _ = played(runner, lambda *_: says, **one_turn)
        ends.append((trajectory.reward, trajectory.error, trajectory.truncated))
        assert trajectory.trainable and trajectory.turns[-1].finish_reason == "length"
    assert ends[0] == ends[1] == (float(says.startswith("right")), None, True)


@pytest.mark.parametrize("handles", [True, False])
@pytest.mark.parametrize("limit", ["max_turns", "context_length_exceeded"])
def test_a_limit_is_a_400_and_the_episode_counts_as_truncated(limit, handles):
    async def solve(task, base_url, api_key):
        messages = list(task.messages)
        while True:
            status, text, headers = await post(base_url, api_key, {"messages": messages})
            if status != 200:
                assert (status, json.loads(text)["error"]["code"]) == (400, limit)
                assert headers["x-should-retry"] == "false"
                if handles:
                    return "right"
                raise RuntimeError("it cannot go on")
            messages += [
                json.loads(text)["choices"][0]["message"],
                {"role": "user", "content": "?"},
            ]

    few = {"limits": replace(LIMITS, max_turns=2)} if limit == "max_turns" else {}
    trajectory, _ = played(solve, **({"max_context_tokens": 120} | few))
    assert trajectory.error is None and trajectory.truncated and trajectory.trainable
    expected = StopReason.MAX_TURNS if few else StopReason.CONTEXT_LENGTH
    assert (trajectory.stop_reason, trajectory.reward) == (expected, float(handles))
    assert "refused_calls" not in trajectory.info


@pytest.mark.parametrize("under_way", [True, False])
def test_a_marked_retry_gets_the_same_answer_and_another_request_one_of_its_own(under_way):
    async def solve(task, base_url, api_key):
        first = asyncio.create_task(post(base_url, api_key))
        await asyncio.sleep(0.1)
        if not under_way:
            await first
        retry = asyncio.create_task(post(base_url, api_key, **{"x-stainless-retry-count": "1"}))
        assert (await first)[:2] == (await retry)[:2]
        ids = {json.loads((await first)[1])["id"]}
        ids.add(json.loads((await post(base_url, api_key))[1])["id"])
        assert len(ids) == 2

    trajectory, engine = played(solve, delay_s=0.3 if under_way else 0.0)
    assert trajectory.error is None
    assert [turn.branch for turn in trajectory.turns] == [0, 1]
    require_exact(trajectory, list(engine.prompts.values()))


def test_a_client_that_is_gone_leaves_nothing_and_its_retry_samples_again():
    async def solve(task, base_url, api_key):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await post(base_url, api_key)
        await asyncio.sleep(0.1)
        assert (await post(base_url, api_key, **{"x-stainless-retry-count": "1"}))[0] == 200

    trajectory, engine = played(solve, delay_s=0.3)
    assert trajectory.error is None and len(trajectory.turns) == 1
    assert len(engine.prompts) == 1, "the id was free again, so the retry samples the same"
    require_exact(trajectory, list(engine.prompts.values()))


def test_the_first_client_gone_its_retry_still_gets_the_answer_under_way():
    async def solve(task, base_url, api_key):
        first = asyncio.create_task(post(base_url, api_key))
        await asyncio.sleep(0.1)
        retry = asyncio.create_task(post(base_url, api_key, **{"x-stainless-retry-count": "1"}))
        await asyncio.sleep(0.1)
        first.cancel()
        assert (await retry)[0] == 200

    trajectory, engine = played(solve, delay_s=0.4)
    assert len(trajectory.turns) == len(engine.prompts) == 1


def test_equal_requests_at_once_are_turns_of_their_own_and_count_as_turns():
    """Sent in one go, so that none is under way when the next is placed."""
    seen = []

    async def solve(task, base_url, api_key):
        replies = await asyncio.gather(*(post(base_url, api_key) for _ in range(12)))
        seen.extend(status for status, _, _ in replies)
        asyncio.get_running_loop().create_task(post(base_url, api_key))  # nobody waits for it
        return "right"

    limits = replace(LIMITS, max_turns=8)
    trajectory, engine = played(solve, delay_s=0.2, limits=limits)
    assert sorted(seen) == [200] * 8 + [400] * 4 and len(engine.prompts) == 8
    assert [turn.branch for turn in trajectory.turns] == list(range(8))
    require_exact(trajectory, list(engine.prompts.values()))


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_fails_fails_the_episode_and_says_so_to_the_agent(stream, monkeypatch):
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", 0.05)
    told = []

    def say(*_):
        time.sleep(0.15)
        raise InferenceError("the engine broke")

    async def solve(task, base_url, api_key):
        told.append(await post(base_url, api_key, {**ASK, "stream": stream}))

    trajectory, _ = played(solve, say)
    assert (trajectory.error.stage, trajectory.error.code) == ("generate", "inference_error")
    assert trajectory.error.message == "the engine broke" and not trajectory.trainable
    for status, text, _ in told:  # it may be gone before it heard
        assert "engine failed" in text and (stream or status == 500)


def test_a_template_that_edits_the_past_ends_the_episode(monkeypatch):
    def edits(*_, **__):
        raise HistoryError("it edits the past")

    async def solve(task, base_url, api_key):
        reply = json.loads((await post(base_url, api_key))[1])["choices"][0]["message"]
        messages = [*ASK["messages"], reply, {"role": "user", "content": "?"}]
        await post(base_url, api_key, {"messages": messages})
        return "right"

    monkeypatch.setattr(Renderer, "continuation", edits)
    trajectory, _ = played(solve)
    assert (trajectory.error.stage, trajectory.error.code) == ("generate", "history_error")
    assert trajectory.error.message == "it edits the past" and not trajectory.trainable


def test_a_turn_that_takes_too_long_is_the_turns_deadline():
    async def solve(task, base_url, api_key):
        await post(base_url, api_key)

    trajectory, _ = played(solve, delay_s=5, limits=replace(LIMITS, turn_timeout_s=0.2))
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert (trajectory.error.stage, trajectory.error.code) == ("generate", "turn_timeout")


def test_a_stream_says_what_the_whole_reply_says(monkeypatch):
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", 0.05)
    said = ["<think>hm</think>Look: " + CALL + CALL.replace('"w"', '"v"'), "right"]
    raw = []

    async def solve(task, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        asked = {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": LOOK}
        told = {"content": "", "reasoning": "", "calls": defaultdict(lambda: ["", "", ""])}
        usage = finish = None
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                told["content"] += choice.delta.content or ""
                told["reasoning"] += (choice.delta.model_extra or {}).get("reasoning", "")
                for call in choice.delta.tool_calls or []:
                    parts = told["calls"][call.index]
                    parts[0] += call.id or ""
                    parts[1] += call.function.name or ""
                    parts[2] += call.function.arguments or ""
        assert finish == "tool_calls" and usage.total_tokens > usage.prompt_tokens > 0
        assert (told["content"], told["reasoning"]) == ("Look:", "hm")
        assert [parts[1:] for parts in told["calls"].values()] == [
            ["look", '{"word":"w"}'], ["look", '{"word":"v"}'],
        ]  # fmt: skip
        assert len({parts[0] for parts in told["calls"].values()}) == 2
        calls = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
            for i, n, a in told["calls"].values()
        ]
        asked["messages"] += [
            {"role": "assistant", "content": "Look:", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls),
        ]
        raw.append(await post(base_url, api_key, asked | {"stream": True}))

    trajectory, engine = played(solve, lambda *_: said.pop(0), delay_s=0.2, max_turn_tokens=200)
    assert trajectory.error is None
    assert len(trajectory.branches) == 1 and len(trajectory.turns) == 2
    ((status, text, headers),) = raw
    assert status == 200 and headers["Content-Type"] == "text/event-stream"
    assert text.startswith(": still sampling\n\n") and text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in text, "it was not asked for"
    require_exact(trajectory, list(engine.prompts.values()))


PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[2]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
if sys.argv[1] != "answers":
    for detached in (False, True):
        subprocess.Popen(["sleep", sys.argv[3]], start_new_session=detached)
if sys.argv[1] == "hangs":
    time.sleep(60)
if sys.argv[1] == "fails":
    sys.exit("it broke")
print("thinking about", sys.argv[2])
print(reply["choices"][0]["message"]["content"])
"""


def running_sleeps(seconds):
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line == f"sleep {seconds}"]


@pytest.mark.parametrize("how", ["answers", "leaves", "fails", "hangs"])
def test_a_program_prints_its_answer_and_leaves_nothing_running(how):
    seconds = str(1000 + os.getpid() % 1000) + ".25"
    runner = CommandRunner([sys.executable, "-c", PROGRAM, how, "{prompt}", seconds])
    limits = replace(LIMITS, episode_timeout_s=2) if how == "hangs" else LIMITS
    trajectory, _ = played(runner, limits=limits)
    if how in ("answers", "leaves"):
        assert (trajectory.error, trajectory.reward) == (None, 1.0)
        assert trajectory.messages[0]["content"].startswith("question ")
    else:
        code = "agent_error" if how == "fails" else "episode_timeout"
        assert (trajectory.error.stage, trajectory.error.code) == ("agent", code)
        assert how == "hangs" or "status 1: it broke" in trajectory.error.message
    assert len(trajectory.turns) == 1
    assert not running_sleeps(seconds)


WRITER = """
import json, os, pathlib, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
home = pathlib.Path.home()
if sys.argv[1] == "writes":
    pathlib.Path("answer.txt").write_text("right")
print("settings:", sorted(each.name for each in home.iterdir()) if home.is_dir() else None)
(home / "left_behind").touch()
print("Tokens: 5k sent")
"""


@pytest.mark.parametrize(
    ("answer", "how", "reward"),
    [
        ("last_line", "writes", 0.0),
        ("policy", "writes", 1.0),
        ("file:answer.txt", "writes", 1.0),
        ("file:answer.txt", "does not write", 0.0),
    ],
)
def test_what_of_a_command_is_graded(answer, how, reward, caplog):
    runner = CommandRunner([sys.executable, "-c", WRITER, how], answer=answer)
    trajectory, _ = played(runner)
    assert (trajectory.error, trajectory.reward) == (None, reward)
    assert ("left no file answer.txt" in caplog.text) == (how == "does not write")


@pytest.mark.parametrize("home", ["private", "folder", "shared"])
def test_commands_have_a_home_of_their_own_unless_it_is_shared(home, tmp_path, monkeypatch):
    """Two after one another: what one leaves behind, the next sees only in a shared one."""
    mine, template = tmp_path / "mine", tmp_path / "template"
    for folder, name in ((mine, "secret"), (template, "settings")):
        folder.mkdir()
        (folder / name).touch()
    monkeypatch.setenv("HOME", str(mine))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(mine))
    script = "import os; print(os.environ.get('XDG_CONFIG_HOME'))\n" + WRITER.replace(
        'print("Tokens: 5k sent")', ""
    ).replace("(home / ", "print(sorted(os.listdir(home)), flush=True); (home / ")
    runner = CommandRunner(
        [sys.executable, "-c", script, "writes"], home=str(template) if home == "folder" else home
    )
    seen = []

    class Seeing(CommandRunner):
        async def run(self, task, base_url, api_key):
            seen.append(await runner.run(task, base_url, api_key))
            return seen[-1]

    for _ in range(2):
        played(Seeing([sys.executable]))
    expected = {"private": [[], []], "folder": [["settings"]] * 2}
    shared = [["secret"], ["left_behind", "secret"]]
    assert seen == [str(each) for each in expected.get(home, shared)]
    assert sorted(os.listdir(template)) == ["settings"]


def test_placeholders_are_filled_once():
    task = AgentTask("id-7", "what is {api_key} and {x}?", [])
    assert filled("{prompt}", task, "URL", "KEY") == "what is {api_key} and {x}?"
    assert filled("-k={api_key}:{base_url}/{task_id}{}", task, "U", "K") == "-k=K:U/id-7{}"


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"command": ["x"], "answer": "first_line"}, "agent.answer has to be"),
        ({"run": "a.py:b", "answer": "policy"}, "agent.answer applies to agent.command only"),
        ({"command": ["x"], "container": "i", "home": "shared"}, "does not apply"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(section, says):
    with pytest.raises(ValueError, match=says):
        AgentSection(**section)
    AgentSection(command=["x"], answer="file:answer.txt", home="/etc")


def test_a_home_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"agent\.home"):
        CommandRunner([sys.executable], home="/nowhere")
