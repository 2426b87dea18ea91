"""CPU time of the rollout driver per 4-turn trajectory, against servers that answer at once.

    python benchmarks/rollout_overhead.py [--trajectories 400] [--concurrent 64 1000]
                                          [--http] [--sentences 20]

What is measured is everything between the model's answer and its next prompt: rendering, parsing,
records, the calls themselves. The inference server answers `/inference/v1/generate` over HTTP from
another process with a prepared turn; the environment runs in this process. Beside it, in the same
run, two parts of it alone: the engine calls with the same prompts (the floor: what any driver over
this transport pays) and the environment's sessions with the same actions. The rest is the driver's
own: rendering, parsing, records, deadlines. CPU time of this process on one thread, best of
`--repeats`.

With `--http` the environment is on a server of its own too, as it is for a run on a cluster. Turns
per second are those that a core has time for: 1 over the CPU time of a turn, which is the ceiling
of a process whose servers never keep it waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from agentrl import runtime
from agentrl.env import Environment, Task, register, tool
from agentrl.env.client import connect
from agentrl.inference.base import SamplingParams
from agentrl.inference.vllm import VLLMEngine
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.driver import Limits
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import GroupScheduler, TaskSource
from agentrl.types import Action, ToolCall

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tokenizers_for_tests import make_tokenizer

SPAWN = multiprocessing.get_context("spawn")
CALL = '<tool_call>{"name": "look", "arguments": {"word": "w"}}</tool_call>'
NUM_TURNS = 4
SENTENCES = "AGENTRL_BENCHMARK_SENTENCES"
GROUP_SIZE = 8


@register("overhead-test")
class OverheadTest(Environment):
    """Four turns: three tool calls, then a text. No two observations are the same."""

    calls = itertools.count()

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        sentences = int(os.environ.get(SENTENCES, "20"))
        return Task(str(index), f"Question {index}: what is it? " + "Think of it. " * sentences)

    @tool
    async def look(self, word: str) -> str:
        number = next(self.calls)
        return f"found {word} {number:06d}, and then some words that a search would find as well"

    async def on_text(self, text: str):
        self.finish(reward=1.0)


def serve(port: int, turns: list[list[int]]) -> None:
    """Answer the n-th turn of a trajectory with the n-th prepared turn, found by request id."""

    def encode(ids: list[int]) -> bytes:
        content = [{"token_id": i, "logprob": -0.5, "rank": 1} for i in ids]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop",
            "logprobs": {"content": content},
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        }
        return json.dumps({"request_id": "x", "choices": [choice]}).encode()

    bodies = [encode(ids) for ids in turns]

    async def generate(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        marker = body["request_id"].find("-t")
        if marker >= 0:
            answer = bodies[int(body["request_id"][marker + 2 : marker + 5])]
        else:  # a probe
            answer = encode(turns[0][: body["sampling_params"]["max_tokens"]])
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/inference/v1/generate", generate)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def serve_environment(port: int) -> None:
    served = f"{Path(__file__).resolve()}:OverheadTest"
    options = ["--port", str(port), "--max-sessions", "4096"]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a line for each episode
    os.execv(sys.executable, [sys.executable, "-m", "agentrl", "env", "serve", served, *options])


async def driver_cpu(
    url: str, env_url: str | None, renderer: Renderer, num: int, concurrent: int
) -> tuple[float, list[list[int]]]:
    """CPU seconds per trajectory, and the prompts of one trajectory's turns."""
    engine, env = VLLMEngine([url]), connect(env_url)
    await engine.start()
    scheduler = GroupScheduler(
        TokenPolicy(engine, renderer, max_turn_tokens=256, max_context_tokens=65536),
        env,
        TaskSource("train", None, seed=1),
        env_id="overhead-test",
        env_config={},
        group_size=GROUP_SIZE,
        max_concurrent=concurrent,
        limits=Limits(max_turns=8, turn_timeout_s=60, step_timeout_s=60, episode_timeout_s=60),
        seed=1,
    )
    # Connections, templates and caches are warm before the clock starts.
    await scheduler.collect(-(-concurrent // GROUP_SIZE))
    started = time.process_time()
    batch = await scheduler.collect(-(-num // GROUP_SIZE))
    seconds = time.process_time() - started
    for trajectory in batch.trajectories:
        assert trajectory.error is None and len(trajectory.turns) == NUM_TURNS, trajectory
    await engine.aclose()
    await env.aclose()
    row = batch.trajectories[0].branches[0]
    prompts = [row.token_ids[: turn.start] for turn in batch.trajectories[0].turns]
    return seconds / len(batch.trajectories), prompts


async def engine_cpu(
    url: str, renderer: Renderer, prompts: list[list[int]], num: int, concurrent: int
) -> float:
    """CPU seconds per trajectory's bare engine calls."""
    engine = VLLMEngine([url])
    await engine.start()
    sampling = SamplingParams(max_tokens=256, stop_token_ids=renderer.stop_token_ids)

    async def calls(number: int) -> None:
        for turn, prompt in enumerate(prompts):
            await engine.generate(f"f{number}-m000-t{turn:03d}", prompt, sampling)

    seconds = await _cpu_of(calls, num, concurrent)
    await engine.aclose()
    return seconds


async def environment_cpu(env_url: str | None, num: int, concurrent: int) -> float:
    """CPU seconds per bare session: opened, stepped four times, closed."""
    env = connect(env_url)
    look = Action(tool_calls=(ToolCall("t0-0", "look", {"word": "w"}),))
    actions = [look] * (NUM_TURNS - 1) + [Action("The answer is 42.")]

    async def session(number: int) -> None:
        opened = await env.session("overhead-test", split="train", index=number, seed=1, config={})
        for action in actions:
            await opened.step(action, timeout_s=60)
        await opened.close()

    seconds = await _cpu_of(session, num, concurrent)
    await env.aclose()
    return seconds


async def _cpu_of(work: Callable[[int], Awaitable[None]], num: int, concurrent: int) -> float:
    """CPU seconds per call of `work`, warm, with as many at a time as the driver plays."""

    async def some(numbers: range) -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(work(num + extra) for extra in range(concurrent)))
    started = time.process_time()
    await asyncio.gather(*(some(range(first, num, concurrent)) for first in range(concurrent)))
    return (time.process_time() - started) / num


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(target: Callable[..., None], port: int, *arguments: object):
    """A process that serves, as soon as it does."""
    process = SPAWN.Process(target=target, args=(port, *arguments), daemon=True)
    process.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.1)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=400)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--http", action="store_true", help="the environment on a server too")
    parser.add_argument("--sentences", type=int, default=20, help="of the prompt")
    args = parser.parse_args()
    os.environ[SENTENCES] = str(args.sentences)  # the environment's server reads it too
    renderer = Renderer(make_tokenizer())
    tokenizer = renderer.tokenizer
    turns = [
        [*tokenizer.encode(text, add_special_tokens=False), renderer.close_token_id]
        for text in [CALL] * (NUM_TURNS - 1) + ["The answer is 42."]
    ]
    port, env_port = free_port(), free_port()
    url, env_url = f"http://127.0.0.1:{port}", None
    servers = [started(serve, port, turns)]
    if args.http:
        env_url = f"http://127.0.0.1:{env_port}"
        servers.append(started(serve_environment, env_port))
    prompt = renderer.tokenizer.encode(OverheadTest().get("train", 0).prompt)
    print(f"CPU ms per {NUM_TURNS}-turn trajectory, prompt {len(prompt)}, best of {args.repeats}")
    print(
        "  at a time   whole   engine calls   environment   driver's own   whole / engine   turns/s"
    )
    for concurrent in args.concurrent:
        num = max(args.trajectories, concurrent)
        whole, engine, environment = [], [], []
        for _ in range(args.repeats):
            seconds, prompts = runtime.run(driver_cpu(url, env_url, renderer, num, concurrent))
            whole.append(seconds * 1e3)
            engine.append(runtime.run(engine_cpu(url, renderer, prompts, num, concurrent)) * 1e3)
            environment.append(runtime.run(environment_cpu(env_url, num, concurrent)) * 1e3)
        ours, calls, sessions = min(whole), min(engine), min(environment)
        print(
            f"{concurrent:11d} {ours:7.2f} {calls:14.2f} {sessions:13.2f} "
            f"{ours - calls - sessions:14.2f} {ours / calls:16.2f} {NUM_TURNS * 1e3 / ours:9.0f}"
        )
    for server in servers:
        server.terminate()


if __name__ == "__main__":
    main()
