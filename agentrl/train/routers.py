"""Mixtures of experts: routers that stay as they are, and the loss that spreads tokens evenly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.inference.embedded_routes import routers_of


def freeze_routers(model: PreTrainedModel) -> None:
    """Leave the choice of experts out of training.

    Raises:
        ConfigError: the model has no routers.
    """
    routers = routers_of(model)
    if not routers:
        raise ConfigError(f"model.freeze_router = true, but {type(model).__name__} has no routers")
    for router in routers:
        router.requires_grad_(False)


def require_aux_loss(model: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """The family's own auxiliary loss.

    Raises:
        ConfigError: it has none.
    """
    modeling = sys.modules[type(model).__module__]
    loss = getattr(modeling, "load_balancing_loss_func", None)
    if loss is None or not hasattr(model.config.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(
            f"train.router_aux_loss is above 0, but {type(model).__name__} has no auxiliary loss; "
            "set it to 0"
        )
    return loss


def aux_loss(model: PreTrainedModel, router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Switch Transformer's load-balancing loss (arXiv:2101.03961, eq. 4-6), as the family has it.

    Args:
        router_logits: (tokens, experts) of every layer.

    Returns:
        A scalar, at its least when every expert gets as many tokens as the others.
    """
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(value for name in names if (value := getattr(config, name, None)))
    loss = require_aux_loss(model)
    return loss(tuple(router_logits), num_experts, config.num_experts_per_tok)
