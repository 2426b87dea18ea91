"""Packed rows of vision-language models against each row alone through the family's own forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.model.load import freeze_all_but_text, train_tower
from agentrl.model.logprobs import require_exact, sample_logprobs, shares_prefixes
from agentrl.model.rows import pack
from agentrl.types import Sample
from tests.vision_models import FAMILIES, IMAGE_TOKEN, row_with_images, tiny_vision_model

TEXT = [(13 + 31 * at) % 100 + 10 for at in range(60)]


def rows_of(family: str) -> list[Sample]:
    """Three turns with images in the second, a fork that shows another image at the same place, a
    row of text, and one in which the policy sampled the placeholder."""
    begin = TEXT[:20]
    parts = [
        (begin, 1, TEXT[20:26], 2, TEXT[26:33], 4, TEXT[33:38]),
        (begin, 1, TEXT[20:26], 2, TEXT[30:33], 2, TEXT[40:45]),
        (begin, 3, TEXT[20:26], 2, TEXT[26:30]),
        (TEXT[:14],),
        (TEXT[3:9], 2, [50, IMAGE_TOKEN, IMAGE_TOKEN, 51], TEXT[:4]),
    ]
    samples = []
    for each in parts:
        ids, images = row_with_images(family, *each)
        mask = np.ones(len(ids), np.uint8)
        mask[0] = 0
        for image in images:
            mask[image.start : image.end] = 0
        zeros = np.zeros(len(ids), np.float32)
        versions = np.zeros(len(ids), np.int32)
        sample = Sample(ids, mask, zeros, versions, versions, "t", "g", 0.0, np.zeros(1))
        sample.images = images
        samples.append(sample)
    return samples


def own_logits(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Logits of a row by the forward pass of the family on all of it."""
    ids = torch.from_numpy(sample.token_ids)[None].long()
    arguments: dict = {}
    names = sample.images[0].pixels if sample.images else {}
    for name in names:
        values = [torch.from_numpy(image.pixels[name]) for image in sample.images]
        if "pixel_attention_mask" in names:  # tiles of a row's images are in its second dimension
            arguments[name] = torch.cat(values, dim=1)
        elif name == "pixel_values" and "image_sizes" in names and values[0].ndim == 4:
            height, width = (max(v.shape[at] for v in values) for at in (2, 3))
            padded = [
                torch.nn.functional.pad(v, (0, width - v.shape[3], 0, height - v.shape[2]))
                for v in values
            ]
            arguments[name] = torch.cat(padded)
        else:
            arguments[name] = torch.cat(values)
    if "image_grid_thw" in names:
        shown = torch.zeros_like(ids, dtype=torch.int)
        for image in sample.images:
            shown[0, image.start : image.end] = 1
        arguments["mm_token_type_ids"] = shown
    return model(input_ids=ids, use_cache=False, **arguments).logits[0].float()


def own_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    ids = torch.from_numpy(sample.token_ids).long()
    at = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    return own_logits(model, sample).log_softmax(-1)[at - 1, ids[at]]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_with_images_are_exact(family: str) -> None:
    samples = rows_of(family)
    # The family's own forward refuses a placeholder that is no image.
    comparable = samples[:4]
    alone = tiny_vision_model(family)
    expected = torch.cat([own_logprobs(alone, sample) for sample in comparable])
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()

    model = tiny_vision_model(family)
    require_exact(model)
    for share in {shares_prefixes(model), False}:
        model.zero_grad()
        micro = pack(comparable, range(4), share=share)
        logprobs, _ = sample_logprobs(model, micro, temperature=1.0)
        if share:
            assert micro.num_tokens < sum(map(len, comparable))
        assert (logprobs - expected).abs().max() < 2e-5
        (logprobs * weights).sum().backward()
        theirs = dict(alone.named_parameters())
        for name, parameter in model.named_parameters():
            if (own := theirs[name].grad) is not None:
                assert parameter.grad is not None, name
                scale = max(1.0, own.abs().max().item())
                assert (parameter.grad - own).abs().max() < 2e-5 * scale, name


def test_what_an_image_shows_matters_and_is_computed_once(monkeypatch) -> None:
    model = tiny_vision_model("qwen3_vl")
    require_exact(model)
    samples = rows_of("qwen3_vl")[:2]
    before, _ = sample_logprobs(model, pack(samples, [0, 1], share=True), temperature=1.0)
    computed, compute = [], model.model.get_image_features

    def counted(**arguments):
        computed.append(arguments["image_grid_thw"].tolist())
        return compute(**arguments)

    monkeypatch.setattr(model.model, "get_image_features", counted)
    for sample in samples:
        sample.images[0].pixels["pixel_values"] = -sample.images[0].pixels["pixel_values"]
    after, _ = sample_logprobs(model, pack(samples, [0, 1], share=True), temperature=1.0)
    assert (after - before).abs().max() > 0.01
    assert len(computed) == 3  # of five places


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_a_sampled_placeholder_is_a_word(family: str) -> None:
    model = tiny_vision_model(family)
    require_exact(model)
    sample = rows_of(family)[4]
    logprobs, _ = sample_logprobs(model, pack([sample], [0]), temperature=1.0)
    with torch.no_grad():  # another word with the same embedding, which no family looks for
        weight = model.get_input_embeddings().get_parameter("weight")
        weight[60] = weight[IMAGE_TOKEN]
    image, word = sample.images[0], sample.token_ids.copy()
    word[(word == IMAGE_TOKEN) & (np.arange(len(word)) >= image.end)] = 60
    ids = torch.from_numpy(sample.token_ids).long()
    sample.token_ids = word
    at = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    expected = own_logits(model, sample).log_softmax(-1)[at - 1, ids[at]]
    assert (logprobs - expected).abs().max() < 2e-5


def test_the_tower_is_frozen_unless_a_key_trains_it() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    require_exact(model)
    freeze_all_but_text(model)
    (sample, *_) = rows_of("qwen2_5_vl")
    logprobs, _ = sample_logprobs(model, pack([sample], [0]), temperature=1.0)
    logprobs.sum().backward()
    tower = list(model.model.visual.parameters())
    assert not any(each.requires_grad or each.grad is not None for each in tower)
    train_tower(model)
    logprobs, _ = sample_logprobs(model, pack([sample], [0]), temperature=1.0)
    logprobs.sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in tower)


def test_a_family_that_is_not_exact_on_images_is_refused_in_words() -> None:
    model = tiny_vision_model("gemma3")
    require_exact(model)  # on texts it is
    with pytest.raises(ConfigError, match=r"gemma3.*not known to be exact.*qwen2_5_vl"):
        sample_logprobs(model, pack(rows_of("gemma3"), [0]), temperature=1.0)
