"""One batch of samples into one or more optimizer updates.

    old/ref log-probs -> advantages -> [ weights -> [ forward, loss, backward ]* -> update ]*

Advantages are computed once over the whole batch. Weights are computed once per optimizer update
over all its tokens, before it is cut into micro-batches: every micro-batch adds its share of one
sum, so neither the gradient nor a metric depends on `train.token_budget`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algo import (
    Batch,
    Objective,
    advantage_metrics,
    compute_advantages,
    loss_weights,
    merge_metrics,
    policy_loss,
    prepare,
    reduce_metrics,
)
from agentrl.config import TrainSection
from agentrl.train.model import sample_logprobs, trained_matrix
from agentrl.train.optimizer import Learner, Update
from agentrl.train.plan import pack, plan_micro_batches
from agentrl.types import Sample


def update_policy(
    learner: Learner,
    samples: Sequence[Sample],
    batch: Batch,
    objective: Objective,
    config: TrainSection,
    *,
    temperature: float,
    reference: PreTrainedModel | None,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Train on one batch; returns its metrics.

    Args:
        samples: the rows of `batch`, in its order.
        temperature: the samples' own; logits are divided by it.
        reference: frozen model for the KL, where the objective has one.
        seed: order of groups in the second and later epochs.
        on_progress: called with (micro-batches done, micro-batches in all).

    Raises:
        TrainingError: too many updates in a row had a non-finite gradient.
    """
    model = learner.model
    several_updates = config.num_epochs * config.num_minibatches > 1
    needs = objective.needs()
    # With one update the live log-probs are the old ones: the ratio is exactly 1 and a whole
    # forward pass is saved. With several, they must be fixed before the first.
    if several_updates or "old_logprobs" in needs:
        batch.old_logprobs = _logprobs(model, samples, batch, config.token_budget, temperature)
    if "ref_logprobs" in needs:
        assert reference is not None
        batch.ref_logprobs = _logprobs(reference, samples, batch, config.token_budget, temperature)
    batch.advantages = compute_advantages(objective, batch)

    minibatches = [
        rows
        for epoch in range(config.num_epochs)
        for rows in split_groups(batch.group_ids, config.num_minibatches, f"{seed}/{epoch}")
    ]
    plans = [
        [
            [rows[index] for index in chosen]
            for chosen in plan_micro_batches(
                [len(samples[row]) for row in rows], config.token_budget
            )
        ]
        for rows in minibatches
    ]
    num_done, num_in_all = 0, sum(len(plan) for plan in plans)
    contributions, updates = [advantage_metrics(objective, batch)], []
    for rows, plan in zip(minibatches, plans, strict=True):
        step = batch.select(rows)
        step.weights = loss_weights(objective, step)
        prepare(objective, step)
        place = {row: index for index, row in enumerate(rows)}
        for chosen in plan:
            micro = pack(samples, chosen)
            logprobs, entropy = sample_logprobs(
                model, micro, temperature=temperature, with_entropy=True
            )
            output = policy_loss(
                objective,
                step.select([place[row] for row in chosen], micro.max_trained),
                trained_matrix(micro, logprobs),
                None if entropy is None else trained_matrix(micro, entropy),
            )
            output.loss.backward()
            contributions.append(output.metrics)
            num_done += 1
            if on_progress:
                on_progress(num_done, num_in_all)
        updates.append(learner.step())
    return reduce_metrics([merge_metrics(contributions)]) | _update_metrics(updates, learner)


def split_groups(group_ids: Tensor, num_parts: int, seed: str) -> list[list[int]]:
    """Rows of each mini-batch: whole groups, spread evenly, in a seeded order.

    Groups stay whole because a mini-batch of half a group has half a baseline.
    """
    groups = list(dict.fromkeys(group_ids.tolist()))
    if num_parts > 1:
        random.Random(seed).shuffle(groups)
    parts = [set(groups[part::num_parts]) for part in range(num_parts)]
    rows = [
        [row for row, group in enumerate(group_ids.tolist()) if group in part] for part in parts
    ]
    return [part for part in rows if part]


@torch.no_grad()
def _logprobs(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    batch: Batch,
    token_budget: int,
    temperature: float,
) -> Tensor:
    """Log-probs (B, T) of the batch's trained tokens under a model, without gradient."""
    values = torch.zeros_like(batch.rollout_logprobs)
    for rows in plan_micro_batches([len(sample) for sample in samples], token_budget):
        micro = pack(samples, rows)
        logprobs, _ = sample_logprobs(model, micro, temperature=temperature)
        index = torch.from_numpy(micro.rows[micro.row_of]), torch.from_numpy(micro.column_of)
        values[index] = logprobs.to(values.device)
    return values


def _update_metrics(updates: list[Update], learner: Learner) -> dict[str, float]:
    applied = [update for update in updates if update.applied]
    norms = [update.grad_norm for update in updates]
    return {
        "train/grad_norm": sum(norms) / len(norms),
        "train/learning_rate": updates[-1].learning_rate,
        "train/updates": len(applied),
        "train/skipped_updates": len(updates) - len(applied),
        "train/skipped_updates_in_all": learner.num_skipped,
    }
