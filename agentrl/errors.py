"""Every error agentrl raises on purpose.

    AgentRLError
    ├── ConfigError          a key, value or file of a configuration is wrong      (exit 2)
    ├── DataError            a dataset, demonstration or trajectory file is wrong  (exit 2)
    │   └── ImageError       an image is too large, damaged or not PNG or JPEG
    ├── CheckpointError      a checkpoint is missing, damaged or of another run    (exit 2)
    ├── EnvError             an environment could not do what was asked; has the wire's code
    │   ├── GraderError      the grader failed: there is no reward (never reward 0)
    │   ├── EnvUnavailable   the environment server cannot be reached or is full (retryable)
    │   └── SessionLost      the process that held the session died; start the episode over
    ├── InferenceError       the inference engine failed or answered nonsense
    │   └── WeightSyncError  an engine does not hold the weights it was sent
    ├── AgentError           an agent program failed before it gave its answer
    ├── HistoryError         a chat template edits what the policy has read
    ├── TrainingError        the optimiser cannot go on (repeated non-finite gradients)
    └── StallError           no episode progressed for run.stall_timeout_s              (exit 75)

A bad rollout is data, not a crash: exceptions are caught in exactly two places, the environment
server's session boundary and the rollout driver's trajectory boundary, and are recorded there.
Everywhere else they rise to the command line, which prints one line and exits.
"""

from __future__ import annotations


class AgentRLError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one line: the reason and the remedy."""

    exit_code = 1
    """The exit status of the command line."""


class ConfigError(AgentRLError):
    """A key, a value or a file of a configuration is wrong. The message names it and the remedy."""

    exit_code = 2


class DataError(AgentRLError):
    """A dataset, demonstration or trajectory file is wrong. The message names file and line."""

    exit_code = 2


class ImageError(DataError):
    """An image is too large, damaged, of several frames, or neither a PNG nor a JPEG file."""


class CheckpointError(AgentRLError):
    """A checkpoint is missing, damaged or of another run. Older ones stay usable."""

    exit_code = 2


class EnvError(AgentRLError):
    """An environment call failed.

    `code` is the wire's problem code (`invalid_request`, `step_conflict`, `step_timeout`,
    `env_error`, ...); `retryable` says whether the same call may succeed later.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "env_error",
        status: int = 500,
        retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class GraderError(EnvError):
    """The grader crashed or ran out of time, so the episode has no reward.

    Such a trajectory is excluded from the gradient and counted; scoring it 0 would teach the
    policy that a correct answer is wrong whenever the grader has a bad day.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, code="grader_error", status=500, retryable=False)


class EnvUnavailable(EnvError):
    """The environment's server cannot be reached or is full; the same call may succeed later.

    `retry_after_s` is the pause in seconds that the server asked for; None if it did not ask for
    one."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(
            message, code="unavailable", status=503, retryable=True, retry_after_s=retry_after_s
        )


class SessionLost(EnvError):
    """The worker process that held the session is gone, and the episode with it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="session_lost", status=410, retryable=False)


class InferenceError(AgentRLError):
    """An inference engine failed, cannot be reached or answered nonsense."""


class AgentError(AgentRLError):
    """An agent program failed before it gave its answer: its trajectory ends with this error."""


class HistoryError(AgentRLError):
    """A chat template edits a dialogue's past where its self-test did not: the policy read tokens
    that the template would not have written, so its trajectory ends with this error."""


class TrainingError(AgentRLError):
    """The optimizer cannot go on, as after repeated non-finite gradients. The newest checkpoint
    is valid."""


class WeightSyncError(InferenceError):
    """An engine refused the trainer's weights, or answers as if it had others.

    Training on would learn from samples of an unknown policy, so this ends the run.
    """


class StallError(AgentRLError):
    """No episode moves. Exit status 75 (EX_TEMPFAIL) tells a cluster's scheduler to restart the
    run."""

    exit_code = 75


def first_line(error: Exception) -> str:
    """Returns the first line of the error's message, or the name of its class if it has no
    message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
