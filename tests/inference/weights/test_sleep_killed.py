"""Whole runs whose trainer and server take turns on one GPU, killed in every phase of a turn.

Real trainers and real SIGKILL. The server stands in for vLLM's: it keeps the rules of its sleep,
has its memory counted, and samples what the embedded engine would from the weights that it was
sent.
"""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from aiohttp import web
from control_server import serving
from test_sleep import AT_WORK, RESTING, Card, Launcher, SleepingServer
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "train"))
from test_loop import QUICKSTART, contents, tensors_of, untimed

from agentrl.config import load_config
from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded_sampling import SampleRequest, sample
from agentrl.rollout import read_trajectories
from agentrl.train.loop import train
from agentrl.view.tracking import read_metrics

WORKER = Path(__file__).with_name("sleep_worker.py")
PHASES = [
    "/inference/v1/generate",
    "/sleep",
    "/learning",
    "/wake_up?tags=weights",
    "/update_weights",
    "/finish_weight_update",
    "/wake_up?tags=kv_cache",
]
NUM_STEPS = len(PHASES) + 1
SEED = 1
"""Of the quickstart."""
OVERRIDES = [
    *("--model.device", "cpu", "--model.dtype", "float32", "--run.save_every", "1"),
    *("--rollout.groups_per_step", "3", "--rollout.group_size", "4"),
    *("--run.num_steps", str(NUM_STEPS)),
]
ON_SERVER = ["--inference.backend", "vllm"]
SLEEP = [*ON_SERVER, "--inference.share", "sleep"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def random_model(seed: int):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(QUICKSTART.parent / "model"),
        dtype=torch.float32,
        attn_implementation="sdpa",
    ).eval()


class RunsServer(SleepingServer):
    """Kills its trainer when a call of the chosen phase did what it does, before the answer."""

    random_model = staticmethod(random_model)
    phase: str | None = None
    trainer: asyncio.subprocess.Process | None = None
    num_turns = 0
    """Whole ones, of the trainer that lives."""

    async def handle(self, request: web.Request) -> web.Response:
        response = await super().handle(request)
        call = self.calls[-1]
        if self.phase is not None and self.num_turns and call.startswith(self.phase):
            assert self.trainer is not None
            self.phase = None
            self.trainer.kill()
        self.num_turns += call == "/wake_up?tags=kv_cache"
        return response

    def do_started(self, body) -> web.Response:
        """A new trainer starts a new server; the old one ended with the old trainer."""
        self.num_turns = 0
        self.card.take("trainer", RESTING)
        self.boot()
        return web.Response()

    def do_learning(self, body) -> web.Response:
        self.card.take("trainer", AT_WORK)
        return web.Response()

    def do_learned(self, body) -> web.Response:
        self.card.take("trainer", RESTING)
        return web.Response()

    def do_inference_v1_generate(self, body) -> web.Response:
        asked = body["sampling_params"]
        if "prompt_logprobs" in asked:
            return super().do_inference_v1_generate(body)
        if self.asleep or self.paused:
            self.violations.append("sampled while asleep")
        if allowed := asked.get("allowed_token_ids"):
            ids, logprobs, finish_reason = allowed * asked["max_tokens"], [0.0] * 4, "length"
        else:
            sampling = SamplingParams(
                asked["max_tokens"],
                asked["temperature"],
                stop_token_ids=tuple(asked["stop_token_ids"]),
            )
            name = body["request_id"].partition("-retry")[0]
            (turn,) = sample(
                self.model, [SampleRequest(name, body["token_ids"], sampling)], seed=SEED
            )
            ids, logprobs, finish_reason = turn.token_ids, turn.logprobs, turn.finish_reason
        content = [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
        choice = {
            "token_ids": ids,
            "finish_reason": finish_reason,
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }
        return web.json_response({"choices": [choice]})


async def live(server: RunsServer, run_dir: Path, *arguments: str) -> int:
    """Has one trainer live; returns how its process ended."""
    with open(run_dir.with_suffix(".log"), "ab") as log:
        server.trainer = await asyncio.create_subprocess_exec(
            *(sys.executable, str(WORKER), server.url, str(QUICKSTART)),
            *("--run.dir", str(run_dir), *OVERRIDES, *arguments),
            stdout=log,
            stderr=log,
        )
        return await server.trainer.wait()


def play(
    run_dir: Path, *arguments: str, phases: tuple[str, ...] = (), memory: float = 80.0
) -> RunsServer:
    """Has a run be killed once in each of these phases, and resumed to its end."""

    async def lives() -> RunsServer:
        server = RunsServer("server", Card(memory), Launcher())
        async with serving(server):
            for number, phase in enumerate((*phases, None)):
                server.phase = phase
                resume = ["--run.resume", "true"] if number else []
                ended = await live(server, run_dir, *arguments, *resume)
                said = run_dir.with_suffix(".log").read_text()[-3000:]
                assert ended == (-9 if phase else 0), f"{phase}: {said}"
            return server

    server = asyncio.run(lives())
    assert server.violations == []
    assert server.card.peak <= memory
    metrics = read_metrics(run_dir)
    assert [row["step"] for row in metrics] == list(range(1, NUM_STEPS + 1))
    for row in metrics:
        assert row["rollout/error_fraction"] == 0
        assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
        assert row["sync/probe_logprob_diff_max"] < 1e-4
    for step, trajectory in read_trajectories(run_dir):
        for row in trajectory.branches:
            assert set(row.policy_versions) <= {-1, step - 1}
    return server


def of_training(run_dir: Path) -> list[dict]:
    """Metrics of all but pushes and durations."""
    return [
        {name: value for name, value in row.items() if not name.startswith("sync/")}
        for row in untimed(read_metrics(run_dir))
    ]


def weights(run_dir: Path) -> dict[str, str]:
    return tensors_of(run_dir, NUM_STEPS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    server = play(run_dir, *SLEEP)
    assert server.calls.count("/sleep?level=2&mode=abort") == NUM_STEPS
    return run_dir


def test_a_kill_in_each_phase_of_a_turn_changes_nothing(undisturbed, tmp_path):
    killed = tmp_path / "killed"
    play(killed, *SLEEP, phases=tuple(PHASES))
    assert weights(killed) == weights(undisturbed)
    assert of_training(killed) == of_training(undisturbed)
    ours, its = (sorted(contents(each), key=lambda row: row[:2]) for each in (killed, undisturbed))
    assert ours == its  # whichever answer came first


def test_turns_change_nothing_of_what_is_learned(undisturbed, tmp_path):
    apart = tmp_path / "apart"
    server = play(apart, *ON_SERVER, memory=160.0)
    assert server.card.peak > 80, "this run needs no turns"
    assert not any(call.startswith("/sleep") for call in server.calls)
    assert of_training(undisturbed) == of_training(apart)
    assert weights(undisturbed) == weights(apart)

    # In one process, which samples in batches: the same tokens, log-probs up to rounding.
    overrides = [*OVERRIDES, "--run.dir", str(tmp_path / "embedded")]
    embedded = train(load_config(QUICKSTART, overrides), quiet=True)
    assert weights(undisturbed) == weights(embedded)
    for ours, its in zip(of_training(undisturbed), of_training(embedded), strict=True):
        assert ours == pytest.approx(its, abs=1e-5)
