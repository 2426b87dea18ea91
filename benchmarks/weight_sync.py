"""Live weight updates of a real vLLM: how long, how exact, and what vLLM's own reload does.

    AGENTRL_VLLM_PYTHON=/path/to/vllm/bin/python python benchmarks/weight_sync.py [--dtype ...]

The quickstart's model on one server. Each version is a random change of the one before.

* For sequences in flight under `keep`, `wait` and `abort`: seconds of a push in all, and of them
  without generation (medians). With `wait` the pause includes the end of the sequences.
* `stale hits`: prefix-cache hits of a prompt that was cached before the update (server metrics).
* `logprob diff`: of every token of the sequences that crossed an update, against one pass of the
  trainer's model of the version that the server labels it with; median, maximum.
* The same model through `/collective_rpc reload_weights`, between pause and resume, and by how
  much the probe then differs from the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import httpx
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.inference.http import make_client
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.program import ServerSettings
from agentrl.inference.weights.control import OnUpdate, VLLMControl
from agentrl.inference.weights.plugin import write_plugin
from agentrl.inference.weights.probe import probe, trainer_logprobs
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer
from agentrl.model.load import load_model
from agentrl.model.logprobs import recomputed_logprobs

MODEL = Path(__file__).parents[1] / "examples" / "quickstart" / "model"
PROBE_IDS = list(range(10, 74))
TEMPERATURE = 0.9
IN_FLIGHT_S = 0.4
"""Between the start of the sequences and the push."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[4, 32])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    python = os.environ.get("AGENTRL_VLLM_PYTHON")
    if python is None:
        print("skipped: AGENTRL_VLLM_PYTHON does not name a python that has vLLM")
        return
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    for dtype in arguments.dtype:
        asyncio.run(measure(python, dtype, arguments.in_flight, arguments.repeats))


async def measure(python: str, dtype: str, in_flight: list[int], repeats: int) -> None:
    shared_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory() as scratch,
        tempfile.TemporaryDirectory(dir=shared_memory) as weights,
    ):
        settings = ServerSettings(
            python=python,
            model=str(MODEL),
            dtype="float32" if dtype == "float32" else "bfloat16",
            max_model_len=2048,
            log_dir=Path(scratch),
            plugin_dir=write_plugin(Path(scratch) / "plugin"),
            env={"OMP_NUM_THREADS": "1"},
        )
        launcher = ServerLauncher(settings)
        await launcher.start()
        try:
            async with make_client() as http:
                await Bench(http, launcher.urls[0], dtype, Path(weights)).run(in_flight, repeats)
        finally:
            await launcher.aclose()


class Bench:
    def __init__(self, http: httpx.AsyncClient, url: str, dtype: str, weights: Path) -> None:
        self.http = http
        self.url = url
        self.dtype = dtype
        self.weights = weights
        self.model = load(dtype)
        self.version = 0

    async def run(self, in_flight: list[int], repeats: int) -> None:
        print(f"{self.dtype}, {repeats} updates each")
        print(
            f"{'in flight':>9} {'mode':>6} {'total':>9} {'paused':>9}   stale hits   logprob diff"
        )
        for number in in_flight:
            for mode in ("keep", "wait", "abort"):
                await self.updates(number, mode, repeats)
        await self.against_reload(repeats)

    async def updates(self, number: int, mode: OnUpdate, repeats: int) -> None:
        sync = self.sync(mode)
        await sync.push(self.model, self.next_version())
        prompts = random_prompts(number)
        total_s, paused_s, stale = [], [], 0.0
        differences: list[torch.Tensor] = []
        for _ in range(repeats):
            before = load(self.dtype)
            before.load_state_dict(self.model.state_dict())
            versions = {str(self.version): before}
            await self.generate(prompts[0] * 30, 1)  # fills the prefix cache
            # Long enough to be in flight when the push arrives, short enough to wait for.
            max_tokens = 400 if mode == "wait" else max(400, 4000 // number)
            tasks = [asyncio.create_task(self.generate(prompt, max_tokens)) for prompt in prompts]
            await asyncio.sleep(IN_FLIGHT_S)
            perturb(self.model, self.version)
            metrics = await sync.push(self.model, self.next_version())
            versions[str(self.version)] = self.model
            total_s.append(metrics["sync/seconds"])
            paused_s.append(metrics["sync/paused_s"])
            answers = await asyncio.gather(*tasks)
            hits = await self.prefix_hits()
            await self.generate(prompts[0] * 30, 1)
            stale += await self.prefix_hits() - hits
            for prompt, choice in list(zip(prompts, answers, strict=True))[:4]:
                differences += span_differences(versions, prompt, choice)
        await sync.aclose()
        every = torch.cat(differences)
        print(
            f"{number:>9} {mode:>6} {1e3 * statistics.median(total_s):>6.0f} ms "
            f"{1e3 * statistics.median(paused_s):>6.0f} ms {stale:>12.0f}   "
            f"{every.median():.1e}, {every.max():.1e} ({len(every)} tokens)"
        )

    async def against_reload(self, repeats: int) -> None:
        """Both without sequences in flight, from the pause to the answer of resume."""
        sync = self.sync("keep")
        control = VLLMControl(self.http, self.url, timeout_s=60)
        directory = self.weights / "reload"
        shutil.copytree(MODEL, directory)
        ours_s, reload_s, reload_diff, ours_diff = [], [], 0.0, 0.0
        for _ in range(repeats):
            perturb(self.model, self.version)
            version = self.next_version()
            expected = trainer_logprobs(
                self.model, PROBE_IDS, version=version, temperature=TEMPERATURE
            )
            self.model.save_pretrained(directory)
            started = time.monotonic()
            await control.post("/pause?mode=keep")
            await control.post(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}},
            )
            await control.post("/resume")
            reload_s.append(time.monotonic() - started)
            result = await probe(control, "policy", expected)
            reload_diff = max(reload_diff, result.prompt_diff)
            metrics = await sync.push(self.model, version)
            ours_s.append(metrics["sync/paused_s"])
            ours_diff = max(ours_diff, metrics["sync/probe_logprob_diff_max"])
        await sync.aclose()
        ours, reload = statistics.median(ours_s), statistics.median(reload_s)
        print(
            f"paused, nothing in flight: agentrl {1e3 * ours:.0f} ms (probe differs by "
            f"{ours_diff:.1e}), reload_weights {1e3 * reload:.0f} ms ({reload_diff:.1e}); "
            f"ratio {ours / reload:.2f}\n"
        )

    def sync(self, mode: OnUpdate) -> ServerWeightSync:
        return ServerWeightSync(
            [self.url],
            transfer=FileTransfer(self.weights),
            on_update=mode,
            probe_ids=PROBE_IDS,
            temperature=TEMPERATURE,
            tolerance=1e-3 if self.dtype == "float32" else 0.1,
        )

    def next_version(self) -> int:
        self.version += 1
        return self.version

    async def generate(self, prompt: list[int], max_tokens: int) -> dict:
        sampling = {
            "max_tokens": max_tokens,
            "temperature": TEMPERATURE,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": 0,
            "ignore_eos": True,
        }
        body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
        response = await self.http.post(f"{self.url}/inference/v1/generate", json=body)
        return response.raise_for_status().json()["choices"][0]

    async def prefix_hits(self) -> float:
        text = (await self.http.get(f"{self.url}/metrics")).text
        found = re.search(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)", text, re.MULTILINE)
        if found is None:
            raise RuntimeError("the server reports no prefix cache hits")
        return float(found[1])


def load(dtype: str) -> PreTrainedModel:
    return load_model(str(MODEL), dtype=getattr(torch, dtype), device="cpu")


def perturb(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.003 * noise.to(parameter.dtype))


def random_prompts(number: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 340, (24,), generator=generator).tolist() for _ in range(number)]


def span_differences(
    versions: dict[str, PreTrainedModel], prompt: list[int], choice: dict
) -> list[torch.Tensor]:
    """|log-prob - recomputation under its labelled version| of each token, one tensor a span."""
    token_ids = choice["token_ids"]
    got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    differences = []
    for span in choice["weight_versions"]:
        model = versions[span["version"]]
        expected = torch.tensor(recomputed_logprobs(model, prompt, token_ids, TEMPERATURE))
        differences.append((got - expected).abs()[span["start"] : span["end"]])
    return differences


if __name__ == "__main__":
    main()
