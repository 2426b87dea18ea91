"""Takes down what an update computes for each token, for `agentrl.rollout.signals`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algo import Batch, Objective
from agentrl.algo.aggregate import trained_mask
from agentrl.rollout.signals import RowSignals
from agentrl.train import ranks
from agentrl.types import Sample


class StepSignals:
    """Takes parts of the step's batch while they are on the device; nothing waits for it.

    `take` them micro-batch by micro-batch, `gather` them once, then `rows` are there.
    """

    def __init__(self, batch: Batch) -> None:
        """
        Args:
            batch: in host memory.
        """
        self._batch = batch
        self._parts: list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]] = []
        """Rows, values and masks of micro-batches, in host memory or on their way there."""
        self._taken: dict[str, Tensor] = {}
        """(B, T) each."""
        self._masks: dict[str, Tensor] = {}
        self._taken_at = torch.zeros(batch.loss_mask.shape[0])
        """(B,) in which round of micro-batches, from 1, this rank last took the row; 0: never."""

    def take(
        self,
        rows: Sequence[int],
        part: Batch,
        logprobs: Tensor,
        kept: Mapping[str, Tensor],
        *,
        number: int = 1,
    ) -> None:
        """
        Args:
            rows: of the step's batch, which `part` holds in this order.
            logprobs: (b, t) live, of the trained tokens.
            kept: (b, t) what each trust mask let through.
            number: of the micro-batch, from 1; of all ranks it is the same in one round.
        """
        assert part.weights is not None
        index, values = torch.as_tensor(rows), {"logprobs": logprobs, "weights": part.weights}
        self._parts.append((index, _to_host(values), _to_host(kept)))
        self._taken_at[index] = number

    def gather(self) -> None:
        """Have what all ranks took, of each row what was taken last. Every rank calls it, and
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
        masks: Any = ranks.share([*self._masks])  # rank 0 always takes some, another may not
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
        """Returns a function that makes the rows of samples whose group `keeps` wants. Another
        thread may call it, when the batch has moved on.

        Args:
            samples: the rows of the batch, in its order.
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
    """One row of the batch, its columns put back to the positions of the sample's tokens."""
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
