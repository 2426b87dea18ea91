"""Tiny random vision-language models, and images as their processors make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.model.load import stills_only
from agentrl.types import ShownImage
from tests.tokenizers_for_tests import make_tokenizer

IMAGE_TOKEN = 7
_TEXT = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MROPE = dict(rope_type="default", rope_theta=10000.0)
_TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
_QWEN_TOWER = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4)

# The configuration of each family, and of its text model and tower.
_FAMILIES: dict[str, tuple[dict, dict, dict]] = {
    "qwen2_5_vl": (
        {},
        _TEXT | dict(rope_parameters=_MROPE | dict(mrope_section=[1, 1, 2])),
        _QWEN_TOWER | dict(out_hidden_size=32, fullatt_block_indexes=[1], window_size=16),
    ),
    "qwen3_vl": (
        {},
        _TEXT
        | dict(rope_parameters=_MROPE | dict(mrope_section=[1, 1, 2], mrope_interleaved=True)),
        _QWEN_TOWER
        | dict(out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
    ),
    "idefics3": ({}, _TEXT | dict(model_type="llama"), _TOWER | dict(image_size=16, patch_size=4)),
    "smolvlm": ({}, _TEXT | dict(model_type="llama"), _TOWER | dict(image_size=16, patch_size=4)),
    "llava_next": (
        dict(image_grid_pinpoints=[[16, 32], [32, 16]]),
        _TEXT | dict(model_type="llama"),
        _TOWER | dict(model_type="clip_vision_model", image_size=16, patch_size=4),
    ),
    "internvl": (
        {},
        _TEXT | dict(model_type="qwen2"),
        _TOWER | dict(image_size=[16, 16], patch_size=[4, 4]),
    ),
    "mistral3": (
        dict(spatial_merge_size=2),
        _TEXT | dict(model_type="mistral", sliding_window=None),
        _TOWER | dict(model_type="pixtral", image_size=32, patch_size=4, head_dim=16),
    ),
    "gemma3": (
        dict(mm_tokens_per_image=4),
        _TEXT | dict(sliding_window=8),
        _TOWER | dict(image_size=16, patch_size=4),
    ),
}
FAMILIES = [name for name in _FAMILIES if name != "gemma3"]


def tiny_vision_model(
    family: str, *, image_token: int = IMAGE_TOKEN, vocab_size: int = 128
) -> PreTrainedModel:
    """With random weights, large enough for what an image shows to matter."""
    torch.manual_seed(0)
    whole, text, tower = _FAMILIES[family]
    text = text | dict(vocab_size=vocab_size)
    name = "image_token_index" if family in ("llava_next", "mistral3") else "image_token_id"
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=tower, **{name: image_token}, **whole
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.5 if parameter.shape[0] == vocab_size else 0.1)
            elif "norm" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As SmolVLM's: it writes nothing of a content that is a text.
_IDEFICS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}:"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
_QWEN_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_IDEFICS_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>"] + [
    f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)
]
WITH_PROCESSORS = ["qwen2_5_vl", "qwen3_vl", "idefics3"]


def save_with_processor(family: str, directory: Path) -> str:
    """A directory with a tiny model, its tokenizer and its processor."""
    qwen = family.startswith("qwen")
    own = _QWEN_TOKENS if qwen else _IDEFICS_TOKENS
    tokenizer = make_tokenizer(
        _QWEN_TEMPLATE if qwen else _IDEFICS_TEMPLATE,
        special=["<|im_end|>", "<|im_start|>", "<|endoftext|>", *own],
    )
    if qwen:
        size = dict(shortest_edge=64, longest_edge=1024)
        images: Any = Qwen2VLImageProcessorPil(size=size, patch_size=4)
    else:
        images = Idefics3ImageProcessorPil(
            size=dict(longest_edge=32), max_image_size=dict(longest_edge=16)
        )
    options: dict[str, Any] = {} if qwen else dict(image_seq_len=4)
    processor = stills_only(AutoConfig.for_model(family))(images, tokenizer, **options)
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    image_token: Any = tokenizer.convert_tokens_to_ids(processor.image_token)
    model = tiny_vision_model(family, image_token=image_token, vocab_size=len(tokenizer))
    model.save_pretrained(directory)
    return str(directory)


def pixels(family: str, seed: int) -> tuple[dict[str, np.ndarray], int]:
    """An image of random pixels for the family's tower, and how many placeholders it takes."""
    draw = np.random.default_rng(seed).standard_normal
    if family.startswith("qwen"):
        height, width = 4 + 2 * (seed % 2), 4
        values = draw((height * width, 3 * 2 * 4 * 4), np.float32)
        grid = np.array([[1, height, width]])
        return dict(pixel_values=values, image_grid_thw=grid), height * width // 4
    if family in ("idefics3", "smolvlm"):
        tiles = 1 + seed % 2
        values = draw((1, tiles, 3, 16, 16), np.float32)
        mask = np.ones((1, tiles, 16, 16), np.int64)
        mask[:, -1, 8:] = 0  # the last tile is padded
        return dict(pixel_values=values, pixel_attention_mask=mask), 4 * tiles
    if family == "llava_next":
        sizes = np.array([[16, 32] if seed % 2 else [28, 14]])
        # The first tile is the whole image; every line of the others ends with a new line.
        return dict(pixel_values=draw((1, 3, 3, 16, 16), np.float32), image_sizes=sizes), (
            16 + (4 * 9 if seed % 2 else 8 * 5)
        )
    if family == "mistral3":
        height, width = 16 + 8 * (seed % 2), 16
        sizes = np.array([[height, width]])
        values = draw((1, 3, height, width), np.float32)
        return dict(pixel_values=values, image_sizes=sizes), height * width // 64
    return dict(pixel_values=draw((1 + seed % 2, 3, 16, 16), np.float32)), 4 * (1 + seed % 2)


def row_with_images(family: str, *parts: int | list[int]) -> tuple[np.ndarray, list[ShownImage]]:
    """Tokens and images of a row.

    Args:
        parts: ids of text, or the seed of an image.
    """
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        tensors, number = pixels(family, part)
        images.append(ShownImage(f"{part:064x}"[::-1], len(ids), len(ids) + number, tensors))
        ids += [IMAGE_TOKEN] * number
    return np.array(ids, np.int32), images
