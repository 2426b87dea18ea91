"""A real vLLM for tests: found by the environment variable AGENTRL_VLLM_PYTHON."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel
from web_servers import in_thread

from agentrl.inference.base import Generation, SamplingParams
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.program import ServerSettings
from agentrl.inference.vllm import VLLMEngine
from agentrl.model.logprobs import recomputed_logprobs

ROOT = Path(__file__).parents[2]
START_S = 1200.0
TOY_MODEL = ROOT / "examples" / "quickstart" / "model"


def vllm_python() -> str:
    """The interpreter of vLLM's virtual environment; skips the test where there is none."""
    python = os.environ.get("AGENTRL_VLLM_PYTHON", "")
    if not python:
        pytest.skip("no vLLM: set AGENTRL_VLLM_PYTHON to the python of its virtual environment")
    if shutil.which(python) is None:
        pytest.skip(f"no vLLM: AGENTRL_VLLM_PYTHON = {python} cannot be run")
    return python


def toy_launcher(log_dir: Path, **settings) -> ServerLauncher:
    """A launcher of the quickstart's model in float32 unless `settings` say otherwise."""
    arguments = dict(
        python=vllm_python(),
        model=str(TOY_MODEL),
        dtype="float32",
        max_model_len=4096,
        log_dir=log_dir,
        extra_args=["--enforce-eager"],  # nothing to compile: half the time to start
        env={"OMP_NUM_THREADS": "1"},
        startup_timeout_s=START_S,
    )
    settings = ServerSettings(**arguments | settings)  # pyright: ignore[reportArgumentType]
    return ServerLauncher(settings)


@contextlib.asynccontextmanager
async def launched(launcher: ServerLauncher) -> AsyncIterator[ServerLauncher]:
    try:
        await launcher.start()
        yield launcher
    finally:
        await launcher.aclose()


@contextlib.contextmanager
def running_vllm(log_dir: Path, **settings) -> Iterator[ServerLauncher]:
    """Servers that live as long as the block, watched by a thread of their own.

    Tests may run as many event loops as they like meanwhile.
    """
    with in_thread(launched(toy_launcher(log_dir, **settings)), START_S) as launcher:
        yield launcher


def sample_many(url: str, temperature: float) -> tuple[list[list[int]], list[Generation]]:
    """Eight prompts of 5 to 145 tokens and up to 96 sampled tokens of each."""
    prompts = [[(7 * i + 3 * j) % 340 + 3 for j in range(5 + 20 * i)] for i in range(8)]

    async def go() -> list[Generation]:
        engine = VLLMEngine([url], seed=1)
        try:
            sampling = SamplingParams(96, temperature)
            calls = [engine.generate(f"g{i}-m0", p, sampling) for i, p in enumerate(prompts)]
            return await asyncio.gather(*calls)
        finally:
            await engine.aclose()

    return prompts, asyncio.run(go())


def differences(
    model: PreTrainedModel,
    prompts: list[list[int]],
    generations: list[Generation],
    temperature: float,
) -> list[float]:
    """|server - trainer| of every sampled token's log-prob, in nats."""
    found = []
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = recomputed_logprobs(model, prompt, generation.token_ids, temperature)
        pairs = zip(generation.logprobs, expected, strict=True)
        found += [abs(got - wanted) for got, wanted in pairs]
    return found


def tree(pid: int) -> list[int]:
    """All living processes below `pid`."""
    found, queue = [], [pid]
    while queue:
        with contextlib.suppress(FileNotFoundError):
            for task in Path(f"/proc/{queue.pop()}/task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                queue += children
    return found
