"""Samples in the trainer's own process, from the trainer's own weights, without a server.

Meant for small models and machines without a GPU, and for runs that must repeat bit for bit:

* No weight sync. The engine holds a second module tree around the same Parameter objects, so the
  next round sees an optimiser step at once. The two trees may use different implementations of
  attention.
* Lockstep rounds. A round starts when every reserved episode has a request pending, and samples all
  of them, so the contents of a batch never depend on how long an environment took. If episodes are
  agents, which may take minutes between two calls, `patience_s` lets a round start without them.
* A random stream per request, which depends only on the run's seed and the request id. The engine
  neither reads nor changes torch's global generator, which belongs to the trainer.
* Nothing is kept after a round: every prompt is prefilled again, so that keys and values of older
  weights are never used.

A round samples padded batches. transformers' continuous batching attends over the keys of all
requests behind a mask, draws from the global generator and collects garbage at the end of every
run; it needs 2.8 to 6.4 times the CPU time at 16 to 256 requests on one thread. `generate`, which
needs prompts of one length and returns no log-probabilities, needs 0.7 to 1.1 times the CPU time
(benchmarks/embedded_engine.py).

On a CPU the result is a function of the weights, the seed, the requests of the round and torch's
number of threads. On CUDA the order of floating-point sums is not fixed, so results may differ.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.inference.base import Generation, SamplingParams
from agentrl.inference.embedded_sampling import SampleRequest, sample, share_weights
from agentrl.model.towers import require_exact_images
from agentrl.types import ShownImage


@dataclass(slots=True, frozen=True)
class _Waiting:
    request: SampleRequest
    answer: asyncio.Future[Generation]


@dataclass(slots=True, frozen=True)
class _Round:
    waiting: list[_Waiting]
    stopped: threading.Event


class EmbeddedEngine:
    """An `InferenceEngine` on the trainer's weights; see the module's docstring.

    Call all methods from one event loop at a time; sampling itself runs in a thread. A round holds
    `weights_lock` from its first token to its last. A trainer that changes weights while episodes
    run must hold it while it changes them and sets the new `policy_version`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        seed: int,
        stop_token_ids: Sequence[int] = (),
        max_batch_tokens: int = 32768,
        patience_s: float | None = None,
    ) -> None:
        """
        Args:
            model: the policy being trained, any decoder of transformers.
            seed: the run's seed, from which, with the request ids, all random numbers are drawn.
            stop_token_ids: ids that end every turn (end of turn, end of sequence).
            max_batch_tokens: see `sample`.
            patience_s: seconds without a new request after which a round starts without the
                reserved episodes that it waits for. None always waits for all.
        """
        self.policy_version = 0
        self.takes_images = True
        self.weights_lock = threading.Lock()
        self._policy = model
        self._model = share_weights(model)
        self._seed = seed
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_batch_tokens = max_batch_tokens
        self._vocab_size = model.get_input_embeddings().get_parameter("weight").shape[0]
        config = model.config.get_text_config()
        self._context: int | None = getattr(config, "max_position_embeddings", None)
        self._reserved = 0
        self._patience_s = patience_s
        self._newest = 0.0
        """Time of the newest request, on the event loop's clock."""
        self._pending: dict[str, _Waiting] = {}
        self._round: _Round | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentrl-sampler")

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        images: Sequence[ShownImage] = (),
    ) -> Generation:
        """Samples one continuation of `prompt_ids` in the next round.

        Temperature 0 takes the likeliest token and reports its log-probability at temperature 1.

        Args:
            images: the prompt's images, in order.

        Raises:
            InferenceError: the request cannot be sampled, sampling failed, or the engine is closed.
            ConfigError: the prompt has images, and the model's family is not known to be exact on
                them.
        """
        self._check(request_id, prompt_ids, sampling)
        if images:
            require_exact_images(self._model)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # A round of an earlier loop has no one to answer; the thread still finishes it first.
            self._loop, self._round, self._pending = loop, None, {}
        waiting = _Waiting(
            SampleRequest(request_id, list(prompt_ids), sampling, images), loop.create_future()
        )
        self._pending[request_id] = waiting
        # Deferred, so that tasks that are ready now can add their requests to the same round.
        loop.call_soon(self._start_round)
        if self._patience_s is not None:
            self._newest = loop.time()
            loop.call_later(self._patience_s + 0.01, self._start_round)
        try:
            return await waiting.answer
        finally:
            if self._pending.get(request_id) is waiting:  # cancelled before its round
                del self._pending[request_id]
            elif self._round and all(w.answer.done() for w in self._round.waiting):
                self._round.stopped.set()  # cancelled, and no other request waits for this round

    def reserve(self, num_episodes: int) -> None:
        """Has rounds wait until this many more episodes have a request pending."""
        self._reserved += num_episodes

    def release(self, num_episodes: int = 1) -> None:
        """Has rounds wait for this many fewer episodes.

        Raises:
            ValueError: fewer episodes are reserved.
        """
        if num_episodes > self._reserved:
            raise ValueError(
                f"{num_episodes} episodes released but only {self._reserved} are reserved"
            )
        self._reserved -= num_episodes
        if self._pending and self._loop is not None:
            self._loop.call_soon(self._start_round)

    async def aclose(self) -> None:
        """Fails the pending requests, stops the running round and ends the thread."""
        self._closed = True
        for waiting in self._pending.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(InferenceError("the embedded engine was closed"))
        if self._round is not None:
            self._round.stopped.set()
        await asyncio.to_thread(self._thread.shutdown)

    def _check(self, request_id: str, prompt_ids: list[int], sampling: SamplingParams) -> None:
        """Refuses an invalid request, before it can make a round fail for others."""
        problem = None
        if self._closed:
            problem = "the embedded engine was closed"
        elif request_id in self._pending:
            problem = "a request with this id is already pending; ids must be unique"
        elif not prompt_ids:
            problem = "the prompt is empty"
        elif not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocab_size:
            problem = (
                f"the prompt has token ids from {min(prompt_ids)} to {max(prompt_ids)}, but the "
                f"model has {self._vocab_size} tokens; use the tokenizer of this model"
            )
        elif sampling.max_tokens < 1:
            problem = f"max_tokens is {sampling.max_tokens}, it must be at least 1"
        elif self._context and len(prompt_ids) + sampling.max_tokens > self._context:
            problem = (
                f"{len(prompt_ids)} prompt tokens and max_tokens {sampling.max_tokens} exceed the "
                f"model's context of {self._context}; shorten the prompt or lower max_tokens"
            )
        elif not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
            problem = f"temperature is {sampling.temperature}, it must be finite and at least 0"
        if problem:
            raise InferenceError(f"request {request_id}: {problem}")

    def _start_round(self) -> None:
        loop = asyncio.get_running_loop()
        if self._round is not None or not self._pending:
            return
        if len(self._pending) < self._reserved and (
            self._patience_s is None or loop.time() < self._newest + self._patience_s
        ):
            return
        # The order of arrival depends on timing; `sample` sorts requests by their contents.
        current = _Round(list(self._pending.values()), threading.Event())
        self._pending = {}
        self._round = current
        work = self._thread.submit(
            self._sample_round, [w.request for w in current.waiting], current.stopped
        )

        def tell(done: Future[list[Generation]]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._finish_round, current, done)

        work.add_done_callback(tell)

    def _sample_round(
        self, requests: list[SampleRequest], stopped: threading.Event
    ) -> list[Generation]:
        with self.weights_lock:
            pairs = zip(self._policy.parameters(), self._model.parameters(), strict=True)
            if not all(ours is theirs for ours, theirs in pairs):
                raise InferenceError(
                    "the trainer replaced Parameters of its model, so the embedded engine would "
                    "sample from the old ones; change weights in place or make a new engine"
                )
            version = self.policy_version
            turns = sample(
                self._model,
                requests,
                seed=self._seed,
                stop_token_ids=self._stop_token_ids,
                max_batch_tokens=self._max_batch_tokens,
                stopped=stopped,
            )
        return [
            Generation(
                turn.token_ids,
                turn.logprobs,
                [version] * len(turn.token_ids),
                turn.finish_reason,
                turn.kept_ids,
                turn.routes,
            )
            for turn in turns
        ]

    def _finish_round(self, finished: _Round, work: Future[list[Generation]]) -> None:
        if self._round is not finished:  # it belongs to an earlier event loop
            return
        self._round = None
        error = work.exception()
        for index, waiting in enumerate(finished.waiting):
            if waiting.answer.done():  # cancelled
                continue
            if error is not None:
                failure = InferenceError(
                    f"a sampling round of {len(finished.waiting)} requests failed: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                waiting.answer.set_exception(failure)
                continue
            generation = work.result()[index]
            if all(map(math.isfinite, generation.logprobs)):
                waiting.answer.set_result(generation)
            else:
                waiting.answer.set_exception(
                    InferenceError(
                        f"request {waiting.request.request_id}: a sampled token's log-probability "
                        "is not finite; the weights have probably diverged"
                    )
                )
        self._start_round()
