"""Chooses the sampling parameters of training and evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from agentrl.config import EvalSection, RunConfig
from agentrl.errors import ConfigError
from agentrl.inference.base import SamplingParams
from agentrl.model.lora import base_of, is_adapter

FILE = "generation_config.json"
_OF_MODEL = {"max_tokens": "max_new_tokens"} | {
    key: key for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}
"""Key of `eval` -> name in generation_config.json."""


def training_sampling(config: RunConfig, temperature: float | None = None) -> SamplingParams:
    """Returns the sampling parameters of rollouts in training.

    Args:
        temperature: replaces `rollout.temperature`.
    """
    rollout = config.rollout
    chosen = rollout.temperature if temperature is None else temperature
    return SamplingParams(
        rollout.max_turn_tokens,
        chosen,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        report_kept=rollout.is_truncated,
        report_routes=config.train.router_replay,
    )


def evaluation_sampling(config: RunConfig, path: str) -> tuple[SamplingParams, str | None]:
    """Returns the sampling parameters of evaluation.

    Keys that `eval` does not set come from the generation_config.json of the model at `path`. The
    second result is a line that tells the user which; None if there are none.

    Raises:
        ConfigError: that file cannot be used.
    """
    given = config.eval.sampling()
    rest = SamplingParams(config.rollout.max_turn_tokens)
    models = {
        key: value
        for key, value in _recommended(path).items()
        if key not in given and value != getattr(rest, key)
    }
    sampling = replace(rest, **models | given)
    if not models:
        return sampling, None
    values = ", ".join(f"{key} {value:g}" for key, value in models.items())
    keys = ", ".join(f"eval.{key}" for key in models)
    return sampling, f"eval samples with {values}, as {FILE} says; override: {keys}"


def _recommended(path: str) -> dict[str, Any]:
    path = base_of(path) if is_adapter(path) else path
    try:
        config = GenerationConfig.from_pretrained(path)
        found = {key: getattr(config, name, None) for key, name in _OF_MODEL.items()}
        if found["top_k"] == 0:
            found["top_k"] = -1
        return EvalSection.model_validate(found).sampling()
    except (OSError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and not (Path(path) / FILE).exists():
            return {}
        reason = " ".join(str(error).split())
        raise ConfigError(f"{FILE} of {path} cannot be used: {reason}") from error
