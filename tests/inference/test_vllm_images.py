"""Images in a real vLLM: what it samples of them is what the trainer computes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import PreTrainedModel
from vllm_fixture import ROOT, running_vllm, vllm_python

from agentrl.images import image_part
from agentrl.inference.base import SamplingParams
from agentrl.inference.vllm import VLLMEngine
from agentrl.inference.vllm_images import NORMALISED
from agentrl.inference.weights.plugin import write_plugin
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer
from agentrl.model.load import load_model, load_processor, load_tokenizer
from agentrl.model.logprobs import sample_logprobs
from agentrl.model.rows import pack
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import Message, Trajectory, samples_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

TEMPERATURE = 2.0
"""The example's model then seldom ends a turn before its last token."""
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a server and the model that it has loaded."""
    loads = subprocess.run([vllm_python(), "-c", "import torchvision"], capture_output=True)
    if loads.returncode:
        pytest.skip("vLLM loads vision-language models where torchvision is installed with it")
    directory = tmp_path_factory.mktemp("vllm")
    model = directory / "model"
    shutil.copytree(ROOT / "examples" / "images" / "model", model)
    # vLLM loads the processor of videos too, which published models have.
    images = json.loads((model / "processor_config.json").read_text())["image_processor"]
    videos = {name: images[name] for name in ("patch_size", "merge_size", "size")}
    videos["video_processor_type"] = "Qwen2VLVideoProcessor"
    (model / "video_preprocessor_config.json").write_text(json.dumps(videos))
    settings: dict[str, Any] = {"model": str(model), "max_model_len": 512}
    settings["extra_args"] = ["--enforce-eager", NORMALISED]
    plugin = write_plugin(directory / "plugin")
    with running_vllm(directory, plugin_dir=plugin, **settings) as launcher:
        yield launcher.urls[0], str(model)


@pytest.fixture(scope="module")
def model(served: tuple[str, str]) -> PreTrainedModel:
    return load_model(served[1], dtype=torch.float32, device="cpu")


@pytest.fixture
def renderer(served: tuple[str, str]) -> Renderer:
    tokenizer = load_tokenizer(served[1])
    return Renderer(tokenizer, processor=load_processor(served[1], tokenizer))


def user(*parts: Any) -> Message:
    content: Any = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": content}


def picture(seed: int, width: int = 24, height: int = 24) -> Any:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return image_part(PIL.Image.fromarray(values))


async def play(
    engine: VLLMEngine, renderer: Renderer, name: str, observations: list[Message], tokens: int = 16
) -> Trajectory:
    policy = TokenPolicy(engine, renderer, tokens, 500, SamplingParams(1, TEMPERATURE))
    trajectory = Trajectory(name, "g", "e", "k", 0)
    for observation in observations:
        assert policy.read(trajectory, [observation], [], tools_changed=False)
        await policy.act(trajectory, [])
    return trajectory


def difference(model: PreTrainedModel, trajectory: Trajectory, *, version: int = 0) -> float:
    """The largest |server - trainer| of the tokens that this version sampled, in nats."""
    (sample,) = samples_of(trajectory)
    with torch.no_grad():
        logprobs, _ = sample_logprobs(model, pack([sample], [0]), temperature=TEMPERATURE)
    sampled = sample.loss_mask == 1
    told = torch.from_numpy(sample.rollout_logprobs[sampled])
    of_version = torch.from_numpy(sample.policy_versions[sampled] == version)
    assert of_version.any()
    return float((logprobs - told)[of_version].abs().max())


DIALOGUES = {
    "two in turns": [user("Here ", picture(1), "?"), user("And ", picture(2, 40, 16), " here?")],
    "two at once": [user(picture(1), " and ", picture(3, 16, 32), " or ", picture(1), "?")],
    "after a text": [user("Which colour?"), user(picture(2, 40, 16))],
}


async def test_sampled_tokens_have_the_trainers_logprobs(served, model, renderer):
    engine = VLLMEngine([served[0]])
    try:
        played = await asyncio.gather(
            *(play(engine, renderer, name, shown) for name, shown in DIALOGUES.items())
        )
    finally:
        await engine.aclose()
    assert [len(t.branches[0].images) for t in played] == [2, 3, 1]
    for trajectory in played:
        assert difference(model, trajectory) < TOLERANCE, trajectory.trajectory_id
        images = trajectory.branches[0].images
        blind = {"pixel_values": -images[0].pixels["pixel_values"]}
        images[0] = replace(images[0], sha256="f" * 64, pixels=images[0].pixels | blind)
        assert difference(model, trajectory) > 10 * TOLERANCE, "the picture does not matter"


def test_a_marker_that_the_policy_reads_or_samples_is_a_word(served, model, renderer):
    async def go() -> Trajectory:
        engine = VLLMEngine([served[0]])
        policy = TokenPolicy(engine, renderer, 4, 500, SamplingParams(1, TEMPERATURE))
        trajectory = Trajectory("marker", "g", "e", "k", 0)
        marker = renderer.processor.marker_id
        try:
            policy.read(trajectory, [user("Here ", picture(1), "?")], [], tools_changed=False)
            row = trajectory.branches[0]
            row.append_context([marker, marker], 0)
            await policy.act(trajectory, [])
            return trajectory
        finally:
            await engine.aclose()

    assert difference(model, asyncio.run(go())) < TOLERANCE


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_new_weights_in_the_middle_of_sampling(served, renderer, tmp_path, tower):
    """Also the tower's, of which the server remembers what it computed of the same picture."""
    old, new = (load_model(served[1], dtype=torch.float32, device="cpu") for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if tower == "trained" or "visual" not in name:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    version = {"frozen": 1, "trained": 3}[tower]
    sync = ServerWeightSync(
        [served[0]],
        transfer=FileTransfer(tmp_path / "weights"),
        probe_ids=list(range(5, 69)),
        temperature=TEMPERATURE,
        tolerance=1e-3,
        timeout_s=120.0,
    )
    shown = [user("Here ", picture(1), "?")]

    async def go() -> list[Trajectory]:
        engine = VLLMEngine([served[0]])
        engine.policy_version = version - 1
        played: list[Trajectory] = []
        warm, pushed = asyncio.Event(), asyncio.Event()

        async def keep_playing(number: int) -> None:
            while not pushed.is_set():
                name = f"long{number}-{len(played)}"
                played.append(await play(engine, renderer, name, shown, 400))
                warm.set()

        try:
            await sync.push(old, version - 1)  # a server names its first weights with a word
            async with asyncio.TaskGroup() as players:
                for number in range(4):
                    players.create_task(keep_playing(number))
                await warm.wait()
                await sync.push(new, version)
                pushed.set()
            engine.policy_version = version
            return [*played, await play(engine, renderer, "after", shown)]
        finally:
            await engine.aclose()
            await sync.aclose()

    *crossed, after = asyncio.run(go())
    assert difference(new, after, version=version) < TOLERANCE
    assert difference(old, after, version=version) > 10 * TOLERANCE
    for trajectory in crossed:
        versions = trajectory.branches[0].policy_versions
        for number, model in ((version - 1, old), (version, new)):
            if number in versions:
                assert difference(model, trajectory, version=number) < TOLERANCE
    assert any({version - 1, version} <= set(t.branches[0].policy_versions) for t in crossed)
