"""The server: one ASGI application in front of a `SessionManager`, and uvicorn around it.

    access.py     who may call: hosts, origins, tokens, protocol versions
    limits.py     what a client may send around a body
    routes.py     the HTTP calls, one function each, and their table
    websocket.py  many sessions on one WebSocket
    openapi.py    the description of it all, written from the table
    metrics.py    Prometheus text

A step is called for every turn of every episode, so the way to it is short: the application looks
the path up itself, reads the raw body and sends ready bytes.

Bodies are bounded in size, nesting and time. Connections are not counted: an idle one costs a few
kilobytes, and no session and no thread.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import re
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send

from agentrl.env import protocol, registry
from agentrl.env.base import Environment
from agentrl.env.protocol import make_error
from agentrl.env.server import openapi
from agentrl.env.server.access import Access, Grant, is_loopback
from agentrl.env.server.limits import LimitedProtocol
from agentrl.env.server.metrics import Metrics
from agentrl.env.server.routes import JSON_TYPE, OPERATIONS, Call, Operation, Service
from agentrl.env.server.websocket import SocketProtocol, Sockets, serve_socket
from agentrl.env.session.admission import MAX_WAIT_S
from agentrl.env.session.manager import SessionManager
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON

logger = logging.getLogger("agentrl.env")

KEEP_ALIVE_S = 75
"""Idle connections are kept this long; the client gives them up earlier."""
PING_S = 20.0
"""A WebSocket that was silent so long is pinged, and given up without an answer in the same
time."""
MAX_BODY_BYTES = 2 * 2**20
BODY_TIMEOUT_S = 30.0
"""A request must have sent its body by then."""
DRAIN_S = 5.0
"""How long open sessions may go on after SIGTERM. With the shutdown after it, it stays within the
10 s that container engines grant."""
_SHUTDOWN_S = 3.0


def make_app(
    environments: Iterable[str | type[Environment]],
    *,
    token: str | None = None,
    loopback_only: bool = True,
    max_sessions: int | None = None,
    worker_threads: int = 32,
    max_body_bytes: int = MAX_BODY_BYTES,
    config: Mapping[str, Mapping[str, JSON]] | None = None,
    max_wait_s: float = MAX_WAIT_S,
    worker: int | str = 0,
    num_workers: int = 1,
    secret: bytes | None = None,
) -> App:
    """An application that serves these environments, and no other, to whoever may ask.

    Args:
        environments: classes, or names for `agentrl.env.registry.resolve`.
        token: what clients must present; None asks for nothing.
        loopback_only: answer only requests for a loopback host, from no foreign origin.
        max_sessions: live sessions over all environments.
        worker_threads: threads for plain `def` methods of all sessions together.
        max_body_bytes: larger requests and WebSocket messages are refused.
        config: by environment id, what every session's configuration starts from.
        max_wait_s: how long a creation waits for a slot before it is `at_capacity`.
        worker: number of this process among the `num_workers` of a server.
        secret: what session and agent tokens are made with; workers of one server share it.

    Raises:
        ConfigError: an environment cannot be found, or two have one id.
    """
    served: dict[str, type[Environment]] = {}
    for each in environments:
        environment = registry.resolve(each) if isinstance(each, str) else registry.with_id(each)
        if served.setdefault(environment.id, environment) is not environment:
            raise ConfigError(f"two environments have the id '{environment.id}'")

    def resolve(env_id: str) -> type[Environment]:
        if env_id not in served:
            raise ConfigError(f"this server has no environment '{env_id}', but {', '.join(served)}")
        return served[env_id]

    manager = SessionManager(
        resolve,
        max_sessions=max_sessions,
        worker_threads=worker_threads,
        config=config,
        max_wait_s=max_wait_s,
        secret=secret,
        worker=worker,
        num_workers=num_workers,
    )
    info = protocol.ServerInfo(
        protocol_versions=[int(protocol.PROTOCOL_VERSION)],
        environments=list(served),
        workers=num_workers,
        max_frames=protocol.MAX_FRAMES,
        max_body_bytes=max_body_bytes,
    )
    return App(manager, info, Access(token or None, loopback_only, manager.secret))


class App:
    """The ASGI application."""

    def __init__(self, manager: SessionManager, info: protocol.ServerInfo, access: Access) -> None:
        self.manager = manager
        self.max_body_bytes = info.max_body_bytes
        self._access = access
        self._sockets = Sockets()
        self._readers = Readers()
        self._service = Service(manager, Metrics(manager, self._sockets), info)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        try:
            if scope["type"] == "http":
                await self._answer(scope, receive, send)
            else:
                await self._open_socket(scope, receive, send)
        except EnvError as error:
            await _send_problem(send, error, scope["type"])
        except Exception as error:  # a bug here, whose trace belongs in the log
            logger.exception("%s %s", scope.get("method", "WebSocket"), scope["path"][:80])
            message = f"internal error: {type(error).__name__}"
            await _send_problem(send, make_error("env_error", message), scope["type"])

    def check(self, scope: Scope) -> tuple[Grant, dict[bytes, bytes]]:
        """What a request or handshake may touch, and its headers by name in lower case.

        Raises:
            EnvError: it is refused, see `Access.check`.
        """
        headers = dict(scope["headers"])
        return self._access.check(scope["path"], scope["query_string"], headers), headers

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        grant, headers = self.check(scope)
        if path == "/openapi.json" and method == "GET":
            await _send(send, 200, _openapi(), JSON_TYPE)
            return
        operation, named = _find(method, path)
        body: Any = None
        if operation.request is not None or operation.raw_body:
            body = await self._read_body(headers, receive)
            if operation.request is not None:
                raw = b"{}" if operation.optional_body and not body else body
                body = protocol.decode_request(raw, operation.request)
        query = None
        if operation.query is not None:
            query = _decode_query(scope["query_string"], operation.query)
        call = Call(named, body, query, headers, grant)
        reply = await operation.handler(self._service, call)
        await _send(send, operation.status, reply, operation.media_type)

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """The request's body.

        Raises:
            EnvError: `payload_too_large`, or `request_timeout` if it does not arrive.
        """
        limit = self.max_body_bytes
        too_large = f"a body may have {limit} bytes at most"
        # The parser has seen to it that this is a number.
        if int(headers.get(b"content-length", b"0")[:20]) > limit:
            raise make_error("payload_too_large", too_large)
        chunks: list[bytes] = []
        size = 0
        with self._readers:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise make_error("request_timeout", "the client went away")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise make_error("payload_too_large", too_large)
                if not message.get("more_body", False):
                    return b"".join(chunks)

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        grant, _ = self.check(scope)
        if scope["path"] != openapi.SOCKET_PATH:
            raise make_error("not_found", f"the WebSocket is at {openapi.SOCKET_PATH}")
        await serve_socket(self.manager, self._sockets, grant, scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        assert message["type"] == "lifespan.shutdown"
        await self.manager.aclose(_SHUTDOWN_S)
        await send({"type": "lifespan.shutdown.complete"})


class Readers:
    """Those who read a body; whoever has not got it within `BODY_TIMEOUT_S` gets `request_timeout`
    as soon as that is noticed, which takes as long again at most.

    One timer for all of them: one of each request's own would be a tenth of what a step costs.
    """

    def __init__(self) -> None:
        self._began: dict[asyncio.Task, float] = {}
        self._late: set[asyncio.Task] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        self._began[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(BODY_TIMEOUT_S / 2, self._look, loop)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        del self._began[task]
        if task in self._late:
            self._late.discard(task)
            if task.uncancel() == 0 and kind is asyncio.CancelledError:
                message = "the body did not arrive in time"
                raise make_error("request_timeout", message) from None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for task, began in self._began.items():
            if loop.time() - began >= BODY_TIMEOUT_S and task not in self._late:
                self._late.add(task)
                task.cancel()
        if self._began:
            self._timer = loop.call_later(BODY_TIMEOUT_S / 2, self._look, loop)


# Finding the call

_PATHS: dict[str, dict[str, Operation]] = {}
"""Calls by path and method."""
for _operation in OPERATIONS:
    _PATHS.setdefault(_operation.path, {})[_operation.method] = _operation
_NAMED_PATH = re.compile(r"(/v1/)(sessions|envs)/([^/]+)(/[a-z]+)?")
_PARAMETERS = {"sessions": "{session_id}", "envs": "{env_id}"}


def _find(method: str, path: str) -> tuple[Operation, str]:
    """The operation, and the id that the path names.

    Raises:
        EnvError: `not_found` or `method_not_allowed`.
    """
    named = ""
    methods = _PATHS.get(path)
    if methods is None and (match := _NAMED_PATH.fullmatch(path)):
        prefix, kind, named, rest = match.groups("")
        methods = _PATHS.get(f"{prefix}{kind}/{_PARAMETERS[kind]}{rest}")
    if methods is None and path == openapi.SOCKET_PATH and method == "GET":
        raise EnvError("this is a WebSocket: send a handshake", code="invalid_request", status=426)
    if methods is None:
        allowed = {"/openapi.json": "GET", openapi.SOCKET_PATH: "GET"}.get(path)
        if allowed is None:
            raise make_error("not_found", f"there is nothing at {path[:200]}")
        raise MethodNotAllowed(allowed)
    operation = methods.get(method)
    if operation is None:
        raise MethodNotAllowed(", ".join(methods))
    return operation, named


class MethodNotAllowed(EnvError):
    def __init__(self, allowed: str) -> None:
        super().__init__(f"send {allowed}", code="method_not_allowed", status=405)
        self.allowed = allowed


def _decode_query(query: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=64))
        return msgspec.convert(given, kind, strict=False)
    except ValueError as error:  # msgspec's ValidationError is one
        raise make_error("invalid_request", f"query: {error}") from error


@functools.cache
def _openapi() -> bytes:
    return msgspec.json.encode(openapi.document())


# Answering

_VERSION = (
    protocol.PROTOCOL_HEADER.lower().encode(),
    protocol.PROTOCOL_VERSION.encode(),
)


async def _send(
    send: Send,
    status: int,
    body: bytes,
    media_type: str,
    *more: tuple[bytes, bytes],
    prefix: str = "",
) -> None:
    headers = [_VERSION, (b"content-length", b"%d" % len(body)), *more]
    if status == 204:
        headers = [_VERSION]
    else:
        headers.append((b"content-type", media_type.encode()))
    await send({"type": prefix + "http.response.start", "status": status, "headers": headers})
    await send({"type": prefix + "http.response.body", "body": body})


async def _send_problem(send: Send, error: EnvError, kind: str) -> None:
    """Problem details, to a request or in place of accepting a WebSocket."""
    more: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        more.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
    if error.status == 401:
        more.append((b"www-authenticate", b"Bearer"))
    if error.status == 426:
        more.append((b"upgrade", b"websocket"))
    if isinstance(error, MethodNotAllowed):
        more.append((b"allow", error.allowed.encode()))
    if error.status in (408, 413) or kind == "websocket":
        more.append((b"connection", b"close"))  # the rest of the body is not going to be read
    body = protocol.encode(protocol.to_problem(error))
    prefix = "websocket." if kind == "websocket" else ""
    await _send(send, error.status, body, protocol.PROBLEM_TYPE, *more, prefix=prefix)


# Serving


def serve(
    app: App,
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
    if not token and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: give --token or set "
            f"{protocol.TOKEN_VARIABLE}, or bind --host 127.0.0.1"
        )
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listener.getsockname()[1]}"
    config = uvicorn_config(app)
    server = _Server(config, app.manager, drain_s)
    if ready is not None:
        ready(url)
    settle_memory()
    with listener, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))


def settle_memory() -> None:
    """Have the garbage collector look at what sessions leave, and not at the modules, each time.

    Hundreds of sessions are many objects that live long; with Python's own thresholds collecting
    them over and over is a fifth of a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)


def uvicorn_config(app: App) -> uvicorn.Config:
    """What the application is served with: uvloop where there is one, and limits on headers."""
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws=SocketProtocol,
        ws_max_size=app.max_body_bytes,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_per_message_deflate=False,  # costs more than it saves, and memory per socket
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
        lifespan="on",
        proxy_headers=False,
    )


class _Server(uvicorn.Server):
    """uvicorn, except that SIGTERM drains the sessions before it stops; a second one does not."""

    def __init__(self, config: uvicorn.Config, manager: SessionManager, drain_s: float) -> None:
        super().__init__(config)
        self._manager = manager
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._manager.draining or sig == signal.SIGINT:
            super().handle_exit(sig, frame)
            return
        self._manager.draining = True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        logger.info("draining: %d live sessions", self._manager.num_live)
        await self._manager.drain(self._drain_s)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or a ConfigError that says why there is none."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # The protocol number matters: asyncio leaves Nagle's algorithm on where it is 0, and every
        # answer then waits 40 ms for the client's delayed acknowledgement.
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port"
        ) from None
    return listener
