"""Defines the stages of the loss: ratio, surrogate, off-policy weight, KL, entropy, aggregation,
distillation and critic.

The masks of `objective.trust` are in `trust_stages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from agentrl.algo.stage import Fraction, Level, NonNegative, Positive, Stage
from agentrl.algo.trust_stages import TrustMask


class Ratio(Stage):
    """r = pi / anchor."""

    level: Level = "token"
    """The tokens that share a ratio.
    token: each token has its own ratio.
    turn: the geometric mean of the token ratios of the turn.
    sequence: the geometric mean of the token ratios of the row (GSPO, 2507.18071, eq. 7).
    """
    gradient: Literal["live", "token"] = "live"
    """The gradient at level turn or sequence.
    live: the gradient is that of the mean.
    token: each token's gradient flows through its own log-prob (GSPO-token).
    """
    anchor: Literal["old", "rollout", "loglinear"] = "old"
    """The policy in the denominator.
    old: the trainer's policy before the update.
    rollout: mu, the sampler, so that the ratio corrects for it (bypass).
    loglinear: old, interpolated as log mu + a (log pi - log mu) with a from policy versions.
    """
    mean_advantage: bool = False
    """Replaces A by the row's mean advantage, at level `sequence`."""
    log_clamp: Annotated[float, Field(gt=0, le=60)] = 20.0
    """Clamps log r to +- this before exp, so that float32 does not overflow; there is no gradient
    beyond."""

    def problems(self) -> Iterator[str]:
        if self.mean_advantage and self.level != "sequence":
            yield "ratio.mean_advantage needs ratio.level = 'sequence'"

    def conflicts(
        self, surrogate: Surrogate | None, off_policy: OffPolicy, aggregate: Aggregate
    ) -> Iterator[str]:
        """Yields a message for each contradiction with the other stages, with what to change.

        Args:
            surrogate: None if `objective.loss` replaces it.
        """
        if self.anchor == "rollout" and off_policy.is_on:
            yield (
                "ratio.anchor = 'rollout' with an off_policy weight corrects the sampler twice; "
                "set off_policy.level = 'none', or ratio.anchor = 'old'"
            )
        if self.anchor == "rollout" and surrogate and surrogate.kind in ("logprob", "none"):
            yield (
                f"surrogate '{surrogate.kind}' uses no ratio, so ratio.anchor = 'rollout' would do "
                "nothing; set ratio.anchor = 'old', and off_policy.level = 'token' to correct the "
                "sampler"
            )
        summed = aggregate.kind in ("sequence_token_sum", "constant", "sum")
        if self.level == "sequence" and summed and self.gradient == "live":
            yield (
                "a sequence ratio summed over tokens counts each sequence once per token; set "
                "aggregate.kind = 'sequence_token_mean', or ratio.gradient = 'token'"
            )
        if self.level != "token" and surrogate and surrogate.kind in _PER_TOKEN_RATIO:
            yield (
                f"surrogate '{surrogate.kind}' needs the ratio of each token; set ratio.level = "
                "'token'"
            )


_PER_TOKEN_RATIO = ("gmpo", "vespo", "kl_cov", "dro")
"""Surrogates whose formulas are written for the ratio of each token."""


class ClipSurrogate(Stage):
    """l = max(-r A, -clip(r, 1 - low, 1 + high) A) (PPO, 1707.06347, eq. 7)."""

    kind: Literal["clip"] = "clip"
    low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above at 1 + high (DAPO's clip-higher: 0.28)."""
    cap: Annotated[float, Field(gt=1)] | None = None
    """Bounds l by -cap A where A < 0 (dual clip, 1912.09729, eq. 8; INTELLECT-2's delta). Must
    exceed 1 + high."""

    def problems(self) -> Iterator[str]:
        if self.cap is not None and self.cap <= 1 + self.high:
            yield (
                f"surrogate.cap = {self.cap} is not above 1 + high = {1 + self.high:g}, so it "
                "would also cut tokens with A > 0; raise cap or lower high"
            )


class CispoSurrogate(Stage):
    """l = -sg[clip(r, low, high)] A log pi (2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    low: NonNegative = 0.0
    """Lower bound of the detached ratio itself (not 1 - low)."""
    high: Positive = 5.0
    """Upper bound of the detached ratio itself (not 1 + high)."""
    outside: Literal["clamp", "zero"] = "clamp"
    """What happens to tokens whose ratio is out of bounds.
    clamp: r is clamped to [low, high].
    zero: l = 0 where r is not in (low, high).
    """

    def problems(self) -> Iterator[str]:
        if self.low >= self.high:
            yield "surrogate.low must be below surrogate.high; both bound the ratio itself"


class SapoSurrogate(Stage):
    """l = -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_positive where A > 0 else tau_negative
    (2511.20347)."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    """Temperature where A > 0."""
    tau_negative: Positive = 1.05
    """Temperature where A <= 0."""


class LogprobSurrogate(Stage):
    """l = -A log pi (REINFORCE)."""

    kind: Literal["logprob"] = "logprob"


class RatioSurrogate(Stage):
    """l = -r A, unbounded unless a trust mask bounds it."""

    kind: Literal["ratio"] = "ratio"


class GmpoSurrogate(Stage):
    """l = -A exp(mean over the row of log r clipped at high where A > 0 and at -low where A < 0)
    (2507.20673, eq. 4)."""

    kind: Literal["gmpo"] = "gmpo"
    low: NonNegative = 0.4
    """Log-ratios are clipped below at -low where A < 0."""
    high: NonNegative = 0.4
    """Log-ratios are clipped above at high where A > 0."""


class VespoSurrogate(Stage):
    """l = -sg[exp(lam + k log w - lam w)] A log pi, w the product of the row's ratios, k_positive
    and lam_positive where A >= 0, else k_negative and lam_negative."""

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
    """l = -(A log pi - beta / 2 (log r)^2) (direct reward optimisation)."""

    kind: Literal["dro"] = "dro"
    beta: NonNegative = 0.5
    """Weight of the squared log-ratio."""


class KlCovSurrogate(Stage):
    """l = -r A + coef |log r| at the fraction of the tokens with the largest cov(A, log old) of the
    step (2505.22617)."""

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: Fraction = 2e-4
    """Share of the step's trained tokens that pay the penalty."""
    coef: NonNegative = 1.0
    """Weight of |log r| at those tokens."""


class NoSurrogate(Stage):
    """No policy-gradient term: KL, entropy and distillation only."""

    chosen_by: ClassVar = ("kind",)
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


class OffPolicy(Stage):
    """A detached weight on every token's loss, for a sampler that differs from the trainer."""

    chosen_by: ClassVar = ("level", "outside")
    level: Literal["none", "token", "turn", "sequence_product", "sequence_geometric"] = "none"
    """The weight w.
    token: l x sg[w], w = old / mu.
    turn: l x sg[w], w = geometric mean of old / mu over the turn.
    sequence_product: l x sg[w], w = product of old / mu over the row; it decays with length.
    sequence_geometric: l x sg[w], w = geometric mean of old / mu over the row.
    """
    low: NonNegative | None = None
    """Lower bound of the weight; none sets no limit."""
    high: Positive | None = None
    """Upper bound of the weight; none sets no limit."""
    outside: Literal["clamp", "zero"] = "clamp"
    """What happens to weights outside the bounds.
    clamp: clamped to [low, high] (TIS).
    zero: 0 outside [low, high] (IcePop).
    """
    normalize: Literal["none", "token", "sequence"] = "none"
    """Divides the bounded weight by its mean over the step.
    token: w is divided by its mean over the step's tokens.
    sequence: w is divided by the mean over the step's rows of each row's mean.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_sequence(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("level") == "sequence":
            raise ValueError(
                "level 'sequence' means two things: write sequence_product (product of the token "
                "ratios), or sequence_geometric (their geometric mean)"
            )
        return data

    def problems(self) -> Iterator[str]:
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield "off_policy.low must be below off_policy.high"
        if not self.is_on and (self.low is not None or self.high is not None):
            yield (
                "off_policy bounds have no effect with off_policy.level = 'none'; set level = "
                "'token'"
            )


class Kl(Stage):
    """Divergence of the policy from a base policy, x = log pi - log base."""

    chosen_by: ClassVar = ("where", "kind")
    where: Literal["none", "loss", "reward"] = "none"
    """Where the penalty coef k(x) is applied, x = log pi - log base.
    loss: l + coef k(x), x = log pi - log base.
    reward: r_t - coef k(x), x = log pi - log base, pi before the update.
    """
    kind: Literal["k1", "abs", "k2", "k3", "low_var_kl", "half_chi2"] = "k3"
    """The estimate.
    k1: k(x) = x.
    abs: k(x) = |x|.
    k2: k(x) = x^2 / 2.
    k3: k(x) = exp(-x) - 1 + x.
    low_var_kl: k(x) = clip(exp(-x) - 1 + x, -10, 10).
    half_chi2: k(x) = (exp(x) - 1)^2 / 2.
    """
    coef: NonNegative = 0.0
    """Weight of the KL; its first value if `target` adapts it."""
    gradient: Literal["naive", "straight_through", "unbiased", "score"] = "naive"
    """The gradient of a KL in the loss.
    naive: the gradient is that of the value.
    straight_through: the gradient is that of x^2 / 2.
    unbiased: k(x) times the live pi / old (DeepSeek-V3.2).
    score: k(x) times exp(log pi - sg[log pi]).
    """
    base: Literal["ref", "rollout", "old"] = "ref"
    """Policy to compare with: the reference (`ref`), the sampler's (`rollout`), or the trainer's
    before the update (`old`)."""
    clamp_in: Positive | None = 20.0
    """Clamps x to +- this first; there is no gradient beyond. With none, float32 may overflow."""
    clamp_out: Positive | None = None
    """Clamps k(x) to +- this; there is no gradient beyond."""
    target: Positive | None = None
    """Mean KL per token, in nats, towards which `coef` is adapted after every step; none keeps it
    fixed."""
    horizon: Annotated[int, Field(ge=1)] = 10_000
    """Trajectories over which the adaptive coefficient reacts."""

    def problems(self) -> Iterator[str]:
        if self.where == "reward" and self.gradient != "naive":
            yield "a KL in the reward has no gradient; remove kl.gradient, or set kl.where = 'loss'"
        if self.is_on and self.coef == 0 and self.target is None:
            yield (
                f"kl.where = '{self.where}' with kl.coef = 0 computes a penalty of zero; set "
                "kl.coef, or kl.where = 'none'"
            )
        if not self.is_on and self.coef > 0:
            yield (
                f"kl.coef = {self.coef:g} has no effect with kl.where = 'none'; set kl.where = "
                "'loss' or 'reward'"
            )
        if self.target is not None and (not self.is_on or self.coef == 0):
            yield (
                "kl.target adapts a coefficient that is not in use; set kl.where and a starting "
                "kl.coef above 0"
            )

    def warnings(self) -> Iterator[str]:
        """Yields a message for each setting that is allowed but rarely intended."""
        if self.where == "loss" and self.kind == "k1" and self.gradient == "naive":
            yield (
                "the gradient of objective.kl.kind = 'k1' in the loss is zero on average: it adds "
                "noise and does not restrain the policy; set kl.where = 'reward', or kl.gradient = "
                "'straight_through'"
            )


class Entropy(Stage):
    """l - coef H(pi)."""

    coef: float = 0.0
    """Weight of the entropy in nats; positive keeps the policy random."""

    @property
    def is_on(self) -> bool:
        return self.coef != 0


class Aggregate(Stage):
    """The weight of each token in the loss L; N trained tokens, n in a row, B rows with any."""

    chosen_by: ClassVar = ("kind",)
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
    """How token losses are averaged.
    token: L = sum l / N (DAPO; TRL dapo).
    sequence_token_mean: L = mean over rows of sum l / n (GRPO; TRL grpo, which counts empty rows).
    sequence_token_sum: L = sum l / B (RLOO).
    constant: L = sum l / (B max_tokens) (Dr.GRPO; TRL dr_grpo).
    prompt: L = mean over groups of sum l / the group's tokens.
    trajectory: L = mean over trajectories of sum l / the tokens of all its rows (forked histories).
    local: L = mean over each local_rows consecutive rows of sum l / their tokens (TRL bnpo).
    sum: L = sum l.
    """
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Divisor for `constant`: usually the largest number of tokens that a trajectory may sample."""
    local_rows: Annotated[int, Field(ge=1)] | None = None
    """Number of rows of a local batch, for `local`."""
    count_empty: bool = False
    """Counts rows, trajectories and groups without a trained token in the denominators too."""
    denominator: Literal["original", "kept"] = "original"
    """How tokens that trust masks drop are counted.
    original: tokens that masks drop count in the denominators.
    kept: tokens that masks drop do not count; the masks must be known before the forward pass.
    """

    def problems(self) -> Iterator[str]:
        if self.kind == "constant" and self.max_tokens is None:
            yield (
                "aggregate.kind = 'constant' needs aggregate.max_tokens, the most tokens a "
                "trajectory may sample"
            )
        if self.kind == "local" and self.local_rows is None:
            yield (
                "aggregate.kind = 'local' needs aggregate.local_rows; if micro-batches decided, "
                "the gradient would depend on memory settings"
            )

    def conflicts(self, trust: list[TrustMask]) -> Iterator[str]:
        """Yields a message for each contradiction with the masks, with what to change."""
        live = {"opsm", "dppo_tv", "dppo_kl"} & {mask.kind for mask in trust}
        if self.denominator == "kept" and live:
            yield (
                "aggregate.denominator = 'kept' needs masks known before the forward pass, and "
                f"{', '.join(sorted(live))} depends on it; set denominator = 'original'"
            )


class Distill(Stage):
    """Learning from the log-probs of a teacher T on the policy's own tokens."""

    chosen_by: ClassVar = ("where",)
    where: Literal["none", "advantage", "loss"] = "none"
    """Where the teacher T is used.
    advantage: A_t - coef (log pi - log T), pi before the update.
    loss: + coef x -sg[log T - log pi] pi / anchor, a component with its own weights.
    """
    coef: NonNegative = 1.0
    """Weight of the teacher's signal."""
    discount: Fraction = 0.0
    """With `advantage`, adds the differences at later tokens, discounted by this per token."""
    max_drop: NonNegative | None = None
    """With `loss`, leaves out tokens whose probability is more than this below the anchor's."""
    aggregate: Aggregate = Aggregate()
    """With `loss`, how this component's tokens are averaged."""

    def problems(self) -> Iterator[str]:
        if self.where == "loss" and self.aggregate.denominator == "kept":
            yield (
                "distill.aggregate.denominator must be 'original': trust masks do not apply to the "
                "teacher's loss"
            )


class Critic(Stage):
    """L_V = factor max((V - G)^2, (V_old + clip(V - V_old, +- value_clip) - G)^2)."""

    value_clip: Positive | None = 0.2
    """Clips the change of a value by an update to +- this; none does not clip."""
    factor: NonNegative = 0.5
    """Weight of the value loss."""
    loss: Literal["mse", "huber"] = "mse"
    """How an error is penalised.
    mse: the square of the error.
    huber: the square of errors below huber_delta, linear beyond.
    """
    huber_delta: Positive = 10.0
    """Errors beyond this grow linearly (`huber`), in units of the return."""
