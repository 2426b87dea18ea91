"""Defines the objective of a run, a composition of stages, and the presets. Imports no torch.

Each stage is a string that names a method, and the few numbers that the method needs. In TOML a
preset is the starting point, and nested tables override it:

    [objective]
    preset = "dapo"
    [objective.surrogate]
    high = 0.3
    [objective.kl]
    where = "loss"
    coef = 0.01

Keys are merged one by one, except that a `credit` or `surrogate` table with another `kind` than the
preset's replaces the preset's table. Lists are replaced as a whole. The text "none" stands for an
absent optional value, because TOML has no null.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from agentrl.algo.advantage_stages import Baseline, Credit, OutcomeCredit, Reward, Scale, Whiten
from agentrl.algo.loss_stages import (
    Aggregate,
    ClipSurrogate,
    Critic,
    Distill,
    Entropy,
    Kl,
    OffPolicy,
    Ratio,
    Surrogate,
)
from agentrl.algo.presets import PRESET_DATA, require_known, stages_of
from agentrl.algo.stage import Stage
from agentrl.algo.trust_stages import TrustMask
from agentrl.algo.user_functions import batch_fields


class Objective(Stage):
    """All stages of the objective. Each has a default; `preset` sets several at once."""

    preset: str | None = None
    """Name of the preset that the other keys override; docs/algorithms.md lists the presets."""
    reward: Reward = Reward()
    """The reward of a trajectory."""
    credit: Credit = OutcomeCredit()
    """How reward is assigned to tokens: `kind` outcome, turn, token, gae or gigpo, and its keys."""
    baseline: Baseline = Baseline()
    """The value subtracted from returns."""
    scale: Scale = Scale(kind="std")
    """The divisor of the difference."""
    advantage: str | None = None
    """Your own function in place of credit, baseline and scale: `package.module:function` or
    `path/to/file.py:function`."""
    distill: Distill = Distill()
    """Learning from a teacher."""
    whiten: Whiten = Whiten()
    """Normalisation of the finished advantages over the step."""
    statistics: Literal["batch", "environment"] = "batch"
    """The trajectories over which a stage takes a mean, std or rate of the batch: those of the
    whole step, or those of one environment in a run with several `[[env]]`."""
    ratio: Ratio = Ratio()
    """The live policy's probability over an anchor's."""
    surrogate: Surrogate = ClipSurrogate()
    """The loss of a token: `kind` clip (low, high, cap), cispo (low, high), sapo, logprob, ratio,
    gmpo, vespo, dro, kl_cov or none, and its keys."""
    loss: str | None = None
    """Your own function in place of the surrogate: `package.module:function` or
    `path/to/file.py:function`."""
    trust: list[TrustMask] = Field(default_factory=list)
    """Masks, each a table with a `kind`: opsm, dppo_tv, dppo_kl, m2, ratio, veto, gibberish,
    top_entropy, staleness or clip_cov. A token is trained only if all of them keep it."""
    off_policy: OffPolicy = OffPolicy()
    """Detached importance weights, for a sampler that differs from the trainer."""
    kl: Kl = Kl()
    """Penalty on the divergence from a base policy."""
    entropy: Entropy = Entropy()
    """Entropy bonus."""
    aggregate: Aggregate = Aggregate(kind="sequence_token_mean")
    """How token losses are averaged."""
    critic: Critic = Critic()
    """The value loss for `credit.kind = "gae"`."""

    @model_validator(mode="before")
    @classmethod
    def _merge_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        name = data.get("preset")
        if name is not None:
            require_known(name)
        return deep_merge(deep_merge(_KINDS, stages_of(str(name))), data)

    @classmethod
    def from_preset(cls, name: str, overrides: Mapping[str, Any] | None = None) -> Self:
        """Returns the preset with nested `overrides` merged over it.

        Raises:
            pydantic.ValidationError: a preset or key is unknown, or stages contradict each other.
        """
        return cls.model_validate({**(overrides or {}), "preset": name})

    def stages(self) -> Iterator[tuple[str, Stage]]:
        """Yields (name, stage) in the order of computation; a mask's name is trust.<kind>."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Stage):
                yield name, value
            elif name == "trust":
                yield from ((f"trust.{mask.kind}", mask) for mask in self.trust)

    def problems(self) -> Iterator[str]:
        """Yields a message for each contradiction between the stages, with what to change."""
        yield from self.reward.conflicts(self.credit)
        yield from self.baseline.conflicts(self.credit)
        yield from self.scale.conflicts(self.baseline, self.credit)
        surrogate = self.surrogate if self.loss is None else None
        yield from self.ratio.conflicts(surrogate, self.off_policy, self.aggregate)
        yield from self.aggregate.conflicts(self.trust)
        in_loss = "loss" in (self.distill.where, self.kl.where) or self.loss is not None
        if self.surrogate.kind == "none" and not in_loss:
            yield "surrogate.kind = 'none' leaves nothing to learn from; set distill.where = 'loss'"
        if self.advantage is not None and self.needs_critic:
            yield (
                "objective.advantage stands in for credit, so credit.kind = 'gae' would train a "
                "critic for nothing; set credit.kind = 'outcome', or remove objective.advantage"
            )
        if self.advantage is not None and self.reward.combine != "sum":
            yield (
                "reward.combine = 'normalize_then_sum' applies baseline and scale, which "
                "objective.advantage replaces; set reward.combine = 'sum'"
            )

    def warnings(self) -> Iterator[str]:
        """Yields a message for each setting that is allowed but rarely intended."""
        yield from self.whiten.warnings()
        yield from self.kl.warnings()

    @property
    def user_functions(self) -> dict[str, str]:
        """Key -> reference of the user's own functions, as in the run file."""
        named = {"objective.advantage": self.advantage, "objective.loss": self.loss}
        return {key: reference for key, reference in named.items() if reference is not None}

    @property
    def needs_groups(self) -> bool:
        """True if advantages compare the trajectories of a group; then a group of one has 0."""
        compares = self.baseline.kind not in ("none", "given") and self.baseline.key != "batch"
        return self.advantage is None and compares

    @property
    def needs_critic(self) -> bool:
        """True if credit needs a value model (`credit.kind = "gae"`)."""
        return self.credit.kind == "gae"

    def needs(self) -> frozenset[str]:
        """Returns the optional fields of `Batch` that this objective requires.

        `old_logprobs` is among them only if something must be computed over the whole step before
        the first forward pass with gradient; otherwise the first use of a batch does not need it.

        Raises:
            ConfigError: `objective.advantage` or `objective.loss` cannot be loaded.
        """
        masks = {mask.kind for mask in self.trust}
        own_advantage = self.advantage is not None
        versions = "staleness" in masks or self.ratio.anchor == "loglinear"
        before_the_loss = (
            masks & {"m2", "clip_cov"}
            or self.off_policy.normalize != "none"
            or (self.surrogate.kind == "kl_cov" and self.loss is None)
            or (masks & {"ratio", "veto"} and self.aggregate.denominator == "kept")
        )
        fields = {
            name
            for name, is_needed in (
                ("old_logprobs", before_the_loss),
                (f"{self.kl.base}_logprobs", self.kl.is_on and self.kl.base != "rollout"),
                ("teacher_logprobs", self.distill.is_on),
                ("values", self.needs_critic),
                ("state_ids", self.credit.kind == "gigpo" and not own_advantage),
                ("sum_squared_probs", self.baseline.kind == "optimal_token" and not own_advantage),
                ("baselines", self.baseline.kind == "given" and not own_advantage),
                ("reward_components", self.reward.weights is not None),
                ("token_ids", "gibberish" in masks),
                ("old_entropy", "top_entropy" in masks),
                ("policy_versions", versions),
                ("current_version", versions),
                ("truncated", self.reward.truncated != "keep"),
            )
            if is_needed
        }
        for key, reference in self.user_functions.items():
            fields |= batch_fields(key, reference)
        return frozenset(fields)


def deep_merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with `overrides` merged in, table by table. A `credit` or `surrogate` table
    with another `kind` replaces the one in `base`."""
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


_KINDS = {
    "credit": {"kind": "outcome"},
    "scale": {"kind": "std"},
    "surrogate": {"kind": "clip"},
    "aggregate": {"kind": "sequence_token_mean"},
}
"""The kind of a table that sets only other keys, as in `[objective.scale] eps = 1e-4`."""

_UNIONS = frozenset({"credit", "surrogate"})
"""Stages whose keys depend on their kind: another kind starts from its own defaults."""

PRESETS: dict[str, Objective] = {name: Objective.from_preset(name) for name in PRESET_DATA}
"""Name of each preset -> its objective."""
