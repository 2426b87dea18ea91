"""A trainer that shares its GPU with servers, and leaves it while they sample.

    servers sample     the trainer keeps only the policy's weights on the device, for the push
    trainer learns     everything is on the device again, and the servers are asleep

What leaves for host memory is what no push reads: float32 masters, the optimizer's moments, the
reference, the teacher and the critic. Nothing is rounded on the way, so a run with turns learns
what one without does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from agentrl.train.logprobs import computing_device
from agentrl.train.optimizer import Learner
from agentrl.train.trainer import Trainer

_host = WeakTensorKeyDictionary()
"""The host memory of each tensor meanwhile; its pages are pinned once, not in every step."""


def leave_device(trainer: Trainer) -> None:
    """Move to host memory what servers can do without, and give the device's memory back."""
    _move(trainer, torch.device("cpu"))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def on_device(trainer: Trainer, takes_turns: bool) -> Iterator[None]:
    """Keep all that an update computes with on the device while the block runs."""
    if not takes_turns:
        yield
        return
    _move(trainer, computing_device(trainer.model))
    try:
        yield
    finally:
        leave_device(trainer)


def _move(trainer: Trainer, device: torch.device) -> None:
    for tensor in _resting(trainer):
        if tensor.device.type == "cuda" and device.type == "cpu":
            if tensor not in _host:
                _host[tensor] = torch.empty_like(tensor.data, device=device, pin_memory=True)
            tensor.data = _host[tensor].copy_(tensor.data, non_blocking=True)
        else:
            tensor.data = tensor.data.to(device, non_blocking=True)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _resting(trainer: Trainer) -> Iterator[Tensor]:
    yield from _state(trainer.learner)
    if trainer.critic is not None:
        yield from _tensors(trainer.critic.model)
        yield from _state(trainer.critic)
    for frozen in (trainer.reference, trainer.teacher):
        if isinstance(frozen, nn.Module) and frozen is not trainer.model:
            yield from _tensors(frozen)


def _state(learner: Learner[Any]) -> Iterator[Tensor]:
    """Masters and moments, unless their update is computed on the host."""
    if learner.config.optimizer == "adamw_cpu":
        return
    yield from learner.masters.values()
    for values in learner.optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())
