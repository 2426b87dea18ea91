"""Makes the server's FastAPI application: HTTP calls in front of a `SessionManager`.

    routes.py      the calls
    gate.py        what happens before a call: access, and limits on bodies
    access.py      checks of host, origin, token and protocol version
    docs.py        the OpenAPI schema, and the page /docs
    serve.py       the HTTP server that runs the application
    supervisor.py  several such servers

Every error is an `EnvError`, or becomes one, and is answered as problem details (RFC 9457).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import ProcessCollector
from starlette.exceptions import HTTPException
from starlette.routing import Match

from agentrl.env import protocol
from agentrl.env.base import Environment
from agentrl.env.protocol import ServerInfo, make_error
from agentrl.env.registry import Served
from agentrl.env.server import routes
from agentrl.env.server.access import Access, usable_token
from agentrl.env.server.docs import DESCRIPTION, complete_schema
from agentrl.env.server.gate import MAX_BODY_BYTES, Gate, problem
from agentrl.env.sessions.capacity import MAX_WAIT_S
from agentrl.env.sessions.manager import SessionManager
from agentrl.env.threads import MAX_THREADS
from agentrl.errors import EnvError
from agentrl.types import JSON


def make_app(
    environments: Iterable[str | type[Environment]],
    *,
    token: str | None = None,
    loopback_only: bool = True,
    max_sessions: int | None = None,
    worker_threads: int = MAX_THREADS,
    max_body_bytes: int = MAX_BODY_BYTES,
    config: Mapping[str, Mapping[str, JSON]] | None = None,
    max_wait_s: float = MAX_WAIT_S,
    name: str = "",
) -> FastAPI:
    """Makes an application that serves only the given environments.

    Its session manager is `app.state.manager`.

    Args:
        environments: classes, or names for `agentrl.env.registry.resolve`.
        token: the token that clients must present; None or blank: none is needed.
        loopback_only: refuse requests for another host than a loopback one, or from another origin.
        max_sessions: see `SessionManager`, as for the next four.
        worker_threads: most threads for plain `def` methods, over all sessions.
        config: environment id -> values that every session's configuration starts from.
        max_wait_s: seconds that a creation waits for capacity before it is `at_capacity`.
        name: prefix of the session ids.
        max_body_bytes: larger requests are refused.

    Raises:
        ConfigError: an environment cannot be found, or two have the same id.
    """
    served = Served(environments)
    manager = SessionManager(
        served.resolve,
        max_sessions=max_sessions,
        worker_threads=worker_threads,
        config=config,
        max_wait_s=max_wait_s,
        name=name,
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await manager.aclose()

    app = FastAPI(
        title="agentrl environment server",
        description=DESCRIPTION,
        version=protocol.PROTOCOL_VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # routes.py has its own /openapi.json and /docs
        docs_url=None,
        redoc_url=None,
    )
    app.state.manager = manager
    ProcessCollector(registry=manager.metrics.registry)
    app.state.server = ServerInfo([int(protocol.PROTOCOL_VERSION)], served.ids, max_body_bytes)
    access = Access(usable_token(token), loopback_only)
    app.add_middleware(Gate, access=access, max_body_bytes=max_body_bytes)
    for kind in (EnvError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer_error)
    # `include_router` would build every route again, which takes half a second.
    app.router.routes.extend(routes.router.routes)
    own_schema = app.openapi
    app.openapi = lambda: complete_schema(own_schema())
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Handles every exception: answers it as problem details."""
    if isinstance(error, EnvError):
        return problem(error)
    if isinstance(error, RequestValidationError):
        return problem(make_error("invalid_request", protocol.describe_problems(error.errors())))
    if isinstance(error, HTTPException) and error.status_code == 404:
        path = request.url.path[:200]
        return problem(make_error("not_found", f"there is no call {path}; /docs lists them"))
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = ", ".join(_methods_of(request))
        return problem(make_error("method_not_allowed", f"send {allowed}"), {"allow": allowed})
    # A bug in the server: it is raised again to the HTTP server, which logs its traceback.
    return problem(make_error("env_error", f"internal error: {type(error).__name__}"))


def _methods_of(request: Request) -> list[str]:
    """Returns the methods that the request's path accepts."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods
    return sorted(methods)
