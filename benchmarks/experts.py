"""CPU seconds of one step of a mixture of experts: a grouped product against a loop.

    python benchmarks/experts.py [--tokens 512] [--hidden 1024] [--layers 6] [--experts 32]

One step is forward and backward over one row. The model has Qwen3-MoE's shape, 8 experts per token,
and random float32 weights. Seconds are the process's CPU time on one thread, the minimum of three
steps that take turns; `gradient` is the largest difference of a weight's gradient from the loop's,
over the largest entry.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM


def step(model: PreTrainedModel, ids: torch.Tensor) -> float:
    model.zero_grad()
    started = time.process_time()
    model(ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 512), ("hidden", 1024), ("layers", 6), ("experts", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        moe_intermediate_size=512,
        num_experts=args.experts,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    ids = torch.randint(0, 4096, (1, args.tokens))
    seconds: dict[str, list[float]] = {"eager": [], "grouped_mm": []}
    gradients: dict[str, list[torch.Tensor]] = {}
    for _ in range(3):
        for name, own in seconds.items():
            model.set_experts_implementation(name)
            own.append(step(model, ids))
            gradients[name] = [
                each.grad.clone() for each in model.parameters() if each.grad is not None
            ]
    pairs = zip(gradients["eager"], gradients["grouped_mm"], strict=True)
    worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
    print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.0f}M weights")
    print(" ".join(f"{name} {min(own):.2f} s" for name, own in seconds.items()))
    print(f"gradient {worst:.1e}")


if __name__ == "__main__":
    main()
