"""The tensors of one optimizer step, as every function of the objective reads them.

B rows, T columns. A row is one sample; columns are all positions of a padded row, or the trained
tokens only, left-aligned: nothing depends on which, because everything goes by `loss_mask`.
Fields with suffix (B, T) are undefined where the mask is 0 and are never read there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """One optimizer step, or with `select` the rows of one micro-batch."""

    loss_mask: Tensor
    """(B, T) bool or number: non-zero where the policy sampled the token."""
    rewards: Tensor
    """(B,) the trajectory's reward, equal in all its rows; nan where it could not be scored."""
    group_ids: Tensor
    """(B,) int64: trajectories of one task share a number. Any sizes, any order."""
    rollout_logprobs: Tensor
    """(B, T) of the inference engine, at sampling."""
    trajectory_ids: Tensor | None = None
    """(B,) int64: rows of one trajectory share a number; none: every row is a trajectory."""
    turn_ids: Tensor | None = None
    """(B, T) int64, from 0; none: contiguous runs of the mask are the turns."""
    old_logprobs: Tensor | None = None
    """(B, T) of the trainer before the update; none: the live ones, detached (first use)."""
    ref_logprobs: Tensor | None = None
    """(B, T) of the frozen reference policy."""
    teacher_logprobs: Tensor | None = None
    """(B, T) of the model that is distilled from."""
    values: Tensor | None = None
    """(B, T) of the critic before the update, V at the state in which the token was sampled."""
    token_ids: Tensor | None = None
    """(B, T) int64 (gibberish mask)."""
    policy_versions: Tensor | None = None
    """(B, T) int64: version of the policy that sampled the token."""
    current_version: int | None = None
    """Version of the policy that is being updated."""
    reward_components: Tensor | None = None
    """(B, K) unweighted parts of the reward; nan where a component has no answer."""
    reward_names: Sequence[str] = ()
    """Names of the K components."""
    turn_rewards: Tensor | None = None
    """(B, M) reward of each turn of the trajectory, indexed by turn id, 0 beyond its turns."""
    state_ids: Tensor | None = None
    """(B, M) int64 hash of the state in which each turn began, indexed by turn id (GiGPO)."""
    truncated: Tensor | None = None
    """(B,) bool: the trajectory was cut by a limit."""
    env_ids: Tensor | None = None
    """(B,) int64: rows of one environment share a number; none: there is one environment."""
    env_names: Sequence[str] = ()
    """Names of those numbers."""
    baselines: Tensor | None = None
    """(B,) a reward to compare with, such as that of a greedy answer (ReMax)."""
    sum_squared_probs: Tensor | None = None
    """(B, T) sum over the vocabulary of squared probabilities (optimal token baseline)."""
    old_entropy: Tensor | None = None
    """(B, T) entropy of the policy before the update (top_entropy mask)."""
    advantages: Tensor | None = None
    """(B, T) set by prepare, of `compute_advantages`."""
    returns: Tensor | None = None
    """(B, T) set by prepare: what the critic learns to predict."""
    weights: Tensor | None = None
    """(B, T) set by prepare, of `loss_weights`: a token's share in the loss of the whole step."""
    distill_weights: Tensor | None = None
    """(B, T) set by prepare: the same for the loss of distillation."""
    step_mask: Tensor | None = None
    """(B, T) bool, set by prepare: product of the masks that need the whole step."""
    kl_cov_mask: Tensor | None = None
    """(B, T) bool, set by prepare: the tokens that `surrogate.kind = "kl_cov"` holds back."""
    off_policy_scale: Tensor | None = None
    """(B,) set by prepare: 1 / mean weight of the step, in every row."""

    def __post_init__(self) -> None:
        if self.loss_mask.dim() != 2:
            raise ValueError(f"loss_mask must be (B, T), got shape {tuple(self.loss_mask.shape)}")
        rows, columns = self.loss_mask.shape
        for field in fields(self):
            tensor, shape = getattr(self, field.name), _shape_of(field.name)
            expected = (rows, columns) if shape == "BT" else (rows,)
            if isinstance(tensor, Tensor) and tuple(tensor.shape[: len(expected)]) != expected:
                raise ValueError(
                    f"{field.name} must be ({', '.join(shape)}) with B, T = {rows}, {columns}, got "
                    f"shape {tuple(tensor.shape)}"
                )

    @property
    def num_rows(self) -> int:
        """B."""
        return self.loss_mask.shape[0]

    def select(self, rows: Tensor | Sequence[int] | slice, num_columns: int | None = None) -> Batch:
        """The batch of some rows, with `num_columns` first columns (all when not given).

        What was computed over the whole step (`advantages`, `weights`, ...) comes along, so that
        losses of micro-batches add up to the step's.
        """
        index: Tensor | slice
        if isinstance(rows, slice):
            index = rows
        else:
            index = torch.as_tensor(rows, dtype=torch.long, device=self.loss_mask.device)
        selected = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value = value[index]
                if _shape_of(field.name) == "BT" and num_columns is not None:
                    value = value[:, :num_columns]
            selected[field.name] = value
        return Batch(**selected)

    def to(self, device: torch.device | str) -> Batch:
        """The batch with its tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # On its way to a device nothing is read; on its way to the host it has to be there.
        beside = torch.device(device).type != "cpu"
        moved: dict[str, Any] = {
            n: v.to(device, non_blocking=beside) for n, v in values.items() if isinstance(v, Tensor)
        }
        return replace(self, **moved)


_PER_ROW = {
    *("rewards", "group_ids", "trajectory_ids", "env_ids", "truncated", "baselines"),
    "off_policy_scale",
}
_PER_TURN = {"reward_components", "turn_rewards", "state_ids"}


def _shape_of(name: str) -> str:
    """B rows, T columns, M numbers of its own."""
    return "B" if name in _PER_ROW else "BM" if name in _PER_TURN else "BT"


def field_of(batch: Batch, name: str, needed_by: str) -> Tensor:
    """A field of the batch that an objective cannot do without.

    Raises:
        ValueError: the batch was built without it.
    """
    tensor = getattr(batch, name)
    if tensor is None:
        raise ValueError(f"{needed_by} needs Batch.{name}, which this batch was built without")
    return tensor


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it came so."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
