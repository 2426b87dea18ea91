"""Weight updates of a real vLLM: tied heads, sequences in flight, caches, refusals.

One server per dtype for the whole module; AGENTRL_VLLM_PYTHON names a python that has vLLM.
"""

import asyncio
import copy
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from control_server import OneFile, perturb
from safetensors.torch import load_file, save_file
from vllm_process import python_of_vllm, vllm_server

from agentrl.errors import WeightSyncError
from agentrl.inference.http import make_client
from agentrl.inference.weights.control import VLLMControl
from agentrl.inference.weights.files import weights_path, write_weights
from agentrl.inference.weights.probe import probe, trainer_logprobs
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer
from agentrl.model.load import load_model
from agentrl.model.logprobs import recomputed_logprobs

MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
PROBE_IDS = list(range(10, 74))
TEMPERATURE = 0.8
LONG = 1500
"""Tokens of a sequence in flight: it ends at this length and not before (`ignore_eos`), after some
seconds."""
MADE = 32
"""Tokens that every sequence in flight has on average when a push begins."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(python_of_vllm() is None, reason="AGENTRL_VLLM_PYTHON is not set"),
    pytest.mark.timeout(600),
]


@dataclass
class Server:
    url: str
    dtype: torch.dtype
    first_label: str

    @property
    def tolerance(self) -> float:
        """For the probe, whose prompt holds tokens the model finds unlikely."""
        return 1e-3 if self.dtype == torch.float32 else 0.2

    @property
    def parity(self) -> float:
        """Largest difference of a sampled token's log-probability from the trainer's."""
        return 1e-4 if self.dtype == torch.float32 else 0.4


@dataclass
class Sequence:
    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    finish_reason: str


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request, tmp_path_factory):
    with vllm_server(MODEL, tmp_path_factory.mktemp("vllm"), dtype=request.param) as url:
        first = asyncio.run(one_token(url))
        yield Server(url, getattr(torch, request.param), first.spans[0][0])


@pytest.fixture
def model(server):
    return load_model(str(MODEL), dtype=server.dtype, device="cpu")


@pytest.fixture
def sync(server, tmp_path):
    return ServerWeightSync(
        [server.url],
        transfer=FileTransfer(tmp_path / "weights"),
        probe_ids=PROBE_IDS,
        temperature=TEMPERATURE,
        tolerance=server.tolerance,
        timeout_s=60.0,
    )


async def generate(http, url, prompt_ids, max_tokens) -> Sequence:
    sampling = {
        "max_tokens": max_tokens,
        "temperature": TEMPERATURE,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": 0,
        "ignore_eos": True,
    }
    body = {"model": "policy", "token_ids": prompt_ids, "sampling_params": sampling}
    response = await http.post(f"{url}/inference/v1/generate", json=body)
    answer = response.json()
    assert response.status_code == 200, answer
    choice = answer["choices"][0]
    return Sequence(
        choice["token_ids"],
        [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]],
        [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or []],
        choice["finish_reason"],
    )


async def one_token(url) -> Sequence:
    async with make_client() as http:
        return await generate(http, url, [5, 6, 7], 1)


async def metric(http, url, name) -> float:
    text = (await http.get(f"{url}/metrics")).text
    found = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)", text, re.MULTILINE)
    assert found, f"the server has no metric {name}"
    return float(found[1])


async def prefix_hits(http, url) -> float:
    return await metric(http, url, "prefix_cache_hits_total")


async def in_flight(http, url, rows) -> list[asyncio.Task[Sequence]]:
    """Long sequences, one for each prompt, all of which are under way and none near its end."""
    before = await metric(http, url, "generation_tokens_total")
    tasks = [asyncio.create_task(generate(http, url, row, LONG)) for row in rows]
    async with asyncio.timeout(120):
        while True:
            running = await metric(http, url, "num_requests_running")
            made = await metric(http, url, "generation_tokens_total") - before
            if running == len(rows) and made >= MADE * len(rows):
                break
            assert not any(task.done() for task in tasks), "a sequence ended before the update"
            await asyncio.sleep(0.02)
    return tasks


def recomputed(model, prompt_ids, token_ids) -> torch.Tensor:
    """Returns the trainer's log-probs of the sampled tokens, (num_tokens,), from one pass."""
    return torch.tensor(recomputed_logprobs(model, prompt_ids, token_ids, TEMPERATURE))


def exactness(differences: torch.Tensor) -> str:
    return (
        f"|log-prob - recomputation| of {len(differences)} tokens at most "
        f"{differences.max():.2g}, mean {differences.mean():.2g}"
    )


def prompts(number: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 340, (24,), generator=generator).tolist() for _ in range(number)]


def test_a_fresh_server_labels_its_weights_with_a_word(server):
    assert server.first_label == "default"


@pytest.mark.promise
async def test_every_pushed_version_is_what_the_server_computes(server, model, sync):
    for version in range(1, 6):
        perturb(model, seed=version, scale=0.01)
        metrics = await sync.push(model, version)
        if server.dtype == torch.float32:
            assert metrics["sync/probe_logprob_diff_max"] < 1e-4
        label = (await one_token(server.url)).spans[0][0]
        assert label == str(version)
    await sync.aclose()


async def test_vllms_own_reload_updates_half_of_a_tied_model_and_the_probe_sees_it(
    server, model, sync, tmp_path
):
    """The reason for the probe, and for packing the head again in our backend."""
    if server.dtype != torch.float32:
        pytest.skip("vLLM keeps packed copies of float32 matrices only, on this CPU")

    perturb(model, seed=11, scale=0.05)
    shutil.copytree(MODEL, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    expected = trainer_logprobs(model, PROBE_IDS, version=1, temperature=TEMPERATURE)
    async with make_client() as http:
        control = VLLMControl(http, server.url, timeout_s=60)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": f"{tmp_path}/model"}}
        await control.post("/pause?mode=keep")
        await control.post("/collective_rpc", reload)  # answers 200
        await control.post("/resume")
        naive = await probe(control, "policy", expected)
        await sync.push(model, 1)
        ours = await probe(control, "policy", expected)
        print(f"reload: {naive.prompt_diff:.3g}, ours: {ours.prompt_diff:.3g}")
        assert naive.error > 100 * server.tolerance
        assert ours.error < server.tolerance
    await sync.aclose()


async def test_sequences_in_flight_go_on_under_the_new_weights(server, model, sync):
    """`keep`: each token's log-prob is that of a recomputation under the version it is labelled."""

    await sync.push(model, 1)
    models = {"1": copy.deepcopy(model)}
    perturb(model, seed=21, scale=0.02)
    models["2"] = model
    async with make_client() as http:
        rows = prompts(4)
        tasks = await in_flight(http, server.url, rows)
        await sync.push(model, 2)
        sequences = await asyncio.gather(*tasks)
    differences, wrong = [], []
    for row, sequence in zip(rows, sequences, strict=True):
        assert [span[0] for span in sequence.spans] == ["1", "2"], "no update in between"
        assert [sequence.spans[0][1], sequence.spans[1][2]] == [0, LONG]
        assert sequence.spans[0][2] == sequence.spans[1][1]
        got = torch.tensor(sequence.logprobs)
        old, new = (recomputed(models[v], row, sequence.token_ids) for v in ("1", "2"))
        switch = sequence.spans[1][1]
        assert 0 < switch < LONG
        differences += [(got - old).abs()[:switch], (got - new).abs()[switch:]]
        wrong += [(got - old).abs()[switch:]]
    every = torch.cat(differences)
    print(f"\n{server.dtype}, keep: {exactness(every)}")
    assert every.mean() < 0.01 * torch.cat(wrong).mean(), "the labels mean nothing"
    assert every.max() < server.parity
    await sync.aclose()


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_wait_lets_sequences_end_and_abort_cuts_them(server, model, sync, mode):
    await sync.push(model, 1)
    old = copy.deepcopy(model)
    perturb(model, seed=23, scale=0.02)
    sync._on_update = mode
    rows = prompts(4)
    async with make_client() as http:
        tasks = await in_flight(http, server.url, rows)
        await sync.push(model, 2)
        sequences = await asyncio.gather(*tasks)
        after = await generate(http, server.url, rows[0], 8)
    differences = []
    for row, sequence in zip(rows, sequences, strict=True):
        assert [span[0] for span in sequence.spans] == ["1"]
        if mode == "wait":
            assert sequence.finish_reason == "length"
            assert len(sequence.token_ids) == LONG
        else:
            assert sequence.finish_reason == "abort"
            assert 0 < len(sequence.token_ids) < LONG
        expected = recomputed(old, row, sequence.token_ids)
        differences.append((torch.tensor(sequence.logprobs) - expected).abs())
    assert [span[0] for span in after.spans] == ["2"]
    expected = recomputed(model, rows[0], after.token_ids)
    differences.append((torch.tensor(after.logprobs) - expected).abs())
    print(f"\n{server.dtype}, {mode}: {exactness(torch.cat(differences))}")
    assert torch.cat(differences).max() < server.parity
    await sync.aclose()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_no_prefix_of_the_old_weights_is_used(server, model, sync, mode):
    sync._on_update = mode
    prompt = prompts(1)[0] * 20
    async with make_client() as http:
        await generate(http, server.url, prompt, 1)
        before = await prefix_hits(http, server.url)
        await generate(http, server.url, prompt, 1)
        cached = await prefix_hits(http, server.url)
        assert cached > before, "the cache never hits, so this test shows nothing"
        perturb(model, seed=31, scale=0.02)
        await sync.push(model, 1)
        pushed = await prefix_hits(http, server.url)
        sequence = await generate(http, server.url, prompt, 1)
        assert await prefix_hits(http, server.url) == pushed == cached
    expected = recomputed(model, prompt, sequence.token_ids)
    assert abs(sequence.logprobs[0] - expected.item()) < server.tolerance
    await sync.aclose()


async def test_files_that_do_not_fit_change_nothing(server, model, sync, tmp_path):
    await sync.push(model, 1)
    old = trainer_logprobs(model, PROBE_IDS, version=1, temperature=TEMPERATURE)
    perturb(model, seed=41)
    directory = tmp_path / "spoilt"
    directory.mkdir()
    write_weights(model, weights_path(directory, 2))
    good = load_file(weights_path(directory, 2))
    key = "model.layers.1.self_attn.k_proj.weight"
    lacking = {name: tensor for name, tensor in good.items() if name != key}
    headless = {n: t for n, t in good.items() if n != "model.embed_tokens.weight"}
    cases = {
        "is missing": lacking,
        "lacks 2 parameters: model.embed_tokens.weight": headless,
        "no module or parameter named 'surplus'": good | {"surplus.weight": torch.zeros(2)},
        r"shape \(32, 128\) does not fit .*qkv_proj": good | {key: torch.zeros(32, 128)},
        r"shape \(300, 128\) does not fit .*embed": good
        | {"model.embed_tokens.weight": torch.zeros(300, 128)},
    }
    async with make_client() as http:
        control = VLLMControl(http, server.url, timeout_s=60)

        async def refused(path, reason):
            with pytest.raises(WeightSyncError, match=reason):
                transfer = OneFile(path, directory)
                await transfer.connect(control)
                await control.update(lambda: transfer.send(control), version=2, on_update="keep")
            result = await probe(control, "policy", old)
            assert result.error < server.tolerance and result.label == "1", reason

        for reason, tensors in cases.items():
            save_file(tensors, directory / "case.safetensors")
            await refused(directory / "case.safetensors", reason)
        whole = weights_path(directory, 2).read_bytes()
        (directory / "cut.safetensors").write_bytes(whole[:-64])
        await refused(directory / "cut.safetensors", "not a complete safetensors file")
        await refused(MODEL / "model.safetensors", "is not in the weight directory")
        (directory / "link.safetensors").symlink_to(MODEL / "model.safetensors")
        await refused(directory / "link.safetensors", "is not in the weight directory")
        with pytest.raises(WeightSyncError, match="share it with the trainer"):
            await control.post(
                "/init_weight_transfer_engine", {"init_info": {"directory": "/not/there"}}
            )
    await sync.push(model, 2)
    await sync.aclose()


async def test_an_update_left_open_by_a_killed_trainer_is_no_obstacle(server, model, sync):
    await sync.push(model, 1)
    async with make_client() as http:
        control = VLLMControl(http, server.url, timeout_s=60)
        await control.post("/pause?mode=keep")
        await control.post("/start_weight_update")
    perturb(model, seed=51, scale=0.01)
    await sync.push(model, 2)
    assert (await one_token(server.url)).spans[0][0] == "2"
    await sync.aclose()
