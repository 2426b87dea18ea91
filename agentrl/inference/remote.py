"""Client of inference servers: token ids in, token ids, log-probabilities and weight versions out.

The clients of vLLM and SGLang share this module; `agentrl.inference.vllm` and `.sglang` hold what
differs: the token endpoint, the probe of it, the route to the label of the weights, and how a
request is given up.

The probe reads whether log-probabilities are those of the distribution that was sampled or of the
raw logits, which differ unless the temperature is 1. Every answer is checked before it is handed
on. Where an endpoint says nothing about versions, tokens get the policy version of the moment
their request was sent, and a restart between two requests goes unnoticed.

**Faults.** A request is retried where a server cannot be reached, drops the connection before it
answers, or says 429 or 503, for `retry_for_s`; where a server fails while answering (500, 502, 504,
a body that ends early or is not JSON), up to `MAX_FAILURES` per call; where a server stays silent
for `request_timeout_s`, once on each other server. An answer that breaks the contract is not
retried.

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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from agentrl.errors import AgentRLError, InferenceError
from agentrl.inference.base import Generation, SamplingParams, request_seed
from agentrl.inference.http import (
    Answer,
    AnswerCut,
    ConnectionFailed,
    EngineSession,
    require_address,
)
from agentrl.inference.servers import (
    Failed,
    Faults,
    OldWeights,
    Server,
    ServerPool,
    TryAgain,
    Unavailable,
    remember,
)
from agentrl.inference.token_api import (
    COMPLETIONS,
    GENERATE,
    Endpoint,
    NotJSON,
    Sampled,
    SamplingFields,
    error_message,
    read_sampled,
    read_weight_version,
    request_body,
    retry_after_s,
    version_number,
)
from agentrl.inference.vllm_images import (
    NORMALISED,
    RENDER,
    Features,
    features_of,
    normalises_itself,
    render_request,
)
from agentrl.retry import retry
from agentrl.types import ShownImage

LABEL_TIMEOUT_S = 20.0
"""How long an engine may be busy before it says which weights it has."""
AFTER_SILENCE_S = 30.0
"""How long a server gets no request after it did not."""
PROBE_TIMEOUT_S = 60.0
"""How long a server may take to answer the probe, which a paused one does not."""
FIRST_TOKEN = 0
"""The prompt of the probe. Any would do; every vocabulary has this one."""


class ServerEngine:
    """An `InferenceEngine` over one or several servers with the same weights, for use in one event
    loop.

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

    name: ClassVar[str]
    """The name of the serving software."""
    label_path: ClassVar[str]
    """The route that tells the label of a server's weights."""
    sampled_logprobs: ClassVar[str]
    """The way to start a server whose log-probabilities are those of the sampled distribution."""
    image_families: ClassVar[tuple[str, ...]] = ()
    """Model families whose images the server is sent."""

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

        Raises:
            ConfigError: an address or the token is malformed.
        """
        if not urls:
            raise ValueError("an engine needs at least one server address")
        self.policy_version = 0
        self.takes_images = bool(self.image_families)
        self._pool = ServerPool(
            [require_address(url, "inference.urls") for url in urls],
            request_timeout_s=request_timeout_s,
            retry_for_s=retry_for_s,
        )
        self._http = EngineSession(token)
        self._model = model
        self._seed = seed
        self._stop_token_ids = frozenset(stop_token_ids)
        self._request_timeout_s = request_timeout_s
        self._newest_version: OrderedDict[str, int] = OrderedDict()  # by trajectory

    async def start(self) -> None:
        """Probe every server now instead of at its first request.

        Raises:
            InferenceError: a server is unreachable, does not answer, or has no such endpoint.
        """
        for server in self._pool.servers:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await self._probe(server)
            except (Unavailable, Failed, NotJSON) as error:
                raise InferenceError(
                    f"{server.url}: {error}; is {self.name} running there (inference.urls)?"
                ) from error
            except TimeoutError as error:
                raise InferenceError(
                    f"{server.url}: no answer to the probe within {PROBE_TIMEOUT_S:g} s; it hangs, "
                    "or is paused since another trainer was killed: restart or resume it"
                ) from error

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        images: Sequence[ShownImage] = (),
    ) -> Generation:
        """Sample one continuation of `prompt_ids`.

        A request that the server aborts (a weight update may) is continued from the tokens it had,
        with what is left of `max_tokens`, as often as it takes: one Generation comes back, of
        tokens that may be of several versions, and never with finish reason `abort`. A part's seed
        depends on where it starts, so that no part repeats the random numbers of another.

        Bounded by the caller's own deadline; cancelling closes the connection, which makes the
        server drop the request. With `top_p`, `top_k` or `min_p` the log-probabilities are those of
        the truncated distribution, and `kept_ids` says of which ids where the server does.

        Args:
            images: those that the prompt shows, in order.

        Raises:
            InferenceError: with the server's address and the reason; or no server is sent such
                images.
        """
        features = features_of(images) if images else msgspec.UNSET
        trajectory = request_id.rpartition("-t")[0] or request_id
        newest = self._newest_version.get(trajectory, 0)
        part = await self._sample(request_id, prompt_ids, sampling, features, request_id, newest)
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
                features,
                request_id,
                whole.versions[-1] if whole.versions else newest,
            )
            whole = Generation(
                whole.token_ids + part.token_ids,
                whole.logprobs + part.logprobs,
                whole.versions + part.versions,
                part.finish_reason,
                _joined(whole.kept_ids, part.kept_ids),
            )
        if whole.versions:
            remember(self._newest_version, trajectory, whole.versions[-1])
        return whole

    def traits(self, url: str) -> tuple[Endpoint, bool]:
        """Returns what the probe found: the endpoint, and whether log-probabilities are of raw
        logits."""
        server = self._pool.find(url)
        if server.endpoint is None:
            raise InferenceError(f"{url} was not probed yet; call start() first")
        return server.endpoint, server.raw_logprobs

    def distrust(self, url: str) -> None:
        """Its weights may not be the current ones: `resync` comes before its next request."""
        self._pool.find(url).in_doubt = True

    def reserve(self, num_episodes: int) -> None:
        """Nothing to do: a server forms its batches itself."""

    def release(self, num_episodes: int = 1) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        for server in self._pool.servers:
            if server.renewal is not None:
                server.renewal.cancel()
                await asyncio.gather(server.renewal, return_exceptions=True)
        await self._http.aclose()

    async def _sample(
        self,
        part_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        features: Features | msgspec.UnsetType,
        request_id: str,
        min_version: int,
    ) -> Generation:
        """One answer of one server, however many attempts on however many servers that takes.

        Args:
            part_id: the request's id, or for a later part of it one of its own.
            request_id: decides the server.
            min_version: of the tokens before: versions never decrease within a sequence.
        """
        faults = Faults()

        async def attempt(_: float) -> Generation:
            server = self._pool.route(request_id, faults.silent)
            # The server may still hold an earlier attempt under its id.
            number = faults.num_attempts
            wire_id = f"{part_id}-retry{number}" if number else part_id
            faults.num_attempts += 1
            server.in_flight += 1
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    return await self._attempt(
                        server, wire_id, part_id, prompt_ids, sampling, features, min_version
                    )
            except (TimeoutError, Unavailable, Failed, NotJSON, OldWeights) as error:
                can_resync = self.resync is not None
                raise self._pool.after_fault(
                    server, error, faults, request_id=request_id, can_resync=can_resync
                ) from error
            finally:
                server.in_flight -= 1

        return await retry(
            attempt,
            retry_after_s=lambda error: error.after_s if isinstance(error, TryAgain) else None,
            first_pause_s=0.1,
        )

    async def _attempt(
        self,
        server: Server,
        wire_id: str,
        part_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        features: Features | msgspec.UnsetType,
        min_version: int,
    ) -> Generation:
        endpoint = server.endpoint or await self._probe(server)
        if features is not msgspec.UNSET and not server.takes_pixels:
            await self._require_pixels(server, endpoint)
        while server.in_doubt and self.resync is not None:
            await self._renew(server)
        trains_truncated = sampling.report_kept
        if server.raw_logprobs and (sampling.temperature not in (0.0, 1.0) or trains_truncated):
            raise InferenceError(
                f"{server.url}: its log-probabilities are those of the raw logits, not of the "
                f"distribution at temperature {sampling.temperature:g}, nor of a truncated one; "
                f"start the server {self.sampled_logprobs}, or sample at temperature 1 and "
                "untruncated"
            )
        expected_version = max(self.policy_version, min_version)
        server.wanted_version = max(server.wanted_version, expected_version)
        fields = self._sampling_of(part_id, sampling)
        rid = self._id_for_server(wire_id)
        body = request_body(
            endpoint, self._model, prompt_ids, fields, request_id=rid, features=features
        )
        try:
            answer = await self._post(server, endpoint, body)
        except asyncio.CancelledError:
            self._abandon(server, rid)
            raise
        if answer.status != 200:
            raise InferenceError(
                f"{server.url}: {wire_id} ({len(prompt_ids)} prompt tokens, max_tokens "
                f"{sampling.max_tokens}) was refused with {answer.status}: "
                f"{error_message(answer.body)}"
            )
        sampled = read_sampled(endpoint, server.url, answer.body, prompt_ids, sampling.max_tokens)
        if endpoint != COMPLETIONS:
            versions = self._versions(server, sampled, expected_version)
        else:
            versions = [expected_version] * len(sampled.token_ids)
        kept_ids = None
        if sampled.kept_ids is not None or not sampled.token_ids:
            kept_ids = [np.array(ids, np.int32) for ids in sampled.kept_ids or []]
        return Generation(
            sampled.token_ids, sampled.logprobs, versions, sampled.finish_reason, kept_ids
        )

    async def _renew(self, server: Server) -> None:
        """Wait until the weights of a server in doubt are the current ones.

        All requests wait for one renewal, and their cancellation does not stop it: a server left
        in the middle of an update answers nobody.

        Raises:
            Unavailable: not now.
        """
        if server.renewal is None or server.renewal.done():
            server.renewal = asyncio.create_task(self._renewal(server))
            server.renewal.add_done_callback(_retrieve)
        await asyncio.shield(server.renewal)

    async def _renewal(self, server: Server) -> None:
        """One reset connection does not mean a restart: the server's label may still be right."""
        await self._renew_at(server.url, max(self.policy_version, server.wanted_version))
        server.in_doubt = False

    async def _renew_at(self, url: str, version: int) -> None:
        """Send the current weights to a server whose label is not of this version or a newer one.

        Raises:
            Unavailable: not now.
        """
        assert self.resync is not None
        label = None
        try:
            async with asyncio.timeout(LABEL_TIMEOUT_S):
                info = await self._http.request("GET", url + self.label_path)
            if info.status == 200:
                label = version_number(read_weight_version(url, info.body))
        except TimeoutError as error:
            raise Unavailable("its engine does not answer", AFTER_SILENCE_S) from error
        except (ConnectionFailed, AnswerCut, NotJSON) as error:
            raise Unavailable(str(error)) from error
        if label is None or label < version:
            try:
                await self.resync(url)
            except (AgentRLError, OSError) as error:
                raise Unavailable(f"the current weights could not be sent: {error}") from error

    def _id_for_server(self, wire_id: str) -> str:
        """The id under which a server knows an attempt."""
        return wire_id

    def _abandon(self, server: Server, rid: str) -> None:
        """Called when an attempt was cancelled and its connection closed."""

    def _sampling_of(self, part_id: str, sampling: SamplingParams) -> SamplingFields:
        seed = self._seed if sampling.seed is None else sampling.seed
        return SamplingFields(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=_union(self._stop_token_ids, sampling.stop_token_ids),
            seed=msgspec.UNSET if seed is None else request_seed(seed, part_id),
        )

    async def _post(self, server: Server, path: str, body: bytes) -> Answer:
        """Sends a request; returns an answer that is complete and not an error of the server's.

        Raises:
            Unavailable, Failed: see their docstrings.
        """
        try:
            answer = await self._http.request("POST", server.url + path, body)
        except ConnectionFailed as error:
            server.in_doubt = True
            raise Unavailable(str(error)) from error
        except AnswerCut as error:
            raise Failed(str(error)) from error
        if answer.status in (429, 503):
            raise Unavailable(
                f"status {answer.status}: {error_message(answer.body)}",
                retry_after_s(answer.headers.get("Retry-After")),
            )
        if answer.status >= 500:
            raise Failed(f"status {answer.status}: {error_message(answer.body)}")
        return answer

    async def _probe(self, server: Server) -> Endpoint:
        """Find out the server's endpoint and what its log-probabilities mean, once."""
        async with server.probing:
            if server.endpoint is None:
                endpoint, server.raw_logprobs = await self._ask_probe(server)
                server.endpoint = endpoint
            return server.endpoint

    async def _ask_probe(self, server: Server) -> tuple[Endpoint, bool]:
        """
        Returns:
            The endpoint, and whether log-probabilities are those of the raw logits.

        Raises:
            InferenceError: it has no such endpoint, or refuses the request.
            Unavailable, Failed, NotJSON: see their docstrings.
        """
        raise NotImplementedError

    async def _require_pixels(self, server: Server, endpoint: Endpoint) -> None:
        """
        Raises:
            InferenceError: the server would read other pixels than it is sent, or takes no images.
            Unavailable, Failed: see their docstrings.
        """
        if endpoint != GENERATE:
            raise InferenceError(
                f"{server.url}: images are sent to {GENERATE}, which it does not offer; start it "
                "with --enable-scale-out"
            )
        answer = await self._post(server, RENDER, render_request(self._model))
        if answer.status != 200:
            raise InferenceError(
                f"{server.url} cannot be shown an image ({answer.status}: "
                f"{error_message(answer.body)}); does it serve the model of model.path?"
            )
        if normalises_itself(answer.body):
            raise InferenceError(
                f"{server.url}: its tower normalises pixels that already are; start it with "
                f"{NORMALISED}"
            )
        server.takes_pixels = True

    def _refused_probe(self, server: Server, endpoint: Endpoint, answer: Answer) -> InferenceError:
        return InferenceError(
            f"{server.url}{endpoint} refused the probe with {answer.status}: "
            f"{error_message(answer.body)}; check inference.urls, inference.model "
            f"(now {self._model!r}) and inference.token"
        )

    def _versions(self, server: Server, sampled: Sampled, expected_version: int) -> list[int]:
        """One version per token, from the server's spans where it labels its weights.

        A server that never had its weights changed labels them with a word; one that was restarted
        goes back to that word, or to an older number, and must not be trained on unknowingly.
        """
        spans, num_tokens = sampled.spans, len(sampled.token_ids)
        labels = [version_number(span.version) for span in spans]
        if not labels or None in labels:
            if server.labels_versions or (self.resync is not None and expected_version > 0):
                raise OldWeights(
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
            raise OldWeights(
                f"it samples from weights of version {oldest}, the policy is at version "
                f"{expected_version}; it was probably restarted. Send the weights again"
            )
        return versions


def _joined(
    first: list[np.ndarray] | None, second: list[np.ndarray] | None
) -> list[np.ndarray] | None:
    """Joins the lists of two parts of a generation; None if either part has none."""
    return None if first is None or second is None else first + second


@functools.lru_cache(maxsize=64)
def _union(stop_token_ids: frozenset[int], more: tuple[int, ...]) -> list[int]:
    """Joins the ids of the engine and of the request, which are the same in all requests of a
    run."""
    return sorted(stop_token_ids.union(more))


def _retrieve(task: asyncio.Task[None]) -> None:
    """A renewal whose waiters were all cancelled may fail without anyone to tell."""
    if not task.cancelled():
        task.exception()
