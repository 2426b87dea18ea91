"""The control routes of one vLLM server, in the only order that is safe.

    init -> pause -> start -> update -> finish(version) -> resume

Pausing without an update in between costs nothing, an update without a pause kills the worker, and
a server that stays paused answers nobody. So resume is sent whatever happens after the pause was:
an error, a deadline, the cancellation of the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import Literal

import aiohttp

from agentrl.errors import WeightSyncError
from agentrl.sync.transfer import Transfer
from agentrl.types import JSON

OnUpdate = Literal["keep", "wait", "abort"]

KNOCK_S = 20.0
"""How long an engine may be busy with one step."""
RESUME_ATTEMPTS = 3
RESUME_TIMEOUT_S = 10.0
"""Of one attempt. The route only sets a flag; a server that needs longer hangs."""


class ServerUnreachable(WeightSyncError):
    """No connection, or it broke, or its engine is dead: the server may be starting again."""


class ServerSilent(WeightSyncError):
    """No answer in time: it hangs, or its engine does."""


class ServerFailed(WeightSyncError):
    """Status 5xx: it refused, or its engine died; `ServerControl.dead` tells which."""


class ServerControl:
    def __init__(self, http: aiohttp.ClientSession, url: str, *, timeout_s: float) -> None:
        """
        Args:
            http: sends the servers' token, if they have one, in its headers.
            timeout_s: deadline of each call. Pausing with `wait` takes as long as the sequences in
                flight do.
        """
        self._http = http
        self._timeout_s = timeout_s
        self.url = url

    async def update(self, transfer: Transfer, *, version: int, on_update: OnUpdate) -> float:
        """Replace the weights by those that `transfer` took, and label them `version`.

        `on_update` says what happens to sequences in flight; the caches are emptied in all three
        cases, so that nothing computed with the old weights is used with the new ones.

        Returns:
            Seconds from asking for the pause to the answer of resume.

        Raises:
            ServerUnreachable, WeightSyncError: with the server, the route and its answer; says so
                if the server could not be resumed.
        """
        await transfer.connect(self)
        paused_at = time.monotonic()
        failure: BaseException | None = None
        try:
            await self.post(f"/pause?mode={on_update}&clear_cache=true")
            await self._start()
            await transfer.send(self)
            await self.post("/finish_weight_update", {"weight_version": str(version)})
        except BaseException as error:
            failure = error
            raise
        finally:
            await _uninterrupted(self._resume(failure))
        return time.monotonic() - paused_at

    async def dead(self) -> bool:
        """Whether the server is gone, or says that its engine is."""
        try:
            async with (
                asyncio.timeout(RESUME_TIMEOUT_S),
                self._http.get(f"{self.url}/health") as response,
            ):
                return response.status >= 500
        except (TimeoutError, aiohttp.ClientError):
            return True

    async def knock(self) -> None:
        """See whether the server's engine answers at all, between two of its steps.

        Raises:
            ServerUnreachable, ServerSilent: it does not.
        """
        with contextlib.suppress(RouteMissing):  # not in dev mode: `update` says so
            await self.call("GET", "/weight_info", timeout_s=min(KNOCK_S, self._timeout_s))

    async def post(
        self, path: str, body: Mapping[str, JSON] | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        """See `call`."""
        return await self.call("POST", path, body, timeout_s=timeout_s)

    async def call(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: Mapping[str, JSON] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """The body of an answer with status 200.

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
            async with (
                asyncio.timeout(deadline_s),
                self._http.request(method, self.url + path, json=body) as response,
            ):
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ServerSilent(
                f"{self.url}{route} did not answer within {deadline_s:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise ServerUnreachable(
                f"{self.url}{route}: no answer ({type(error).__name__}: {error})"
            ) from error
        if status in (403, 404, 405):
            raise RouteMissing(
                f"{self.url}{route} is not offered (status {status}); start the server with "
                "VLLM_SERVER_DEV_MODE=1 and a weight-transfer backend (`agentrl doctor` says which)"
            )
        if status != 200:
            kind = ServerFailed if status >= 500 else WeightSyncError
            raise kind(f"{self.url}{route} answered {status}: {_reason(content)}")
        return content

    async def _start(self) -> None:
        """Open an update; one that a killed trainer left open is closed first."""
        try:
            await self.post("/start_weight_update")
        except WeightSyncError as error:
            if "already active" not in str(error):
                raise
            await self.post("/finish_weight_update")
            await self.post("/start_weight_update")

    async def _resume(self, failure: BaseException | None) -> None:
        refusal: WeightSyncError | None = None
        for attempt in range(RESUME_ATTEMPTS):
            await asyncio.sleep(0.2 * attempt)
            try:
                await self.post("/resume", timeout_s=RESUME_TIMEOUT_S)
                return
            except WeightSyncError as error:
                refusal = error
            if isinstance(refusal, ServerUnreachable) and isinstance(
                failure, ServerUnreachable | asyncio.CancelledError
            ):
                return  # it is down, not paused
        if isinstance(refusal, ServerUnreachable):
            raise refusal from failure
        if await self.dead():
            raise ServerUnreachable(f"{self.url} died: {failure or refusal}") from failure
        before = f"{failure}; and afterwards " if isinstance(failure, WeightSyncError) else ""
        kind = ServerSilent if isinstance(refusal, ServerSilent) else WeightSyncError
        raise kind(
            f"{before}{self.url} is left PAUSED and answers no request: {refusal}. Restart it"
        ) from failure


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


def _reason(content: bytes) -> str:
    text = content.decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = text
    if isinstance(answer, dict):
        answer = answer.get("error", answer.get("detail", answer))
        if isinstance(answer, dict):
            answer = answer.get("message", answer)
    reason = " ".join(str(answer).split())
    # vLLM wraps what its worker said, and lists every parameter it knows behind some messages.
    inner = re.search(r"Worker failed with error '(.*)', please check", reason)
    return (inner[1] if inner else reason)[:400] or "no reason given"
