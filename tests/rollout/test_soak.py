"""Thousands of episodes on a real vLLM through a faulty wire: one record each, nothing leaks."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from fault_proxy import BROKEN, TRANSIENT, fault_proxy
from vllm_fixture import TOY_MODEL, running_vllm

from agentrl.env.client import connect
from agentrl.inference.vllm import VLLMEngine
from agentrl.model.load import load_tokenizer
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.driver import Limits
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import GroupScheduler, TaskSource
from agentrl.rollout.stream import GroupStream

ENVIRONMENT = f"{Path(__file__).with_name('soak_env.py')}:SoakEnvironment"
GROUP_SIZE, GROUPS_PER_STEP, NUM_STEPS = 10, 10, 20
FAULTS = 0.05
LIMITS = Limits(max_turns=3, turn_timeout_s=30, step_timeout_s=5, episode_timeout_s=60)
TASKS = {"source": "arithmetic", "operators": "+-*", "digits": 3, "tools": True, "instruction": ""}


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_mib() -> float:
    gc.collect()
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_episodes_with_faults_leave_one_record_each_and_nothing_else(tmp_path):
    # To a file: a pipe that nobody reads fills up with the traces of faults and stops the server.
    log = tmp_path / "env.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "agentrl", "env", "serve", ENVIRONMENT, "--port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while not (found := re.search(r"http://[\d.]+:\d+", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        env_url = found[0]
        with running_vllm(tmp_path, max_model_len=256) as launcher:
            asyncio.run(soak(launcher.urls[0], env_url))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=20)


async def soak(vllm_url: str, env_url: str) -> None:
    renderer = Renderer(load_tokenizer(str(TOY_MODEL)))
    ids: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    sizes: list[tuple[float, int]] = []
    async with fault_proxy(vllm_url, share=FAULTS, seed=1) as proxy, connect(env_url) as env:
        engine = VLLMEngine([proxy.url])
        await engine.start()
        scheduler = GroupScheduler(
            TokenPolicy(engine, renderer, max_turn_tokens=24, max_context_tokens=256),
            env,
            TaskSource("train", None, seed=1),
            env_id="SoakEnvironment",
            env_config={**TASKS, "fault_share": FAULTS / 4},
            group_size=GROUP_SIZE,
            max_concurrent=64,
            limits=LIMITS,
            seed=1,
            capacity=asyncio.Semaphore(64),
        )
        stream = GroupStream(
            scheduler, groups_per_step=GROUPS_PER_STEP, num_steps=NUM_STEPS, max_staleness=1
        )
        for step in range(1, NUM_STEPS + 1):
            batch = await asyncio.wait_for(stream.next_batch(), 300)
            stream.advance(step)
            for trajectory in batch.trajectories:
                ids[trajectory.trajectory_id] += 1
                codes[trajectory.error.code if trajectory.error else "ok"] += 1
            del batch
            sizes.append((resident_mib(), num_files()))
        await stream.aclose()
        assert sum(stream.num_ended.values()) == stream.num_dispatched
        await engine.aclose()
    print(
        f"\n{sum(ids.values())} episodes: {dict(codes)}; faults on the wire: {dict(proxy.faults)}"
    )
    print("MiB, files:", ", ".join(f"{mib:.0f} {files}" for mib, files in sizes[::3]))

    total = GROUP_SIZE * GROUPS_PER_STEP * NUM_STEPS
    assert len(ids) == total and set(ids.values()) == {1}
    assert set(proxy.faults) == set(TRANSIENT + BROKEN)
    # What a retry can cure cost no episode; what it cannot cost exactly one each.
    broken = sum(proxy.faults[fault] for fault in BROKEN)
    assert codes["inference_error"] == broken
    assert set(codes) == {"ok", "inference_error", "env_error", "step_timeout"}
    # Flat from a quarter of the way on.
    quarter = NUM_STEPS // 4
    assert sizes[-1][0] - sizes[quarter][0] < 8, sizes
    assert sizes[-1][1] - max(files for _, files in sizes[:quarter]) <= 16, sizes
