"""Rewards from a reward model behind an HTTP server.

The protocol: POST `{"prompt": ..., "response": ..., "label": ...}`; the server answers with a
number or `{"reward": number}`.
"""

from __future__ import annotations

import math

import aiohttp
import orjson

from agentrl.errors import GraderError
from agentrl.runtime import retry
from agentrl.types import JSON

MAX_REPLY_BYTES = 8 << 20
FIRST_PAUSE_S = 0.25
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Passing(Exception):
    """A temporary failure, after which the request is retried."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s
        """Seconds to wait that the server asked for."""


async def post_json(
    url: str,
    body: JSON,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float = 30.0,
    num_attempts: int = 4,
) -> JSON:
    """POSTs `body` and returns the JSON answer, with retries at growing, jittered intervals.

    Retries after lost connections, timeouts and the statuses 408, 425, 429, 500, 502, 503 and 504,
    and respects a `Retry-After` in seconds.

    Args:
        timeout_s: seconds per attempt, including reading the answer.

    Raises:
        GraderError: no attempt got an answer; the answer is an error, too long or not JSON; or the
            body contains a lone surrogate or an integer of more than 64 bits.
    """
    try:
        data = orjson.dumps(body)
    except TypeError as error:  # orjson's own is one
        raise GraderError(f"POST {url}: the answer can't be sent as JSON: {error}") from error
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
    try:
        async with session.post(
            url, data=body, headers={"Content-Type": "application/json"}, allow_redirects=False
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


async def remote_rm(
    text: str,
    reference: JSON = None,
    *,
    url: str,
    prompt: JSON = "",
    timeout_s: float = 30.0,
    num_attempts: int = 4,
) -> float:
    """Returns the reward that a remote model gives to `text` as the answer to `prompt`.

    Args:
        url: the URL to POST to; see the module's docstring for the protocol.
        prompt: a string or a list of messages, sent unchanged.
        timeout_s: seconds per attempt.

    Raises:
        GraderError: the server failed, or its answer is not a finite number.
    """
    item: JSON = {"prompt": prompt, "response": text, "label": reference}
    reply = await post_json(url, item, timeout_s=timeout_s, num_attempts=num_attempts)
    value = reply["reward"] if isinstance(reply, dict) and "reward" in reply else reply
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GraderError(f"the reward server answered {value!r} instead of a finite number")
    return float(value)
