"""Holds what all clients of `env_server.py` share: warm up, play, print the time taken."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable


def steps_of(num_sessions: int, num_steps: int) -> int:
    """Steps of one session, so that all together take about `num_steps`."""
    return max(num_steps // num_sessions, 5)


async def report(steps: Callable[[int], Awaitable[list[float]]], count: int) -> None:
    """Play `count` steps of every session between two lines on standard output, at each of which
    the benchmark reads the server's CPU time, and which it answers with a line of its own.

    Args:
        steps: plays so many steps of every session at once, returns their latencies in seconds.
    """
    await steps(3)
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, started = time.process_time(), time.perf_counter()
    latencies = sorted(await steps(count))
    seconds = time.perf_counter() - started
    result = {
        "steps": len(latencies),
        "seconds": seconds,
        "client_cpu": time.process_time() - cpu,
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[int(len(latencies) * 0.99)],
    }
    print(json.dumps(result), flush=True)
    sys.stdin.readline()
