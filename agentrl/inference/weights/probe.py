"""Checks with a fixed prompt that a server computes what the trainer's model computes.

Any update route of a server can answer 200 and yet leave some of the old weights in use. The
log-probabilities of a whole prompt depend on all weights, so they are compared after each update:

* for every prompt token after the first, log softmax(z), which servers return at temperature 1;
* for one token sampled after the prompt, log softmax(z / temperature), as in a rollout.

A 16-bit model rounds its logits to about 1/256 of their size, so the log-probability of an unlikely
token (-20, say) may differ by 0.1 or more between two correct engines. The tolerance is therefore
absolute, in nats, for log-probabilities above -1, and relative below.

A server that keeps its weights in 8 bits is compared with the trainer's model rounded in the same
way (`fp8` beside this module). Rounding to 8 bits amplifies differences in the last of 16 bits, so
that single tokens can be off by as much as with wrong weights; their mean is not.
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
    NotJSON,
    PromptLogprob,
    SamplingFields,
    read_sampled,
    request_body,
)
from agentrl.inference.weights.control import RouteMissing, ServerControl
from agentrl.inference.weights.fp8 import in_8_bits

_ABSENT = PromptLogprob(None)


@dataclass(slots=True, frozen=True)
class ProbeLogprobs:
    """The log-probabilities of the trainer's model at one version, for a prompt of P tokens."""

    version: int
    prompt_ids: list[int]
    prompt: list[float]
    """P - 1 values, those of `prompt_ids[1:]` at temperature 1."""
    sampled: torch.Tensor  # (V,) float32: every possible next token, at `temperature`
    temperature: float
    is_rounded: bool = False
    """Whether they were computed with weights rounded to 8 bits, for servers that do so."""


@dataclass(slots=True, frozen=True)
class ProbeResult:
    prompt_diff: float
    """Largest |server - trainer| over the prompt's tokens, in nats."""
    sampled_diff: float
    """|server - trainer| for the sampled token."""
    error: float
    """Largest |server - trainer| / max(1, |trainer|) over all tokens, or the mean for servers with
    8-bit weights. Compared with the tolerance."""
    label: str | None
    """The weight version with which the server labels the sampled token; None without a label."""


@torch.no_grad()
def trainer_logprobs(
    model: PreTrainedModel,
    prompt_ids: list[int],
    *,
    version: int,
    temperature: float,
    quantization: str | None = None,
) -> ProbeLogprobs:
    """Computes the probe's log-probabilities with the trainer's model.

    Args:
        quantization: the servers' quantization, which the model emulates; None for none.

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
            f"the model's log-probabilities at version {version} are not finite, so its weights "
            "are broken; resume from an earlier checkpoint"
        )
    return ProbeLogprobs(
        version, prompt_ids, prompt.tolist(), sampled, temperature, quantization is not None
    )


async def probe(control: ServerControl, model_name: str, expected: ProbeLogprobs) -> ProbeResult:
    """Requests the probe's log-probabilities from a server and compares them.

    The request has a unique cache salt, so that it shares no prefix-cache blocks with earlier
    weights or other requests.

    Raises:
        WeightSyncError: the server did not answer, or its answer lacks the log-probabilities.
    """
    sampling = SamplingFields(
        max_tokens=1, temperature=expected.temperature, prompt_logprobs=0, seed=expected.version
    )
    salt, ids = f"probe-{uuid.uuid4().hex}", expected.prompt_ids
    endpoint, content = control.endpoints[0], b""
    for endpoint in control.endpoints:
        body = request_body(endpoint, model_name, ids, sampling, cache_salt=salt)
        try:
            content = await control.post(endpoint, body)
            break
        except RouteMissing:
            if endpoint == control.endpoints[-1]:
                raise
    try:
        sampled = read_sampled(endpoint, control.url, content, ids, max_tokens=1)
    except (InferenceError, NotJSON) as error:
        raise WeightSyncError(f"the probe's answer cannot be used: {error}") from error
    if not sampled.token_ids:
        raise WeightSyncError(
            f"{control.url} aborted the probe; is another trainer pausing the server?"
        )
    token_id, logprob, prompt = sampled.token_ids[0], sampled.logprobs[0], sampled.prompt_logprobs
    label = sampled.spans[0].version if sampled.spans else None
    # The first prompt token has no log-probability: nothing predicts it.
    if prompt is None or len(prompt) != len(expected.prompt_ids):
        raise WeightSyncError(
            f"{control.url} returned log-probabilities for {len(prompt or [])} prompt tokens "
            f"instead of {len(expected.prompt_ids)}"
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


def _difference(got: float | None, wanted: float) -> float:
    """Returns |got - wanted|, or infinity if the server's value is missing or NaN."""
    return math.inf if got is None or math.isnan(got) else abs(got - wanted)
