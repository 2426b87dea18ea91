"""Measures steps per second of one environment, their latency, and its server's CPU time.

    python benchmarks/env_bench.py [ID|URL] [--sessions 64] [--seconds 5] [--config JSON] [--env ID]

Plays `--sessions` episodes at once, over and over on the same 16 tasks, with the environment's
oracle or else with calls sampled from its tools' schemas. The client measures latencies, over HTTP.
An environment given by name is served by a separate process, so that its CPU time per step (resets
included), threads and memory can be measured. The token of a URL is read from AGENTRL_ENV_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter

from env_server import cpu_seconds, size

from agentrl.env import connect
from agentrl.env.check import load_subject
from agentrl.env.protocol import TOKEN_VARIABLE
from agentrl.errors import EnvError

NUM_TASKS = 16
STEP_TIMEOUT_S = 60.0


async def measure(options: argparse.Namespace, url: str, server: int | None) -> None:
    subject = await load_subject(options.target, config=options.config, env_id=options.env)
    episodes = [(spec, await subject.moves(spec)) for spec in subject.specs(NUM_TASKS)]
    await subject.aclose()
    opens: list[float] = []
    steps: list[float] = []
    errors: Counter[str] = Counter()

    async def play(client, spec, actions) -> None:
        try:
            started = time.perf_counter()
            session = await client.session(
                subject.env_id, split=spec.split, index=spec.index, config=options.config
            )
            opens.append(time.perf_counter() - started)
            try:
                for number, action in enumerate(actions):
                    started = time.perf_counter()
                    last = number + 1 == len(actions)
                    result = await session.step(action, timeout_s=STEP_TIMEOUT_S, last=last)
                    steps.append(time.perf_counter() - started)
                    if result.terminated or result.truncated:
                        break
            finally:
                await session.close()
        except EnvError as error:
            errors[error.code] += 1
            await asyncio.sleep(0.01)

    async def player(client, number: int, until: float) -> None:
        while time.monotonic() < until:
            await play(client, *episodes[number % NUM_TASKS])
            number += 1

    async with connect(url) as client:
        await client.info(subject.env_id, options.config)
        await play(client, *episodes[0])  # warm-up
        for each in (opens, steps, errors):
            each.clear()
        started, cpu = time.monotonic(), cpu_seconds(server) if server else 0.0
        players = (player(client, n, started + options.seconds) for n in range(options.sessions))
        await asyncio.gather(*players)
        seconds = time.monotonic() - started
    if not steps:
        raise SystemExit(f"no step succeeded in {seconds:.1f} s; errors: {dict(errors)}")
    steps.sort()
    opens.sort()
    print(f"{len(steps) / seconds:.0f} steps/s in {seconds:.1f} s of {len(opens)} episodes")
    print(f"step      p50 {steps[len(steps) // 2] * 1e3:.2f} ms", end="")
    print(f", p99 {steps[int(len(steps) * 0.99)] * 1e3:.2f} ms")
    print(f"open      p50 {opens[len(opens) // 2] * 1e3:.2f} ms")
    if server:
        per_step = (cpu_seconds(server) - cpu) / len(steps) * 1e6
        memory, threads = size(server)
        print(f"server    {per_step:.0f} us of CPU per step, {threads} threads, {memory} MiB")
    if errors:
        print(f"failed episodes by error code: {dict(errors)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", metavar="ID|URL", nargs="?", default="math")
    parser.add_argument("--sessions", type=int, default=64, help="episodes played at once")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds to measure")
    parser.add_argument("--config", type=json.loads, default={}, help="configuration, as JSON")
    parser.add_argument("--env", help="environment of the URL, if it has several")
    options = parser.parse_args()
    if options.target.startswith(("http://", "https://")):
        asyncio.run(measure(options, options.target, None))
        return
    command = ["-m", "agentrl", "env", "serve", options.target, "--port", "0"]
    if options.config:
        command += ["--config", json.dumps(options.config)]
    environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    server = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it logs a line per episode
        text=True,
        env=environ,
    )
    try:
        assert server.stdout
        line = server.stdout.readline()
        if " at http" not in line:
            raise SystemExit(f"`agentrl {' '.join(command[2:])}` did not start: run it to see why")
        asyncio.run(measure(options, line.split()[-1], server.pid))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
