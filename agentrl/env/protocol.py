"""The HTTP protocol: its messages, its error codes, and the conversion to and from JSON.

Messages are plain dataclasses, which pydantic validates. Requests must not have unknown fields, and
their values are not converted ("1" is not accepted as an integer). Replies may have unknown fields,
so that newer servers can add some. Every reply has the header `Agentrl-Protocol: 1`. A float is
written as the shortest decimal that reads back to the same float, so an episode over HTTP is
bit-identical to one in the same process.
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
"""The most levels to which the JSON of a message may nest."""
MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader represents exactly."""

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
"""Codes that end a command with exit status 2, as a ConfigError does."""

# Each number of a request is strict, rather than the whole class, because a strict class would
# refuse the dictionaries that a web framework passes to pydantic.
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
    """Selects a task by `split` and `index`, or contains a whole task in `inline`."""

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
    """Opens a session for a task and a seed, and resets it."""

    env: str
    task: TaskSpec
    seed: Seed = 0
    config: dict[str, JSON] = field(default_factory=dict)
    count: One = 1
    """Number of sessions. A group of episodes takes one call for each."""
    lease_s: LeaseSeconds | None = None
    """Seconds without a call after which the session is closed; 300 if None."""
    timeout_s: Seconds | None = None
    """Seconds for the whole call; None: the environment's `reset_timeout_s`."""
    max_turns: Turns | None = None
    """The most turns that the agent gets, which an environment may tell it."""


@_reply
@dataclass(slots=True)
class SessionReply:
    """A session that was opened."""

    id: str
    """Contains 128 random bits, because it grants access to the session."""
    task_id: str
    lease_expires_at: float
    """Unix time in seconds."""
    lease_s: float
    """Seconds without a call after which the session is closed."""
    step: int
    """Index of the first step."""
    observation: list[Message]
    """The first prompt."""
    tools: list[ToolSpec]
    """The tools that the agent may call in its first turn."""
    public: dict[str, JSON] = field(default_factory=dict)
    """`Task.public`."""
    fingerprint: str = ""
    """Differs between servers whose configuration, splits or tools differ."""


@_reply
@dataclass(slots=True)
class CreateReply:
    """Answers a CreateRequest, with one session."""

    sessions: list[SessionReply]


@_request
@dataclass(slots=True, frozen=True)
class StepRequest:
    """Takes a step in a session."""

    step: Index
    """Index of the step that the client wants to take; a retry repeats it."""
    action: Action
    timeout_s: Seconds | None = None
    """Seconds for the step; None: the environment's `step_timeout_s`."""
    last: StrictBool = False
    """The agent gets no further turn: if this step does not end the episode, it is truncated."""


@_reply
@dataclass(slots=True, kw_only=True)
class StepReply(StepResult):
    """The result of a step, and the index of the next one."""

    step: int
    """Index of the next step."""
    replayed: bool = False
    """The step had already run; this is a copy of its reply."""
    tools: list[ToolSpec] | None = None
    """The tools that the agent may call from now on; None: they have not changed."""


@_request
@dataclass(slots=True, frozen=True)
class RenewRequest:
    """Extends the lease of a session."""

    lease_s: LeaseSeconds | None = None
    """Seconds from now; None: the session's own `lease_s`."""


@_reply
@dataclass(slots=True)
class SessionStatus:
    """Reports the state of a session."""

    id: str
    env: str
    task_id: str
    step: int
    status: str
    """`live`; `ended`: the episode is over; `failed`: a step failed, and no further one can run."""
    lease_expires_at: float
    """Unix time in seconds."""
    reward: float = 0.0
    """Sum of the rewards of all steps so far."""
    last: StepReply | None = None
    """The reply to the last step that succeeded."""


@_reply
@dataclass(slots=True)
class EnvInfo:
    """Describes an environment with one configuration."""

    id: str
    description: str
    tools: list[ToolSpec]
    """The tools that it offers without a task; a session's tools may differ."""
    splits: dict[str, int | None]
    """Number of tasks of each split; None: unlimited, generated on demand."""
    config_schema: dict[str, JSON]
    """JSON schema of the configuration."""
    max_sessions: int
    """The most live sessions of this environment: in one process, or, in an answer of `EnvClient`,
    in all servers together."""


@_reply
@dataclass(slots=True)
class EnvList:
    """Lists the ids of a server's environments."""

    environments: list[str]


@_reply
@dataclass(slots=True)
class TaskPreview:
    """The public part of a task: no reference, and no metadata, which might contain it."""

    index: int
    id: str
    prompt: str | list[Message]


@_reply
@dataclass(slots=True)
class TaskList:
    """Lists tasks of a split."""

    split: str
    tasks: list[TaskPreview]


@_reply
@dataclass(slots=True)
class Health:
    """Reports that the server process lives."""

    status: str
    """`ok` or `draining`."""
    sessions: int
    """Number of live sessions."""
    hung_calls: int
    """Number of calls that are past their deadline and still run."""


@_reply
@dataclass(slots=True)
class ServerInfo:
    """Describes the server."""

    protocol_versions: list[int]
    environments: list[str]
    max_body_bytes: int


@_request
@dataclass(slots=True, frozen=True)
class GymReset:
    """`POST /reset`: opens a session for a task of a split, or for a task that it contains."""

    env: str
    split: str | None = None
    index: Index | None = None
    task: Task | None = None
    seed: Seed = 0
    config: dict[str, JSON] = field(default_factory=dict)


@_request
@dataclass(slots=True, frozen=True)
class GymStep:
    """`POST /step`: takes a step in a session."""

    session: str
    action: str | Action
    """A text, or a whole action."""
    step: Index | None = None
    """Index of the step; None: the next one, so that repeating the call takes a second step."""


@_reply
@dataclass(slots=True)
class GymReply:
    """Answers a GymReset with the session, its first prompt and tools."""

    session: str
    observation: list[Message]
    tools: list[ToolSpec]
    step: int


@_reply
@dataclass(slots=True)
class Problem:
    """An error as problem details (RFC 9457)."""

    title: str
    status: int
    detail: str
    code: str
    retryable: bool = False
    retry_after_s: float | None = None


def make_error(code: str, message: str, *, retry_after_s: float | None = None) -> EnvError:
    """Makes the exception for a problem code. Client and server raise the same ones."""
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
    """Converts an error to the problem details that are sent."""
    try:
        title = http.HTTPStatus(error.status).phrase
    except ValueError:
        title = "Error"
    return Problem(
        title, error.status, str(error), error.code, error.retryable, error.retry_after_s
    )


def from_problem(problem: Problem) -> EnvError:
    """Converts received problem details to the error to raise."""
    error = make_error(problem.code, problem.detail, retry_after_s=problem.retry_after_s)
    error.status, error.retryable = problem.status, problem.retryable
    return error


T = TypeVar("T")


def encode(message: object) -> bytes:
    """Returns a dataclass or a JSON value as JSON bytes.

    A lone surrogate, which a policy may write and UTF-8 cannot encode, becomes U+FFFD.

    Raises:
        TypeError: the message contains something that is not JSON.
    """
    try:
        return orjson.dumps(message)
    except TypeError:  # not JSON; or a lone surrogate, a large integer, a key that is a number
        return json.dumps(_plain(message), ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """Converts what orjson refuses to what `json` can encode; NaN and infinity become null."""
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
    """Reads a message of type `kind` from JSON bytes.

    Raises:
        EnvError: `invalid_request`: the body is not JSON, nests deeper than `MAX_DEPTH`, or is not
            such a message; the error names the field.
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
    """Reads a configuration from a URL's query, where it is a JSON object; None: an empty one.

    Raises:
        EnvError: `invalid_request`: it is not a JSON object.
    """
    try:
        return {} if text is None else decode(text.encode("utf-8", "replace"), dict[str, JSON])
    except EnvError as error:
        raise make_error("invalid_request", f"config must be a JSON object: {error}") from error


def as_json(value: Any) -> Any:
    """Copies a value through JSON, as HTTP would deliver it.

    Raises:
        TypeError: it contains something that is not JSON.
    """
    return from_json(encode(value))


@functools.cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def check_json(body: bytes) -> None:
    """Refuses NaN and infinity, which are not JSON but which parsers accept, and deep nesting.

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
    """Returns whether dicts and lists nest deeper than `levels`, counting the outermost."""
    if levels <= 0:
        return isinstance(value, dict | list)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(each, dict | list) and _is_deep(each, levels - 1) for each in items)


_MESSAGES = {
    "unexpected_keyword_argument": "there is no such field",
    "missing": "this field is required",
}


def describe_problems(problems: Sequence[Any]) -> str:
    """Describes the first three of pydantic's errors, each with the name of its field."""
    described = []
    for problem in problems[:3]:
        message = _MESSAGES.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
        described.append(": ".join(filter(None, [".".join(map(str, problem["loc"])), message])))
    return "; ".join(described)
