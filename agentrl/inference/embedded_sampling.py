"""Samples a round of the embedded engine, in padded batches with a transformers model."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    DynamicCache,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentrl.errors import InferenceError
from agentrl.inference.base import SamplingParams, request_seed
from agentrl.model.cache import grouping_heads, make_cache, plain_attention
from agentrl.model.lengths import within_reach
from agentrl.model.routes import last_recorded, recording
from agentrl.model.towers import Towers, padded, reading
from agentrl.types import FinishReason, ShownImage

# cuDNN's attention is left out: it plans again for every number of tokens in the cache. On an H200
# its first round of 64 turns took 4.1 s, a later one 0.25 s.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(slots=True, frozen=True)
class SampleRequest:
    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    images: Sequence[ShownImage] = ()
    """The prompt's images, in order."""

    @property
    def prefill_key(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The prompt's ids and its images' hashes; requests with equal values share a prefill."""
        return tuple(self.prompt_ids), tuple(image.sha256 for image in self.images)

    @property
    def max_length(self) -> int:
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def batch_key(self) -> tuple[float, ...]:
        """The sampling parameters that all rows of a batch must share: all that change the
        distribution, except the temperature, and those that decide what is reported."""
        sampling = self.sampling
        truncation = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.report_kept)
        return (*truncation, sampling.repetition_penalty, sampling.report_routes)


@dataclass(slots=True, frozen=True)
class SampledTurn:
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    kept_ids: list[np.ndarray] | None = None
    routes: np.ndarray | None = None


def share_weights(
    model: PreTrainedModel, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Returns a second module tree, in evaluation mode, around the same Parameters and buffers.

    Changes in place (optimiser steps, `load_state_dict`) affect both trees. Replacing a Parameter
    object (`load_state_dict(assign=True)`, resizing the embedding) breaks the link.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    twin.set_attn_implementation(attn_implementation or plain_attention(model))
    return twin.eval()


@torch.no_grad()
def require_exact_cache(twin: PreTrainedModel, max_tokens: int | None = None) -> None:
    """Checks that a round's log-probabilities equal those of a forward pass without a cache.

    This finds families whose cache is not exact in transformers, or not in padded batches. Windows,
    scales and selected keys are moved within the probe's reach (`within_reach`).

    Args:
        twin: see `share_weights`.
        max_tokens: length of the longest row to be sampled.

    Raises:
        InferenceError: the log-probabilities differ by more than rounding, or sampling failed.
    """
    sampling = SamplingParams(max_tokens=8, temperature=1.0)
    vocab_size = twin.get_input_embeddings().get_parameter("weight").shape[0]
    prompts = [[(13 + 7919 * at) % vocab_size for at in range(n)] for n in (20, 3, 2)]
    requests = [SampleRequest(str(n), ids, sampling) for n, ids in enumerate(prompts)]
    # Positions in a padded batch include padding, so they may exceed the longest row's length.
    reach = None if max_tokens is None else 2 * max_tokens
    problem = None
    try:
        with within_reach(twin, reach):
            # Also sample one row alone: a cache that is wrong for one row may be right for three.
            for turns in (sample(twin, requests, seed=0), sample(twin, requests[:1], seed=0)):
                for prompt, turn in zip(prompts, turns, strict=False):
                    problem = problem or _cache_problem(twin, prompt, turn)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        problem = str(error).partition("\n")[0]
    if problem is not None:
        raise InferenceError(
            f"{type(twin).__name__} cannot be sampled from in this process ({problem}); set "
            "inference.backend = 'vllm'"
        )


def _cache_problem(twin: PreTrainedModel, prompt: list[int], turn: SampledTurn) -> str | None:
    """Returns how a sampled turn's log-probs differ from those of a forward pass without a cache;
    None if they differ only by rounding."""
    ids = torch.tensor([prompt + turn.token_ids], device=twin.device)

    def logprobs(input_ids: torch.Tensor) -> torch.Tensor:
        logits = twin(input_ids, use_cache=False).logits[:, -len(turn.token_ids) - 1 :]
        return logits.float().log_softmax(-1).cpu()

    chosen = torch.tensor(turn.token_ids)[:, None]
    whole = logprobs(ids)[0, :-1].gather(1, chosen)[:, 0]
    # Untrained weights hardly use the context, so the limit follows the context's own effect.
    alone = logprobs(ids[0, len(prompt) - 1 : -1, None])[:, -1].gather(1, chosen)[:, 0]
    memory = (whole - alone).abs().mean().item()
    limit = 0.1 if twin.dtype.itemsize < 4 else min(1e-3, max(1e-5, memory / 100))
    difference = (whole - torch.tensor(turn.logprobs)).abs().mean().item()
    return None if difference < limit else f"its log-probs differ by {difference:.2g} with a cache"


def sample(
    model: PreTrainedModel,
    requests: Sequence[SampleRequest],
    *,
    seed: int,
    stop_token_ids: frozenset[int] = frozenset(),
    max_batch_tokens: int = 32768,
    stopped: threading.Event | None = None,
) -> list[SampledTurn]:
    """Samples one continuation of every request. Returns results in the order of the requests.

    A result depends on the set of requests, not on their order.

    Args:
        stop_token_ids: ids that end a turn, besides each request's own.
        max_batch_tokens: largest number of rows x padded length of one batch. Limits the memory for
            keys and values, 2 * layers * key-value heads * head size numbers per token. Requests
            that do not fit are sampled in several batches, short ones first.
        stopped: when set, sampling ends before the next token.

    Raises:
        InferenceError: `stopped` was set.
    """
    # Sorted so that equal prompts (a group's first turn) share a batch, with little padding.
    order = sorted(
        range(len(requests)),
        key=lambda i: (
            requests[i].batch_key,
            requests[i].max_length,
            requests[i].prefill_key,
            requests[i].request_id,
        ),
    )
    batches: list[list[int]] = []
    for index in order:
        request, batch = requests[index], batches[-1] if batches else []
        # Lengths ascend, so the new request is the longest and decides the padded length.
        fits = (len(batch) + 1) * request.max_length <= max_batch_tokens
        if not batch or not fits or request.batch_key != requests[batch[0]].batch_key:
            batches.append(batch := [])
        batch.append(index)
    results: dict[int, SampledTurn] = {}
    for batch in batches:
        rows = [requests[index] for index in batch]
        routed = rows[0].sampling.report_routes
        with recording(model) if routed else contextlib.nullcontext() as recorded:
            turns = _sample_rows(model, rows, seed, stop_token_ids, stopped, recorded)
        results.update(zip(batch, turns, strict=True))
    return [results[i] for i in range(len(requests))]


@torch.no_grad()
def _sample_rows(
    model: PreTrainedModel,
    requests: list[SampleRequest],
    seed: int,
    stop_token_ids: frozenset[int],
    stopped: threading.Event | None,
    recorded: list[list[torch.Tensor]] | None,
) -> list[SampledTurn]:
    """Samples one padded batch. B rows still sampling, P different prompts, L tokens in the longest
    prompt, V tokens in the vocabulary."""
    device = model.device
    uniforms = torch.from_numpy(_uniforms(requests, seed)).to(device)  # (B, max tokens) float64
    temperatures = torch.tensor([[r.sampling.temperature] for r in requests], device=device)
    greedy = temperatures == 0  # (B, 1)
    temperatures = torch.where(greedy, 1.0, temperatures).float()  # greedy reports log-probs at 1
    stops = [stop_token_ids.union(r.sampling.stop_token_ids) for r in requests]

    # Prefill each different prompt once, padded on the left so that all rows end at the same place.
    different = {r.prefill_key: r for r in requests}
    prompts = [r.prompt_ids for r in different.values()]
    longest = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    input_ids, mask = input_ids.to(device), mask.to(device)  # (P, L)
    # The tokens for the repetition penalty. Padding becomes the last token, which is seen anyway.
    seen = torch.where(mask == 1, input_ids, input_ids[:, -1:])
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # (P, L)
    cache = make_cache(model.config)
    shown = {}
    if any(r.images for r in requests):
        towers = Towers(model)
        ids = [torch.tensor(prompt, device=device) for prompt in prompts]
        read = zip(ids, different.values(), strict=True)
        shown = padded([towers.inputs(each, r.images) for each, r in read], longest)
    with reading(model, shown) if shown else contextlib.nullcontext():
        logits = _next_logits(model, input_ids, mask, positions, cache)  # (P, V)
    if "position_ids" in shown:  # after an image, a position is not the number of tokens before it
        positions = shown["position_ids"].amax(0).cummax(1).values
    of_prompts = None if recorded is None else last_recorded(recorded, len(prompts))

    # One row per request from here on.
    row_of_prompt = {read: row for row, read in enumerate(different)}
    rows = torch.tensor([row_of_prompt[r.prefill_key] for r in requests], device=device)
    routes: list[list[torch.Tensor]] = [[] for _ in requests]
    for own, request, row in zip(routes, requests, rows.tolist(), strict=True):
        if of_prompts is not None:
            own.append(of_prompts[row, -len(request.prompt_ids) :])
    cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]
    logits, mask, positions = logits[rows], mask[rows], positions[rows, -1:]
    seen = seen[rows]
    penalise, truncate = _shaping(requests[0].sampling)
    reports_kept = bool(truncate) and requests[0].sampling.report_kept
    kept_ids: list[list[np.ndarray]] = [[] for _ in requests]

    token_ids: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    finish_reasons: list[FinishReason] = ["length"] * len(requests)
    live = list(range(len(requests)))  # request of each row
    for step in itertools.count():
        if stopped is not None and stopped.is_set():
            raise InferenceError("the embedded engine was closed during a round")
        scores = logits.float()
        for penalty in penalise:
            scores = penalty(seen, scores)
        scores = scores / temperatures
        for truncation in truncate:
            scores = truncation(seen, scores)
        distribution = torch.log_softmax(scores, dim=-1)  # (B, V)
        chosen = torch.where(
            greedy,
            distribution.argmax(-1, keepdim=True),
            _inverse_cdf(distribution, uniforms[:, step : step + 1]),
        )  # (B, 1)
        chosen_ids = chosen[:, 0].tolist()
        chosen_logprobs = distribution.gather(1, chosen)[:, 0].tolist()
        if reports_kept:
            for request, row in zip(live, scores.isfinite().cpu().numpy(), strict=True):
                kept_ids[request].append(np.flatnonzero(row).astype(np.int32))
        kept = []
        for row, request in enumerate(live):
            token_ids[request].append(chosen_ids[row])
            logprobs[request].append(chosen_logprobs[row])
            if chosen_ids[row] in stops[request]:
                finish_reasons[request] = "stop"
            elif step + 1 < requests[request].sampling.max_tokens:
                kept.append(row)
        if not kept:
            break
        if len(kept) < len(live):
            live = [live[row] for row in kept]
            rows = torch.tensor(kept, device=device)
            cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]
            mask, positions, chosen, seen = mask[rows], positions[rows], chosen[rows], seen[rows]
            uniforms, temperatures, greedy = uniforms[rows], temperatures[rows], greedy[rows]
        mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
        if penalise:
            seen = torch.cat([seen, chosen], dim=1)
        positions = positions + 1
        logits = _next_logits(model, chosen, mask, positions, cache)
        if recorded is not None:
            for request, its in zip(live, last_recorded(recorded, len(live)), strict=True):
                routes[request].append(its)
    reported = kept_ids if reports_kept else [None] * len(requests)
    routed = [None if recorded is None else torch.cat(own).numpy() for own in routes]
    return [
        SampledTurn(*turn)
        for turn in zip(token_ids, logprobs, finish_reasons, reported, routed, strict=True)
    ]


def _shaping(sampling: SamplingParams) -> tuple[list[Any], list[Any]]:
    """Returns transformers' functions of (ids, scores), in its order: those to apply before the
    temperature and those to apply after it."""
    penalise: list[Any] = []
    if sampling.repetition_penalty != 1:
        penalise.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    truncate: list[Any] = []
    if sampling.top_k > 0:
        truncate.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        truncate.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        truncate.append(MinPLogitsWarper(sampling.min_p))
    return penalise, truncate


def _next_logits(
    model: PreTrainedModel,
    input_ids: torch.Tensor,  # (B, new tokens)
    mask: torch.Tensor,  # (B, cached + new tokens), 0 = padding
    positions: torch.Tensor,  # (B, new tokens)
    cache: DynamicCache,
) -> torch.Tensor:
    """Returns the logits (B, V) after the last token, and appends keys and values to `cache`."""
    with sdpa_kernel(_ATTENTION), grouping_heads(input_ids.device):
        output = model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            cache=cache,
        )
    return output.logits[:, -1]


def _uniforms(requests: list[SampleRequest], seed: int) -> np.ndarray:
    """Returns random numbers in [0, 1), float64 (B, largest max_tokens), each row from its
    request's own stream."""
    uniforms = np.zeros((len(requests), max(r.sampling.max_tokens for r in requests)))
    for row, request in enumerate(requests):
        own = request.sampling.seed
        key = request_seed(seed if own is None else own, request.request_id)
        stream = np.random.Generator(np.random.Philox(key))
        uniforms[row, : request.sampling.max_tokens] = stream.random(request.sampling.max_tokens)
    return uniforms


def _inverse_cdf(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns the token (B, 1) at each uniform number (B, 1) of the distribution `logprobs` (B, V).
    Sums are float64, because float32 sums over a large vocabulary lose rare tokens."""
    cumulative = logprobs.double().exp().cumsum(-1)
    symbols = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return symbols.clamp(max=logprobs.shape[-1] - 1)
