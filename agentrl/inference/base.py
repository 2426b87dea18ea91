"""The interface of inference engines: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from agentrl.types import FinishReason


@dataclass(slots=True, frozen=True)
class SamplingParams:
    max_tokens: int
    """At least 1. Always sent: engines disagree about what its absence means."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps every token."""
    min_p: float = 0.0
    """Tokens below this share of the likeliest one's probability are not sampled."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the prompt and of sampled ones, and multiplies the
    negative ones."""
    seed: int | None = None
    """Decides the request's randomness, together with its id; None leaves it to the engine."""
    report_kept: bool = False
    """Say from which ids each token was drawn, where `top_k`, `top_p` or `min_p` leaves some out.
    A vLLM server does so if it was started with --return-sampling-mask."""
    report_routes: bool = False
    """Say which experts each token went to; the embedded engine alone does."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the turn; the token itself stays in the result."""


@dataclass(slots=True, frozen=True)
class Generation:
    """One sampled continuation. The three lists have one entry per sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    """log softmax(logits / temperature) of each sampled token, natural logarithm. Where `top_p`,
    `top_k`, `min_p` or a penalty shaped the distribution, that of the shaped one."""
    versions: list[int]
    """Policy version that sampled each token."""
    finish_reason: FinishReason
    kept_ids: list[np.ndarray] | None = None
    """For each token the ids it was drawn from, int32; None where that is not known."""
    routes: np.ndarray | None = None
    """(T, routers, experts per token) int16: which experts the tokens of the prompt and of the turn
    went to, but for the last one, which was not computed. None where that is not known."""


def request_seed(seed: int, request_id: str) -> int:
    """The 63-bit seed of one request's random stream: a hash of the run's seed and the id.

    A request then samples the same way whatever else is in its batch.
    """
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class InferenceEngine(Protocol):
    policy_version: int
    """Version of the weights the engine holds; whoever changes them sets it, after the change."""

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams
    ) -> Generation:
        """Sample one continuation of `prompt_ids`.

        `request_id` is unique in a run and the same in a repeated run with the same seed, so an
        engine may derive its randomness from it. Cancelling the call frees the request.

        Raises:
            InferenceError: the engine failed, or its answer broke the contract above.
        """
        ...

    def reserve(self, num_episodes: int) -> None:
        """Announce episodes that are about to send requests.

        An engine that must be deterministic waits until every announced episode either has a
        request pending or was released, so that its batches do not depend on timing: while
        anything is reserved, every request must come from a reserved episode, and an episode that
        replaces another must be reserved before the other is released. A server ignores it.
        """
        ...

    def release(self, num_episodes: int = 1) -> None:
        """Take back a reservation: the episode will send no more requests."""
        ...

    async def aclose(self) -> None: ...
