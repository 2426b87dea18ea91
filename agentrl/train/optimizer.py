"""Makes optimizer updates: schedule, clipping, and the guard against non-finite gradients.

Bfloat16 weights cannot learn by themselves: near 0.02 neighbouring numbers are 1e-4 apart, so an
update of 1e-6 is rounded away. The optimizer therefore updates float32 master weights, and the
model computes with their cast (Micikevicius et al., "Mixed Precision Training", 2018,
https://arxiv.org/abs/1710.03740). The gradients of micro-batches are summed in float32; clipping,
weight decay, moments and the guard are float32 too.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.config import TrainSection
from agentrl.errors import ConfigError, TrainingError
from agentrl.model import ranks
from agentrl.model.tensors import whole
from agentrl.train.movement import relative_update
from agentrl.types import JSON


@dataclass(slots=True, frozen=True)
class Update:
    """The outcome of one update."""

    applied: bool
    """False if the gradient was not finite: weights, moments and schedule stay as they were."""
    grad_norm: float
    """Norm of the gradient before clipping; not finite if the update was not applied."""
    learning_rate: float
    moved: float | None = None
    """Norm of the change of the weights, relative to that of the weights; None if not known."""


MAX_NONFINITE = 5
"""Updates in a row that are skipped for a gradient that is not finite, before the run stops."""
Model = TypeVar("Model", bound=nn.Module)


class Learner(Generic[Model]):
    """A model with its AdamW state and its position in the learning-rate schedule.

    Attributes:
        model: the model that computes and is sampled from.
        masters: trained parameter -> the float32 weights that the optimizer updates in its place.
            Only parameters that are not float32, or whose update is computed in host memory.
        num_updates: updates applied since the start of the run; the position in the schedule.
        num_skipped: updates skipped because of a non-finite gradient, in all.
        num_skipped_in_a_row: updates skipped since the last applied one.
    """

    def __init__(
        self,
        model: Model,
        config: TrainSection,
        *,
        total_updates: int,
        section: str = "train",
        weights: nn.Module | None = None,
    ) -> None:
        """
        Args:
            total_updates: updates that the run will make, for the schedule.
            section: section of the run file with the learning rate, named in error messages.
            weights: the same model in float32, whose parameters become the master weights; if None,
                they are copied from `model`.

        Raises:
            ConfigError: see `require_optimizer`.
        """
        require_optimizer(config)
        self.model = model
        self.config = config
        self.section = section
        self.total_updates = total_updates
        self.num_updates = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        exact = {} if weights is None else dict(weights.named_parameters())
        self.masters: dict[Tensor, Tensor] = {}
        self._coming: dict[Tensor, tuple[Tensor, torch.Event]] = {}
        """Master in host memory -> gradient on its way there, and the event of its arrival."""
        for name, parameter in model.named_parameters():
            device = torch.device("cpu") if config.optimizer == "adamw_cpu" else parameter.device
            if not parameter.requires_grad or (
                parameter.dtype in (torch.float32, torch.float64) and parameter.device == device
            ):
                continue
            master = exact.get(name, parameter).detach().to(device, torch.float32)
            self.masters[parameter] = nn.Parameter(master)
            parameter.register_post_accumulate_grad_hook(self._add_gradient)
        trained = [self.masters.get(p, p) for p in model.parameters() if p.requires_grad]
        self._trained = trained
        # Gains and biases are few and have a natural scale, so decaying them only hurts.
        decayed, others = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        options = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "adamw_8bit":
            from bitsandbytes.optim.adamw import AdamW8bit

            self.optimizer = AdamW8bit(groups, **options)
        else:
            # No kernel takes lists of tensors that different ranks share.
            one_by_one = len(_by_mesh(trained)) > 1
            self.optimizer = torch.optim.AdamW(
                groups, **options, fused=not one_by_one, foreach=False if one_by_one else None
            )

    def _add_gradient(self, parameter: Tensor) -> None:
        """Adds a micro-batch's gradient to that of the master weights as soon as it is complete."""
        master, gradient = self.masters[parameter], parameter.grad
        assert gradient is not None
        parameter.grad = None
        if gradient.device == master.device:
            _accumulate(master, gradient)
            return
        # Instead of waiting for this gradient, the host adds that of the previous micro-batch.
        self._take_in(master)
        copy = gradient.to(master.device, non_blocking=True)
        arrived = torch.Event(gradient.device)
        arrived.record()
        self._coming[master] = copy, arrived

    def _take_in(self, master: Tensor) -> None:
        """Adds the gradient that is on its way to `master`, if there is one."""
        if master in self._coming:
            gradient, arrived = self._coming.pop(master)
            arrived.synchronize()
            _accumulate(master, gradient)

    @torch.no_grad()
    def cast(self) -> None:
        """Copies the master weights into the model, rounded to its dtype."""
        for parameter, master in self.masters.items():
            if parameter.device == master.device:
                parameter.copy_(master)
            else:
                rounded = torch.empty_like(master, dtype=parameter.dtype, pin_memory=True)
                parameter.copy_(rounded.copy_(master), non_blocking=True)

    def step(self) -> Update:
        """Applies the accumulated gradients and clears them. Every rank calls it.

        Raises:
            TrainingError: `MAX_NONFINITE` gradients in a row were not finite.
        """
        for master in list(self._coming):
            self._take_in(master)
        norm = self._clip()
        rate = learning_rate(self.config, self.num_updates, self.total_updates)
        applied, moved = math.isfinite(norm), None
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            moved = relative_update(self.optimizer)
            self.cast()
            self.num_updates += 1
            self.num_skipped_in_a_row = 0
        else:
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.num_skipped_in_a_row >= MAX_NONFINITE:
            raise TrainingError(
                f"{self.num_skipped_in_a_row} gradients in a row were not finite; lower "
                f"{self.section}.learning_rate or inspect the saved batch"
            )
        return Update(applied, norm, rate, moved)

    def _clip(self) -> float:
        """Scales the gradients down to `train.max_grad_norm`, and returns their norm before."""
        alike, limit = _by_mesh(self._trained), self.config.max_grad_norm
        if len(alike) == 1:
            return float(whole(nn.utils.clip_grad_norm_(self._trained, limit)))
        gradients = [[p.grad for p in each if p.grad is not None] for each in alike]
        norms = [whole(nn.utils.get_total_norm(each)) for each in gradients if each]
        total = torch.linalg.vector_norm(torch.stack(norms))
        for each in alike:
            nn.utils.clip_grads_with_norm_(each, limit, total)
        return float(total)

    def counters(self) -> dict[str, JSON]:
        """Returns the state that a checkpoint holds besides weights and moments."""
        return {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Restores the state that `counters` returned."""
        self.num_updates = counters["num_updates"]
        self.num_skipped = counters["num_skipped"]
        self.num_skipped_in_a_row = counters["num_skipped_in_a_row"]


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups parameters by the ranks that share them, and by how."""
    groups: dict[object, list[Tensor]] = {}
    for each in parameters:
        groups.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    return list(groups.values())


def _accumulate(master: Tensor, gradient: Tensor) -> None:
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)


def require_optimizer(config: TrainSection) -> None:
    """Checks that the optimizer can be used here.

    Raises:
        ConfigError: `train.optimizer` needs a package that is not installed, or does not work on
            several ranks.
    """
    if ranks.size() > 1 and config.optimizer == "adamw_8bit":
        raise ConfigError(
            f"train.optimizer = 'adamw_8bit' works on one rank only, but {ranks.size()} were "
            "started; set train.optimizer = 'adamw', or 'adamw_cpu', which keeps weights and "
            "moments in host memory"
        )
    if config.optimizer == "adamw_8bit" and not importlib.util.find_spec("bitsandbytes"):
        raise ConfigError(
            "train.optimizer = 'adamw_8bit' needs the bitsandbytes package: "
            "pip install 'agentrl-gym[8bit]', or set train.optimizer = 'adamw'"
        )


def learning_rate(config: TrainSection, update: int, total_updates: int) -> float:
    """Returns the learning rate of update number `update` (from 0).

    After a linear warm-up it follows `train.lr_schedule`, which falls to 0 unless it is constant.
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.learning_rate
    span = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    if config.lr_schedule == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
