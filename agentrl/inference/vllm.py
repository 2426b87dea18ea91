"""Client of vLLM servers: token ids in, token ids, log-probabilities and weight versions out.

Two endpoints, chosen by a probe per server:

* `POST /inference/v1/generate` (needs `--enable-scale-out`): ids both ways, ignores the model's
  own sampling defaults, and says which weight version sampled which tokens.
* `POST /v1/completions` with an id prompt, on any vLLM.

The same probe reads whether log-probabilities are those of the distribution that was sampled
(`--logprobs-mode processed_logprobs`) or of the raw logits, which differ unless the temperature
is 1. Every answer is checked before it is handed on.

What is retried: a server that cannot be reached, drops the connection before it answers, or says
429 or 503, for `retry_for_s`; a server that fails while answering (500, 502, 504, a body that ends
early or is no JSON), up to `MAX_FAILURES` per call; a server that stays silent for
`request_timeout_s`, once on each other server. An answer that breaks the contract is not retried.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar, get_args

import aiohttp
import msgspec

from agentrl.errors import InferenceError
from agentrl.inference.base import Generation, SamplingParams, request_seed
from agentrl.types import JSON, FinishReason, bad_logprob

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

MAX_FAILURES = 3
"""Failed answers (not refused connections) a call tolerates before it gives up."""
KEEPALIVE_S = 3.0
"""Below the server's 5 s, so that the client never writes into a connection being closed."""
MAX_GROUPS = 65536
"""Groups whose server is remembered."""


class _TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float | None


class _GenerateLogprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _VersionSpan(msgspec.Struct):
    version: str | int | None
    start: int
    end: int
    """Exclusive."""


class _GenerateChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _GenerateLogprobs | None = None
    weight_versions: list[_VersionSpan] | None = None


class _GenerateAnswer(msgspec.Struct):
    choices: list[_GenerateChoice]


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class _CompletionAnswer(msgspec.Struct):
    choices: list[_CompletionChoice]


Answer = TypeVar("Answer")
Choice = TypeVar("Choice")

_generate_decoder = msgspec.json.Decoder(_GenerateAnswer)
_completion_decoder = msgspec.json.Decoder(_CompletionAnswer)
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class _Server:
    url: str
    endpoint: str | None = None
    """None until probed."""
    raw_logprobs: bool = False
    in_flight: int = 0
    down_until: float = 0.0
    """`time.monotonic()` before which other servers are preferred."""
    labels_versions: bool = False
    """It once answered with an integer weight version."""
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Unavailable(Exception):
    """No byte of an answer, or 429/503: the same request may be sent again."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class _Failed(Exception):
    """The server began to answer, or should have, and failed."""


class VLLMEngine:
    """An `InferenceEngine` over one or several vLLM servers with the same weights.

    A group's requests go to one server, so that its shared prompt is prefilled once; a new group
    goes to the server with the fewest requests in flight. The group is the request id up to the
    last `-m`: `step3-group7-m2-turn0` and `step3-group7-m5-turn1` share a server.

    `policy_version` stamps the tokens of servers that report no versions; set it after the new
    weights are in place.
    """

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
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._seed = seed
        self._stop_token_ids = frozenset(stop_token_ids)
        self._request_timeout_s = request_timeout_s
        self._retry_for_s = retry_for_s
        self._server_of_group: OrderedDict[str, _Server] = OrderedDict()
        self._http: aiohttp.ClientSession | None = None

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

        Bounded by the caller's own deadline; cancelling closes the connection, which makes the
        server drop the request. With `top_p` or `top_k` the log-probabilities are those of the
        truncated distribution: good for evaluation, not for training.

        Raises:
            InferenceError: with the server's address and the reason.
        """
        give_up_at = time.monotonic() + self._retry_for_s
        pause_s = 0.1
        failures = 0
        silent: set[str] = set()
        attempt = 0
        while True:
            server = self._route(request_id, silent)
            server.in_flight += 1
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    return await self._attempt(server, attempt, request_id, prompt_ids, sampling)
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
            except _Failed as error:
                failures += 1
                server.down_until = time.monotonic() + pause_s
                if failures == MAX_FAILURES:
                    raise InferenceError(
                        f"{server.url}: {error}; {failures} attempts failed"
                    ) from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
            finally:
                server.in_flight -= 1
                attempt += 1

    def reserve(self, num_episodes: int) -> None:
        """Nothing to do: a server forms its batches itself."""

    def release(self, num_episodes: int = 1) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

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
        attempt: int,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
    ) -> Generation:
        endpoint = await self._probe(server)
        if server.raw_logprobs and sampling.temperature not in (0.0, 1.0):
            raise InferenceError(
                f"{server.url}: its log-probabilities are those of the raw logits, not of the "
                f"distribution at temperature {sampling.temperature:g}; start the server with "
                "--logprobs-mode processed_logprobs, or sample at temperature 1"
            )
        expected_version = self.policy_version
        # The server may still hold an earlier attempt under its id.
        wire_id = f"{request_id}-retry{attempt}" if attempt else request_id
        parameters = self._parameters(request_id, sampling)
        status, body = await self._post(
            server, endpoint, self._body(endpoint, wire_id, prompt_ids, parameters)
        )
        if status != 200:
            raise InferenceError(
                f"{server.url}: {request_id} ({len(prompt_ids)} prompt tokens, max_tokens "
                f"{sampling.max_tokens}) was refused with {status}: {_message(body)}"
            )
        if endpoint == GENERATE:
            generation = self._read_generate(server, body, expected_version)
        else:
            generation = self._read_completion(server, body, expected_version, prompt_ids)
        _check_generation(server.url, generation, sampling)
        return generation

    def _parameters(self, request_id: str, sampling: SamplingParams) -> dict[str, JSON]:
        """Every sampling parameter: what is not sent, servers fill in differently."""
        stop_token_ids: list[JSON] = []
        stop_token_ids += sorted(self._stop_token_ids.union(sampling.stop_token_ids))
        parameters: dict[str, JSON] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "logprobs": 0,
            "stop_token_ids": stop_token_ids,
        }
        if self._seed is not None:
            parameters["seed"] = request_seed(self._seed, request_id)
        return parameters

    def _body(
        self, endpoint: str, wire_id: str, prompt_ids: list[int], parameters: dict[str, JSON]
    ) -> dict[str, JSON]:
        ids: list[JSON] = list(prompt_ids)
        if endpoint == GENERATE:
            return {
                "model": self._model,
                "request_id": wire_id,
                "token_ids": ids,
                "sampling_params": parameters,
            }
        return {"model": self._model, "prompt": ids, "return_token_ids": True} | parameters

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # The timeout of a whole attempt is set around it; aiohttp's own are off.
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._http

    async def _post(self, server: _Server, path: str, body: dict[str, JSON]) -> tuple[int, bytes]:
        """Status and body of an answer that is complete and not an error of the server's.

        Raises:
            _Unavailable, _Failed: see their docstrings.
        """
        try:
            response = await self._session().post(
                server.url + path, data=_encoder.encode(body), headers=self._headers
            )
        except aiohttp.ClientConnectionError as error:
            raise _Unavailable(f"no answer ({type(error).__name__}: {error})") from error
        except aiohttp.ClientError as error:
            raise _Failed(f"no HTTP answer ({type(error).__name__}: {error})") from error
        async with response:
            try:
                content = await response.read()
            except aiohttp.ClientError as error:
                raise _Failed(
                    f"the answer ended early ({type(error).__name__}: {error})"
                ) from error
            if response.status in (429, 503):
                raise _Unavailable(
                    f"status {response.status}: {_message(content)}",
                    _seconds(response.headers.get("Retry-After")),
                )
            if response.status >= 500:
                raise _Failed(f"status {response.status}: {_message(content)}")
            return response.status, content

    async def _probe(self, server: _Server) -> str:
        """Find out the server's endpoint and what its log-probabilities mean, once.

        At an enormous temperature every token is equally likely: a processed log-probability is
        the same for all of them, a raw one follows the logits.
        """
        async with server.probing:
            if server.endpoint is not None:
                return server.endpoint
            hot = SamplingParams(max_tokens=8, temperature=1e6)
            parameters = self._parameters("probe", hot)
            parameters.update(stop_token_ids=[], ignore_eos=True, seed=0)
            for endpoint in (GENERATE, COMPLETIONS):
                body = self._body(endpoint, f"probe-{uuid.uuid4().hex}", [0], parameters)
                status, content = await self._post(server, endpoint, body)
                if status == 200:
                    break
                if status not in (403, 404, 405):
                    raise InferenceError(
                        f"{server.url}{endpoint} refused the probe with {status}: "
                        f"{_message(content)}; check the address, model {self._model!r} and "
                        "the token"
                    )
            else:
                raise InferenceError(
                    f"{server.url} offers neither {GENERATE} nor {COMPLETIONS}; "
                    "is it a vLLM server?"
                )
            if endpoint == GENERATE:
                probe = self._read_generate(server, content, 0)
            else:
                probe = self._read_completion(server, content, 0, [0])
            _check_generation(server.url, probe, hot)
            server.raw_logprobs = max(probe.logprobs) - min(probe.logprobs) > 1e-3
            server.endpoint = endpoint
            return endpoint

    def _read_generate(self, server: _Server, body: bytes, expected_version: int) -> Generation:
        answer = _decode(_generate_decoder, server.url, body)
        choice = _only_choice(server.url, answer.choices)
        if choice.logprobs is None:
            raise InferenceError(f"{server.url}: the answer holds no log-probabilities")
        content = choice.logprobs.content
        if [entry.token_id for entry in content] != choice.token_ids:
            raise InferenceError(
                f"{server.url}: {len(choice.token_ids)} tokens came with log-probabilities of "
                f"{len(content)} other ones"
            )
        return Generation(
            choice.token_ids,
            _present(server.url, [entry.logprob for entry in content]),
            self._versions(server, choice, expected_version),
            _finish_reason(server.url, choice.finish_reason),
        )

    def _read_completion(
        self, server: _Server, body: bytes, expected_version: int, prompt_ids: list[int]
    ) -> Generation:
        answer = _decode(_completion_decoder, server.url, body)
        choice = _only_choice(server.url, answer.choices)
        if choice.logprobs is None:
            raise InferenceError(f"{server.url}: the answer holds no log-probabilities")
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt_ids:
            raise InferenceError(
                f"{server.url}: it sampled from another prompt ({len(choice.prompt_token_ids)} "
                f"tokens) than was sent ({len(prompt_ids)} tokens)"
            )
        return Generation(
            choice.token_ids,
            _present(server.url, choice.logprobs.token_logprobs),
            [expected_version] * len(choice.token_ids),
            _finish_reason(server.url, choice.finish_reason),
        )

    def _versions(
        self, server: _Server, choice: _GenerateChoice, expected_version: int
    ) -> list[int]:
        """One version per token, from the server's spans where it labels its weights.

        A server that never had its weights changed labels them with a word; one that was restarted
        goes back to that word, or to an older number, and must not be trained on unknowingly.
        """
        labels = [_integer(span.version) for span in choice.weight_versions or []]
        if not labels or None in labels:
            if server.labels_versions:
                raise InferenceError(
                    f"{server.url}: it no longer says which weights it samples from; it was "
                    f"probably restarted. Send it version {expected_version} again"
                )
            return [expected_version] * len(choice.token_ids)
        versions: list[int] = []
        for span, label in zip(choice.weight_versions or [], labels, strict=True):
            if span.start != len(versions) or span.end < span.start or label is None:
                raise InferenceError(f"{server.url}: its weight version spans leave gaps")
            versions += [label] * (span.end - span.start)
        if len(versions) != len(choice.token_ids):
            raise InferenceError(
                f"{server.url}: its weight version spans cover {len(versions)} of "
                f"{len(choice.token_ids)} tokens"
            )
        server.labels_versions = True
        if versions and min(versions) < expected_version:
            raise InferenceError(
                f"{server.url}: it samples from weights of version {min(versions)}, the policy is "
                f"at version {expected_version}; it was probably restarted. Send the weights again"
            )
        return versions


def _check_generation(url: str, generation: Generation, sampling: SamplingParams) -> None:
    num_tokens = len(generation.token_ids)
    if len(generation.logprobs) != num_tokens:
        raise InferenceError(
            f"{url}: {num_tokens} tokens came with {len(generation.logprobs)} log-probabilities"
        )
    if num_tokens > sampling.max_tokens:
        raise InferenceError(f"{url}: {num_tokens} tokens, max_tokens was {sampling.max_tokens}")
    if num_tokens == 0 and generation.finish_reason != "abort":
        raise InferenceError(f"{url}: the answer holds no tokens")
    if (position := bad_logprob(generation.logprobs)) is not None:
        logprob = generation.logprobs[position]
        raise InferenceError(f"{url}: log-probability {logprob} at sampled token {position}")


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
    present = [logprob for logprob in logprobs if logprob is not None]
    if len(present) != len(logprobs):
        raise InferenceError(
            f"{url}: {len(logprobs) - len(present)} of {len(logprobs)} log-probabilities are null"
        )
    return present


def _finish_reason(url: str, reason: str | None) -> FinishReason:
    for known in get_args(FinishReason):
        if reason == known:
            return known
    raise InferenceError(f"{url}: the request ended with finish_reason {reason!r}")


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
