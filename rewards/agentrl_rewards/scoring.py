"""Rewards the trajectories of a group with the functions of a run file's `[reward]` section.

    scorer = GroupScorer(["math", "my_pkg.mod:fn"], weights=[1.0, 0.2])
    await scorer(group.trajectories)

The trainer runs it once per finished group, before any filter, and it writes the rewards into the
trajectories. The reference comes from the environment, as `reference` in the `info` of the step
that ends an episode; `metadata` (an object) and `answer` (a string, or None if the policy gave
none) are read from there too. The policy never sees `info`, only observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentrl.errors import ConfigError, GraderError
from agentrl.images import content_text
from agentrl.types import JSON, Message, StopReason, Trajectory, TrajectoryError, with_reasoning
from agentrl_rewards.runner import RewardFunction, RewardInput, RewardResult, RewardRunner

_ENDED_BY_ENVIRONMENT = (StopReason.TERMINATED, StopReason.ENV_TRUNCATED, StopReason.MAX_TURNS)
"""Stop reasons for which the environment answered the last turn and so filled in `info`. It did not
if the context was full or a deadline passed."""


class GroupScorer:
    """Scores all trajectories of one task, except those that carry an error.

    Args:
        functions, weights, options, deadline_s, max_concurrency: see `RewardRunner`; an empty
            `weights` gives each function the weight 1.
        text: the text to score. `last_turn`: the policy's text in its last turn without tool
            calls, preceded by its reasoning between `<think>` tags. `answer`: the `answer` that
            the environment extracted, or "" if there is none.
        add_to_environment: add to the environment's reward instead of replacing it.

    Raises:
        ConfigError: a function is not found, or an option is unknown or missing.
    """

    def __init__(
        self,
        functions: Sequence[str | RewardFunction],
        *,
        weights: Sequence[float] = (),
        options: Mapping[str, Mapping[str, Any]] | None = None,
        deadline_s: float = 60.0,
        max_concurrency: int = 64,
        text: Literal["last_turn", "answer"] = "last_turn",
        add_to_environment: bool = False,
    ) -> None:
        self.runner = RewardRunner(
            functions,
            weights=weights or None,
            options=options,
            deadline_s=deadline_s,
            max_concurrency=max_concurrency,
        )
        self.text: Literal["last_turn", "answer"] = text
        self.add_to_environment = add_to_environment

    async def __call__(self, trajectories: list[Trajectory]) -> None:
        """Sets each trajectory's reward, components and turn rewards, or its error.

        Raises:
            ConfigError: a function needs a reference, or `text = "answer"` an answer, but the
                environment reports none; or a function and the environment both have a component
                of the same name.
        """
        played = [each for each in trajectories if each.error is None]
        reference = self._reference(played)
        if reference is None and self.runner.needs_reference:
            for trajectory in played:
                message = "no episode of this task ended, so the environment reported no reference"
                trajectory.error = TrajectoryError("grade", "no_reference", message)
            return
        answers = [self._to_input(each, reference) for each in played]
        results = await self.runner.score_group(answers) if answers else []
        for trajectory, result in zip(played, results, strict=True):
            if isinstance(result, GraderError):
                trajectory.error = TrajectoryError("grade", result.code, str(result))
            else:
                self._write(trajectory, result)

    def _reference(self, played: Sequence[Trajectory]) -> JSON:
        """Returns the task's reference from the first trajectory that reports one, else None."""
        told = next((t.info["reference"] for t in played if "reference" in t.info), None)
        ended = any(t.stop_reason in _ENDED_BY_ENVIRONMENT for t in played)
        if told is None and ended and self.runner.needs_reference:
            raise ConfigError(
                f"reward.functions: {', '.join(self.runner.needs_reference)} compares with a "
                "reference, but the environment reports none; set env.config.report_reference = "
                "true if the environment has that key, or make it put `reference` into the info of "
                "the step that ends an episode"
            )
        return told

    def _to_input(self, trajectory: Trajectory, reference: JSON) -> RewardInput:
        metadata = trajectory.info.get("metadata")
        first, last = (
            trajectory.branches[turn.branch].messages[: turn.message + 1]
            for turn in (trajectory.turns[0], trajectory.turns[-1])
        )
        said = last[-1]
        return RewardInput(
            text=(
                self._answer(trajectory)
                if self.text == "answer"
                else with_reasoning(content_text(said["content"]), said.get("reasoning", ""))
            ),
            reference=reference,
            prompt=first[:-1],
            num_tokens=trajectory.num_sampled_tokens,
            metadata=metadata if isinstance(metadata, dict) else {},
            turns=_messages_by_turn(trajectory),
        )

    def _answer(self, trajectory: Trajectory) -> str:
        answer = trajectory.info.get("answer")
        if isinstance(answer, str):
            return answer
        if trajectory.stop_reason in _ENDED_BY_ENVIRONMENT and "answer" not in trajectory.info:
            raise ConfigError(
                "reward.text = 'answer', but the environment puts no `answer` into the info of "
                "the step that ends an episode; set reward.text = 'last_turn'"
            )
        return ""

    def _write(self, trajectory: Trajectory, result: RewardResult) -> None:
        if self.add_to_environment:
            if both := result.components.keys() & trajectory.reward_components.keys():
                raise ConfigError(
                    f"reward.functions and the environment both have a component named "
                    f"{', '.join(sorted(both))}; leave one out, or set reward.add_to_environment = "
                    "false"
                )
        else:
            trajectory.metrics["reward"] = trajectory.reward
            trajectory.reward, trajectory.reward_components = 0.0, {}
            for turn in trajectory.turns:
                turn.reward, turn.reward_components = 0.0, {}
        trajectory.reward += result.reward
        trajectory.reward_components = trajectory.reward_components | result.components
        for turn, part in zip(trajectory.turns, result.turns, strict=True):
            turn.reward += part.reward
            turn.reward_components = turn.reward_components | part.components


def _messages_by_turn(trajectory: Trajectory) -> list[list[Message]]:
    """Returns one list per turn: the policy's message and those after it, up to its next one."""
    starts = {(turn.branch, turn.message) for turn in trajectory.turns}
    found = []
    for turn in trajectory.turns:
        messages = trajectory.branches[turn.branch].messages
        end = turn.message + 1
        while end < len(messages) and (turn.branch, end) not in starts:
            end += 1
        found.append(messages[turn.message : end])
    return found
