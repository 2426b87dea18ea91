"""The wire: message types, problem details and the way between JSON and `agentrl.types`.

Requests refuse unknown fields; replies may grow. Every reply carries `Agentrl-Protocol: 1`.
Numbers travel as the shortest decimal that reads back to the same float, so an episode over HTTP
is bit for bit the episode in one process.
"""

from __future__ import annotations

import functools
import http
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from agentrl.errors import ConfigError, EnvError, EnvUnavailable, GraderError
from agentrl.types import Action, Message, StepResult, Task, ToolCall

PROTOCOL_HEADER = "Agentrl-Protocol"
PROTOCOL_VERSION = "1"
PROBLEM_TYPE = "application/problem+json"
TOKEN_VARIABLE = "AGENTRL_ENV_TOKEN"
MAX_DEPTH = 64
"""Deepest nesting of a request's JSON."""

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
    "payload_too_large": (413, False),
    "at_capacity": (429, True),
    "env_error": (500, False),
    "grader_error": (500, False),
    "draining": (503, True),
    "unavailable": (503, True),
    "step_timeout": (504, False),
    "reset_timeout": (504, False),
}
_UNAVAILABLE = ("at_capacity", "draining", "unavailable")
_WRONG_INPUT = ("invalid_request", "not_found", "unauthorized", "forbidden")
"""These end a command with status 2, as a ConfigError does."""


class TaskSpec(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Which task: `split` and `index`, or a whole task `inline`."""

    split: str | None = None
    index: Annotated[int, Meta(ge=0)] | None = None
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
    task: TaskSpec
    seed: int = 0
    config: dict[str, Any] = {}
    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    lease_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Deadline of the whole call."""


class SessionReply(Struct):
    id: str
    """128 random bits. Whoever knows it may step the session."""
    task_id: str
    lease_expires_at: float
    """Unix time, seconds."""
    lease_s: float
    step: int
    observation: list[dict[str, Any]]
    """The first prompt."""
    tools: list[dict[str, Any]]


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
    step: Annotated[int, Meta(ge=0)]
    """The step the session is at, as the client believes; a retry repeats it."""
    action: WireAction
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
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


class RenewRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    lease_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """None keeps the session's own."""


class SessionStatus(Struct):
    id: str
    env: str
    task_id: str
    step: int
    status: str
    """`live`; `ended`: the episode is over; `failed`: a step failed and no other will run."""
    lease_expires_at: float


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


class Problem(Struct, omit_defaults=True):
    """RFC 9457 problem details."""

    title: str
    status: int
    detail: str
    code: str
    retryable: bool = False
    retry_after_s: float | None = None


def make_error(code: str, message: str, *, retry_after_s: float | None = None) -> EnvError:
    """The exception of a problem code, the same on both sides of the wire."""
    status, retryable = PROBLEMS.get(code, (500, False))
    if code == "grader_error":
        return GraderError(message)
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
        tuple(ToolCall(call.id, call.name, call.arguments) for call in action.tool_calls),
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


def encode(message: Struct) -> bytes:
    """JSON bytes.

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
        check_depth(body)
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise make_error("invalid_request", f"{kind.__name__}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise make_error("invalid_request", f"the body is not valid JSON: {error}") from error


def decode_config(text: str | None) -> dict[str, Any]:
    """A configuration from a URL's query, where it is a JSON object.

    Raises:
        EnvError: `invalid_request`.
    """
    if text is None:
        return {}
    try:
        body = text.encode()
        check_depth(body)
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise make_error("invalid_request", f"config must be a JSON object: {error}") from error


def as_json(value: Any) -> Any:
    """A deep copy of a value as the wire would deliver it.

    Raises:
        TypeError: it holds something that is not JSON.
    """
    try:
        return msgspec.json.decode(_encoder.encode(value))
    except UnicodeEncodeError:
        return _without_surrogates(msgspec.to_builtins(value))


_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def check_depth(body: bytes) -> None:
    """Refuse JSON nested deeper than `MAX_DEPTH`.

    Raises:
        EnvError: `invalid_request`.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for token in _STRUCTURE.finditer(body):
        character = body[token.start()]
        if character in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise make_error(
                    "invalid_request", f"the body nests deeper than {MAX_DEPTH} levels"
                )
        elif character in b"]}":
            depth -= 1


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value
