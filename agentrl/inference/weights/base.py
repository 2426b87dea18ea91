"""The interface through which the training loop sends its weights to the inference engine."""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedModel


class WeightSync(Protocol):
    async def push(self, model: PreTrainedModel, version: int) -> dict[str, float]:
        """Updates all reachable servers to the current weights of `model`, labelled `version`.

        The model must not change before this returns; afterwards the servers have their own copy.
        If it is cancelled, no server stays paused.

        Returns:
            Metrics: `sync/seconds`, the total time; `sync/write_s`, the time to copy the weights;
            `sync/paused_s`, the longest pause of a server; `sync/probe_logprob_diff_max`, the
            largest absolute difference between a server's log-probabilities and the model's on a
            fixed prompt; and `sync/servers_missed`, the number of servers that were not reached.

        Raises:
            WeightSyncError: a server refused the update, failed, or its log-probabilities differ
                from the model's.
        """
        ...

    async def push_to(self, url: str) -> None:
        """Sends the weights of the last push to one server that was restarted.

        Raises:
            WeightSyncError: see `push`; or nothing was pushed yet.
        """
        ...

    async def aclose(self) -> None:
        """Deletes the copy of the weights that was kept for `push_to`."""
        ...
