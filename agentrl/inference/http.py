"""Sends HTTP requests to inference servers: aiohttp for the call of every turn, httpx for others.

A rollout makes thousands of concurrent calls on one thread, and aiohttp needs a tenth of httpx's
CPU time for each. Both clients leave deadlines to their callers: `asyncio.timeout` also ends a call
whose answer trickles in, which a limit between two bytes would not. They follow no redirects and
use no proxy from the environment, so that requests go to the run file's addresses.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import httpx

from agentrl.errors import ConfigError

KEEPALIVE_S = 3.0
"""Seconds after which an idle connection is not reused. Below vLLM's 5 s, so that no request is
written to a connection that the server is closing."""
MAX_ANSWER_BYTES = 512 * 2**20


class ConnectionFailed(Exception):
    """There was no connection, or it was lost before an answer came."""


class AnswerCut(Exception):
    """The answer began but did not end, is longer than MAX_ANSWER_BYTES, or is not HTTP."""


@dataclass(slots=True, frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Keys are case-insensitive."""
    body: bytes


class EngineSession:
    """Sends requests with JSON bodies over pooled connections, to any number of servers.

    A session belongs to the event loop of its first request. Cancelling a request closes its
    connection, which tells the server to drop the request.
    """

    def __init__(self, token: str | None = None) -> None:
        """
        Args:
            token: sent as a bearer token with every request.

        Raises:
            ConfigError: the token has characters that an HTTP header cannot hold.
        """
        self._headers = {"Content-Type": "application/json", **bearer(token)}
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, url: str, body: bytes | None = None) -> Answer:
        """Sends a request once and reads the whole answer. Retrying is up to the caller.

        Raises:
            ConnectionFailed, AnswerCut: see their docstrings.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                # Compressing an answer costs both sides more than sending it.
                skip_auto_headers=("Accept-Encoding",),
            )
        try:
            response = await self._session.request(method, url, data=body, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            raise ConnectionFailed(f"cannot connect ({error})") from error
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise ConnectionFailed("the connection was lost before an answer came") from error
        except aiohttp.ClientError as error:
            raise AnswerCut(f"the answer is not HTTP ({error})") from error
        try:
            return Answer(response.status, response.headers, await _read(response))
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerCut("the connection was lost in the middle of the answer") from error
        finally:
            if not response.content.at_eof():
                response.close()

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks, num_bytes = [], response.content_length or 0
    if num_bytes <= MAX_ANSWER_BYTES:
        num_bytes = 0
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > MAX_ANSWER_BYTES:
                break
    if num_bytes > MAX_ANSWER_BYTES:
        raise AnswerCut(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def make_client(url: str = "", *, token: str | None = None) -> httpx.AsyncClient:
    """Returns a client for all calls except a rollout's.

    It never reuses a connection: after an error vLLM closes its connection without announcing it,
    and the next call, which resumes a paused server, must not fail.

    Args:
        url: base address, which request paths are appended to.
        token: sent as a bearer token with every request.

    Raises:
        ConfigError: the token has characters that an HTTP header cannot hold.
    """
    return httpx.AsyncClient(
        base_url=url,
        headers=bearer(token),
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
        # Uses the system's certificates and SSL_CERT_FILE, as aiohttp does.
        verify=ssl.create_default_context(),
    )


def bearer(token: str | None) -> dict[str, str]:
    """Returns the header that carries a token; no header without a token.

    Raises:
        ConfigError: the token has characters that an HTTP header cannot hold.
    """
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "the servers' token (inference.token, teacher.token) has characters that an HTTP "
            "header cannot hold; check for a line break at its end"
        )
    return {"Authorization": f"Bearer {token}"}


def require_address(url: str, key: str) -> str:
    """Returns the address without a trailing slash.

    Args:
        key: the run file's key, for the message.

    Raises:
        ConfigError: it is not an http or https address.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        valid = False
    if not valid:
        raise ConfigError(f"{key}: {url!r} is not an address; write it like http://host:8000")
    return url.rstrip("/")
