"""The HTTP server: routes, limits and access, in front of a `SessionManager`.

The two hot routes (create, step) read the raw body and answer ready bytes; FastAPI does the rest
and describes all of it at `/openapi.json`.

Access. With a token every route but `/healthz` asks for `Authorization: Bearer <token>`. A server
on a loopback address answers only requests that name a loopback host, and no page of another
origin, so that a website open in a browser on the same machine cannot reach it. A server on any
other address does not start without a token.

Limits. Bodies are bounded in size, nesting and time here, headers in `agentrl.env.limits`.
Connections are not counted: an idle one costs a few kilobytes, and no session and no thread.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import logging
import re
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import FrameType
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from agentrl.env import protocol, registry
from agentrl.env.base import Environment
from agentrl.env.limits import LimitedProtocol
from agentrl.env.protocol import make_error
from agentrl.env.session import SessionManager
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON

logger = logging.getLogger("agentrl.env")

KEEP_ALIVE_S = 75
"""Idle connections are kept this long; the client gives them up earlier."""
MAX_BODY_BYTES = 8 * 2**20
BODY_TIMEOUT_S = 30.0
"""A request must have sent its body by then."""
DRAIN_S = 5.0
"""How long open sessions may go on after SIGTERM. With the shutdown after it, it stays within the
10 s that container engines grant."""
_SHUTDOWN_S = 3.0
_JSON = "application/json"
_STEP_PATH = "/v1/sessions/{session_id}/step"
_STEP = re.compile(r"/v1/sessions/([^/]+)/step")
_CONFIG = "a JSON object: the configuration asked about, where it differs from the server's"
_LOADING = "how long to wait for what the configuration loads, such as a dataset"


def make_app(
    environments: Iterable[str | type[Environment]],
    *,
    token: str | None = None,
    loopback_only: bool = True,
    max_sessions: int | None = None,
    worker_threads: int = 32,
    max_body_bytes: int = MAX_BODY_BYTES,
    config: Mapping[str, Mapping[str, JSON]] | None = None,
) -> App:
    """An application that serves these environments, and no other, to whoever may ask.

    Args:
        environments: classes, or names for `agentrl.env.registry.resolve`.
        token: what clients must present; None asks for nothing.
        loopback_only: answer only requests for a loopback host, from no foreign origin.
        max_sessions: live sessions over all environments.
        worker_threads: threads for plain `def` methods of all sessions together.
        max_body_bytes: larger requests are refused.
        config: by environment id, what every session's configuration starts from.

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
        resolve, max_sessions=max_sessions, worker_threads=worker_threads, config=config
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        yield
        await manager.aclose(_SHUTDOWN_S)

    api = FastAPI(
        title="agentrl environments",
        version=protocol.PROTOCOL_VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    api.add_exception_handler(EnvError, _answer_env_error)
    api.add_exception_handler(HTTPException, _answer_http_error)
    api.add_exception_handler(RequestValidationError, _answer_invalid)
    api.add_exception_handler(Exception, _answer_bug)

    @api.post(
        "/v1/sessions",
        status_code=201,
        summary="Open and reset a group of sessions",
        openapi_extra=_body_of(protocol.CreateRequest, protocol.CreateReply, 201),
    )
    async def create(request: Request) -> Response:
        body = protocol.decode_request(
            await _read_body(request.receive, max_body_bytes), protocol.CreateRequest
        )
        reply = await manager.create(body, request.headers.get("Idempotency-Key"))
        return _reply(protocol.encode(reply), 201)

    @api.get("/v1/sessions/{session_id}", openapi_extra=_body_of(None, protocol.SessionStatus))
    async def status(session_id: str) -> Response:
        return _reply(protocol.encode(manager.status(session_id)))

    @api.delete("/v1/sessions/{session_id}", status_code=204)
    async def delete(session_id: str) -> Response:
        manager.delete(session_id)
        return Response(status_code=204)

    @api.post(
        "/v1/sessions/{session_id}/renew",
        summary="Hold a session that has nothing to do yet",
        openapi_extra=_body_of(protocol.RenewRequest, protocol.SessionStatus),
    )
    async def renew(session_id: str, request: Request) -> Response:
        raw = await _read_body(request.receive, max_body_bytes)
        body = protocol.decode_request(raw or b"{}", protocol.RenewRequest)
        return _reply(protocol.encode(manager.renew(session_id, body.lease_s)))

    @api.get("/v1/envs", openapi_extra=_body_of(None, protocol.EnvList))
    async def environment_list() -> Response:
        return _reply(protocol.encode(protocol.EnvList(list(served))))

    @api.get("/v1/envs/{env_id}", openapi_extra=_body_of(None, protocol.EnvInfo))
    async def info(
        env_id: str,
        config: Annotated[str | None, Query(description=_CONFIG)] = None,
        timeout_s: Annotated[float | None, Query(gt=0, description=_LOADING)] = None,
    ) -> Response:
        reply = await manager.info(env_id, protocol.decode_config(config), timeout_s)
        return _reply(protocol.encode(reply))

    @api.get("/v1/envs/{env_id}/tasks", openapi_extra=_body_of(None, protocol.TaskList))
    async def tasks(
        env_id: str,
        split: str,
        start: Annotated[int, Query(ge=0)] = 0,
        stop: Annotated[int | None, Query(ge=0)] = None,
        config: Annotated[str | None, Query(description=_CONFIG)] = None,
    ) -> Response:
        last = start + 20 if stop is None else stop
        if last - start > 1000:
            raise make_error("invalid_request", "ask for at most 1000 tasks at a time")
        previews = await manager.preview(env_id, split, start, last, protocol.decode_config(config))
        return _reply(protocol.encode(protocol.TaskList(split, previews)))

    @api.get("/healthz", openapi_extra=_body_of(None, protocol.Health))
    async def healthz() -> Response:
        state = "draining" if manager.draining else "ok"
        health = protocol.Health(state, manager.num_live, manager.workers.num_abandoned)
        return _reply(protocol.encode(health))

    _describe(api)
    return App(
        api,
        manager,
        token=token,
        loopback_only=loopback_only,
        max_body_bytes=max_body_bytes,
    )


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
    with listener, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))


def uvicorn_config(app: App) -> uvicorn.Config:
    """What the application is served with: uvloop where there is one, and limits on headers."""
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
        lifespan="on",
        ws="none",
        proxy_headers=False,
    )


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


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


class App:
    """The ASGI application: what every request passes (host, origin, token, protocol version and
    announced size), in front of the FastAPI application.

    A step, which is called for every turn of every episode, is answered right here: the way through
    FastAPI would cost more than the step.
    """

    def __init__(
        self,
        api: FastAPI,
        manager: SessionManager,
        *,
        token: str | None,
        loopback_only: bool,
        max_body_bytes: int,
    ) -> None:
        self.api = api
        self.manager = manager
        self._token = token.encode() if token else None
        self._loopback_only = loopback_only
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.api(scope, receive, send)
            return
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        error = self._refuse(scope["path"], headers)
        if error is not None:
            await _problem(error)(scope, receive, send)
        elif scope["method"] == "POST" and (match := _STEP.fullmatch(scope["path"])):
            await self._step(match[1], scope, receive, send)
        else:
            await self.api(scope, receive, send)

    async def _step(self, session_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = protocol.decode_request(
                await _read_body(receive, self._max_body_bytes), protocol.StepRequest
            )
            body = await self.manager.step(session_id, request)
        except EnvError as error:
            await _problem(error)(scope, receive, send)
            return
        except Exception as error:  # a bug here, whose trace belongs in the log
            logger.exception("step of session %s", session_id[:8])
            await _problem(_bug(error))(scope, receive, send)
            return
        headers = [*_RAW_HEADERS, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refuse(self, path: str, headers: dict[bytes, str]) -> EnvError | None:
        if self._loopback_only:
            host, origin = headers.get(b"host", ""), headers.get(b"origin")
            if not _names_loopback(f"//{host}"):
                return make_error("forbidden", f"this server answers on localhost, not as '{host}'")
            if origin is not None and not _names_loopback(origin):
                return make_error("forbidden", f"requests from the origin '{origin}' are refused")
        if self._token is not None and path != "/healthz":
            scheme, _, given = headers.get(b"authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.encode("latin-1"), self._token
            ):
                return make_error(
                    "unauthorized",
                    f"send the server's token as 'Authorization: Bearer ...' "
                    f"(clients read it from {protocol.TOKEN_VARIABLE})",
                )
        version = headers.get(_PROTOCOL_KEY, protocol.PROTOCOL_VERSION)
        if version != protocol.PROTOCOL_VERSION:
            return make_error(
                "invalid_request",
                f"this server speaks protocol {protocol.PROTOCOL_VERSION}, not {version[:20]}",
            )
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return make_error(
                "payload_too_large", f"a body may have {self._max_body_bytes} bytes at most"
            )
        return None


@functools.lru_cache(maxsize=256)
def _names_loopback(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


async def _read_body(receive: Receive, limit: int) -> bytes:
    """The request's body.

    Raises:
        EnvError: `payload_too_large`, or `request_timeout` if it does not arrive.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise make_error("request_timeout", "the client went away")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise make_error("payload_too_large", f"a body may have {limit} bytes at most")
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise make_error("request_timeout", "the body did not arrive in time") from None


_HEADERS = {protocol.PROTOCOL_HEADER: protocol.PROTOCOL_VERSION}
_PROTOCOL_KEY = protocol.PROTOCOL_HEADER.lower().encode()
_RAW_HEADERS = [
    (_PROTOCOL_KEY, protocol.PROTOCOL_VERSION.encode()),
    (b"content-type", _JSON.encode()),
]


def _reply(body: bytes, status: int = 200) -> Response:
    return Response(body, status, _HEADERS, _JSON)


def _problem(error: EnvError) -> Response:
    headers = dict(_HEADERS)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not going to be read
    body = protocol.encode(protocol.to_problem(error))
    return Response(body, error.status, headers, protocol.PROBLEM_TYPE)


async def _answer_env_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, EnvError)
    return _problem(error)


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    return _problem(make_error(codes.get(error.status_code, "invalid_request"), str(error.detail)))


async def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = "; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in error.errors())
    return _problem(make_error("invalid_request", problems))


async def _answer_bug(request: Request, error: Exception) -> Response:
    # Starlette raises it again after this answer, so its trace reaches the log.
    return _problem(_bug(error))


def _bug(error: Exception) -> EnvError:
    return make_error("env_error", f"internal error: {type(error).__name__}")


_REQUESTS = (protocol.CreateRequest, protocol.StepRequest, protocol.RenewRequest)
_REPLIES = (
    protocol.CreateReply,
    protocol.StepReply,
    protocol.SessionStatus,
    protocol.EnvInfo,
    protocol.EnvList,
    protocol.TaskList,
    protocol.Health,
    protocol.Problem,
)
_STRING = {"type": "string"}
_REF = "#/components/schemas/{name}"


def _body_of(
    request: type[msgspec.Struct] | None, reply: type[msgspec.Struct], status: int = 200
) -> dict[str, Any]:
    """What FastAPI cannot see of a route that reads and answers raw bytes."""

    def content(kind: type[msgspec.Struct], media_type: str = _JSON) -> dict[str, Any]:
        return {"content": {media_type: {"schema": {"$ref": _REF.format(name=kind.__name__)}}}}

    problem = content(protocol.Problem, protocol.PROBLEM_TYPE)
    extra: dict[str, Any] = {
        "responses": {
            str(status): {"description": reply.__name__, **content(reply)},
            "default": {"description": "Problem details", **problem},
        }
    }
    if request is not None:
        extra["requestBody"] = {"required": True, **content(request)}
    return extra


def _describe(api: FastAPI) -> None:
    """Add the wire types and the step route to the OpenAPI document."""
    generate = api.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document["paths"][_STEP_PATH] = {
            "post": {
                "summary": "Take one step, exactly once",
                "parameters": [
                    {"name": "session_id", "in": "path", "required": True, "schema": _STRING}
                ],
                **_body_of(protocol.StepRequest, protocol.StepReply),
            }
        }
        _, schemas = msgspec.json.schema_components((*_REQUESTS, *_REPLIES), ref_template=_REF)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    api.openapi = openapi  # type: ignore[method-assign]
