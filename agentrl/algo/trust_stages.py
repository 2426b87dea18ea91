"""Defines the masks of `objective.trust`. A token is trained only if all of them keep it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.algo.stage import Fraction, Level, NonNegative, Positive, Stage


class OpsmMask(Stage):
    """Drop tokens with A < 0 in rows where the mean of log anchor - log pi exceeds max_kl
    (DeepSeek-V3.2)."""

    kind: Literal["opsm"] = "opsm"
    max_kl: float = 1e-4
    """Largest mean of log anchor - log pi over a row, in nats per token."""
    anchor: Literal["old", "rollout"] = "old"
    """Policy to compare with: the trainer's before the update (`old`) or the sampler's
    (`rollout`)."""


class DppoTvMask(Stage):
    """Keep tokens where pi - anchor <= high (A > 0) or >= -low (A <= 0) (2602.04879)."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    low: NonNegative | None = 0.2
    """Largest decrease of a token's probability; none sets no limit."""
    high: NonNegative | None = 0.2
    """Largest increase of a token's probability; none sets no limit."""
    side: Literal["advantage", "both"] = "advantage"
    """Which bound applies.
    advantage: high where A > 0, low elsewhere.
    both: both bounds at every token.
    """
    anchor: Literal["old", "rollout"] = "old"
    """Policy to compare with: the trainer's before the update (`old`) or the sampler's
    (`rollout`)."""


class DppoKlMask(Stage):
    """Drop tokens where A moves pi further away from anchor and binary KL(anchor, pi) > max_kl
    (2602.04879)."""

    kind: Literal["dppo_kl"] = "dppo_kl"
    max_kl: NonNegative = 0.05
    """Largest binary KL of a token, in nats."""
    anchor: Literal["old", "rollout"] = "old"
    """Policy to compare with: the trainer's before the update (`old`) or the sampler's
    (`rollout`)."""


class M2Mask(Stage):
    """Drop the tokens of the step with the largest (log mu - log old)^2 until the mean of the rest
    is below max_second_moment (M2PO, 2510.01161, algorithm 1)."""

    kind: Literal["m2"] = "m2"
    max_second_moment: Positive = 0.04
    """Upper bound of the mean over the kept tokens, in squared nats."""


class RatioMask(Stage):
    """Keep where low <= statistic of x <= high over the level, x = log old - log mu."""

    kind: Literal["ratio"] = "ratio"
    level: Level = "token"
    """Unit that is kept or dropped. A turn or row (`sequence`) is judged by the mean, sum or
    maximum (`over`) of its tokens' statistics."""
    statistic: Literal["ratio", "abs", "k2", "k3"] = "ratio"
    """The statistic.
    ratio: exp(x) = old / mu.
    abs: |x|.
    k2: x^2 / 2.
    k3: exp(x) - 1 - x, the estimate of KL(mu, old).
    """
    over: Literal["mean", "sum", "max"] = "mean"
    """Combines the statistics of a turn or row. For `ratio` it combines x, giving the geometric
    mean, the product or the largest of the ratios."""
    low: NonNegative | None = None
    """Smallest statistic that is kept; none sets no limit."""
    high: NonNegative | None = None
    """Largest statistic that is kept; none sets no limit."""


class VetoMask(Stage):
    """Drop rows where any token has old / mu outside [low, high]."""

    kind: Literal["veto"] = "veto"
    low: NonNegative = 1e-4
    """Smallest ratio that a token may have."""
    high: Positive | None = None
    """Largest ratio that a token may have; none sets no limit."""


class GibberishMask(Stage):
    """Drop rows where any token has id >= min_token_id and log mu < max_logprob.

    The last entries of a vocabulary are rare words in rare scripts. If one is sampled with a
    probability below that of a uniform draw, the engine is broken or the policy has collapsed
    (SSR-GRPO, prime-rl).
    """

    kind: Literal["gibberish"] = "gibberish"
    min_token_id: Annotated[int, Field(ge=0)] = 100_000
    """Ids from this one on count as rare."""
    max_logprob: Annotated[float, Field(le=0)] = -14.0
    """Rare tokens sampled with a lower log-prob are gibberish. -14 is about 1/8 of a uniform draw
    from a vocabulary of 151936."""


class TopEntropyMask(Stage):
    """Keep tokens whose entropy before the update reaches the step's quantile (2506.01939)."""

    kind: Literal["top_entropy"] = "top_entropy"
    quantile: Fraction = 0.8
    """0.8 keeps the 20% of the tokens with the highest entropy (`Batch.old_entropy`)."""


class StalenessMask(Stage):
    """Drop tokens sampled more than max_gap policy versions ago."""

    kind: Literal["staleness"] = "staleness"
    max_gap: Annotated[int, Field(ge=0)] = 1
    """Largest age of a kept token, in policy versions (training steps)."""


class ClipCovMask(Stage):
    """Drop at most this fraction of the tokens, those with the largest cov(A, log old) in
    [low, high].

    The paper (2505.22617) draws at random among the tokens within the bounds; taking the largest
    keeps the choice independent of ranks and seeds.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    fraction: Fraction = 2e-4
    """Largest share of the step's trained tokens to drop."""
    low: float = 1.0
    """Smallest covariance that may be dropped."""
    high: float = 5.0
    """Largest covariance that may be dropped."""


TrustMask = Annotated[
    OpsmMask
    | DppoTvMask
    | DppoKlMask
    | M2Mask
    | RatioMask
    | VetoMask
    | GibberishMask
    | TopEntropyMask
    | StalenessMask
    | ClipCovMask,
    Field(discriminator="kind"),
]
