"""SPINE 1: an episode, from the first observation to the last reward.

    reset -> [ read -> act -> step ]* -> record          `play`
    reset -> agent, which calls the policy -> step -> record          `play_agent`

How this differs from the textbook loop "prompt in, text out":

1. Token ids in, token ids out. The row that the engine reads is the row that the trainer learns
   from; sampled ids are never decoded and tokenised again.
2. Everything that the policy writes reaches the environment: a malformed tool call is an action
   with a `parse_error`, and the environment answers it with an observation.
3. A bad rollout is data, not a crash. This is the driver's trajectory boundary, the one place in
   agentrl.rollout where arbitrary exceptions are caught; they are recorded with the stage in
   which they happened, and the trajectory carries no gradient.
4. Every wait has a deadline: one for a turn's generation, one for an environment step, one for
   the episode. Every dispatched trajectory ends in exactly one record.
5. An agent program plays through an endpoint (`rollout/agent`): it calls the
   policy as it would call a model, and its final answer is its action.
6. An episode whose server or worker process died has not failed: it is started over from its
   task, with the same seed, on any available server. The turns played before are discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agentrl.env.client import EnvClient, EnvSession
from agentrl.errors import AgentError, EnvError
from agentrl.images import content_text
from agentrl.rollout.policy import Policy, TokenPolicy
from agentrl.types import (
    JSON,
    Action,
    StepResult,
    StopReason,
    Trajectory,
    TrajectoryError,
    Turn,
)

logger = logging.getLogger("agentrl.rollout")

MAX_RESTARTS = 3
"""How often an episode is started over because its environment was lost. One whose own step kills
the server would otherwise be played without end."""
_LOST = ("session_lost", "session_expired", "not_found")


@dataclass(slots=True, frozen=True)
class Episode:
    """One episode to be played: a member of a group on one task."""

    trajectory_id: str
    group_id: str
    env_id: str
    split: str
    index: int
    seed: int
    """The environment's randomness; the same for all members of a group."""
    env_config: dict[str, JSON]


@dataclass(slots=True, frozen=True)
class Limits:
    max_turns: int
    turn_timeout_s: float
    step_timeout_s: float
    episode_timeout_s: float


Stage = Literal["reset", "render", "generate", "agent", "step"]


@dataclass(slots=True)
class Progress:
    """The progress of an episode, for observers outside the driver."""

    trajectory_id: str
    stage: Stage = "reset"
    since: float = field(default_factory=time.monotonic)
    """`time.monotonic()` at which the stage began."""
    num_turns: int = 0
    num_restarts: int = 0
    """Times it was started over because its environment was lost."""

    def enter(self, stage: Stage) -> None:
        self.stage, self.since = stage, time.monotonic()

    def took_turn(self) -> None:
        self.num_turns += 1
        self.since = time.monotonic()


@dataclass(slots=True, frozen=True)
class AgentOutcome:
    """The result of an agent that ran to its end."""

    answer: str | None
    """For the environment to grade; None: what the policy said last."""
    rewards: dict[int | None, float] | None
    """By turn, of an agent that grades itself; None stands for the newest turn."""
    cut: StopReason | None
    """The limit that one of its calls ran into."""
    last: int | None = None
    """The newest turn that is trained, which the answer is of; None for the newest."""


class AgentPlayer(Protocol):
    """Runs agents; implemented by `rollout.agent.runner.Agents`."""

    async def play(
        self,
        trajectory: Trajectory,
        policy: TokenPolicy,
        session: EnvSession,
        step: Callable[[Action], Awaitable[StepResult]],
        limits: Limits,
        now: Progress,
    ) -> AgentOutcome:
        """Runs the agent on the session's task until it ends.

        Args:
            step: takes a step of the environment, for an agent that uses its tools.
        """
        ...


async def play(
    episode: Episode,
    policy: Policy,
    env: EnvClient,
    limits: Limits,
    record: Callable[[Trajectory], None],
    now: Progress | None = None,
) -> None:
    """Plays one episode and calls `record` exactly once with its trajectory, even when cancelled.

    `now` says all the while where the episode stands.
    """
    now = now or Progress(episode.trajectory_id)

    async def turns(trajectory: Trajectory, session: EnvSession) -> None:
        observation, tools = session.messages, session.tools
        while trajectory.stop_reason is None:
            now.enter("render")
            tools_changed, tools = session.tools != tools, session.tools
            if not policy.read(trajectory, observation, tools, tools_changed=tools_changed):
                trajectory.stop_reason = StopReason.CONTEXT_LENGTH
                break

            now.enter("generate")
            turn_started = time.perf_counter()
            async with asyncio.timeout(limits.turn_timeout_s):
                action = await policy.act(trajectory, tools)
            turn = trajectory.turns[-1]
            turn.generate_s = time.perf_counter() - turn_started

            now.enter("step")
            turn_started = time.perf_counter()
            last = len(trajectory.turns) >= limits.max_turns
            result = await session.step(action, timeout_s=limits.step_timeout_s, last=last)
            turn.step_s = time.perf_counter() - turn_started
            now.num_turns += 1
            observation = result.observation
            _add_result(trajectory, turn, result)
            # The environment truncates because it was told that this is the last turn: our limit.
            if last and not result.terminated:
                trajectory.stop_reason = StopReason.MAX_TURNS
            if trajectory.stop_reason is not None:  # no turn will take it in
                trajectory.branches[turn.branch].messages += observation

    while not await _attempt(episode, turns, env, limits, record, now):
        now.num_restarts += 1


async def play_agent(
    episode: Episode,
    agents: AgentPlayer,
    policy: TokenPolicy,
    env: EnvClient,
    limits: Limits,
    record: Callable[[Trajectory], None],
    now: Progress | None = None,
) -> None:
    """Plays one episode with an agent, whose answer is graded; everything else is as in `play`."""
    now = now or Progress(episode.trajectory_id)

    async def run(trajectory: Trajectory, session: EnvSession) -> None:
        async def step(action: Action, last: bool = False, of: int = -1) -> StepResult:
            started = time.perf_counter()
            result = await session.step(action, timeout_s=limits.step_timeout_s, last=last)
            turn = trajectory.turns[of] if trajectory.turns else None
            if turn is not None:
                turn.step_s += time.perf_counter() - started
            _add_result(trajectory, turn, result)
            now.enter(now.stage)  # it moves
            return result

        now.enter("agent")
        outcome = await agents.play(trajectory, policy, session, step, limits, now)
        if not trajectory.turns:
            raise AgentError(
                "the agent ended without a call to the policy; give it the base URL and the key "
                "that it is started with"
            )
        last = -1 if outcome.last is None else outcome.last
        turn, ended = trajectory.turns[last], trajectory.stop_reason  # by one of its own steps
        now.enter("step")
        if outcome.rewards is not None:
            for number, reward in outcome.rewards.items():
                rewarded = trajectory.turns[last if number is None else number]
                _add_result(trajectory, rewarded, StepResult([], reward=reward))
        elif ended is None:
            message = trajectory.branches[turn.branch].messages[turn.message]
            said = content_text(message["content"])
            graded = Action(said if outcome.answer is None else outcome.answer)
            await step(graded, last=True, of=last)
        # It ended because it was done, whether or not the environment would have gone on.
        trajectory.stop_reason = ended or outcome.cut or StopReason.TERMINATED

    while not await _attempt(episode, run, env, limits, record, now):
        now.num_restarts += 1


async def _attempt(
    episode: Episode,
    body: Callable[[Trajectory, EnvSession], Awaitable[None]],
    env: EnvClient,
    limits: Limits,
    record: Callable[[Trajectory], None],
    now: Progress,
) -> bool:
    """Plays the episode from its beginning. Returns False, without a record, if it has to be played
    again."""
    trajectory = Trajectory(
        trajectory_id=episode.trajectory_id,
        group_id=episode.group_id,
        env_id=episode.env_id,
        task_id=f"{episode.split}/{episode.index}",
        seed=episode.seed,
    )
    session: EnvSession | None = None
    lost = False
    started = time.perf_counter()
    now.enter("reset")
    # The environment keeps the deadlines of reset and step; those of episode and turn are ours.
    deadline = asyncio.timeout(limits.episode_timeout_s)
    try:
        async with deadline:
            session = await env.session(
                episode.env_id,
                split=episode.split,
                index=episode.index,
                seed=episode.seed,
                config=episode.env_config,
                timeout_s=limits.step_timeout_s,
                max_turns=limits.max_turns,
            )
            trajectory.task_id = session.task_id
            await body(trajectory, session)
    except asyncio.CancelledError:
        trajectory.stop_reason = StopReason.CANCELLED
        trajectory.error = TrajectoryError(now.stage, "cancelled", "the run was stopped")
        raise
    except TimeoutError:
        what = "episode" if deadline.expired() else "turn" if now.stage == "generate" else "step"
        trajectory.stop_reason = StopReason.TIMEOUT
        trajectory.error = TrajectoryError(
            now.stage, f"{what}_timeout", f"rollout.{what}_timeout_s passed during {now.stage}"
        )
    except Exception as error:
        code = _code(error)
        lost = _is_lost(error, now.stage) and now.num_restarts < MAX_RESTARTS
        late = code.endswith("_timeout")
        trajectory.stop_reason = StopReason.TIMEOUT if late else StopReason.ERROR
        trajectory.error = TrajectoryError(now.stage, code, str(error) or repr(error))
        if lost:
            logger.warning("%s starts over: %s", episode.trajectory_id, error)
    finally:
        trajectory.total_s = time.perf_counter() - started
        if not lost:
            record(trajectory)
        if session is not None:
            # A server that is gone took the session with it; the record above stands.
            with contextlib.suppress(EnvError):
                await session.close()
    return not lost


def _is_lost(error: Exception, stage: Stage) -> bool:
    """Tells whether the environment is gone through no fault of the episode."""
    if not isinstance(error, EnvError):
        return False
    if error.code in ("unavailable", "draining"):
        # An environment that answers so itself, for a backend of its own, took the step.
        return error.retryable
    return stage == "step" and error.code in _LOST


def _add_result(trajectory: Trajectory, turn: Turn | None, result: StepResult) -> None:
    """Adds a step's reward, metrics and end to the turn before it, if any, and to the
    trajectory."""
    for rewarded in (trajectory, *([turn] if turn else [])):
        rewarded.reward += result.reward
        for name, value in result.reward_components.items():
            components = rewarded.reward_components
            components[name] = components.get(name, 0.0) + value
    trajectory.metrics.update(result.metrics)
    trajectory.info.update(result.info)
    if result.terminated:
        trajectory.stop_reason = StopReason.TERMINATED
    elif result.truncated:
        trajectory.stop_reason = StopReason.ENV_TRUNCATED


def _code(error: Exception) -> str:
    if isinstance(error, EnvError):
        return error.code
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
