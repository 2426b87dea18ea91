"""Client of SGLang servers: `agentrl.inference.remote` over `/generate`.

An address may be that of sglang-router, which forwards requests for tokens but has no control
routes: requests to those go to each of its workers (`workers_of`).
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec

from agentrl.errors import InferenceError
from agentrl.inference.http import AnswerCut, ConnectionFailed, EngineSession, require_address
from agentrl.inference.remote import FIRST_TOKEN, LABEL_TIMEOUT_S, ServerEngine
from agentrl.inference.servers import Server, Unavailable
from agentrl.inference.token_api import (
    SGLANG,
    Endpoint,
    SamplingFields,
    read_likeliest,
    request_body,
)

PROBE_TEMPERATURE = 8.0
"""Far enough from 1 to change the likeliest token's probability measurably, however large it is."""


class SGLangEngine(ServerEngine):
    """Client of SGLang servers. It asks a server to drop a cancelled request, because the server
    notices a closed connection only seconds later."""

    name = "SGLang"
    label_path = "/model_info"
    sampled_logprobs = "without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._workers: dict[str, list[str]] = {}
        """Address -> addresses of its workers; a plain server is its only worker."""
        self._aborts: set[asyncio.Task[None]] = set()

    def distrust(self, url: str) -> None:
        """Has `resync` called for this server, or the router in front of it, before its next
        request."""
        for server in self._pool.servers:
            if url == server.url or url in self._workers.get(server.url, ()):
                server.in_doubt = True

    async def aclose(self) -> None:
        await asyncio.gather(*self._aborts)
        await super().aclose()

    async def _ask_probe(self, server: Server) -> tuple[Endpoint, bool]:
        """Asks at two temperatures: the likeliest token's log-probability changes with the
        temperature unless it is that of the raw logits. See `ServerEngine._ask_probe`."""
        seen = []
        for temperature in (1.0, PROBE_TEMPERATURE):
            sampling = SamplingFields(max_tokens=1, temperature=temperature, logprobs=1)
            body = request_body(SGLANG, self._model, [FIRST_TOKEN], sampling)
            answer = await self._post(server, SGLANG, body)
            if answer.status in (404, 405):
                raise InferenceError(
                    f"{server.url} does not offer {SGLANG}; is it an SGLang server?"
                )
            if answer.status != 200:
                raise self._refused_probe(server, SGLANG, answer)
            seen.append(read_likeliest(server.url, answer.body))
        self._workers[server.url] = await workers_of(self._http, server.url)
        return SGLANG, abs(seen[0] - seen[1]) < 1e-4

    async def _renewal(self, server: Server) -> None:
        """Renews all workers behind an address.

        A router sends no requests to a worker that is out of reach, so the others suffice. When the
        worker is back, the label of its weights shows that they are old.
        """
        version = max(self.policy_version, server.wanted_version)
        results = await asyncio.gather(
            *(self._renew_at(url, version) for url in self._workers[server.url]),
            return_exceptions=True,
        )
        for result in results:
            if not isinstance(result, Unavailable | None):
                raise result
        if results and all(isinstance(result, Unavailable) for result in results):
            assert isinstance(results[0], Unavailable)
            raise results[0]
        server.in_doubt = False

    def _id_for_server(self, wire_id: str) -> str:
        """Returns an id of fixed width, because an abort ends every request whose id begins with
        the given one."""
        return uuid.uuid4().hex

    def _abandon(self, server: Server, rid: str) -> None:
        task = asyncio.create_task(self._abort_on(self._workers.get(server.url, []), rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_on(self, urls: list[str], rid: str) -> None:
        """Asks servers to drop a request. A server that is out of reach notices the closed
        connection by itself, later."""
        body = msgspec.json.encode({"rid": rid})
        for url in urls:
            try:
                async with asyncio.timeout(LABEL_TIMEOUT_S):
                    await self._http.request("POST", f"{url}/abort_request", body)
            except (ConnectionFailed, AnswerCut, TimeoutError):
                continue


async def workers_of(http: EngineSession, url: str) -> list[str]:
    """Returns the addresses of a router's workers, or only `url` if it is not a router.

    Raises:
        InferenceError: it does not answer, or is a router without a worker.
    """
    try:
        async with asyncio.timeout(LABEL_TIMEOUT_S):
            answer = await http.request("GET", f"{url}/workers")
    except (ConnectionFailed, AnswerCut, TimeoutError) as error:
        raise InferenceError(f"{url}: {error or 'no answer'}; is SGLang running there?") from error
    if answer.status != 200:
        return [url]
    try:
        workers = [worker["url"] for worker in msgspec.json.decode(answer.body)["workers"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        return [url]
    if not workers:
        raise InferenceError(f"{url} is a router without a worker; add SGLang servers to it")
    return [require_address(worker, "a worker of inference.urls") for worker in workers]
