"""Makes the server's FastAPI application: HTTP calls in front of a `SessionManager`.

    routes.py      the calls
    gate.py        what surrounds a call: access, limits on bodies, errors
    access.py      checks of host, origin, token and protocol version
    serve.py       the HTTP server that runs the application
    supervisor.py  several such servers

Every error is an `EnvError`, or becomes one, and is answered as problem details (RFC 9457).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from prometheus_client import ProcessCollector

from agentrl.env import protocol
from agentrl.env.base import Environment
from agentrl.env.protocol import ServerInfo
from agentrl.env.registry import Served
from agentrl.env.server import routes
from agentrl.env.server.access import Access, usable_token
from agentrl.env.server.gate import MAX_BODY_BYTES, Gate
from agentrl.env.sessions.capacity import MAX_WAIT_S
from agentrl.env.sessions.manager import SessionManager
from agentrl.env.threads import MAX_THREADS
from agentrl.types import JSON

_CODES = ", ".join(f"`{code}` ({status})" for code, (status, _) in protocol.PROBLEMS.items())
_DESCRIPTION = f"""\
Serves environments for language-model agents in sessions. `POST /v1/sessions` opens a session,
`POST /v1/sessions/{{id}}/step` takes a step in it, exactly once. Every reply of a call has the
header `{protocol.PROTOCOL_HEADER}: {protocol.PROTOCOL_VERSION}`. Errors are answered as
`{protocol.PROBLEM_TYPE}` (RFC 9457): `code` names the error, and `retryable` is true if the same
call may succeed later. The codes are {_CODES}. Send bodies as `Content-Type: application/json`, and
the token of a server that has one as `Authorization: Bearer ...`."""


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
        max_sessions: as for `SessionManager`, like worker_threads, config, max_wait_s and name.
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
        description=_DESCRIPTION,
        version=protocol.PROTOCOL_VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
    )
    app.state.manager = manager
    ProcessCollector(registry=manager.metrics.registry)
    app.state.server = ServerInfo([int(protocol.PROTOCOL_VERSION)], served.ids, max_body_bytes)
    access = Access(usable_token(token), loopback_only)
    # Instead of Starlette's layers, which do the same in more calls; FastAPI's routes need the one.
    routed = AsyncExitStackMiddleware(app.router)
    app.middleware_stack = Gate(routed, access, max_body_bytes)
    # `include_router` would build every route again, which takes half a second.
    app.router.routes[:0] = routes.router.routes
    return app
