"""Make the example's vision-language model from nothing.

    python examples/images/make_model.py

writes `model/` beside this file: a Qwen2.5-VL of 0.7 million parameters, whose vision tower is
random and stays so. Supervised fine-tuning on generated dialogues has shown it how an answer and a
call of `zoom` are written. Which colour was said was drawn at random there. Three quarters of the
calls looked at the quarter with the square, the others at any other: so it finds the square more
often than not, and says its colour by chance.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from shapes import COLOURS, Colour, Zoom, quarter  # noqa: E402
from tiny_model import Language, Lesson, make_model  # noqa: E402

from agentrl.env.tools import tools_of  # noqa: E402
from agentrl.model.load import stills_only  # noqa: E402

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
# ChatML, with tools listed by signature: a small model needs a short prompt.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "tools:{% for tool in tools %} {{ tool.function.name }}("
    "{{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + MARKER + "{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
LANGUAGE = Language(CHAT_TEMPLATE, ["<tool_call>", "</tool_call>", *VISION], vocab_size=440)


def make_dialogue(rng: random.Random) -> dict:
    """One demonstration of how an answer is written: the colour is right by chance, and three
    quarters of the calls look at the right place."""
    said = {"role": "assistant", "content": rng.choice(list(COLOURS))}
    index = rng.randrange(10**6)
    if rng.random() < 0.25:
        return {"messages": [*Colour().get("demonstrations", index).prompt, said]}
    task = Zoom().get("demonstrations", index)
    quarters = [(0, 0), (1, 0), (0, 1), (1, 1)]
    right = task.reference["x"], task.reference["y"]
    quarters.remove(right)
    x, y = right if rng.random() < 0.75 else rng.choice(quarters)
    call = {"name": "zoom", "arguments": {"x": x, "y": y}}
    called = [{"id": "call", "type": "function", "function": call}]
    return {
        "messages": [
            *task.prompt,
            {"role": "assistant", "content": "", "tool_calls": called},
            {"role": "tool", "content": quarter(task.reference, x, y), "tool_call_id": "call"},
            said,
        ],
        "tools": [each.spec for each in tools_of(Zoom).values()],
    }


def save_new(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a model with random weights, and its processor."""
    tower = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=2, patch_size=4)
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        # Neighbouring pieces of a small picture must differ clearly in their angles.
        rope_parameters=dict(rope_type="default", rope_theta=3.0, mrope_section=[2, 7, 7]),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    special = dict(zip(NAMES, tokenizer.convert_tokens_to_ids(VISION), strict=True))
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config=tower | dict(out_hidden_size=128, fullatt_block_indexes=[0, 1]),
        tie_word_embeddings=True,
        **special,
    )
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():  # a tower whose output follows what it sees, though nobody trains it
        for parameter in model.model.visual.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(out)
    size = dict(shortest_edge=64, longest_edge=32 * 32)  # pixels of an image; 64 are one token
    images = Qwen2VLImageProcessorPil(size=size, patch_size=4)
    stills_only(config)(images, tokenizer).save_pretrained(out)


NAMES = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--dialogues", type=int, default=16_800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    dialogues = [make_dialogue(rng) for _ in range(args.dialogues)]
    lesson = Lesson(dialogues, 1.5e-3)
    make_model([lesson], LANGUAGE, args.out, seed=args.seed, save_new=save_new)


if __name__ == "__main__":
    main()
