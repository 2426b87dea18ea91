"""Chooses the inference server for each request, and decides what follows from a server's fault."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.errors import InferenceError
from agentrl.inference.token_api import Endpoint

MAX_FAILURES = 6
"""Failed answers (not refused connections) of one call at which it gives up."""
DOWN_S = 1.0
"""Seconds for which other servers are preferred to one that failed or could not be reached."""
MAX_REMEMBERED = 65536
"""Largest number of groups whose server, and of trajectories whose newest version, is
remembered."""

Value = TypeVar("Value")


@dataclass(slots=True)
class Server:
    url: str
    endpoint: Endpoint | None = None
    """The token endpoint; None until probed."""
    raw_logprobs: bool = False
    """Its log-probabilities are those of the raw logits, as the probe found."""
    context_tokens: int | None = None
    """Largest number of tokens of a prompt and its reply, as it reported to the probe."""
    takes_pixels: bool = False
    """A test request showed that it reads images' pixels as they are sent."""
    in_flight: int = 0
    """Number of requests that it is answering."""
    down_until: float = 0.0
    """`time.monotonic()` before which other servers are preferred."""
    labels_versions: bool = False
    """It has answered with an integer weight version before."""
    in_doubt: bool = False
    """Its weights may not be the current ones: contact was lost, or an answer failed or came from
    older weights."""
    wanted_version: int = 0
    """Newest version that was expected of it. Newer than the policy's if a sequence that another
    server began, after its own update, is continued here."""
    renewal: asyncio.Task[None] | None = None
    """Task that sends it the current weights."""
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server is probed, so that it is probed once."""


class Unavailable(Exception):
    """No byte of an answer came, or status 429 or 503: the request may be sent again."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s
        """Seconds to wait, if the server asks for a pause."""


class Failed(Exception):
    """The server failed while answering: status 500 or above except 503, or a cut answer."""


class OldWeights(Exception):
    """The answer was sampled from weights older than expected."""


class TryAgain(Exception):
    """Another attempt may succeed, after `after_s` seconds."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


@dataclass(slots=True)
class Faults:
    """The faults of one call so far."""

    num_attempts: int = 0
    num_failed: int = 0
    """Number of answers that failed or came from older weights."""
    give_up_at: float | None = None
    """`time.monotonic()` at which the call gives up; set when a server is first unavailable."""
    silent: set[str] = field(default_factory=set)
    """Addresses of servers that did not answer in time."""


class ServerPool:
    """Routes requests to servers and handles their faults."""

    def __init__(
        self, urls: Sequence[str], *, request_timeout_s: float, retry_for_s: float
    ) -> None:
        """
        Args:
            urls: base addresses, without a trailing slash.
            request_timeout_s: deadline of one attempt.
            retry_for_s: time for which a call keeps trying while servers are unreachable or full.
        """
        self.servers = [Server(url) for url in urls]
        self._request_timeout_s = request_timeout_s
        self._retry_for_s = retry_for_s
        self._server_of_group: OrderedDict[str, Server] = OrderedDict()

    def find(self, url: str) -> Server:
        """Returns the server with this address, which must be one of the pool's."""
        return next(server for server in self.servers if server.url == url.rstrip("/"))

    def route(self, request_id: str, silent: set[str]) -> Server:
        """Returns the group's server if it is up, else the one that is up and least busy.

        Args:
            silent: addresses of servers that are not tried again; must leave at least one.
        """
        group = request_id.rpartition("-m")[0] or request_id
        now = time.monotonic()
        server = self._server_of_group.get(group)
        if server is None or server.url in silent or server.down_until > now:
            choices = [s for s in self.servers if s.url not in silent]
            server = min(choices, key=lambda s: (s.down_until > now, s.in_flight))
        remember(self._server_of_group, group, server)
        return server

    def after_fault(
        self, server: Server, error: Exception, faults: Faults, *, request_id: str, can_resync: bool
    ) -> TryAgain | InferenceError:
        """Notes a server's fault and decides whether the call is tried again.

        Args:
            error: a TimeoutError, a NotJSON, or an exception of this module.
            faults: the call's, updated here.
            can_resync: true if a server with old weights can be sent the current ones.

        Returns:
            The exception to raise: TryAgain, or the InferenceError that ends the call.
        """
        now = time.monotonic()
        if isinstance(error, TimeoutError):
            faults.silent.add(server.url)
            server.down_until = now + self._request_timeout_s
            if len(faults.silent) < len(self.servers):
                return TryAgain(0.0)
            return InferenceError(
                f"{server.url}: no answer within {self._request_timeout_s:g} s to {request_id}; "
                "raise rollout.turn_timeout_s or lower rollout.max_turn_tokens"
            )
        if isinstance(error, Unavailable):
            if faults.give_up_at is None:
                faults.give_up_at = now + self._retry_for_s
            server.down_until = now + (DOWN_S if error.after_s is None else error.after_s)
            another = any(each.down_until <= now for each in self.servers)
            wait_s = 0.0 if another else error.after_s or 0.0
            if now + wait_s < faults.give_up_at:
                return TryAgain(wait_s)
            return InferenceError(
                f"{server.url}: {error}; gave up after {self._retry_for_s:g} s "
                "(inference.retry_for_s)"
            )
        faults.num_failed += 1
        server.in_doubt = True
        old_weights = isinstance(error, OldWeights)
        if faults.num_failed < MAX_FAILURES and not (old_weights and not can_resync):
            if not old_weights:
                server.down_until = now + DOWN_S
            return TryAgain(0.0)
        attempts = f"; {faults.num_failed} attempts failed" if faults.num_failed > 1 else ""
        return InferenceError(f"{server.url}: {error}{attempts}")


def retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieves an exception, so that asyncio does not log it as lost if nobody awaits the task."""
    if not task.cancelled():
        task.exception()


def remember(recent: OrderedDict[str, Value], key: str, value: Value) -> None:
    """Sets an entry as the newest, and drops the oldest one beyond MAX_REMEMBERED."""
    recent[key] = value
    recent.move_to_end(key)
    if len(recent) > MAX_REMEMBERED:
        recent.popitem(last=False)
