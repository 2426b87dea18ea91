"""Episodes that show images: rendered, sampled by the embedded engine, and trained."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import pytest
import torch

from agentrl.config import RunConfig
from agentrl.env.protocol import TaskPreview
from agentrl.errors import ConfigError, InferenceError, TrainingError
from agentrl.images import ImageStore, content_images, image_part
from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded import EmbeddedEngine
from agentrl.inference.vllm_images import features_of
from agentrl.model.load import load_model, load_processor, load_tokenizer, save_model, stills_only
from agentrl.model.logprobs import sample_logprobs
from agentrl.model.rows import pack
from agentrl.model.text.processor import pixels_sha256, restore_pixels
from agentrl.model.text.renderer import Renderer
from agentrl.rollout import TrajectoryLog, read_trajectories
from agentrl.rollout.policy import TokenPolicy, _before_other_images
from agentrl.rollout.setup import require_shown_images
from agentrl.train.sft import Dialogue, dialogue_to_sample, sft
from agentrl.train.state import _config_files
from agentrl.train.teacher import TeacherServer
from agentrl.types import Message, ShownImage, StopReason, Trajectory, samples_of
from tests.rollout_scripted import NumberedEngine
from tests.tokenizers_for_tests import make_tokenizer
from tests.vision_models import WITH_PROCESSORS, save_with_processor


def picture(seed: int, width: int = 20, height: int = 30) -> Any:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return image_part(PIL.Image.fromarray(values))


def text(said: str) -> Any:
    return {"type": "text", "text": said}


def user(*parts: Any) -> Message:
    return {"role": "user", "content": list(parts)}  # pyright: ignore[reportReturnType]


def observations() -> list[Message]:
    """Three turns with images in the second."""
    return [
        {"role": "user", "content": "Which colour <|image_pad|><image>?"},
        user(text("Here "), picture(1), text(" and "), picture(2, 40, 16), text("?")),
        user(text("And now?")),
    ]


@pytest.fixture(scope="module", params=WITH_PROCESSORS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_with_processor(request.param, tmp_path_factory.mktemp(request.param))


def make_renderer(path: str) -> Renderer:
    tokenizer = load_tokenizer(path)
    return Renderer(tokenizer, processor=load_processor(path, tokenizer))


def play(policy: TokenPolicy) -> Trajectory:
    trajectory = Trajectory("t", "g", "e", "k", 0)

    async def turns() -> None:
        for observation in observations():
            assert policy.read(trajectory, [observation], [], tools_changed=False)
            await policy.act(trajectory, [])

    asyncio.run(turns())
    return trajectory


def played(renderer: Renderer) -> Trajectory:
    engine: Any = NumberedEngine(renderer)
    return play(TokenPolicy(engine, renderer, 64, 1000))


def test_rows_are_what_the_processor_makes_of_the_whole_dialogue(folder: str) -> None:
    renderer = make_renderer(folder)
    assert renderer.history == "append_only"
    trajectory = played(renderer)
    (row,) = trajectory.branches

    model = load_model(folder, dtype=torch.float32, device="cpu")
    processor = stills_only(model.config).from_pretrained(folder)
    shown: list[Any] = []
    for message in row.messages:
        content: Any = message["content"]
        parts = [text(content.replace("<", "&"))] if isinstance(content, str) else content
        parts = [p if p["type"] == "text" else {"type": "image"} for p in parts]
        shown.append({"role": message["role"], "content": parts})
    whole = processor.tokenizer.apply_chat_template(shown, tokenize=False)
    images = [image for m in row.messages for image in content_images(m["content"])]
    opened = [PIL.Image.open(io.BytesIO(image.data)) for image in images]
    made = processor(text=whole, images=opened, return_tensors="np", add_special_tokens=False)
    end = len(row)
    # The user wrote the names of markers, which are texts.
    first = row.token_ids.index(renderer.close_token_id)
    theirs = made["input_ids"][0].tolist()
    their_first = theirs.index(renderer.close_token_id)
    assert row.token_ids[first:end] == theirs[their_first : their_first + end - first]
    marker = model.config.image_token_id
    assert marker not in row.token_ids[:first]
    assert [image.sha256 for image in row.images] == [image.sha256 for image in images]
    pixels = [image.pixels["pixel_values"] for image in row.images]
    axis = 1 if "pixel_attention_mask" in row.images[0].pixels else 0
    assert np.array_equal(np.concatenate(pixels, axis), made["pixel_values"])
    for image in row.images:
        assert not any(row.loss_mask[image.start : image.end])
    places = [at for at, each in enumerate(row.token_ids) if each == marker]
    assert all(any(i.start <= at < i.end for i in row.images) for at in places)


def test_sampled_rows_are_trained_as_they_were_sampled(folder: str) -> None:
    renderer = make_renderer(folder)
    model = load_model(folder, dtype=torch.float32, device="cpu")
    sampling = SamplingParams(1, temperature=1.0)
    policy = TokenPolicy(EmbeddedEngine(model, seed=3), renderer, 12, 400, sampling)
    trajectory = play(policy)
    (row,) = trajectory.branches
    (sample,) = samples_of(trajectory)
    assert sample.token_ids.tolist() == row.token_ids
    assert [image.sha256 for image in sample.images] == [image.sha256 for image in row.images]
    with torch.no_grad():
        logprobs, _ = sample_logprobs(model, pack([sample], [0]), temperature=1.0)
    sampled = torch.from_numpy(sample.rollout_logprobs[sample.loss_mask == 1])
    assert len(trajectory.turns) == 3
    assert (logprobs - sampled).abs().max() < 2e-5


def test_a_demonstration_with_images_is_what_a_rollout_of_it_would_be(
    folder: str, tmp_path: Path
) -> None:
    renderer = make_renderer(folder)
    (row,) = played(renderer).branches
    sample = dialogue_to_sample(renderer, Dialogue(row.messages, []), "d")
    assert sample.token_ids.tolist() == row.token_ids
    assert sample.loss_mask.tolist() == row.loss_mask
    places = [(image.sha256, image.start, image.end) for image in sample.images]
    assert places == [(image.sha256, image.start, image.end) for image in row.images]

    demonstrations = tmp_path / "demonstrations.jsonl"
    demonstrations.write_bytes(msgspec.json.encode({"messages": row.messages}))
    out = tmp_path / "tuned"
    learned = sft(
        demonstrations, model_path=folder, out=out, num_epochs=3, learning_rate=1e-2, warmup_steps=0
    )
    assert learned.last_loss < learned.first_loss
    assert load_processor(str(out), load_tokenizer(str(out))) is not None


def test_pixels_have_a_hash_of_what_the_tower_reads(folder: str) -> None:
    renderer = make_renderer(folder)
    one, other = (played(renderer).branches[0] for _ in range(2))
    hashes = [image.pixels_sha256 for image in one.images]
    assert hashes == [pixels_sha256(image.pixels) for image in other.images]
    assert len(set(hashes)) == 2


def test_what_cannot_be_shown_is_refused_in_words(folder: str) -> None:
    renderer = make_renderer(folder)
    blind: Any = NumberedEngine(renderer, takes_images=False)
    with pytest.raises(InferenceError, match=r"inference\.backend = 'embedded'"):
        play(TokenPolicy(blind, renderer, 64, 1000))
    with pytest.raises(ConfigError, match="takes none"):
        Renderer(make_tokenizer()).prompt([user(picture(1))], [])


@pytest.mark.parametrize("backend", ["embedded", "vllm", "sglang"])
@pytest.mark.parametrize("shows", [True, False])
def test_a_run_whose_servers_are_not_sent_its_images_is_refused_at_its_start(
    folder: str, backend: str, shows: bool
) -> None:
    prompt = [user(text("Which?"), *([picture(1)] if shows else []))]

    async def tasks(*_: Any, **__: Any) -> list[TaskPreview]:
        return [TaskPreview(0, "task", prompt)]

    env: Any = SimpleNamespace(tasks=tasks)
    config = RunConfig.model_validate(
        {"env": {"id": "e"}, "model": {"path": folder}, "inference": {"backend": backend}}
    )
    renderer = make_renderer(folder)
    family = renderer.processor.family
    sent = backend == "embedded" or (backend == "vllm" and family in ("qwen2_5_vl", "qwen3_vl"))
    if sent or not shows:
        asyncio.run(require_shown_images(env, config, renderer))
        return
    with pytest.raises(ConfigError, match=f"not of {family}.*backend = 'embedded'"):
        asyncio.run(require_shown_images(env, config, renderer))


def test_vllm_is_sent_placeholders_and_pixels_and_nothing_else(folder: str) -> None:
    renderer = make_renderer(folder)
    (row,) = played(renderer).branches
    if "image_grid_thw" not in row.images[0].pixels:
        with pytest.raises(InferenceError, match=r"qwen3_vl.*pixel_attention_mask"):
            features_of(row.images)
        return
    marker = load_model(folder, dtype=torch.float32, device="cpu").config.image_token_id
    features = features_of(row.images)
    for image, place in zip(row.images, features.mm_placeholders["image"], strict=True):
        ids = row.token_ids[place["offset"] : place["offset"] + place["length"]]
        assert set(ids) == {marker} and len(ids) == image.end - image.start
    assert features.mm_hashes["image"] == [image.pixels_sha256 for image in row.images]


def test_a_saved_model_keeps_its_processor(folder: str, tmp_path: Path) -> None:
    model = load_model(folder, dtype=torch.float32, device="cpu")
    save_model(model, load_tokenizer(folder), tmp_path / "saved", "float32")
    image = content_images([picture(1)])[0]
    for path in (folder, str(tmp_path / "saved")):
        processor = load_processor(path, load_tokenizer(path))
        ids, pixels, _ = processor.read(image)
        assert ids.count(model.config.image_token_id) > 1
        assert {"pixel_values"} < set(pixels)
    assert "processor_config.json" in _config_files(model)


def test_what_is_saved_states_the_dtype_of_its_tensors_in_every_part(
    folder: str, tmp_path: Path
) -> None:
    model = load_model(folder, dtype=torch.float32, device="cpu")
    save_model(model, load_tokenizer(folder), tmp_path / "saved", "bfloat16")
    saved = (tmp_path / "saved/config.json").read_text()
    for text in (saved, _config_files(model)["config.json"]):
        assert set(re.findall(r'"dtype": "(\w+)"', text)) == {"bfloat16"}


def test_a_row_that_was_read_back_is_trained_with_the_same_pixels_or_not_at_all(
    folder: str, tmp_path: Path
) -> None:
    sent = played(make_renderer(folder))
    sent.stop_reason = StopReason.TERMINATED
    TrajectoryLog(tmp_path).append(1, [sent])
    ((_, read),) = read_trajectories(tmp_path, images=True)
    (sample,), (before,) = samples_of(read), samples_of(sent)
    assert read.messages == sent.messages
    model = load_model(folder, dtype=torch.float32, device="cpu")
    with pytest.raises(TrainingError, match="whose pixels the log does not have"):
        sample_logprobs(model, pack([sample], [0]), temperature=1.0)
    with pytest.raises(ConfigError, match=r"teacher\.path"):
        TeacherServer("http://127.0.0.1:9", model="teacher").logprobs([before])

    store = ImageStore(tmp_path / "images")
    restore_pixels([read], store, make_renderer(folder).processor)
    for mine, its in zip(read.branches[0].images, sent.branches[0].images, strict=True):
        assert (mine.sha256, mine.start, mine.end) == (its.sha256, its.start, its.end)
        assert all(np.array_equal(mine.pixels[name], its.pixels[name]) for name in its.pixels)
    with pytest.raises(ConfigError, match="takes none"):
        restore_pixels([read], store, None)
    # A processor of another mean makes as many tokens, and other pixels.
    other = Path(shutil.copytree(folder, tmp_path / "other")) / "processor_config.json"
    settings = json.loads(other.read_text())
    settings["image_processor"]["image_mean"] = [0.1, 0.1, 0.1]
    other.write_text(json.dumps(settings))
    processor = make_renderer(str(other.parent)).processor
    theirs = processor.read(store.get(read.branches[0].images[0].sha256))[2]
    ours = sent.branches[0].images[0].pixels_sha256
    with pytest.raises(ConfigError, match=f"{ours}.*{theirs}"):
        restore_pixels([read], store, processor)


def test_a_fork_begins_before_images_that_differ() -> None:
    def shown(*starts: tuple[int, str]) -> list[ShownImage]:
        return [ShownImage(sha256, start, start + 4, {}) for start, sha256 in starts]

    old = shown((2, "a"), (8, "b"))
    assert _before_other_images(old, old, 14) == 14
    assert _before_other_images(old, shown((2, "a"), (8, "c")), 14) == 8
    assert _before_other_images(old, shown((2, "c"), (8, "b")), 14) == 2
    # One less: the tokens agree up to the middle of the second, as placeholders are alike.
    assert _before_other_images(old, shown((2, "a")), 10) == 8
    assert _before_other_images(old, old, 9) == 8
    assert _before_other_images(old, shown((2, "a"), (7, "b")), 7) == 7
    assert _before_other_images(old, [], 1) == 1
