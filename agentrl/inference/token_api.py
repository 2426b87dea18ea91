"""Writes requests to the token endpoints of vLLM and SGLang, and reads and checks their answers.

* `POST /inference/v1/generate`, vLLM's (needs `--enable-scale-out`): takes and returns ids, ignores
  the model's own sampling defaults, and labels tokens with the weight versions that sampled them.
* `POST /v1/completions` with an id prompt, on any vLLM. It does not report weight versions.
* `POST /generate`, SGLang's: like the first. Its log-probabilities are those after the temperature
  and before `top_p`, `top_k` and `min_p`.

Rollouts, the probe after a weight update, and a teacher on a server all use this module.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import math
import re
from dataclasses import dataclass
from typing import Literal, TypeVar, cast, get_args

import msgspec
import numpy as np

from agentrl.errors import InferenceError
from agentrl.inference.vllm_images import Features
from agentrl.types import FinishReason, bad_logprob

Endpoint = Literal["/inference/v1/generate", "/v1/completions", "/generate"]
GENERATE: Endpoint = "/inference/v1/generate"
COMPLETIONS: Endpoint = "/v1/completions"
SGLANG: Endpoint = "/generate"

NO_LOGPROB = -9999.0
"""vLLM's stand-in for a log-probability that is NaN, minus infinity or missing. SGLang sends an
even lower number for minus infinity."""

LARGEST_VOCABULARY = 2**31
"""Token ids are kept in 32 bits."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """Every sampling parameter. All are sent, because servers have different defaults."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] = []
    seed: int | msgspec.UnsetType = msgspec.UNSET
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    logprobs: int = 0
    """Number of the likeliest tokens to report log-probabilities of, besides the sampled one's."""
    prompt_logprobs: int | msgspec.UnsetType = msgspec.UNSET
    """The same for each prompt token; unset reports no log-probabilities of the prompt."""
    ignore_eos: bool = False
    allowed_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class _GenerateBody(msgspec.Struct, kw_only=True):
    model: str
    token_ids: list[int]
    sampling_params: SamplingFields
    request_id: str | msgspec.UnsetType
    cache_salt: str | msgspec.UnsetType
    features: Features | msgspec.UnsetType


class _CompletionBody(SamplingFields, kw_only=True):
    model: str
    prompt: list[int]
    cache_salt: str | msgspec.UnsetType
    return_token_ids: bool = True


_SGLANG_NAMES = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}


class _SGLangSampling(msgspec.Struct, rename=_SGLANG_NAMES):
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: int | msgspec.UnsetType
    """Ignored unless the server runs in its deterministic mode."""


class _SGLangBody(msgspec.Struct, kw_only=True):
    rid: str | msgspec.UnsetType
    input_ids: list[int]
    sampling_params: _SGLangSampling
    logprob_start_len: int
    """First prompt token to report a log-probability of; -1 reports none."""
    top_logprobs_num: int
    return_logprob: bool = True
    return_routed_experts: bool = False


# gc=False: these objects, one per token, have no cycles, so the garbage collector can skip them.
class TokenLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None


class PromptLogprob(msgspec.Struct, gc=False):
    logprob: float | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, token id (as text) -> log-probability; None for the first token, which
nothing predicts."""


class VersionSpan(msgspec.Struct, gc=False):
    version: str | int | None
    start: int
    end: int
    """Exclusive."""


class _GenerateLogprobs(msgspec.Struct, gc=False):
    content: list[TokenLogprob]


class _GenerateChoice(msgspec.Struct, gc=False):
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _GenerateLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None
    sampling_mask: list[list[int]] | None = None
    """Present if the server was started with --return-sampling-mask."""
    routed_experts: str | None = None
    """Present if the server was started with --enable-return-routed-experts."""


class _GenerateAnswer(msgspec.Struct, gc=False):
    choices: list[_GenerateChoice]
    prompt_logprobs: PromptLogprobs | None = None


class _CompletionLogprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None]


class _CompletionChoice(msgspec.Struct, gc=False):
    token_ids: list[int] = []
    finish_reason: str | None = None
    logprobs: _CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: str | None = None


class _CompletionAnswer(msgspec.Struct, gc=False):
    choices: list[_CompletionChoice]


_SGLangLogprob = tuple[float | None, int, str | None]
"""Log-probability, token id, text."""


class _SGLangFinish(msgspec.Struct, gc=False):
    type: str


class _SGLangMeta(msgspec.Struct, gc=False):
    finish_reason: _SGLangFinish | None = None
    output_token_logprobs: list[_SGLangLogprob] = []
    input_token_logprobs: list[_SGLangLogprob] | None = None
    output_top_logprobs: list[list[_SGLangLogprob] | None] | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None


class _SGLangAnswer(msgspec.Struct, gc=False):
    meta_info: _SGLangMeta
    output_ids: list[int]


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


@dataclass(slots=True, frozen=True)
class Sampled:
    """One checked continuation, from any of the endpoints."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log-probability of each token."""
    finish_reason: FinishReason
    spans: list[VersionSpan]
    """The weight versions of the tokens; empty if the server did not report them."""
    prompt_logprobs: PromptLogprobs | None
    """None unless they were requested."""
    kept_ids: list[list[int]] | None = None
    """The ids that each token was drawn from; None if the server did not report them."""
    routed_experts: str | None = None
    """The experts that tokens went to, for `read_routes`; None if the server did not report
    them."""


class NotJSON(Exception):
    """The body of an answer with status 200 is not JSON: it was cut or corrupted on its way."""


Shape = TypeVar("Shape")

_FINISH_REASONS: dict[str, FinishReason] = {reason: reason for reason in get_args(FinishReason)}

_decoder = functools.cache(msgspec.json.Decoder)
_encoder = msgspec.json.Encoder()


def request_body(
    endpoint: Endpoint,
    model: str,
    prompt_ids: list[int],
    sampling: SamplingFields,
    *,
    request_id: str | msgspec.UnsetType = msgspec.UNSET,
    cache_salt: str | msgspec.UnsetType = msgspec.UNSET,
    features: Features | msgspec.UnsetType = msgspec.UNSET,
    report_routes: bool = False,
) -> bytes:
    """Returns the JSON of a request for one continuation.

    Args:
        model: served model name; not sent to SGLang.
        request_id: not sent to the completions endpoint, which does not take one.
        cache_salt: requests with different salts share no cached prefix. Not sent to SGLang, which
            recomputes prompts whose log-probabilities are requested.
        features: the prompt's images, for `GENERATE` only.
        report_routes: asks SGLang for the experts of each token. A vLLM server always reports them,
            or never.
    """
    if endpoint == GENERATE:
        return _encoder.encode(
            _GenerateBody(
                model=model,
                token_ids=prompt_ids,
                sampling_params=sampling,
                request_id=request_id,
                cache_salt=cache_salt,
                features=features,
            )
        )
    if endpoint == SGLANG:
        return _encoder.encode(
            _SGLangBody(
                rid=request_id,
                input_ids=prompt_ids,
                sampling_params=_SGLangSampling(
                    *(getattr(sampling, name) for name in _SGLangSampling.__struct_fields__)
                ),
                logprob_start_len=-1 if sampling.prompt_logprobs is msgspec.UNSET else 0,
                top_logprobs_num=sampling.logprobs,
                return_routed_experts=report_routes,
            )
        )
    fields = msgspec.structs.asdict(sampling)
    body = _CompletionBody(**fields, model=model, prompt=prompt_ids, cache_salt=cache_salt)
    return _encoder.encode(body)


def read_sampled(
    endpoint: Endpoint,
    url: str,
    body: bytes,
    prompt_ids: list[int],
    max_tokens: int,
    vocab_size: int = LARGEST_VOCABULARY,
) -> Sampled:
    """Reads and checks the answer to a request for one continuation.

    Args:
        url: the server's, for the messages.
        prompt_ids: the request's prompt.
        max_tokens: the request's limit.
        vocab_size: number of ids that the model knows.

    Raises:
        NotJSON: see its docstring.
        InferenceError: the answer does not have the endpoint's form, is for another prompt, has too
            many tokens or none, ids outside the vocabulary, or missing or non-finite
            log-probabilities.
    """
    if endpoint == SGLANG:
        sampled = _read_sglang(url, _decode(_SGLangAnswer, url, body))
    elif endpoint == GENERATE:
        answer = _decode(_GenerateAnswer, url, body)
        sampled = _read_generate(url, _only_choice(url, answer.choices), answer.prompt_logprobs)
    else:
        choice = _only_choice(url, _decode(_CompletionAnswer, url, body).choices)
        sampled = _read_completion(url, choice, prompt_ids)
    _check(url, sampled, max_tokens, vocab_size)
    return sampled


def read_routes(endpoint: Endpoint, url: str, sampled: Sampled, num_prompt: int) -> np.ndarray:
    """Reads the experts that the tokens of prompt and continuation went to, except the last token,
    which was not computed.

    Args:
        num_prompt: number of prompt tokens.

    Returns:
        (tokens, layers * experts per token) int16. Layers without experts have zeros.

    Raises:
        InferenceError: they are missing, or not one row for each token.
    """
    if sampled.routed_experts is None:
        raise InferenceError(
            f"{url}: train.router_replay needs the experts of each token, which the answer does "
            "not have; start the server with --enable-return-routed-experts, or leave "
            "train.router_replay out"
        )
    num_rows = num_prompt + len(sampled.token_ids) - 1
    try:
        data = base64.b64decode(sampled.routed_experts, validate=True)
        if endpoint == SGLANG:
            routes = np.frombuffer(data, np.int32)
        else:
            routes = np.load(io.BytesIO(data), allow_pickle=False)
        return routes.reshape(num_rows, -1).astype(np.int16)
    except ValueError as error:
        raise InferenceError(
            f"{url}: its routed_experts are not an array with a row for each of the first "
            f"{num_rows} tokens: {error}"
        ) from error


def read_prompt_logprobs(endpoint: Endpoint, url: str, body: bytes) -> PromptLogprobs | None:
    """Returns the prompt's log-probabilities, from an answer of `COMPLETIONS` or `SGLANG`.

    Raises:
        NotJSON, InferenceError: as for `read_sampled`.
    """
    if endpoint == SGLANG:
        return _sglang_prompt(_decode(_SGLangAnswer, url, body).meta_info)
    return _only_choice(url, _decode(_CompletionAnswer, url, body).choices).prompt_logprobs


def read_likeliest(url: str, body: bytes) -> float:
    """Returns the log-probability of the likeliest first token, from an answer of `SGLANG`.

    Raises:
        NotJSON, InferenceError: as for `read_sampled`.
    """
    likeliest = _decode(_SGLangAnswer, url, body).meta_info.output_top_logprobs
    if not likeliest or not likeliest[0] or likeliest[0][0][0] is None:
        raise InferenceError(f"{url}: the answer has no log-probabilities of likely tokens")
    return likeliest[0][0][0]


def read_weight_version(url: str, body: bytes) -> str | int | None:
    """Returns the label of a server's weights, from an answer of vLLM's `GET /weight_info` or
    SGLang's `GET /model_info`.

    Raises:
        NotJSON, InferenceError: as for `read_sampled`.
    """
    return _decode(_WeightInfo, url, body).weight_version


def read_context(url: str, body: bytes) -> int | None:
    """Returns the largest number of tokens of a prompt and its reply, from an answer of
    `GET /v1/models`; None if the server does not report it.

    Raises:
        NotJSON, InferenceError: as for `read_sampled`.
    """
    models = _decode(_Models, url, body).data
    return min((each.max_model_len for each in models if each.max_model_len), default=None)


def read_tokens(url: str, body: bytes) -> list[int]:
    """Returns the ids from an answer of `POST /tokenize`.

    Raises:
        NotJSON, InferenceError: as for `read_sampled`.
    """
    return _decode(_Tokens, url, body).tokens


def _decode(shape: type[Shape], url: str, body: bytes) -> Shape:
    try:
        return _decoder(shape).decode(body)
    except msgspec.ValidationError as error:
        raise InferenceError(
            f"{url}: the answer has another shape than expected: {error}; is it the server that "
            "inference.backend names?"
        ) from error
    except msgspec.DecodeError as error:
        raise NotJSON(f"the answer is not JSON ({error})") from error


def version_number(label: str | int | None) -> int | None:
    """Returns the policy version in a label; None if it is a word, such as vLLM's first label
    "default"."""
    if isinstance(label, str):
        return int(label) if label.isdecimal() else None
    return label


def retry_after_s(header: str | None) -> float | None:
    """Returns the seconds in a Retry-After header; None if it is absent or a date."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def error_message(body: bytes) -> str:
    """Returns a server's error message on one line, or else the start of what it sent."""
    text = body.decode(errors="replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = text
    if isinstance(parsed, dict):
        parsed = parsed.get("error", parsed.get("detail", parsed))
        if isinstance(parsed, dict):
            parsed = parsed.get("message", parsed.get("detail", parsed))
    reason = " ".join(str(parsed).split())
    # vLLM wraps its worker's message, and appends every parameter it knows to some messages.
    inner = re.search(r"Worker failed with error '(.*)', please check", reason)
    return (inner[1] if inner else reason)[:400] or "no reason given"


def _only_choice(url: str, choices: list[Shape]) -> Shape:
    if len(choices) != 1:
        raise InferenceError(f"{url}: the answer has {len(choices)} choices instead of 1")
    return choices[0]


def _read_generate(
    url: str, choice: _GenerateChoice, prompt_logprobs: PromptLogprobs | None
) -> Sampled:
    if choice.logprobs is None:
        raise InferenceError(f"{url}: the answer has no log-probabilities")
    content = choice.logprobs.content
    if [entry.token_id for entry in content] != choice.token_ids:
        raise InferenceError(
            f"{url}: {len(choice.token_ids)} tokens came with log-probabilities of "
            f"{len(content)} other tokens"
        )
    return Sampled(
        choice.token_ids,
        _without_null(url, [entry.logprob for entry in content]),
        _finish_reason(url, choice.finish_reason),
        choice.weight_versions or [],
        prompt_logprobs,
        choice.sampling_mask,
        choice.routed_experts,
    )


def _read_completion(url: str, choice: _CompletionChoice, prompt_ids: list[int]) -> Sampled:
    if choice.logprobs is None:
        raise InferenceError(f"{url}: the answer has no log-probabilities")
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt_ids:
        raise InferenceError(
            f"{url}: it sampled from another prompt ({len(choice.prompt_token_ids)} "
            f"tokens) than the one sent ({len(prompt_ids)} tokens)"
        )
    return Sampled(
        choice.token_ids,
        _without_null(url, choice.logprobs.token_logprobs),
        _finish_reason(url, choice.finish_reason),
        [],
        choice.prompt_logprobs,
        routed_experts=choice.routed_experts,
    )


def _read_sglang(url: str, answer: _SGLangAnswer) -> Sampled:
    meta, num_tokens = answer.meta_info, len(answer.output_ids)
    if [entry[1] for entry in meta.output_token_logprobs] != answer.output_ids:
        raise InferenceError(
            f"{url}: {num_tokens} tokens came with log-probabilities of "
            f"{len(meta.output_token_logprobs)} other tokens"
        )
    spans = meta.weight_versions
    if not spans and meta.weight_version is not None:
        spans = [VersionSpan(meta.weight_version, 0, num_tokens)]
    return Sampled(
        answer.output_ids,
        _without_null(url, [entry[0] for entry in meta.output_token_logprobs]),
        _finish_reason(url, meta.finish_reason.type if meta.finish_reason else None),
        spans or [],
        _sglang_prompt(meta),
        routed_experts=meta.routed_experts,
    )


def _sglang_prompt(meta: _SGLangMeta) -> PromptLogprobs | None:
    if not meta.input_token_logprobs:
        return None
    return [
        None if logprob is None else {str(token_id): PromptLogprob(logprob)}
        for logprob, token_id, _ in meta.input_token_logprobs
    ]


def _without_null(url: str, logprobs: list[float | None]) -> list[float]:
    if None in logprobs:
        raise InferenceError(
            f"{url}: {logprobs.count(None)} of {len(logprobs)} log-probabilities are null"
        )
    return cast(list[float], logprobs)


def _finish_reason(url: str, reason: str | None) -> FinishReason:
    known = _FINISH_REASONS.get(reason or "")
    if known is None:
        raise InferenceError(f"{url}: the request ended with finish_reason {reason!r}")
    return known


def _check(url: str, sampled: Sampled, max_tokens: int, vocab_size: int) -> None:
    num_tokens, logprobs = len(sampled.token_ids), sampled.logprobs
    for ids in (sampled.token_ids, *(sampled.kept_ids or ())):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            strange = next(each for each in ids if not 0 <= each < vocab_size)
            raise InferenceError(
                f"{url}: token id {strange} is not one of the model's {vocab_size}; does the "
                "server have the model at model.path?"
            )
    if len(logprobs) != num_tokens:
        raise InferenceError(
            f"{url}: {num_tokens} tokens came with {len(logprobs)} log-probabilities"
        )
    if sampled.kept_ids is not None and not (
        len(sampled.kept_ids) == num_tokens
        and all(
            token in ids for token, ids in zip(sampled.token_ids, sampled.kept_ids, strict=True)
        )
    ):
        raise InferenceError(f"{url}: a sampled token is not among the ids of its sampling_mask")
    if num_tokens > max_tokens:
        raise InferenceError(f"{url}: it sampled {num_tokens} tokens; max_tokens was {max_tokens}")
    if num_tokens == 0:
        if sampled.finish_reason == "abort":
            return
        raise InferenceError(f"{url}: the answer has no tokens")
    if (position := bad_logprob(logprobs)) is not None:
        raise InferenceError(
            f"{url}: log-probability {logprobs[position]} at sampled token {position}"
        )
    if min(logprobs) <= NO_LOGPROB:
        raise InferenceError(
            f"{url}: log-probability {min(logprobs):g} at sampled token "
            f"{logprobs.index(min(logprobs))}, which stands for NaN or minus infinity: the weights "
            "or logits of the server are not finite"
        )
