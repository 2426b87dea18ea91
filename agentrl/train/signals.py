"""Records the values that an update computes for each token, for `agentrl.rollout.signals`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algo import Batch, Objective
from agentrl.algo.aggregate import trained_mask
from agentrl.model import ranks
from agentrl.rollout.signals import RowSignals
from agentrl.types import Sample


class StepSignals:
    """Records per-token values of a step's batch without making the host wait for the device.

    Call `take` after every micro-batch, `gather` once after the last, then `rows`.
    """

    def __init__(self, batch: Batch) -> None:
        """
        Args:
            batch: the step's batch, in host memory.
        """
        self._batch = batch
        self._parts: list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]] = []
        """Rows, values and masks of micro-batches, in host memory or on their way there."""
        self._taken: dict[str, Tensor] = {}
        """Name of a value -> (B, T) float32."""
        self._masks: dict[str, Tensor] = {}
        """Name of a trust mask -> (B, T) bool."""
        self._taken_at = torch.zeros(batch.loss_mask.shape[0])
        """(B,) number, from 1, of the micro-batch in which this rank last took a row; 0: never."""

    def take(
        self,
        rows: Sequence[int],
        part: Batch,
        logprobs: Tensor,
        kept: Mapping[str, Tensor],
        *,
        number: int = 1,
    ) -> None:
        """Records a micro-batch.

        Args:
            rows: rows of the step's batch, in the order of `part`.
            part: the micro-batch, with its weights.
            logprobs: (b, t) live log-probs of the trained tokens.
            kept: trust mask -> (b, t) the tokens that it keeps.
            number: number of the micro-batch, from 1; the same on all ranks in one round.
        """
        assert part.weights is not None
        index, values = torch.as_tensor(rows), {"logprobs": logprobs, "weights": part.weights}
        self._parts.append((index, _to_host(values), _to_host(kept)))
        self._taken_at[index] = number

    def gather(self) -> None:
        """Collects the records of all ranks, for each row the last one. Every rank calls it, and
        waits for its device."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        for index, values, masks in self._parts:
            for name, value in values.items():
                width = value.shape[1]
                self._into(self._taken, name, torch.nan)[index, :width] = value.float()
            for name, mask in masks.items():
                self._into(self._masks, name, False)[index, : mask.shape[1]] = mask
        self._parts.clear()
        if ranks.size() == 1:
            return
        mine = self._taken_at == ranks.largest(self._taken_at.clone())
        masks: Any = ranks.share([*self._masks])  # rank 0 has taken some rows, others may have none
        for matrices, names, fill in (
            (self._taken, ["logprobs", "weights"], torch.nan),
            (self._masks, masks, False),
        ):
            for name in names:
                values = self._into(matrices, name, fill).float().nan_to_num_()
                total = ranks.add_up(values * mine[:, None])
                matrices[name] = total > 0 if fill is False else total

    def _into(self, matrices: dict[str, Tensor], name: str, fill: float | bool) -> Tensor:
        if name not in matrices:
            dtype = torch.bool if fill is False else torch.float32
            matrices[name] = torch.full(self._batch.loss_mask.shape, fill, dtype=dtype)
        return matrices[name]

    def rows(
        self, samples: Sequence[Sample], objective: Objective, keeps: Callable[[str], bool]
    ) -> Callable[[], list[RowSignals]]:
        """Returns a function that makes the signals of the samples to be logged.

        It may be called later and in another thread.

        Args:
            samples: the rows of the batch, in its order.
            keeps: tells by its id whether a group is logged.
        """
        batch, taken = self._batch, self._taken
        logprobs = taken.get("logprobs")
        matrices = {
            "advantages": batch.advantages,
            "old_logprobs": logprobs if batch.old_logprobs is None else batch.old_logprobs,
            "logprobs": logprobs,
            "weights": taken.get("weights"),
            "values": batch.values,
        }
        arrays = {name: m.numpy() for name, m in matrices.items() if m is not None}
        masks = {name: mask.numpy() for name, mask in self._masks.items()}
        trained = trained_mask(objective, batch).numpy()

        def make() -> list[RowSignals]:
            return [
                _row(sample, trained[row], {n: a[row] for n, a in arrays.items()},
                     {n: m[row] for n, m in masks.items()})
                for row, sample in enumerate(samples)
                if keeps(sample.group_id)
            ]  # fmt: skip

        return make


def _row(
    sample: Sample,
    trained: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    masks: Mapping[str, np.ndarray],
) -> RowSignals:
    """Puts the columns of a batch's row back to the positions of the sample's tokens.

    Args:
        trained: (T,) the columns that hold a trained token.
        arrays, masks: name -> (T,).
    """
    length = len(sample)
    (columns,) = trained.nonzero()
    positions = sample.loss_mask.nonzero()[0][columns]
    nan = np.full(length, np.nan, np.float32)

    def spread(values: np.ndarray | None, empty: np.ndarray) -> np.ndarray:
        if values is not None:
            empty[positions] = values[columns]
        return empty

    def floats(name: str) -> np.ndarray:
        return spread(arrays.get(name), nan.copy())

    return RowSignals(
        sample.trajectory_id,
        sample.row,
        spread(trained, np.zeros(length, bool)),
        advantages=floats("advantages"),
        old_logprobs=floats("old_logprobs"),
        logprobs=floats("logprobs"),
        weights=floats("weights"),
        values=floats("values") if "values" in arrays else None,
        kept={name: spread(mask, np.zeros(length, bool)) for name, mask in masks.items()},
    )


def _to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().to("cpu", non_blocking=True) for name, each in tensors.items()}
