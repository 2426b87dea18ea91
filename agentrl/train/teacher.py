"""A teacher: a frozen model beside the policy, or a server that is asked for log-probs.

A server answers `/v1/completions` with the log-probs of the prompt it was sent, so the prompt is
the whole row and the one token it must sample is thrown away. Both kinds must read ids as the
policy does, which is checked before the first rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import aiohttp
import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.config import TeacherSection
from agentrl.errors import ConfigError, InferenceError
from agentrl.train.model import load_model, load_tokenizer
from agentrl.types import JSON, Sample

MAX_ATTEMPTS = 5
MAX_IN_FLIGHT = 64
TIMEOUT_S = 600.0
"""Deadline of one row."""

_PROBE = 'Zażółć: 3.14 × ½ = don\'t\n\t{"x": [0, 东京]}'


class _PromptLogprob(msgspec.Struct):
    logprob: float | None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Tokens(msgspec.Struct):
    tokens: list[int]


Answer = TypeVar("Answer")


class TeacherServer:
    """A vLLM server that holds the teacher.

    Its log-probs are those of the raw logits, temperature 1.
    """

    def __init__(self, url: str, *, model: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.headers = {"Content-Type": "application/json"}
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"

    async def require_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare how the server and the policy tokenise a text of many scripts.

        Raises:
            ConfigError: they differ, or the server cannot be asked.
        """
        body: dict[str, JSON] = {"model": self.model, "prompt": _PROBE, "add_special_tokens": False}
        try:
            async with self._http() as http:
                answer = await self._ask(http, "/tokenize", body, _Tokens)
        except InferenceError as error:
            raise ConfigError(
                f"teacher.url does not answer as a vLLM server does ({error}); check teacher.url "
                "and teacher.model"
            ) from error
        if answer.tokens != tokenizer.encode(_PROBE, add_special_tokens=False):
            raise ConfigError(
                f"the teacher at {self.url} has another tokenizer than the policy, so its "
                "log-probabilities would be of other tokens; serve a model of the same family"
            )

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        """Log-probs (B, T) of the samples' trained tokens, left-aligned, 0 beyond. Blocks.

        Raises:
            InferenceError: the server refused a row or kept failing.
        """
        rows = asyncio.run(self._all_rows(samples))
        values = torch.zeros(len(rows), max(len(row) for row in rows))
        for number, row in enumerate(rows):
            values[number, : len(row)] = torch.from_numpy(row)
        return values

    async def _all_rows(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        async with self._http() as http:
            return await asyncio.gather(*(self._row(http, sample) for sample in samples))

    async def _row(self, http: aiohttp.ClientSession, sample: Sample) -> np.ndarray:
        """(num_trained,) float32"""
        ids: list[JSON] = [int(token_id) for token_id in sample.token_ids]
        body: dict[str, JSON] = {"model": self.model, "prompt": ids, "max_tokens": 1}
        body |= {"temperature": 0.0, "prompt_logprobs": 0}
        answer = await self._ask(http, "/v1/completions", body, _Completion)
        found = answer.choices[0].prompt_logprobs if len(answer.choices) == 1 else None
        if found is None or len(found) != len(ids):
            raise InferenceError(
                f"{self.url}: {len(ids)} prompt tokens came back with log-probabilities of "
                f"{0 if found is None else len(found)}; is it a vLLM server?"
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

    def _http(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_IN_FLIGHT, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=TIMEOUT_S, sock_connect=30.0),
            headers=self.headers,
        )

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        path: str,
        body: dict[str, JSON],
        answer: type[Answer],
    ) -> Answer:
        """The decoded answer. Passing faults are retried.

        Raises:
            InferenceError: with the address and the reason.
        """
        where, reason, attempt = f"{self.url}{path}", "", 0
        while attempt < MAX_ATTEMPTS:
            await asyncio.sleep(0.1 * 2**attempt if attempt else 0)
            attempt += 1
            try:
                async with http.post(where, data=msgspec.json.encode(body)) as response:
                    status, content = response.status, await response.read()
                    if status == 200:
                        return msgspec.json.decode(content, type=answer)
                reason = f"status {status}: {content[:300].decode(errors='replace')}"
                if status < 500 and status != 429:
                    break
            except msgspec.ValidationError as error:
                raise InferenceError(
                    f"{where}: the answer has another shape than expected: {error}"
                ) from error
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
                reason = f"{type(error).__name__}: {error}"
        raise InferenceError(f"{where}: {reason}; tried {attempt} times")


async def make_teacher(
    section: TeacherSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel | TeacherServer | None:
    """The teacher that the run file names, if any.

    Raises:
        ConfigError: it cannot be loaded or reached, or has another tokenizer than the policy.
    """
    if section.path is not None:
        require_same_tokenizer(section.path, tokenizer, "teacher.path")
        return load_model(section.path, dtype=dtype, device=device).requires_grad_(False)
    if section.url is None:
        return None
    server = TeacherServer(section.url, model=section.model, token=section.token)
    await server.require_tokenizer(tokenizer)
    return server


def require_same_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Check that the model at `path`, named by `key` of the run file, reads ids as the policy does.

    Raises:
        ConfigError: its tokenizer has other tokens or other ids for them.
    """
    its, ours = load_tokenizer(path).get_vocab(), tokenizer.get_vocab()
    if its != ours:
        different = len(set(its.items()) ^ set(ours.items()))
        raise ConfigError(
            f"{key} = {path!r} has another tokenizer than the policy ({len(its)} tokens, the "
            f"policy's has {len(ours)}; {different} entries differ); choose a model of the same "
            "family"
        )
