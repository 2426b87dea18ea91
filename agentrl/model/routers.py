"""Trains mixtures of experts: frozen routers, and the loss that spreads tokens over experts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.model.routes import routers_of


def freeze_routers(model: PreTrainedModel) -> None:
    """Freezes the routers, which choose the experts.

    Raises:
        ConfigError: the model has no routers.
    """
    routers = routers_of(model)
    if not routers:
        raise ConfigError(f"model.freeze_router = true, but {type(model).__name__} has no routers")
    for router in routers:
        router.requires_grad_(False)


def require_aux_loss(model: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """Returns the auxiliary loss function of the model's family.

    Raises:
        ConfigError: the family has none.
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
    """Computes the load-balancing loss of Switch Transformer (arXiv:2101.03961, eq. 4-6), with the
    family's own function.

    Args:
        router_logits: (tokens, experts) of every layer.

    Returns:
        A scalar, smallest when every expert gets equally many tokens.
    """
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(value for name in names if (value := getattr(config, name, None)))
    loss = require_aux_loss(model)
    return loss(tuple(router_logits), num_experts, config.num_experts_per_tok)
