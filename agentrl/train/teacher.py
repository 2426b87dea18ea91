"""Loads the teacher of a distillation: a frozen model in this process, or a server.

A server returns log-probs of the prompt, so the whole row is sent as the prompt; vLLM must sample
one more token, which is discarded, SGLang none. Either way the teacher must have the policy's
tokenizer, which is checked before the first rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import httpx
import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, InferenceError
from agentrl.inference.http import make_client, require_address
from agentrl.inference.token_api import (
    COMPLETIONS,
    SGLANG,
    Endpoint,
    NotJSON,
    SamplingFields,
    error_message,
    read_prompt_logprobs,
    read_tokens,
    request_body,
)
from agentrl.model import ranks
from agentrl.model.build import build
from agentrl.runtime import retry
from agentrl.types import Sample

MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.2
MAX_IN_FLIGHT = 64
TIMEOUT_S = 600.0
"""Deadline of one attempt at one row."""

_PROBE = 'Zażółć: 3.14 × ½ = don\'t\n\t{"x": [0, 东京]}'


Read = TypeVar("Read")


class _Transient(Exception):
    """A failure that another attempt may not have."""


class TeacherServer:
    """Asks a vLLM or SGLang server for the teacher's log-probs, at temperature 1.

    The server itself is asked which of the two it is.
    """

    def __init__(self, url: str, *, model: str, token: str | None = None) -> None:
        """
        Args:
            model: name under which the server serves the teacher.
            token: the server's `--api-key`.

        Raises:
            ConfigError: the address is malformed.
        """
        self.url = require_address(url, "teacher.url")
        self.model = model
        self._token = token
        self._endpoint: Endpoint | None = None

    async def require_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Checks that the server tokenises a text of many scripts as the policy does.

        Raises:
            ConfigError: it does not, or it cannot be asked.
        """
        body = {"model": self.model, "prompt": _PROBE, "add_special_tokens": False}
        try:
            async with self._http() as http:
                tokens = await self._ask(
                    http,
                    "/tokenize",
                    msgspec.json.encode(body),
                    lambda answer: read_tokens(self.url, answer),
                )
        except InferenceError as error:
            raise ConfigError(
                f"teacher.url does not answer as vLLM or SGLang does ({error}); check teacher.url "
                "and teacher.model"
            ) from error
        if tokens != tokenizer.encode(_PROBE, add_special_tokens=False):
            raise ConfigError(
                f"the teacher at {self.url} has another tokenizer than the policy, so its "
                "log-probabilities would be of other tokens; serve a model of the same family"
            )

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        """Returns log-probs (B, T) float32 of the samples' trained tokens, left-aligned and padded
        with 0. Blocks until the server has answered for all rows.

        Raises:
            InferenceError: the server refused a row or kept failing.
            ConfigError: a row shows an image, which cannot be sent to the server.
        """
        if any(sample.images for sample in samples):
            raise ConfigError(
                "images cannot be sent to a teacher at teacher.url, and a row shows one; load the "
                "teacher into this process with teacher.path"
            )
        rows = asyncio.run(self._all_rows(samples))
        values = torch.zeros(len(rows), max(len(row) for row in rows))
        for number, row in enumerate(rows):
            values[number, : len(row)] = torch.from_numpy(row)
        return values

    async def _all_rows(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        free = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def row(sample: Sample) -> np.ndarray:
            async with free:
                return await self._row(http, sample)

        async with self._http() as http:
            await self._find_endpoint(http)
            return await asyncio.gather(*map(row, samples))

    async def _find_endpoint(self, http: httpx.AsyncClient) -> None:
        """Asks the server whether it is SGLang or vLLM. If it does not answer, this stays open: the
        following call reports the error."""
        if self._endpoint is None:
            with contextlib.suppress(httpx.RequestError):
                answer = await http.get("/model_info", timeout=TIMEOUT_S)
                if answer.status_code < 500:
                    self._endpoint = SGLANG if answer.status_code == 200 else COMPLETIONS

    async def _row(self, http: httpx.AsyncClient, sample: Sample) -> np.ndarray:
        """Returns (num_trained,) float32 log-probs of a sample's trained tokens."""
        ids = [int(token_id) for token_id in sample.token_ids]
        endpoint = self._endpoint or COMPLETIONS
        num_sampled = 0 if endpoint == SGLANG else 1
        sampling = SamplingFields(max_tokens=num_sampled, temperature=0.0, prompt_logprobs=0)
        found = await self._ask(
            http,
            endpoint,
            request_body(endpoint, self.model, ids, sampling),
            lambda answer: read_prompt_logprobs(endpoint, self.url, answer),
        )
        if found is None or len(found) != len(ids):
            raise InferenceError(
                f"{self.url}: {len(ids)} prompt tokens came back with log-probabilities of "
                f"{0 if found is None else len(found)}; is it a vLLM or SGLang server?"
            )
        values = np.zeros(sample.num_trained, np.float32)
        for column, position in enumerate(np.flatnonzero(sample.loss_mask)):
            entry = (found[position] or {}).get(str(ids[position]))
            if entry is None or entry.logprob is None:
                raise InferenceError(
                    f"{self.url}: no log-probability of token {ids[position]} at position "
                    f"{position} of {sample.trajectory_id}"
                )
            values[column] = entry.logprob
        return values

    def _http(self) -> httpx.AsyncClient:
        return make_client(self.url, token=self._token)

    async def _ask(
        self, http: httpx.AsyncClient, path: str, body: bytes, read: Callable[[bytes], Read]
    ) -> Read:
        """Sends a request, retrying transient failures, and returns `read` of the answer."""
        where = f"{self.url}{path}"

        async def attempt(_: float) -> Read:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    response = await http.post(
                        path, content=body, headers={"Content-Type": "application/json"}
                    )
            except TimeoutError as error:
                raise _Transient(f"no answer within {TIMEOUT_S:g} s") from error
            except httpx.RequestError as error:
                raise _Transient(f"{type(error).__name__}: {error}") from error
            if response.status_code == 200:
                try:
                    return read(response.content)
                except NotJSON as error:
                    raise _Transient(str(error)) from error
            reason = f"status {response.status_code}: {error_message(response.content)}"
            if response.status_code >= 500 or response.status_code == 429:
                raise _Transient(reason)
            raise InferenceError(f"{where}: {reason}")

        try:
            return await retry(
                attempt,
                retry_after_s=lambda error: 0.0 if isinstance(error, _Transient) else None,
                first_pause_s=FIRST_PAUSE_S,
                max_attempts=MAX_ATTEMPTS,
            )
        except _Transient as error:
            raise InferenceError(f"{where}: {error}; tried {MAX_ATTEMPTS} times") from error


async def make_teacher(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | TeacherServer | None:
    """Loads or connects to the teacher that the run file names; None if it names none.

    Raises:
        ConfigError: the teacher cannot be loaded or reached, or has another tokenizer than the
            policy.
    """
    section = config.teacher
    if section.path is not None:
        return build(section.path, "teacher", config, tokenizer).module
    if section.url is None:
        return None
    server = TeacherServer(section.url, model=section.model, token=section.token)
    if ranks.rank() == 0:  # the only rank that asks the server
        await server.require_tokenizer(tokenizer)
    return server
