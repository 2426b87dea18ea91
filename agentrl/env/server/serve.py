"""The HTTP server around the application: granian, a server in Rust.

It has the limits on headers as settings: how large they may be, how long they may take, and how
long an idle connection is kept. In this process it runs on the process's own event loop.
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

from agentrl import event_loop
from agentrl.env import protocol
from agentrl.env.server.access import is_loopback, usable_token
from agentrl.env.sessions.manager import SessionManager
from agentrl.errors import ConfigError

logger = logging.getLogger("agentrl.env")

HEAD_TIMEOUT_S = 45.0
"""A request's headers must be complete by then. The time between two requests counts too, so this
is how long an idle connection is kept; the client gives it up earlier."""
MAX_HEAD_BYTES = 2**15
"""Also what the server reads of a body before the application asks for more."""
MAX_CONNECTIONS = 8192
"""Further ones wait until another is closed."""
DRAIN_S = 5.0
"""How long open sessions may go on after SIGTERM. With what follows it, it stays within the 10 s
that container engines grant."""
CLOSE_S = 3.0
"""How long environments may take to close after that."""
_STOP_S = 1.0
_FREE_FILES = 256
"""Files that are left for other things than connections."""


def serve(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8700,
    token: str | None = None,
    drain_s: float = DRAIN_S,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT, which stops it, or SIGTERM, which drains it first.

    Args:
        app: from `make_app`, with the same token.
        port: 0 takes a free one.
        drain_s: how long open sessions may go on after the signal.
        ready: called with the server's URL once it listens.

    Raises:
        ConfigError: `host` is not a loopback address and there is no token, or the address is in
            use.
    """
    if usable_token(token) is None and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: give --token or set "
            f"{protocol.TOKEN_VARIABLE}, or bind --host 127.0.0.1"
        )

    async def main() -> None:
        stop = asyncio.Event()
        manager: SessionManager = app.state.manager
        tasks = _on_signals(manager, stop, drain_s)
        async with running(app, host, port) as url:
            if ready is not None:
                ready(url)
            gc.collect()
            gc.freeze()  # modules; else each full collection looks at them again
            await stop.wait()
            await manager.aclose(CLOSE_S)
        for task in tasks:
            task.cancel()

    event_loop.run(main())
    # The server's threads end when their connections do. One that touches Python while the
    # interpreter is taken down would abort the process.
    time.sleep(0.2)


@contextlib.asynccontextmanager
async def running(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an application while in the context. Yields the server's URL.

    Raises:
        ConfigError: it cannot listen there.
    """
    with _claim(host, port) as claim:
        ip, port = claim.getsockname()[:2]
        server = Server(
            app,
            address=ip,
            port=port,
            interface=Interfaces.ASGINL,  # the application's lifespan is over before connections
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
    """SIGINT stops at once, SIGTERM after draining; a second SIGTERM does not wait any longer.
    Returns the set of tasks that drain."""
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
    """Raises the limit of open files as far as it goes, and returns as many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _FREE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - _FREE_FILES, 128)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, for another server than this one.

    Raises:
        ConfigError: the address is not to be had.
    """
    listener = _claim(host, port)
    try:
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error.strerror or str(error)) from None
    return listener


def _claim(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen, so that nobody else takes the port until
    the server does.

    The server shares a port with whoever listens there already, which would go unnoticed.

    Raises:
        ConfigError: the address is not to be had.
    """
    claim = None
    if not 0 <= port <= 65535:  # the system would take the remainder of a division
        raise _cannot_listen(host, port, "ports are 0 to 65535")
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        claim = socket.socket(family, kind, number)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.bind(address)
    except OSError as error:
        if claim is not None:
            claim.close()
        raise _cannot_listen(host, port, error.strerror or str(error)) from None
    return claim


def _cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --port")
