"""Live weight updates of running servers, vLLM's and SGLang's.

    trainer                        every server, in parallel
    a copy of the weights          pause -> load them -> label "7" -> resume
    log-probs of the probe         the same probe; a difference ends the run

How the copy gets to the servers is the transfer's business: through a file (`sync.transfer`,
`sync.sglang`), in requests (`sync.sglang`), or from GPU to GPU (`sync.broadcast`). Of a model that
only trains an adapter, the copy is the adapter: the server drops the old one when it finishes an
update, and reads its folder again.

A server that is out of reach, or hangs, does not hold up the others for long: `on_missed` is told,
and whoever routes requests asks for `push_to` before that server's next one.

vLLM needs the transfer's backend: that of `agentrl.sync.vllm_plugin` for files, or its own. SGLang
needs nothing. It answers 200 to an update that names no parameter of its model, and takes the
label of it: what was loaded is known by the probe alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import httpx
from transformers import PreTrainedModel

from agentrl.errors import WeightSyncError
from agentrl.inference.http import make_client, require_address
from agentrl.retry import retry
from agentrl.sync.base import WeightSync
from agentrl.sync.control import (
    OnUpdate,
    ServerControl,
    ServerFailed,
    ServerSilent,
    ServerUnreachable,
    VLLMControl,
)
from agentrl.sync.probe import ProbeLogprobs, probe, trainer_logprobs
from agentrl.sync.transfer import Transfer, in_thread

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 0.5
"""Between attempts while a server is unreachable."""

_MISSED = (ServerUnreachable, ServerSilent)


class ServerWeightSync(WeightSync):
    def __init__(
        self,
        urls: Sequence[str],
        *,
        model_name: str = "policy",
        token: str | None = None,
        transfer: Transfer,
        control: type[ServerControl] = VLLMControl,
        on_update: OnUpdate = "keep",
        probe_ids: list[int],
        temperature: float,
        tolerance: float,
        quantization: str | None = None,
        timeout_s: float = 300.0,
        on_missed: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            urls: base addresses, `http://host:port`.
            model_name: served model name.
            token: the servers' `--api-key`.
            transfer: of this run alone; closed with this.
            control: of the software that these servers are.
            on_update: sequences in flight go on under the new weights (`keep`), end under the old
                ones (`wait`), or end now with finish reason `abort`.
            probe_ids: a prompt of at least two tokens, long enough to look like a rollout.
            temperature: of the run's rollouts.
            tolerance: nats for log-probabilities above -1, relative below (see `probe`). 1e-3 for
                float32 servers, 0.1 for bfloat16; of the mean, 0.15, for servers in 8 bits.
            quantization: `fp8` where servers round the weights that they are sent.
            timeout_s: of every call to a server, and of waiting for one that is unreachable.
            on_missed: called with the address of a server that a push did not reach while it
                reached another. It has older weights, or the ones on its disk, and is to get no
                request before `push_to` gave it the current ones. None: every push waits for all.
        """
        if len(probe_ids) < 2:
            raise ValueError("the probe needs a prompt of at least two tokens")
        self._urls = [require_address(url, "inference.urls") for url in urls]
        self._model_name = model_name
        self._token = token
        self._transfer = transfer
        self._control = control
        self._on_update: OnUpdate = on_update
        self.probe_ids = probe_ids
        self.temperature = temperature
        self._tolerance = tolerance
        self._quantization = quantization
        self._timeout_s = timeout_s
        self._on_missed = on_missed
        self._missed: set[str] = set()
        self._asleep: set[str] = set()
        self._pushed: ProbeLogprobs | None = None
        self._one_at_a_time = asyncio.Lock()
        self._http: httpx.AsyncClient | None = None

    async def push(self, model: PreTrainedModel, version: int) -> dict[str, float]:
        """See `WeightSync.push`. Unreachable servers are waited for, `timeout_s` long; with
        `on_missed` only until one server has the weights."""
        started = time.monotonic()
        async with self._one_at_a_time:
            await self._transfer.take(model, version)
            taken = time.monotonic()
            self._pushed = await in_thread(
                lambda: trainer_logprobs(
                    model,
                    self.probe_ids,
                    version=version,
                    temperature=self.temperature,
                    quantization=self._quantization,
                )
            )
            reached = asyncio.Event()
            # All of them end before the first error rises: none is left between two versions.
            results = await asyncio.gather(
                *(self._update_when_reachable(url, self._pushed, reached) for url in self._urls),
                return_exceptions=True,
            )
            failed = [result for result in results if isinstance(result, BaseException)]
            missed = set()
            if self._on_missed is not None and reached.is_set():
                failed = [error for error in failed if not isinstance(error, _MISSED)]
                missed = {
                    url
                    for url, result in zip(self._urls, results, strict=True)
                    if isinstance(result, _MISSED)
                }
            if len(failed) > 1 and all(isinstance(error, WeightSyncError) for error in failed):
                raise WeightSyncError("; ".join(str(error) for error in failed)) from failed[0]
            if failed:
                raise failed[0]
            self._tell_missed(missed, version)
            self._transfer.delivered(version)
            done = [result for result in results if not isinstance(result, BaseException)]
        return {
            "sync/seconds": time.monotonic() - started,
            "sync/write_s": taken - started,
            "sync/paused_s": max(paused_s for paused_s, _ in done),
            "sync/probe_logprob_diff_max": max(diff for _, diff in done),
            "sync/servers_missed": len(missed),
        }

    async def push_to(self, url: str) -> None:
        """See `WeightSync.push_to`. Waits for a push in progress, but not for the server: the next
        push would wait too."""
        async with self._one_at_a_time:
            if self._pushed is None:
                raise WeightSyncError(f"{url} cannot be given weights: none were pushed yet")
            await self._update(url.rstrip("/"), self._pushed, check_first=True)

    async def sleep(self, *, keep_weights: bool) -> dict[str, WeightSyncError]:
        """Have all servers give their GPU's memory back until the next push.

        Returns:
            By address, why one may have its memory still.
        """
        failed: dict[str, WeightSyncError] = {}

        async def each(url: str) -> None:
            control = self._control(self._session(), url, timeout_s=self._timeout_s)
            self._asleep.add(url)
            try:
                await control.sleep(keep_weights=keep_weights)
            except WeightSyncError as error:
                failed[url] = error

        async with self._one_at_a_time:
            await asyncio.gather(*map(each, self._urls))
        return failed

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None
        self._pushed = None
        await self._transfer.aclose()

    async def _update_when_reachable(
        self, url: str, pushed: ProbeLogprobs, reached: asyncio.Event
    ) -> tuple[float, float]:
        """Repeat `_update` while the server is out of reach and worth waiting for.

        Args:
            reached: set by the first server that has the weights.
        """

        async def attempt(_: float) -> tuple[float, float]:
            # One that hung would hold up every push as long as it did the last.
            done = await self._update(url, pushed, check_first=url in self._missed)
            reached.set()
            return done

        def worth_another(error: Exception) -> float | None:
            # It may be starting again, and then everything has to be sent again.
            waits = self._on_missed is None or not reached.is_set()
            return 0.0 if isinstance(error, ServerUnreachable) and waits else None

        return await retry(
            attempt,
            timeout_s=self._timeout_s,
            retry_after_s=worth_another,
            max_pause_s=MAX_PAUSE_S,
        )

    def _tell_missed(self, missed: set[str], version: int) -> None:
        for url in sorted(missed - self._missed):
            logger.warning("%s is out of reach or hangs, and was not sent version %d", url, version)
        for url in sorted(self._missed - missed):
            logger.warning("%s is there again and has version %d", url, version)
        self._missed = missed
        if self._on_missed is not None:
            for url in missed:
                self._on_missed(url)

    async def _update(
        self, url: str, pushed: ProbeLogprobs, *, check_first: bool
    ) -> tuple[float, float]:
        """Update one server; returns seconds paused, and the largest difference of the probe.

        Args:
            check_first: find out in a short time whether it hangs.

        Raises:
            ServerUnreachable: now; also if it died in the middle.
            ServerSilent: it hangs.
            WeightSyncError: waiting would not help.
        """
        control = self._control(self._session(), url, timeout_s=self._timeout_s)
        try:
            if check_first:
                await control.check_engine()
            await self._transfer.connect(control)
            paused_s = await control.update(
                lambda: self._transfer.send(control),
                version=pushed.version,
                on_update=self._on_update,
                wakes=url in self._asleep,
            )
            self._asleep.discard(url)
            result = await probe(control, self._model_name, pushed)
        except ServerFailed as error:
            if await control.dead():
                raise ServerUnreachable(str(error)) from error
            raise
        if result.label is not None and not result.label.isdecimal():
            raise ServerUnreachable(f"{url} was restarted while it was updated")
        if result.label is not None and result.label != str(pushed.version):
            raise WeightSyncError(
                f"{url} labels its tokens version {result.label} after it was sent version "
                f"{pushed.version}; does another trainer update it?"
            )
        if not result.error <= self._tolerance:
            raise WeightSyncError(
                f"{url} does not compute what the trainer does: after version {pushed.version} was "
                f"sent (the server says {result.label}), log-probabilities of the probe differ by "
                f"up to {result.prompt_diff:.4g} over its {len(pushed.prompt)} prompt tokens and "
                f"by {result.sampled_diff:.4g} at the token sampled at temperature "
                f"{pushed.temperature:g}, {result.error:.4g} in relation to their size"
                f"{' on average, rounded to 8 bits' * pushed.is_rounded}, allowed is "
                f"{self._tolerance:g}. Part of the old weights may still be in use, or the server "
                "runs another model, dtype or kind of "
                f"log-probabilities ({self._control.logprobs})"
            )
        return paused_s, max(result.prompt_diff, result.sampled_diff)

    def _session(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = make_client(token=self._token)
        return self._http
