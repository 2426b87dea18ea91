"""Calls the control routes of one server in the only safe order.

    vLLM     init -> pause -> start -> update -> finish(version) -> resume
    SGLang           pause -> update(version) -> resume

A pause without an update is harmless, an update without a pause kills vLLM's worker, and a server
that stays paused answers no request. So resume is sent after every pause, whatever happens in
between: an error, a timeout, or the cancellation of the caller.

For a server that sleeps while the trainer uses its GPU:

    wake its weights -> pause -> start -> update -> finish(version) -> wake its cache -> resume

If a step fails, the server is not resumed: it lacks either weights or a cache to sample with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar, Literal

import httpx

from agentrl.errors import WeightSyncError
from agentrl.inference.token_api import COMPLETIONS, GENERATE, SGLANG, Endpoint, error_message
from agentrl.runtime import retry
from agentrl.types import JSON

OnUpdate = Literal["keep", "wait", "abort"]

ENGINE_TIMEOUT_S = 20.0
"""Longest time in seconds that an engine may be busy with one step."""
RESUME_ATTEMPTS = 3
RESUME_TIMEOUT_S = 10.0
"""Timeout of one attempt. The route only sets a flag; a server that needs longer is hung."""


class ServerUnreachable(WeightSyncError):
    """A server with which there is no connection, or whose engine is dead; it may be restarting."""


class ServerSilent(WeightSyncError):
    """The server did not answer in time: it or its engine is hung."""


class ServerFailed(WeightSyncError):
    """Status 5xx: the server refused, or its engine died; see `ServerControl.dead`."""


class ServerControl:
    """The part that `VLLMControl` and `SGLangControl` share."""

    endpoints: ClassVar[tuple[Endpoint, ...]]
    """Endpoints for the probe, the preferred one first."""
    resume_path: ClassVar[str]
    alive_path: ClassVar[str]
    """Route answered by the HTTP process, with 5xx if it knows that its engine died."""
    engine_path: ClassVar[str]
    """Route answered by the engine, between two steps."""
    label_path: ClassVar[str]
    """Route that returns the label of the weights."""
    logprobs: ClassVar[str]
    """Name of the server's setting that selects the kind of log-probabilities."""
    needs: ClassVar[str]
    """Advice for a server that does not offer these routes."""

    def __init__(self, http: httpx.AsyncClient, url: str, *, timeout_s: float) -> None:
        """
        Args:
            http: a client from `agentrl.inference.http.make_client`, with the servers' token.
            timeout_s: timeout of each call. Pausing with `wait` takes as long as the running
                sequences do.
        """
        self._http = http
        self._timeout_s = timeout_s
        self.url = url

    async def update(
        self,
        send: Callable[[], Awaitable[None]],
        *,
        version: int,
        on_update: OnUpdate,
        wakes: bool = False,
    ) -> float:
        """Replaces the weights and labels the new ones `version`.

        Args:
            send: makes the paused server load the weights.
            on_update: what to do with running sequences. In all three cases the caches are emptied,
                so that nothing computed with the old weights is used with the new ones.
            wakes: whether the server may be asleep; it is awake afterwards.

        Returns:
            Seconds from the pause request to the answer to resume.

        Raises:
            ServerUnreachable, WeightSyncError: a call failed; the message has the server, the route
                and its answer, and says if the server could not be resumed.
        """
        paused_at = time.monotonic()
        failure: BaseException | None = None
        try:
            if wakes:
                await self._wake("weights")
            await self._open(on_update)
            await send()
            await self._close(version)
            if wakes:
                await self._wake("kv_cache")
        except BaseException as error:
            failure = error
            raise
        finally:
            if failure is None or not wakes:
                await _uninterrupted(self._resume(failure))
        return time.monotonic() - paused_at

    async def sleep(self, *, keep_weights: bool) -> None:
        """Makes the server release its GPU memory. It answers no requests until it is woken.

        Args:
            keep_weights: keep the weights in host memory, because an update does not replace all
                of them.

        Raises:
            ServerUnreachable, WeightSyncError: the call failed; the server may still hold its
                memory.
        """
        raise NotImplementedError

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Makes the server allocate this memory again, unless a restart has already done so."""
        raise NotImplementedError

    async def dead(self) -> bool:
        """Returns whether the server does not answer or reports that its engine died."""
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                return (await self._http.get(self.url + self.alive_path)).status_code >= 500
        except (TimeoutError, httpx.RequestError):
            return True

    async def check_engine(self) -> None:
        """Checks that the server's engine, not only its HTTP process, answers.

        Raises:
            ServerUnreachable, ServerSilent: the engine does not answer.
        """
        with contextlib.suppress(RouteMissing):  # not in dev mode, which `update` reports
            await self.call(
                "GET", self.engine_path, timeout_s=min(ENGINE_TIMEOUT_S, self._timeout_s)
            )

    async def post(
        self,
        path: str,
        body: Mapping[str, JSON] | bytes | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Makes a POST request; see `call`."""
        return await self.call("POST", path, body, timeout_s=timeout_s)

    async def post_ending(
        self, path: str, sign: str, end: str, body: Mapping[str, JSON] | None = None
    ) -> None:
        """Makes a POST request. If its error holds `sign`, a killed trainer left an update open:
        then POSTs to `end` and repeats the request."""
        try:
            await self.post(path, body)
        except WeightSyncError as error:
            if sign not in str(error):
                raise
            await self.post(end, body)
            await self.post(path, body)

    async def call(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: Mapping[str, JSON] | bytes | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Makes a request and returns the body of an answer with status 200.

        Args:
            body: sent as JSON; bytes have to be JSON already.

        Raises:
            ServerUnreachable: there is no connection, or it was lost.
            ServerSilent: there was no answer in time.
            RouteMissing: the status is 403, 404 or 405.
            ServerFailed: the status is 5xx.
            WeightSyncError: the status is another one than 200.
        """
        route = path.partition("?")[0]
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._http.request(
                    method,
                    self.url + path,
                    content=json.dumps(body) if isinstance(body, Mapping) else body,
                    headers={"Content-Type": "application/json"},
                )
        except TimeoutError as error:
            raise ServerSilent(
                f"{self.url}{route} did not answer within {deadline_s:g} s"
            ) from error
        except httpx.RequestError as error:
            raise ServerUnreachable(
                f"{self.url}{route}: no answer ({type(error).__name__}: {error})"
            ) from error
        status = response.status_code
        if status in (403, 404, 405):
            raise RouteMissing(f"{self.url}{route} is not offered (status {status}); {self.needs}")
        if status != 200:
            kind = ServerFailed if status >= 500 else WeightSyncError
            raise kind(f"{self.url}{route} answered {status}: {error_message(response.content)}")
        return response.content

    async def _open(self, on_update: OnUpdate) -> None:
        """Pauses the server, empties its caches and starts an update."""
        raise NotImplementedError

    async def _close(self, version: int) -> None:
        raise NotImplementedError

    async def _resume(self, failure: BaseException | None) -> None:
        def worth_another(error: Exception) -> float | None:
            return None if isinstance(error, ServerUnreachable) and died else 0.0

        died = isinstance(failure, ServerUnreachable | asyncio.CancelledError)
        try:
            await retry(
                lambda _: self.post(self.resume_path, {}, timeout_s=RESUME_TIMEOUT_S),
                retry_after_s=worth_another,
                first_pause_s=0.2,
                max_attempts=RESUME_ATTEMPTS,
            )
            return
        except ServerUnreachable as error:
            if died:
                return  # the server is down, not paused
            raise error from failure
        except WeightSyncError as error:
            refusal = error
        if await self.dead():
            raise ServerUnreachable(f"{self.url} died: {failure or refusal}") from failure
        before = f"{failure}; afterwards, " if isinstance(failure, WeightSyncError) else ""
        kind = ServerSilent if isinstance(refusal, ServerSilent) else WeightSyncError
        raise kind(
            f"{before}{self.url} could not be resumed and is left PAUSED, so it answers no "
            f"requests: {refusal}. Restart it"
        ) from failure


class VLLMControl(ServerControl):
    endpoints = (GENERATE, COMPLETIONS)
    resume_path = "/resume"
    alive_path = "/health"
    engine_path = label_path = "/weight_info"
    logprobs = "--logprobs-mode"
    needs = (
        "start the server with VLLM_SERVER_DEV_MODE=1 and a weight-transfer backend (`agentrl "
        "doctor` says which)"
    )

    async def _open(self, on_update: OnUpdate) -> None:
        await self.post(f"/pause?mode={on_update}&clear_cache=true")
        await self.post_ending("/start_weight_update", "already active", "/finish_weight_update")

    async def _close(self, version: int) -> None:
        await self.post("/finish_weight_update", {"weight_version": str(version)})

    async def sleep(self, *, keep_weights: bool) -> None:
        await self.post(f"/sleep?level={1 if keep_weights else 2}&mode=abort")

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        try:
            await self.post(f"/wake_up?tags={part}")
        except ServerFailed as error:
            raise ServerFailed(
                f"{error}; the server could not allocate the memory of its {part} again: if the "
                "trainer leaves too little on the GPU, lower --gpu-memory-utilization in "
                "inference.args"
            ) from error


class SGLangControl(ServerControl):
    """SGLang's routes. The last call of a transfer empties the caches and labels the weights."""

    endpoints = (SGLANG,)
    resume_path = "/continue_generation"
    # Not /health, which samples a token: a paused server cannot.
    alive_path = label_path = "/model_info"
    engine_path = "/server_info"
    logprobs = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    needs = "is it an SGLang server, 0.5.23 or newer?"
    _is_asleep = False

    async def _open(self, on_update: OnUpdate) -> None:
        """Pauses the server.

        The configuration does not allow `wait`: SGLang has no pause that lets requests finish, and
        after one without a pause it may refuse to empty its cache.
        """
        mode = "retract" if on_update == "keep" else "abort"
        await self.post("/pause_generation", {"mode": mode})

    async def _close(self, version: int) -> None:
        """Does nothing: the transfer has ended the update and labelled the weights."""

    async def sleep(self, *, keep_weights: bool) -> None:
        """See `ServerControl.sleep`; the weights are never kept.

        SGLang crashes if it releases memory while it has a request, so this first waits until the
        cache can be flushed, which succeeds only without requests.
        """
        await self.post("/abort_request", {"abort_all": True})
        await retry(
            lambda _: self.post("/flush_cache"),
            timeout_s=self._timeout_s,
            retry_after_s=lambda error: 0.0 if type(error) is WeightSyncError else None,
            first_pause_s=0.02,
        )
        await self.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See `ServerControl._wake`.

        SGLang crashes if it resumes memory that it already has, or for which there is no room. A
        server that was restarted is awake; until its first update, the label of its weights is a
        word instead of a version.
        """
        if part == "weights":
            label = json.loads(await self.call("GET", self.label_path))["weight_version"]
            self._is_asleep = str(label).isdecimal()
        if self._is_asleep:
            await self.post("/resume_memory_occupation", {"tags": [part]})


class RouteMissing(WeightSyncError):
    pass


async def _uninterrupted(coroutine) -> None:
    """Awaits a coroutine to its end, even if this task is cancelled, and only then cancels."""
    task = asyncio.ensure_future(coroutine)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            cancelled = True
    if cancelled and task.exception() is None:
        raise asyncio.CancelledError
    task.result()
