"""Holds the tensors of one optimizer step, from which the objective is computed.

B rows, T columns. A row is one sample. Columns are either all positions of a padded row or only its
trained tokens, left-aligned; both work, because everything follows `loss_mask`. Values of (B, T)
fields where the mask is 0 are undefined and do not influence any result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """The tensors of one optimizer step or, after `select`, of one micro-batch.

    Log-probs are natural logarithms of the sampled tokens' probabilities, in any float type.
    """

    loss_mask: Tensor
    """(B, T) bool or number: non-zero where the policy sampled the token."""
    rewards: Tensor
    """(B,) reward of the row's trajectory, equal in all its rows; nan if it could not be scored."""
    group_ids: Tensor
    """(B,) int64, equal for the trajectories of one task, which may be any number in any order."""
    rollout_logprobs: Tensor
    """(B, T) log-probs of the inference engine, at sampling."""
    trajectory_ids: Tensor | None = None
    """(B,) int64, equal for the rows of one trajectory. None: every row is a trajectory."""
    turn_ids: Tensor | None = None
    """(B, T) int64, from 0. None: contiguous runs of the mask are the turns."""
    old_logprobs: Tensor | None = None
    """(B, T) log-probs of the trainer before the update. None: the live ones, detached, which they
    equal on the first use of a batch."""
    ref_logprobs: Tensor | None = None
    """(B, T) log-probs of the frozen reference policy."""
    teacher_logprobs: Tensor | None = None
    """(B, T) log-probs of the teacher, for distillation."""
    values: Tensor | None = None
    """(B, T) the critic's value, before the update, of the state in which the token was sampled."""
    token_ids: Tensor | None = None
    """(B, T) int64, for the gibberish mask."""
    policy_versions: Tensor | None = None
    """(B, T) int64: version of the policy that sampled the token."""
    current_version: int | None = None
    """Version of the policy that is being updated."""
    reward_components: Tensor | None = None
    """(B, K) unweighted components of the reward; nan where one is missing."""
    reward_names: Sequence[str] = ()
    """Names of the K components."""
    turn_rewards: Tensor | None = None
    """(B, M) reward of each turn of the trajectory, indexed by turn id; 0 beyond its last turn."""
    state_ids: Tensor | None = None
    """(B, M) int64 hash of the state in which each turn began, indexed by turn id (GiGPO)."""
    truncated: Tensor | None = None
    """(B,) bool: a limit cut the trajectory."""
    env_ids: Tensor | None = None
    """(B,) int64, equal for the rows of one environment. None: there is one environment."""
    env_names: Sequence[str] = ()
    """Names of the environments, indexed by `env_ids`."""
    baselines: Tensor | None = None
    """(B,) a reward to compare with, such as that of a greedy answer (ReMax)."""
    sum_squared_probs: Tensor | None = None
    """(B, T) sum over the vocabulary of squared probabilities (optimal token baseline)."""
    old_entropy: Tensor | None = None
    """(B, T) entropy of the policy before the update, in nats (top_entropy mask)."""
    advantages: Tensor | None = None
    """(B, T), set by `prepare` from `compute_advantages`."""
    returns: Tensor | None = None
    """(B, T), set by `prepare`: the critic's targets."""
    weights: Tensor | None = None
    """(B, T), set by `prepare` from `loss_weights`: each token's weight in the step's loss."""
    distill_weights: Tensor | None = None
    """(B, T), set by `prepare`: each token's weight in the loss of distillation."""
    step_mask: Tensor | None = None
    """(B, T) bool, set by `prepare`: tokens that all step-wide masks keep."""
    kl_cov_mask: Tensor | None = None
    """(B, T) bool, set by `prepare`: tokens that `surrogate.kind = "kl_cov"` penalises."""
    off_policy_scale: Tensor | None = None
    """(B,), set by `prepare`: 1 / the step's mean weight, the same in every row."""

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
        """The number of rows, B."""
        return self.loss_mask.shape[0]

    def select(self, rows: Tensor | Sequence[int] | slice, num_columns: int | None = None) -> Batch:
        """Returns a batch of these rows, with only the first `num_columns` columns if given.

        Values computed over the whole step (`advantages`, `weights`, ...) are kept, so that the
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
        """Returns the batch with its tensors on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # A copy to an accelerator may finish later; the host would read an unfinished copy.
        beside = torch.device(device).type != "cpu"
        moved: dict[str, Any] = {
            n: v.to(device, non_blocking=beside) for n, v in values.items() if isinstance(v, Tensor)
        }
        return replace(self, **moved)


_PER_ROW = {
    "rewards",
    "group_ids",
    "trajectory_ids",
    "env_ids",
    "truncated",
    "baselines",
    "off_policy_scale",
}
_PER_TURN = {"reward_components", "turn_rewards", "state_ids"}


def _shape_of(name: str) -> str:
    """Returns the dimensions of a field: B rows, T columns, M any other number."""
    return "B" if name in _PER_ROW else "BM" if name in _PER_TURN else "BT"


def field_of(batch: Batch, name: str, needed_by: str) -> Tensor:
    """Returns a field of the batch that must be set.

    Args:
        needed_by: what needs the field, for the message.

    Raises:
        ValueError: the field is None.
    """
    tensor = getattr(batch, name)
    if tensor is None:
        raise ValueError(f"{needed_by} needs Batch.{name}, which this batch was built without")
    return tensor


def wide(tensor: Tensor) -> Tensor:
    """Returns the tensor in float32, or unchanged if it is float64."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
