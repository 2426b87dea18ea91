"""CPU seconds and memory of one optimisation step: agentrl against what else one could run.

    python benchmarks/train_step.py [--quick] [--vocab 4096,32768] [--prompts 0,130,600,980u]
                                    [--repeat 3] [--trl .venv-adapters/bin/python] [--compile]
                                    [--json FILE]

One step is forward, backward, clipping to norm 1 and AdamW over one fixed batch: groups of 8
multi-turn trajectories with heavy-tailed lengths (48-1500 tokens), about 46% of the tokens
trained, PPO-clip against given rollout log-probs, mean over all trained tokens. The model has
Qwen3's shape (hidden 256, 4 layers, 8 query and 4 key-value heads, MLP 768, tied embeddings) and
random float32 weights. Variants, each in a process of its own, one thread:

    packed          agentrl: token-budget micro-batches, packed rows, head at trained positions
    shared          the same, and what samples of a group begin with is computed once
    compiled        the same with `model.compile`; with `--compile`
    bare            agentrl's packed rows under the shortest loop that can be written: all logits
                    of the trained positions at once, cross_entropy, no entropy
    trl             TRL's AsyncGRPOTrainer, which shares prefixes too (`train_step_trl.py`); with
                    `--trl PYTHON` of an environment that has it (`make test-adapters` makes one)
    padded          micro-batches of 8 in the order of the groups, each padded to its longest
                    sequence; transformers' forward with an attention mask (sdpa), full logits,
                    log-probs by cross_entropy
    padded_sorted   the same after sorting the whole batch by length: the least padding that
                    micro-batches of 8 can have. Loops in the field do not sort: it separates
                    sequences of a group and orders the gradient noise, but here all micro-batches
                    belong to one step, so only time differs

Prompts have 24-160 tokens, and short samples begin with less of them. With `--prompts` above 0
every sample of a group begins with all of its prompt, and the padded loops are left out. The
lengths of prompts are then log-normal with that median (sigma 0.5) and those of samples Pareto
(exponent 1.6, 110 to 1300 tokens); with a `u` behind the number prompts are uniform within a
quarter of it, and samples as in the first batch.

`tokens saved` is the ratio of the tokens that `packed` and `shared` compute, and `products` that of
all multiplications of matrices: what continues a prefix still attends to all of it, and the head
has as many trained positions as before, so the tokens alone promise too much.

Every ratio stands beside the difference of the first step's gradient to that of `packed`: its norm
over the gradient's norm, and its largest entry over the largest of the same tensor. Seconds are the
process's CPU time, minimum over the steps, page faults included, and variants take turns step by
step, so that whatever else the machine does disturbs all of them; memory is the growth of the peak
resident size over the loaded model; tokens are those that go through the backbone, padding
included.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl.types import Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen3Config, Qwen3ForCausalLM

    Losses = Iterator[tuple[Tensor, int]]
    """Of each micro-batch the loss, and its tokens through the backbone."""

VARIANTS = ("packed", "shared", "compiled", "bare", "trl", "padded", "padded_sorted")
WAITS = "waits for its turn"
GROUP_SIZE = 8
TRAINED_FRACTION = 0.46


def make_batch(
    num_groups: int, vocab_size: int, max_length: int, prompts: str = "0"
) -> list[Sample]:
    """Groups of multi-turn samples with heavy-tailed lengths.

    Args:
        max_length: of a sample without its long prompt.
        prompts: as one of `--prompts`.
    """
    prompt_tokens = int(prompts.removesuffix("u"))
    if prompt_tokens and not prompts.endswith("u"):
        return make_pareto_batch(num_groups, vocab_size, min(1300, max_length), prompt_tokens)
    rng = np.random.default_rng(0)
    samples = []
    for group in range(num_groups):
        low, high = (prompt_tokens * 3 // 4, prompt_tokens * 5 // 4) if prompt_tokens else (24, 160)
        prompt = rng.integers(0, vocab_size, rng.integers(low, high))
        for member in range(GROUP_SIZE):
            length = int(np.clip(rng.lognormal(np.log(240), 0.85), 48, max_length))
            prompt_length = min(len(prompt), length // 3)
            if prompt_tokens:
                prompt_length = len(prompt)
                length += prompt_length
            token_ids = rng.integers(0, vocab_size, length)
            token_ids[:prompt_length] = prompt[:prompt_length]
            # Turns of the policy and answers of the environment alternate after the prompt.
            num_turns = int(rng.integers(1, 6))
            own_length = length - prompt_length
            trained_share = TRAINED_FRACTION
            if not prompt_tokens:
                trained_share = min(0.95, TRAINED_FRACTION * length / own_length)
            bounds = np.linspace(prompt_length, length, num_turns + 1).astype(int)
            loss_mask = np.zeros(length, np.uint8)
            for start, stop in itertools.pairwise(bounds):
                loss_mask[start : start + max(1, round((stop - start) * trained_share))] = 1
            samples.append(make_sample(rng, token_ids, loss_mask, vocab_size, group, member))
    return samples


def make_pareto_batch(
    num_groups: int, vocab_size: int, max_length: int, prompt_tokens: int
) -> list[Sample]:
    """Turns of 16 to 99 trained tokens and 4 to 71 others, up to a length of which a few samples
    have most; the prompt of a group has log-normal length around the median `prompt_tokens`."""
    rng = np.random.default_rng(5)
    samples = []
    for group in range(num_groups):
        drawn = rng.lognormal(np.log(prompt_tokens), 0.5)
        prompt = rng.integers(3, vocab_size, int(np.clip(drawn, 48, 8 * prompt_tokens)))
        for member in range(GROUP_SIZE):
            length = int(np.clip((rng.pareto(1.6) + 1) * 110, 40, max_length))
            turns: list[int] = []
            while len(turns) < length:
                turns += [1] * int(rng.integers(16, 100)) + [0] * int(rng.integers(4, 72))
            loss_mask = np.array([0] * len(prompt) + turns[:length], np.uint8)
            loss_mask[-1] = 1
            token_ids = rng.integers(3, vocab_size, len(loss_mask))
            token_ids[: len(prompt)] = prompt
            samples.append(make_sample(rng, token_ids, loss_mask, vocab_size, group, member))
    return samples


def make_sample(
    rng: np.random.Generator,
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    vocab_size: int,
    group: int,
    member: int,
) -> Sample:
    noise = rng.normal(0, 0.2, len(token_ids))
    return Sample(
        token_ids=token_ids.astype(np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=((-np.log(vocab_size) + noise) * loss_mask).astype(np.float32),
        policy_versions=np.where(loss_mask, 0, -1).astype(np.int32),
        turn_ids=np.zeros(len(token_ids), np.int32),
        trajectory_id=f"{group}-{member}",
        group_id=str(group),
        reward=float(rng.normal()),
        turn_rewards=np.zeros(1, np.float32),
    )


def products(samples: list[Sample], token_budget: int, config: Qwen3Config, *, share: bool) -> int:
    """Multiplications of matrices in a forward and a backward pass of all packed rows."""
    from agentrl.model.rows import pack
    from agentrl.train.update import own_share

    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    linear = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    total = 0
    for rows, _ in own_share(samples, range(len(samples)), token_budget, share=share):
        micro = pack(samples, rows, share=share)
        lengths = np.diff(micro.cu_seqlens).astype(np.int64)
        continued = micro.branch_ends - micro.cu_seqlens[1:]
        pairs = int((lengths * (lengths + 1) // 2 + lengths * continued).sum())
        layers = 3 * micro.num_tokens * linear + 7 * pairs * queries
        head = 3 * micro.num_trained * config.hidden_size * config.vocab_size
        total += config.num_hidden_layers * layers + head
    return total


def surrogate(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, num_trained: int
) -> Tensor:
    """Sum over trained tokens of the clipped surrogate, divided by the batch's tokens."""
    ratio = (logprobs - rollout_logprobs).exp()
    clipped = ratio.clamp(0.8, 1.2) * advantages
    return -ratio.mul(advantages).minimum(clipped).sum() / num_trained


def packed_losses(
    model: Qwen3ForCausalLM, samples: list[Sample], token_budget: int, *, share: bool, bare: bool
) -> Losses:
    import torch

    from agentrl.model.logprobs import backbone_hidden, sample_logprobs
    from agentrl.model.rows import pack
    from agentrl.train.update import own_share

    num_trained = sum(sample.num_trained for sample in samples)
    for rows, _ in own_share(samples, range(len(samples)), token_budget, share=share):
        micro = pack(samples, rows, share=share)
        if bare:
            hidden = backbone_hidden(model, micro)[micro.trained_index]
            targets = torch.from_numpy(micro.targets)
            logprobs = -torch.nn.functional.cross_entropy(
                model.lm_head(hidden), targets, reduction="none"
            )
        else:
            logprobs, _ = sample_logprobs(model, micro, temperature=1.0)
        chosen = [samples[row] for row in rows]
        rollout = np.concatenate([s.rollout_logprobs[s.loss_mask > 0] for s in chosen])
        rewards = np.asarray([sample.reward for sample in chosen], np.float32)[micro.row_of]
        given = torch.from_numpy(rollout), torch.from_numpy(rewards)
        yield surrogate(logprobs, *given, num_trained), micro.num_tokens


def padded_losses(
    model: Qwen3ForCausalLM, samples: list[Sample], *, sorted_by_length: bool
) -> Losses:
    import torch

    num_trained = sum(sample.num_trained for sample in samples)
    order = sorted(samples, key=len) if sorted_by_length else samples
    for start in range(0, len(order), GROUP_SIZE):
        chosen = order[start : start + GROUP_SIZE]
        shape = (len(chosen), max(len(sample) for sample in chosen))
        input_ids = torch.zeros(shape, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        loss_mask = torch.zeros(shape)
        rollout = torch.zeros(shape)
        for row, sample in enumerate(chosen):
            input_ids[row, : len(sample)] = torch.from_numpy(sample.token_ids)
            attention_mask[row, : len(sample)] = 1
            loss_mask[row, : len(sample)] = torch.from_numpy(sample.loss_mask)
            rollout[row, : len(sample)] = torch.from_numpy(sample.rollout_logprobs)
        rewards = torch.tensor([sample.reward for sample in chosen])
        # cross_entropy was the fastest of four ways to take log-probs from full logits.
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        targets = input_ids.roll(-1, dims=1)
        logprobs = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        ).view(shape)[:, :-1]
        mask = loss_mask[:, 1:]
        # Where nothing is trained the ratio is 1 and the advantage 0.
        logprobs = torch.where(mask > 0, logprobs, 0.0)
        loss = surrogate(logprobs, rollout[:, 1:], rewards[:, None] * mask, num_trained)
        yield loss, shape[0] * shape[1]


def run_variant(args: argparse.Namespace) -> None:
    """Time the steps of one variant and write gradients and figures to `args.output`."""
    import resource

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentrl.model.attention import ATTENTION_NAME, SHARED_ATTENTION_NAME
    from agentrl.model.compile import compile_layers
    from agentrl.model.logprobs import sample_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = make_batch(args.num_groups, args.vocab_size, args.max_length, args.prompts)
    config = Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).train()
    share = args.variant in ("shared", "compiled")
    if args.variant.startswith("padded"):
        by_length = args.variant == "padded_sorted"
        losses = functools.partial(padded_losses, model, samples, sorted_by_length=by_length)
    elif args.variant == "trl":
        import train_step_trl

        train_step_trl.prepare(model)
        losses = functools.partial(train_step_trl.losses, model, samples, args.token_budget)
    else:
        model.set_attn_implementation(SHARED_ATTENTION_NAME if share else ATTENTION_NAME)
        packed = functools.partial(packed_losses, model, samples, args.token_budget)
        losses = functools.partial(packed, share=share, bare=args.variant == "bare")
    if args.variant == "compiled":
        compile_layers(
            model, model.model, lambda micro: sample_logprobs(model, micro, temperature=1.0)[0]
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    num_products = products(samples, args.token_budget, config, share=share)
    loaded_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, first_loss = [], None
    num_tokens = 0  # of all steps
    for step in range(args.repeat):
        print(WAITS, flush=True)
        sys.stdin.readline()
        started = time.process_time()
        total = 0.0
        for loss, tokens in losses():
            num_tokens += tokens
            loss.backward()
            total += loss.item()
        seconds.append(time.process_time() - started)
        if step == 0:
            first_loss = total
            gradients = {
                name: parameter.grad.numpy() for name, parameter in model.named_parameters()
            }
            np.savez(args.output, **gradients)
        started = time.process_time()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds[-1] += time.process_time() - started
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {
        "seconds": seconds,
        "loss": first_loss,
        "memory_mib": (peak_kib - loaded_kib) / 1024,
        "num_tokens": num_tokens // args.repeat,
        "products": num_products,
    }
    print(json.dumps(result))


def until_it_waits(process: subprocess.Popen[str]) -> str:
    """The last line before the process waits for its turn, or of all."""
    last = ""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == WAITS:
            return last
        last = line
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return last


def differences(
    gradients: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> tuple[float, float]:
    """Norm of the difference over the norm of `expected`, of all tensors together; and the largest
    difference of an entry over the largest entry of its tensor."""
    apart = {name: gradients[name].astype(float) - each for name, each in expected.items()}
    squares = [
        sum(np.square(each, dtype=float).sum() for each in tensors.values())
        for tensors in (apart, expected)
    ]
    entry = max(np.abs(apart[name]).max() / np.abs(gradients[name]).max() for name in apart)
    return math.sqrt(squares[0] / squares[1]), float(entry)


def compare(vocab_size: int, prompts: str, args: argparse.Namespace) -> dict[str, dict]:
    """Run all variants on one batch and print a line for each; returns its figures."""
    num_groups, max_length = (8, 1500) if vocab_size <= 8192 else (2, 700)
    if args.quick:
        num_groups, max_length = max(1, num_groups // 4), 700
    samples = make_batch(num_groups, vocab_size, max_length, prompts)
    num_tokens = sum(len(sample) for sample in samples)
    num_trained = sum(sample.num_trained for sample in samples)
    print(
        f"\nV={vocab_size}, prompts {prompts}: {len(samples)} samples, {num_tokens} tokens, "
        f"{num_trained / num_tokens:.0%} trained, longest {max(len(s) for s in samples)}"
    )
    print(
        f"{'variant':14} {'tokens':>7} {'CPU s':>7} {'x packed':>9} {'+MiB':>6} "
        f"{'gradient':>9} {'entry':>9}"
    )
    variants = [
        variant
        for variant in VARIANTS
        if (variant != "trl" or args.trl)
        and (variant != "compiled" or args.compile)
        and not (prompts != "0" and variant.startswith("padded"))
    ]
    given = {"vocab_size": vocab_size, "num_groups": num_groups, "max_length": max_length}
    given |= {"prompts": prompts, "token_budget": args.token_budget, "repeat": args.repeat}
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    with tempfile.TemporaryDirectory() as directory:
        results, gradients, processes = {}, {}, {}
        for variant in variants:
            work = given | {"variant": variant, "output": f"{directory}/{variant}.npz"}
            command = [args.trl if variant == "trl" else sys.executable, __file__]
            command += ["--work", json.dumps(work)]
            path = {"PYTHONPATH": str(root)} if variant == "trl" else {}
            processes[variant] = subprocess.Popen(
                command,
                env=environment | path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            until_it_waits(processes[variant])
        for _ in range(args.repeat):
            for variant, process in processes.items():
                print(file=process.stdin, flush=True)
                results[variant] = until_it_waits(process)
        for variant in variants:
            results[variant] = json.loads(results[variant])
            gradients[variant] = dict(np.load(f"{directory}/{variant}.npz"))
            best, reference = min(results[variant]["seconds"]), min(results["packed"]["seconds"])
            whole, entry = differences(gradients[variant], gradients["packed"])
            results[variant]["gradient_norm_difference"] = whole
            results[variant]["gradient_difference"] = entry
            print(
                f"{variant:14} {results[variant]['num_tokens']:7} {best:7.2f} "
                f"{best / reference:9.2f} {results[variant]['memory_mib']:6.0f} "
                f"{whole:9.1e} {entry:9.1e}",
                flush=True,
            )
    packed, shared = results["packed"], results["shared"]
    faster = min(packed["seconds"]) / min(shared["seconds"])
    tokens, spared = (packed[name] / shared[name] for name in ("num_tokens", "products"))
    print(
        f"tokens saved {tokens:.2f}x, products {spared:.2f}x, time {faster:.2f}x: "
        f"{faster / tokens:.0%} and {faster / spared:.0%} of them"
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", default="4096,32768", help="vocabulary sizes, comma-separated")
    parser.add_argument("--repeat", type=int, default=3, help="steps per variant; minimum counts")
    parser.add_argument("--quick", action="store_true", help="a quarter of the batch")
    parser.add_argument("--token-budget", type=int, default=4096, help="of agentrl's micro-batches")
    parser.add_argument(
        "--prompts",
        default="0,130,600,980u",
        help="median tokens of prompts, comma-separated; 0: 24 to 160, 980u: uniform about 980",
    )
    parser.add_argument("--compile", action="store_true", help="compiled layers as well")
    parser.add_argument("--trl", metavar="PYTHON", help="of an environment with TRL 1.16")
    parser.add_argument("--json", type=Path, help="write the figures of each batch here, too")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        run_variant(argparse.Namespace(**args.work))
        return
    vocab_sizes = [int(size) for size in args.vocab.split(",")]
    figures = {}
    for number, vocab_size in enumerate(vocab_sizes):
        for prompts in args.prompts.split(",") if number == 0 else ["0"]:
            batch = f"V={vocab_size}, prompts={prompts}"
            figures[batch] = compare(vocab_size, prompts, args)
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
