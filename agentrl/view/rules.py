"""Judges a run by one table of rules over its numbers and its trajectories.

A run looks at its own steps by them, `agentrl doctor --play` at the episodes that it plays, and the
viewer's diagnosis at the files of a run. Most rules look at the last steps, WINDOW of them; those
about the policy's movement and the reward look at the whole curve, and name the step. A rule
reports the run's own numbers, or that the run did not record them. Thresholds are rules of thumb;
each finding shows its number.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.evaluate.episodes import value_at
from agentrl.rollout.log import TrajectoryEntry, entry_of
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.types import Trajectory, environment_of
from agentrl.view.changes import Change, fall
from agentrl.view.curves import REWARD, number, series, short_number
from agentrl.view.groups import Group

WINDOW = 10


@dataclass(slots=True, frozen=True)
class Finding:
    text: str
    """The observation, with its numbers."""
    query: dict[str, Any] | None = None
    """Query of the page of groups, for examples; none where the curve is the example."""
    step: int | None = None
    """Step at which it began; None where that is not known."""
    share: float = 1.0
    """Share of the episodes or turns that show it, where the rule counts them."""


@dataclass(slots=True)
class Evidence:
    """The numbers and trajectories that rules look at."""

    metrics: list[dict[str, Any]]
    groups: list[Group]
    config: dict[str, Any] = field(default_factory=dict)
    recent: list[Group] = field(default_factory=list)
    """Groups of the last WINDOW steps that have any."""
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = sorted({group.step for group in self.groups})[-WINDOW:]
        recent = set(self.steps)
        self.recent = [group for group in self.groups if group.step in recent]

    @classmethod
    def of_batch(
        cls,
        trajectories: Sequence[Trajectory],
        config: dict[str, Any],
        metrics: dict[str, float] | None = None,
    ) -> Evidence:
        """Returns the evidence of one step that was played just now.

        Args:
            metrics: what the trainer measured on it.
        """
        groups: dict[str, Group] = {}
        for each in trajectories:
            group = groups.setdefault(each.group_id, Group(1, []))
            group.entries.append(entry_of(each, step=1, offset=0, length=0))
        of_rollouts = rollout_metrics(RolloutBatch([], list(trajectories))) if trajectories else {}
        row = {"step": 1, **of_rollouts, **(metrics or {})}
        return cls([row], list(groups.values()), config)

    def before(self, step: int) -> Evidence:
        return Evidence(
            [row for row in self.metrics if row["step"] < step],
            [group for group in self.groups if group.step < step],
            self.config,
        )

    def by_environment(self) -> dict[str, Evidence]:
        """Returns the evidence for each environment of a run with several `[[env]]`."""
        tables = self.config.get("env")
        if not isinstance(tables, list):
            return {}
        names = [table.get("name") or table.get("id") for table in tables]
        return {name: self._of(name) for name in names if isinstance(name, str)}

    def _of(self, name: str) -> Evidence:
        metrics = []
        for row in self.metrics:
            own = {"step": row["step"]}
            for key, value in row.items():
                if key.startswith(f"env/{name}/"):
                    own[key.removeprefix(f"env/{name}/")] = value
                elif key.startswith(f"eval/{name}/"):
                    own[key.replace(f"{name}/", "", 1)] = value
            metrics.append(own)
        groups = [g for g in self.groups if environment_of(g.entries[0].group_id) == name]
        return Evidence(metrics, groups, self.config)

    def entries(self) -> list[TrajectoryEntry]:
        return [entry for group in self.recent for entry in group.entries]

    def values(self, key: str, lines: slice) -> list[float]:
        return [v for row in self.metrics[lines] if (v := number(row.get(key))) is not None]

    def last(self, *keys: str) -> float | None:
        """Returns the sum of the keys' means over the last steps; None if the run has none of these
        keys."""
        found = [_mean(self.values(key, slice(-WINDOW, None))) for key in keys]
        known = [value for value in found if value is not None]
        return math.fsum(known) if known else None

    def course(self, key: str, what: str, unit: str) -> tuple[float, float, str] | None:
        """Returns the mean over the first and the last steps, and both in words."""
        before, now = _mean(self.values(key, slice(WINDOW))), self.last(key)
        if before is None or now is None:
            return None
        return before, now, f"{what} went from {short_number(before)} to {short_number(now)} {unit}"

    def fall(self) -> Change | None:
        """Returns where the reward fell without recovering."""
        rewards = series(self.metrics, REWARD)
        noise = [
            number(row.get("reward/std")) or 0.0
            for row in self.metrics
            if number(row.get(REWARD)) is not None
        ]
        counts = self.values("rollout/trajectories", slice(None))
        return fall(rewards, noise=noise, count=_mean(counts) or 1.0)


Verdict = Finding | str | None
"""A finding; a sentence that says what was seen instead; None where the numbers are missing."""


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
    return Finding(text, {"sort": "best"}) if best <= 0 and len(rewards) >= 8 else text


LIMITS = {"max_turns": "max_turns", "context_length": "max_context_tokens"}
"""Keys of `rollout` by the stop reason of the episodes that they end."""


def _truncation(seen: Evidence) -> Verdict:
    entries = seen.entries()
    if not entries:
        return _over(seen, "rollout/truncated_fraction", 0.2, "of the trajectories were cut")
    cut = [entry for entry in entries if entry.truncated]
    # An episode may end by itself on a turn that was cut, or go on after it.
    reasons = Counter(entry.stop_reason for entry in cut if entry.stop_reason != "terminated")
    by = [f"{count} by {_limit(seen, reason)}" for reason, count in reasons.most_common(3)]
    text = f"{len(cut)} of {len(entries)} trajectories were cut by a limit"
    text += f" ({', '.join(by)})" if by else ""
    turns, cut_turns = (sum(getattr(e, name) for e in entries) for name in ("turns", "cut_turns"))
    if cut_turns:
        text += f", {cut_turns} of {turns} turns by {_limit(seen, 'max_turn_tokens')}"
    most = max((count for reason, count in reasons.items() if reason in LIMITS), default=0)
    share = max(most / len(entries), cut_turns / max(turns, 1))
    if max(len(cut) / len(entries), share) < 0.2:
        return text
    return Finding(text, {"show": "truncated"}, share=share)


def _limit(seen: Evidence, reason: str) -> str:
    """Returns the key that ends episodes for this reason, with its value where it is known."""
    key = LIMITS.get(reason, reason)
    value = value_at(seen.config, "rollout", key)
    if key.startswith("max_"):
        return f"rollout.{key}" + (f" = {value}" if value is not None else "")
    return reason.replace("_", " ")


def _malformed(seen: Evidence) -> Verdict:
    entries = seen.entries()
    turns = sum(entry.turns for entry in entries)
    if not turns:
        return _over(seen, "rollout/malformed_fraction", 0.1, "of the turns could not be read")
    bad = sum(entry.malformed for entry in entries)
    text = f"{bad} of {turns} turns ({bad / turns:.0%}) hold a tool call that could not be read"
    invalid = (seen.last("env/invalid_calls") or 0.0) * len(entries)
    if invalid > bad + 0.5:
        text += f", {invalid:.0f} calls could not be read or run"
    query = {"show": "malformed", "sort": "malformed"}
    share = max(bad, invalid) / turns
    return Finding(text, query, share=share) if share >= 0.1 else text


SERVER_CODES = {"inference_error", "weight_sync_error", "unavailable", "session_lost"}
"""Errors of a server, of the policy or of an environment, that no tool and no grader can cause."""


def _servers(seen: Evidence) -> Verdict:
    entries = seen.entries()
    if not entries:
        return None
    codes = Counter(entry.error for entry in entries if entry.error in SERVER_CODES)
    text = f"{codes.total()} of {len(entries)} trajectories failed because of a server"
    if codes.total() < 0.05 * len(entries):
        return text
    code, count = codes.most_common(1)[0]
    return Finding(f"{text}; {count} with {code}", {"show": "failed", "error": code})


def _errors(seen: Evidence) -> Verdict:
    entries = seen.entries()
    if not entries:
        return _over(seen, "rollout/error_fraction", 0.05, "of the trajectories failed")
    failed = [e for e in entries if e.error and e.error not in SERVER_CODES]
    tools = sum(entry.tool_errors for entry in entries)
    calls = seen.last("env/tool_calls") or 0.0
    of_calls = min(1.0, (seen.last("env/tool_errors") or 0.0) / calls) if calls else 0.0
    text = f"{len(failed)} of {len(entries)} trajectories failed"
    if tools:
        text = f"{of_calls:.0%} of the tool calls failed, {tools:.0f} in all; {text}"
    if len(failed) >= 0.05 * len(entries):
        code, count = Counter(entry.error for entry in failed).most_common(1)[0]
        text += f"; {count} with {code}"
        if len({entry.env_id for entry in entries}) > 1:
            name, count = Counter(entry.env_id for entry in failed).most_common(1)[0]
            text += f", {count} in environment {name}"
        return Finding(text, {"show": "failed", "error": code})
    if tools < 0.2 * len(entries):
        return text
    return Finding(text, {"show": "tool_errors"}, share=of_calls)


MISMATCH = {"float32": 0.005, "bfloat16": 0.05, "fp8": 0.1}
"""Mean difference of log-probabilities, in nats, above which rounding does not explain it: that of
`model.dtype`, or of `inference.quantization`."""


def explained_mismatch(config: dict[str, Any]) -> tuple[str, float]:
    """Returns what rounds the most, and the mean difference between sampler and trainer, in nats
    per token, that it explains."""
    rounds = (
        value_at(config, "inference", "quantization")
        or value_at(config, "model", "dtype")
        or "float32"
    )
    return rounds, MISMATCH[rounds]


def _mismatch(seen: Evidence) -> Verdict:
    """Judges the turns of the newest policy, and the mean over all, in which older policies may
    have a part, by a higher limit."""
    gap = seen.last("policy/fresh_diff_mean")
    of_all = seen.last("policy/rollout_train_logprob_diff_mean")
    dtype, limit = explained_mismatch(seen.config)
    apart = max(limit, MISMATCH["bfloat16"])
    if gap is None or (of_all is not None and of_all >= apart):
        gap, limit = of_all, apart
    if gap is None:
        return None
    text = f"sampler and trainer differ by {short_number(gap)} nats per token in {dtype}"
    return Finding(f"{text}, above {limit:g}", {"sort": "surprising"}) if gap >= limit else text


def _staleness(seen: Evidence) -> Verdict:
    mean, ess = seen.last("rollout/staleness_mean"), seen.last("policy/ess")
    if mean is None:
        return None
    text = f"tokens were sampled {short_number(mean)} steps before they were trained"
    text += f"; the effective sample is {ess:.0%} of the batch" if ess is not None else ""
    return Finding(text) if mean >= 2 else text


def _entropy(seen: Evidence) -> Verdict:
    if (course := seen.course("policy/entropy", "entropy", "nats")) is None:
        return None
    (before, now, text), reward = course, seen.last(REWARD)
    best = max((value for _, value in series(seen.metrics, REWARD)), default=0.0)
    rewards = [reward for group in seen.groups for reward in group.rewards()]
    best = max(rewards, default=best)
    # A policy that has learned its task is sure of it, too.
    solved = reward is not None and reward >= 0.8 * best > 0
    # Where test tasks have become worse, a smaller fall is a cause to think of.
    fell = _test_fell(seen) is not None
    if now <= (0.5 if fell else 0.2) * before and (fell or not solved):
        shown = "none" if reward is None else short_number(reward)
        return Finding(f"{text}, and the reward is {shown}", {"sort": "newest"})
    return text


def _uniform(seen: Evidence) -> Verdict:
    if (course := seen.course("policy/entropy", "entropy", "nats")) is None:
        return None
    before, now, text = course
    if now >= max(2 * before, before + UNIFORM_RISE):
        return Finding(f"{text}: what it writes comes close to chance", {"sort": "newest"})
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
    if (course := seen.course(key, "trajectories", "sampled tokens")) is None:
        return None
    before, now, text = course
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


def _unseen_tools(seen: Evidence) -> Verdict:
    unseen = seen.last("env/unseen_tools")
    if unseen is None:
        return "no prompt lacks a tool" if seen.metrics else None
    text = f"{short_number(unseen)} of the tools on offer do not stand in the prompt"
    return Finding(text, {"sort": "newest"}) if unseen > 0 else text


def _refused_calls(seen: Evidence) -> Verdict:
    refused = seen.last("rollout/refused_calls")
    if not seen.metrics:
        return None
    if refused is None:
        return "no call of an agent was refused"
    trajectories = seen.last("rollout/trajectories") or 1.0
    text = f"{short_number(refused)} calls of agents a step were refused"
    return Finding(text) if refused >= 0.1 * trajectories else text


def _too_far(seen: Evidence) -> Verdict:
    moved = series(seen.metrics, MOVED)
    if not moved:
        return None
    fallen = seen.fall()
    rewards = [value for _, value in series(seen.metrics, REWARD)]
    most = max(value for _, value in moved)
    usual = statistics.median(value for _, value in moved)
    if rewards and fallen is None and rewards[-1] > rewards[0]:
        return f"a step moves the weights by {most:.2g} of their norm at most, and the reward rose"
    # Of a step that the reward fell after, less is needed to suspect it.
    limit = FAR if fallen is None else FAR_BEFORE_A_FALL
    for step, value in moved:
        text = f"step {step} moved the weights by {value:.2g} of their norm"
        if fallen is not None and step >= fallen.step:
            break
        if len(moved) >= 4 and value >= max(FAR_FOR_ONE, 10 * usual):
            usually = f"{value / usual:.0f} times as far as is usual in this run"
            return Finding(f"{text}, {usually}", {"step": step}, step)
        if value >= limit:
            return Finding(f"{text}, where {limit:g} is far", {"step": step}, step)
    return f"a step moves the weights by {usual:.2g} of their norm, {most:.2g} at most"


def _not_moving(seen: Evidence) -> Verdict:
    moved = [value for _, value in series(seen.metrics, MOVED)]
    rates = [value for _, value in series(seen.metrics, "train/learning_rate")]
    if not moved and not rates:
        return None
    norms = seen.values("train/grad_norm", slice(None))
    if norms and max(norms) < 1e-8:
        return "there is no gradient to move along"
    if moved:
        text = f"a step moves the weights by at most {max(moved):.2g} of their norm"
        if max(moved) < ROUNDED_AWAY:
            return Finding(f"{text}, which float32 rounds away (6e-8)")
        return text
    text = f"the learning rate is at most {max(rates):.2g}"
    return Finding(text) if max(rates) < 1e-9 else text


def _parted(seen: Evidence) -> Verdict:
    key = _evaluation(seen)
    if key is None:
        return "the run was not evaluated" if seen.metrics else None
    evals = series(seen.metrics, key)
    if fell := _test_fell(seen):
        best, last = fell
        return Finding(
            f"on test tasks the reward was best at step {best[0]}, {short_number(best[1])}, and is "
            f"{short_number(last)} now, while it rose on training tasks",
            None,
            best[0],
        )
    train = [value for _, value in series(seen.metrics, REWARD)]
    if len(evals) < 4 or len(train) < 8:
        return "there are too few evaluations to compare"
    third = max(2, len(evals) // 3)
    before, after = (_mean([v for _, v in part]) or 0.0 for part in (evals[:third], evals[-third:]))
    part = max(2, len(train) // 4)
    first, last = _mean(train[:part]) or 0.0, _mean(train[-part:]) or 0.0
    text = (
        f"on training tasks the reward went from {short_number(first)} to {short_number(last)}, "
        f"on test tasks from {short_number(before)} to {short_number(after)}"
    )
    gain = last - first
    if gain >= 0.15 * max(abs(first), abs(last)) and gain > 0.05 and after - before <= 0.2 * gain:
        best = max(evals, key=lambda point: point[1])
        return Finding(f"{text}, best at step {best[0]}", None, best[0])
    return text


def _evaluation(seen: Evidence) -> str | None:
    keys = (key for row in seen.metrics for key in row)
    return next((key for key in keys if key.startswith("eval/") and "avg@" in key), None)


def _test_fell(seen: Evidence) -> tuple[tuple[int, float], float] | None:
    """Returns the best evaluation and the value of the last one, if the last is lower by more than
    the noise of both and the reward on training tasks did not fall with it."""
    key = _evaluation(seen)
    evals = series(seen.metrics, key) if key else []
    if len(evals) < 2:
        return None
    best, (_, last) = max(evals, key=lambda point: point[1]), evals[-1]
    tasks, samples = (
        value_at(seen.config, "eval", name) for name in ("num_tasks", "samples_per_task")
    )
    count = (tasks if isinstance(tasks, int) else 64) * (samples if isinstance(samples, int) else 1)
    noise = 2 * math.sqrt(2 * max(best[1] * (1 - best[1]), 0.01) / count)
    train = series(seen.metrics, REWARD)
    before = _mean(value for step, value in train if step <= best[0])
    after = _mean(value for step, value in train if step > best[0])
    if before is None or after is None or after < before or best[1] - last <= noise:
        return None
    return best, last


def _reward_fell(seen: Evidence) -> Verdict:
    if len(series(seen.metrics, REWARD)) < 2:
        return None
    change = seen.fall()
    if change is None:
        return "the reward did not fall for good"
    text = (
        f"the reward fell from {short_number(change.before)} to {short_number(change.after)} "
        f"at step {change.step}"
    )
    return Finding(text, {"step": change.step}, change.step)


MOVED = "train/relative_update"
FAR = 0.03
"""Share of the weights' norm: a pretrained model that moves as far in a step is another model."""
FAR_BEFORE_A_FALL = 0.01
FAR_FOR_ONE = 0.001
"""From here on one step that is far beyond the others is told."""
ROUNDED_AWAY = 1e-7
UNIFORM_RISE = 1.5
"""Nats by which the entropy of a token rises where a policy falls apart into chance."""


def _cheaters(seen: Evidence) -> Verdict:
    """Looks at the whole run: cheaters play in its first evaluation only."""
    keys = {key for row in seen.metrics for key in row if key.startswith("red_team/")}
    most = {key: max(seen.values(key, slice(None)), default=0.0) for key in sorted(keys)}
    paid = sum(value for key, value in most.items() if key.endswith("/paid"))
    if not keys:
        return None
    if not paid:
        return "no cheater was paid"
    names = [key.rpartition("/")[2].replace("_", " ") for key, value in most.items() if value > 0]
    names = [each for each in names if each != "paid"]
    return Finding(f"{paid:g} paid without any work; rewarded: {', '.join(names)}")


def _over(seen: Evidence, key: str, limit: float, what: str) -> Verdict:
    """Judges a fraction from the metrics, for runs that kept no trajectories."""
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
    """The statement that holds where nothing is found."""
    fix: str
    """What to do, in a few words."""
    why: str
    """What it does to the run, and where to look."""
    metric: str
    """The metric whose curve shows it."""
    check: Callable[[Evidence], Verdict]
    of_policy: bool = False
    """True if a policy that has fallen apart shows it, too."""


RULES = [
    Rule(
        "cheaters",
        "Cheaters are not paid",
        "mend the grader: `agentrl env attack ID` plays the same cheaters in seconds",
        "An agent that does none of the work is paid, so the policy may learn to do as it does.",
        "red_team/paid",
        _cheaters,
    ),
    Rule(
        "servers",
        "Servers answer",
        "read the servers' logs in the run's logs/, or those of the environment's server, and give "
        "them more memory, or the run fewer episodes at once (rollout.max_concurrent)",
        "A server of the policy or of the environment did not answer, was full or was restarted; "
        "the environment's code is not to blame.",
        "rollout/error_fraction",
        _servers,
    ),
    Rule(
        "errors",
        "Tools and graders work",
        "read the error in the examples and mend the tool or grader (`agentrl env check`)",
        "A failed trajectory is left out of the gradient, and a failing tool teaches the wrong "
        "thing. The error's message stands in the trajectory.",
        "rollout/error_fraction",
        _errors,
    ),
    Rule(
        "unseen_tools",
        "The prompt names every tool",
        "use a chat template that writes tools (rollout.tools), or name them in the prompt",
        "The chat template leaves out the tools, so the model cannot know them.",
        "env/unseen_tools",
        _unseen_tools,
    ),
    Rule(
        "refused_calls",
        "Agents' calls are answered",
        "read the reasons in the log and mend the agent",
        "The endpoint refused calls of the agent, so its episode ended early or went on without "
        "an answer. The log has each reason once, a trajectory's info its own "
        "(docs/agent_endpoint.md).",
        "rollout/refused_calls",
        _refused_calls,
    ),
    Rule(
        "uniform",
        "The policy keeps what it knew",
        "lower train.learning_rate, and start anew from the model or a checkpoint before",
        "Its tokens have become nearly random, so calls cannot be read and rewards are chance: "
        "these are consequences. The updates were too large, or an entropy bonus too strong.",
        "policy/entropy",
        _uniform,
    ),
    Rule(
        "malformed_calls",
        "Tool calls can be read",
        "look at a call: whether rollout.dialect is the model's (`agentrl train --dry-run` says "
        "which is read), and whether rollout.max_turn_tokens cuts it",
        "What cannot be read is not executed, so its episode earns nothing.",
        "rollout/malformed_fraction",
        _malformed,
        of_policy=True,
    ),
    Rule(
        "mismatch",
        "Sampler and trainer agree",
        "check the dtype, temperature, stop strings and chat template of both (docs/precision.md)",
        "The trainer learns from probabilities that the sampler did not use. What is left, "
        "objective.off_policy corrects.",
        "policy/rollout_train_logprob_diff_mean",
        _mismatch,
    ),
    Rule(
        "staleness",
        "Samples are fresh",
        "lower rollout.max_staleness, add inference capacity, or train faster",
        "An effective sample far below the batch means that its correction uses up the data.",
        "rollout/staleness_mean",
        _staleness,
    ),
    Rule(
        "too_far",
        "The policy moves in small steps",
        "lower train.learning_rate",
        "One update changed the model so much that what it had learned is gone. Go back to a "
        "checkpoint before that step with a rate ten times lower, or warm up "
        "(train.warmup_steps).",
        MOVED,
        _too_far,
    ),
    Rule(
        "not_moving",
        "The policy moves",
        "raise train.learning_rate",
        "Updates are smaller than what a weight can hold, so the model stays what it was. 1e-6 to "
        "1e-5 is usual for a pretrained model, 1e-4 to 1e-3 for a tiny one or an adapter.",
        MOVED,
        _not_moving,
    ),
    Rule(
        "truncation",
        "Episodes end by themselves",
        "raise the limit that is named, if the environment ends an episode at all (`agentrl env "
        "check`)",
        "Answers that are cut earn nothing whatever they would have said. "
        "objective.reward.truncated = 'mask' leaves them out.",
        "rollout/truncated_fraction",
        _truncation,
        of_policy=True,
    ),
    Rule(
        "one_component",
        "Every part of the reward is earned",
        "check whether the best answers deserve the other parts, and mend the grader "
        "(`agentrl env check` plays the gold answers) or lower that component's weight",
        "A grader that never pays looks the same as a policy that earns its reward without the "
        "task.",
        "reward/mean",
        _one_component,
        of_policy=True,
    ),
    Rule(
        "clipping",
        "Ratios stay within the clip",
        "lower train.learning_rate, train.num_epochs or num_minibatches",
        "The policy moves further within a step than the clip allows.",
        "policy/clip_fraction_high",
        _clipping,
        of_policy=True,
    ),
    Rule(
        "entropy_collapse",
        "The policy explores",
        "lower train.learning_rate, or raise objective.surrogate.high",
        "It is sure of answers that do not pay. objective.entropy.coef, a KL, or a higher "
        "temperature work against it, too.",
        "policy/entropy",
        _entropy,
        of_policy=True,
    ),
    Rule(
        "length_explosion",
        "Answers keep their length",
        "average over all tokens (the preset dapo or dr_grpo), or add a penalty for length",
        "Look whether the longest say anything new. An average over each answer favours long ones.",
        "rollout/tokens_per_trajectory",
        _length,
        of_policy=True,
    ),
    Rule(
        "never_rewarded",
        "A reward was seen",
        "take easier tasks, or train the model on demonstrations first (`agentrl sft`); check that "
        "the grader rewards a correct answer (`agentrl env check`)",
        "Nothing can be learned from rewards that are all 0.",
        "reward/mean",
        _never_seen,
        of_policy=True,
    ),
    Rule(
        "equal_rewards",
        "Rewards differ within a group",
        "mix difficulties, or raise rollout.group_size",
        "Equal rewards give advantage 0 and no gradient: tasks are too hard, too easy, or the "
        "reward is too coarse. rollout.keep = ['zero_variance'] with max_waves of 4 drops such "
        "groups and plays others.",
        "reward/std",
        _all_equal,
        of_policy=True,
    ),
    Rule(
        "dead_gradients",
        "There is a gradient",
        "look for groups without variance and for masked tokens",
        "Every advantage is 0, every token is masked (policy/trained_fraction), or the gradient "
        "is not finite (train/skipped_updates).",
        "train/grad_norm",
        _dead_gradients,
        of_policy=True,
    ),
    Rule(
        "parted",
        "Train and test rise together",
        "train on more tasks, or take the checkpoint of the best evaluation",
        "The policy learns its training tasks by heart. A KL to the reference "
        "(objective.kl.coef) works against it, too.",
        "reward/mean",
        _parted,
    ),
    Rule(
        "reward_fell",
        "The reward holds",
        "compare the groups and the curves before and after that step",
        "Entropy, the gradient's norm and train/relative_update often show why.",
        "reward/mean",
        _reward_fell,
    ),
]


def findings(seen: Evidence) -> dict[str, tuple[Rule, Finding]]:
    """Returns what the rules find, by their names."""
    verdicts = ((rule, rule.check(seen)) for rule in RULES)
    return {r.id: (r, verdict) for r, verdict in verdicts if isinstance(verdict, Finding)}
