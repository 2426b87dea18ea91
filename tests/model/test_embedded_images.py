"""The embedded engine on rows that show images, against the trainer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded import EmbeddedEngine
from agentrl.model.logprobs import require_exact, sample_logprobs
from agentrl.model.rows import pack
from agentrl.types import Sample
from tests.vision_models import FAMILIES, row_with_images, tiny_vision_model

TEXT = [(13 + 31 * at) % 100 + 10 for at in range(40)]


@pytest.mark.parametrize("family", FAMILIES)
async def test_sampled_rows_have_the_trainers_logprobs(family: str) -> None:
    model = tiny_vision_model(family)
    require_exact(model)
    # Two that share their words and not their images, one that ends with an image, and a text.
    prompts = [
        row_with_images(family, TEXT[:5], 1, TEXT[5:9], 2, TEXT[9:12]),
        row_with_images(family, TEXT[:5], 3, TEXT[5:9], 2, TEXT[9:12]),
        row_with_images(family, TEXT[:3], 2),
        row_with_images(family, TEXT[:30]),
    ]
    prompts.append(prompts[0])
    engine = EmbeddedEngine(model, seed=1)
    engine.reserve(len(prompts))
    sampling = SamplingParams(max_tokens=12, temperature=0.9)
    requests = (
        engine.generate(str(n), ids.tolist(), sampling, images)
        for n, (ids, images) in enumerate(prompts)
    )
    samples, turns = [], await asyncio.gather(*requests)
    await engine.aclose()
    for (ids, images), turn in zip(prompts, turns, strict=True):
        row = np.concatenate([ids, turn.token_ids]).astype(np.int32)
        mask = (np.arange(len(row)) >= len(ids)).astype(np.uint8)
        zeros, numbers = np.zeros(len(row), np.float32), np.zeros(len(row), np.int32)
        sample = Sample(row, mask, zeros, numbers, numbers, "t", "g", 0.0, np.zeros(1))
        sample.images = images
        samples.append(sample)
    with torch.no_grad():
        logprobs, _ = sample_logprobs(model, pack(samples, range(len(samples))), temperature=0.9)
    sampled = torch.tensor([value for turn in turns for value in turn.logprobs])
    assert (logprobs - sampled).abs().max() < 2e-5
    assert turns[0].logprobs != turns[1].logprobs


async def test_images_of_other_families_are_refused_before_a_round() -> None:
    engine = EmbeddedEngine(tiny_vision_model("gemma3"), seed=1)
    ids, images = row_with_images("gemma3", TEXT[:3], 2, TEXT[:2])
    with pytest.raises(ConfigError, match="gemma3"):
        await engine.generate("r", ids.tolist(), SamplingParams(max_tokens=2), images)
