"""Times containers and commands here: `python benchmarks/swe_containers.py --image IMAGE`.

Prints, for 1 and for 8 containers at once, the time from the request to a usable container (started
and checked to be scrubbed), the latency of a command by the environment's way and by `docker exec`,
and the longest time that the event loop was blocked.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
import time

from agentrl.errors import AgentRLError
from agentrl_swebench import images
from agentrl_swebench.containers import InstanceContainer
from agentrl_swebench.patch import check_scrubbed


def quantile(values: list[float], q: float) -> float:
    """Returns the smallest value that at least a share q of the values does not exceed."""
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]


async def measure(image: str, num_containers: int, num_commands: int) -> None:
    """Prints the figures for `num_containers` at once, with `num_commands` in each."""
    loop = asyncio.get_running_loop()
    held_up = 0.0

    async def heartbeat() -> None:
        nonlocal held_up
        while True:
            before = loop.time()
            await asyncio.sleep(0.005)
            held_up = max(held_up, loop.time() - before - 0.005)

    made = await images.scrubbed(await images.resolve(image))

    async def ready() -> tuple[InstanceContainer, float]:
        started = time.perf_counter()
        container = await InstanceContainer.start(made.image_id, run_id="bench")
        await check_scrubbed(container, made.base)
        return container, time.perf_counter() - started

    async def commands(container: InstanceContainer) -> list[float]:
        seconds = []
        for _ in range(num_commands):
            started = time.perf_counter()
            ran = await container.run("true", timeout_s=60, max_chars=1000)
            seconds.append(time.perf_counter() - started)
            if ran.exit_code != 0:
                raise AgentRLError(f"`true` ended with {ran.exit_code}: {ran.output}")
        return seconds

    beating = asyncio.create_task(heartbeat())
    started = await asyncio.gather(*(ready() for _ in range(num_containers)))
    containers = [container for container, _ in started]
    try:
        before = time.perf_counter()
        runs = await asyncio.gather(*(commands(each) for each in containers))
        wall_s = time.perf_counter() - before
        beating.cancel()
        shell = []
        if num_containers == 1:
            for _ in range(num_commands):
                before = time.perf_counter()
                command = ["docker", "exec", containers[0].id, "bash", "-c", "true"]
                await asyncio.to_thread(subprocess.run, command, check=True)
                shell.append(time.perf_counter() - before)
    finally:
        removing = time.perf_counter()
        await asyncio.gather(*(each.remove() for each in containers))
        removing = time.perf_counter() - removing
    times = [each for run in runs for each in run]
    print(
        f"{num_containers} at once: create to ready p50 "
        f"{quantile([s for _, s in started], 0.5):.2f} s, slowest "
        f"{max(s for _, s in started):.2f} s; exec p50 {quantile(times, 0.5) * 1e3:.0f} ms, p99 "
        f"{quantile(times, 0.99) * 1e3:.0f} ms, {len(times) / wall_s:.1f} per second; remove all "
        f"{removing:.2f} s; event loop held up at most {held_up * 1e3:.0f} ms"
    )
    if shell:
        print(
            f"  `docker exec` for comparison: p50 {quantile(shell, 0.5) * 1e3:.0f} ms, p99 "
            f"{quantile(shell, 0.99) * 1e3:.0f} ms"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Time containers and commands.")
    parser.add_argument("--image", default="agentrl/swebench-fixture:agentrl-spans-1")
    parser.add_argument("--commands", type=int, default=100, help="in each container")
    given = parser.parse_args()
    try:
        for num_containers in (1, 8):
            asyncio.run(measure(given.image, num_containers, given.commands))
    except AgentRLError as error:
        print(f"agentrl: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
