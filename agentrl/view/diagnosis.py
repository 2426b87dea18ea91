"""Why does it not learn? Rules over a run's numbers, each with examples to look at.

A rule looks at the last steps, WINDOW of them, and says what it found in the run's own numbers, or
that the run did not record them. Thresholds are rules of thumb; each finding shows its number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.rollout.log import TrajectoryEntry
from agentrl.view.curves import REWARD, number, series, short_number
from agentrl.view.groups import Group, grouped
from agentrl.view.runs import RunFiles

WINDOW = 10


@dataclass(slots=True, frozen=True)
class Finding:
    text: str
    """What was seen, with its numbers."""
    query: dict[str, Any] | None = None
    """Of the page of groups, for examples; none where the curve is the example."""


@dataclass(slots=True)
class Evidence:
    """What rules look at."""

    metrics: list[dict[str, Any]]
    groups: list[Group]
    recent: list[Group] = field(default_factory=list)
    """Of the last WINDOW steps that have any."""
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = sorted({group.step for group in self.groups})[-WINDOW:]
        recent = set(self.steps)
        self.recent = [group for group in self.groups if group.step in recent]

    def entries(self) -> list[TrajectoryEntry]:
        return [entry for group in self.recent for entry in group.entries]

    def values(self, key: str, lines: slice) -> list[float]:
        return [v for row in self.metrics[lines] if (v := number(row.get(key))) is not None]

    def last(self, *keys: str) -> float | None:
        """The sum of the keys' means over the last steps; None where the run has none of them."""
        found = [_mean(self.values(key, slice(-WINDOW, None))) for key in keys]
        known = [value for value in found if value is not None]
        return math.fsum(known) if known else None

    def first(self, key: str) -> float | None:
        return _mean(self.values(key, slice(WINDOW)))


Verdict = Finding | str | None
"""A finding; a sentence that says what was seen instead; None where the numbers are missing."""


def diagnose(run: RunFiles) -> dict[str, Any]:
    """Every rule's verdict, findings first."""
    evidence = Evidence(run.metrics(), grouped(run))
    results = []
    for rule in RULES:
        verdict = rule.check(evidence) if evidence.metrics or evidence.groups else None
        found = isinstance(verdict, Finding)
        results.append(
            {
                "id": rule.id,
                "title": rule.title,
                "state": "found" if found else "unknown" if verdict is None else "clear",
                "text": verdict.text if isinstance(verdict, Finding) else verdict or NOT_RECORDED,
                "advice": rule.advice if found else "",
                "metric": rule.metric,
                "query": verdict.query if isinstance(verdict, Finding) else None,
            }
        )
    order = {"found": 0, "unknown": 2, "clear": 1}
    results.sort(key=lambda result: order[result["state"]])
    last = evidence.metrics[-1]["step"] if evidence.metrics else None
    return {"rules": results, "step": last, "window": WINDOW}


NOT_RECORDED = "the run did not record what this rule needs"


def _all_equal(seen: Evidence) -> Verdict:
    groups = [group for group in seen.recent if len(group.rewards()) > 1]
    if not groups:
        return None
    equal = [group for group in groups if group.zero_variance()]
    share = len(equal) / len(groups)
    text = f"in {len(equal)} of {len(groups)} groups ({share:.0%}) all rewards are equal"
    return Finding(text, {"show": "zero_variance"}) if share >= 0.9 else text


def _never_seen(seen: Evidence) -> Verdict:
    rewards = [reward for group in seen.groups for reward in group.rewards()]
    if not rewards:
        return None
    best = max(rewards)
    text = f"the best of {len(rewards)} rewards is {short_number(best)}"
    return Finding(text, {"sort": "best"}) if best <= 0 and len(rewards) >= 16 else text


def _truncation(seen: Evidence) -> Verdict:
    entries = seen.entries()
    if not entries:
        return _over(seen, "rollout/truncated_fraction", 0.2, "of the trajectories were cut")
    cut = [entry for entry in entries if entry.truncated]
    # An episode may end by itself on a turn that was cut.
    reasons = Counter(
        "turn length" if entry.stop_reason == "terminated" else entry.stop_reason for entry in cut
    )
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
    text = f"{len(cut)} of {len(entries)} trajectories were cut by a limit"
    text += f" ({why.replace('_', ' ')})" if why else ""
    return Finding(text, {"show": "truncated"}) if len(cut) >= 0.2 * len(entries) else text


def _malformed(seen: Evidence) -> Verdict:
    entries = seen.entries()
    turns = sum(entry.turns for entry in entries)
    if not turns:
        return _over(seen, "rollout/malformed_fraction", 0.1, "of the turns could not be read")
    bad = sum(entry.malformed for entry in entries)
    text = f"{bad} of {turns} turns ({bad / turns:.0%}) hold a tool call that could not be read"
    query = {"show": "malformed", "sort": "malformed"}
    return Finding(text, query) if bad >= 0.1 * turns else text


def _errors(seen: Evidence) -> Verdict:
    entries = seen.entries()
    if not entries:
        return _over(seen, "rollout/error_fraction", 0.05, "of the trajectories failed")
    codes = Counter(entry.error for entry in entries if entry.error)
    failed = codes.total()
    tools = sum(entry.tool_errors for entry in entries)
    text = f"{failed} of {len(entries)} trajectories failed, tools failed {tools:.0f} times"
    if failed >= 0.05 * len(entries):
        code, count = codes.most_common(1)[0]
        return Finding(f"{text}; {count} with {code}", {"show": "failed", "error": code})
    if tools >= 0.2 * len(entries):
        return Finding(text, {"show": "tool_errors"})
    return text


def _mismatch(seen: Evidence) -> Verdict:
    gap = seen.last("policy/rollout_train_logprob_diff_mean")
    if gap is None:
        return None
    text = f"sampler and trainer differ by {short_number(gap)} nats per token"
    return Finding(text, {"sort": "surprising"}) if gap >= 0.05 else text


def _staleness(seen: Evidence) -> Verdict:
    mean, ess = seen.last("rollout/staleness_mean"), seen.last("policy/ess")
    if mean is None:
        return None
    text = f"tokens were sampled {short_number(mean)} steps before they were trained"
    text += f"; the effective sample is {ess:.0%} of the batch" if ess is not None else ""
    return Finding(text) if mean >= 2 else text


def _entropy(seen: Evidence) -> Verdict:
    key = "policy/entropy"
    before, now, reward = seen.first(key), seen.last(key), seen.last(REWARD)
    if before is None or now is None:
        return None
    best = max((value for _, value in series(seen.metrics, REWARD)), default=0.0)
    rewards = [reward for group in seen.groups for reward in group.rewards()]
    best = max(rewards, default=best)
    text = f"entropy went from {short_number(before)} to {short_number(now)} nats"
    # A policy that has learned its task is sure of it, too.
    solved = reward is not None and reward >= 0.8 * best > 0
    if now <= 0.2 * before and not solved:
        shown = "none" if reward is None else short_number(reward)
        return Finding(f"{text}, and the reward is {shown}", {"sort": "newest"})
    return text


def _clipping(seen: Evidence) -> Verdict:
    share = seen.last("policy/clip_fraction_high", "policy/clip_fraction_low")
    if share is None:
        return None
    text = f"the clip takes the gradient of {share:.1%} of the tokens"
    return Finding(text) if share >= 0.2 else text


def _dead_gradients(seen: Evidence) -> Verdict:
    norms = seen.values("train/grad_norm", slice(-WINDOW, None))
    skipped = seen.last("train/skipped_updates")
    if not norms and not skipped:
        return None
    dead = sum(norm < 1e-8 for norm in norms)
    text = f"{dead} of the last {len(norms)} gradients were 0"
    if skipped:
        text += f", {skipped:.1f} updates a step were skipped for a gradient that is not finite"
    bad = dead * 2 >= max(1, len(norms)) or (skipped or 0) >= 0.5
    return Finding(text, {"show": "zero_variance"}) if bad else text


def _length(seen: Evidence) -> Verdict:
    key = "rollout/tokens_per_trajectory"
    before, now = seen.first(key), seen.last(key)
    if before is None or now is None:
        return None
    text = f"trajectories went from {short_number(before)} to {short_number(now)} sampled tokens"
    return Finding(text, {"sort": "longest"}) if now >= 3 * max(before, 1) else text


def _one_component(seen: Evidence) -> Verdict:
    entries = [entry for entry in seen.entries() if entry.reward is not None]
    names = sorted({name for entry in entries for name in entry.reward_components})
    if len(names) < 2:
        return "the reward has fewer than two components" if entries else None
    means = {
        name: _mean(abs(v) for e in entries if (v := e.reward_components.get(name)) is not None)
        or 0.0
        for name in names
    }
    total = math.fsum(means.values())
    name, most = max(means.items(), key=lambda item: item[1])
    text = "components are on average " + ", ".join(
        f"{name} {short_number(mean)}" for name, mean in means.items()
    )
    least = min(means.values())
    # Where next to nothing was earned, no component carries it.
    one = most >= 0.05 and most >= 0.9 * total and least < 0.05
    return Finding(f"{text}: all of it is {name}", {"sort": "best"}) if one else text


def _over(seen: Evidence, key: str, limit: float, what: str) -> Verdict:
    """For runs that kept no trajectories."""
    share = seen.last(key)
    if share is None:
        return None
    return Finding(f"{share:.0%} {what}") if share >= limit else f"{share:.0%} {what}"


def _mean(values: Iterable[float]) -> float | None:
    listed: Sequence[float] = list(values)
    return math.fsum(listed) / len(listed) if listed else None


@dataclass(slots=True, frozen=True)
class Rule:
    id: str
    title: str
    advice: str
    metric: str
    """Whose curve shows it."""
    check: Callable[[Evidence], Verdict]


RULES = [
    Rule(
        "never_rewarded",
        "No reward was ever seen",
        "Nothing can be learned from rewards that are all 0. Look whether the best answers deserve "
        "one (`agentrl env check` plays the gold answers), begin with easier tasks, or give the "
        "model demonstrations first (`agentrl sft`).",
        "reward/mean",
        _never_seen,
    ),
    Rule(
        "equal_rewards",
        "All rewards of a group are equal",
        "Equal rewards give advantage 0 and no gradient: tasks are too hard, too easy, or the "
        "reward is too coarse. Mix difficulties, raise rollout.group_size, or drop such groups "
        "and play others (rollout.drop_zero_variance with max_waves of 4).",
        "reward/std",
        _all_equal,
    ),
    Rule(
        "truncation",
        "Episodes are cut short",
        "Answers that are cut earn nothing whatever they would have said. Raise "
        "rollout.max_turn_tokens, max_context_tokens or max_turns, whichever is named, or leave "
        "cut episodes out (objective.reward.truncated = 'mask').",
        "rollout/truncated_fraction",
        _truncation,
    ),
    Rule(
        "malformed_calls",
        "Tool calls cannot be read",
        "Look at what the model writes: rollout.dialect may be another than the model's, or "
        "rollout.max_turn_tokens cuts calls. `agentrl train --dry-run` says which dialect is read.",
        "rollout/malformed_fraction",
        _malformed,
    ),
    Rule(
        "errors",
        "Tools or graders fail",
        "A failed trajectory is left out of the gradient, and a failing tool teaches the wrong "
        "thing. The error's message stands in the trajectory.",
        "rollout/error_fraction",
        _errors,
    ),
    Rule(
        "mismatch",
        "Sampler and trainer disagree",
        "The trainer learns from probabilities that the sampler did not use. Check the dtype of "
        "both, rollout.temperature and stop strings; correct what is left with "
        "objective.off_policy (docs/precision.md).",
        "policy/rollout_train_logprob_diff_mean",
        _mismatch,
    ),
    Rule(
        "staleness",
        "Samples are old",
        "Lower rollout.max_staleness, add inference capacity, or train faster; an effective sample "
        "far below the batch means that its correction uses up the data.",
        "rollout/staleness_mean",
        _staleness,
    ),
    Rule(
        "entropy_collapse",
        "The policy stopped exploring",
        "It is sure of answers that do not pay. Lower train.learning_rate, raise the upper clip "
        "(objective.surrogate.high), add objective.entropy.coef or a KL, or raise the temperature.",
        "policy/entropy",
        _entropy,
    ),
    Rule(
        "clipping",
        "Ratios are clipped",
        "The policy moves further within a step than the clip allows. Lower train.learning_rate, "
        "train.num_epochs or num_minibatches.",
        "policy/clip_fraction_high",
        _clipping,
    ),
    Rule(
        "dead_gradients",
        "There is no gradient",
        "Every advantage is 0, every token is masked, or the gradient is not finite. See the "
        "groups without variance, policy/trained_fraction and train/skipped_updates.",
        "train/grad_norm",
        _dead_gradients,
    ),
    Rule(
        "length_explosion",
        "Answers grow and grow",
        "Look whether the longest say anything new. An average over each answer favours long ones: "
        "objective.aggregate over all tokens (dapo) or a constant (dr_grpo) does not; "
        "a penalty for length helps too.",
        "rollout/tokens_per_trajectory",
        _length,
    ),
    Rule(
        "one_component",
        "One component carries the reward",
        "Look whether the best answers deserve the others: a grader that never pays looks the same "
        "(`agentrl env check` plays the gold answers). If they do not, the policy earns its reward "
        "without the task: lower that component's weight, or pay it only where the others are "
        "earned.",
        "reward/mean",
        _one_component,
    ),
]
