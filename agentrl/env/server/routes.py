"""The HTTP calls: one function each, and the table that both the server and `/openapi.json` follow.

A function gets the server's state and the call, already read and checked, and returns the reply's
JSON (or text). Whatever is wrong is an `EnvError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from agentrl.env import protocol
from agentrl.env.protocol import FrameError, Index, Seconds, make_error
from agentrl.env.server.access import Grant, check_frame
from agentrl.env.server.metrics import MEDIA_TYPE as METRICS_TYPE
from agentrl.env.server.metrics import Metrics
from agentrl.env.server.websocket import reply_frame
from agentrl.env.session.manager import SessionManager
from agentrl.errors import EnvError

JSON_TYPE = "application/json"
MAX_TASKS = 1000
"""Tasks in one listing."""


@dataclass(slots=True, frozen=True)
class Service:
    """What the calls are about."""

    manager: SessionManager
    metrics: Metrics
    info: protocol.ServerInfo


@dataclass(slots=True, frozen=True)
class Call:
    """One request, after it was read."""

    id: str
    """The session or environment that the path names; empty where it names none."""
    body: Any
    """Decoded, of the operation's `request` type; raw bytes where that is None."""
    query: Any
    """Decoded, of the operation's `query` type."""
    headers: Mapping[bytes, bytes]
    grant: Grant


@dataclass(slots=True, frozen=True)
class Operation:
    method: str
    path: str
    handler: Callable[[Service, Call], Awaitable[bytes]]
    summary: str
    request: type[Struct] | None = None
    optional_body: bool = False
    """An empty body stands for `{}`."""
    raw_body: bool = False
    """The handler decodes it."""
    query: type[Struct] | None = None
    reply: type[Struct] | None = None
    status: int = 200
    media_type: str = JSON_TYPE
    errors: Sequence[str] = ()
    """Problem codes beside those that any call may meet."""


class InfoQuery(Struct):
    config: Annotated[
        str | None,
        Meta(description="a JSON object: the configuration, where it differs from the server's"),
    ] = None
    timeout_s: Annotated[
        Seconds | None,
        Meta(description="how long to wait for what the configuration loads, such as a dataset"),
    ] = None


class TasksQuery(Struct):
    split: str
    start: Index = 0
    stop: Index | None = None
    config: Annotated[
        str | None,
        Meta(description="a JSON object: the configuration, where it differs from the server's"),
    ] = None


class FramesQuery(Struct):
    sid: Annotated[
        str | None, Meta(description="the one session of a call that a session token opens")
    ] = None


class SocketQuery(FramesQuery):
    worker: Annotated[
        Index | None, Meta(description="which of the server's `workers` the socket is to reach")
    ] = None


# Sessions


async def create(service: Service, call: Call) -> bytes:
    header = call.headers.get(b"idempotency-key")
    key = None if header is None else header.decode("latin-1")
    return protocol.encode(await service.manager.create(call.body, key))


async def step(service: Service, call: Call) -> bytes:
    return await service.manager.step(call.id, call.body)


async def reset(service: Service, call: Call) -> bytes:
    return protocol.encode(await service.manager.reset(call.id, call.body))


async def snapshot(service: Service, call: Call) -> bytes:
    return protocol.encode(await service.manager.snapshot(call.id, call.body))


async def renew(service: Service, call: Call) -> bytes:
    return protocol.encode(service.manager.renew(call.id, call.body.lease_s))


async def status(service: Service, call: Call) -> bytes:
    return protocol.encode(service.manager.status(call.id))


async def delete(service: Service, call: Call) -> bytes:
    service.manager.delete(call.id)
    return b""


async def batch(service: Service, call: Call) -> bytes:
    """Begin all frames, then wait for all: one that fails spoils no other."""
    try:
        msgspec.json.decode(call.body, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise make_error("invalid_request", f"send a JSON array of frames: {error}") from error
    frames = protocol.decode_frames(call.body)
    replies: list[bytes | tuple[int, asyncio.Future[bytes]]] = []
    for frame in frames:
        if isinstance(frame, FrameError):
            if frame.error.code == "too_many_frames":
                raise frame.error
            replies.append(protocol.error_frame(frame.id, frame.error))
            continue
        try:
            refused = check_frame(call.grant, getattr(frame, "sid", None))
            if refused is not None:
                raise refused
            replies.append((frame.id, service.manager.handle(frame)))
        except EnvError as error:
            replies.append(protocol.error_frame(frame.id, error))
    pending = [reply[1] for reply in replies if isinstance(reply, tuple)]
    if pending:
        await asyncio.wait(pending)
    parts = [each if isinstance(each, bytes) else reply_frame(*each) for each in replies]
    return b"[" + b",".join(parts) + b"]"


# Environments and the server


async def environment_list(service: Service, call: Call) -> bytes:
    return protocol.encode(protocol.EnvList(service.info.environments))


async def environment(service: Service, call: Call) -> bytes:
    query: InfoQuery = call.query
    config = protocol.decode_config(query.config)
    return protocol.encode(await service.manager.info(call.id, config, query.timeout_s))


async def tasks(service: Service, call: Call) -> bytes:
    query: TasksQuery = call.query
    stop = query.start + 20 if query.stop is None else query.stop
    if stop - query.start > MAX_TASKS:
        raise make_error("invalid_request", f"ask for at most {MAX_TASKS} tasks at a time")
    config = protocol.decode_config(query.config)
    previews = await service.manager.preview(call.id, query.split, query.start, stop, config)
    return protocol.encode(protocol.TaskList(query.split, previews))


async def server(service: Service, call: Call) -> bytes:
    return protocol.encode(service.info)


async def healthz(service: Service, call: Call) -> bytes:
    manager = service.manager
    state = "draining" if manager.draining else "ok"
    return protocol.encode(protocol.Health(state, manager.num_live, manager.workers.num_abandoned))


async def readyz(service: Service, call: Call) -> bytes:
    reason = service.manager.readiness()
    if reason is not None:
        raise make_error("unavailable", reason, retry_after_s=5.0)
    return await healthz(service, call)


async def metrics(service: Service, call: Call) -> bytes:
    return service.metrics.text()


# The agent's own calls


async def agent_tools(service: Service, call: Call) -> bytes:
    return protocol.encode(service.manager.agent_tools(_own(call)))


async def agent_call(service: Service, call: Call) -> bytes:
    return protocol.encode(await service.manager.agent_call(_own(call), call.body))


def _own(call: Call) -> str:
    assert call.grant.session is not None  # `access` lets nothing else pass
    return call.grant.session


# As in Gym, for trying an environment with curl


async def gym_reset(service: Service, call: Call) -> bytes:
    body: protocol.GymReset = call.body
    task = _gym_task(body)
    if body.session is None:
        if body.env is None or task is None:
            raise make_error("invalid_request", "give env and a task, or a session to reset")
        request = protocol.CreateRequest(body.env, task, body.seed or 0, body.config)
        opened = (await service.manager.create(request)).sessions[0]
    else:
        if body.env is not None or body.config:
            raise make_error(
                "invalid_request", "a session keeps its env and config; leave them out"
            )
        at = service.manager.status(body.session).step
        again = protocol.ResetRequest(at, task, body.seed)
        opened = await service.manager.reset(body.session, again)
    return protocol.encode(
        protocol.GymReply(opened.id, opened.observation, opened.tools, opened.step)
    )


def _gym_task(body: protocol.GymReset) -> protocol.TaskSpec | None:
    if body.split is None and body.index is None:
        return body.task
    if body.task is not None or body.split is None or body.index is None:
        raise make_error("invalid_request", "give either split and index, or task")
    return protocol.TaskSpec(body.split, body.index)


async def gym_step(service: Service, call: Call) -> bytes:
    body: protocol.GymStep = call.body
    action = body.action
    if isinstance(action, str):
        action = protocol.WireAction(action)
    at = service.manager.status(body.session).step if body.step is None else body.step
    return await service.manager.step(body.session, protocol.StepRequest(at, action))


_OF_SESSION = ("not_found", "session_expired", "session_lost")
_OF_STEP = (*_OF_SESSION, "step_conflict", "episode_done", "env_error", "grader_error")
_OF_STEP = (*_OF_STEP, "step_timeout", "unavailable", "at_capacity")
_OF_LOADING = ("not_found", "env_error", "unavailable", "at_capacity", "reset_timeout")
_OF_CREATION = (*_OF_LOADING, "grader_error", "idempotency_conflict", "draining")
_OF_CREATION = (*_OF_CREATION, "session_expired", "not_supported")
_OF_RESET = (*_OF_STEP, "reset_timeout", "draining")

OPERATIONS = (
    Operation(
        "POST",
        "/v1/sessions/{session_id}/step",
        step,
        "Take one step, exactly once",
        request=protocol.StepRequest,
        reply=protocol.StepReply,
        errors=_OF_STEP,
    ),
    Operation(
        "POST",
        "/v1/sessions",
        create,
        "Open and reset a group of sessions, or fork them from a snapshot",
        request=protocol.CreateRequest,
        reply=protocol.CreateReply,
        status=201,
        errors=_OF_CREATION,
    ),
    Operation(
        "GET",
        "/v1/sessions/{session_id}",
        status,
        "Where a session is",
        reply=protocol.SessionStatus,
        errors=_OF_SESSION,
    ),
    Operation(
        "DELETE",
        "/v1/sessions/{session_id}",
        delete,
        "Close a session; closing it again is no error",
        status=204,
        errors=_OF_SESSION,
    ),
    Operation(
        "POST",
        "/v1/sessions/{session_id}/reset",
        reset,
        "Start another episode in the session, exactly once",
        request=protocol.ResetRequest,
        reply=protocol.SessionReply,
        errors=_OF_RESET,
    ),
    Operation(
        "POST",
        "/v1/sessions/{session_id}/snapshot",
        snapshot,
        "Keep the episode as it is, for forks",
        request=protocol.SnapshotRequest,
        reply=protocol.SnapshotReply,
        errors=(*_OF_STEP, "not_supported"),
    ),
    Operation(
        "POST",
        "/v1/sessions/{session_id}/renew",
        renew,
        "Hold a session that has nothing to do yet",
        request=protocol.RenewRequest,
        optional_body=True,
        reply=protocol.SessionStatus,
        errors=_OF_SESSION,
    ),
    Operation(
        "POST",
        "/v1/batch",
        batch,
        "Many calls at once: an array of frames, answered in its order",
        raw_body=True,
        query=FramesQuery,
        errors=("too_many_frames",),
    ),
    Operation(
        "GET",
        "/v1/envs",
        environment_list,
        "The environments served here",
        reply=protocol.EnvList,
    ),
    Operation(
        "GET",
        "/v1/envs/{env_id}",
        environment,
        "An environment under a configuration, which is loaded",
        query=InfoQuery,
        reply=protocol.EnvInfo,
        errors=_OF_LOADING,
    ),
    Operation(
        "GET",
        "/v1/envs/{env_id}/tasks",
        tasks,
        "Tasks of a split, without what would give their answers away",
        query=TasksQuery,
        reply=protocol.TaskList,
        errors=_OF_LOADING,
    ),
    Operation(
        "GET",
        "/v1/server",
        server,
        "What the server speaks, and its limits",
        reply=protocol.ServerInfo,
    ),
    Operation(
        "GET",
        "/v1/agent/tools",
        agent_tools,
        "The tools of the agent token's session",
        reply=protocol.AgentTools,
        errors=_OF_SESSION,
    ),
    Operation(
        "POST",
        "/v1/agent/call",
        agent_call,
        "Call a tool as a step of the agent token's session",
        request=protocol.AgentCall,
        reply=protocol.AgentReply,
        errors=_OF_STEP,
    ),
    Operation(
        "POST",
        "/reset",
        gym_reset,
        "Open a session, or start another episode in one",
        request=protocol.GymReset,
        reply=protocol.GymReply,
        errors=(*_OF_RESET, *_OF_CREATION),
    ),
    Operation(
        "POST",
        "/step",
        gym_step,
        "Take a step in a session; without `step` a repetition is a second step",
        request=protocol.GymStep,
        reply=protocol.StepReply,
        errors=_OF_STEP,
    ),
    Operation("GET", "/healthz", healthz, "Whether the process lives", reply=protocol.Health),
    Operation(
        "GET",
        "/readyz",
        readyz,
        "Whether the process should get new sessions",
        reply=protocol.Health,
        errors=("unavailable",),
    ),
    Operation("GET", "/metrics", metrics, "Prometheus text", media_type=METRICS_TYPE),
)
