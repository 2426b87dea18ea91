"""Cost of the objective relative to one softmax over the same tokens.

    python benchmarks/objective.py [--preset dapo] [--rows 256] [--columns 5120]

Times `prepare` (advantages, weights, masks) plus `policy_loss` forward and backward over one
optimizer step, on one CPU thread, against a single forward softmax over a vocabulary of 32768.
Real training takes that softmax at least once forward and once backward per step, after a whole
forward pass of the model, so the ratio printed here is an upper bound on the objective's share.

A million rows of logits do not fit in memory: the softmax is timed on chunks of 256 tokens, into
memory that is already there, and multiplied by the number of chunks. Its cost per token does not
depend on the number of tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from agentrl.algo import PRESETS, Batch, Objective, policy_loss, prepare

VOCABULARY = 32768
CHUNK = 256
TARGET = 0.03


def step(rows: int, columns: int, group_size: int) -> tuple[Batch, torch.Tensor]:
    """A step of multi-turn rows: four turns, a fifth of the positions written by tools."""
    generator = torch.Generator().manual_seed(0)

    def logprobs() -> torch.Tensor:
        return -torch.rand(rows, columns, generator=generator) * 2

    turn = max(columns // 4, 1)
    position = torch.arange(columns)
    mask = ((position % turn) >= turn // 5).expand(rows, columns).clone()
    old = logprobs()
    batch = Batch(
        loss_mask=mask,
        rewards=torch.randint(0, 2, (rows,), generator=generator).float(),
        group_ids=torch.arange(rows) // group_size,
        trajectory_ids=torch.arange(rows),
        turn_ids=(position // turn).expand(rows, columns),
        rollout_logprobs=old + 0.01 * torch.randn(rows, columns, generator=generator),
        old_logprobs=old,
        ref_logprobs=logprobs(),
        teacher_logprobs=logprobs(),
        values=logprobs(),
        policy_versions=torch.zeros(rows, columns, dtype=torch.long),
        current_version=0,
        turn_rewards=torch.zeros(rows, 4),
        state_ids=torch.randint(0, 3, (rows, 4), generator=generator),
        baselines=torch.rand(rows, generator=generator),
    )
    return batch, old + 0.05 * torch.randn(rows, columns, generator=generator)


def objective_once(objective: Objective, batch: Batch, live: torch.Tensor) -> None:
    """One optimizer step in eight micro-batches."""
    batch.advantages = batch.weights = batch.returns = None
    prepare(objective, batch)
    per_micro_batch = max(batch.num_rows // 8, 1)
    for start in range(0, batch.num_rows, per_micro_batch):
        rows = slice(start, start + per_micro_batch)
        logprobs = live[rows].clone().requires_grad_()
        policy_loss(objective, batch.select(rows), logprobs).loss.backward()


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """CPU seconds of each repetition, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Cost of the objective relative to one softmax over the same tokens."
    )
    parser.add_argument("--preset", choices=[*PRESETS, "all"], default="all")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=5120)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    batch, live = step(arguments.rows, arguments.columns, group_size=8)
    tokens = int(batch.loss_mask.sum())
    logits = torch.randn(CHUNK, VOCABULARY)
    probs = torch.empty_like(logits)
    per_chunk = statistics.median(seconds(lambda: torch.softmax(logits, 1, out=probs), 15))
    softmax_s = per_chunk * tokens / CHUNK
    print(f"{tokens} trained tokens in {batch.num_rows} rows of {arguments.columns} positions")
    print(
        f"one softmax over {VOCABULARY} entries: {softmax_s:.1f} s of CPU "
        f"(extrapolated from chunks of {CHUNK} tokens, {1000 * per_chunk:.1f} ms each)"
    )
    worst = 0.0
    for name in PRESETS if arguments.preset == "all" else [arguments.preset]:
        objective = PRESETS[name]
        once = lambda objective=objective: objective_once(objective, batch, live)  # noqa: E731
        taken = statistics.median(seconds(once, arguments.repeats))
        worst = max(worst, taken / softmax_s)
        print(f"{name:<22} {taken:6.3f} s   {100 * taken / softmax_s:5.2f} % of one softmax")
    print(f"largest ratio {100 * worst:.2f} % (target: at most {100 * TARGET:g} %)")


if __name__ == "__main__":
    main()
