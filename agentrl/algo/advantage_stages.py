"""The stages that make advantages, once per step: reward, credit, baseline, scale, whiten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentrl.algo.stage import Fraction, NonNegative, Positive, Stage


class Overlong(Stage):
    """- factor clip((n - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1), DAPO's penalty for
    long trajectories (2503.14476, eq. 13)."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Sampled tokens of a trajectory at which the penalty is full."""
    buffer_tokens: Annotated[int, Field(ge=1)]
    """The penalty grows linearly over these last tokens before `max_tokens`."""
    factor: NonNegative = 1.0
    """The full penalty."""
    cap: bool = True
    """Never subtract more than `factor`, also beyond `max_tokens`."""


class Reward(Stage):
    """R = the trajectory's reward."""

    weights: dict[str, float] | None = None
    """R = sum of weight x component over these reward components. None uses the trajectory's own
    reward."""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """How components become one number.
    sum: components are weighted and summed.
    normalize_then_sum: baseline and scale apply to each, then they are summed (GDPO, 2601.05242).
    """
    missing: Literal["skip", "exclude"] = "skip"
    """What is done about a component without an answer.
    skip: a component that is nan counts 0; a trajectory without any component is excluded.
    exclude: it excludes its trajectory, which enters no statistic and no loss.
    """
    scale: float = 1.0
    """R is multiplied by this, then `bias` is added, then it is clipped."""
    bias: float = 0.0
    """Added to the scaled reward."""
    clip: Positive | None = None
    """Largest absolute value of the scaled reward."""
    overlong: Overlong | None = None
    """Soft penalty for long trajectories, applied last."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Trajectories cut by a limit.
    keep: trajectories cut by a limit keep their reward.
    zero: R = 0 where a limit cut the trajectory.
    mask: trajectories cut by a limit leave the loss and its denominators, not the baseline.
    """

    def problems(self) -> Iterator[str]:
        if self.combine == "normalize_then_sum" and self.weights is None:
            yield "reward.combine = 'normalize_then_sum' needs reward.weights"

    def conflicts(self, credit: Credit) -> Iterator[str]:
        if self.combine == "normalize_then_sum" and credit.kind != "outcome":
            yield (
                "reward.combine = 'normalize_then_sum' normalises whole trajectories; set "
                "credit.kind = 'outcome'"
            )


class OutcomeCredit(Stage):
    """G_t = R at every trained token."""

    kind: Literal["outcome"] = "outcome"


class TurnCredit(Stage):
    """G_t = sum over turns j >= k of gamma^(j - k) r_j at every token of turn k."""

    kind: Literal["turn"] = "turn"
    gamma: Fraction = 1.0
    """Discount per turn; there is none inside a turn."""


class TokenCredit(Stage):
    """G_t = sum over trained tokens u >= t of gamma^(u - t) r_u.

    Tokens that the policy did not write cost no discount.
    """

    kind: Literal["token"] = "token"
    gamma: Fraction = 1.0
    """Discount per trained token."""
    reward_at: Literal["turn", "end"] = "turn"
    """Each turn's reward lies on the turn's last trained token, or all of it on the last one."""


class GaeCredit(Stage):
    """A_t = d_t + gamma lam A_t', d_t = r_t + gamma V_t' - V_t, t' the next trained token
    (1506.02438, eq. 16)."""

    kind: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount per trained token."""
    lam: Fraction = 1.0
    """Lambda of the advantages. Unused where `length_alpha` is above 0."""
    lam_value: Fraction | None = None
    """Lambda of the critic's targets. None uses that of the advantages; VAPO has 1."""
    length_alpha: NonNegative = 0.0
    """If above 0, lam = 1 - 1 / (length_alpha n), n trained tokens of the trajectory. VAPO
    (2504.05118, eq. 11) has 0.05."""
    reward_at: Literal["turn", "end"] = "turn"
    """Each turn's reward lies on the turn's last trained token, or all of it on the last one."""


class GigpoCredit(Stage):
    """A = episode_weight x advantage of R in the group + step_weight x advantage of the turn's
    discounted return (gamma per turn) among the group's turns that began in the same state
    (2505.10978, eq. 8)."""

    kind: Literal["gigpo"] = "gigpo"
    gamma: Fraction = 0.95
    """Discount per turn of the step returns."""
    episode_weight: float = 1.0
    """Weight of the advantage within the group."""
    step_weight: float = 1.0
    """Weight of the advantage within the state (`state_ids`)."""


Credit = Annotated[
    OutcomeCredit | TurnCredit | TokenCredit | GaeCredit | GigpoCredit,
    Field(discriminator="kind"),
]


class Baseline(Stage):
    """The value that is subtracted from the return. A = 0 in groups of one or without variance."""

    chosen_by: ClassVar = ("kind",)
    kind: Literal["none", "mean", "leave_one_out", "second_best", "optimal_token", "given"] = "mean"
    """The advantage before scaling.
    mean: A = G - b, b = mean of G over the key.
    leave_one_out: A = G - b, b = mean of G over the key without the trajectory itself.
    second_best: A of the best of the group = its lead over the second, 0 for the others (pass@k,
    2503.19595).
    optimal_token: A_t = G_t - sum G_t W_t / sum W_t over the group, W_t = sum_(u <= t) (1 - 2 pi +
    sum pi^2), t counting trained tokens.
    given: A = G - the batch's own baseline, such as the reward of a greedy answer (ReMax).
    """
    key: Literal["group", "group_turn", "batch"] = "group"
    """Who shares a baseline: the group; the turns of a group that have the same number; all."""
    weighting: Literal["sequence", "token"] = "sequence"
    """How the mean counts.
    sequence: every trajectory counts once.
    token: trajectories count by trained tokens, b = sum n G / sum n (OPO 2505.23585, SSR-GRPO).
    """
    tolerance: NonNegative = 1e-6
    """A group whose returns differ by no more than this has advantage exactly 0."""

    def conflicts(self, credit: Credit) -> Iterator[str]:
        if credit.kind == "gae" and self.kind != "none":
            yield "GAE's baseline is the critic; set baseline.kind = 'none' and scale.kind = 'none'"
        if credit.kind == "token" and self.kind in ("mean", "leave_one_out", "second_best"):
            yield (
                "rewards-to-go differ from token to token, so a group mean is no baseline for "
                "them; set baseline.kind = 'none' (REINFORCE++) with whiten, or credit.kind = "
                "'outcome'"
            )
        if self.kind == "optimal_token" and credit.kind not in ("token", "gae"):
            yield "baseline.kind = 'optimal_token' needs credit.kind = 'token'"
        if self.key == "group_turn" and credit.kind != "turn":
            yield "baseline.key = 'group_turn' needs credit.kind = 'turn'"
        if self.kind == "second_best" and credit.kind != "outcome":
            yield (
                "baseline.kind = 'second_best' compares whole trajectories; set credit.kind = "
                "'outcome'"
            )
        if self.kind == "second_best" and self.key != "group":
            yield (
                "baseline.kind = 'second_best' compares within a group; set baseline.key = 'group'"
            )


class Scale(Stage):
    """The divisor of the centred return."""

    chosen_by: ClassVar = ("kind",)
    kind: Literal["none", "std", "mean", "success_rate"] = "none"
    """The divisor.
    std: A / (std G + eps), std G over the level.
    mean: A / mean G over the group, 0 where that is not positive (MaxRL, 2602.02710).
    success_rate: A / share of non-zero G in the batch (GPG).
    """
    level: Literal["group", "batch"] = "group"
    """Over whose returns the std is taken."""
    of: Literal["raw", "centred"] = "raw"
    """What the std is of.
    raw: the std is that of G.
    centred: the std is the root mean square of A before the division, which without a baseline is
    that of G around 0 (AReaL).
    """
    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1 (unbiased), 0 by n."""
    eps: NonNegative = 1e-6
    """Keeps the division finite, in units of the return."""
    eps_mode: Literal["add", "sqrt", "max"] = "add"
    """How eps enters.
    add: division by std + eps.
    sqrt: division by sqrt(var + eps).
    max: division by max(std, eps).
    """

    def conflicts(self, baseline: Baseline, credit: Credit) -> Iterator[str]:
        if self.kind == "mean" and baseline.kind in ("none", "given", "optimal_token"):
            yield "scale.kind = 'mean' is MaxRL's and needs baseline.kind = 'mean'"
        if self.kind == "std" and self.of == "raw" and baseline.kind == "none":
            yield (
                "scale.kind = 'std' without a baseline divides by a spread around a mean that is "
                "not subtracted; set baseline.kind = 'mean', scale.kind = 'none', or scale.of = "
                "'centred' for the spread around 0"
            )
        if self.kind != "none" and baseline.kind == "optimal_token":
            yield "the optimal token baseline is per token; set scale.kind = 'none'"
        if self.kind != "none" and baseline.kind == "given":
            yield "a given baseline has no group statistics; set scale.kind = 'none'"
        if self.kind != "none" and credit.kind in ("token", "gae"):
            yield "per-token credit is normalised by whiten; set scale.kind = 'none'"


class Whiten(Stage):
    """(A - mean) / std over the step, std the spread around that mean, or around 0 without one.

    Normalisation of the finished advantages, after credit, baseline, scale and distillation. Every
    unit counts once.
    """

    mean: Literal["none", "group", "batch"] = "none"
    """Subtract the mean over the batch or the group."""
    std: Literal["none", "group", "batch"] = "none"
    """Divide by the std over the batch or the group."""
    leave_one_out: bool = False
    """The mean that is subtracted from a unit leaves that unit out."""
    unit: Literal["token", "sequence"] = "token"
    """Statistics count every trained token once, or every trajectory once."""
    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1 (unbiased), 0 by n."""
    eps: NonNegative = 1e-8
    """Keeps the division finite. A variance, with `eps_mode = "add"` a std."""
    eps_mode: Literal["add", "sqrt", "max"] = "sqrt"
    """How eps enters.
    add: division by std + eps.
    sqrt: division by sqrt(var + eps).
    max: division by sqrt(max(var, eps)).
    """

    @property
    def is_on(self) -> bool:
        return self.mean != "none" or self.std != "none"

    def problems(self) -> Iterator[str]:
        if self.leave_one_out and self.mean == "none":
            yield "whiten.leave_one_out is that of a mean; set whiten.mean = 'group' or 'batch'"

    def warnings(self) -> Iterator[str]:
        if self.mean == "group" and self.std == "none" and self.unit == "token":
            yield (
                "objective.whiten subtracts a group's mean over tokens, in which long trajectories "
                "weigh more; baseline.kind = 'mean' or whiten.unit = 'sequence' weighs all alike"
            )
