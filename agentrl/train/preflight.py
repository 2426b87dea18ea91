"""Judges a run's setup by its first episodes, before hours are spent on it.

A run checks its own first rollouts, which costs nothing; `agentrl doctor --play` plays a few.
Equal rewards alone prove little if tasks are hard. So a run stops early only if one of the rules
(`view/rules.py`) explains them; otherwise it warns first and stops later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.config import RunConfig
from agentrl.errors import TrainingError
from agentrl.types import Trajectory
from agentrl.view.rules import RULES, Evidence, findings

ENOUGH = 32
"""Number of equal rewards after which a run stops if its setup explains them."""
MOST = 192
"""Number of equal rewards after which a run stops in any case. By then a task that is solved once
in a hundred times has been solved in six runs of seven."""
EXPLAINING = ("truncation", "malformed_calls")
"""Rules that explain rewards of 0 where most episodes show what they find."""
GO_ON = "set run.preflight = false to train all the same"
SMALLEST, LARGEST = 1 / 5, 20
"""Multiples of the usual learning rate; a run warns of rates outside."""


@dataclass(slots=True)
class FirstRewards:
    """Watches the rewards of a run as long as all of them are equal."""

    is_on: bool
    """False if `run.preflight` is off, and once two rewards differed."""
    count: int = 0
    """Rewards seen so far."""
    seen: set[object] = field(default_factory=set)
    """Distinct rewards so far, with all values that give samples different advantages."""

    def look(self, trajectories: Sequence[Trajectory], config: RunConfig) -> str | None:
        """Records a step's trajectories. Returns a warning as long as all rewards are equal, and of
        anything in the setup that keeps most episodes from a reward; None if all is well.

        Raises:
            TrainingError: the run cannot learn with this setup.
        """
        scored = [t for t in trajectories if t.trainable]
        if not self.is_on or "teacher_logprobs" in config.objective.needs():
            return None
        spec = config.objective.reward
        weighted, by_length = bool(spec.weights), spec.overlong is not None
        self.seen |= {
            (
                t.reward,
                t.num_sampled_tokens * by_length,
                *sorted(t.reward_components.items()) * weighted,
            )
            for t in scored
        }
        found = findings(Evidence.of_batch(trajectories, config.model_dump()))
        causes = [
            f"{found[name][1].text}: {found[name][0].fix}"
            for name in EXPLAINING
            if name in found and found[name][1].share >= 0.5
        ]
        self.count += len(scored)
        self.is_on = len(self.seen) <= 1
        if not self.is_on or not scored:
            return "; ".join(causes) or None
        reward = scored[0].reward
        finding = (
            f"all {self.count} rewards so far are {reward:g}, so there is nothing to learn from"
        )
        if reward > 0 and not causes:
            causes = ["every task is solved, or the grader rewards any answer: take harder tasks"]
        if causes and self.count >= ENOUGH:
            raise TrainingError(f"{finding}: {'; '.join(causes)} ({GO_ON})")
        advice = next(rule.fix for rule in RULES if rule.id == "never_rewarded")
        if self.count >= MOST and "errors" in found and found["errors"][1].share >= 0.5:
            # Not before: a policy that learns to call tools makes errors that a tool raises.
            rule, failures = found["errors"]
            raise TrainingError(f"{finding}: {failures.text}: {rule.fix} ({GO_ON})")
        if self.count >= MOST:
            raise TrainingError(f"{finding}, and the episodes are sound: {advice} ({GO_ON})")
        return f"{finding}{': ' + '; '.join(causes) if causes else ''}; {advice}"


def rate_is_unusual(config: RunConfig, num_parameters: int) -> str | None:
    """Returns a warning if `train.learning_rate` is far from the usual one for models of this size.

    The usual rate is a rule of thumb: 1e-6 at 8 billion weights, inversely proportional to the
    square root of their number, and ten times that for an adapter.

    Args:
        num_parameters: number of trained weights.
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


def correction_of_rounding(config: RunConfig) -> str:
    """Returns a line that says how the objective corrects for servers that round their weights."""
    level, anchor = config.objective.off_policy.level, config.objective.ratio.anchor
    if level != "none":
        what = f"objective.off_policy.level = {level!r} weights the samples accordingly"
    elif anchor == "rollout":
        what = "objective.ratio.anchor = 'rollout' takes ratios to the sampler's policy"
    else:
        what = "nothing corrects for it; objective.off_policy.level = 'token' would"
    return (
        f"inference.quantization = {config.inference.quantization!r}: servers sample from rounded "
        f"weights; {what}"
    )
