"""Client of inference servers: token ids in; token ids, log-probabilities and weight versions out.

The clients of vLLM and SGLang share this module. `agentrl.inference.vllm` and `.sglang` define what
differs: the token endpoint, its probe, the route to the label of the weights, and how a cancelled
request is dropped.

The probe determines if log-probabilities are those of the sampled distribution or of the raw
logits; the two differ unless the temperature is 1. Every answer is checked before it is returned.
If an endpoint does not report versions, tokens get the policy version at which their request was
sent, and a restart between two requests goes unnoticed.

**Faults.** A request is retried for `retry_for_s` while a server cannot be reached, drops the
connection before it answers, or answers 429 or 503. If a server fails while answering (500, 502,
504, a body that ends early or is not JSON), a call gives up at `MAX_FAILURES` such failures. If a
server stays silent for `request_timeout_s`, the request is sent once to each other server. An
answer that is invalid for another reason is not retried.

**Weights.** A server that was out of reach may have been restarted; it then samples from the
weights on its disk. If `resync` is set, such a server gets the current weights before its next
request, and an answer from older weights is discarded and requested again.

**Updates.** A weight update may abort the requests in flight, which then return what they had
sampled. `generate` continues them from those ids, with the server's new weights. No `cache_salt` is
sent, because every way to pause a server for an update also empties its prefix cache. A salt per
version would not be exact, because the server changes its weights before the client knows: a
request in between would store new keys and values under the old salt. It would also keep a turn
that crossed an update from sharing its prefix with the next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
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
    retrieve,
)
from agentrl.inference.token_api import (
    COMPLETIONS,
    GENERATE,
    LARGEST_VOCABULARY,
    Endpoint,
    NotJSON,
    Sampled,
    SamplingFields,
    error_message,
    read_context,
    read_routes,
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
from agentrl.runtime import retry
from agentrl.types import ShownImage

logger = logging.getLogger(__name__)

LABEL_TIMEOUT_S = 20.0
"""Seconds within which a busy engine must report the label of its weights."""
AFTER_SILENCE_S = 30.0
"""Seconds for which other servers are preferred to one that did not report its label."""
PROBE_TIMEOUT_S = 60.0
"""Seconds within which a server must answer the probe. A paused server does not answer it."""
FIRST_TOKEN = 0
"""The only token in the probe's prompt. Every vocabulary has it."""


class ServerEngine:
    """An `InferenceEngine` over one or several servers with the same weights, for use in one event
    loop.

    A group's requests go to one server, so that its shared prompt is prefilled once; a new group
    goes to the server with the fewest requests in flight. The group is the request id up to the
    last `-m`: `step3-group7-m2-turn0` and `step3-group7-m5-turn1` share a server.

    `policy_version` is the version of tokens from servers that do not report versions, and the
    oldest version accepted from servers that do. Set it after the new weights are in place. Within
    a trajectory (the request id up to the last `-t`) versions never decrease: during an update one
    server may be ahead, and if the trajectory's next turn goes to another server, that server's
    older answer is discarded.

    `resync(url)` sends the current weights, labelled `policy_version` or newer, to one server. It
    raises an AgentRLError or OSError if it fails, and is then called again. It is awaited before a
    request goes to a server whose weights are in doubt, once at a time per server. While `resync`
    is set, a server without an integer label counts as having version 0. If it is None, tokens of
    such a server get `policy_version`, unless the server reported integer labels before, which is
    an error.
    """

    name: ClassVar[str]
    """Name of the serving software."""
    label_path: ClassVar[str]
    """Route that returns the label of a server's weights."""
    sampled_logprobs: ClassVar[str]
    """How to start a server so that its log-probabilities are those of the sampled distribution."""
    image_families: ClassVar[tuple[str, ...]] = ()
    """Model families whose images can be sent to the server."""

    resync: Callable[[str], Awaitable[None]] | None = None
    sent_version: int | None = None
    """Newest version that is being sent to the servers, or was. Their labels must not be newer.
    None if nothing is sent: whatever trained them before, its labels are right."""

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
        vocab_size: int = LARGEST_VOCABULARY,
    ) -> None:
        """
        Args:
            urls: base addresses, `http://host:port`.
            model: served model name.
            token: the servers' `--api-key`.
            seed: derives a seed for every request. None leaves seeds to the server, which then
                samples a batch faster.
            stop_token_ids: ids that end every turn, besides each request's own.
            request_timeout_s: limit of one attempt, from connecting to the last byte.
            retry_for_s: time for which a call keeps trying while servers are unreachable or full.
            vocab_size: number of ids that the model knows; no answer may have others.

        Raises:
            ConfigError: an address or the token is malformed.
            ValueError: `urls` is empty.
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
        self._vocab_size = vocab_size
        self._newest_version: OrderedDict[str, int] = OrderedDict()  # by trajectory
        self._told_of_context = False

    @property
    def context_tokens(self) -> int | None:
        """The smallest context of the servers that were probed; None if none reported it."""
        contexts = [server.context_tokens for server in self._pool.servers]
        return min((each for each in contexts if each), default=None)

    async def start(self) -> None:
        """Probes every server now instead of at its first request.

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
                    "or a trainer that was killed left it paused: restart or resume it"
                ) from error

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        images: Sequence[ShownImage] = (),
    ) -> Generation:
        """Samples one continuation of `prompt_ids`.

        A request that the server aborts is continued with what is left of `max_tokens`, as often as
        necessary. So the result may have tokens of several versions, but never the finish reason
        `abort`. A part's seed depends on its start, so that no two use the same random numbers.

        The caller sets the deadline. Cancelling closes the connection, and the server drops the
        request. With `top_p`, `top_k` or `min_p`, vLLM's log-probabilities are those of the
        truncated distribution, and `kept_ids` has its ids if the server reports them.

        Args:
            images: the prompt's images, in order.

        Raises:
            InferenceError: the request failed (the message has the server's address and the
                reason), or servers do not take such images.
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
                _continued(whole.routes, part.routes),
            )
        if whole.versions:
            remember(self._newest_version, trajectory, whole.versions[-1])
        return whole

    def probe_result(self, url: str) -> tuple[Endpoint, bool]:
        """Returns the probe's findings: the endpoint, and True if log-probabilities are those of
        the raw logits.

        Raises:
            InferenceError: the server has not been probed.
        """
        server = self._pool.find(url)
        if server.endpoint is None:
            raise InferenceError(f"{url} has not been probed yet; call start() first")
        return server.endpoint, server.raw_logprobs

    def distrust(self, url: str) -> None:
        """Has `resync` called for this server before its next request, because its weights may not
        be the current ones."""
        self._pool.find(url).in_doubt = True

    def reserve(self, num_episodes: int) -> None:
        """Does nothing: a server forms its batches itself."""

    def release(self, num_episodes: int = 1) -> None:
        """Does nothing."""

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
        """Returns one server's answer, after as many attempts on as many servers as necessary.

        Args:
            part_id: the id of this part of the request; the request's own for the first part.
            request_id: decides the server.
            min_version: version of the tokens before; versions never decrease within a sequence.
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
        sampling = self._clipped(server, sampling, len(prompt_ids))
        expected_version = max(self.policy_version, min_version)
        server.wanted_version = max(server.wanted_version, expected_version)
        fields = self._sampling_of(part_id, sampling)
        rid = self._id_for_server(wire_id)
        body = request_body(
            endpoint,
            self._model,
            prompt_ids,
            fields,
            request_id=rid,
            features=features,
            report_routes=sampling.report_routes,
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
        sampled = read_sampled(
            endpoint, server.url, answer.body, prompt_ids, sampling.max_tokens, self._vocab_size
        )
        if endpoint != COMPLETIONS:
            versions = self._versions(server, sampled, expected_version)
        else:
            versions = [expected_version] * len(sampled.token_ids)
        kept_ids = None
        if sampled.kept_ids is not None or not sampled.token_ids:
            kept_ids = [np.array(ids, np.int32) for ids in sampled.kept_ids or []]
        routes = None
        if sampling.report_routes and sampled.token_ids:
            routes = read_routes(endpoint, server.url, sampled, len(prompt_ids))
        return Generation(
            sampled.token_ids, sampled.logprobs, versions, sampled.finish_reason, kept_ids, routes
        )

    def _clipped(self, server: Server, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """Returns the parameters with no more tokens than the server's context has room for. A
        prompt that leaves no room is left to the server to refuse."""
        room = (server.context_tokens or num_prompt) - num_prompt
        if not 0 < room < sampling.max_tokens:
            return sampling
        if not self._told_of_context:
            self._told_of_context = True
            logger.warning(
                "%s: the server's context is %d tokens, less than the run file allows: turns that "
                "reach its end are cut there and count as truncated; start it with a longer one, "
                "or lower rollout.max_context_tokens",
                server.url,
                server.context_tokens,
            )
        return dataclasses.replace(sampling, max_tokens=room)

    async def _renew(self, server: Server) -> None:
        """Waits until a server in doubt has the current weights.

        All requests wait for the same renewal. Cancelling them does not stop it, because a server
        in the middle of an update answers no requests.
        """
        if server.renewal is None or server.renewal.done():
            server.renewal = asyncio.create_task(self._renewal(server))
            server.renewal.add_done_callback(retrieve)
        await asyncio.shield(server.renewal)

    async def _renewal(self, server: Server) -> None:
        """Sends the current weights to a server in doubt, unless its label shows that it has them:
        a lost connection does not always mean a restart."""
        await self._renew_at(server.url, max(self.policy_version, server.wanted_version))
        server.in_doubt = False

    async def _renew_at(self, url: str, version: int) -> None:
        """Sends the current weights to a server, unless its label is this version or newer."""
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
        return wire_id

    def _abandon(self, server: Server, rid: str) -> None:
        """Called after an attempt was cancelled and its connection closed."""

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
        """Sends a request and returns the complete answer, with a status below 500 and not 429."""
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
        """Determines the server's endpoint and the meaning of its log-probabilities, once."""
        async with server.probing:
            if server.endpoint is None:
                endpoint, server.raw_logprobs = await self._ask_probe(server)
                with contextlib.suppress(ConnectionFailed, AnswerCut, NotJSON, InferenceError):
                    models = await self._http.request("GET", f"{server.url}/v1/models")
                    if models.status == 200:
                        server.context_tokens = read_context(server.url, models.body)
                server.endpoint = endpoint
            return server.endpoint

    async def _ask_probe(self, server: Server) -> tuple[Endpoint, bool]:
        """Sends the probe.

        Returns:
            The endpoint, and True if log-probabilities are those of the raw logits.

        Raises:
            InferenceError: the server has no such endpoint, or refuses the request.
            Unavailable, Failed, NotJSON: see their docstrings.
        """
        raise NotImplementedError

    async def _require_pixels(self, server: Server, endpoint: Endpoint) -> None:
        """Checks that the server reads images' pixels as they are sent."""
        if endpoint != GENERATE:
            raise InferenceError(
                f"{server.url}: images need {GENERATE}, which the server does not offer; start it "
                "with --enable-scale-out"
            )
        answer = await self._post(server, RENDER, render_request(self._model))
        if answer.status != 200:
            raise InferenceError(
                f"{server.url} refused a test image ({answer.status}: "
                f"{error_message(answer.body)}); does it serve the model at model.path?"
            )
        if normalises_itself(answer.body):
            raise InferenceError(
                f"{server.url}: its image tower would normalise pixels a second time; start it "
                f"with {NORMALISED}"
            )
        server.takes_pixels = True

    def _refused_probe(self, server: Server, endpoint: Endpoint, answer: Answer) -> InferenceError:
        return InferenceError(
            f"{server.url}{endpoint} refused the probe with {answer.status}: "
            f"{error_message(answer.body)}; check inference.urls, inference.model "
            f"(now {self._model!r}) and inference.token"
        )

    def _versions(self, server: Server, sampled: Sampled, expected_version: int) -> list[int]:
        """Returns one version per token, from the server's spans or, if it has no integer labels,
        `expected_version`.

        A server whose weights were never changed labels them with a word. After a restart it uses
        that word again, or an older number, and its samples must not be trained on.
        """
        spans, num_tokens = sampled.spans, len(sampled.token_ids)
        labels = [version_number(span.version) for span in spans]
        if not labels or None in labels:
            if server.labels_versions or (self.resync is not None and expected_version > 0):
                raise OldWeights(
                    "it does not report which weights it samples from; it was probably restarted. "
                    f"Send it version {expected_version} again"
                )
            return [expected_version] * num_tokens
        versions: list[int] = []
        for span, label in zip(spans, labels, strict=True):
            if span.start != len(versions) or span.end < span.start or label is None:
                raise InferenceError(f"{server.url}: its weight version spans have gaps")
            versions += [label] * (span.end - span.start)
        if len(versions) != num_tokens:
            raise InferenceError(
                f"{server.url}: its weight version spans cover {len(versions)} of "
                f"{num_tokens} tokens"
            )
        server.labels_versions = True
        newest = max(versions, default=expected_version)
        if self.sent_version is not None and newest > self.sent_version:
            raise InferenceError(
                f"{server.url}: it samples from weights of version {newest}, but the newest that "
                f"this run sent is {self.sent_version}: a second trainer sends its own weights "
                "there; give each run servers of its own (inference.urls)"
            )
        oldest = min(versions, default=expected_version)
        if oldest < expected_version:
            raise OldWeights(
                f"it samples from weights of version {oldest}, but the policy is at version "
                f"{expected_version}; it was probably restarted. Send the weights again"
            )
        return versions


def _joined(
    first: list[np.ndarray] | None, second: list[np.ndarray] | None
) -> list[np.ndarray] | None:
    return None if first is None or second is None else first + second


def _continued(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """Returns the routes of a whole continuation: tokens keep those that they were sampled with."""
    if first is None or second is None:
        return first if second is None else second
    return np.concatenate([first, second[len(first) :]])


@functools.lru_cache(maxsize=64)
def _union(stop_token_ids: frozenset[int], more: tuple[int, ...]) -> list[int]:
    """Returns the sorted union of the engine's and a request's stop ids. Cached, because most
    requests of a run have the same."""
    return sorted(stop_token_ids.union(more))
