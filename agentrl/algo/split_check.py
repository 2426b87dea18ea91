"""Checks a user's own loss and advantage before a run starts.

Memory decides how a step is split into micro-batches, so a loss must give the same sum and gradient
for every split and every width of a micro-batch. An advantage sees the whole step at once; it must
not depend on the order of the rows, because trajectories end in any order and groups have any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo.advantages import compute_advantages
from agentrl.algo.batch import Batch
from agentrl.algo.loss import policy_loss, prepare
from agentrl.algo.objective import Objective
from agentrl.errors import ConfigError

LENGTHS = (7, 3, 0, 5, 1, 6)
GROUPS = (0, 0, 1, 0, 2, 1)
SPLITS = (((0, 1, 2, 3, 4, 5),), ((0, 3, 4), (1, 2, 5)), ((5, 0), (2,), (4, 1, 3)))
"""The rows of each micro-batch, for one, two and three of them. One micro-batch has no trained
token."""
ORDER = (4, 0, 5, 2, 1, 3)
TOLERANCE = 1e-4
"""Largest relative difference between two splits. Another order of float32 sums gives less than
1e-6."""


def check_user_functions(objective: Objective) -> None:
    """Tries `objective.advantage` and `objective.loss`, if set, on a small made-up step.

    Raises:
        ConfigError: a function cannot be loaded, asks for an unknown parameter, returns a wrong
            shape or values that are not finite, has no gradient, or depends on how the step is
            split or ordered. The message names the key.
    """
    if objective.advantage is not None:
        _check_advantage(objective.advantage)
    if objective.loss is not None:
        _check_loss(objective.loss, objective)


def _check_loss(reference: str, objective: Objective) -> None:
    name = f"objective.loss = {reference!r}"
    plain = Objective.model_validate(
        {
            "loss": reference,
            "ratio": objective.ratio.model_dump(exclude={"mean_advantage"}),
            "aggregate": objective.aggregate.model_dump(exclude={"denominator"}),
        }
    )
    # Under equal weights the losses of several tokens can make up for each other.
    uneven = torch.rand(len(LENGTHS), max(LENGTHS), generator=torch.Generator().manual_seed(1))
    for factors in (torch.ones_like(uneven), uneven):
        whole, *parts = (_loss_of(name, plain, split, factors) for split in SPLITS)
        if any(_differ(whole, other) for other in parts):
            raise ConfigError(
                f"{name} depends on how a step is split into micro-batches, so its gradient would "
                "change with memory settings: a token's loss may use its own row only; remove "
                "statistics over other rows or over the width, such as a mean over the micro-batch "
                "(objective.advantage sees the whole step)"
            )


def _loss_of(
    name: str, objective: Objective, split: tuple[tuple[int, ...], ...], factors: Tensor
) -> Tensor:
    """Returns the loss of the made-up step, followed by its gradient.

    Args:
        split: the rows of each micro-batch.
        factors: (B, T), multiply the tokens' weights.
    """
    batch, logprobs, entropy = _step()
    prepare(objective, batch)
    assert batch.weights is not None
    batch.weights = batch.weights * factors
    live = logprobs.requires_grad_()
    total = torch.zeros(())
    for rows in split:
        width = max(LENGTHS[row] for row in rows)
        part = batch.select(rows, width)
        index = list(rows)
        output = policy_loss(objective, part, live[index, :width], entropy[index, :width])
        if not output.loss.isfinite():
            raise ConfigError(f"{name} returned a loss that is not finite")
        total = total + output.loss
    if not total.requires_grad:
        raise ConfigError(
            f"{name} has no gradient; compute it from 'logprobs' or 'ratio', without detach"
        )
    (gradient,) = torch.autograd.grad(total, live)
    if not gradient.isfinite().all():
        raise ConfigError(f"{name} has a gradient that is not finite")
    return torch.cat([total.detach().view(1), gradient.flatten()])


def _check_advantage(reference: str) -> None:
    name = f"objective.advantage = {reference!r}"
    plain = Objective.model_validate({"advantage": reference})
    batch, _, _ = _step()
    expected = compute_advantages(plain, batch)
    if not expected.isfinite().all():
        raise ConfigError(
            f"{name} returned values that are not finite; it has to handle groups of one and rows "
            "without a trained token"
        )
    order = list(ORDER)
    if _differ(expected[order], compute_advantages(plain, batch.select(order))):
        raise ConfigError(
            f"{name} depends on the order of the rows; find the rows of a task by group_ids, never "
            "by position, because groups have any size and order"
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() > TOLERANCE * one.abs().max().clamp(min=1e-3))


def _step() -> tuple[Batch, Tensor, Tensor]:
    """Returns a step with every input that a function may ask for, and live log-probs and entropy,
    both (B, T)."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = len(LENGTHS), max(LENGTHS)
    shape = (rows, columns)

    def logprobs() -> Tensor:
        return -2 * torch.rand(shape, generator=generator)

    old = logprobs()
    mask = torch.arange(columns) < torch.tensor(LENGTHS)[:, None]
    rewards = torch.rand(rows, generator=generator)
    batch = Batch(
        loss_mask=mask,
        rewards=rewards,
        group_ids=torch.tensor(GROUPS),
        trajectory_ids=torch.arange(rows),
        turn_ids=(torch.arange(columns) // 3).expand(shape),
        rollout_logprobs=old + 0.1 * logprobs(),
        old_logprobs=old,
        ref_logprobs=logprobs(),
        teacher_logprobs=logprobs(),
        old_entropy=-logprobs(),
        token_ids=torch.randint(0, 1000, shape, generator=generator),
        policy_versions=torch.randint(0, 3, shape, generator=generator),
        current_version=3,
        turn_rewards=torch.stack([rewards / 2, rewards / 2, torch.zeros(rows)], 1),
        truncated=torch.tensor([False, True, False, False, True, False]),
        baselines=torch.rand(rows, generator=generator),
    )
    return batch, old + 0.2 * logprobs(), -logprobs()
