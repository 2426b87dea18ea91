"""Answers the HTTP calls, one function each, from the objects in `app.state`.

`protocol` decodes bodies and encodes replies, as it does for the client in the same process;
FastAPI uses their types only for the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from agentrl.env import protocol
from agentrl.env.server.gate import Reply
from agentrl.env.sessions.manager import SessionManager
from agentrl.types import Action

MAX_TASKS = 1000
"""Most tasks in one reply."""


class Call(APIRoute):
    """A route whose body is one message, decoded by `protocol.decode`.

    FastAPI's own decoding is less strict and takes several times as long.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.body_field is not None:
            self._message: type = self.body_field.field_info.annotation  # type: ignore[assignment]
            self._has_key = bool(self.dependant.header_params)
            self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]  # the whole body, which `Gate` has read
        headers = dict(scope["headers"])
        if body and not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
            raise protocol.make_error(
                "invalid_request", "send the body as Content-Type: application/json"
            )
        values = scope["path_params"]
        if self._has_key and b"idempotency-key" in headers:
            values["idempotency_key"] = headers[b"idempotency-key"].decode("latin-1")
        request = protocol.decode(body or b"{}", self._message)
        manager = scope["app"].state.manager
        reply = await self.endpoint(request=request, manager=manager, **values)
        await reply(scope, receive, send)


_PROBLEM: dict[str, Any] = {
    "description": "problem details",
    "content": {protocol.PROBLEM_TYPE: {"schema": TypeAdapter(protocol.Problem).json_schema()}},
}
router = APIRouter(responses={"4XX": _PROBLEM, "5XX": _PROBLEM}, route_class=Call)


class PlainText(Response):
    media_type = CONTENT_TYPE_LATEST


def _reply(message: object, status: int = 200) -> Reply:
    return Reply(protocol.encode(message), status)


async def _manager(request: Request) -> SessionManager:
    return request.app.state.manager


Manager = Annotated[SessionManager, Depends(_manager)]


# Sessions


@router.post("/v1/sessions/{session_id}/step", response_model=protocol.StepReply)
async def step(session_id: str, request: protocol.StepRequest, manager: Manager) -> Response:
    """Take one step, exactly once."""
    return Reply(await manager.step(session_id, request))


@router.post("/v1/sessions", status_code=201, response_model=protocol.CreateReply)
async def create(
    request: protocol.CreateRequest,
    manager: Manager,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    """Open and reset a session, once per Idempotency-Key."""
    return _reply(await manager.create(request, idempotency_key), 201)


@router.get("/v1/sessions/{session_id}", response_model=protocol.SessionStatus)
async def status(session_id: str, manager: Manager) -> Response:
    """Return the step and the state of a session."""
    return _reply(manager.status(session_id))


@router.delete("/v1/sessions/{session_id}", status_code=204)
async def delete(session_id: str, manager: Manager) -> Response:
    """Close a session. Closing it again is not an error."""
    manager.delete(session_id)
    return Reply(status=204)


@router.post("/v1/sessions/{session_id}/renew", response_model=protocol.SessionStatus)
async def renew(session_id: str, manager: Manager, request: protocol.RenewRequest) -> Response:
    """Renew the lease of a session."""
    return _reply(manager.renew(session_id, request.lease_s))


# Environments

Config = Annotated[
    str | None,
    Query(description="a JSON object: the configuration's values that differ from the server's"),
]
Position = Annotated[int, Query(ge=0, le=protocol.MAX_INTEGER)]


@router.get("/v1/server", response_model=protocol.ServerInfo)
async def server_info(request: Request) -> Response:
    """Return the protocol versions and limits of the server."""
    return _reply(request.app.state.server)


@router.get("/v1/envs", response_model=protocol.EnvList)
async def environments(request: Request) -> Response:
    """List the environments served here."""
    return _reply(protocol.EnvList(request.app.state.server.environments))


# `:path`, because an environment's name may be `path/to/env.py:Class`.
@router.get("/v1/envs/{env_id:path}/tasks", response_model=protocol.TaskList)
async def tasks(
    env_id: str,
    manager: Manager,
    split: str,
    start: Position = 0,
    stop: Position | None = None,
    config: Config = None,
) -> Response:
    """List ids and prompts of tasks of a split: 20 of them unless `stop` is given."""
    stop = start + 20 if stop is None else stop
    if stop - start > MAX_TASKS:
        raise protocol.make_error("invalid_request", f"ask for at most {MAX_TASKS} tasks at a time")
    rows, differing = range(start, stop), protocol.decode_config(config)
    previews = await manager.environments.preview(env_id, split, rows, differing)
    return _reply(protocol.TaskList(split, previews))


@router.get("/v1/envs/{env_id:path}", response_model=protocol.EnvInfo)
async def environment(
    env_id: str,
    manager: Manager,
    config: Config = None,
    timeout_s: Annotated[
        float | None,
        Query(
            gt=0,
            allow_inf_nan=False,
            description="seconds to wait for it to load, such as a dataset",
        ),
    ] = None,
) -> Response:
    """Load an environment under a configuration and describe it."""
    return _reply(await manager.info(env_id, protocol.decode_config(config), timeout_s))


# Gym's reset and step, for trying an environment with curl


@router.post("/reset", response_model=protocol.GymReply)
async def gym_reset(request: protocol.GymReset, manager: Manager) -> Response:
    """Open a session as in Gym, for example with curl."""
    try:
        task = protocol.TaskSpec(request.split, request.index, request.task)
    except ValueError:
        message = "GymReset: give either `split` and `index`, or `task`"
        raise protocol.make_error("invalid_request", message) from None
    create = protocol.CreateRequest(request.env, task, request.seed, request.config)
    opened = (await manager.create(create)).sessions[0]
    return _reply(protocol.GymReply(opened.id, opened.observation, opened.tools, opened.step))


@router.post("/step", response_model=protocol.StepReply)
async def gym_step(request: protocol.GymStep, manager: Manager) -> Response:
    """Take a step as in Gym. Without `step`, a repeated call takes another step."""
    action = request.action
    if isinstance(action, str):
        action = Action(action)
    at = manager.status(request.session).step if request.step is None else request.step
    return Reply(await manager.step(request.session, protocol.StepRequest(at, action)))


# The process


@router.get("/healthz", response_model=protocol.Health)
async def healthz(manager: Manager) -> Response:
    """Answer while the process is alive."""
    state = "draining" if manager.draining else "ok"
    return _reply(protocol.Health(state, manager.num_live, manager.num_hung))


@router.get("/readyz", response_model=protocol.Health)
async def readyz(manager: Manager) -> Response:
    """Answer 200 if the process should get new sessions, else the error `unavailable`."""
    reason = manager.readiness()
    if reason is not None:
        raise protocol.make_error("unavailable", reason, retry_after_s=5.0)
    return await healthz(manager)


@router.get("/metrics", response_class=PlainText)
async def metrics(manager: Manager) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Reply(manager.metrics_text(), media_type=CONTENT_TYPE_LATEST)
