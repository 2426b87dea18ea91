"""Defines the base class of the objective's stages: a frozen model of their keys.

Imports no torch. Each formula is written once, where its stage is defined: in the class docstring
or, if a key selects among several, in one line `choice: formula` per choice in that key's help.
docs/generate.py makes docs/algorithms.md of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core.core_schema import SerializationInfo

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
        "rollout.keep = ['zero_variance'] with rollout.max_waves = 1 (train on the groups left)",
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
"""Names with two meanings among other trainers, and both meanings. Every stage refuses them, as a
key and as a value."""


class Stage(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    chosen_by: ClassVar[tuple[str, ...]] = ()
    """Keys that select the formula. The stage is off if the first of them is "none"."""

    def problems(self) -> Iterator[str]:
        """Yields a message for each mistake within this stage, with what to write instead.

        A stage that can contradict other stages reports that from its `conflicts` method.
        """
        yield from ()

    @property
    def is_on(self) -> bool:
        return not self.chosen_by or getattr(self, self.chosen_by[0]) != "none"

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

    @model_validator(mode="after")
    def _refuse_problems(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self

    @model_serializer(mode="wrap")
    def _write_none(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        """Writes None as "none" in JSON and TOML: a missing key would bring back the preset's
        value."""
        data = handler(self)
        if info.mode == "json" and isinstance(data, dict):
            for name in type(self).model_fields:
                if getattr(self, name) is None and name != "preset":
                    data[name] = "none"
        return data
