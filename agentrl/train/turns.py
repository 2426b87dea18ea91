"""Lets the trainer and servers take turns on one GPU (`inference.share = "sleep"`).

    servers sample     the trainer keeps only the policy's weights on the device, for the push
    trainer learns     everything is on the device, and the servers are asleep

Whatever a push does not read moves to host memory: float32 masters, the optimizer's moments, the
reference, the teacher and the critic. Nothing is rounded on the way, so taking turns does not
change what a run learns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from agentrl.model.logprobs import computing_device
from agentrl.train.optimizer import Learner
from agentrl.train.trainer import Trainer

_host = WeakTensorKeyDictionary()
"""Tensor on the device -> its pinned host memory, kept so that pages are pinned only once."""


def leave_device(trainer: Trainer) -> None:
    """Moves everything but the policy's weights to host memory, and frees the device's memory."""
    _move(trainer, torch.device("cpu"))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def on_device(trainer: Trainer, takes_turns: bool) -> Iterator[None]:
    """Moves everything that an update needs onto the device while the block runs.

    Args:
        takes_turns: False if the trainer never leaves the device; then this does nothing.
    """
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
    """Yields masters and moments, unless their update is computed on the host."""
    if learner.config.optimizer == "adamw_cpu":
        return
    yield from learner.masters.values()
    for values in learner.optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())
