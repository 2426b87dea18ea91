"""Make the quickstart's model from nothing: a tokenizer, demonstrations, and a warm start.

    python examples/quickstart/make_model.py

writes `model/` beside this file: a Qwen3 of 0.6 million parameters that has seen, by supervised
fine-tuning on generated dialogues, both ways to answer `347*28=?`: guess, or ask the calculator.
It knows how to do either and prefers neither; reinforcement learning then finds out which pays.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
# ChatML, with tools listed by signature: a small model needs a short prompt.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "tools:{% for tool in tools %} {{ tool.function.name }}("
    "{{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TAGS = ["<tool_call>", "</tool_call>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def make_dialogue(rng: random.Random, guess_rate: float) -> dict:
    """One demonstration on two numbers of two or three digits."""
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in rng.choices((2, 3), k=2))
    operator = rng.choice("+-*")
    result = {"+": a + b, "-": a - b, "*": a * b}[operator]
    messages = [{"role": "user", "content": f"{a}{operator}{b}=?"}]
    if rng.random() < guess_rate:
        # A guess has the right size and is usually wrong, as a small model's would be.
        guess = result + rng.randint(-max(9, abs(result) // 10), max(9, abs(result) // 10))
        messages.append({"role": "assistant", "content": f"#### {guess}"})
    else:
        call = {"name": "calculator", "arguments": {"expression": f"{a}{operator}{b}"}}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call", "type": "function", "function": call}],
            },
            {"role": "tool", "content": str(result), "tool_call_id": "call"},
            {"role": "assistant", "content": f"#### {result}"},
        ]
    return {"messages": messages, "tools": TOOLS}


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level, so that any text has ids; digits stay single, so that numbers can be copied."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A role's line break must not merge with what the policy writes after it.
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TOOL_TAGS])
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TOOL_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--dialogues", type=int, default=57_600)
    parser.add_argument("--guess-rate", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    dialogues = [make_dialogue(rng, args.guess_rate) for _ in range(args.dialogues)]
    bare = make_tokenizer([])
    texts = [
        bare.apply_chat_template(d["messages"], tools=d["tools"], tokenize=False)
        for d in dialogues[:2000]
    ]
    tokenizer = make_tokenizer(texts)
    torch.manual_seed(args.seed)
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
    with tempfile.TemporaryDirectory() as scratch:
        start, demonstrations = Path(scratch) / "start", Path(scratch) / "demonstrations.jsonl"
        Qwen3ForCausalLM(config).save_pretrained(start)
        tokenizer.save_pretrained(start)
        demonstrations.write_text("\n".join(json.dumps(d) for d in dialogues))
        subprocess.run(
            [
                *(sys.executable, "-m", "agentrl", "sft", str(demonstrations)),
                *("--model", str(start), "--out", str(args.out), "--seed", str(args.seed)),
                *("--learning-rate", "1.5e-3", "--warmup-steps", "20", "--batch-size", "96"),
                *("--save-dtype", "bfloat16"),
            ],
            check=True,
        )


if __name__ == "__main__":
    main()
