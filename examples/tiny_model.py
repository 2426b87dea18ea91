"""How the examples make their models from nothing: a tokenizer, a Qwen3 of 0.6 million parameters,
and one or more lessons of supervised fine-tuning with `agentrl sft`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(slots=True, frozen=True)
class Language:
    """How the model reads and writes."""

    chat_template: str
    tags: list[str]
    """Texts that are one token each."""
    vocab_size: int
    """Without the tags."""
    isolated: str | None = None
    """Regular expression of what no merge reaches across, besides line breaks and digits."""


@dataclass(slots=True, frozen=True)
class Lesson:
    dialogues: list[dict]
    """`messages` and, where there are any, `tools`."""
    learning_rate: float
    batch_size: int = 96
    """Dialogues per update."""


def make_model(
    lessons: list[Lesson],
    language: Language,
    out: Path,
    *,
    seed: int,
    save_new: Callable[[PreTrainedTokenizerFast, Path], None] | None = None,
) -> None:
    """Teach a new model one lesson after the other and write it to `out`.

    Args:
        save_new: writes the model that has learned nothing, without its tokenizer; a Qwen3 if None.
    """
    bare = make_tokenizer(language, [])
    shown = [dialogue for lesson in lessons for dialogue in lesson.dialogues[:2000]]
    tokenizer = make_tokenizer(
        language,
        [
            str(bare.apply_chat_template(d["messages"], tools=d.get("tools"), tokenize=False))
            for d in shown
        ],
    )
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "start"
        (save_new or save_qwen3)(tokenizer, model)
        tokenizer.save_pretrained(model)
        for number, lesson in enumerate(lessons):
            demonstrations = Path(scratch) / f"lesson_{number}.jsonl"
            write_rows(demonstrations, lesson.dialogues)
            taught = Path(scratch) / f"after_{number}"
            subprocess.run(
                [
                    *(sys.executable, "-m", "agentrl", "sft", str(demonstrations)),
                    *("--model", str(model), "--out", str(taught), "--seed", str(seed)),
                    *("--learning-rate", str(lesson.learning_rate), "--warmup-steps", "20"),
                    *("--batch-size", str(lesson.batch_size), "--save-dtype", "bfloat16"),
                ],
                check=True,
            )
            model = taught
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(model, out)


def save_qwen3(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(out)


def make_tokenizer(language: Language, texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level, so that any text has ids; digits stay single, so that numbers can be copied."""
    tokenizer = Tokenizer(models.BPE())
    # A role's line break must not merge with what the policy writes after it.
    patterns = ["\n"] if language.isolated is None else ["\n", Regex(language.isolated)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(pattern, "isolated") for pattern in patterns),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = [AddedToken(tag, normalized=False) for tag in language.tags]
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(tags)
    trainer = trainers.BpeTrainer(
        vocab_size=language.vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=language.chat_template,
        clean_up_tokenization_spaces=False,
    )


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
