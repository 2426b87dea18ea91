"""CPU time of the rollout driver per 4-turn trajectory, against servers that answer at once.

    python benchmarks/rollout_overhead.py [--trajectories 400]

What is measured is everything between the model's answer and its next prompt: rendering, parsing,
records, the calls themselves. The inference server answers `/inference/v1/generate` over HTTP from
another process with a prepared turn; the environment runs in this process. Beside it, in the same
run, the floor: the same calls over the same transport with no driver around them. CPU time of this
process on one thread, best of `--repeats`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import time
from pathlib import Path

from aiohttp import web

from agentrl.env import Environment, Task, register, tool
from agentrl.env.client import connect
from agentrl.inference.base import SamplingParams
from agentrl.inference.vllm import VLLMEngine
from agentrl.rollout.driver import Limits, TokenPolicy
from agentrl.rollout.render import Renderer
from agentrl.rollout.scheduler import GroupScheduler, TaskSource

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tokenizers_for_tests import make_tokenizer

CALL = '<tool_call>{"name": "look", "arguments": {"word": "w"}}</tool_call>'
NUM_TURNS = 4


@register("overhead-test")
class OverheadTest(Environment):
    """Four turns: three tool calls, then a text."""

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(str(index), f"Question {index}: what is it? " + "Think of it. " * 20)

    @tool
    async def look(self, word: str) -> str:
        return f"found {word}, and then some words that a search would find as well"

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


async def driver_cpu(url: str, renderer: Renderer, num: int) -> float:
    """CPU seconds per trajectory."""
    engine, env = VLLMEngine([url]), connect(None)
    await engine.start()
    scheduler = GroupScheduler(
        TokenPolicy(engine, renderer, max_turn_tokens=256, max_context_tokens=8192),
        env,
        TaskSource("train", None, seed=1),
        env_id="overhead-test",
        env_config={},
        group_size=8,
        max_concurrent=64,
        limits=Limits(max_turns=8, turn_timeout_s=60, step_timeout_s=60, episode_timeout_s=60),
        seed=1,
    )
    await scheduler.collect(4)  # connections, templates and caches are warm
    started = time.process_time()
    batch = await scheduler.collect(num // 8)
    seconds = time.process_time() - started
    for trajectory in batch.trajectories:
        assert trajectory.error is None and len(trajectory.turns) == NUM_TURNS, trajectory
    await engine.aclose()
    await env.aclose()
    return seconds / len(batch.trajectories)


async def floor_cpu(url: str, renderer: Renderer, num: int) -> float:
    """CPU seconds per four bare calls with prompts of the same lengths."""
    engine = VLLMEngine([url])
    await engine.start()
    prompts = [[5] * length for length in (500, 640, 780, 920)]
    sampling = SamplingParams(max_tokens=256, stop_token_ids=renderer.stop_token_ids)

    async def trajectory(number: int) -> None:
        for turn, prompt in enumerate(prompts):
            await engine.generate(f"f{number}-m000-t{turn:03d}", prompt, sampling)

    async def some(numbers: range) -> None:
        for number in numbers:
            await trajectory(number)

    await some(range(num, num + 8))
    started = time.process_time()
    await asyncio.gather(*(some(range(start, num, 64)) for start in range(64)))
    seconds = time.process_time() - started
    await engine.aclose()
    return seconds / num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    renderer = Renderer(make_tokenizer())
    tokenizer = renderer.tokenizer
    turns = [
        [*tokenizer.encode(text, add_special_tokens=False), renderer.close_token_id]
        for text in [CALL] * (NUM_TURNS - 1) + ["The answer is 42."]
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(port, turns), daemon=True
    )
    server.start()
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.1)
    ours, floor = [], []
    for _ in range(args.repeats):
        ours.append(asyncio.run(driver_cpu(url, renderer, args.trajectories)))
        floor.append(asyncio.run(floor_cpu(url, renderer, args.trajectories)))
    server.terminate()
    best, bare = min(ours) * 1e3, min(floor) * 1e3
    print(f"driver, CPU per {NUM_TURNS}-turn trajectory   {best:.2f} ms")
    print(f"the same calls without a driver       {bare:.2f} ms")
    print(f"ratio                                 {best / bare:.2f}")


if __name__ == "__main__":
    main()
