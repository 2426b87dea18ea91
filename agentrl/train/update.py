"""Trains on one batch of samples, in one optimizer update or several.

    evaluate   what the models say before the update, and the advantages
    plan       rows -> mini-batches (one update each) -> micro-batches (one forward pass each)
    learn      [ weights -> [ forward, loss, backward ]* -> update ]*

Advantages are computed once over the whole batch. Weights are computed once per update over all its
tokens, before it is split into micro-batches: each micro-batch adds its share of one sum, so
neither the gradient nor a metric depends on `train.token_budget`.

Every rank has the whole batch. Each rank computes its own share of the micro-batches; gradients,
metrics and evaluated values are summed over all ranks. Ranks that hold slices of the same rows
(`agentrl.model.context`) compute the same loss, which is counted once.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from agentrl.algo.aggregate import trained_mask
from agentrl.config import TrainSection
from agentrl.model import ranks
from agentrl.model.critic import Critic
from agentrl.model.logprobs import (
    computing_device,
    sample_logprobs,
    shares_prefixes,
    trained_matrix,
)
from agentrl.model.lora import without_adapter
from agentrl.model.routers import aux_loss
from agentrl.model.rows import MicroBatch, bundles, cost, deal, pack, share_of
from agentrl.train.optimizer import Learner, Update
from agentrl.train.signals import StepSignals
from agentrl.train.teacher import TeacherServer
from agentrl.types import Sample

FAR_OFF = 2.0
"""Nats beyond which `agreement` counts a token's difference: rounding does so to one in thousands,
even in 8 bits."""
SHORT_TURN = 8
"""Tokens by which `agreement` divides at least, for the mean of a turn."""


@dataclass(slots=True, frozen=True, kw_only=True)
class UpdateOptions:
    """Everything that an update takes besides the policy and the batch."""

    objective: Objective
    config: TrainSection
    temperature: float
    """Temperature at which the samples were drawn; logits are divided by it."""
    seed: int
    """Seed of the order in which groups are split into mini-batches."""
    reference: PreTrainedModel | None = None
    """Frozen model of the KL term, if the objective has one. With an adapter it may be the policy
    itself, whose adapter is then switched off."""
    teacher: PreTrainedModel | TeacherServer | None = None
    """Model to distill from, if the objective does."""
    critic: Learner[Critic] | None = None
    """The critic with its optimizer, if the objective needs one."""
    policy_learns: bool = True
    """False while the critic warms up alone."""
    own_logprobs: bool = False
    """Use the policy's log-probs before the update in place of those reported by the sampler."""
    kl_coef: float | None = None
    """Replaces `objective.kl.coef` (adaptive coefficient)."""
    signals: StepSignals | None = None
    """Records the values computed for each token."""
    on_progress: Callable[[int, int], None] | None = None
    """Called after each micro-batch with (micro-batches done, micro-batches in all)."""


@dataclass(slots=True, frozen=True)
class MiniBatch:
    """The rows of one optimizer update, and this rank's share of its micro-batches."""

    rows: list[int]
    """Rows of the batch, of all ranks."""
    micro_batches: list[tuple[list[int], float]]
    """Rows and weight of each micro-batch. The weight is 0 if the pass only runs because another
    rank runs one in the same round."""
    share: bool
    """A prefix that several samples share is computed once per micro-batch."""


@dataclass(slots=True, frozen=True)
class Learned:
    """Collects the results of all updates on one batch."""

    metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    """This rank's parts of the metrics, to be merged."""
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)


def update_policy(
    learner: Learner[PreTrainedModel],
    samples: Sequence[Sample],
    batch: Batch,
    options: UpdateOptions,
) -> dict[str, float]:
    """Trains on one batch and returns the metrics. Every rank calls it.

    Args:
        samples: the rows of `batch`, in its order.
        batch: gains what `evaluate` computes.

    Raises:
        TrainingError: too many updates in a row had a non-finite gradient.
    """
    evaluate(learner.model, samples, batch, options)
    minibatches = plan(learner.model, samples, batch, options)
    contributions = _advantage_metrics(options.objective, batch)
    learned = learn(learner, samples, batch, minibatches, options)
    contributions += learned.metrics

    if options.signals is not None:
        options.signals.gather()
    metrics = reduce_metrics(_of_all_ranks(merge_metrics(contributions)))
    metrics |= _update_metrics(learned.updates, learner, "train")
    if options.critic is not None:
        metrics |= _update_metrics(learned.critic_updates, options.critic, "critic")
        if (explained := explained_variance(options.objective, batch)) is not None:
            metrics["critic/explained_variance"] = explained
    return metrics


# evaluate -----------------------------------------------------------------------------------------


def evaluate(
    model: PreTrainedModel, samples: Sequence[Sample], batch: Batch, options: UpdateOptions
) -> None:
    """Adds to the batch the values of the models before the update, as far as the objective needs
    them, and the advantages."""
    objective, config, temperature = options.objective, options.config, options.temperature
    needs = objective.needs()
    for_all_rows = functools.partial(_for_all_rows, samples, batch, config)

    def logprobs_of(model: PreTrainedModel) -> Tensor:
        return for_all_rows(
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
        batch.old_entropy = for_all_rows(model, lambda micro: _entropy(model, micro, temperature))
    if "sum_squared_probs" in needs:
        batch.sum_squared_probs = for_all_rows(
            model, lambda micro: _sum_squared_probs(model, micro, temperature)
        )
    if "ref_logprobs" in needs:
        assert options.reference is not None
        with without_adapter(options.reference):
            batch.ref_logprobs = logprobs_of(options.reference)
    if isinstance(options.teacher, TeacherServer):
        answers = torch.zeros_like(batch.rollout_logprobs)
        if ranks.rank() == 0:  # one rank asks the server
            answers.copy_(options.teacher.logprobs(samples))
        batch.teacher_logprobs = ranks.add_up(answers)
    elif options.teacher is not None:
        batch.teacher_logprobs = logprobs_of(options.teacher)
    if options.critic is not None:
        critic = options.critic.model
        batch.values = for_all_rows(critic.backbone, critic)
        batch.returns = value_targets(objective, batch, kl_coef=options.kl_coef)
    batch.advantages = compute_advantages(objective, batch, kl_coef=options.kl_coef)


@torch.no_grad()
def _for_all_rows(
    samples: Sequence[Sample],
    batch: Batch,
    config: TrainSection,
    model: PreTrainedModel,
    forward: Callable[[MicroBatch], Tensor],
) -> Tensor:
    """Computes a value of every trained token, without gradient, all ranks together.

    Args:
        model: the model that `forward` runs.
        forward: returns the values (Q,) of a micro-batch's trained tokens.

    Returns:
        (B, T) in the batch's memory, 0 where no token is trained.
    """
    values = torch.zeros_like(batch.rollout_logprobs)
    share = config.share_prefixes and shares_prefixes(model)
    every_row = range(len(samples))
    for rows, weight in own_share(samples, every_row, config.token_budget, share=share):
        micro = pack(samples, rows, share=share)
        index = torch.from_numpy(micro.rows[micro.row_of]), torch.from_numpy(micro.column_of)
        result = forward(micro).to(values.device)
        ranks.moved()
        if _counts(weight):
            values[index] = result
    return ranks.add_up(values)


def _entropy(model: PreTrainedModel, micro: MicroBatch, temperature: float) -> Tensor:
    _, entropy = sample_logprobs(model, micro, temperature=temperature, with_entropy=True)
    assert entropy is not None
    return entropy


def _sum_squared_probs(model: PreTrainedModel, micro: MicroBatch, temperature: float) -> Tensor:
    """Computes the sum over the vocabulary of p^2 at every trained token, (Q,).

    At half the temperature a token's probability is p^2 over that sum, so two log-probs of the
    sampled token give it: log sum = 2 log p - log p_half.
    """
    logprobs, _ = sample_logprobs(model, micro, temperature=temperature)
    halved, _ = sample_logprobs(model, micro, temperature=temperature / 2)
    return torch.exp(2 * logprobs - halved)


# plan ---------------------------------------------------------------------------------------------


def plan(
    model: PreTrainedModel, samples: Sequence[Sample], batch: Batch, options: UpdateOptions
) -> list[MiniBatch]:
    """Splits the batch into the mini-batches of all epochs, and each into micro-batches."""
    config = options.config
    # The routers' loss must count a shared prefix once for every sample, so it is repeated there.
    share = config.share_prefixes and config.router_aux_loss == 0 and shares_prefixes(model)
    if options.critic is not None:
        share = share and shares_prefixes(options.critic.model.backbone)
    minibatches = []
    for epoch in range(config.num_epochs):
        order = f"{options.seed}/{epoch}"
        for rows in split_groups(batch.group_ids, config.num_minibatches, order):
            micro_batches = own_share(samples, rows, config.token_budget, share=share)
            minibatches.append(MiniBatch(rows, micro_batches, share))
    return minibatches


def split_groups(group_ids: Tensor, num_parts: int, seed: str) -> list[list[int]]:
    """Splits a batch into mini-batches of whole groups, of about equally many, in a seeded order.

    Groups stay whole because half a group in a mini-batch would have half a baseline.

    Args:
        group_ids: (B,) the group of each row.
        num_parts: mini-batches; fewer are returned if there are fewer groups.

    Returns:
        The rows of each mini-batch, ascending.
    """
    groups = list(dict.fromkeys(group_ids.tolist()))
    if num_parts > 1:
        random.Random(seed).shuffle(groups)
    parts = [set(groups[part::num_parts]) for part in range(num_parts)]
    rows = [
        [row for row, group in enumerate(group_ids.tolist()) if group in part] for part in parts
    ]
    return [part for part in rows if part]


def own_share(
    samples: Sequence[Sample], rows: Sequence[int], token_budget: int, *, share: bool
) -> list[tuple[list[int], float]]:
    """Returns this rank's share of the micro-batches of `rows`, each as its rows and its weight
    (see `share_of`). A single rank gets all of them."""
    bundled = bundles(samples, rows, token_budget, share=share)
    lengths = [tokens for _, tokens in bundled]
    costs = [cost(tokens, [len(samples[row]) for row in each]) for each, tokens in bundled]
    together = ranks.of_a_row()
    rounds = deal(lengths, costs, token_budget, ranks.size() // together)
    return [
        (sorted(row for index in chosen for row in bundled[index][0]), weight)
        for chosen, weight in share_of(ranks.rank() // together, rounds, costs)
    ]


# learn --------------------------------------------------------------------------------------------


def learn(
    learner: Learner[PreTrainedModel],
    samples: Sequence[Sample],
    batch: Batch,
    minibatches: Sequence[MiniBatch],
    options: UpdateOptions,
) -> Learned:
    """Makes one optimizer update per mini-batch, of the policy and of the critic if there is one.

    Raises:
        TrainingError: too many updates in a row had a non-finite gradient.
    """
    objective, critic, device = options.objective, options.critic, computing_device(learner.model)
    learned = Learned()
    num_done, num_in_all = 0, sum(len(mini.micro_batches) for mini in minibatches)
    has_moved = learner.num_updates > 0
    for mini in minibatches:
        step = prepare(objective, batch.select(mini.rows), kl_coef=options.kl_coef)
        place = {row: index for index, row in enumerate(mini.rows)}
        num_tokens = sum(len(samples[row]) for row in mini.rows)
        for rows, weight in mini.micro_batches:
            micro = pack(samples, rows, share=mini.share)
            # The whole batch, padded to its longest row, stays in host memory; these rows leave it.
            part = step.select([place[row] for row in rows], micro.max_trained).to(device)
            counts = _counts(weight)
            if options.policy_learns:
                output, logprobs, entropy = _add_policy_gradient(
                    learner.model,
                    micro,
                    part,
                    options,
                    weight=weight,
                    portion=micro.num_tokens / num_tokens,
                )
                if counts:
                    learned.metrics.extend((output.metrics, agreement(part, logprobs, has_moved)))
                    measure = functools.partial(_policy_metrics, options, part, logprobs, entropy)
                    learned.metrics.extend(_by_environment(batch, rows, measure))
                    if options.signals is not None:
                        options.signals.take(rows, part, logprobs, output.kept, number=num_done + 1)
            if critic is not None:
                values = trained_matrix(micro, critic.model(micro))
                output = value_loss(objective, part, values)
                (weight * output.loss).backward()
                if counts:
                    learned.metrics.append(output.metrics)
            if counts:
                learned.metrics.append({"computed_tokens": Metric("sum", (micro.num_tokens,))})
            num_done += 1
            ranks.moved()
            if options.on_progress:
                options.on_progress(num_done, num_in_all)
        if options.policy_learns:
            learned.updates.append(learner.step())
        if critic is not None:
            learned.critic_updates.append(critic.step())
    return learned


def _counts(weight: float) -> bool:
    """Tells whether this rank's results of a micro-batch count: it has a weight, and of the ranks
    that compute the same rows this is the first."""
    return weight > 0 and ranks.rank() % ranks.of_a_row() == 0


def _add_policy_gradient(
    model: PreTrainedModel,
    micro: MicroBatch,
    part: Batch,
    options: UpdateOptions,
    *,
    weight: float,
    portion: float,
) -> tuple[LossOutput, Tensor, Tensor | None]:
    """Adds a micro-batch's share to the gradient of the policy.

    Args:
        part: the micro-batch's rows, on the model's device.
        weight: see `MiniBatch.micro_batches`.
        portion: the micro-batch's share of the update's tokens.

    Returns:
        The loss, and the (B, T) log-probs and entropies of the trained tokens.
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


# metrics ------------------------------------------------------------------------------------------


def _advantage_metrics(objective: Objective, batch: Batch) -> list[Mapping[str, Metric]]:
    """Returns the metrics of the advantages, of the batch and of each environment.

    Every rank knows the whole batch, so only rank 0 returns them: they must be counted once.
    """
    if ranks.rank() > 0:
        return []
    every_row = range(len(batch.group_ids))
    return [
        advantage_metrics(objective, batch),
        *_by_environment(
            batch, every_row, lambda rows: advantage_metrics(objective, batch.select(rows))
        ),
    ]


def _by_environment(
    batch: Batch, rows: Sequence[int], measure: Callable[[list[int]], Mapping[str, Metric]]
) -> list[dict[str, Metric]]:
    """Measures the rows of each environment apart, if the run has several.

    Args:
        rows: rows of the batch.
        measure: returns metrics of some of them, given as indices into `rows`.

    Returns:
        The metrics of each environment, named `env/NAME/...`.
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
    options: UpdateOptions, part: Batch, logprobs: Tensor, entropy: Tensor | None, rows: list[int]
) -> Mapping[str, Metric]:
    index = torch.as_tensor(rows, device=logprobs.device)
    of_rows = None if entropy is None else entropy[index]
    return policy_loss(
        options.objective, part.select(index), logprobs[index], of_rows, kl_coef=options.kl_coef
    ).metrics


@torch.no_grad()
def agreement(part: Batch, logprobs: Tensor, has_moved: bool) -> dict[str, Metric]:
    """Compares sampler and trainer over turns that the policy before this update sampled whole, so
    that nothing but rounding explains a difference.

    Args:
        part: rows of a batch.
        logprobs: (B, T) live log-probs.
        has_moved: whether the run has updated the policy before. If not, every turn counts, since
            there has been no other policy.

    Returns:
        The mean and the largest difference of a token and the largest mean of a turn, in nats, and
        the share of the tokens that differ by more than `FAR_OFF` nats.
    """
    turn_ids, turn_rewards, mask = part.turn_ids, part.turn_rewards, part.loss_mask
    assert turn_ids is not None and turn_rewards is not None

    def by_turn(values: Tensor) -> Tensor:
        empty = values.new_zeros(len(values), turn_rewards.shape[1])
        return empty.scatter_add_(1, turn_ids, values)

    if has_moved and part.policy_versions is not None:
        stale = by_turn((mask & (part.policy_versions != part.current_version)).float())
        mask = mask & (stale.gather(1, turn_ids) == 0)
    old = logprobs if part.old_logprobs is None else part.old_logprobs
    gap = torch.where(mask, (old - part.rollout_logprobs).abs(), 0).float()
    of_turn = by_turn(gap) / by_turn(mask.float()).clamp(min=SHORT_TURN)
    total = mask.sum().double()

    def largest(values: Tensor) -> Metric:
        return Metric("max", (torch.cat([values.flatten(), gap.new_zeros(1)]).amax(),))

    return {
        "policy/fresh_diff_mean": Metric("mean", (gap.double().sum(), total)),
        "policy/fresh_diff_max": largest(gap),
        "policy/fresh_diff_turn_max": largest(of_turn),
        "policy/fresh_diff_far": Metric("mean", ((gap > FAR_OFF).double().sum(), total)),
    }


def explained_variance(objective: Objective, batch: Batch) -> float | None:
    """Computes 1 - Var(G - V) / Var(G) over the trained tokens, V before the update and G its
    target.

    A perfect critic has 1, one that knows only the mean has 0. None if G does not vary.
    """
    assert batch.values is not None and batch.returns is not None
    mask = trained_mask(objective, batch)
    returns, values = batch.returns[mask].double(), batch.values[mask].double()
    variance = returns.var(correction=0)
    if len(returns) == 0 or variance <= 1e-12:
        return None
    return float(1 - (returns - values).var(correction=0) / variance)


def _of_all_ranks(metrics: Mapping[str, Metric]) -> list[dict[str, Metric]]:
    if ranks.size() == 1:
        return [dict(metrics)]
    mine: Any = {name: [m.kind, *m.to_floats().parts] for name, m in metrics.items()}
    gathered: list[Any] = ranks.gather(mine)
    return [
        {name: Metric(kind, tuple(parts)) for name, (kind, *parts) in each.items()}
        for each in gathered
    ]


def _update_metrics(updates: list[Update], learner: Learner, section: str) -> dict[str, float]:
    """Returns the metrics of a learner's updates on this batch, named `SECTION/...`."""
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
