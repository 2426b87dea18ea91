"""Rewards from a reward model behind an HTTP server.

The protocol: POST `{"prompt": ..., "response": ..., "label": ...}`; the server answers with a
number or `{"reward": number}`. With `batch_size` above 1, concurrent calls are sent together: the
body is a list of such objects, and the answer a list of as many numbers or `{"rewards": [...]}`.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from dataclasses import dataclass, field

import aiohttp
import orjson

from agentrl.errors import GraderError
from agentrl.runtime import retry
from agentrl.types import JSON

MAX_REPLY_BYTES = 8 << 20
BATCH_WAIT_S = 0.01
"""Seconds that the first call of a batch waits for more."""
FIRST_PAUSE_S = 0.25
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Passing(Exception):
    """A temporary failure, after which the request is retried."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s
        """Seconds to wait that the server asked for."""


def to_json(body: JSON, url: str) -> bytes:
    """Encodes a request body as JSON.

    Raises:
        GraderError: the body contains a lone surrogate or an integer of more than 64 bits.
    """
    try:
        return orjson.dumps(body)
    except TypeError as error:  # orjson's own is one
        raise GraderError(f"POST {url}: the answer can't be sent as JSON: {error}") from error


async def post_json(
    url: str,
    body: JSON | bytes,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float = 30.0,
    num_attempts: int = 4,
) -> JSON:
    """POSTs `body` and returns the JSON answer, with retries at growing, jittered intervals.

    Retries after lost connections, timeouts and the statuses 408, 425, 429, 500, 502, 503 and 504,
    and respects a `Retry-After` in seconds.

    Args:
        body: a value to encode as JSON, or bytes to send unchanged.
        timeout_s: seconds per attempt, including reading the answer.

    Raises:
        GraderError: no attempt got an answer; the answer is an error, too long or not JSON; or the
            body cannot be encoded as JSON.
    """
    data = body if isinstance(body, bytes) else to_json(body, url)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        try:
            return await retry(
                lambda _: _post_once(session, url, data, timeout_s),
                retry_after_s=lambda error: error.after_s if isinstance(error, _Passing) else None,
                first_pause_s=FIRST_PAUSE_S,
                max_attempts=num_attempts,
            )
        except _Passing as error:
            raise GraderError(
                f"POST {url} failed ({error}); is the server up and the URL right?"
            ) from error


async def _post_once(
    session: aiohttp.ClientSession, url: str, body: bytes, timeout_s: float
) -> JSON:
    """Makes one attempt of `post_json`.

    Raises:
        _Passing: another attempt may succeed.
        GraderError: another attempt would fail the same way.
    """
    try:
        async with session.post(
            url,
            data=body,
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
        ) as response:
            data = await _read_limited(response, url)
    except TimeoutError as error:
        raise _Passing(f"no answer within {timeout_s:g} s") from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        raise _Passing(f"{type(error).__name__}: {error}") from error
    except aiohttp.ClientError as error:  # a wrong URL, an answer that is not HTTP
        raise GraderError(f"POST {url}: {type(error).__name__}: {error}") from error
    if 200 <= response.status < 300:
        return _parse(data, url)
    problem = f"HTTP {response.status}: {data[:200].decode('utf-8', 'replace')}"
    if response.status not in _RETRIED_STATUS:
        raise GraderError(f"POST {url} failed ({problem}); is the server up and the URL right?")
    after = response.headers.get("Retry-After", "")
    seconds = float(after) if after.isascii() and after.isdigit() else 0.0
    raise _Passing(problem, min(seconds, timeout_s))


async def _read_limited(response: aiohttp.ClientResponse, url: str) -> bytes:
    data = b""
    async for chunk in response.content.iter_chunked(65536):
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            raise GraderError(f"POST {url}: the answer is longer than {MAX_REPLY_BYTES} bytes")
    return data


def _parse(data: bytes, url: str) -> JSON:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise GraderError(f"POST {url}: the answer is not JSON: {data[:80]!r}") from error


@dataclass(slots=True)
class _Batch:
    """The calls of one event loop that are waiting to be sent to one server."""

    waiting: list[tuple[bytes, asyncio.Future[float]]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    sending: set[asyncio.Task[None]] = field(default_factory=set)


_batches: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str, int, float, int], _Batch]
] = weakref.WeakKeyDictionary()


async def remote_rm(
    text: str,
    reference: JSON = None,
    *,
    url: str,
    prompt: JSON = "",
    batch_size: int = 1,
    timeout_s: float = 30.0,
    num_attempts: int = 4,
) -> float:
    """Returns the reward that a remote model gives to `text` as the answer to `prompt`.

    Args:
        url: the URL to POST to; see the module's docstring for the protocol.
        prompt: a string or a list of messages, sent unchanged.
        batch_size: maximum number of calls per request; 1 sends one object instead of a list.
        timeout_s: seconds per attempt.

    Raises:
        GraderError: the server failed, or its answer is not a finite number.
    """
    item: JSON = {"prompt": prompt, "response": text, "label": reference}
    if batch_size <= 1:
        reply = await post_json(url, item, timeout_s=timeout_s, num_attempts=num_attempts)
        return _reward(reply["reward"] if isinstance(reply, dict) and "reward" in reply else reply)
    encoded = to_json(item, url)  # encoded here, so that a bad item does not fail the whole batch
    loop = asyncio.get_running_loop()
    settings = (url, batch_size, timeout_s, num_attempts)
    batch = _batches.setdefault(loop, {}).setdefault(settings, _Batch())
    future: asyncio.Future[float] = loop.create_future()
    batch.waiting.append((encoded, future))
    if len(batch.waiting) >= batch_size:
        _send_waiting(batch, settings)
    elif batch.timer is None:
        batch.timer = loop.call_later(BATCH_WAIT_S, _send_waiting, batch, settings)
    return await future


def _send_waiting(batch: _Batch, settings: tuple[str, int, float, int]) -> None:
    if batch.timer is not None:
        batch.timer.cancel()
        batch.timer = None
    calls = [(item, future) for item, future in batch.waiting if not future.done()]
    batch.waiting.clear()
    if calls:
        task = asyncio.ensure_future(_send(calls, settings))
        batch.sending.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(batch.sending.discard)


async def _send(
    calls: list[tuple[bytes, asyncio.Future[float]]], settings: tuple[str, int, float, int]
) -> None:
    url, _, timeout_s, num_attempts = settings
    try:
        body = b"[%s]" % b",".join(item for item, _ in calls)
        reply = await post_json(url, body, timeout_s=timeout_s, num_attempts=num_attempts)
        values = reply.get("rewards") if isinstance(reply, dict) else reply
        if not isinstance(values, list) or len(values) != len(calls):
            raise GraderError(
                f"POST {url}: {len(calls)} items were sent, but the answer is not a list of as "
                "many rewards; set batch_size to 1 if the server takes one item at a time"
            )
    except GraderError as error:
        for _, future in calls:
            if not future.done():
                future.set_exception(GraderError(str(error)))
        return
    for (_, future), value in zip(calls, values, strict=True):
        if future.done():
            continue
        try:
            future.set_result(_reward(value))
        except GraderError as error:
            future.set_exception(error)


def _reward(value: JSON) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GraderError(f"the reward server answered {value!r} instead of a finite number")
    return float(value)
