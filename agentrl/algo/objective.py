"""What a run optimises: one model per stage, and the checks between stages.

Stages compose freely; each is one string that names the method plus the few numbers it needs.
In TOML a preset is the starting point and nested tables override it:

    [objective]
    preset = "dapo"
    [objective.surrogate]
    high = 0.3
    [objective.kl]
    where = "loss"
    coef = 0.01

A table whose `kind` differs from the preset's replaces the preset's table; otherwise keys are
merged one by one. Lists are replaced whole. The text "none" stands for an absent optional value,
because TOML has no null. This module imports no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core.core_schema import SerializationInfo

from agentrl.algo.presets import PRESET_DATA

Level = Literal["token", "turn", "sequence"]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

AMBIGUOUS_NAMES = {
    "clip_ratio": (
        "surrogate.low and surrogate.high (half-widths of PPO's clip)",
        "the trust mask dppo_tv's low and high (bounds on a change of probability)",
    ),
    "clip_ratio_c": (
        "surrogate.cap (dual clip, 3.0)",
        'surrogate = {kind = "cispo", low = 0, high = 20} (truncation of a detached ratio)',
    ),
    "epsilon_high": (
        "surrogate.high of clip (relative: the ratio is clipped at 1 + high)",
        "surrogate.high of cispo (absolute: the ratio is clipped at high)",
    ),
    "delta": (
        "surrogate.cap (two-sided clipping of the ratio)",
        "max_kl of the trust masks opsm and dppo_kl",
    ),
    "loss_type": (
        "surrogate.kind (what each token costs)",
        "aggregate.kind (how tokens are averaged)",
    ),
    "normalize_advantages": (
        "whiten (mean and std of token advantages over the batch)",
        "scale (division by the std of the group's rewards)",
    ),
    "norm_adv": (
        "whiten (mean and std of token advantages over the batch)",
        "scale (division by the std of the group's rewards)",
    ),
    "adv_norm": (
        "whiten (statistics over tokens)",
        "baseline and scale (statistics over trajectories, which GRPO, Dr.GRPO, RLOO and LitePPO "
        "need)",
    ),
    "dynamic_bs": (
        "train.token_budget (micro-batches packed by tokens)",
        "rollout.drop_zero_variance with rollout.max_waves = 1 (train on the groups that are left)",
    ),
    "ipo": (
        'the trust mask {kind = "dppo_tv", side = "both"} (bounded change of probability)',
        "the preference loss of that name, which is not offered",
    ),
    "rollout_correction": (
        'aggregate.denominator = "original" (rejected tokens still count)',
        'aggregate.denominator = "kept" (rejected tokens do not count)',
    ),
    "seq-mean-token-sum-norm": (
        "aggregate.kind = constant (divides by sequences x max_tokens)",
        "a division by the padded width alone, which changes from batch to batch and is not "
        "offered",
    ),
}
"""Names that peers use for two things, with both readings. They are refused wherever they occur."""


class Stage(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_ambiguous_names(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for name in [*data, *(value for value in data.values() if isinstance(value, str))]:
            if name in AMBIGUOUS_NAMES:
                first, second = AMBIGUOUS_NAMES[name]
                raise ValueError(f"{name!r} means two things: write {first}, or {second}")
        fields = cls.model_fields.items()
        optional = {name for name, field in fields if type(None) in get_args(field.annotation)}
        return {
            name: None if value == "none" and name in optional else value
            for name, value in data.items()
        }

    @model_serializer(mode="wrap")
    def _write_none(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        """JSON and TOML get the text "none", so that switching off a preset's value survives."""
        data = handler(self)
        if info.mode == "json" and isinstance(data, dict):
            for name in type(self).model_fields:
                if getattr(self, name) is None and name != "preset":
                    data[name] = "none"
        return data


# reward -------------------------------------------------------------------------------------------


class Overlong(Stage):
    """DAPO's soft punishment (2503.14476, eq. 13): linear in the tokens beyond a length."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Sampled tokens of a trajectory at which the penalty is full."""
    buffer_tokens: Annotated[int, Field(ge=1)]
    """The penalty grows linearly over these last tokens before `max_tokens`."""
    factor: NonNegative = 1.0
    """The full penalty."""
    cap: bool = True
    """Never subtract more than `factor`, also beyond `max_tokens`."""


class Reward(Stage):
    """How a trajectory's reward is made from what its environment returned."""

    weights: dict[str, float] | None = None
    """Weight of each named reward component; none uses the trajectory's own reward."""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """`normalize_then_sum` applies baseline and scale to every component, then sums (GDPO)."""
    missing: Literal["skip", "exclude"] = "skip"
    """A component that is nan counts 0 (`skip`; a trajectory without any component is excluded) or
    excludes its trajectory. An excluded trajectory enters no statistic and no loss."""
    scale: float = 1.0
    """The reward is multiplied by this, then `bias` is added, then it is clipped."""
    bias: float = 0.0
    """Added to the scaled reward."""
    clip: Positive | None = None
    """Largest absolute value of the scaled reward."""
    overlong: Overlong | None = None
    """Soft penalty for long trajectories, applied last."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Trajectories cut by a limit keep their reward, get reward 0, or leave the loss and all its
    denominators while their reward still enters the baseline."""


# credit -------------------------------------------------------------------------------------------


class OutcomeCredit(Stage):
    """Every token of a trajectory gets the trajectory's reward."""

    kind: Literal["outcome"] = "outcome"


class TurnCredit(Stage):
    """Every token of turn k gets G_k = sum_j>=k gamma^(j-k) r_j; no discount inside a turn."""

    kind: Literal["turn"] = "turn"
    gamma: Fraction = 1.0
    """Discount per turn."""


class TokenCredit(Stage):
    """Discounted reward-to-go over trained tokens; tokens the policy did not write cost nothing."""

    kind: Literal["token"] = "token"
    gamma: Fraction = 1.0
    """Discount per trained token."""
    reward_at: Literal["turn", "end"] = "turn"
    """Each turn's reward lies on the turn's last trained token, or all of it on the last one."""


class GaeCredit(Stage):
    """Generalised advantage estimation (1506.02438) with a critic, over trained tokens only."""

    kind: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount per trained token."""
    lam: Fraction = 1.0
    """Lambda of the advantages. Unused where `length_alpha` is above 0."""
    lam_value: Fraction | None = None
    """Lambda of the critic's targets; none uses the advantages' (VAPO: 1)."""
    length_alpha: NonNegative = 0.0
    """Above 0 the advantages use 1 - 1 / (length_alpha * n), n trained tokens of the trajectory
    (VAPO, 2504.05118, eq. 11: 0.05)."""
    reward_at: Literal["turn", "end"] = "turn"
    """Each turn's reward lies on the turn's last trained token, or all of it on the last one."""


class GigpoCredit(Stage):
    """Episode advantage within the group plus step advantage within the same state (2505.10978)."""

    kind: Literal["gigpo"] = "gigpo"
    gamma: Fraction = 0.95
    """Discount per turn of the step returns."""
    episode_weight: float = 1.0
    """Of the advantage within the group."""
    step_weight: float = 1.0
    """Step returns are centred and scaled among turns of the group that started in one state
    (`state_ids`)."""


Credit = Annotated[
    OutcomeCredit | TurnCredit | TokenCredit | GaeCredit | GigpoCredit,
    Field(discriminator="kind"),
]


class Baseline(Stage):
    """What is subtracted from the return."""

    kind: Literal["none", "mean", "leave_one_out", "second_best", "optimal_token", "given"] = "mean"
    """`mean` and `leave_one_out` of the returns that share `key`. `second_best`: only the best of
    a group gets an advantage, its lead over the second (pass@k, 2503.19595). `optimal_token`: per
    token rank, the variance-minimising average of returns-to-go. `given`: `Batch.baselines`, such
    as the reward of a greedy answer (ReMax)."""
    key: Literal["group", "group_turn", "batch"] = "group"
    """Who shares a baseline: the group; the turns of a group that have the same number; all."""
    weighting: Literal["sequence", "token"] = "sequence"
    """`token` weighs each trajectory by its trained tokens (OPO, SSR-GRPO's length weighting)."""
    tolerance: NonNegative = 1e-6
    """A group whose returns differ by no more than this has advantage exactly 0."""


class Scale(Stage):
    """What the centred return is divided by."""

    kind: Literal["none", "std", "mean", "success_rate"] = "none"
    """`std` of the returns; `mean` of the group's returns, 0 where that is not positive (MaxRL);
    `success_rate`: the share of non-zero returns in the batch (GPG)."""
    level: Literal["group", "batch"] = "group"
    """Over whose returns the std is taken."""
    of: Literal["raw", "centred"] = "raw"
    """With level `batch`: the std of the returns, or of the returns minus their baseline."""
    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1 (unbiased), 0 by n."""
    eps: NonNegative = 1e-6
    """Keeps the division finite, in units of the return."""
    eps_mode: Literal["add", "sqrt", "max"] = "add"
    """Division by std + eps, by sqrt(var + eps), or by max(std, eps)."""


class Whiten(Stage):
    """Normalisation of the finished advantages over the step, after credit, baseline and scale."""

    mean: Literal["none", "group", "batch"] = "none"
    """Subtract the mean of the batch or group."""
    std: Literal["none", "group", "batch"] = "none"
    """Divide by the std of the batch or group."""
    unit: Literal["token", "sequence"] = "token"
    """Statistics count every trained token once, or every trajectory once."""
    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1 (unbiased), 0 by n."""
    eps: NonNegative = 1e-8
    """Keeps the division finite: a variance, with `eps_mode = "add"` a std."""
    eps_mode: Literal["add", "sqrt", "max"] = "sqrt"
    """Division by std + eps, by sqrt(var + eps), or by sqrt(max(var, eps))."""


# loss ---------------------------------------------------------------------------------------------


class Ratio(Stage):
    """The ratio of the live policy to an anchor."""

    level: Level = "token"
    """`sequence` and `turn` use the geometric mean of the token ratios (GSPO, 2507.18071)."""
    gradient: Literal["live", "token"] = "live"
    """`token` keeps the level's value but lets each token's gradient flow through its own log-prob
    (GSPO-token). No difference at level `token`."""
    anchor: Literal["old", "rollout", "loglinear"] = "old"
    """`old`: the trainer's log-probs before the update. `rollout`: those of the inference engine
    (bypass; the ratio then corrects for it). `loglinear`: the proximal policy interpolated from
    policy versions, log pi_old ~ log mu + alpha (log pi - log mu), without another forward pass."""
    mean_advantage: bool = False
    """At level `sequence`, use the sequence's mean advantage at every token."""
    log_clamp: Annotated[float, Field(gt=0, le=60)] = 20.0
    """Log-ratios are clamped to +- this in float32 before exp; no gradient beyond."""


class ClipSurrogate(Stage):
    """PPO: max(-r A, -clip(r, 1 - low, 1 + high) A)."""

    kind: Literal["clip"] = "clip"
    low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above at 1 + high (DAPO's clip-higher: 0.28)."""
    cap: Annotated[float, Field(gt=1)] | None = None
    """Dual clip, INTELLECT-2's delta: where A < 0 the ratio counts at most this much. Must exceed
    1 + high."""


class CispoSurrogate(Stage):
    """-sg[clip(r, low, high)] A log pi (2506.13585). Every token keeps a gradient."""

    kind: Literal["cispo"] = "cispo"
    low: NonNegative = 0.0
    """Absolute lower bound of the detached ratio."""
    high: Positive = 5.0
    """Absolute upper bound of the detached ratio (not 1 + high)."""
    outside: Literal["clamp", "zero"] = "clamp"
    """`zero` drops tokens whose ratio lies outside (low, high)."""


class SapoSurrogate(Stage):
    """-(4 / tau) sigmoid(tau (r - 1)) A (2511.20347): the gradient at r = 1 is PPO's."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    """Temperature where A > 0."""
    tau_negative: Positive = 1.05
    """Temperature where A <= 0."""


class LogprobSurrogate(Stage):
    """-A log pi: REINFORCE, without a ratio."""

    kind: Literal["logprob"] = "logprob"


class RatioSurrogate(Stage):
    """-r A: the unclipped importance-weighted objective. Bound it with a trust mask."""

    kind: Literal["ratio"] = "ratio"


class GmpoSurrogate(Stage):
    """-A times the geometric mean of one-sidedly clipped ratios (2507.20673)."""

    kind: Literal["gmpo"] = "gmpo"
    low: NonNegative = 0.4
    """Log-ratios are clipped below at -low where A < 0."""
    high: NonNegative = 0.4
    """Log-ratios are clipped above at high where A > 0."""


class VespoSurrogate(Stage):
    """-sg[phi(w)] A log pi, log phi = lam + k log w - lam w, w the product of the row's ratios."""

    kind: Literal["vespo"] = "vespo"
    k_positive: NonNegative = 2.0
    """k where A >= 0."""
    lam_positive: NonNegative = 3.0
    """lam where A >= 0."""
    k_negative: NonNegative = 3.0
    """k where A < 0."""
    lam_negative: NonNegative = 2.0
    """lam where A < 0."""


class DroSurrogate(Stage):
    """-(A log pi - beta / 2 (log r)^2): direct reward optimisation."""

    kind: Literal["dro"] = "dro"
    beta: NonNegative = 0.5
    """Weight of the squared log-ratio."""


class KlCovSurrogate(Stage):
    """-r A + coef |log r| at the tokens with the largest covariance of A and log pi (2505.22617).

    Which tokens is decided once for the whole step, from `old_logprobs`.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: Fraction = 2e-4
    """Share of the step's trained tokens that pay the penalty."""
    coef: NonNegative = 1.0
    """Weight of |log r| at those tokens."""


class NoSurrogate(Stage):
    """No policy-gradient term: KL, entropy and distillation only."""

    kind: Literal["none"] = "none"


Surrogate = Annotated[
    ClipSurrogate
    | CispoSurrogate
    | SapoSurrogate
    | LogprobSurrogate
    | RatioSurrogate
    | GmpoSurrogate
    | VespoSurrogate
    | DroSurrogate
    | KlCovSurrogate
    | NoSurrogate,
    Field(discriminator="kind"),
]


class OpsmMask(Stage):
    """Drop tokens with A < 0 in rows that moved away: mean_t(log anchor - log pi) > max_kl."""

    kind: Literal["opsm"] = "opsm"
    max_kl: float = 1e-4
    """Mean log-ratio per token, in nats."""
    anchor: Literal["old", "rollout"] = "old"
    """Away from whom: the trainer before the update, or the sampler."""


class DppoTvMask(Stage):
    """Drop tokens whose probability changed too much: p - q outside [-low, high] (2602.04879)."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    low: NonNegative | None = 0.2
    """Largest fall of the probability; none is no bound."""
    high: NonNegative | None = 0.2
    """Largest rise of the probability; none is no bound."""
    side: Literal["advantage", "both"] = "advantage"
    """`advantage` applies `high` where A > 0 and `low` elsewhere; `both` applies both always."""
    anchor: Literal["old", "rollout"] = "old"
    """Whose probability q is: the trainer's before the update, or the sampler's."""


class DppoKlMask(Stage):
    """Drop tokens that move further away and whose binary KL(q, p) exceeds `max_kl`."""

    kind: Literal["dppo_kl"] = "dppo_kl"
    max_kl: NonNegative = 0.05
    """In nats."""
    anchor: Literal["old", "rollout"] = "old"
    """Whose probability q is: the trainer's before the update, or the sampler's."""


class M2Mask(Stage):
    """M2PO (2510.01161): drop tokens with the largest (log mu - log pi_old)^2 until the mean of
    the rest is below `max_second_moment`. One threshold for the whole step."""

    kind: Literal["m2"] = "m2"
    max_second_moment: Positive = 0.04
    """In squared nats, per token."""


class RatioMask(Stage):
    """Reject tokens, turns or rows by the mismatch x = log pi_old - log mu."""

    kind: Literal["ratio"] = "ratio"
    level: Level = "token"
    """Whole turns or rows are judged by `over` of their tokens' statistics."""
    statistic: Literal["ratio", "abs", "k2", "k3"] = "ratio"
    """e^x; |x|; x^2 / 2; e^x - 1 - x, the estimate of KL(mu, pi_old)."""
    over: Literal["mean", "sum", "max"] = "mean"
    """For `ratio` these apply to x: geometric mean, product, largest ratio."""
    low: NonNegative | None = None
    """Smallest statistic that is kept; none is no bound."""
    high: NonNegative | None = None
    """Largest statistic that is kept; none is no bound."""


class VetoMask(Stage):
    """Reject a whole row when any of its tokens has pi_old / mu outside [low, high]."""

    kind: Literal["veto"] = "veto"
    low: NonNegative = 1e-4
    """Smallest ratio a token may have."""
    high: Positive | None = None
    """Largest ratio a token may have; none is no bound."""


class GibberishMask(Stage):
    """Reject a whole row that holds rare tokens sampled against all odds (SSR-GRPO, prime-rl).

    Late entries of a vocabulary are rare words of rare scripts; sampled with a probability below
    that of a uniform draw, they are the trace of a broken engine or a collapsed policy.
    """

    kind: Literal["gibberish"] = "gibberish"
    min_token_id: Annotated[int, Field(ge=0)] = 100_000
    """Ids from here on count as rare."""
    max_logprob: Annotated[float, Field(le=0)] = -14.0
    """Rare tokens sampled below this log-prob are gibberish; -14 is e^-2 of one in 151936."""


class TopEntropyMask(Stage):
    """Train only tokens whose entropy reaches the step's quantile (2506.01939)."""

    kind: Literal["top_entropy"] = "top_entropy"
    quantile: Fraction = 0.8
    """0.8 keeps the fifth of the tokens with the highest entropy (`Batch.old_entropy`)."""


class StalenessMask(Stage):
    """Drop tokens sampled more than `max_gap` policy versions ago."""

    kind: Literal["staleness"] = "staleness"
    max_gap: Annotated[int, Field(ge=0)] = 1
    """In policy versions (training steps)."""


class ClipCovMask(Stage):
    """Drop the tokens with the largest covariance of A and log pi within bounds (2505.22617).

    Where the paper draws at random among the tokens within the bounds, the largest are taken, so
    that the choice does not depend on ranks or seeds.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    fraction: Fraction = 2e-4
    """Share of the step's trained tokens that is dropped at most."""
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


class OffPolicy(Stage):
    """A detached weight pi_old / mu on every token's loss, for a sampler that differs."""

    level: Literal["none", "token", "turn", "sequence_product", "sequence_geometric"] = "none"
    """What the ratio is taken over. `sequence_product` is the exact weight of a whole row and
    decays with its length; `sequence_geometric` and `turn` are geometric means."""
    low: NonNegative | None = None
    """Lower bound of the weight; none is no bound."""
    high: Positive | None = None
    """Upper bound of the weight; none is no bound."""
    outside: Literal["clamp", "zero"] = "clamp"
    """A weight outside the bounds is clamped (TIS) or 0 (IcePop)."""
    normalize: Literal["none", "token", "sequence"] = "none"
    """Divide by the step's mean weight, over tokens or over rows."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_sequence(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("level") == "sequence":
            raise ValueError(
                "level 'sequence' means two things: write sequence_product (product of the token "
                "ratios), or sequence_geometric (their geometric mean)"
            )
        return data


class Kl(Stage):
    """Divergence of the policy from the reference, x = log pi - log ref."""

    where: Literal["none", "loss", "reward"] = "none"
    """`reward` subtracts coef * KL from each trained token's reward, with pi the sampled tokens'
    `old_logprobs` where the batch has them and `rollout_logprobs` elsewhere."""
    kind: Literal["k1", "abs", "k2", "k3", "low_var_kl", "half_chi2"] = "k3"
    """x; |x|; x^2 / 2; e^-x - 1 + x; k3 clamped to +- 10; (e^x - 1)^2 / 2."""
    coef: NonNegative = 0.0
    """Weight of the KL; with `target` the one to start from."""
    gradient: Literal["naive", "straight_through", "unbiased", "score"] = "naive"
    """In the loss. `naive`: that of the value. `straight_through`: the value with the gradient of
    k2, which is that of KL(pi, ref). `unbiased`: the value times the live ratio pi / pi_old.
    `score`: the value times e^(log pi - sg log pi)."""
    base: Literal["ref", "rollout", "old"] = "ref"
    """Whose log-probs stand for ref."""
    clamp_in: Positive | None = 20.0
    """x is clamped to +- this first; no gradient beyond. None may overflow in float32."""
    clamp_out: Positive | None = None
    """The value is clamped to +- this; no gradient beyond."""
    target: Positive | None = None
    """Adapt `coef` so that the mean KL approaches this (in nats per token); none keeps it."""
    horizon: Annotated[int, Field(ge=1)] = 10_000
    """Trajectories over which the adaptive coefficient reacts."""


class Entropy(Stage):
    """A bonus coef * H(pi) per token."""

    coef: float = 0.0
    """Weight of the entropy in nats; positive keeps the policy random."""


class Aggregate(Stage):
    """The weight of every token in the loss; N trained tokens, n_i of row i, B rows with any."""

    kind: Literal[
        "token",
        "sequence_token_mean",
        "sequence_token_sum",
        "constant",
        "prompt",
        "trajectory",
        "local",
        "sum",
    ] = "token"
    """`token`: 1/N over the whole step (DAPO). `sequence_token_mean`: 1/(B n_i) (GRPO).
    `sequence_token_sum`: 1/B. `constant`: 1/(B max_tokens) (Dr.GRPO). `prompt`: tokens average
    within each group, groups equally. `trajectory`: tokens average within each trajectory over
    all its rows, trajectories equally. `local`: tokens average within each `local_rows`
    consecutive rows, those equally (BNPO with its local batch fixed in advance). `sum`: 1."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """L of `constant`: usually the most tokens a trajectory may sample."""
    local_rows: Annotated[int, Field(ge=1)] | None = None
    """Rows of one local batch of `local`."""
    count_empty: bool = False
    """Rows, trajectories and groups without a trained token count in the denominators too."""
    denominator: Literal["original", "kept"] = "original"
    """Tokens rejected by trust masks still count in the denominators, or do not. `kept` needs masks
    that are known before the forward pass."""


class Distill(Stage):
    """Learning from a teacher's log-probs on the policy's own tokens."""

    where: Literal["none", "advantage", "loss"] = "none"
    """`advantage`: A -= coef * reward-to-go of (log pi - log teacher), before whitening,
    pi as for a KL in the reward.
    `loss`: a component of its own, -sg[log teacher - log pi] pi / anchor, with its own weights."""
    coef: NonNegative = 1.0
    """Weight of the teacher's signal."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of `advantage`: weight of the divergence at later tokens; 0 looks at the token alone."""
    max_drop: NonNegative | None = None
    """Of `loss`: tokens whose probability lies more than this below the anchor's are left out."""
    aggregate: Aggregate = Aggregate()
    """Of `loss`: the component's own weights."""


class Critic(Stage):
    """The value loss: factor * max((V - G)^2, (clip(V, V_old +- value_clip) - G)^2)."""

    value_clip: Positive | None = 0.2
    """Largest change of a value that is rewarded; none does not clip."""
    factor: NonNegative = 0.5
    """Weight of the value loss."""
    loss: Literal["mse", "huber"] = "mse"
    """Squared error, or squared near 0 and linear beyond `huber_delta`."""
    huber_delta: Positive = 10.0
    """Errors beyond this grow linearly (`huber`), in units of the return."""


# objective ----------------------------------------------------------------------------------------


class Objective(Stage):
    """All stages of the objective. Each has a default; `preset` sets several at once."""

    preset: str | None = None
    """Name of the preset the other keys override; `agentrl algo list` shows them."""
    reward: Reward = Reward()
    """How a trajectory's reward is made."""
    credit: Credit = OutcomeCredit()
    """How reward reaches tokens: `kind` outcome, turn, token, gae or gigpo, with its numbers."""
    baseline: Baseline = Baseline()
    """What is subtracted."""
    scale: Scale = Scale(kind="std")
    """What the difference is divided by."""
    whiten: Whiten = Whiten()
    """Normalisation of finished advantages over the step."""
    ratio: Ratio = Ratio()
    """The live policy over an anchor."""
    surrogate: Surrogate = ClipSurrogate()
    """What a token costs: `kind` clip (low, high, cap), cispo (low, high), sapo, logprob, ratio,
    gmpo, vespo, dro, kl_cov or none, with its numbers."""
    trust: list[TrustMask] = Field(default_factory=list)
    """Masks, each a table with a `kind`: opsm, dppo_tv, dppo_kl, m2, ratio, veto, gibberish,
    top_entropy, staleness or clip_cov. A token is trained only where all of them keep it."""
    off_policy: OffPolicy = OffPolicy()
    """Detached importance weights."""
    kl: Kl = Kl()
    """Divergence from a reference."""
    entropy: Entropy = Entropy()
    """A bonus."""
    aggregate: Aggregate = Aggregate(kind="sequence_token_mean")
    """How tokens are averaged."""
    distill: Distill = Distill()
    """A teacher."""
    critic: Critic = Critic()
    """The value loss of `credit.kind = "gae"`."""

    @model_validator(mode="before")
    @classmethod
    def _merge_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("preset") is None:
            return data
        name = data["preset"]
        if name not in PRESET_DATA:
            raise ValueError(f"unknown preset {name!r}; presets are {', '.join(PRESET_DATA)}")
        return deep_merge(PRESET_DATA[name], data)

    @classmethod
    def from_preset(cls, name: str, overrides: Mapping[str, Any] | None = None) -> Self:
        """The preset with nested `overrides` merged over it.

        Raises:
            pydantic.ValidationError: unknown preset or key, or stages that contradict each other.
        """
        return cls.model_validate({**(overrides or {}), "preset": name})

    @property
    def needs_groups(self) -> bool:
        """Whether advantages compare the trajectories of a group, so that a group of one has 0."""
        return self.baseline.kind in ("mean", "leave_one_out", "second_best", "optimal_token") and (
            self.baseline.key != "batch"
        )

    @property
    def needs_critic(self) -> bool:
        return self.credit.kind == "gae"

    @property
    def needs_entropy(self) -> bool:
        """Whether `policy_loss` must be given the live entropy."""
        return self.entropy.coef != 0

    def needs(self) -> frozenset[str]:
        """The optional fields of `Batch` without which this objective cannot be computed.

        `old_logprobs` is in it only where something must be known about the whole step before the
        first forward pass with gradient; elsewhere the first use of a batch may leave it out.
        """
        fields = set()
        step_wide = {"m2", "clip_cov"}
        rejects = {"ratio", "veto"}
        kinds = {mask.kind for mask in self.trust}
        if (
            kinds & step_wide
            or self.off_policy.normalize != "none"
            or self.surrogate.kind == "kl_cov"
            or (kinds & rejects and self.aggregate.denominator == "kept")
        ):
            fields.add("old_logprobs")
        if self.kl.where != "none" and self.kl.base != "rollout":
            fields.add(f"{self.kl.base}_logprobs")
        if self.distill.where != "none":
            fields.add("teacher_logprobs")
        if self.credit.kind == "gae":
            fields.add("values")
        if self.credit.kind == "gigpo":
            fields.add("state_ids")
        if self.baseline.kind == "optimal_token":
            fields.add("sum_squared_probs")
        if self.baseline.kind == "given":
            fields.add("baselines")
        if self.reward.weights is not None or self.reward.combine == "normalize_then_sum":
            fields.add("reward_components")
        if "gibberish" in kinds:
            fields.add("token_ids")
        if "top_entropy" in kinds:
            fields.add("old_entropy")
        if "staleness" in kinds or self.ratio.anchor == "loglinear":
            fields |= {"policy_versions", "current_version"}
        if self.reward.truncated != "keep":
            fields.add("truncated")
        return frozenset(fields)

    @model_validator(mode="after")
    def _stages_agree(self) -> Self:
        for broken, message in _contradictions(self):
            if broken:
                raise ValueError(message)
        return self


def _contradictions(o: Objective) -> list[tuple[bool, str]]:
    """Every combination that is refused, with one line that says why and what to write instead."""
    statistics = o.baseline.kind in ("mean", "leave_one_out", "second_best")
    per_token = o.credit.kind in ("token", "gae")
    weighs = o.off_policy.level != "none"
    live_masks = {"opsm", "dppo_tv", "dppo_kl"} & {mask.kind for mask in o.trust}
    clip = o.surrogate if isinstance(o.surrogate, ClipSurrogate) else None
    off = o.off_policy
    return [
        (
            o.ratio.anchor == "rollout" and weighs,
            "ratio.anchor = 'rollout' with an off_policy weight corrects the sampler twice; set "
            "off_policy.level = 'none', or ratio.anchor = 'old'",
        ),
        (
            o.ratio.anchor == "rollout" and o.surrogate.kind in ("logprob", "none"),
            f"surrogate '{o.surrogate.kind}' uses no ratio, so ratio.anchor = 'rollout' would do "
            "nothing; set ratio.anchor = 'old', and off_policy.level = 'token' to correct the "
            "sampler",
        ),
        (
            o.kl.where == "loss" and o.kl.kind == "k1" and o.kl.gradient == "naive",
            "the gradient of k1 in the loss has mean zero; set kl.where = 'reward', or "
            "kl.gradient = 'straight_through'",
        ),
        (
            o.kl.where == "reward" and o.kl.gradient != "naive",
            "a KL in the reward has no gradient; remove kl.gradient, or set kl.where = 'loss'",
        ),
        (
            o.kl.where != "none" and o.kl.coef == 0 and o.kl.target is None,
            f"kl.where = '{o.kl.where}' with kl.coef = 0 computes a penalty of zero; set kl.coef, "
            "or kl.where = 'none'",
        ),
        (
            o.kl.where == "none" and o.kl.coef > 0,
            f"kl.coef = {o.kl.coef:g} has no effect with kl.where = 'none'; set kl.where = 'loss' "
            "or 'reward'",
        ),
        (
            o.kl.target is not None and (o.kl.where == "none" or o.kl.coef == 0),
            "kl.target adapts a coefficient that is not in use; set kl.where and a starting "
            "kl.coef above 0",
        ),
        (
            o.baseline.kind == "leave_one_out" and o.scale.kind == "std",
            "leave-one-out with a std divides by a std that the baseline leaves out; set "
            "scale.kind = 'none' (RLOO), or baseline.kind = 'mean' (GRPO)",
        ),
        (
            o.baseline.kind in ("none", "given", "optimal_token") and o.scale.kind == "mean",
            "scale.kind = 'mean' is MaxRL's and needs baseline.kind = 'mean'",
        ),
        (
            o.baseline.kind == "none" and o.scale.kind == "std",
            "scale.kind = 'std' without a baseline divides by a spread around a mean that is not "
            "subtracted; set baseline.kind = 'mean', or scale.kind = 'none'",
        ),
        (
            o.baseline.kind == "optimal_token" and o.scale.kind != "none",
            "the optimal token baseline is per token; set scale.kind = 'none'",
        ),
        (
            o.baseline.kind == "given" and o.scale.kind != "none",
            "a given baseline has no group statistics; set scale.kind = 'none'",
        ),
        (
            o.credit.kind == "gae" and o.baseline.kind != "none",
            "GAE's baseline is the critic; set baseline.kind = 'none' and scale.kind = 'none'",
        ),
        (
            o.credit.kind == "token" and statistics,
            "rewards-to-go differ from token to token, so a group mean is no baseline for them; "
            "set baseline.kind = 'none' (REINFORCE++) with whiten, or credit.kind = 'outcome'",
        ),
        (
            o.baseline.kind == "optimal_token" and not per_token,
            "baseline.kind = 'optimal_token' needs credit.kind = 'token'",
        ),
        (
            per_token and o.scale.kind != "none",
            "per-token credit is normalised by whiten; set scale.kind = 'none'",
        ),
        (
            o.baseline.key == "group_turn" and o.credit.kind != "turn",
            "baseline.key = 'group_turn' needs credit.kind = 'turn'",
        ),
        (
            o.baseline.kind == "second_best" and o.credit.kind != "outcome",
            "baseline.kind = 'second_best' compares whole trajectories; set credit.kind = "
            "'outcome'",
        ),
        (
            o.baseline.kind == "second_best" and o.baseline.key != "group",
            "baseline.kind = 'second_best' compares within a group; set baseline.key = 'group'",
        ),
        (
            o.reward.combine == "normalize_then_sum" and o.credit.kind != "outcome",
            "reward.combine = 'normalize_then_sum' normalises whole trajectories; set "
            "credit.kind = 'outcome'",
        ),
        (
            o.reward.combine == "normalize_then_sum" and o.reward.weights is None,
            "reward.combine = 'normalize_then_sum' needs reward.weights",
        ),
        (
            o.whiten.mean == "group" and o.whiten.std == "none" and o.whiten.unit == "token",
            "a group mean over tokens weighs long trajectories more and is no baseline; set "
            "baseline.kind = 'mean' (Dr.GRPO) or 'leave_one_out' (RLOO) with whiten.mean = 'none', "
            "or whiten.unit = 'sequence'",
        ),
        (
            o.whiten.mean == "none"
            and o.whiten.std != "none"
            and o.baseline.kind == "none"
            and o.credit.kind != "gae",
            "whiten.std divides by the spread around a mean that nothing subtracts; set "
            f"whiten.mean = '{o.whiten.std}', or a baseline",
        ),
        (
            clip is not None and clip.cap is not None and clip.cap <= 1 + clip.high,
            f"surrogate.cap = {getattr(clip, 'cap', None)} is not above 1 + high = "
            f"{1 + getattr(clip, 'high', 0):g}, so it would also cut tokens with A > 0; raise cap "
            "or lower high",
        ),
        (
            isinstance(o.surrogate, CispoSurrogate) and o.surrogate.low >= o.surrogate.high,
            "surrogate.low must be below surrogate.high; both bound the ratio itself",
        ),
        (
            o.ratio.level == "sequence"
            and o.aggregate.kind in ("sequence_token_sum", "constant", "sum")
            and o.ratio.gradient == "live",
            "a sequence ratio summed over tokens counts each sequence once per token; set "
            "aggregate.kind = 'sequence_token_mean', or ratio.gradient = 'token'",
        ),
        (
            o.ratio.mean_advantage and o.ratio.level != "sequence",
            "ratio.mean_advantage needs ratio.level = 'sequence'",
        ),
        (
            o.ratio.level != "token" and o.surrogate.kind in ("gmpo", "vespo", "kl_cov", "dro"),
            f"surrogate '{o.surrogate.kind}' makes its own sequence statistic; set ratio.level = "
            "'token'",
        ),
        (
            o.aggregate.kind == "constant" and o.aggregate.max_tokens is None,
            "aggregate.kind = 'constant' needs aggregate.max_tokens, the most tokens a trajectory "
            "may sample",
        ),
        (
            o.aggregate.kind == "local" and o.aggregate.local_rows is None,
            "aggregate.kind = 'local' needs aggregate.local_rows; a local batch that follows "
            "micro-batches would make the gradient depend on memory settings",
        ),
        (
            o.aggregate.denominator == "kept" and bool(live_masks),
            f"aggregate.denominator = 'kept' needs masks known before the forward pass, and "
            f"{', '.join(sorted(live_masks))} depends on it; set denominator = 'original'",
        ),
        (
            off.low is not None and off.high is not None and off.low >= off.high,
            "off_policy.low must be below off_policy.high",
        ),
        (
            not weighs and (off.low is not None or off.high is not None),
            "off_policy bounds have no effect with off_policy.level = 'none'; set level = 'token'",
        ),
        (
            o.distill.where == "loss" and o.distill.aggregate.denominator == "kept",
            "distill.aggregate.denominator must be 'original'; trust masks do not apply to it",
        ),
        (
            o.surrogate.kind == "none" and o.distill.where != "loss" and o.kl.where != "loss",
            "surrogate.kind = 'none' leaves nothing to learn from; set distill.where = 'loss'",
        ),
    ]


def deep_merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` over `base`, table by table; a table that names another `kind` replaces."""
    merged: dict[str, Any] = copy.deepcopy(dict(base))
    for name, value in overrides.items():
        if isinstance(value, BaseModel):
            value = value.model_dump()
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            replaces = name in _UNIONS and value.get("kind", below.get("kind")) != below.get("kind")
            merged[name] = dict(value) if replaces else deep_merge(below, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


_UNIONS = frozenset({"credit", "surrogate"})
"""Stages whose keys depend on their kind, so that another kind starts from its own defaults."""

PRESETS: dict[str, Objective] = {name: Objective.from_preset(name) for name in PRESET_DATA}
