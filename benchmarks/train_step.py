"""CPU seconds and memory of one optimisation step: agentrl against a padded transformers loop.

    python benchmarks/train_step.py [--quick] [--vocab 4096,32768] [--repeat 3]

One step is forward, backward, clipping to norm 1 and AdamW over one fixed batch: groups of 8
multi-turn trajectories with heavy-tailed lengths (48-1500 tokens), about 46% of the tokens
trained, PPO-clip against given rollout log-probs, mean over all trained tokens. The model has
Qwen3's shape (hidden 256, 4 layers, 8 query and 4 key-value heads, MLP 768, tied embeddings) and
random float32 weights. Variants, each in a process of its own, one thread:

    packed          agentrl: token-budget micro-batches, packed rows, head at trained positions
    padded          micro-batches of 8 in the order of the groups, each padded to its longest
                    sequence; transformers' forward with an attention mask (sdpa), full logits,
                    log-probs by cross_entropy
    padded_sorted   the same after sorting the whole batch by length: the least padding that
                    micro-batches of 8 can have. Loops in the field do not sort: it separates
                    sequences of a group and orders the gradient noise, but here all micro-batches
                    belong to one step, so only time differs

Every ratio stands beside the largest gradient difference to `packed` (relative to the largest
entry of each tensor) before the first update. Seconds are the process's CPU time, minimum over
the steps, page faults included; memory is the growth of the peak resident size over the loaded
model; tokens are those that go through the backbone, padding included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from agentrl.types import Sample

VARIANTS = ("packed", "padded", "padded_sorted")
GROUP_SIZE = 8
TRAINED_FRACTION = 0.46


def make_batch(num_groups: int, vocab_size: int, max_length: int) -> list[Sample]:
    """Multi-turn samples with log-normal lengths in [48, max_length]."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(num_groups):
        prompt = rng.integers(0, vocab_size, rng.integers(24, 160))
        for member in range(GROUP_SIZE):
            length = int(np.clip(rng.lognormal(np.log(240), 0.85), 48, max_length))
            prompt_length = min(len(prompt), length // 3)
            token_ids = rng.integers(0, vocab_size, length).astype(np.int32)
            token_ids[:prompt_length] = prompt[:prompt_length]
            # Turns of the policy and answers of the environment alternate after the prompt.
            num_turns = int(rng.integers(1, 6))
            trained_share = min(0.95, TRAINED_FRACTION * length / (length - prompt_length))
            bounds = np.linspace(prompt_length, length, num_turns + 1).astype(int)
            loss_mask = np.zeros(length, np.uint8)
            turn_ids = np.zeros(length, np.int32)
            for turn, (start, stop) in enumerate(itertools.pairwise(bounds)):
                loss_mask[start : start + max(1, round((stop - start) * trained_share))] = 1
                turn_ids[start:stop] = turn
            noise = rng.normal(0, 0.2, length)
            samples.append(
                Sample(
                    token_ids=token_ids,
                    loss_mask=loss_mask,
                    rollout_logprobs=((-np.log(vocab_size) + noise) * loss_mask).astype(np.float32),
                    policy_versions=np.where(loss_mask, 0, -1).astype(np.int32),
                    turn_ids=turn_ids,
                    trajectory_id=f"{group}-{member}",
                    group_id=str(group),
                    reward=float(rng.normal()),
                    turn_rewards=np.zeros(num_turns, np.float32),
                )
            )
    return samples


def run_variant(args: argparse.Namespace) -> None:
    """Time the steps of one variant and write gradients and figures to `args.output`."""
    import resource

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentrl.train.attention import ATTENTION_NAME
    from agentrl.train.model import sample_logprobs
    from agentrl.train.plan import pack, plan_micro_batches

    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = make_batch(args.num_groups, args.vocab_size, args.max_length)
    config = Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        attn_implementation=ATTENTION_NAME if args.variant == "packed" else "sdpa",
    )
    model = Qwen3ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    num_trained = sum(sample.num_trained for sample in samples)

    def loss_of(logprobs, rollout_logprobs, advantages):
        """Sum over trained tokens of the clipped surrogate, divided by the batch's tokens."""
        ratio = (logprobs - rollout_logprobs).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -surrogate.sum() / num_trained

    def packed_losses():
        lengths = [len(sample) for sample in samples]
        for rows in plan_micro_batches(lengths, args.token_budget):
            micro = pack(samples, rows)
            nonlocal num_tokens
            num_tokens += micro.num_tokens
            logprobs, _ = sample_logprobs(model, micro, temperature=1.0)
            rollout = np.concatenate([samples[row].rollout_logprobs for row in rows])
            rewards = np.asarray([samples[row].reward for row in rows], np.float32)
            yield loss_of(
                logprobs,
                torch.from_numpy(rollout[micro.trained_index + 1]),
                torch.from_numpy(rewards[micro.row_of]),
            )

    def padded_losses():
        order = list(range(len(samples)))
        if args.variant == "padded_sorted":
            order.sort(key=lambda row: len(samples[row]))
        for start in range(0, len(order), GROUP_SIZE):
            chosen = [samples[row] for row in order[start : start + GROUP_SIZE]]
            shape = (len(chosen), max(len(sample) for sample in chosen))
            nonlocal num_tokens
            num_tokens += shape[0] * shape[1]
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
            logits = model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).logits
            targets = input_ids.roll(-1, dims=1)
            logprobs = -torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none"
            ).view(shape)[:, :-1]
            mask = loss_mask[:, 1:]
            # Where nothing is trained the ratio is 1 and the advantage 0.
            yield loss_of(
                torch.where(mask > 0, logprobs, 0.0), rollout[:, 1:], rewards[:, None] * mask
            )

    num_tokens = 0  # through the backbone, all steps
    losses = packed_losses if args.variant == "packed" else padded_losses
    loaded_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, first_loss = [], None
    for step in range(args.repeat):
        started = time.process_time()
        total = 0.0
        for loss in losses():
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
    }
    print(json.dumps(result))


def compare(vocab_size: int, args: argparse.Namespace) -> None:
    """Run all variants at one vocabulary size and print a line for each."""
    num_groups, max_length = (8, 1500) if vocab_size <= 8192 else (2, 700)
    if args.quick:
        num_groups, max_length = max(1, num_groups // 4), 700
    samples = make_batch(num_groups, vocab_size, max_length)
    num_tokens = sum(len(sample) for sample in samples)
    num_trained = sum(sample.num_trained for sample in samples)
    print(
        f"\nV={vocab_size}: {len(samples)} samples, {num_tokens} tokens, "
        f"{num_trained / num_tokens:.0%} trained, longest {max(len(s) for s in samples)}"
    )
    print(
        f"{'variant':14} {'tokens':>7} {'CPU s':>7} {'x packed':>9} {'+MiB':>6} "
        f"{'gradient diff':>14}"
    )

    with tempfile.TemporaryDirectory() as directory:
        results, gradients = {}, {}
        for variant in VARIANTS:
            output = Path(directory) / f"{variant}.npz"
            command = [sys.executable, __file__, "--variant", variant, "--output", str(output)]
            command += ["--vocab-size", str(vocab_size), "--num-groups", str(num_groups)]
            command += ["--max-length", str(max_length), "--repeat", str(args.repeat)]
            command += ["--token-budget", str(args.token_budget)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            done = subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            results[variant] = json.loads(done.stdout.splitlines()[-1])
            gradients[variant] = dict(np.load(output))
            best, reference = min(results[variant]["seconds"]), min(results["packed"]["seconds"])
            difference = max(
                np.abs(gradient - gradients["packed"][name]).max() / np.abs(gradient).max()
                for name, gradient in gradients[variant].items()
            )
            print(
                f"{variant:14} {results[variant]['num_tokens']:7} {best:7.2f} "
                f"{best / reference:9.2f} {results[variant]['memory_mib']:6.0f} "
                f"{difference:14.1e}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", default="4096,32768", help="vocabulary sizes, comma-separated")
    parser.add_argument("--repeat", type=int, default=3, help="steps per variant; minimum counts")
    parser.add_argument("--quick", action="store_true", help="a quarter of the batch")
    parser.add_argument("--token-budget", type=int, default=4096, help="of agentrl's micro-batches")
    for name in ("--variant", "--output"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--vocab-size", "--num-groups", "--max-length"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        run_variant(args)
        return
    for vocab_size in args.vocab.split(","):
        compare(int(vocab_size), args)


if __name__ == "__main__":
    main()
