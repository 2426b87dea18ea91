"""`rollout.generate`: episodes played by the user's own function, in this process.

    async def solve(task, policy, session):
        action = await policy.act(task.messages, task.tools)
        result = await session.step(action)

Turns sampled by `policy.act` are recorded like an agent's calls, so they are exact whatever the
function does with the history. A function that assembles token ids itself returns `Rows`, which
are checked, trained unchanged, and marked in the trajectory's info (`own_rows`).

It runs on the event loop of all episodes: it must not block.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl import user_modules
from agentrl.errors import AgentError, ConfigError
from agentrl.inference.base import Generation
from agentrl.rollout.agent.command import AgentTask
from agentrl.rollout.agent.roles import asked_by
from agentrl.rollout.agent.runner import Agents, Result, checked_result
from agentrl.rollout.agent.server import AgentServer, Live
from agentrl.rollout.agent.tools import EnvTools
from agentrl.rollout.agent.wire import Call
from agentrl.rollout.messages import RequestRefused, read_messages
from agentrl.types import JSON, Action, Message, StepResult, TokenRow, ToolSpec, Trajectory, Turn


@dataclass(slots=True)
class Row:
    """One row of token ids; the lists have one entry per token."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 where the policy sampled the token. Each run of ones is a turn."""
    logprobs: list[float]
    """Log-probabilities of the policy at sampling, in nats; read where the mask is 1."""
    versions: list[int] | None = None
    """Policy version that sampled each token, read where the mask is 1; None: that of
    `policy.version` now."""


@dataclass(slots=True)
class Rows:
    """The result of a function that assembles token ids itself."""

    rows: list[Row]
    reward: float
    info: dict[str, JSON] = field(default_factory=dict)
    """Kept with the trajectory."""


class PolicyCalls:
    """The policy, as the function calls it."""

    def __init__(self, live: Live) -> None:
        self._live, self._num_sampled = live, 0
        self.renderer = live.recorder.policy.renderer
        """Messages to token ids and back, for functions that assemble rows."""

    @property
    def version(self) -> int:
        """The version of the weights that the engine samples with now."""
        return self._live.recorder.policy.engine.policy_version

    async def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Action:
        """Samples one turn after these messages and records it; `agentrl.types.assistant_message`
        turns the action into a message.

        Raises:
            AgentError: a limit is reached, or the messages are malformed.
        """
        try:
            call = Call(read_messages(list(messages)), list(tools), "policy")
            asked = self._live.ask(call, asked_by(call, {}, ()))
        except RequestRefused as refused:
            raise AgentError(str(refused)) from refused
        return (await asked).action

    async def sample(self, prompt_ids: list[int]) -> Generation:
        """Samples one turn after these ids without recording it: the function returns it in `Rows`.

        Raises:
            AgentError: the ids leave no room for a turn in the context.
        """
        policy = self._live.recorder.policy
        if len(prompt_ids) >= policy.context_tokens:
            raise AgentError(
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room within "
                f"{policy.context_tokens} (rollout.max_context_tokens, or the servers' context)"
            )
        number, self._num_sampled = self._num_sampled, self._num_sampled + 1
        name = f"{self._live.recorder.trajectory.trajectory_id}-s{number:03d}"
        async with asyncio.timeout(self._live.turn_timeout_s):
            return await policy.sample(name, prompt_ids)


class SessionCalls:
    """The environment's session, as the function steps it."""

    def __init__(self, task: AgentTask, tools: EnvTools) -> None:
        self.messages, self._tools = task.messages, tools

    @property
    def tools(self) -> list[ToolSpec]:
        """The tools that can be called now."""
        return self._tools.specs

    async def step(self, action: Action) -> StepResult:
        """Takes one step of the environment; its reward counts for the trajectory."""
        return await self._tools.step(action)


Generate = Callable[[AgentTask, PolicyCalls, SessionCalls], Awaitable[Result | Rows]]


class Generating(Agents):
    """Plays episodes by calling the function that `rollout.generate` names."""

    def __init__(self, generate: Generate) -> None:
        super().__init__(AgentServer(), _NoRunner())
        self._generate = generate

    async def _run(self, task: AgentTask, live: Live, tools: EnvTools) -> Result:
        try:
            result = await self._generate(task, PolicyCalls(live), SessionCalls(task, tools))
        except SystemExit as error:  # would end the whole run
            raise AgentError(f"the function exited with {error.code}") from None
        if not isinstance(result, Rows):
            return checked_result(result)
        policy = live.recorder.policy
        tokenizer: Any = policy.renderer.tokenizer
        write_rows(
            live.recorder.trajectory,
            result,
            version=policy.engine.policy_version,
            max_tokens=policy.max_context_tokens,
            vocabulary=len(tokenizer),
        )
        return float(result.reward)


def make_generating(reference: str) -> Generating:
    """Loads the function that `rollout.generate` names.

    Raises:
        ConfigError: the function cannot be loaded or is not async.
    """
    function: Any = user_modules.load(reference)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.generate = {reference!r} is not an async function (task, policy, session)"
        )
    return Generating(function)


def write_rows(
    trajectory: Trajectory, given: Rows, *, version: int, max_tokens: int, vocabulary: int
) -> None:
    """Appends the rows that a function assembled.

    Raises:
        AgentError: the rows are malformed, or the episode also has recorded turns.
    """
    if trajectory.turns:
        raise AgentError(
            "rollout.generate: the function returns rows and has called policy.act, whose turns "
            "are recorded already; use policy.sample for rows of its own"
        )
    if not math.isfinite(given.reward):
        raise AgentError(f"rollout.generate: the reward is {given.reward}")
    if not any(any(row.loss_mask) for row in given.rows):
        raise AgentError("rollout.generate: no row holds a sampled token")
    for index, row in enumerate(given.rows):
        problem = _problem(row, max_tokens, vocabulary)
        if problem is not None:
            raise AgentError(f"rollout.generate: row {index}: {problem}")
        _append(trajectory, row, version)
    trajectory.info |= {**given.info, "own_rows": len(given.rows)}


def _problem(row: Row, max_tokens: int, vocabulary: int) -> str | None:
    length = len(row.token_ids)
    lists = {"loss_mask": row.loss_mask, "logprobs": row.logprobs}
    if row.versions is not None:
        lists["versions"] = row.versions
    for name, values in lists.items():
        if len(values) != length:
            return f"{length} token ids with {len(values)} {name}"
    if length > max_tokens:
        return f"{length} tokens are more than rollout.max_context_tokens = {max_tokens}"
    if any(mask not in (0, 1) for mask in row.loss_mask):
        return "a loss_mask is 0 or 1"
    if row.loss_mask[:1] == [1]:
        return "the first token cannot be a sampled one: nothing predicts it"
    if any(each < 0 for each in row.token_ids):
        return "a token id is negative"
    if any(each >= vocabulary for each in row.token_ids):
        return f"a token id is beyond the vocabulary of {vocabulary}"
    return None


def _append(trajectory: Trajectory, given: Row, version: int) -> None:
    row = TokenRow()
    branch, at = len(trajectory.branches), 0
    trajectory.branches.append(row)
    while at < len(given.token_ids):
        mask = given.loss_mask[at]
        end = at
        while end < len(given.token_ids) and given.loss_mask[end] == mask:
            end += 1
        ids, turn_id = given.token_ids[at:end], len(trajectory.turns)
        if mask:
            versions = [version] * len(ids) if given.versions is None else given.versions[at:end]
            try:
                row.append_sampled(ids, given.logprobs[at:end], versions, turn_id)
            except ValueError as error:
                raise AgentError(f"rollout.generate: row {branch}: {error}") from error
            trajectory.turns.append(Turn(branch, at, len(ids), "stop", "text"))
        else:
            # What stands behind the last turn belongs to it: there is none to read it.
            is_read = any(given.loss_mask[end:])
            row.append_context(ids, turn_id if is_read else max(0, turn_id - 1))
        at = end


class _NoRunner:
    async def run(self, task: AgentTask, base_url: str, api_key: str) -> Result:
        raise NotImplementedError

    async def aclose(self) -> None:
        """There is nothing to close."""
