"""The critic of PPO and VAPO: a second model, which predicts the return at every sampled token.

Its value head starts at zero, so every value is 0 before its first update. A value belongs to the
state in which a token was sampled: it is read at the hidden state before the token, as the policy's
log-prob is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.model import context
from agentrl.model.logprobs import backbone_hidden
from agentrl.model.rows import MicroBatch


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
