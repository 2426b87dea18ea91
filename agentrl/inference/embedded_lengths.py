"""Parts of a model that depend on the length of a row, made constant or brought within a probe's
reach.

Two rope types of transformers turn all of a row by other angles once it is longer than the
original context (`longrope`), or by angles of its length (`dynamic`). Tokens that were sampled
before that have seen other angles than the finished row gives them, and in a packed row the longest
segment decides for all. A run therefore has one set of angles, as a vLLM server has.

Windows, chunks and scales that begin at a certain position are exact or not for any length of row.
Published models have them at thousands of tokens, where no probe at the start of a run goes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)

_ORIGINAL = "original_max_position_embeddings"
PROBED_THRESHOLDS = {
    "sliding_window": 5,
    "window_size": 5,
    "attention_window_size": 5,
    "keep_window_size": 5,
    "attention_chunk_size": 5,
    "floor_scale": 5,
    "index_topk": 5,
    _ORIGINAL: 23,
}
"""Where `within_reach` puts thresholds. Some rows of the probes are longer than the last, and some
are not, because what follows the length of a row shows only where two of them differ."""
_PROBED_SCALE = 3.0
"""How much a scale that begins at a position grows there; published models' 0.1 is within what
bfloat16 rounds."""


def fix_angles(model: PreTrainedModel, max_tokens: int | None) -> None:
    """Choose once how positions are encoded where that would follow the length of each row.

    With `longrope` every row gets the long factors if one may exceed the original context, and the
    short ones otherwise; vLLM does so by its `max_model_len`. `dynamic` is refused beyond it.

    Args:
        max_tokens: of the longest row; None: none exceeds the original context, and one that does
            is an error of the forward pass.

    Raises:
        ConfigError: no single set of angles is the family's own at that length.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if _fix(module, kinds, None, max_tokens):
                module.rope_type = "fixed"  # pyright: ignore[reportArgumentType]
        elif isinstance(kinds, dict):
            module.rope_type = {  # pyright: ignore[reportArgumentType]
                layer: "fixed" if _fix(module, kind, layer, max_tokens) else kind
                for layer, kind in kinds.items()
            }


def _fix(module: Any, kind: str, layer: str | None, max_tokens: int | None) -> bool:
    if "dynamic" not in kind and kind != "longrope":
        return False
    of_layer = {} if layer is None else {"layer_type": layer}
    prefix = "" if layer is None else f"{layer}_"
    config: PretrainedConfig = module.config
    if kind == "longrope":
        rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
        original = rope["original_max_position_embeddings"]
    else:
        original = config.max_position_embeddings
    original_angles = getattr(module, f"{prefix}original_inv_freq")
    angles = getattr(module, f"{prefix}inv_freq")
    if max_tokens is None or max_tokens <= original:
        angles.copy_(original_angles)
        module.register_forward_pre_hook(_RowLimit(original, kind), with_kwargs=True)
    elif kind == "longrope":
        long, _ = ROPE_INIT_FUNCTIONS[kind](config, angles.device, seq_len=original + 1, **of_layer)
        angles.copy_(long)
        logger.warning(
            "%s: every row gets longrope's long factors, as from a vLLM server, because rows may "
            "have %d tokens and the original context has %d",
            config.model_type,
            max_tokens,
            original,
        )
    else:
        raise ConfigError(
            f"{config.model_type} has rope_type '{kind}', whose angles depend on the length of "
            f"each row beyond {original} tokens, and rows may have {max_tokens}; set "
            f"rollout.max_context_tokens (of sft --max-tokens) to {original} or less"
        )
    return True


class _RowLimit:
    """A hook that refuses positions beyond what the angles are for."""

    def __init__(self, limit: int, kind: str) -> None:
        self.limit, self.kind = limit, kind

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        if torch.compiler.is_compiling():
            return
        if (longest := int(positions.max()) + 1) > self.limit:
            raise ValueError(
                f"a row of {longest} tokens is longer than the {self.limit} that the angles of "
                f"rope_type '{self.kind}' were chosen for; lower rollout.max_context_tokens"
            )


@contextlib.contextmanager
def within_reach(model: PreTrainedModel, max_tokens: int | None = None) -> Iterator[None]:
    """Bring windows, chunks and positions from which a scale changes down to a few tokens, while
    the block runs.

    Args:
        max_tokens: those beyond it are left, because no row of the run gets there; None: all.
    """
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            for part in (config, config.get_text_config()):
                owners[id(part)] = part
    changed: list[tuple[Any, str, Any]] = []
    tables: list[tuple[dict[str, Any], Any]] = []
    try:
        for owner in owners.values():
            for name, probed in PROBED_THRESHOLDS.items():
                value = getattr(owner, name, None)
                if _is_reached(value, probed, max_tokens):
                    changed.append((owner, name, value))
                    setattr(owner, name, probed)
                    if name == "floor_scale":
                        changed.append((owner, "attn_scale", owner.attn_scale))
                        owner.attn_scale = _PROBED_SCALE
            for table in _rope_tables(owner):
                value = table.get(_ORIGINAL)
                if _is_reached(value, PROBED_THRESHOLDS[_ORIGINAL], max_tokens):
                    tables.append((table, value))
                    table[_ORIGINAL] = PROBED_THRESHOLDS[_ORIGINAL]
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)
        for table, value in tables:
            table[_ORIGINAL] = value


def _is_reached(value: object, probed: int, max_tokens: int | None) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return probed < value and (max_tokens is None or value < max_tokens)


def _rope_tables(owner: Any) -> list[dict[str, Any]]:
    """The rope parameters of a configuration: one table, or one for each kind of layer."""
    if not isinstance(owner, PretrainedConfig):
        return []
    rope = getattr(owner, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]
