"""One batch of samples into one or more optimizer updates.

    what is known before -> advantages -> [ weights -> [ forward, loss, backward ]* -> update ]*

Advantages are computed once over the whole batch. Weights are computed once per optimizer update
over all its tokens, before it is cut into micro-batches: every micro-batch adds its share of one
sum, so neither the gradient nor a metric depends on `train.token_budget`.

With several ranks each has the whole batch, computes all that is known before on it, and its own
share of the micro-batches; gradients and metrics are sums over all of them. Ranks that hold slices
of the same rows (`agentrl.train.context`) compute the same loss.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algo import (
    Batch,
    LossOutput,
    Metric,
    Objective,
    advantage_metrics,
    compute_advantages,
    merge_metrics,
    policy_loss,
    prepare,
    reduce_metrics,
    value_loss,
    value_targets,
)
from agentrl.config import TrainSection
from agentrl.train import context, ranks
from agentrl.train.critic import Critic, explained_variance
from agentrl.train.logprobs import (
    computing_device,
    sample_logprobs,
    shares_prefixes,
    trained_matrix,
)
from agentrl.train.lora import without_adapter
from agentrl.train.optimizer import Learner, Update
from agentrl.train.plan import MicroBatch, bundles, cost, deal, pack, share_of
from agentrl.train.routers import aux_loss
from agentrl.train.signals import StepSignals
from agentrl.train.teacher import TeacherServer
from agentrl.types import Sample


@dataclass(slots=True, frozen=True, kw_only=True)
class UpdateOptions:
    """The models and numbers that an update takes besides the policy."""

    objective: Objective
    config: TrainSection
    temperature: float
    """The samples' own; logits are divided by it."""
    seed: int
    """Decides the order of groups in the second and later epochs."""
    reference: PreTrainedModel | None = None
    """Frozen model for the KL, where the objective has one; the policy itself where an adapter is
    trained, and its adapter is left out."""
    teacher: PreTrainedModel | TeacherServer | None = None
    """Whose log-probs are learned from, where the objective does."""
    critic: Learner[Critic] | None = None
    """A `Critic` with its optimizer, where the objective needs one."""
    policy_learns: bool = True
    """False while the critic warms up alone."""
    own_logprobs: bool = False
    """The policy's log-probs before the update stand in for those at sampling."""
    kl_coef: float | None = None
    """Replaces `objective.kl.coef` (adaptive coefficient)."""


def update_policy(
    learner: Learner[PreTrainedModel],
    samples: Sequence[Sample],
    batch: Batch,
    options: UpdateOptions,
    *,
    signals: StepSignals | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Train on one batch; returns its metrics.

    Args:
        samples: the rows of `batch`, in its order.
        signals: takes down what is computed for each token.
        on_progress: called with (micro-batches done, micro-batches in all).

    Raises:
        TrainingError: too many updates in a row had a non-finite gradient.
    """
    objective, config, critic = options.objective, options.config, options.critic
    device = computing_device(learner.model)
    _evaluate(learner.model, samples, batch, options)
    batch.advantages = compute_advantages(objective, batch, kl_coef=options.kl_coef)
    contributions: list[Mapping[str, Metric]] = []
    if ranks.rank() == 0:  # every rank knows them, and they are to be counted once
        contributions.append(advantage_metrics(objective, batch))
        every_row = range(len(samples))
        contributions += _by_environment(
            batch, every_row, lambda rows: advantage_metrics(objective, batch.select(rows))
        )

    # What samples begin with counts once for the routers' loss, so there it stands with each.
    share = config.share_prefixes and config.router_aux_loss == 0
    share = share and shares_prefixes(learner.model)
    if critic is not None:
        share = share and shares_prefixes(critic.model.backbone)
    minibatches = [
        rows
        for epoch in range(config.num_epochs)
        for rows in split_groups(batch.group_ids, config.num_minibatches, f"{options.seed}/{epoch}")
    ]
    plans = [own_share(samples, rows, config.token_budget, share=share) for rows in minibatches]
    num_done, num_in_all = 0, sum(len(plan) for plan in plans)
    updates, critic_updates = [], []
    for rows, plan in zip(minibatches, plans, strict=True):
        step = prepare(objective, batch.select(rows), kl_coef=options.kl_coef)
        place = {row: index for index, row in enumerate(rows)}
        num_tokens = sum(len(samples[row]) for row in rows)
        for chosen, weight in plan:
            micro = pack(samples, chosen, share=share)
            # The whole batch, padded to its longest row, stays where it is: on the host.
            part = step.select([place[row] for row in chosen], micro.max_trained).to(device)
            counts = weight and context.current().rank == 0  # of ranks with the same rows, once
            if options.policy_learns:
                portion = micro.num_tokens / num_tokens
                output, logprobs, entropy = _learn(
                    learner.model, micro, part, options, weight=weight, portion=portion
                )
                if counts:
                    contributions.append(output.metrics)
                    measure = functools.partial(_policy_metrics, options, part, logprobs, entropy)
                    contributions += _by_environment(batch, chosen, measure)
                    if signals is not None:
                        signals.take(chosen, part, logprobs, output.kept, number=num_done + 1)
            if critic is not None:
                output = value_loss(objective, part, trained_matrix(micro, critic.model(micro)))
                (weight * output.loss).backward()
                if counts:
                    contributions.append(output.metrics)
            if counts:
                contributions.append({"computed_tokens": Metric("sum", (micro.num_tokens,))})
            num_done += 1
            ranks.moved()
            if on_progress:
                on_progress(num_done, num_in_all)
        if options.policy_learns:
            updates.append(learner.step())
        if critic is not None:
            critic_updates.append(critic.step())
    if signals is not None:
        signals.gather()
    metrics = reduce_metrics(_of_all_ranks(merge_metrics(contributions)))
    metrics |= _update_metrics(updates, learner, "train")
    if critic is not None:
        metrics |= _update_metrics(critic_updates, critic, "critic")
        if (explained := explained_variance(objective, batch)) is not None:
            metrics["critic/explained_variance"] = explained
    return metrics


def _evaluate(
    model: PreTrainedModel, samples: Sequence[Sample], batch: Batch, options: UpdateOptions
) -> None:
    """Adds to the batch what the objective needs of the models as they are before the update."""
    objective, config, temperature = options.objective, options.config, options.temperature
    needs = objective.needs()
    everywhere = functools.partial(_everywhere, samples, batch, config)

    def logprobs_of(model: PreTrainedModel) -> Tensor:
        return everywhere(
            model, lambda micro: sample_logprobs(model, micro, temperature=temperature)[0]
        )

    # With one update the live log-probs are the old ones: the ratio is exactly 1 and a whole
    # forward pass is saved. With several, they must be fixed before the first.
    several = config.num_epochs * config.num_minibatches > 1
    if several or options.own_logprobs or "old_logprobs" in needs:
        batch.old_logprobs = logprobs_of(model)
    if options.own_logprobs and batch.old_logprobs is not None:
        batch.rollout_logprobs = batch.old_logprobs
    if "old_entropy" in needs:
        batch.old_entropy = everywhere(model, lambda micro: _entropy(model, micro, temperature))
    if "sum_squared_probs" in needs:
        batch.sum_squared_probs = everywhere(
            model, lambda micro: _sum_squared_probs(model, micro, temperature)
        )
    if "ref_logprobs" in needs:
        assert options.reference is not None
        with without_adapter(options.reference):
            batch.ref_logprobs = logprobs_of(options.reference)
    if isinstance(options.teacher, TeacherServer):
        told = torch.zeros_like(batch.rollout_logprobs)
        if ranks.rank() == 0:  # it is asked once
            told.copy_(options.teacher.logprobs(samples))
        batch.teacher_logprobs = ranks.add_up(told)
    elif options.teacher is not None:
        batch.teacher_logprobs = logprobs_of(options.teacher)
    if options.critic is not None:
        critic = options.critic.model
        batch.values = everywhere(critic.backbone, critic)
        batch.returns = value_targets(objective, batch, kl_coef=options.kl_coef)


def _learn(
    model: PreTrainedModel,
    micro: MicroBatch,
    part: Batch,
    options: UpdateOptions,
    *,
    weight: float,
    portion: float,
) -> tuple[LossOutput, Tensor, Tensor | None]:
    """Adds a micro-batch's share to the gradient.

    Args:
        part: the micro-batch's rows, on the model's device.
        weight: 0 where the pass is only run because other ranks run one.
        portion: of the update's tokens, those in this micro-batch.

    Returns:
        The loss, and (B, T) log-probs and entropies of the trained tokens.
    """
    routed: list[Tensor] | None = [] if options.config.router_aux_loss else None
    logprobs, entropy = sample_logprobs(
        model, micro, temperature=options.temperature, with_entropy=True, router_logits=routed
    )
    logprobs = trained_matrix(micro, logprobs)
    entropy = None if entropy is None else trained_matrix(micro, entropy)
    output = policy_loss(options.objective, part, logprobs, entropy, kl_coef=options.kl_coef)
    loss = output.loss
    if routed is not None:
        loss = loss + options.config.router_aux_loss * portion * aux_loss(model, routed)
    (weight * loss).backward()
    return output, logprobs, entropy


def _by_environment(
    batch: Batch, rows: Sequence[int], measure: Callable[[list[int]], Mapping[str, Metric]]
) -> list[dict[str, Metric]]:
    """Returns the metrics that `measure` gives of each environment's rows, where there are several.

    Args:
        rows: of the batch; `measure` gets places among them.
    """
    if batch.env_ids is None:
        return []
    numbers = batch.env_ids[torch.as_tensor(rows)].tolist()
    named = []
    for number in dict.fromkeys(numbers):
        metrics = measure([place for place, other in enumerate(numbers) if other == number])
        named.append({f"env/{batch.env_names[number]}/{k}": each for k, each in metrics.items()})
    return named


@torch.no_grad()
def _policy_metrics(
    options: UpdateOptions,
    part: Batch,
    logprobs: Tensor,
    entropy: Tensor | None,
    rows: list[int],
) -> Mapping[str, Metric]:
    """Computes what some rows of a micro-batch add to the metrics of the loss."""
    index = torch.as_tensor(rows, device=logprobs.device)
    of_rows = None if entropy is None else entropy[index]
    return policy_loss(
        options.objective, part.select(index), logprobs[index], of_rows, kl_coef=options.kl_coef
    ).metrics


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
def _everywhere(
    samples: Sequence[Sample],
    batch: Batch,
    config: TrainSection,
    model: PreTrainedModel,
    forward: Callable[[MicroBatch], Tensor],
) -> Tensor:
    """Computes (B, T) values of `forward`, which runs `model`, for the trained tokens of every
    micro-batch, without gradient."""
    values = torch.zeros_like(batch.rollout_logprobs)
    share = config.share_prefixes and shares_prefixes(model)
    every_row = range(len(samples))
    for rows, weight in own_share(samples, every_row, config.token_budget, share=share):
        micro = pack(samples, rows, share=share)
        index = torch.from_numpy(micro.rows[micro.row_of]), torch.from_numpy(micro.column_of)
        result = forward(micro).to(values.device)
        ranks.moved()
        if weight and context.current().rank == 0:
            values[index] = result
    return ranks.add_up(values)


def own_share(
    samples: Sequence[Sample], rows: Sequence[int], token_budget: int, *, share: bool
) -> list[tuple[list[int], float]]:
    """This rank's micro-batches of these rows, with their weights (see `share_of`): of bundles of
    rows that stay together. One rank has them all."""
    bundled = bundles(samples, rows, token_budget, share=share)
    lengths = [tokens for _, tokens in bundled]
    costs = [cost(tokens, [len(samples[row]) for row in each]) for each, tokens in bundled]
    together = context.current().size  # ranks that compute the same rows
    rounds = deal(lengths, costs, token_budget, ranks.size() // together)
    return [
        (sorted(row for index in chosen for row in bundled[index][0]), weight)
        for chosen, weight in share_of(ranks.rank() // together, rounds, costs)
    ]


def _of_all_ranks(metrics: Mapping[str, Metric]) -> list[dict[str, Metric]]:
    if ranks.size() == 1:
        return [dict(metrics)]
    mine: Any = {name: [m.kind, *m.to_floats().parts] for name, m in metrics.items()}
    gathered: list[Any] = ranks.gather(mine)
    return [
        {name: Metric(kind, tuple(parts)) for name, (kind, *parts) in each.items()}
        for each in gathered
    ]


def _entropy(model: PreTrainedModel, micro: MicroBatch, temperature: float) -> Tensor:
    _, entropy = sample_logprobs(model, micro, temperature=temperature, with_entropy=True)
    assert entropy is not None
    return entropy


def _sum_squared_probs(model: PreTrainedModel, micro: MicroBatch, temperature: float) -> Tensor:
    """(Q,) sum over the vocabulary of p^2.

    At half the temperature a token's probability is p^2 over that sum, so that two log-probs of
    the sampled token give it: log sum = 2 log p - log p_half.
    """
    logprobs, _ = sample_logprobs(model, micro, temperature=temperature)
    halved, _ = sample_logprobs(model, micro, temperature=temperature / 2)
    return torch.exp(2 * logprobs - halved)


def _update_metrics(updates: list[Update], learner: Learner, section: str) -> dict[str, float]:
    metrics: dict[str, float] = {
        f"{section}/updates": learner.num_updates,
        f"{section}/skipped_updates": sum(not update.applied for update in updates),
        f"{section}/skipped_updates_in_all": learner.num_skipped,
    }
    if updates:
        metrics[f"{section}/grad_norm"] = sum(u.grad_norm for u in updates) / len(updates)
        metrics[f"{section}/learning_rate"] = updates[-1].learning_rate
        moved = [update.moved for update in updates if update.moved is not None]
        if moved:
            metrics[f"{section}/relative_update"] = sum(moved)
    return metrics
