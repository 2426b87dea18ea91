"""One GPU: tokens per second, the share of its peak (MFU), memory, and where the time goes.

    python benchmarks/gpu.py [--model Qwen/Qwen3-1.7B | --layers 28 --hidden 2048 --mlp 6144]
                             [--tokens 16384] [--prompt 2000] [--peak-tflops 989] [--repeat 5]
                             [--compile]

The model has Qwen3's shape and random bfloat16 weights, unless `--model` names one. A batch is 16
groups of 8 trajectories with log-normal lengths and one prompt per group. A step is forward,
backward and AdamW over all of it, for packed rows, for shared prefixes, and with activation
checkpointing; `--compile` measures compiled layers. MFU counts the products of every token that a
sample has, shared or not, once forward and twice backward, attention's included, and the head's at
trained positions only; recomputation counts as nothing. The parts are kernel times of torch's
profiler in one more step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch
from train_step import make_batch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.config import TrainSection
from agentrl.model.attention import ATTENTION_NAME, SHARED_ATTENTION_NAME
from agentrl.model.compile import compile_layers
from agentrl.model.load import set_gradient_checkpointing
from agentrl.model.logprobs import decoder_of, sample_logprobs
from agentrl.model.rows import pack
from agentrl.train.memory import kept_bytes
from agentrl.train.optimizer import Learner
from agentrl.train.update import own_share
from agentrl.types import Sample


class Variant(NamedTuple):
    name: str
    share: bool
    recomputed: bool | float = False


VARIANTS = [
    Variant("packed", share=False),
    Variant("shared", share=True),
    Variant("shared, recompute 50%", share=True, recomputed=0.5),
    Variant("shared, recompute all", share=True, recomputed=True),
]
PARTS = {
    "attention": ("flash", "fmha", "flex"),
    "products": ("gemm", "cutlass", "nvjet", "matmul"),
    "optimizer": ("adam", "multi_tensor"),
    "softmax": ("softmax",),
}


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda()
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).bfloat16()


def flops(model, samples: list[Sample]) -> float:
    """Returns a step's FLOPs: 6 per weight and token, and attention's two products three times."""
    config = model.config.get_text_config()
    head = config.vocab_size * config.hidden_size
    backbone = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
    if not config.tie_word_embeddings:
        backbone -= head
    width = config.num_attention_heads * config.head_dim
    pairs = sum(len(sample) ** 2 / 2 for sample in samples)
    products = backbone * sum(map(len, samples)) + head * sum(s.num_trained for s in samples)
    return 6 * products + 3 * 4 * pairs * width * config.num_hidden_layers


def step(learner: Learner, samples: list[Sample], tokens: int, *, share: bool) -> int:
    """One update; returns the tokens that went through the backbone."""
    num_tokens = 0
    for rows, _ in own_share(samples, range(len(samples)), tokens, share=share):
        micro = pack(samples, rows, share=share)
        num_tokens += micro.num_tokens
        logprobs, _ = sample_logprobs(learner.model, micro, temperature=1.0, with_entropy=True)
        (-logprobs.sum() / 1e5).backward()
    learner.step()
    return num_tokens


def parts_of(run) -> str:
    """Shares of the kernels' time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        name = event.key.lower()
        part = next((p for p, words in PARTS.items() if any(w in name for w in words)), "rest")
        spent[part] += event.self_device_time_total
    total = sum(spent.values()) or 1
    return ", ".join(f"{part} {share / total:.0%}" for part, share in spent.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory or a name on the hub")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--mlp", type=int, default=6144)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a group's prompt")
    parser.add_argument("--peak-tflops", type=float, default=989, help="of the GPU in bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="the layers, as model.compile does")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a GPU that torch sees; this machine has none")

    samples = make_batch(16, 150_000, 8000, f"{args.prompt}u")
    total = sum(map(len, samples))
    model = make_model(args).eval()
    if args.compile:  # before a learner takes the gradients away
        model.set_attn_implementation(SHARED_ATTENTION_NAME)
        compile_layers(
            model,
            decoder_of(model),
            lambda micro: sample_logprobs(model, micro, temperature=1.0)[0],
        )
    learner = Learner(model, TrainSection(learning_rate=1e-6), total_updates=1000)
    work = flops(model, samples)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {len(samples)} samples, "
        f"{total} tokens, {sum(s.num_trained for s in samples) / total:.0%} trained"
    )
    print(f"{'variant':24} {'through':>8} {'s':>7} {'tokens/s':>9} {'MFU':>5} {'peak GiB':>9}")
    for variant in VARIANTS:
        model.set_attn_implementation(SHARED_ATTENTION_NAME if variant.share else ATTENTION_NAME)
        set_gradient_checkpointing(model, variant.recomputed)
        seconds = []
        torch.cuda.reset_peak_memory_stats()
        for _ in range(args.repeat + 1):  # the first compiles and allocates
            torch.cuda.synchronize()
            started = time.perf_counter()
            through = step(learner, samples, args.tokens, share=variant.share)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        best = min(seconds[1:])
        print(
            f"{variant.name:24} {through:8} {best:7.2f} {total / best:9.0f} "
            f"{work / best / args.peak_tflops / 1e12:5.0%} "
            f"{torch.cuda.max_memory_allocated() / 2**30:9.1f}",
            flush=True,
        )
        parts = parts_of(lambda: step(learner, samples, args.tokens, share=variant.share))  # noqa: B023
        print(f"  kernels: {parts}", flush=True)
    with torch.device("meta"):
        counted = type(model)(model.config).bfloat16()
    layers, _ = kept_bytes(counted, 512)
    print(f"a layer keeps {layers[0] / 512 / 1024:.0f} KiB per token, by the estimate of doctor")


if __name__ == "__main__":
    main()
