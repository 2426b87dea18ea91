"""Runs the application in granian, an HTTP server written in Rust.

granian limits the size of headers, the time they may take to arrive, and how long an idle
connection is kept. It runs on this process's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from agentrl import runtime
from agentrl.env import protocol
from agentrl.env.server.access import is_loopback, usable_token
from agentrl.env.sessions.manager import SessionManager
from agentrl.errors import ConfigError

logger = logging.getLogger("agentrl.env")

HEAD_TIMEOUT_S = 45.0
"""Seconds within which a request's headers must be complete. The time since the last request on a
connection counts too, so an idle connection is kept this long; the client closes it earlier."""
MAX_HEAD_BYTES = 2**15
"""Largest size of a request's headers. The server also reads this much of a body before the
application asks for more."""
MAX_CONNECTIONS = 8192
"""Most open connections; further ones wait."""
DRAIN_S = 5.0
"""Seconds that open sessions may go on after SIGTERM. Together with `CLOSE_S` this is less than the
10 s that container engines wait before they kill a process."""
CLOSE_S = 3.0
"""Seconds that environments may take to close after draining."""
_STOP_S = 1.0
_FREE_FILES = 256
"""Open files reserved for other things than connections."""


def serve(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8700,
    token: str | None = None,
    drain_s: float = DRAIN_S,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serves until SIGINT, which stops it at once, or SIGTERM, which drains it first.

    Args:
        app: from `make_app`, with the same token.
        port: 0 takes a free one.
        drain_s: seconds that open sessions may go on after SIGTERM.
        ready: called with the server's URL once it listens.

    Raises:
        ConfigError: `host` is not a loopback address and there is no token, or the server cannot
            listen on the address.
    """
    check_exposure(host, token)

    async def main() -> None:
        stop = asyncio.Event()
        manager: SessionManager = app.state.manager
        tasks = _on_signals(manager, stop, drain_s)
        async with running(app, host, port) as url:
            if ready is not None:
                ready(url)
            gc.collect()
            gc.freeze()  # so that full collections skip the loaded modules
            await stop.wait()
            await manager.aclose(CLOSE_S)
        for task in tasks:
            task.cancel()

    runtime.run(main())
    # granian's threads end when their connections do. One that calls into Python while the
    # interpreter shuts down would abort the process.
    time.sleep(0.2)


@contextlib.asynccontextmanager
async def running(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serves an application while in the context, and yields the server's URL.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    with claim(host, port) as claimed:
        ip, port = claimed.getsockname()[:2]
        server = Server(
            app,
            address=ip,
            port=port,
            interface=Interfaces.ASGINL,  # without lifespan, which would end before connections
            http=HTTPModes.http1,
            websockets=False,
            backlog=2048,
            backpressure=_max_connections(),
            http1_settings=HTTP1Settings(
                header_read_timeout=round(HEAD_TIMEOUT_S * 1000), max_buffer_size=MAX_HEAD_BYTES
            ),
            log_enabled=False,
        )
        listens = asyncio.Event()
        server.on_startup(listens.set)
        serving = asyncio.create_task(server.serve())
        waiting = asyncio.create_task(listens.wait())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    if serving.done():
        reason = str(serving.exception()).partition("\n")[0]
        raise _cannot_listen(host, port, reason)
    name = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{name}:{port}"
    finally:
        server.stop()
        await asyncio.wait((serving,), timeout=_STOP_S)
        serving.cancel()


def _on_signals(
    manager: SessionManager, stop: asyncio.Event, drain_s: float
) -> set[asyncio.Task[None]]:
    """Makes SIGINT and a second SIGTERM set `stop` at once, and the first SIGTERM after draining.

    Returns the set of tasks that drain, which is filled as signals arrive.
    """
    loop = asyncio.get_running_loop()
    draining: set[asyncio.Task[None]] = set()

    async def drain() -> None:
        logger.info("draining: %d live sessions", manager.num_live)
        await manager.drain(drain_s)
        stop.set()

    def drain_or_stop() -> None:
        if draining:
            stop.set()
        draining.add(loop.create_task(drain()))

    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, drain_or_stop)
    return draining


def _max_connections() -> int:
    """Raises the limit of open files towards `MAX_CONNECTIONS`, and returns how many connections
    it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _FREE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - _FREE_FILES, 128)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket, for servers other than granian.

    Raises:
        ConfigError: the address cannot be bound.
    """
    listener = claim(host, port)
    try:
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error.strerror or str(error)) from None
    return listener


def check_exposure(host: str, token: str | None) -> None:
    """Raises ConfigError if other machines can reach the address and there is no token."""
    if usable_token(token) is None and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: give --token or set "
            f"{protocol.TOKEN_VARIABLE}, or bind --host 127.0.0.1"
        )


def claim(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to the address and does not listen.

    It reserves the port until the server listens. The server itself would share a port with another
    process that listens there, and nobody would notice.

    Raises:
        ConfigError: the address cannot be bound.
    """
    claimed = None
    if not 0 <= port <= 65535:  # the system would take it modulo 65536
        raise _cannot_listen(host, port, "ports are 0 to 65535")
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        claimed = socket.socket(family, kind, number)
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind(address)
    except OSError as error:
        if claimed is not None:
            claimed.close()
        raise _cannot_listen(host, port, error.strerror or str(error)) from None
    return claimed


def _cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --port")
