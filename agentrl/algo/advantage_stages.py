"""Defines the stages that compute advantages, once per step: reward, credit, baseline, scale and
whiten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentrl.algo.stage import Fraction, NonNegative, Positive, Stage


class Overlong(Stage):
    """- factor clip((n - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1), DAPO's penalty for
    long trajectories (2503.14476, eq. 13)."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Number of sampled tokens at which a trajectory gets the full penalty."""
    buffer_tokens: Annotated[int, Field(ge=1)]
    """Number of tokens before `max_tokens` over which the penalty grows linearly."""
    factor: NonNegative = 1.0
    """The full penalty."""
    cap: bool = True
    """Limits the penalty to `factor` beyond `max_tokens`; otherwise it keeps growing."""


class Reward(Stage):
    """R = the trajectory's reward."""

    weights: dict[str, float] | None = None
    """R = sum of weight x component over these reward components. None uses the trajectory's own
    reward."""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """How components are combined.
    sum: components are weighted and summed.
    normalize_then_sum: baseline and scale apply to each, then they are summed (GDPO, 2601.05242).
    """
    missing: Literal["skip", "exclude"] = "skip"
    """What happens if a reward component is missing (nan).
    skip: a missing component counts 0; a trajectory with none at all is excluded.
    exclude: a missing component excludes its trajectory from all statistics and the loss.
    """
    scale: float = 1.0
    """Multiplies R, before `bias` is added and the result is clipped."""
    bias: float = 0.0
    """Added to the scaled reward."""
    clip: Positive | None = None
    """Largest absolute value of the reward after `scale` and `bias`."""
    overlong: Overlong | None = None
    """Soft penalty for long trajectories, applied last."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """What happens to trajectories cut by a limit.
    keep: trajectories cut by a limit keep their reward.
    zero: R = 0 if a limit cut the trajectory.
    mask: trajectories cut by a limit leave the loss and its denominators, but not the baseline.
    """

    def problems(self) -> Iterator[str]:
        if self.combine == "normalize_then_sum" and self.weights is None:
            yield "reward.combine = 'normalize_then_sum' needs reward.weights"

    def conflicts(self, credit: Credit) -> Iterator[str]:
        """Yields a message for each contradiction with `credit`, with what to change."""
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
    """Discount per turn; there is none within a turn."""


class TokenCredit(Stage):
    """G_t = sum over trained tokens u >= t of gamma^(u - t) r_u.

    Tokens that the policy did not write cost no discount.
    """

    kind: Literal["token"] = "token"
    gamma: Fraction = 1.0
    """Discount per trained token."""
    reward_at: Literal["turn", "end"] = "turn"
    """Where rewards are placed: each turn's on the turn's last trained token (`turn`), or all of
    them on the trajectory's last trained token (`end`)."""


class GaeCredit(Stage):
    """A_t = d_t + gamma lam A_t', d_t = r_t + gamma V_t' - V_t, t' the next trained token
    (1506.02438, eq. 16)."""

    kind: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount per trained token."""
    lam: Fraction = 1.0
    """Lambda of the advantages. Unused where `length_alpha` is above 0."""
    lam_value: Fraction | None = None
    """Lambda of the critic's targets. None uses that of the advantages; VAPO uses 1."""
    length_alpha: NonNegative = 0.0
    """If above 0, lam = 1 - 1 / (length_alpha n), at least 0, with n trained tokens in the
    trajectory. VAPO (2504.05118, eq. 11) uses 0.05."""
    reward_at: Literal["turn", "end"] = "turn"
    """Where rewards are placed: each turn's on the turn's last trained token (`turn`), or all of
    them on the trajectory's last trained token (`end`)."""


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
    """The value subtracted from the return. A = 0 in a group of one and in one without variance."""

    chosen_by: ClassVar = ("kind",)
    kind: Literal["none", "mean", "leave_one_out", "second_best", "optimal_token", "given"] = "mean"
    """The advantage before scaling.
    mean: A = G - b, b = mean of G over the key.
    leave_one_out: A = G - b, b = mean of G over the key without the trajectory itself.
    second_best: A = the best return of the group minus the second best, at the best; 0 elsewhere
    (pass@k, 2503.19595).
    optimal_token: A_t = G_t - sum G_t W_t / sum W_t over the group, W_t = sum_(u <= t) (1 - 2 pi +
    sum pi^2), t counting trained tokens.
    given: A = G - b, b = the reward of a greedy answer to the same task (ReMax).
    """
    key: Literal["group", "group_turn", "batch"] = "group"
    """The returns that share a baseline: those of a group (`group`), of the turns of a group with
    the same number (`group_turn`), or of the batch (`batch`)."""
    weighting: Literal["sequence", "token"] = "sequence"
    """How trajectories are weighted in the mean.
    sequence: every trajectory counts once.
    token: trajectories count by trained tokens, b = sum n G / sum n (OPO 2505.23585, SSR-GRPO).
    """
    tolerance: NonNegative = 1e-6
    """A group whose returns differ by no more than this has advantage exactly 0."""

    def conflicts(self, credit: Credit) -> Iterator[str]:
        """Yields a message for each contradiction with `credit`, with what to change."""
        if credit.kind == "gae" and self.kind != "none":
            yield "GAE's baseline is the critic; set baseline.kind = 'none' and scale.kind = 'none'"
        if credit.kind == "token" and self.kind in ("mean", "leave_one_out", "second_best"):
            yield (
                "rewards-to-go differ from token to token, so a group mean cannot be their "
                "baseline; set baseline.kind = 'none' (REINFORCE++) with whiten, or credit.kind = "
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
    """The returns over which the std is taken: those of a group, or of the batch."""
    of: Literal["raw", "centred"] = "raw"
    """The values of which the std is taken.
    raw: the std is that of G.
    centred: the std is the root mean square of A before the division, which without a baseline is
    that of G around 0 (AReaL).
    """
    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1 (unbiased), 0 by n."""
    eps: NonNegative = 1e-6
    """Keeps the division finite, in units of the return."""
    eps_mode: Literal["add", "sqrt", "max"] = "add"
    """How eps is applied.
    add: division by std + eps.
    sqrt: division by sqrt(var + eps).
    max: division by max(std, eps).
    """

    def conflicts(self, baseline: Baseline, credit: Credit) -> Iterator[str]:
        """Yields a message for each contradiction with the other stages, with what to change."""
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

    Normalises the advantages after credit, baseline, scale and distillation. Every unit counts
    once.
    """

    mean: Literal["none", "group", "batch"] = "none"
    """Subtracts the mean over the batch or the group."""
    std: Literal["none", "group", "batch"] = "none"
    """Divides by the std over the batch or the group."""
    leave_one_out: bool = False
    """Leaves a unit out of the mean that is subtracted from it."""
    unit: Literal["token", "sequence"] = "token"
    """The unit of the statistics: every trained token counts once (`token`), or the mean advantage
    of every trajectory counts once (`sequence`)."""
    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1 (unbiased), 0 by n."""
    eps: NonNegative = 1e-8
    """Keeps the division finite. In units of the variance, or of the std with
    `eps_mode = "add"`."""
    eps_mode: Literal["add", "sqrt", "max"] = "sqrt"
    """How eps is applied.
    add: division by std + eps.
    sqrt: division by sqrt(var + eps).
    max: division by sqrt(max(var, eps)).
    """

    @property
    def is_on(self) -> bool:
        return self.mean != "none" or self.std != "none"

    def problems(self) -> Iterator[str]:
        if self.leave_one_out and self.mean == "none":
            yield "whiten.leave_one_out needs a mean; set whiten.mean = 'group' or 'batch'"

    def warnings(self) -> Iterator[str]:
        """Yields a message for each setting that is allowed but rarely intended."""
        if self.mean == "group" and self.std == "none" and self.unit == "token":
            yield (
                "objective.whiten subtracts a group's mean over tokens, in which long trajectories "
                "weigh more; set baseline.kind = 'mean' or whiten.unit = 'sequence' to weigh all "
                "trajectories equally"
            )
