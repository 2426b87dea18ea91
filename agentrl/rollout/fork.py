"""Plays a recorded trajectory up to one of its tokens, and samples on from exactly those ids.

The driver plays the episode from its beginning, because an environment's state cannot be copied:
the turns before the fork are the recorded ids, so their actions are those of the recording. Every
prompt up to the fork has to come out bit for bit as it was recorded. An environment that answers a
repeated action differently cannot be forked, and the branch fails with the place of the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from agentrl.env.client import EnvClient
from agentrl.errors import DataError
from agentrl.inference.base import Generation
from agentrl.rollout.policy import TokenPolicy, num_equal
from agentrl.rollout.scheduler import TaskSource
from agentrl.types import Action, Message, ShownImage, ToolSpec, Trajectory

TASKS_AT_ONCE = 1000
"""Tasks that are listed in one call in search of a task's index."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Fork:
    """The place where a recorded trajectory is left."""

    recorded: Trajectory
    turn: int
    """The first turn that is sampled, or sampled in part."""
    forced: list[int] = field(default_factory=list)
    """The ids that this turn begins with."""
    edited: dict[int, str] = field(default_factory=dict)
    """Place of a message among those that this turn is the first to read -> its new text."""

    @classmethod
    def at_token(
        cls, recorded: Trajectory, row: int, position: int, ids: Sequence[int] | None
    ) -> Fork:
        """Forks at a token that the policy sampled.

        Args:
            ids: stand in place of the token; None: the token itself is sampled anew.

        Raises:
            DataError: the policy did not sample a token there.
        """
        for number, turn in enumerate(recorded.turns):
            if turn.branch == row and 0 <= position - turn.start < turn.num_tokens:
                kept = recorded.branches[row].token_ids[turn.start : position]
                return cls(recorded=recorded, turn=number, forced=[*kept, *(ids or [])])
        raise DataError(
            f"the policy sampled no token at position {position} of row {row}: edit the message "
            "that the token is of"
        )

    @classmethod
    def at_message(cls, recorded: Trajectory, row: int, message: int, text: str) -> Fork:
        """Forks at the first turn that reads a message of the environment, whose text is replaced.

        Raises:
            DataError: no turn reads it, the policy wrote it, or it shows images.
        """
        turns = recorded.turns
        number = next(
            (n for n, t in enumerate(turns) if t.branch == row and t.message > message), None
        )
        if number is None:
            raise DataError("no turn reads this message, so nothing would be sampled after it")
        while (parent := turns[number].parent) is not None and turns[parent].message > message:
            number = parent
        place = message - (-1 if parent is None else turns[parent].message) - 1
        said = recorded.branches[row].messages[message]
        if place < 0 or not isinstance(said["content"], str):
            raise DataError(
                "only the text of a message of the environment, without images, can be edited"
            )
        return cls(recorded=recorded, turn=number, edited={place: text})

    def prompt(self, turn: int) -> list[int]:
        """Returns the recorded prompt of a turn."""
        its = self.recorded.turns[turn]
        return self.recorded.branches[its.branch].token_ids[: its.start]

    def sampled(self, turn: int) -> Generation:
        """Returns the recorded ids of a turn as if they were sampled now."""
        its = self.recorded.turns[turn]
        row, part = self.recorded.branches[its.branch], slice(its.start, its.start + its.num_tokens)
        return Generation(
            row.token_ids[part],
            row.rollout_logprobs[part],
            row.policy_versions[part],
            its.finish_reason,
        )


@dataclass(slots=True, frozen=True, kw_only=True)
class ForkPolicy(TokenPolicy):
    """Repeats the recorded turns before the fork, and samples from there."""

    fork: Fork

    @classmethod
    def of(cls, policy: TokenPolicy, fork: Fork) -> ForkPolicy:
        """Returns a policy that samples as `policy` does."""
        same: dict[str, Any] = {
            each.name: getattr(policy, each.name) for each in fields(TokenPolicy)
        }
        return cls(**same, fork=fork)

    def read(
        self,
        trajectory: Trajectory,
        observation: list[Message],
        tools: list[ToolSpec],
        *,
        tools_changed: bool,
    ) -> bool:
        edited = self.fork.edited if len(trajectory.turns) == self.fork.turn else {}
        shown: list[Any] = list(observation)
        if max(edited, default=-1) >= len(shown):
            raise DataError("the environment shows fewer messages than it did")
        for place, text in edited.items():
            shown[place] = shown[place] | {"content": text}
        return TokenPolicy.read(self, trajectory, shown, tools, tools_changed=tools_changed)

    async def act(self, trajectory: Trajectory, tools: list[ToolSpec]) -> Action:
        number, fork = len(trajectory.turns), self.fork
        if number > fork.turn:
            return await TokenPolicy.act(self, trajectory, tools)
        branch = len(trajectory.branches) - 1
        row = trajectory.branches[branch]
        if not (number == fork.turn and fork.edited):
            _require_same(row.token_ids, fork.prompt(number), number)
        if number < fork.turn:
            generation = fork.sampled(number)
        else:
            generation = await self._go_on(f"{trajectory.trajectory_id}-t{number:03d}", trajectory)
        parent = number - 1 if number else None
        return self._append_turn(trajectory, branch, parent, generation, tools)

    async def _go_on(self, request_id: str, trajectory: Trajectory) -> Generation:
        """Samples the rest of a turn whose first ids are given."""
        forced, row = self.fork.forced, trajectory.branches[-1]
        room = min(self.max_turn_tokens, self.max_context_tokens - len(row)) - len(forced)
        if forced and forced[-1] in self.renderer.stop_token_ids:
            rest = Generation([], [], [], "stop")
        elif room < 1:
            rest = Generation([], [], [], "length")
        else:
            shorter = replace(self, max_turn_tokens=room)
            rest = await shorter.sample(request_id, row.token_ids + forced, row.images)
        before = self.fork.sampled(self.fork.turn)
        num_kept = num_equal(forced, before.token_ids)
        num_new = len(forced) - num_kept
        # An id that a person chose has no probability of its own.
        return Generation(
            forced + rest.token_ids,
            before.logprobs[:num_kept] + [0.0] * num_new + rest.logprobs,
            before.versions[:num_kept] + [self._newest] * (num_new + len(rest.versions)),
            rest.finish_reason,
        )

    async def sample(
        self, request_id: str, prompt_ids: list[int], images: Sequence[ShownImage] = ()
    ) -> Generation:
        """Samples as ever. The ids get the newest recorded version, since the versions of a row
        never decrease and an earlier checkpoint may play."""
        new = await TokenPolicy.sample(self, request_id, prompt_ids, images)
        return replace(new, versions=[self._newest] * len(new.versions), kept_ids=None, routes=None)

    @property
    def _newest(self) -> int:
        return max(0, *(v for row in self.fork.recorded.branches for v in row.policy_versions))


@dataclass(slots=True)
class OneTask(TaskSource):
    """The task of one group at the group's own position, from which its seed is computed."""

    index: int = 0

    def index_at(self, position: int) -> int:
        return self.index


async def find_task(
    env: EnvClient, env_id: str, config: Any, source: TaskSource, recorded: Trajectory
) -> int:
    """Returns the index of the task that a trajectory played.

    Args:
        source: the run's, at the position of the trajectory's group. Its index is right unless a
            sampler chose the task by the rewards of that time.

    Raises:
        DataError: the split has no such task.
    """
    index = source.index_at(source.position)
    stops = [(index, index + 1)]
    for start in range(0, source.size or 0, TASKS_AT_ONCE):
        stops.append((start, min(start + TASKS_AT_ONCE, source.size or 0)))
    for start, stop in stops:
        for task in await env.tasks(env_id, source.split, start, stop, config=config):
            if task.id == recorded.task_id:
                return task.index
    raise DataError(
        f"split {source.split!r} of {env_id} has no task {recorded.task_id!r} any more: its data "
        "changed since the run"
    )


def _require_same(now: Sequence[int], recorded: Sequence[int], turn: int) -> None:
    """Raises:
    DataError: a prompt is not the recorded one.
    """
    place = num_equal(now, recorded)
    if place < max(len(now), len(recorded)):
        raise DataError(
            f"the episode cannot be forked: played again, the prompt of turn {turn} differs from "
            f"the recorded one at position {place}. The environment does not repeat itself, or its "
            "data, its code or the chat template changed since the run"
        )
