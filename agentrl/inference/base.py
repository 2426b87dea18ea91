"""Defines the interface of inference engines: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from agentrl.types import FinishReason


@dataclass(slots=True, frozen=True)
class SamplingParams:
    max_tokens: int
    """Largest number of tokens to sample, at least 1. It has no default because engines disagree
    about one."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Number of likeliest tokens to sample from; -1 keeps every token."""
    min_p: float = 0.0
    """Excludes tokens less probable than this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the prompt or already sampled, and multiplies their
    negative logits."""
    seed: int | None = None
    """Seeds the request's random numbers, together with its id. None leaves them to the engine."""
    report_kept: bool = False
    """Reports the ids that each token was drawn from, if `top_k`, `top_p` or `min_p` excludes some.
    A vLLM server does so if it was started with --return-sampling-mask."""
    report_routes: bool = False
    """Reports the experts that each token went to. Servers do so if they were started with
    --enable-return-routed-experts; if not, the request fails."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the turn; the token itself stays in the result."""


@dataclass(slots=True, frozen=True)
class Generation:
    """One sampled continuation. The lists have one entry per sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log-probability of each sampled token, log softmax(logits / temperature). With
    `top_p`, `top_k`, `min_p` or a penalty, that of the resulting distribution; SGLang reports it
    from before `top_p`, `top_k` and `min_p`."""
    versions: list[int]
    """Policy version that sampled each token."""
    finish_reason: FinishReason
    kept_ids: list[np.ndarray] | None = None
    """The ids that each token was drawn from, int32 arrays; None if the engine did not report
    them."""
    routes: np.ndarray | None = None
    """(T, routers, experts per token) int16, or a server's (T, layers * experts per token): the
    experts that the tokens of prompt and turn went to, except the last token, which was not
    computed. None if the engine did not report them."""


def request_seed(seed: int, request_id: str) -> int:
    """Returns the 63-bit seed of a request's random numbers, a hash of the run's seed and its id.

    With a seed of its own, a request's samples do not depend on the rest of its batch.
    """
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class InferenceEngine(Protocol):
    policy_version: int
    """Version of the engine's weights. Code that changes the weights sets it, after the change."""

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams
    ) -> Generation:
        """Samples one continuation of `prompt_ids`. Cancelling the call drops the request.

        `request_id` is unique within a run and the same in a repeated run with the same seed, so an
        engine may derive its random numbers from it.

        Raises:
            InferenceError: the engine failed, or its answer is not a valid `Generation`.
        """
        ...

    def reserve(self, num_episodes: int) -> None:
        """Announces episodes that are about to send requests.

        A deterministic engine waits until every reserved episode either has a request pending or
        was released, so that its batches do not depend on timing. While anything is reserved, every
        request must come from a reserved episode. An episode that replaces another must be reserved
        before the other is released. Servers ignore reservations.
        """
        ...

    def release(self, num_episodes: int = 1) -> None:
        """Takes back reservations of episodes that will send no more requests."""
        ...

    async def aclose(self) -> None: ...
