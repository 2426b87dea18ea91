"""The wire: message types, problem details and the way between JSON and `agentrl.types`.

Requests refuse unknown fields; replies may grow. Every reply carries `Agentrl-Protocol: 1`.
Numbers travel as the shortest decimal that reads back to the same float, so an episode over HTTP
is bit for bit the episode in one process.

A call is an HTTP request or a *frame*: a JSON object `{"op": ..., "id": ..., "sid": ..., ...}` with
the request's fields beside it, answered by `{"id": ..., "ok": ...}` or `{"id": ..., "error": ...}`.
Many frames share one WebSocket message or one `POST /v1/batch`.
"""

from __future__ import annotations

import base64
import functools
import hmac
import http
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from agentrl.errors import ConfigError, EnvError, EnvUnavailable, GraderError, SessionLost
from agentrl.types import Action, Message, StepResult, Task, ToolCall

PROTOCOL_HEADER = "Agentrl-Protocol"
PROTOCOL_VERSION = "1"
SUBPROTOCOL = "agentrl.v1"
"""Of the WebSocket."""
PROBLEM_TYPE = "application/problem+json"
TOKEN_VARIABLE = "AGENTRL_ENV_TOKEN"
MAX_DEPTH = 64
"""Deepest nesting of a request's JSON."""
MAX_FRAMES = 1024
"""Frames in one message."""
MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""

PROBLEMS = {
    # code: (status, retryable)
    "invalid_request": (422, False),
    "unauthorized": (401, False),
    "forbidden": (403, False),
    "not_found": (404, False),
    "method_not_allowed": (405, False),
    "request_timeout": (408, True),
    "step_conflict": (409, False),
    "episode_done": (409, False),
    "idempotency_conflict": (409, False),
    "session_expired": (410, False),
    "session_lost": (410, False),
    "payload_too_large": (413, False),
    "too_many_frames": (413, False),
    "not_supported": (422, False),
    "at_capacity": (429, True),
    "env_error": (500, False),
    "grader_error": (500, False),
    "draining": (503, True),
    "unavailable": (503, True),
    "step_timeout": (504, False),
    "reset_timeout": (504, False),
}
_UNAVAILABLE = ("at_capacity", "draining", "unavailable")
_WRONG_INPUT = ("invalid_request", "not_supported", "not_found", "unauthorized", "forbidden")
"""These end a command with status 2, as a ConfigError does."""

Index = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, Meta(gt=0)]
LeaseSeconds = Annotated[float, Meta(gt=0, le=86_400)]


class TaskSpec(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Which task: `split` and `index`, or a whole task `inline`."""

    split: str | None = None
    index: Index | None = None
    inline: InlineTask | None = None

    def __post_init__(self) -> None:
        if (self.inline is None) == (self.split is None or self.index is None):
            raise ValueError("give either split and index, or inline")


class InlineTask(Struct, forbid_unknown_fields=True, omit_defaults=True):
    id: str
    prompt: str | list[dict[str, Any]]
    reference: Any = None
    metadata: dict[str, Any] = {}


class CreateRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Open `count` sessions on one task and seed, each reset and ready for its first step."""

    env: str
    task: TaskSpec | None = None
    seed: Seed = 0
    config: dict[str, Any] = {}
    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    lease_s: LeaseSeconds | None = None
    timeout_s: Seconds | None = None
    """Deadline of the whole call."""
    from_snapshot: str | None = None
    """In place of `task`: go on from there, with the snapshot's task, seed and configuration."""

    def __post_init__(self) -> None:
        if (self.task is None) == (self.from_snapshot is None):
            raise ValueError("give either task or from_snapshot")
        if self.from_snapshot is not None and (self.config or self.seed):
            raise ValueError("a fork has the snapshot's seed and config; leave them out")


class SessionReply(Struct):
    id: str
    """128 random bits."""
    task_id: str
    lease_expires_at: float
    """Unix time, seconds."""
    lease_s: float
    step: int
    observation: list[dict[str, Any]]
    """The first prompt; of a fork, all messages so far."""
    tools: list[dict[str, Any]]
    token: str = ""
    """Opens the calls of this session and nothing else, on a server that asks for tokens."""
    agent_token: str = ""
    """Opens `/v1/agent`: the tools of this session, and neither its rewards nor its resets."""


class CreateReply(Struct):
    sessions: list[SessionReply]


class WireCall(Struct, forbid_unknown_fields=True):
    id: str
    name: str
    arguments: dict[str, Any]


class WireAction(Struct, forbid_unknown_fields=True, omit_defaults=True):
    text: str = ""
    tool_calls: list[WireCall] = []
    parse_error: str | None = None


class StepRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    step: Index
    """The step the session is at, as the client believes; a retry repeats it."""
    action: WireAction
    timeout_s: Seconds | None = None
    last: bool = False
    """The agent gets no further turn: an episode that this step does not end is truncated."""


class StepReply(Struct):
    step: int
    """The step the session is at now."""
    observation: list[dict[str, Any]]
    reward: float
    terminated: bool
    truncated: bool
    reward_components: dict[str, float]
    info: dict[str, Any]
    metrics: dict[str, float]
    replayed: bool = False
    """The step had run before; this is the reply it gave then."""


class ResetRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Start another episode in the same session."""

    step: Index
    """The step the session is at; the new episode begins at the next one."""
    task: TaskSpec | None = None
    """None: the same task again."""
    seed: Seed | None = None
    """None: the same seed again."""
    timeout_s: Seconds | None = None


class SnapshotRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    step: Index
    """The step the session is at."""
    lease_s: LeaseSeconds | None = None
    """How long the server keeps it; every fork begins the lease anew."""


class SnapshotReply(Struct):
    snapshot: str
    """128 random bits: what `from_snapshot` takes."""
    step: int
    expires_at: float
    """Unix time, seconds."""


class RenewRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    lease_s: LeaseSeconds | None = None
    """None keeps the session's own."""


class SessionStatus(Struct):
    id: str
    env: str
    task_id: str
    step: int
    status: str
    """`live`; `ended`: the episode is over; `failed`: a step failed and no other will run."""
    lease_expires_at: float
    reward: float = 0.0
    """Of the episode so far."""
    last: StepReply | None = None
    """The reply of the step before, whoever took it: the agent itself may have."""


class EnvInfo(Struct):
    """An environment under one configuration."""

    id: str
    description: str
    tools: list[dict[str, Any]]
    splits: dict[str, int | None]
    """Tasks per split; None: generated without end."""
    config_schema: dict[str, Any]
    max_sessions: int
    """Live sessions it takes: of this environment in one process, or what a client of several
    servers found in all of them together."""
    cancel_safe: bool
    capabilities: list[str] = []
    """`snapshot`: its sessions can be forked."""


class EnvList(Struct):
    environments: list[str]


class TaskPreview(Struct):
    """A task as anyone may see it: never its reference, nor metadata that may hold it."""

    index: int
    id: str
    prompt: str | list[dict[str, Any]]


class TaskList(Struct):
    split: str
    tasks: list[TaskPreview]


class Health(Struct):
    status: str
    """`ok` or `draining`."""
    sessions: int
    """Live sessions."""
    hung_threads: int
    """Worker threads whose call passed its deadline and has not returned."""


class ServerInfo(Struct):
    protocol_versions: list[int]
    environments: list[str]
    workers: int
    """Processes. A client opens one WebSocket to each, `/v1/ws?worker=n`."""
    max_frames: int
    """Frames in one message."""
    max_body_bytes: int


class AgentTools(Struct):
    tools: list[dict[str, Any]]
    step: int


class AgentCall(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One tool call by the agent itself: a step of the session with that one call."""

    name: str
    arguments: dict[str, Any] = {}
    step: Index | None = None
    """The step the agent believes the session is at, which makes repeating the call safe. None
    takes the step as it is."""


class AgentReply(Struct):
    """What the agent may know: no reward, no info."""

    content: str
    """The tool's answer."""
    ended: bool
    step: int


class GymReset(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`POST /reset`: a new session of `env`, or another episode in `session`."""

    env: str | None = None
    session: str | None = None
    split: str | None = None
    index: Index | None = None
    task: TaskSpec | None = None
    seed: Seed | None = None
    config: dict[str, Any] = {}


class GymStep(Struct, forbid_unknown_fields=True, omit_defaults=True):
    session: str
    action: str | WireAction
    step: Index | None = None
    """None takes the step as it is, so that a repeated call is a second step."""


class GymReply(Struct):
    session: str
    observation: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    step: int


class Problem(Struct, omit_defaults=True):
    """RFC 9457 problem details."""

    title: str
    status: int
    detail: str
    code: str
    retryable: bool = False
    retry_after_s: float | None = None


class CreateFrame(CreateRequest, kw_only=True, tag_field="op", tag="create"):
    id: Index
    key: str | None = None
    """The idempotency key; a client that may repeat the frame sends one."""


class StepFrame(StepRequest, kw_only=True, tag_field="op", tag="step"):
    id: Index
    sid: str


class ResetFrame(ResetRequest, kw_only=True, tag_field="op", tag="reset"):
    id: Index
    sid: str


class SnapshotFrame(SnapshotRequest, kw_only=True, tag_field="op", tag="snapshot"):
    id: Index
    sid: str


class RenewFrame(RenewRequest, kw_only=True, tag_field="op", tag="renew"):
    id: Index
    sid: str


class StatusFrame(Struct, forbid_unknown_fields=True, tag_field="op", tag="status"):
    id: Index
    sid: str


class DeleteFrame(Struct, forbid_unknown_fields=True, tag_field="op", tag="delete"):
    id: Index
    sid: str


class InfoFrame(Struct, forbid_unknown_fields=True, omit_defaults=True, tag_field="op", tag="info"):
    id: Index
    env: str
    config: dict[str, Any] = {}
    timeout_s: Seconds | None = None


class PingFrame(Struct, forbid_unknown_fields=True, tag_field="op", tag="ping"):
    id: Index


Frame = (
    CreateFrame
    | StepFrame
    | ResetFrame
    | SnapshotFrame
    | RenewFrame
    | StatusFrame
    | DeleteFrame
    | InfoFrame
    | PingFrame
)


@dataclass(slots=True, frozen=True)
class FrameError:
    """A frame that could not be read."""

    id: int | None
    """None: not even its id."""
    error: EnvError


def make_error(code: str, message: str, *, retry_after_s: float | None = None) -> EnvError:
    """The exception of a problem code, the same on both sides of the wire."""
    status, retryable = PROBLEMS.get(code, (500, False))
    if code == "grader_error":
        return GraderError(message)
    if code == "session_lost":
        return SessionLost(message)
    if code in _UNAVAILABLE:
        error: EnvError = EnvUnavailable(message, retry_after_s=retry_after_s)
        error.code, error.status = code, status
        return error
    error = EnvError(
        message, code=code, status=status, retryable=retryable, retry_after_s=retry_after_s
    )
    if code in _WRONG_INPUT:
        error.exit_code = ConfigError.exit_code
    return error


def to_problem(error: EnvError) -> Problem:
    try:
        title = http.HTTPStatus(error.status).phrase
    except ValueError:
        title = "Error"
    return Problem(
        title, error.status, str(error), error.code, error.retryable, error.retry_after_s
    )


def from_problem(problem: Problem) -> EnvError:
    error = make_error(problem.code, problem.detail, retry_after_s=problem.retry_after_s)
    error.status, error.retryable = problem.status, problem.retryable
    return error


def to_wire_action(action: Action) -> WireAction:
    return WireAction(
        action.text,
        [WireCall(call.id, call.name, call.arguments) for call in action.tool_calls],
        action.parse_error,
    )


def from_wire_action(action: WireAction) -> Action:
    return Action(
        action.text,
        tuple([ToolCall(call.id, call.name, call.arguments) for call in action.tool_calls]),
        action.parse_error,
    )


def to_task_spec(task: Task) -> TaskSpec:
    prompt: Any = task.prompt
    return TaskSpec(inline=InlineTask(task.id, prompt, task.reference, task.metadata))


def from_inline(task: InlineTask) -> Task:
    prompt: Any = task.prompt
    return Task(task.id, prompt, task.reference, task.metadata)


def to_step_reply(result: StepResult, step: int) -> StepReply:
    observation: Any = result.observation
    return StepReply(
        step,
        observation,
        result.reward,
        result.terminated,
        result.truncated,
        result.reward_components,
        result.info,
        result.metrics,
    )


def from_step_reply(reply: StepReply) -> StepResult:
    observation: Any = reply.observation
    return StepResult(
        observation,
        reply.reward,
        reply.terminated,
        reply.truncated,
        reply.reward_components,
        reply.info,
        reply.metrics,
    )


def from_wire_messages(messages: list[dict[str, Any]]) -> list[Message]:
    checked: Any = messages
    return checked


S = TypeVar("S", bound=Struct)
_encoder = msgspec.json.Encoder()


@functools.cache
def _decoder(kind: type[Struct]) -> msgspec.json.Decoder:
    return msgspec.json.Decoder(kind)


def encode(message: object) -> bytes:
    """JSON bytes of a message, or of a list of them.

    A policy may write half of a surrogate pair, which UTF-8 cannot carry; it becomes U+FFFD.

    Raises:
        TypeError: the message holds something that is not JSON.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(msgspec.to_builtins(message)))


def decode_reply(body: bytes, kind: type[S]) -> S:
    """Read what a server sent.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    return _decoder(kind).decode(body)


def decode_request(body: bytes, kind: type[S]) -> S:
    """Read what a client sent.

    Raises:
        EnvError: `invalid_request`, naming the field.
    """
    try:
        request = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise make_error("invalid_request", f"{kind.__name__}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise make_error("invalid_request", f"the body is not valid JSON: {error}") from error
    except RecursionError:
        raise _too_deep("body") from None
    if _may_be_deep(body) and _is_deep(request):
        raise _too_deep("body")
    return request


_frames_decoder = msgspec.json.Decoder(list[Frame] | Frame)
_frame_decoder = msgspec.json.Decoder(Frame)
_raw_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class _AnyFrame(Struct):
    id: Index


def decode_frames(message: bytes | str) -> list[Frame | FrameError]:
    """Read a message: one frame, or an array of at most `MAX_FRAMES`. Never raises.

    A frame that is wrong in an array spoils only itself; a message that is no frame and no array
    is one `FrameError` without an id.
    """
    try:
        frames = _frames_decoder.decode(message)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _decode_one_by_one(message)
    if not isinstance(frames, list):
        frames = [frames]
    if len(frames) > MAX_FRAMES:
        return [_too_many(len(frames))]
    if not _may_be_deep(message):
        return list(frames)
    return [_shallow_or_error(frame) for frame in frames]


def _decode_one_by_one(message: bytes | str) -> list[Frame | FrameError]:
    try:
        body = message.encode() if isinstance(message, str) else message
        if body.lstrip()[:1] != b"[":
            return [_decode_frame(body)]
        parts = _raw_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        problem = make_error("invalid_request", f"the message is not valid JSON: {error}")
        return [FrameError(None, problem)]
    if len(parts) > MAX_FRAMES:
        return [_too_many(len(parts))]
    return [_decode_frame(bytes(part)) for part in parts]


def _decode_frame(body: bytes) -> Frame | FrameError:
    try:
        frame = _frame_decoder.decode(body)
    except msgspec.ValidationError as error:
        return FrameError(_frame_id(body), make_error("invalid_request", f"frame: {error}"))
    except (msgspec.DecodeError, UnicodeError) as error:
        problem = make_error("invalid_request", f"the message is not valid JSON: {error}")
        return FrameError(None, problem)
    except RecursionError:
        return FrameError(None, _too_deep("frame"))
    return _shallow_or_error(frame) if _may_be_deep(body) else frame


def _frame_id(body: bytes) -> int | None:
    try:
        return _decoder(_AnyFrame).decode(body).id
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _too_many(count: int) -> FrameError:
    message = f"{count} frames in one message; send at most {MAX_FRAMES}"
    return FrameError(None, make_error("too_many_frames", message))


def _shallow_or_error(frame: Frame) -> Frame | FrameError:
    if not _is_deep(frame):
        return frame
    return FrameError(frame.id, _too_deep("frame"))


def _too_deep(what: str) -> EnvError:
    return make_error("invalid_request", f"the {what} nests deeper than {MAX_DEPTH} levels")


def _may_be_deep(text: bytes | str) -> bool:
    """False where brackets are too few for it, as in nearly every step."""
    if len(text) > 2**16:  # counting would take milliseconds
        return True
    if isinstance(text, str):
        return text.count("{") + text.count("[") > MAX_DEPTH
    return text.count(b"{") + text.count(b"[") > MAX_DEPTH


def _is_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether dicts, lists and structs nest deeper than so many levels, the value's own included.

    What was decoded is looked at, and not the text, which takes longer to follow than to decode;
    the decoder itself ends at Python's recursion limit.
    """
    if levels <= 0:
        return True
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    for item in value:
        if isinstance(item, dict | list | Struct) and _is_deep(item, levels - 1):
            return True
    return False


def ok_frame(id: int, body: bytes) -> bytes:
    """The reply frame around a reply that is JSON already."""
    return b'{"id":%d,"ok":%b}' % (id, body)


def error_frame(id: int | None, error: EnvError) -> bytes:
    body = encode(to_problem(error))
    return b'{"id":%b,"error":%b}' % (b"null" if id is None else b"%d" % id, body)


def to_create_request(frame: CreateFrame) -> CreateRequest:
    return CreateRequest(
        frame.env,
        frame.task,
        frame.seed,
        frame.config,
        frame.count,
        frame.lease_s,
        frame.timeout_s,
        frame.from_snapshot,
    )


def to_step_request(frame: StepFrame) -> StepRequest:
    """The frame itself: it is the request with two fields more."""
    return frame


def to_reset_request(frame: ResetFrame) -> ResetRequest:
    return frame


def to_snapshot_request(frame: SnapshotFrame) -> SnapshotRequest:
    return frame


def session_token(secret: bytes, session_id: str) -> str:
    """What opens the calls of one session, and only them."""
    return _mac(secret, "session:" + session_id)


def agent_token(secret: bytes, session_id: str) -> str:
    """What opens the agent plane of one session. It names the session: `id.mac`."""
    return f"{session_id}.{_mac(secret, 'agent:' + session_id)}"


def agent_session(secret: bytes, token: str) -> str | None:
    """The session that an agent token opens; None if it is no agent token of this server."""
    session_id, dot, _ = token.rpartition(".")
    if dot and hmac.compare_digest(token.encode(), agent_token(secret, session_id).encode()):
        return session_id
    return None


def _mac(secret: bytes, text: str) -> str:
    digest = hmac.digest(secret, text.encode("utf-8", "replace"), "sha256")
    return base64.urlsafe_b64encode(digest[:16]).rstrip(b"=").decode()


def decode_config(text: str | None) -> dict[str, Any]:
    """A configuration from a URL's query, where it is a JSON object.

    Raises:
        EnvError: `invalid_request`.
    """
    if text is None:
        return {}
    try:
        config = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise make_error("invalid_request", f"config must be a JSON object: {error}") from error
    except RecursionError:
        raise _too_deep("config") from None
    if _is_deep(config):
        raise _too_deep("config")
    return config


def as_json(value: Any) -> Any:
    """A deep copy of a value as the wire would deliver it.

    Raises:
        TypeError: it holds something that is not JSON.
    """
    try:
        return msgspec.json.decode(_encoder.encode(value))
    except UnicodeEncodeError:
        return _without_surrogates(msgspec.to_builtins(value))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value
