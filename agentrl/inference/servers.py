"""Which of several inference servers a request goes to, and what a fault of one of them means."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agentrl.errors import InferenceError
from agentrl.inference.token_api import Endpoint

MAX_FAILURES = 6
"""Failed answers (not refused connections) a call tolerates before it gives up."""
DOWN_S = 1.0
"""How long other servers are preferred to one that could not be reached or failed."""
MAX_REMEMBERED = 65536
"""Groups whose server is remembered, and trajectories whose newest version is."""

Value = TypeVar("Value")


@dataclass(slots=True)
class Server:
    url: str
    endpoint: Endpoint | None = None
    """None until probed."""
    raw_logprobs: bool = False
    takes_pixels: bool = False
    """It was seen to read images as they are sent."""
    in_flight: int = 0
    down_until: float = 0.0
    """`time.monotonic()` before which other servers are preferred."""
    labels_versions: bool = False
    """It once answered with an integer weight version."""
    in_doubt: bool = False
    """Its weights may not be the current ones: contact was lost, or an answer came from others."""
    wanted_version: int = 0
    """Newest version that was expected of it: the one of a server that is updated before the rest,
    and whose sequence is continued here, is newer than the policy's."""
    renewal: asyncio.Task[None] | None = None
    """Bringing the current weights to it."""
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Unavailable(Exception):
    """No byte of an answer, or 429/503: the same request may be sent again."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s
        """Pause that the server asks for."""


class Failed(Exception):
    """The server began to answer, or should have, and failed."""


class OldWeights(Exception):
    """The answer was sampled from weights older than expected."""


class TryAgain(Exception):
    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


@dataclass(slots=True)
class Faults:
    """The faults that one call has met with so far."""

    num_attempts: int = 0
    num_failed: int = 0
    """Answers that failed or came from older weights."""
    give_up_at: float | None = None
    """`time.monotonic()`; set when a server was first out of reach."""
    silent: set[str] = field(default_factory=set)
    """Addresses of servers that did not answer in time."""


class ServerPool:
    def __init__(
        self, urls: Sequence[str], *, request_timeout_s: float, retry_for_s: float
    ) -> None:
        """
        Args:
            urls: without a slash at their ends.
            request_timeout_s: deadline of one attempt.
            retry_for_s: how long one call keeps trying while servers are unreachable or full.
        """
        self.servers = [Server(url) for url in urls]
        self._request_timeout_s = request_timeout_s
        self._retry_for_s = retry_for_s
        self._server_of_group: OrderedDict[str, Server] = OrderedDict()

    def find(self, url: str) -> Server:
        return next(server for server in self.servers if server.url == url.rstrip("/"))

    def route(self, request_id: str, silent: set[str]) -> Server:
        """The group's server while it is up, else the least busy one that is.

        Args:
            silent: addresses of servers that are not tried again. At least one is none of them.
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
        self,
        server: Server,
        error: Exception,
        faults: Faults,
        *,
        request_id: str,
        can_resync: bool,
    ) -> TryAgain | InferenceError:
        """Note a fault of a server, and decide whether another attempt may help.

        Args:
            error: TimeoutError, NotJSON, or one of this module.
            faults: of the call; is updated.
            can_resync: a server with old weights can be given the current ones.
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


def remember(recent: OrderedDict[str, Value], key: str, value: Value) -> None:
    """Set an entry, as the newest of at most MAX_REMEMBERED."""
    recent[key] = value
    recent.move_to_end(key)
    if len(recent) > MAX_REMEMBERED:
        recent.popitem(last=False)
