"""One optimizer update: schedule, clipping, and the guard against non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from agentrl.config import TrainSection
from agentrl.errors import TrainingError
from agentrl.types import JSON


@dataclass(slots=True, frozen=True)
class Update:
    """What an update did."""

    applied: bool
    """False when the gradient was not finite: weights, moments and schedule stay as they were."""
    grad_norm: float
    """Before clipping; not finite when not applied."""
    learning_rate: float


Model = TypeVar("Model", bound=nn.Module)


class Learner(Generic[Model]):
    """A model with its AdamW state and its place in the learning-rate schedule.

    Attributes:
        num_updates: updates applied since the start of the run; the schedule's position.
        num_skipped: updates skipped for a non-finite gradient, in all.
        num_skipped_in_a_row: those since the last applied one.
    """

    def __init__(
        self,
        model: Model,
        config: TrainSection,
        *,
        total_updates: int,
        section: str = "train",
    ) -> None:
        """`section` of the run file holds its learning rate, for error messages."""
        self.model = model
        self.config = config
        self.section = section
        self.total_updates = total_updates
        self.num_updates = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        # Gains and biases are few and near their natural scale: decaying them only hurts.
        decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(self) -> Update:
        """Apply the accumulated gradients and clear them.

        Raises:
            TrainingError: `max_nonfinite_steps` gradients in a row were not finite.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        rate = learning_rate(self.config, self.num_updates, self.total_updates)
        applied = math.isfinite(norm)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.num_updates += 1
            self.num_skipped_in_a_row = 0
        else:
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.num_skipped_in_a_row >= self.config.max_nonfinite_steps:
            raise TrainingError(
                f"{self.num_skipped_in_a_row} gradients in a row were not finite; lower "
                f"{self.section}.learning_rate or inspect the saved batch"
            )
        return Update(applied, norm, rate)

    def counters(self) -> dict[str, JSON]:
        """What a checkpoint holds besides weights and moments."""
        return {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        self.num_updates = counters["num_updates"]
        self.num_skipped = counters["num_skipped"]
        self.num_skipped_in_a_row = counters["num_skipped_in_a_row"]


def learning_rate(config: TrainSection, update: int, total_updates: int) -> float:
    """Rate of update number `update` (from 0): linear warm-up, then the schedule down to 0."""
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.learning_rate
    span = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    if config.lr_schedule == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
