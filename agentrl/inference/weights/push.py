"""Updates the weights of running vLLM and SGLang servers.

    trainer                        every server, in parallel
    copy the weights               pause -> load them -> label "7" -> resume
    log-probs of the probe         the same probe; a difference ends the run

The transfer sends the copy to the servers: through a file (`sync.transfer`, `sync.sglang`), in
requests (`sync.sglang`), or from GPU to GPU (`sync.broadcast`). If only an adapter is trained, the
copy is the adapter: at the end of an update, the server drops the old one and reads its folder
again.

A server that is unreachable or hung does not delay the others for long: `on_missed` is called, and
the router calls `push_to` before it sends that server another request.

vLLM has to be started with the transfer's backend: `vllm_plugin` beside this module for files,
otherwise one of vLLM's own. SGLang needs no setup. It answers 200 to an update, and adopts its
label, even if none of the names is a parameter of its model, so only the probe shows which weights
are loaded.
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
from agentrl.inference.weights.control import (
    OnUpdate,
    ServerControl,
    ServerFailed,
    ServerSilent,
    ServerUnreachable,
    VLLMControl,
)
from agentrl.inference.weights.probe import ProbeLogprobs, probe, trainer_logprobs
from agentrl.inference.weights.transfer import Transfer, in_thread
from agentrl.runtime import retry

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 0.5
"""Longest pause in seconds between attempts while a server is unreachable."""

_MISSED = (ServerUnreachable, ServerSilent)


class ServerWeightSync:
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
            urls: the servers' base URLs, `http://host:port`.
            model_name: the servers' name for the model.
            token: the servers' `--api-key`.
            transfer: used by this run only; closed by `aclose`.
            control: the class for these servers, vLLM's or SGLang's.
            on_update: running sequences continue with the new weights (`keep`), finish with the
                old ones (`wait`), or end immediately with finish reason `abort`.
            probe_ids: a prompt of at least two tokens, long enough to resemble a rollout.
            temperature: sampling temperature of the run's rollouts.
            tolerance: largest difference allowed in the probe: nats for log-probabilities above -1,
                relative below (see `probe`). For example 1e-3 for float32 servers, 0.1 for
                bfloat16, and 0.15 for the mean with 8-bit weights.
            quantization: `fp8` if the servers round the weights they receive.
            timeout_s: timeout of every call to a server, and of waiting for an unreachable one.
            on_missed: called with the URL of a server that a push did not reach although it reached
                another. That server has outdated weights and must not get requests until `push_to`
                has updated it. None: every push waits for all servers.
        """
        if len(probe_ids) < 2:
            raise ValueError(f"the probe needs at least two tokens; probe_ids has {len(probe_ids)}")
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
        """Updates all reachable servers to the current weights of `model`, labelled `version`.

        The model must not change before this returns; afterwards the servers have their own copy.
        If it is cancelled, no server stays paused. Waits up to `timeout_s` for unreachable servers,
        but with `on_missed` only until one server has the weights.

        Returns:
            Metrics: `sync/seconds`, the total time; `sync/write_s`, the time to copy the weights;
            `sync/paused_s`, the longest pause of a server; `sync/probe_logprob_diff_max`, the
            largest absolute difference between a server's log-probabilities and the model's on a
            fixed prompt; and `sync/servers_missed`, the number of servers that were not reached.

        Raises:
            WeightSyncError: a server refused the update, failed, or its log-probabilities differ
                from the model's.
        """
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
            # Wait for all servers before raising an error, so that none is left half updated.
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
        """Sends the weights of the last push to one server that was restarted.

        Waits for a push in progress, but not for an unreachable server, because the next push would
        have to wait, too.

        Raises:
            WeightSyncError: see `push`; or nothing was pushed yet.
        """
        async with self._one_at_a_time:
            if self._pushed is None:
                raise WeightSyncError(f"{url} cannot be updated: nothing was pushed yet")
            await self._update(url.rstrip("/"), self._pushed, check_first=True)

    async def sleep(self, *, keep_weights: bool) -> dict[str, WeightSyncError]:
        """Makes all servers release their GPU memory until the next push.

        Returns:
            Server URL -> error, for servers that failed and may still hold their memory.
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
        """Deletes the copy of the weights that was kept for `push_to`."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None
        self._pushed = None
        await self._transfer.aclose()

    async def _update_when_reachable(
        self, url: str, pushed: ProbeLogprobs, reached: asyncio.Event
    ) -> tuple[float, float]:
        """Repeats `_update` while the server is unreachable and has to be waited for.

        Args:
            reached: set by the first server that has the weights.
        """

        async def attempt(_: float) -> tuple[float, float]:
            # A server that hung in the last push would otherwise delay this one by as long.
            done = await self._update(url, pushed, check_first=url in self._missed)
            reached.set()
            return done

        def worth_another(error: Exception) -> float | None:
            # It may be restarting, and then needs the whole update again.
            waits = self._on_missed is None or not reached.is_set()
            return 0.0 if isinstance(error, ServerUnreachable) and waits else None

        return await retry(
            attempt, timeout_s=self._timeout_s, retry_after_s=worth_another, max_pause_s=MAX_PAUSE_S
        )

    def _tell_missed(self, missed: set[str], version: int) -> None:
        for url in sorted(missed - self._missed):
            logger.warning(
                "%s is unreachable or hung and was not updated to version %d", url, version
            )
        for url in sorted(self._missed - missed):
            logger.warning("%s is reachable again and has version %d", url, version)
        self._missed = missed
        if self._on_missed is not None:
            for url in missed:
                self._on_missed(url)

    async def _update(
        self, url: str, pushed: ProbeLogprobs, *, check_first: bool
    ) -> tuple[float, float]:
        """Updates one server; returns the seconds it was paused and the probe's largest difference.

        Args:
            check_first: check first, with a short timeout, that its engine answers.
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
            raise ServerUnreachable(f"{url} was restarted during the update")
        if result.label is not None and result.label != str(pushed.version):
            raise WeightSyncError(
                f"{url} labels its tokens version {result.label} after the update to version "
                f"{pushed.version}; is another trainer updating it?"
            )
        if not result.error <= self._tolerance:
            raise WeightSyncError(
                f"{url} does not compute what the trainer does: after the update to version "
                f"{pushed.version} (the server says {result.label}), log-probabilities of the "
                f"probe differ by up to {result.prompt_diff:.4g} over its {len(pushed.prompt)} "
                f"prompt tokens and by {result.sampled_diff:.4g} at the token sampled at "
                f"temperature {pushed.temperature:g}; relative to their size, the difference is "
                f"{result.error:.4g}{' on average, rounded to 8 bits' * pushed.is_rounded}, but "
                f"at most {self._tolerance:g} is allowed (inference.sync_tolerance). Some of the "
                "old weights may still be in use, or the server uses another model, dtype or kind "
                f"of log-probabilities ({self._control.logprobs})"
            )
        return paused_s, max(result.prompt_diff, result.sampled_diff)

    def _session(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = make_client(token=self._token)
        return self._http
