"""HTTP to inference servers: aiohttp for the one call of every turn, httpx for all other calls.

A rollout makes thousands of calls at a time on one thread, and aiohttp needs a tenth of httpx's CPU
time for each. Both clients leave deadlines to their caller (`asyncio.timeout` ends a call whose
answer trickles in, which a limit on the time between two bytes would not), follow no redirects, and
take no proxy from the environment: the addresses are the run file's own.
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
"""A connection idle for longer is not used again: below the 5 s after which vLLM closes it, so that
a request is never written into a connection that is being closed."""
MAX_ANSWER_BYTES = 512 * 2**20


class ConnectionFailed(Exception):
    """There is no connection, or it was lost before an answer came."""


class AnswerCut(Exception):
    """The answer began and did not end, is longer than MAX_ANSWER_BYTES, or is not HTTP."""


@dataclass(slots=True, frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Names in any case."""
    body: bytes


class EngineSession:
    """Requests with JSON bodies over pooled connections, to any number of servers.

    It belongs to the event loop of its first request. Cancelling a request closes its connection,
    which is how a server learns that nobody waits for the answer any more.
    """

    def __init__(self, token: str | None = None) -> None:
        """
        Raises:
            ConfigError: the token cannot stand in a header.
        """
        self._headers = {"Content-Type": "application/json", **bearer(token)}
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, url: str, body: bytes | None = None) -> Answer:
        """Send a request and read the whole answer.

        A request is sent once: what may be sent again is the caller's decision.

        Raises:
            ConnectionFailed, AnswerCut: see their docstrings.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                # Compressing a reply costs both sides more than sending it.
                skip_auto_headers=("Accept-Encoding",),
            )
        try:
            response = await self._session.request(method, url, data=body, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            raise ConnectionFailed(f"cannot connect ({error})") from error
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise ConnectionFailed("the connection was lost before an answer came") from error
        except aiohttp.ClientError as error:
            raise AnswerCut(f"the answer is no HTTP ({error})") from error
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
    """A client for calls other than a rollout's.

    No connection is used twice: vLLM closes one after an error without saying so, and the call
    after that (it resumes a paused server) has to go through.

    Args:
        url: in front of the paths that are asked for.

    Raises:
        ConfigError: the token cannot stand in a header.
    """
    return httpx.AsyncClient(
        base_url=url,
        headers=bearer(token),
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
        # The system's certificates and SSL_CERT_FILE, as aiohttp does.
        verify=ssl.create_default_context(),
    )


def bearer(token: str | None) -> dict[str, str]:
    """
    Raises:
        ConfigError: the token cannot stand in a header.
    """
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "the servers' token (inference.token, teacher.token) holds characters that no HTTP "
            "header can hold; look for a line break at its end"
        )
    return {"Authorization": f"Bearer {token}"}


def require_address(url: str, key: str) -> str:
    """The address without a slash at its end.

    Args:
        key: of the run file, for the message.

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
