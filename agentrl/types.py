"""The data classes that pass between environments, rollouts and the trainer. No torch.

    Task -> Session (server side) -> Turn -> Trajectory -> Group of G -> Sample -> MicroBatch

A worked two-turn example. The policy is asked `17*3`, calls a calculator, reads `51`, answers:

    position        0 1 2 3 | 4 5 6 7 | 8 9 10 | 11 12
    who wrote it    prompt  | policy  | tool   | policy
    loss_mask       0 0 0 0 | 1 1 1 1 | 0 0 0  | 1  1
    turn_ids        0 0 0 0 | 0 0 0 0 | 1 1 1  | 1  1
    policy_versions -1 ...  | 7 7 7 7 | -1 ... | 7  8      (an update landed during turn 1)

Everything the model saw or sampled is one append-only row of token ids. Text never goes back to
ids: the prompt of turn k is bit for bit `token_ids[:start_k]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NotRequired

import numpy as np
from pydantic import ConfigDict, JsonValue, with_config
from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

JSON = JsonValue
"""What JSON can write: None, a truth value, a number, a string, a list or a dictionary of these."""
Role = Literal["system", "user", "assistant", "tool"]
"""Who speaks in a chat message."""
ParseStatus = Literal["text", "tool_calls", "malformed"]
"""How an assistant turn was read: plain text, well-formed tool calls, or a tool call that could
not be parsed (the environment then answers with an observation that says what was wrong)."""
FinishReason = Literal["stop", "length", "abort"]
"""Why the engine ended a turn: the policy's end token, the limit of tokens, or a call cut short."""


Content = str | list[dict[str, JSON]]
"""What a message says: a text, or parts in OpenAI's shape, text and image (`agentrl.images`)."""


@with_config(ConfigDict(extra="allow"))
class Message(TypedDict):
    """A chat message in OpenAI's shape; `tool_calls` only on assistant, `tool_call_id` on tool."""

    role: Role
    """Who speaks."""
    content: Content
    """What is said; of a tool message, what the tool answered."""
    reasoning: NotRequired[str]
    """What an assistant thought before it spoke; each template has a place of its own for it."""
    tool_calls: NotRequired[list[JSON]]
    """Function calls in OpenAI's shape."""
    tool_call_id: NotRequired[str]
    """The call that a tool message answers."""
    name: NotRequired[str]
    """The tool that a tool message is from."""


_FROM_OUTSIDE = ConfigDict(extra="forbid", use_attribute_docstrings=True)
"""How pydantic reads what a client sends: a field that is not there is an error."""

ToolSpec = dict[str, JSON]
"""An OpenAI function specification: `{"type": "function", "function": {name, parameters, ...}}`."""


@with_config(_FROM_OUTSIDE)
@dataclass(slots=True, frozen=True)
class Task:
    """One dataset item that starts an episode."""

    id: str
    """Unique in its environment."""
    prompt: str | list[Message]
    """The first user message, or the dialogue so far."""
    reference: JSON = None
    """The gold answer. Read by reward functions only; it must never reach an observation."""
    metadata: dict[str, JSON] = field(default_factory=dict)
    """Anything else about the task. Graders and reports read it; the agent does not see it."""
    public: dict[str, JSON] = field(default_factory=dict)
    """What whoever plays the episode may see beside the prompt: a function of `rollout.generate`
    and an agent find it in their task's metadata."""


@with_config(_FROM_OUTSIDE)
@dataclass(slots=True, frozen=True)
class ToolCall:
    """One call of a tool in a turn, with arguments that were read but not yet validated."""

    id: str
    """Unique in its turn; the tool message that answers it repeats it."""
    name: str
    """The tool's name."""
    arguments: dict[str, JSON]
    """Keyword arguments, as the policy wrote them."""


@with_config(_FROM_OUTSIDE)
@dataclass(slots=True, frozen=True)
class Action:
    """The policy's part of one turn. `text` is what it wrote outside tool calls and reasoning."""

    text: str = ""
    """Empty where the turn only called tools."""
    tool_calls: tuple[ToolCall, ...] = ()
    """In the order in which they were written."""
    parse_error: str | None = None
    """Why a tool call in the turn could not be read; None when all was well-formed."""
    reasoning: str = ""
    """What it thought: for rules about the form of a turn, never an answer."""


def assistant_message(action: Action) -> Message:
    """Returns the turn as a chat message."""
    message: Message = {"role": "assistant", "content": action.text}
    if action.reasoning:
        message["reasoning"] = action.reasoning
    if action.tool_calls:
        calls: list[JSON] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in action.tool_calls
        ]
        message["tool_calls"] = calls
    return message


def with_reasoning(text: str, reasoning: str) -> str:
    """Returns a turn as one text, with `<think>` tags around its reasoning, for rules about its
    whole form."""
    return f"<think>{reasoning}</think>{text}" if reasoning else text


@with_config(ConfigDict(use_attribute_docstrings=True))
@dataclass(slots=True)
class StepResult:
    """The environment's answer to one action."""

    observation: list[Message]
    """Messages that the agent is shown next; empty after the last turn."""
    reward: float = 0.0
    """The reward of this step alone; a trajectory's reward is the sum of its steps'."""
    terminated: bool = False
    """The task's own end was reached."""
    truncated: bool = False
    """The episode was cut by a limit of the environment (turns, time), not by the task."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Unweighted named parts of `reward`."""
    info: dict[str, JSON] = field(default_factory=dict)
    """Kept with the trajectory and in its log; nothing learns from it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to average over a training step under `env/<name>`."""


class StopReason(StrEnum):
    """Why a trajectory ended. Every dispatched trajectory ends in exactly one of these."""

    TERMINATED = "terminated"
    """The environment reached the task's own end."""
    ENV_TRUNCATED = "env_truncated"
    """The environment cut it by a limit of its own."""
    MAX_TURNS = "max_turns"
    """`rollout.max_turns` was reached."""
    CONTEXT_LENGTH = "context_length"
    """The next turn would not fit into `rollout.max_context_tokens`."""
    TIMEOUT = "timeout"
    """A deadline passed, as `rollout.episode_timeout_s`."""
    ERROR = "error"
    """It failed; `Trajectory.error` says where and why."""
    CANCELLED = "cancelled"
    """The run ended it."""


@dataclass(slots=True, frozen=True)
class TrajectoryError:
    """The place and the reason of a trajectory's failure."""

    stage: Literal["reset", "render", "generate", "agent", "step", "grade", "record"]
    """What was under way when it failed."""
    code: str
    """The environment's problem code, or the exception's class in snake_case."""
    message: str
    """One line: the reason."""


@dataclass(slots=True)
class Turn:
    """One model call and the environment's answer to it."""

    branch: int
    """Index into `Trajectory.branches` of the row that holds this turn's tokens."""
    start: int
    """Position of the first sampled token in that row; `[0, start)` was the prompt."""
    num_tokens: int
    """Sampled tokens; `[start, start + num_tokens)` carry loss_mask 1."""
    finish_reason: FinishReason
    """Why the engine ended it."""
    parse_status: ParseStatus
    """The result of reading what was sampled."""
    reward: float = 0.0
    """The reward in the environment's answer to this turn."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Unweighted named parts of it."""
    generate_s: float = 0.0
    """Seconds that the model call took, waiting included."""
    step_s: float = 0.0
    """Seconds until the environment had answered."""
    message: int = -1
    """Index of what it said in its row's `messages`; -1 where no messages are kept."""
    parent: int | None = None
    """The turn that its prompt continues; None where a dialogue begins. A driver's is the turn
    before; an agent may run several dialogues in one episode, or go back in one."""


class RowArrays(TypedDict):
    """A token row as arrays of equal length T."""

    token_ids: np.ndarray
    """(T,) int32."""
    loss_mask: np.ndarray
    """(T,) uint8: 1 where the policy sampled the token."""
    rollout_logprobs: np.ndarray
    """(T,) float32, nats: of the engine, at sampling; 0 elsewhere."""
    policy_versions: np.ndarray
    """(T,) int32: of the policy that sampled the token; -1 elsewhere."""
    turn_ids: np.ndarray
    """(T,) int32: the turn that the token belongs to, from 0."""


@dataclass(slots=True, frozen=True)
class ShownImage:
    """An image of a token row, as the model's processor made it."""

    sha256: str
    """Of the image's file: equal images are computed once."""
    start: int
    """Place of the first token that the processor wrote for it; placeholders are among them."""
    end: int
    """Place behind the last of them."""
    pixels: dict[str, np.ndarray]
    """`pixel_values` and what else the family's tower takes, of this image alone; empty where it
    was read from the trajectory log (`agentrl.model.text.processor.restore_pixels`)."""
    pixels_sha256: str = ""
    """A hash of the pixels, which stands in the log beside the row."""


@dataclass(slots=True)
class TokenRow:
    """The append-only token record of one branch of a trajectory.

    Five lists of equal length T. Invariants, checked on every append: mask 1 iff sampled by the
    policy; sampled means a finite log-probability <= 0 and a version >= 0; elsewhere the
    log-probability is 0 and the version -1; versions never decrease.
    """

    token_ids: list[int] = field(default_factory=list)
    """Prompt, sampled turns and observations, in the order in which the model saw them."""
    loss_mask: list[int] = field(default_factory=list)
    """1 where the policy sampled the token, else 0."""
    rollout_logprobs: list[float] = field(default_factory=list)
    """Nats, of the engine at sampling; 0 where the mask is 0."""
    policy_versions: list[int] = field(default_factory=list)
    """Versions of the policy that sampled each token; -1 where the mask is 0."""
    turn_ids: list[int] = field(default_factory=list)
    """The turn that the token belongs to, from 0; an observation is of the turn that reads it."""
    kept_ids: list[np.ndarray] = field(default_factory=list)
    """For each sampled token the ids it was drawn from, int32, where sampling is truncated and the
    engine says so; else empty. Not written to the trajectory log."""
    routes: list[np.ndarray] = field(default_factory=list)
    """Which experts the tokens from the first on went to when they were first computed, in parts of
    (tokens, routers, experts per token); empty where nobody says. Not written to the log either."""
    images: list[ShownImage] = field(default_factory=list)
    """Among the tokens that the policy read, in order."""
    branch_of: int | None = None
    """Index of the branch this one was forked from; None for the first."""
    fork_at: int | None = None
    """Length of the common prefix with that branch."""
    messages: list[Message] = field(default_factory=list)
    """The dialogue that the tokens write out, and what was observed after the last of them."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_context(self, token_ids: list[int], turn_id: int) -> None:
        """Appends tokens that the policy reads but did not sample (prompt, observation,
        template)."""
        self._append(token_ids, 0, [0.0] * len(token_ids), [-1] * len(token_ids), turn_id)

    def append_sampled(
        self,
        token_ids: list[int],
        logprobs: list[float],
        versions: list[int],
        turn_id: int,
        kept_ids: list[np.ndarray] | None = None,
        routes: np.ndarray | None = None,
    ) -> None:
        """Appends tokens that the policy sampled and, if known, the tokens that each was drawn
        from.

        Args:
            routes: of the whole row with these tokens, but for the last.

        Raises:
            ValueError: lengths differ, a log-probability is not finite or above 0, or a version
                is negative or smaller than one already in the row. Nothing is appended then.
        """
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(token_ids)} sampled tokens came with {len(logprobs)} log-probabilities "
                f"and {len(versions)} versions"
            )
        if (position := bad_logprob(logprobs)) is not None:
            raise ValueError(f"log-probability {logprobs[position]} at sampled token {position}")
        newest = next((v for v in reversed(self.policy_versions) if v >= 0), -1)
        if versions and (versions[0] < max(newest, 0) or versions != sorted(versions)):
            for version in versions:
                if version < 0 or version < newest:
                    raise ValueError(f"policy version {version} after version {newest}")
                newest = version
        if max(logprobs, default=0.0) > 0:
            logprobs = [min(logprob, 0.0) for logprob in logprobs]
        self._append(token_ids, 1, logprobs, versions, turn_id)
        self.kept_ids += kept_ids or []
        if routes is not None:
            self.routes.append(routes[sum(map(len, self.routes)) :])

    def _append(
        self, ids: list[int], mask: int, logprobs: list[float], versions: list[int], turn_id: int
    ) -> None:
        self.token_ids += ids
        self.loss_mask += [mask] * len(ids)
        self.rollout_logprobs += logprobs
        self.policy_versions += versions
        self.turn_ids += [turn_id] * len(ids)

    def arrays(self) -> RowArrays:
        """Returns copies of the five lists as arrays."""
        return {
            "token_ids": np.asarray(self.token_ids, np.int32),
            "loss_mask": np.asarray(self.loss_mask, np.uint8),
            "rollout_logprobs": np.asarray(self.rollout_logprobs, np.float32),
            "policy_versions": np.asarray(self.policy_versions, np.int32),
            "turn_ids": np.asarray(self.turn_ids, np.int32),
        }


def bad_logprob(logprobs: list[float]) -> int | None:
    """Returns the position of the first value that is not a log-probability; None if all are.

    A positive value below 1e-4 is rounding in an engine's softmax and passes."""
    # One not finite makes the sum not finite, so the usual case takes two calls.
    if math.isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= 1e-4:
        return None
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob > 1e-4:
            return position
    return None


@dataclass(slots=True)
class Trajectory:
    """The full record of one episode."""

    trajectory_id: str
    """Unique in its run."""
    group_id: str
    """Trajectories of one group started from the same task and seed."""
    env_id: str
    """The environment's registered name."""
    task_id: str
    """The task's `id`."""
    seed: int
    """The seed that `reset` was given."""
    branches: list[TokenRow] = field(default_factory=list)
    """One row unless the history was edited or an agent ran several dialogues; each sampled token
    stands in exactly one of them with mask 1."""
    turns: list[Turn] = field(default_factory=list)
    """In the order in which they were sampled."""
    reward: float = 0.0
    """Sum of the turns' rewards."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Unweighted named parts of the reward, summed over the turns."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's own numbers, averaged over a step under `env/<name>`."""
    info: dict[str, JSON] = field(default_factory=dict)
    """What the environment wanted kept; nothing learns from it."""
    stop_reason: StopReason | None = None
    """None only while the episode runs."""
    error: TrajectoryError | None = None
    """None unless it failed."""
    total_s: float = 0.0
    """Seconds from the dispatch to the end."""

    @property
    def messages(self) -> list[Message]:
        """The dialogue of the newest turn's row: the whole episode, if it has one dialogue."""
        if not self.branches:
            return []
        return self.branches[self.turns[-1].branch if self.turns else -1].messages

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens sampled in all turns."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_read_tokens(self) -> int:
        """Number of tokens read in all turns, counted by a chat server or from the rows."""
        counted = self.info.get("prompt_tokens")
        return counted if isinstance(counted, int) else sum(turn.start for turn in self.turns)

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest sampled token; None when nothing was sampled."""
        first = (next((v for v in b.policy_versions if v >= 0), None) for b in self.branches)
        return min((version for version in first if version is not None), default=None)

    @property
    def truncated(self) -> bool:
        """True if a limit (turns, context, time, or the length of the last turn) cut the
        episode."""
        cut = (
            StopReason.ENV_TRUNCATED,
            StopReason.MAX_TURNS,
            StopReason.CONTEXT_LENGTH,
            StopReason.TIMEOUT,
        )
        return self.stop_reason in cut or bool(
            self.turns and self.turns[-1].finish_reason == "length"
        )

    @property
    def scored(self) -> bool:
        """True if it ended without an error and with a finite reward: an evaluation counts it."""
        return self.error is None and math.isfinite(self.reward)

    @property
    def trainable(self) -> bool:
        """True if it ended without an error, with a finite reward and at least one sampled
        token."""
        return self.scored and self.num_sampled_tokens > 0


@dataclass(slots=True)
class Group:
    """The trajectories of one task that share a baseline."""

    group_id: str
    """Unique in its run."""
    task_id: str
    """Id of the one task that all of them played."""
    trajectories: list[Trajectory]
    """`rollout.group_size` of them at most, failed ones included."""


def environment_of(group_id: str) -> str:
    """Returns the name of a training group's environment; empty if the run has only one."""
    return group_id.rpartition("-g")[0]


@dataclass(slots=True)
class Sample:
    """One token row as the trainer reads it. Arrays have length T (positions of the row)."""

    token_ids: np.ndarray
    """(T,) int32."""
    loss_mask: np.ndarray
    """(T,) uint8: 1 where the policy sampled the token. Position 0 is never trained: nothing
    predicts it."""
    rollout_logprobs: np.ndarray
    """(T,) float32, nats; 0 where the mask is 0."""
    policy_versions: np.ndarray
    """(T,) int32; -1 where the mask is 0."""
    turn_ids: np.ndarray
    """(T,) int32, from 0."""
    trajectory_id: str
    """Samples of one trajectory share it, and with it the weight of one."""
    group_id: str
    """Samples of one group share a baseline."""
    reward: float
    """The reward of the whole trajectory."""
    turn_rewards: np.ndarray
    """(num_turns,) float32, indexed by turn id."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Unweighted named parts of the reward."""
    truncated: bool = False
    """The trajectory was cut by a limit."""
    kept_ids: list[np.ndarray] | None = None
    """For each trained token the ids it was drawn from, int32; None where all were, or where the
    engine did not say which."""
    routes: np.ndarray | None = None
    """(T, routers, experts per token) int16, or a server's (T, layers * experts per token): the
    experts that the sampler used for each token, -1 where that is not known; None where it is of
    none."""
    row: int = 0
    """Index of the row in its trajectory."""
    images: list[ShownImage] = field(default_factory=list)
    """In the order in which they stand there."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.loss_mask.sum())


def samples_of(trajectory: Trajectory) -> list[Sample]:
    """Returns the rows of a trajectory that hold at least one sampled token, as samples."""
    turn_rewards = np.asarray([turn.reward for turn in trajectory.turns], np.float32)
    return [
        Sample(
            **row.arrays(),
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            reward=trajectory.reward,
            turn_rewards=turn_rewards,
            reward_components=dict(trajectory.reward_components),
            truncated=trajectory.truncated,
            kept_ids=row.kept_ids if len(row.kept_ids) == sum(row.loss_mask) else None,
            routes=_routes(row),
            row=index,
            images=list(row.images),
        )
        for index, row in enumerate(trajectory.branches)
        if any(row.loss_mask)
    ]


def _routes(row: TokenRow) -> np.ndarray | None:
    if not row.routes:
        return None
    known = np.concatenate(row.routes)
    rest = np.full((len(row) - len(known), *known.shape[1:]), -1, known.dtype)
    return np.concatenate([known, rest])
