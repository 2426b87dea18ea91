"""Client of vLLM servers: token ids in, token ids, log-probabilities and weight versions out.

Two endpoints, chosen by a probe per server:

* `POST /inference/v1/generate` (needs `--enable-scale-out`): ids both ways, ignores the model's
  own sampling defaults, and says which weight version sampled which tokens.
* `POST /v1/completions` with an id prompt, on any vLLM. It says nothing about versions: tokens get
  the policy version of the moment their request was sent, and a restart between two requests goes
  unnoticed.

The same probe reads whether log-probabilities are those of the distribution that was sampled
(`--logprobs-mode processed_logprobs`) or of the raw logits, which differ unless the temperature
is 1. Every answer is checked before it is handed on.

**Faults.** What is retried: a server that cannot be reached, drops the connection before it
answers, or says 429 or 503, for `retry_for_s`; a server that fails while answering (500, 502, 504,
a body that ends early or is no JSON), up to `MAX_FAILURES` per call; a server that stays silent for
`request_timeout_s`, once on each other server. An answer that breaks the contract is not retried.

**Weights.** A server that was out of reach may have been restarted and then samples from the
weights on its disk. With `resync` set, such a server gets the current weights before its next
request, and an answer from older weights is thrown away and asked for again.

**Updates.** An update that aborts the requests in flight ends them with what they had sampled;
`generate` continues them from those ids, under whatever weights the server has by then. No
`cache_salt` is sent: every way to pause a server for an update also empties its prefix cache. A
salt per version would not be exact, because the server changes its weights before the client knows
(a request in between stores new keys and values under the old salt), and it would keep a turn
that crossed an update from sharing its prefix with the next turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast, get_args

import msgspec

from agentrl.errors import AgentRLError, InferenceError
from agentrl.inference.base import Generation, SamplingParams, request_seed
from agentrl.inference.http import AnswerCut, ConnectionFailed, HTTPClient, Response
from agentrl.types import FinishReason, bad_logprob

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

MAX_FAILURES = 6
"""Failed answers (not refused connections) a call tolerates before it gives up."""
LABEL_TIMEOUT_S = 20.0
"""How long an engine may be busy before it says which weights it has."""
AFTER_SILENCE_S = 30.0
"""How long a server gets no request after it did not."""
MAX_GROUPS = 65536
"""Groups whose server is remembered, and trajectories whose newest version is."""
NO_LOGPROB = -9999.0
"""What vLLM sends for a log-probability that is NaN, minus infinity or missing."""

FORCED_TOKEN = 0
"""The token that the probe allows. Any would do; every vocabulary has this one."""


class _Sampling(msgspec.Struct):
    """Every sampling parameter: what is not sent, servers fill in differently."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    seed: int | msgspec.UnsetType = msgspec.UNSET
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    logprobs: int = 0
    ignore_eos: bool = False
    allowed_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class _GenerateBody(msgspec.Struct):
    model: str
    request_id: str
    token_ids: list[int]
    sampling_params: _Sampling


class _CompletionBody(_Sampling, kw_only=True):
    model: str
    prompt: list[int]
    return_token_ids: bool = True


# What is read from JSON has no cycles, so the garbage collector need not look at it: there is one
# object per token.
class _TokenLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None


class _GenerateLogprobs(msgspec.Struct, gc=False):
    content: list[_TokenLogprob]


class _VersionSpan(msgspec.Struct, gc=False):
    version: str | int | None
    start: int
    end: int
    """Exclusive."""


class _GenerateChoice(msgspec.Struct, gc=False):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _GenerateLogprobs | None = None
    weight_versions: list[_VersionSpan] | None = None


class _GenerateAnswer(msgspec.Struct, gc=False):
    choices: list[_GenerateChoice]


class _CompletionLogprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None]


class _CompletionChoice(msgspec.Struct, gc=False):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class _CompletionAnswer(msgspec.Struct, gc=False):
    choices: list[_CompletionChoice]


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


Answer = TypeVar("Answer")
Choice = TypeVar("Choice")

_FINISH_REASONS: dict[str, FinishReason] = {reason: reason for reason in get_args(FinishReason)}

_generate_decoder = msgspec.json.Decoder(_GenerateAnswer)
_completion_decoder = msgspec.json.Decoder(_CompletionAnswer)
_weight_info_decoder = msgspec.json.Decoder(_WeightInfo)
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class _Server:
    url: str
    http: HTTPClient
    endpoint: str | None = None
    """None until probed."""
    raw_logprobs: bool = False
    in_flight: int = 0
    down_until: float = 0.0
    """`time.monotonic()` before which other servers are preferred."""
    labels_versions: bool = False
    """It once answered with an integer weight version."""
    in_doubt: bool = False
    """Its weights may not be the current ones: contact was lost, or an answer came from others."""
    wanted_version: int = 0
    """Newest version that was expected of it: the one of a server that is updated before the rest,
    and whose sequence is continued here, is newer than the policy's."""
    renewal: asyncio.Task[None] | None = None
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Unavailable(Exception):
    """No byte of an answer, or 429/503: the same request may be sent again."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class _Failed(Exception):
    """The server began to answer, or should have, and failed."""


class _OldWeights(Exception):
    """The answer was sampled from weights older than expected."""


class VLLMEngine:
    """An `InferenceEngine` over one or several vLLM servers with the same weights.

    A group's requests go to one server, so that its shared prompt is prefilled once; a new group
    goes to the server with the fewest requests in flight. The group is the request id up to the
    last `-m`: `step3-group7-m2-turn0` and `step3-group7-m5-turn1` share a server.

    `policy_version` stamps the tokens of servers that report no versions, and is the oldest version
    accepted from those that do; set it after the new weights are in place. Within a trajectory (the
    request id up to the last `-t`) versions never decrease: while servers are updated one may be
    ahead, and if its next turn goes to another, that one's older answer is not taken.

    `resync(url)` sends the current weights, labelled `policy_version` or newer, to one server; it
    raises an AgentRLError or OSError where it cannot, and is then called again. It is awaited, once
    per server at a time, before a request goes to a server whose weights are in doubt. While it is
    set, a server without an integer label counts as holding version 0. None: such a server is an
    error.
    """

    resync: Callable[[str], Awaitable[None]] | None = None

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str = "policy",
        token: str | None = None,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        request_timeout_s: float = 600.0,
        retry_for_s: float = 120.0,
    ) -> None:
        """
        Args:
            urls: base addresses, `http://host:port`.
            model: served model name.
            token: the servers' `--api-key`.
            seed: gives every request its own seed on the server. None leaves it to the server,
                which samples a batch faster that way.
            stop_token_ids: end every turn, besides each request's own.
            request_timeout_s: one attempt, from connecting to the last byte.
            retry_for_s: how long one call keeps trying while servers are unreachable or full.
        """
        if not urls:
            raise ValueError("VLLMEngine needs at least one server address")
        self.policy_version = 0
        addresses = [url.rstrip("/") for url in urls]
        self._servers = [_Server(url, HTTPClient(url, token=token)) for url in addresses]
        self._model = model
        self._seed = seed
        self._stop_token_ids = frozenset(stop_token_ids)
        self._request_timeout_s = request_timeout_s
        self._retry_for_s = retry_for_s
        self._server_of_group: OrderedDict[str, _Server] = OrderedDict()
        self._newest_version: OrderedDict[str, int] = OrderedDict()  # by trajectory

    async def start(self) -> None:
        """Probe every server now instead of at its first request.

        Raises:
            InferenceError: a server is unreachable, or offers neither endpoint.
        """
        for server in self._servers:
            try:
                await self._probe(server)
            except (_Unavailable, _Failed) as error:
                raise InferenceError(f"{server.url}: {error}") from error

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams
    ) -> Generation:
        """Sample one continuation of `prompt_ids`.

        A request that the server aborts (a weight update may) is continued from the tokens it had,
        with what is left of `max_tokens`, as often as it takes: one Generation comes back, of
        tokens that may be of several versions, and never with finish reason `abort`. A part's seed
        depends on where it starts, so that no part repeats the random numbers of another.

        Bounded by the caller's own deadline; cancelling closes the connection, which makes the
        server drop the request. With `top_p` or `top_k` the log-probabilities are those of the
        truncated distribution: good for evaluation, not for training.

        Raises:
            InferenceError: with the server's address and the reason.
        """
        trajectory = request_id.rpartition("-t")[0] or request_id
        newest = self._newest_version.get(trajectory, 0)
        part = await self._sample(request_id, prompt_ids, sampling, request_id, newest)
        whole = part
        pause_s = 0.02
        while whole.finish_reason == "abort":
            num_left = sampling.max_tokens - len(whole.token_ids)
            if num_left == 0:
                whole = dataclasses.replace(whole, finish_reason="length")
                break
            if not part.token_ids:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
            part = await self._sample(
                f"{request_id}-from{len(whole.token_ids)}",
                prompt_ids + whole.token_ids,
                dataclasses.replace(sampling, max_tokens=num_left),
                request_id,
                whole.versions[-1] if whole.versions else newest,
            )
            whole = Generation(
                whole.token_ids + part.token_ids,
                whole.logprobs + part.logprobs,
                whole.versions + part.versions,
                part.finish_reason,
            )
        if whole.versions:
            self._newest_version[trajectory] = whole.versions[-1]
            self._newest_version.move_to_end(trajectory)
            if len(self._newest_version) > MAX_GROUPS:
                self._newest_version.popitem(last=False)
        return whole

    def traits(self, url: str) -> tuple[str, bool]:
        """What the probe found: the endpoint, and whether log-probabilities are of raw logits."""
        server = next(server for server in self._servers if server.url == url.rstrip("/"))
        if server.endpoint is None:
            raise InferenceError(f"{url} was not probed yet; call start() first")
        return server.endpoint, server.raw_logprobs

    def distrust(self, url: str) -> None:
        """Its weights may not be the current ones: `resync` comes before its next request."""
        next(server for server in self._servers if server.url == url.rstrip("/")).in_doubt = True

    def reserve(self, num_episodes: int) -> None:
        """Nothing to do: a server forms its batches itself."""

    def release(self, num_episodes: int = 1) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        for server in self._servers:
            if server.renewal is not None:
                server.renewal.cancel()
                await asyncio.gather(server.renewal, return_exceptions=True)
            server.http.close()

    async def _sample(
        self,
        part_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        min_version: int,
    ) -> Generation:
        """One answer of one server, whichever it takes.

        Args:
            part_id: the request's id, or for a later part of it one of its own.
            request_id: decides the server.
            min_version: of the tokens before: versions never decrease within a sequence.
        """
        give_up_at = time.monotonic() + self._retry_for_s
        pause_s = 0.1
        failures = 0
        silent: set[str] = set()
        attempt = 0
        while True:
            server = self._route(request_id, silent)
            # The server may still hold an earlier attempt under its id.
            wire_id = f"{part_id}-retry{attempt}" if attempt else part_id
            server.in_flight += 1
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    return await self._attempt(
                        server, wire_id, part_id, prompt_ids, sampling, min_version
                    )
            except TimeoutError as error:
                silent.add(server.url)
                server.down_until = time.monotonic() + self._request_timeout_s
                if len(silent) == len(self._servers):
                    raise InferenceError(
                        f"{server.url}: no answer within {self._request_timeout_s:g} s to "
                        f"{request_id}; raise request_timeout_s or lower max_tokens"
                    ) from error
            except _Unavailable as error:
                wait_s = pause_s if error.retry_after_s is None else error.retry_after_s
                server.down_until = time.monotonic() + wait_s
                if time.monotonic() + wait_s > give_up_at:
                    raise InferenceError(
                        f"{server.url}: {error}; gave up after {self._retry_for_s:g} s"
                    ) from error
                if self._all_down():
                    await asyncio.sleep(wait_s)
                pause_s = min(2 * pause_s, 2.0)
            except (_Failed, _OldWeights) as error:
                failures += 1
                server.in_doubt = True
                stale = isinstance(error, _OldWeights)
                if failures == MAX_FAILURES or (stale and self.resync is None):
                    raise InferenceError(
                        f"{server.url}: {error}"
                        + (f"; {failures} attempts failed" if failures > 1 else "")
                    ) from error
                if not stale:
                    server.down_until = time.monotonic() + pause_s
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 2.0)
            finally:
                server.in_flight -= 1
                attempt += 1

    def _route(self, request_id: str, silent: set[str]) -> _Server:
        """The group's server while it is up, else the least busy one that is."""
        group = request_id.rpartition("-m")[0] or request_id
        now = time.monotonic()
        server = self._server_of_group.get(group)
        if server is None or server.url in silent or server.down_until > now:
            choices = [s for s in self._servers if s.url not in silent]
            server = min(choices, key=lambda s: (s.down_until > now, s.in_flight))
            self._server_of_group[group] = server
        self._server_of_group.move_to_end(group)
        if len(self._server_of_group) > MAX_GROUPS:
            self._server_of_group.popitem(last=False)
        return server

    def _all_down(self) -> bool:
        return all(server.down_until > time.monotonic() for server in self._servers)

    async def _attempt(
        self,
        server: _Server,
        wire_id: str,
        part_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        min_version: int,
    ) -> Generation:
        endpoint = server.endpoint or await self._probe(server)
        while server.in_doubt and self.resync is not None:
            await self._renew(server)
        if server.raw_logprobs and sampling.temperature not in (0.0, 1.0):
            raise InferenceError(
                f"{server.url}: its log-probabilities are those of the raw logits, not of the "
                f"distribution at temperature {sampling.temperature:g}; start the server with "
                "--logprobs-mode processed_logprobs, or sample at temperature 1"
            )
        expected_version = max(self.policy_version, min_version)
        server.wanted_version = max(server.wanted_version, expected_version)
        body = self._body(
            endpoint, wire_id, prompt_ids, self._sampling_of(part_id, sampling, endpoint)
        )
        response = await self._post(server, endpoint, body)
        if response.status != 200:
            raise InferenceError(
                f"{server.url}: {wire_id} ({len(prompt_ids)} prompt tokens, max_tokens "
                f"{sampling.max_tokens}) was refused with {response.status}: "
                f"{_message(response.body)}"
            )
        if endpoint == GENERATE:
            generation = self._read_generate(server, response.body, expected_version)
        else:
            generation = _read_completion(server.url, response.body, expected_version, prompt_ids)
        _check_generation(server.url, generation, sampling.max_tokens)
        return generation

    async def _renew(self, server: _Server) -> None:
        """Wait until the weights of a server in doubt are the current ones.

        All requests wait for one renewal, and their cancellation does not stop it: a server left
        in the middle of an update answers nobody.

        Raises:
            _Unavailable: not now.
        """
        if server.renewal is None or server.renewal.done():
            server.renewal = asyncio.create_task(self._renewal(server))
            server.renewal.add_done_callback(_retrieve)
        await asyncio.shield(server.renewal)

    async def _renewal(self, server: _Server) -> None:
        """One reset connection does not mean a restart: the server's label may still be right."""
        assert self.resync is not None
        try:
            async with asyncio.timeout(LABEL_TIMEOUT_S):
                info = await server.http.request("GET", "/weight_info")
        except TimeoutError as error:
            raise _Unavailable("its engine does not answer", AFTER_SILENCE_S) from error
        except (ConnectionFailed, AnswerCut) as error:
            raise _Unavailable(str(error)) from error
        label = None
        if info.status == 200:
            label = _integer(_decode(_weight_info_decoder, server.url, info.body).weight_version)
        if label is None or label < max(self.policy_version, server.wanted_version):
            try:
                await self.resync(server.url)
            except (AgentRLError, OSError) as error:
                raise _Unavailable(f"the current weights could not be sent: {error}") from error
        server.in_doubt = False

    def _sampling_of(self, part_id: str, sampling: SamplingParams, endpoint: str) -> _Sampling:
        return _Sampling(
            sampling.max_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            _union(self._stop_token_ids, sampling.stop_token_ids),
            msgspec.UNSET if self._seed is None else request_seed(self._seed, part_id),
        )

    def _body(
        self, endpoint: str, wire_id: str, prompt_ids: list[int], sampling: _Sampling
    ) -> bytes:
        if endpoint == GENERATE:
            return _encoder.encode(_GenerateBody(self._model, wire_id, prompt_ids, sampling))
        fields = msgspec.structs.asdict(sampling)
        return _encoder.encode(_CompletionBody(**fields, model=self._model, prompt=prompt_ids))

    async def _post(self, server: _Server, path: str, body: bytes) -> Response:
        """An answer that is complete and not an error of the server's.

        Raises:
            _Unavailable, _Failed: see their docstrings.
        """
        try:
            response = await server.http.request("POST", path, body)
        except ConnectionFailed as error:
            server.in_doubt = True
            raise _Unavailable(str(error)) from error
        except AnswerCut as error:
            raise _Failed(str(error)) from error
        if response.status in (429, 503):
            raise _Unavailable(
                f"status {response.status}: {_message(response.body)}",
                _seconds(response.headers.get("retry-after")),
            )
        if response.status >= 500:
            raise _Failed(f"status {response.status}: {_message(response.body)}")
        return response

    async def _probe(self, server: _Server) -> str:
        """Find out the server's endpoint and what its log-probabilities mean, once.

        With a single allowed token the sampled distribution gives it probability 1: a processed
        log-probability is 0, a raw one is what the logits say.
        """
        async with server.probing:
            if server.endpoint is not None:
                return server.endpoint
            sampling = _Sampling(4, 1.0, 1.0, -1, [])
            sampling.ignore_eos = True
            sampling.allowed_token_ids = [FORCED_TOKEN]
            for endpoint in (GENERATE, COMPLETIONS):
                wire_id = f"probe-{uuid.uuid4().hex}"
                body = self._body(endpoint, wire_id, [FORCED_TOKEN], sampling)
                response = await self._post(server, endpoint, body)
                if response.status == 200:
                    break
                if response.status not in (403, 404, 405):
                    raise InferenceError(
                        f"{server.url}{endpoint} refused the probe with {response.status}: "
                        f"{_message(response.body)}; check the address, model {self._model!r} and "
                        "the token"
                    )
            else:
                raise InferenceError(
                    f"{server.url} offers neither {GENERATE} nor {COMPLETIONS}; "
                    "is it a vLLM server?"
                )
            if endpoint == GENERATE:
                answer = _decode(_generate_decoder, server.url, response.body)
                probe = _generation(server.url, _only_choice(server.url, answer.choices), [])
            else:
                probe = _read_completion(server.url, response.body, 0, [FORCED_TOKEN])
            _check_generation(server.url, probe, sampling.max_tokens)
            server.raw_logprobs = min(probe.logprobs) < -1e-3
            server.endpoint = endpoint
            return endpoint

    def _read_generate(self, server: _Server, body: bytes, expected_version: int) -> Generation:
        answer = _decode(_generate_decoder, server.url, body)
        choice = _only_choice(server.url, answer.choices)
        return _generation(server.url, choice, self._versions(server, choice, expected_version))

    def _versions(
        self, server: _Server, choice: _GenerateChoice, expected_version: int
    ) -> list[int]:
        """One version per token, from the server's spans where it labels its weights.

        A server that never had its weights changed labels them with a word; one that was restarted
        goes back to that word, or to an older number, and must not be trained on unknowingly.
        """
        spans, num_tokens = choice.weight_versions or [], len(choice.token_ids)
        labels = [_integer(span.version) for span in spans]
        if not labels or None in labels:
            if server.labels_versions or (self.resync is not None and expected_version > 0):
                raise _OldWeights(
                    "it does not say which weights it samples from; it was probably restarted. "
                    f"Send it version {expected_version} again"
                )
            return [expected_version] * num_tokens
        versions: list[int] = []
        for span, label in zip(spans, labels, strict=True):
            if span.start != len(versions) or span.end < span.start or label is None:
                raise InferenceError(f"{server.url}: its weight version spans leave gaps")
            versions += [label] * (span.end - span.start)
        if len(versions) != num_tokens:
            raise InferenceError(
                f"{server.url}: its weight version spans cover {len(versions)} of "
                f"{num_tokens} tokens"
            )
        server.labels_versions = True
        oldest = min(versions, default=expected_version)
        if oldest < expected_version:
            raise _OldWeights(
                f"it samples from weights of version {oldest}, the policy is at version "
                f"{expected_version}; it was probably restarted. Send the weights again"
            )
        return versions


def _generation(url: str, choice: _GenerateChoice, versions: list[int]) -> Generation:
    if choice.logprobs is None:
        raise InferenceError(f"{url}: the answer holds no log-probabilities")
    content = choice.logprobs.content
    if [entry.token_id for entry in content] != choice.token_ids:
        raise InferenceError(
            f"{url}: {len(choice.token_ids)} tokens came with log-probabilities of "
            f"{len(content)} other ones"
        )
    logprobs = _present(url, [entry.logprob for entry in content])
    return Generation(
        choice.token_ids, logprobs, versions, _finish_reason(url, choice.finish_reason)
    )


def _read_completion(url: str, body: bytes, version: int, prompt_ids: list[int]) -> Generation:
    answer = _decode(_completion_decoder, url, body)
    choice = _only_choice(url, answer.choices)
    if choice.logprobs is None:
        raise InferenceError(f"{url}: the answer holds no log-probabilities")
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt_ids:
        raise InferenceError(
            f"{url}: it sampled from another prompt ({len(choice.prompt_token_ids)} "
            f"tokens) than was sent ({len(prompt_ids)} tokens)"
        )
    return Generation(
        choice.token_ids,
        _present(url, choice.logprobs.token_logprobs),
        [version] * len(choice.token_ids),
        _finish_reason(url, choice.finish_reason),
    )


def _check_generation(url: str, generation: Generation, max_tokens: int) -> None:
    num_tokens = len(generation.token_ids)
    if len(generation.logprobs) != num_tokens:
        raise InferenceError(
            f"{url}: {num_tokens} tokens came with {len(generation.logprobs)} log-probabilities"
        )
    if num_tokens > max_tokens:
        raise InferenceError(f"{url}: {num_tokens} tokens, max_tokens was {max_tokens}")
    if num_tokens == 0:
        if generation.finish_reason == "abort":
            return
        raise InferenceError(f"{url}: the answer holds no tokens")
    if (position := bad_logprob(generation.logprobs)) is not None:
        logprob = generation.logprobs[position]
        raise InferenceError(f"{url}: log-probability {logprob} at sampled token {position}")
    if min(generation.logprobs) <= NO_LOGPROB:
        position = generation.logprobs.index(min(generation.logprobs))
        raise InferenceError(
            f"{url}: log-probability {NO_LOGPROB:g} at sampled token {position}, which is how vLLM "
            "writes NaN; its weights or logits are not finite"
        )


def _decode(decoder: msgspec.json.Decoder[Answer], url: str, body: bytes) -> Answer:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InferenceError(
            f"{url}: the answer has another shape than expected: {error}"
        ) from error
    except msgspec.DecodeError as error:
        raise _Failed(f"the answer is no JSON ({error})") from error


def _only_choice(url: str, choices: list[Choice]) -> Choice:
    if len(choices) != 1:
        raise InferenceError(f"{url}: {len(choices)} choices came for one request")
    return choices[0]


def _present(url: str, logprobs: list[float | None]) -> list[float]:
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


@functools.lru_cache(maxsize=64)
def _union(stop_token_ids: frozenset[int], more: tuple[int, ...]) -> list[int]:
    """Of the engine and of the request, which for all requests of a run are the same."""
    return sorted(stop_token_ids.union(more))


def _retrieve(task: asyncio.Task[None]) -> None:
    """A renewal whose waiters were all cancelled may fail without anyone to tell."""
    if not task.cancelled():
        task.exception()


def _integer(label: str | int | None) -> int | None:
    if isinstance(label, str):
        return int(label) if label.isdecimal() else None
    return label


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; a date (its other form) counts as absent."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _message(body: bytes) -> str:
    """The server's own words in one line, or the start of whatever it sent."""
    text = body.decode(errors="replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return " ".join(text[:300].split())
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        if isinstance(error, dict):
            parsed = error.get("message", error.get("detail", error))
    return " ".join(str(parsed)[:300].split())
