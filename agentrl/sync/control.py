"""The control routes of one server, in the only order that is safe.

    vLLM     init -> pause -> start -> update -> finish(version) -> resume
    SGLang           pause -> update(version) -> resume

Pausing without an update in between costs nothing, an update without a pause kills vLLM's worker,
and a server that stays paused answers nobody. So resume is sent whatever happens after the pause
was: an error, a deadline, the cancellation of the caller.

Of a server that sleeps while the trainer has its GPU:

    wake its weights -> pause -> start -> update -> finish(version) -> wake its cache -> resume

Whatever fails before the end leaves it asleep: it has no weights, or no cache to sample with.
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
from agentrl.inference.token_api import (
    COMPLETIONS,
    GENERATE,
    SGLANG,
    Endpoint,
    error_message,
)
from agentrl.retry import retry
from agentrl.types import JSON

OnUpdate = Literal["keep", "wait", "abort"]

ENGINE_TIMEOUT_S = 20.0
"""The longest that an engine may be busy with one step."""
RESUME_ATTEMPTS = 3
RESUME_TIMEOUT_S = 10.0
"""Deadline of one attempt. The route only sets a flag; a server that needs longer hangs."""


class ServerUnreachable(WeightSyncError):
    """No connection, or it broke, or its engine is dead: the server may be starting again."""


class ServerSilent(WeightSyncError):
    """No answer in time: it hangs, or its engine does."""


class ServerFailed(WeightSyncError):
    """Status 5xx: it refused, or its engine died; `ServerControl.dead` tells which."""


class ServerControl:
    """The part that `VLLMControl` and `SGLangControl` share."""

    endpoints: ClassVar[tuple[Endpoint, ...]]
    """Which may answer the probe, the best first."""
    resume_path: ClassVar[str]
    alive_path: ClassVar[str]
    """Answered by the process that answers HTTP; with 5xx where it knows that its engine died."""
    engine_path: ClassVar[str]
    """Answered by the engine, between two steps."""
    label_path: ClassVar[str]
    """Tells the label of the weights."""
    logprobs: ClassVar[str]
    """The setting that decides of which distribution its log-probabilities are."""
    needs: ClassVar[str]
    """Advice for a server that does not offer these routes."""

    def __init__(self, http: httpx.AsyncClient, url: str, *, timeout_s: float) -> None:
        """
        Args:
            http: from `agentrl.inference.http.make_client`, with the servers' token.
            timeout_s: deadline of each call. Pausing with `wait` takes as long as the sequences in
                flight do.
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
        """Replace the weights, and label the new ones `version`.

        Args:
            send: has the paused server load them; the server was prepared for it before.
            on_update: what happens to sequences in flight. The caches are emptied in all three
                cases, so that nothing computed with the old weights is used with the new ones.
            wakes: the server may be asleep, and is awake afterwards.

        Returns:
            Seconds from asking for the pause to the answer of resume.

        Raises:
            ServerUnreachable, WeightSyncError: with the server, the route and its answer; says so
                if the server could not be resumed.
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
        """Have the server give its GPU's memory back. It answers no request until it is woken.

        Args:
            keep_weights: in host memory, because no update brings all of them.

        Raises:
            ServerUnreachable, WeightSyncError: it may have its memory still.
        """
        raise NotImplementedError

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Have it take this memory again; one that was restarted has it."""
        raise NotImplementedError

    async def dead(self) -> bool:
        """Tells whether the server is gone, or says that its engine is."""
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                return (await self._http.get(self.url + self.alive_path)).status_code >= 500
        except (TimeoutError, httpx.RequestError):
            return True

    async def check_engine(self) -> None:
        """See whether the server's engine, and not only its HTTP side, answers between two steps.

        Raises:
            ServerUnreachable, ServerSilent: it does not.
        """
        with contextlib.suppress(RouteMissing):  # not in dev mode: `update` says so
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
        """See `call`."""
        return await self.call("POST", path, body, timeout_s=timeout_s)

    async def call(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: Mapping[str, JSON] | bytes | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Make a call; returns the body of an answer with status 200.

        Args:
            body: sent as JSON; bytes are JSON already.

        Raises:
            ServerUnreachable: no connection, or it broke.
            ServerSilent: no answer in time.
            RouteMissing: 403, 404 or 405.
            ServerFailed: 5xx.
            WeightSyncError: any other status.
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
        """Pause the server, with empty caches, and open an update."""
        raise NotImplementedError

    async def _close(self, version: int) -> None:
        """End the update and label the weights."""
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
                return  # it is down, not paused
            raise error from failure
        except WeightSyncError as error:
            refusal = error
        if await self.dead():
            raise ServerUnreachable(f"{self.url} died: {failure or refusal}") from failure
        before = f"{failure}; and afterwards " if isinstance(failure, WeightSyncError) else ""
        kind = ServerSilent if isinstance(refusal, ServerSilent) else WeightSyncError
        raise kind(
            f"{before}{self.url} is left PAUSED and answers no request: {refusal}. Restart it"
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
        """See `ServerControl._open`. An update that a killed trainer left open is closed first."""
        await self.post(f"/pause?mode={on_update}&clear_cache=true")
        try:
            await self.post("/start_weight_update")
        except WeightSyncError as error:
            if "already active" not in str(error):
                raise
            await self.post("/finish_weight_update")
            await self.post("/start_weight_update")

    async def _close(self, version: int) -> None:
        await self.post("/finish_weight_update", {"weight_version": str(version)})

    async def sleep(self, *, keep_weights: bool) -> None:
        await self.post(f"/sleep?level={1 if keep_weights else 2}&mode=abort")

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        try:
            await self.post(f"/wake_up?tags={part}")
        except ServerFailed as error:
            raise ServerFailed(
                f"{error}; the server could not take back the memory of its {part}: if the trainer "
                "left too little on the GPU, lower --gpu-memory-utilization in inference.args"
            ) from error


class SGLangControl(ServerControl):
    """A transfer's last call empties the caches and labels the weights."""

    endpoints = (SGLANG,)
    resume_path = "/continue_generation"
    # /health samples a token, which a paused server does not.
    alive_path = label_path = "/model_info"
    engine_path = "/server_info"
    logprobs = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    needs = "is it an SGLang server of 0.5.23 or newer?"
    _is_asleep = False

    async def _open(self, on_update: OnUpdate) -> None:
        """Pause the server. `wait` is refused by the configuration: an update without a pause lets
        requests end first, and then SGLang may refuse to empty its cache."""
        mode = "retract" if on_update == "keep" else "abort"
        await self.post("/pause_generation", {"mode": mode})

    async def _close(self, version: int) -> None:
        """Nothing to do: the transfer has ended the update and labelled the weights."""

    async def sleep(self, *, keep_weights: bool) -> None:
        """See `ServerControl.sleep`; the weights are never kept. A server that is asked while it
        has a request dies. Once its cache can be emptied it has none."""
        await self.post("/abort_request", {"abort_all": True})
        await retry(
            lambda _: self.post("/flush_cache"),
            timeout_s=self._timeout_s,
            retry_after_s=lambda error: 0.0 if type(error) is WeightSyncError else None,
            first_pause_s=0.02,
        )
        await self.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See `ServerControl._wake`. A server dies of taking memory that it has, or for which there
        is no room. One that was restarted is awake, and labels its weights with a word instead of a
        version until the update."""
        if part == "weights":
            label = json.loads(await self.call("GET", self.label_path))["weight_version"]
            self._is_asleep = str(label).isdecimal()
        if self._is_asleep:
            await self.post("/resume_memory_occupation", {"tags": [part]})


class RouteMissing(WeightSyncError):
    pass


async def _uninterrupted(coroutine) -> None:
    """Await to the end, and only then pass a cancellation on."""
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
