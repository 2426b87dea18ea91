"""A container per episode: what an episode waits for one, started for it or waiting for it.

    python benchmarks/container_pool.py [--image IMAGE] [--containers 40]

Needs a Docker engine and a local image with /bin/bash; says so and ends where there is none.
"""

import argparse
import asyncio
import os
import statistics
import time

from agentrl.env.container.pool import ContainerPool, ContainerSpec
from agentrl.errors import EnvError


async def seconds_waited(pool: ContainerPool, num_containers: int, warm: bool) -> list[float]:
    waited = []
    for _ in range(num_containers):
        if warm:
            await pool.warm()
        started = time.perf_counter()
        container = await pool.acquire()
        waited.append(time.perf_counter() - started)
        await container.run("true", timeout_s=60)
        await container.remove()
    return waited


async def at_once(spec: ContainerSpec, num_containers: int, max_starting: int) -> float:
    """Seconds until so many episodes that begin together have a container each."""
    pool = ContainerPool(spec, ready=0, max_starting=max_starting)
    started = time.perf_counter()
    await asyncio.gather(*(pool.acquire(timeout_s=300) for _ in range(num_containers)))
    seconds = time.perf_counter() - started
    await pool.aclose()
    return seconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--image", default="python:3.12-slim")
    parser.add_argument("--containers", type=int, default=40)
    given = parser.parse_args()
    spec = ContainerSpec(given.image, memory_mb=128)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    medians = {}
    try:
        for name, ready in (("cold", 0), ("warm", 2)):
            pool = ContainerPool(spec, ready=ready)
            waited = sorted(await seconds_waited(pool, given.containers, warm=ready > 0))
            await pool.aclose()
            medians[name] = statistics.median(waited)
            print(
                f"{name}: p50 {1000 * medians[name]:,.1f} ms, "
                f"p99 {1000 * waited[int(0.99 * (len(waited) - 1))]:,.1f} ms, "
                f"longest {1000 * waited[-1]:,.1f} ms of {len(waited)}"
            )
        print(f"cold / warm: {medians['cold'] / medians['warm']:.0f}x")
        for max_starting in (2, 4, 16):
            seconds = await at_once(spec, 16, max_starting)
            print(f"16 at once, {max_starting} starting at a time: {seconds:.1f} s")
    except EnvError as error:
        print(f"not measured: {error}")


asyncio.run(main())
