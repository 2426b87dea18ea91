"""The interface through which the training loop brings its weights to the inference engine."""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedModel


class WeightSync(Protocol):
    async def push(self, model: PreTrainedModel, version: int) -> dict[str, float]:
        """Make every server within reach sample from `model` as it is now, labelled `version`.

        The model must not change before this returns; afterwards it may, the servers hold a copy.
        When cancelled, no server is left paused.

        Returns:
            Metrics: `sync/seconds` all in all, `sync/write_s` for the snapshot, `sync/paused_s`
            the longest time a server produced nothing, `sync/probe_logprob_diff_max` the largest
            |difference| between a server's log-probabilities and the model's on a fixed prompt.

        Raises:
            WeightSyncError: a server refused, failed, or computes something else than the model.
        """
        ...

    async def push_to(self, url: str) -> None:
        """Give the weights of the last push to one server, which was restarted.

        Raises:
            WeightSyncError: as for `push`, or nothing was pushed yet.
        """
        ...

    async def aclose(self) -> None:
        """Remove what the last push left for `push_to`."""
        ...
