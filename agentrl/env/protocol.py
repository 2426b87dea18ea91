"""The wire: what is sent, problem details, and how messages become JSON and come back.

The messages are plain dataclasses, read by pydantic. Requests refuse unknown fields and take no
value for another ("1" is no integer); replies may grow. Every reply carries `Agentrl-Protocol: 1`.
Numbers travel as the shortest decimal that reads back to the same float, so an episode over HTTP
is bit for bit the episode in one process.
"""

from __future__ import annotations

import functools
import http
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import ConfigDict, Field, StrictBool, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json

from agentrl.errors import ConfigError, EnvError, EnvUnavailable, GraderError, SessionLost
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolSpec

PROTOCOL_HEADER = "Agentrl-Protocol"
PROTOCOL_VERSION = "1"
PROBLEM_TYPE = "application/problem+json"
TOKEN_VARIABLE = "AGENTRL_ENV_TOKEN"
MAX_DEPTH = 64
"""Deepest nesting of a message's JSON."""
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

# The numbers of requests are strict one by one, and not by their class, because a strict class
# would refuse the dictionaries that a web framework hands to pydantic.
Index = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
One = Annotated[int, Field(strict=True, ge=1, le=1)]
Turns = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
LeaseSeconds = Annotated[float, Field(strict=True, gt=0, le=86_400)]

_request = with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
_reply = with_config(ConfigDict(use_attribute_docstrings=True))


@_request
@dataclass(slots=True, frozen=True)
class TaskSpec:
    """Which task: `split` and `index`, or a whole task `inline`."""

    split: str | None = None
    index: Index | None = None
    inline: Task | None = None

    def __post_init__(self) -> None:
        by_index = self.split is not None and self.index is not None
        if by_index == (self.inline is not None) or (self.split is None) != (self.index is None):
            raise ValueError("give either split and index, or inline")


@_request
@dataclass(slots=True, frozen=True)
class CreateRequest:
    """Open a session on a task and a seed, reset and ready for its first step."""

    env: str
    task: TaskSpec
    seed: Seed = 0
    config: dict[str, JSON] = field(default_factory=dict)
    count: One = 1
    """A group of episodes is as many calls."""
    lease_s: LeaseSeconds | None = None
    """How long a session lives without a call; 300 if None."""
    timeout_s: Seconds | None = None
    """Deadline of the whole call; the environment's own if None."""
    max_turns: Turns | None = None
    """Turns that the agent gets at most, for an environment that tells it how many are left."""


@_reply
@dataclass(slots=True)
class SessionReply:
    id: str
    """128 random bits."""
    task_id: str
    lease_expires_at: float
    """Unix time, seconds."""
    lease_s: float
    step: int
    observation: list[Message]
    """The first prompt."""
    tools: list[ToolSpec]
    """What the agent may call in its first turn."""


@_reply
@dataclass(slots=True)
class CreateReply:
    sessions: list[SessionReply]


@_request
@dataclass(slots=True, frozen=True)
class StepRequest:
    step: Index
    """The step the session is at, as the client believes; a retry repeats it."""
    action: Action
    timeout_s: Seconds | None = None
    """Deadline of the step; the environment's own if None."""
    last: StrictBool = False
    """The agent gets no further turn: an episode that this step does not end is truncated."""


@_reply
@dataclass(slots=True, kw_only=True)
class StepReply(StepResult):
    """Holds what the environment answered, and the step that the session is at."""

    step: int
    """The step the session is at now."""
    replayed: bool = False
    """The step had run before; this is the reply it gave then."""
    tools: list[ToolSpec] | None = None
    """What the agent may call from now on; None: the same as in the turn before."""


@_request
@dataclass(slots=True, frozen=True)
class RenewRequest:
    lease_s: LeaseSeconds | None = None
    """None keeps the session's own."""


@_reply
@dataclass(slots=True)
class SessionStatus:
    id: str
    env: str
    task_id: str
    step: int
    status: str
    """`live`; `ended`: the episode is over; `failed`: a step failed and no other will run."""
    lease_expires_at: float
    """Unix time, seconds."""
    reward: float = 0.0
    """Of the episode so far."""
    last: StepReply | None = None
    """The reply of the last step that succeeded."""


@_reply
@dataclass(slots=True)
class EnvInfo:
    """An environment under one configuration."""

    id: str
    description: str
    tools: list[ToolSpec]
    """What it offers before a task is known; a session's own tools may differ."""
    splits: dict[str, int | None]
    """Tasks per split; None: generated without end."""
    config_schema: dict[str, JSON]
    max_sessions: int
    """Live sessions it takes: of this environment in one process, or what a client of several
    servers found in all of them together."""


@_reply
@dataclass(slots=True)
class EnvList:
    environments: list[str]


@_reply
@dataclass(slots=True)
class TaskPreview:
    """A task as anyone may see it: never its reference, nor metadata that may hold it."""

    index: int
    id: str
    prompt: str | list[Message]


@_reply
@dataclass(slots=True)
class TaskList:
    split: str
    tasks: list[TaskPreview]


@_reply
@dataclass(slots=True)
class Health:
    status: str
    """`ok` or `draining`."""
    sessions: int
    """Live sessions."""
    hung_threads: int
    """Worker threads whose call passed its deadline and has not returned."""


@_reply
@dataclass(slots=True)
class ServerInfo:
    protocol_versions: list[int]
    environments: list[str]
    max_body_bytes: int


@_request
@dataclass(slots=True, frozen=True)
class GymReset:
    """`POST /reset`: a new session, of one task of a split or of a task of the caller's."""

    env: str
    split: str | None = None
    index: Index | None = None
    task: Task | None = None
    seed: Seed = 0
    config: dict[str, JSON] = field(default_factory=dict)


@_request
@dataclass(slots=True, frozen=True)
class GymStep:
    """`POST /step`."""

    session: str
    action: str | Action
    """A text, or a whole action."""
    step: Index | None = None
    """None takes the step as it is, so that a repeated call is a second step."""


@_reply
@dataclass(slots=True)
class GymReply:
    session: str
    observation: list[Message]
    tools: list[ToolSpec]
    step: int


@_reply
@dataclass(slots=True)
class Problem:
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


T = TypeVar("T")


def encode(message: object) -> bytes:
    """JSON bytes of a dataclass or a JSON value.

    A policy may write half of a surrogate pair, which UTF-8 cannot carry; it becomes U+FFFD.

    Raises:
        TypeError: the message holds something that is not JSON.
    """
    try:
        return orjson.dumps(message)
    except TypeError:  # not JSON; or a lone surrogate, a large integer, a key that is a number
        return json.dumps(_plain(message), ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """The slow way to what `json` can encode."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return value


def decode(body: bytes, kind: type[T]) -> T:
    """Read a message.

    Raises:
        EnvError: `invalid_request`: it is not JSON, nests deeper than `MAX_DEPTH`, or is something
            else; the message names the field.
    """
    check_json(body)
    try:
        return _adapter(kind).validator.validate_json(body, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        if problems[0]["type"] == "json_invalid":
            raise _not_json(problems[0]["msg"].removeprefix("Invalid JSON: ")) from None
        message = f"{kind.__name__}: {describe_problems(problems)}"
        raise make_error("invalid_request", message) from None


def decode_config(text: str | None) -> dict[str, JSON]:
    """A configuration from a URL's query, where it is a JSON object.

    Raises:
        EnvError: `invalid_request`.
    """
    try:
        return {} if text is None else decode(text.encode("utf-8", "replace"), dict[str, JSON])
    except EnvError as error:
        raise make_error("invalid_request", f"config must be a JSON object: {error}") from error


def as_json(value: Any) -> Any:
    """A deep copy of a value as the wire would deliver it.

    Raises:
        TypeError: it holds something that is not JSON.
    """
    return from_json(encode(value))


@functools.cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def check_json(body: bytes) -> None:
    """Refuse what readers of JSON let through: NaN, which is not JSON, and deep nesting.

    Raises:
        EnvError: `invalid_request`.
    """
    if (
        body.count(b"{") + body.count(b"[") <= MAX_DEPTH
        and b"NaN" not in body
        and b"Infinity" not in body
    ):
        return
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _not_json(str(error)) from None
    if _is_deep(value, MAX_DEPTH):
        raise make_error("invalid_request", f"the JSON nests deeper than {MAX_DEPTH} levels")


def _not_json(why: str) -> EnvError:
    return make_error("invalid_request", f"the body is not valid JSON: {why}")


def _is_deep(value: Any, levels: int) -> bool:
    """Tells whether dicts and lists nest deeper than `levels`, the value's own level included."""
    if levels <= 0:
        return isinstance(value, dict | list)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(each, dict | list) and _is_deep(each, levels - 1) for each in items)


_MESSAGES = {
    "unexpected_keyword_argument": "there is no such field",
    "missing": "this field is required",
}


def describe_problems(problems: Sequence[Any]) -> str:
    """Says what pydantic found wrong, each with the name of its field; three at most."""
    return "; ".join(_describe(problem) for problem in problems[:3])


def _describe(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    message = _MESSAGES.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
