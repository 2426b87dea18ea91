"""The critic of PPO and VAPO: a second model, which predicts the return at every sampled token.

It starts from the policy's weights (or from `critic.path`) with a value head of zeros, so every
value is 0 before its first update. A value belongs to the state in which a token was sampled: it is
read at the hidden state before the token, as the policy's log-prob is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.algo import Batch, Objective
from agentrl.algo.aggregate import trained_mask
from agentrl.config import RunConfig
from agentrl.model import context, sharding
from agentrl.model.compile import compile_layers
from agentrl.model.load import set_gradient_checkpointing
from agentrl.model.logprobs import backbone_hidden, decoder_of
from agentrl.model.rows import MicroBatch
from agentrl.train.optimizer import Learner
from agentrl.train.teacher import require_same_tokenizer


class Critic(nn.Module):
    """A decoder without its language-model head, and one linear layer in float32."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        hidden_size = backbone.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden_size, 1, dtype=torch.float32, device=backbone.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Computes the values (Q,) float32 of trained tokens, on the critic's device."""
        together = context.of(self.backbone)
        part = context.own_part(micro, together)
        hidden = backbone_hidden(self.backbone, part)
        hidden = hidden[torch.from_numpy(part.trained_index).to(hidden.device, non_blocking=True)]
        return context.of_all(micro, self.value_head(hidden.float()).squeeze(1), together)


def make_critic(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    device: torch.device,
    total_updates: int,
) -> Learner[Critic]:
    """Loads and shards the critic of a run, with its own optimizer.

    Args:
        total_updates: updates that the run will make, for the learning-rate schedule.

    Raises:
        ConfigError: `critic.path` cannot be loaded or has another tokenizer than the policy.
    """
    path = config.critic.path or config.model.path
    require_same_tokenizer(path, tokenizer, "critic.path")
    model = sharding.load_model(
        path, dtype=dtype, device=device, max_tokens=config.rollout.max_context_tokens
    )
    set_gradient_checkpointing(model, config.model.gradient_checkpointing)
    settings = config.train.model_copy(update={"learning_rate": config.critic.learning_rate})
    masters = sharding.load_masters(path, dtype)
    critic = sharding.shard(
        Critic(decoder_of(model)), dtype=dtype, device=device, optimizer=config.train.optimizer
    )
    if config.model.compile:
        compile_layers(critic, critic.backbone, critic)
    return Learner(
        critic,
        settings,
        total_updates=total_updates,
        section="critic",
        weights=None if masters is None else Critic(decoder_of(masters)),
    )


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
