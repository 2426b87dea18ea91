"""Does a server compute what the trainer's model computes? A fixed prompt answers it.

Every update route of a server can answer 200 and yet leave a part of the old weights in use. The
log-probabilities of a whole prompt depend on all of them, so after each update they are compared:

* of every prompt token after the first, log softmax(z), which servers give at temperature 1;
* of one token sampled after the prompt, log softmax(z / temperature), as a rollout gets it.

A 16-bit model rounds its logits to about 1/256 of their size, so between two correct engines the
log-probability of an unlikely token (-20, say) may differ by 0.1 and more. The tolerance is
therefore one of nats for log-probabilities above -1 and of a share of the value below.

Servers that keep their weights in 8 bits are compared with what the trainer's model computes when
it rounds alike (`agentrl.sync.fp8`). Where two engines differ in the last of 16 bits, rounding to 8
makes more of it: single tokens are off by as much as with wrong weights, their mean is not.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentrl.errors import InferenceError, WeightSyncError
from agentrl.inference.token_api import (
    Endpoint,
    NotJSON,
    PromptLogprob,
    SamplingFields,
    read_sampled,
    request_body,
)
from agentrl.sync.control import RouteMissing, ServerControl
from agentrl.sync.fp8 import in_8_bits

_ABSENT = PromptLogprob(None)


@dataclass(slots=True, frozen=True)
class ProbeLogprobs:
    """The log-probs that the trainer's model computes at one version, for a prompt of P tokens."""

    version: int
    prompt_ids: list[int]
    prompt: list[float]
    """P - 1 values: of `prompt_ids[1:]`, temperature 1."""
    sampled: torch.Tensor  # (V,) float32: of every token after the prompt, at `temperature`
    temperature: float
    is_rounded: bool = False
    """Computed as servers do that keep their weights in 8 bits."""


@dataclass(slots=True, frozen=True)
class ProbeResult:
    prompt_diff: float
    """Largest |server - trainer| over the prompt's tokens, in nats."""
    sampled_diff: float
    """|server - trainer| of the sampled token."""
    error: float
    """Largest |server - trainer| / max(1, |trainer|) over all of them, or their mean for servers in
    8 bits: what is judged."""
    label: str | None
    """The version by which the server labels the sampled token; None where it labels none."""


@torch.no_grad()
def trainer_logprobs(
    model: PreTrainedModel,
    prompt_ids: list[int],
    *,
    version: int,
    temperature: float,
    quantization: str | None = None,
) -> ProbeLogprobs:
    """
    Args:
        quantization: of the servers; the model computes here as they do.

    Raises:
        WeightSyncError: the model's own log-probabilities are not finite.
    """
    ids = torch.tensor([prompt_ids], device=model.device)
    with in_8_bits(model) if quantization else contextlib.nullcontext():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()  # (P, V)
    prompt = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    sampled = (logits[-1] / temperature).log_softmax(-1).cpu()
    if not (prompt.isfinite().all() and sampled.isfinite().all()):
        raise WeightSyncError(
            f"the model's log-probabilities at version {version} are not finite; its weights are "
            "spoilt, go back to a checkpoint"
        )
    return ProbeLogprobs(
        version, prompt_ids, prompt.tolist(), sampled, temperature, quantization is not None
    )


async def probe(control: ServerControl, model_name: str, expected: ProbeLogprobs) -> ProbeResult:
    """Ask a server for the probe's log-probabilities and compare.

    The request carries a cache salt of its own: it cannot be answered from blocks that earlier
    weights filled, and no other request will use the blocks it fills.

    Raises:
        WeightSyncError: the server did not answer, or not with these log-probabilities.
    """
    sampling = SamplingFields(
        max_tokens=1, temperature=expected.temperature, prompt_logprobs=0, seed=expected.version
    )
    endpoint, *others = control.endpoints
    try:
        content = await control.post(endpoint, _request(endpoint, model_name, expected, sampling))
    except RouteMissing:
        if not others:
            raise
        endpoint = others[0]
        content = await control.post(endpoint, _request(endpoint, model_name, expected, sampling))
    try:
        sampled = read_sampled(endpoint, control.url, content, expected.prompt_ids, max_tokens=1)
    except (InferenceError, NotJSON) as error:
        raise WeightSyncError(f"the probe's answer cannot be used: {error}") from error
    if not sampled.token_ids:
        raise WeightSyncError(
            f"{control.url} aborted the probe; does another trainer pause the server?"
        )
    token_id, logprob, prompt = sampled.token_ids[0], sampled.logprobs[0], sampled.prompt_logprobs
    label = sampled.spans[0].version if sampled.spans else None
    # The first prompt token has no log-probability: nothing predicts it.
    if prompt is None or len(prompt) != len(expected.prompt_ids):
        raise WeightSyncError(
            f"{control.url} returned log-probabilities of {len(prompt or [])} prompt tokens, "
            f"asked were {len(expected.prompt_ids)}"
        )
    got = [
        (entry or {}).get(str(prompt_id), _ABSENT).logprob
        for entry, prompt_id in zip(prompt[1:], expected.prompt_ids[1:], strict=True)
    ]
    if not 0 <= token_id < len(expected.sampled):
        raise WeightSyncError(
            f"{control.url} sampled token {token_id}, which the trainer's model does not have"
        )
    wanted = [*expected.prompt, expected.sampled[token_id].item()]
    differences = [_difference(a, b) for a, b in zip([*got, logprob], wanted, strict=True)]
    errors = [d / max(1.0, abs(w)) for d, w in zip(differences, wanted, strict=True)]
    return ProbeResult(
        prompt_diff=max(differences[:-1]),
        sampled_diff=differences[-1],
        error=sum(errors) / len(errors) if expected.is_rounded else max(errors),
        label=None if label is None else str(label),
    )


def _request(
    endpoint: Endpoint, model_name: str, expected: ProbeLogprobs, sampling: SamplingFields
) -> bytes:
    salt = f"probe-{uuid.uuid4().hex}"
    return request_body(endpoint, model_name, expected.prompt_ids, sampling, cache_salt=salt)


def _difference(got: float | None, wanted: float) -> float:
    """Infinite where the server's is absent or NaN, which no comparison would catch."""
    return math.inf if got is None or math.isnan(got) else abs(got - wanted)
