"""The Docker engine's HTTP interface on the event loop: no thread waits for a command.

The `docker` package blocks; agents' commands run for minutes and by the dozen, so they are run
through here. What is done once (pulling, building, reaping) uses the package.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentrl.errors import EnvError, EnvUnavailable
from agentrl_swebench.engine import engine_host

CALL_TIMEOUT_S = 120.0


class EngineError(EnvError):
    """The engine refused a call; `engine_status` is its HTTP status."""

    def __init__(self, message: str, engine_status: int) -> None:
        super().__init__(message, code="engine_error")
        self.engine_status = engine_status


class EngineAPI:
    """One engine, for one event loop."""

    def __init__(self) -> None:
        """
        Raises:
            ConfigError: DOCKER_HOST can't be read.
        """
        self._host = engine_host()
        parts = urlsplit(self._host)
        self._tls = _tls() if parts.scheme == "tcp" else None
        if parts.scheme == "unix":
            self._base = "http://docker"
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(path=parts.path, limit=0)
        else:
            self._base = (
                f"{'https' if self._tls else 'http'}://{parts.hostname}:{parts.port or 2375}"
            )
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
        )

    async def aclose(self) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """The decoded reply; None where it is empty. `body` is sent as JSON, or as it is if bytes.

        Raises:
            EngineError: the engine refused.
            EnvUnavailable: it does not answer, or not in time.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open(method, path, body, query) as response,
            ):
                content = await response.read()
        except TimeoutError as error:
            raise EnvUnavailable(
                f"the Docker engine at {self._host} did not answer {method} {path} within "
                f"{timeout_s:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise self._unavailable(error) from error
        return json.loads(content) if content else None

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of a POST's reply while it grows.

        Raises:
            EngineError: the engine refused.
            EnvUnavailable: it does not answer.
        """
        try:
            async with self._open("POST", path, body, None) as response:
                try:
                    yield response.content
                finally:
                    response.close()  # the connection is the stream's; it is not used again
        except aiohttp.ClientError as error:
            raise self._unavailable(error) from error

    async def hold_stdin(self, container_id: str) -> asyncio.StreamWriter:
        """Attach to a container's input and hold it open. Made with StdinOnce, the container reads
        the end of its input when the writer is closed, by whatever ends this process too.

        Raises:
            EngineError: the engine refused.
            EnvUnavailable: it does not answer.
        """
        parts = urlsplit(self._host)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if parts.scheme == "unix":
                    reader, writer = await asyncio.open_unix_connection(parts.path)
                else:
                    reader, writer = await asyncio.open_connection(
                        parts.hostname, parts.port or 2375, ssl=self._tls
                    )
                writer.write(
                    f"POST /containers/{container_id}/attach?stream=1&stdin=1 HTTP/1.1\r\n"
                    "Host: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                    "Content-Length: 0\r\n\r\n".encode()
                )
                head = await reader.readuntil(b"\r\n\r\n")
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise self._unavailable(error) from error
        status = int(head.split(b" ", 2)[1])
        if status not in (101, 200):
            writer.close()
            raise EngineError(f"the engine refused to attach to {container_id[:12]}", status)
        return writer

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.request(
            method,
            self._base + path,
            json=None if isinstance(body, bytes) else body,
            data=body if isinstance(body, bytes) else None,
            params=query,
        ) as response:
            if response.status >= 400:
                text = (await response.content.read(10_000)).decode(errors="replace")
                with suppress(ValueError, KeyError, TypeError):
                    text = str(json.loads(text)["message"])
                reason = " ".join(text.split())[:300]
                raise EngineError(f"Docker engine: {reason}", response.status)
            yield response

    def _unavailable(self, error: Exception) -> EnvUnavailable:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return EnvUnavailable(f"no Docker engine answers at {self._host}: {reason}")


def _tls() -> ssl.SSLContext | None:
    """What DOCKER_TLS_VERIFY and DOCKER_CERT_PATH ask for, as with the docker command."""
    if not os.environ.get("DOCKER_TLS_VERIFY"):
        return None
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    return context
