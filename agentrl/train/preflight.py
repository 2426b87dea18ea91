"""Judges a run's set-up by its first episodes, before hours are spent on it.

A run looks at its own first rollouts, which costs nothing; `agentrl doctor --play` plays a few.
Equal rewards alone prove little where tasks are hard. So a run stops soon only where something in
its set-up explains them; otherwise it warns first and stops later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.config import RunConfig
from agentrl.errors import TrainingError
from agentrl.types import StopReason, Trajectory
from agentrl.view.diagnosis import MISMATCH

ENOUGH = 32
"""Equal rewards with a cause that the run's set-up explains: the run stops."""
MOST = 192
"""Equal rewards without one. A task that is solved once in a hundred times is seen by then, in six
runs of seven."""
GO_ON = "run.preflight = false goes on all the same"
SMALLEST, LARGEST = 1 / 5, 20
"""Learning rates outside these multiples of the usual one are warned of."""


@dataclass(slots=True)
class FirstRewards:
    """Watches the rewards of a run as long as all of them are equal."""

    is_on: bool
    count: int = 0
    seen: set[object] = field(default_factory=set)

    def look(self, trajectories: Sequence[Trajectory], config: RunConfig) -> str | None:
        """Takes in a step's trajectories; returns a warning while all rewards are equal, and the
        reasons why most episodes of the first step earn nothing.

        Raises:
            TrainingError: the run cannot learn as it is set up.
        """
        scored = [t for t in trajectories if t.trainable]
        if not self.is_on or "teacher_logprobs" in config.objective.needs():
            return None
        spec = config.objective.reward
        weighted, by_length = bool(spec.weights), spec.overlong is not None
        self.seen |= {
            (
                *(t.reward, t.num_sampled_tokens * by_length),
                *sorted(t.reward_components.items()) * weighted,
            )
            for t in scored
        }
        causes = causes_of_failure(trajectories, config)
        self.count += len(scored)
        self.is_on = len(self.seen) <= 1
        if not self.is_on or not scored:
            return "; ".join(causes) or None
        reward = scored[0].reward
        said = f"all {self.count} rewards so far are {reward:g}, so there is nothing to learn from"
        if reward > 0 and not causes:
            causes = ["every task is solved, or the grader pays anything: take harder tasks"]
        if causes and self.count >= ENOUGH:
            raise TrainingError(f"{said}: {'; '.join(causes)} ({GO_ON})")
        advice = (
            "take easier tasks, or let the model learn from demonstrations first (agentrl sft); "
            "`agentrl env check` says whether the grader pays a right answer"
        )
        if self.count >= MOST:
            raise TrainingError(f"{said}, and the episodes are sound: {advice} ({GO_ON})")
        return f"{said}{': ' + '; '.join(causes) if causes else ''}; {advice}"


def causes_of_failure(trajectories: Sequence[Trajectory], config: RunConfig) -> list[str]:
    """Returns what in the set-up keeps most episodes from a reward, each with its remedy."""
    rollout, causes = config.rollout, []
    turns = [turn for t in trajectories for turn in t.turns]
    ended = [t for t in trajectories if t.error is None]
    if not turns or not ended:
        return causes
    cut = sum(turn.finish_reason == "length" for turn in turns)
    if cut >= 0.5 * len(turns):
        causes.append(
            f"{cut} of {len(turns)} turns are cut at rollout.max_turn_tokens = "
            f"{rollout.max_turn_tokens}: raise it"
        )
    for reason, key in (
        (StopReason.MAX_TURNS, "max_turns"),
        (StopReason.CONTEXT_LENGTH, "max_context_tokens"),
    ):
        stopped = sum(t.stop_reason == reason for t in ended)
        if stopped >= 0.5 * len(ended):
            causes.append(
                f"{stopped} of {len(ended)} episodes end at rollout.{key} = "
                f"{getattr(rollout, key)}: raise it"
            )
    malformed = sum(turn.parse_status == "malformed" for turn in turns)
    invalid = sum(t.metrics.get("invalid_calls", 0.0) for t in ended)
    if max(malformed, invalid) >= 0.5 * len(turns):
        causes.append(
            f"{max(malformed, invalid):.0f} of {len(turns)} turns hold a call that cannot be read "
            f"or run: is rollout.dialect = {rollout.dialect!r} the model's?"
        )
    return causes


def rate_is_unusual(config: RunConfig, num_parameters: int) -> str | None:
    """Returns what to set where `train.learning_rate` is far from what models of this size take.

    The usual rate is a rule of thumb: 1e-6 at 8 billion weights, and with the root of their number
    more for fewer; ten times that for an adapter.
    """
    rate = config.train.learning_rate
    usual = 1e-6 * (8e9 / num_parameters) ** 0.5 * (10 if config.model.lora.rank else 1)
    if SMALLEST * usual <= rate <= LARGEST * usual:
        return None
    how = "low: it hardly learns" if rate < usual else "high: it may forget what it knows"
    return (
        f"train.learning_rate = {rate:g} is {how}; for {num_parameters / 1e6:.3g} million weights "
        f"about {usual:.0e} is usual"
    )


def explained_mismatch(config: RunConfig) -> float:
    """Returns what rounding explains of the mean difference of sampler and trainer, in nats."""
    return MISMATCH[config.inference.quantization or config.model.dtype]


def correction_of_rounding(config: RunConfig) -> str:
    """Returns what a run does about servers that round their weights."""
    level, anchor = config.objective.off_policy.level, config.objective.ratio.anchor
    if level != "none":
        what = f"objective.off_policy.level = {level!r} weighs what they sample"
    elif anchor == "rollout":
        what = "objective.ratio.anchor = 'rollout' takes ratios to what they sample from"
    else:
        what = "nothing corrects for it; objective.off_policy.level = 'token' would"
    return (
        f"inference.quantization = {config.inference.quantization!r}: servers sample from weights "
        f"that are rounded; {what}"
    )


def mismatch_is_large(mean: float, config: RunConfig) -> str | None:
    """Returns what to do where sampler and trainer disagree by `mean` nats per token."""
    limit = explained_mismatch(config)
    if mean < limit:
        return None
    return (
        f"sampler and trainer differ by {mean:.2g} nats per token, where "
        f"{config.inference.quantization or config.model.dtype} "
        f"explains {limit:g}: look at temperature and chat template of both, and at the server's "
        "dtype (docs/precision.md)"
    )
