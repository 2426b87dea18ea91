"""Handles the parts of a model that depend on the length of a row.

Two rope types of transformers change the rotation angles of all tokens in a row once it exceeds the
original context (`longrope`), or with its length (`dynamic`). Tokens sampled before such a change
were computed with other angles than the finished row, and in a packed row the longest segment
decides for all. A run therefore uses one set of angles (`fix_angles`), as a vLLM server does.

Attention windows, chunks and scales that begin at some position are either computed exactly or not,
at any length. In published models they begin after thousands of tokens, beyond the reach of a short
probe; `within_reach` moves them to a few tokens.
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
"""Values that `within_reach` sets. Some rows of the probes are longer than the last one and some
are not, because a dependence on the row's length shows only between rows on both sides."""
_PROBED_SCALE = 3.0
"""Growth of a scale that begins at a position. Published models' 0.1 would be lost in bfloat16's
rounding."""


def fix_angles(model: PreTrainedModel, max_tokens: int | None) -> None:
    """Fixes the rotation angles of models whose angles depend on the length of each row.

    With `longrope` all rows get the long factors if one may exceed the original context, else the
    short ones, as vLLM decides by its `max_model_len`. `dynamic` is refused beyond the original
    context.

    Args:
        max_tokens: length of the longest row. None means that no row exceeds the original context;
            a forward pass of one that does then raises ValueError.

    Raises:
        ConfigError: the model has `dynamic` angles, and rows may exceed its original context.
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
            f"rollout.max_context_tokens (for sft, --max-tokens) to {original} or less"
        )
    return True


def longest_row(config: PretrainedConfig) -> int | None:
    """Returns the number of tokens that a model was made for; None if it has no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    for table in rope_tables(text):
        if table.get("rope_type") in ("yarn", "linear"):
            limit = max(limit, int(table.get("factor", 1) * table.get(_ORIGINAL, limit)))
    return limit


class _RowLimit:
    """A forward hook that refuses rows longer than the angles were chosen for."""

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
    """Sets the positions at which windows, chunks and scales begin to a few tokens, within the
    block.

    Args:
        max_tokens: length of the longest row; positions beyond it are left alone, because no row of
            the run reaches them. None changes all.
    """
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            for part in (config, config.get_text_config()):
                owners[id(part)] = part
    with contextlib.ExitStack() as put_back:
        for owner in owners.values():
            for name, probed in PROBED_THRESHOLDS.items():
                value = getattr(owner, name, None)
                if _is_reached(value, probed, max_tokens):
                    put_back.callback(setattr, owner, name, value)
                    setattr(owner, name, probed)
                    if name == "floor_scale":
                        put_back.callback(setattr, owner, "attn_scale", owner.attn_scale)
                        owner.attn_scale = _PROBED_SCALE
            for table in rope_tables(owner):
                value = table.get(_ORIGINAL)
                if _is_reached(value, PROBED_THRESHOLDS[_ORIGINAL], max_tokens):
                    put_back.callback(table.__setitem__, _ORIGINAL, value)
                    table[_ORIGINAL] = PROBED_THRESHOLDS[_ORIGINAL]
        yield


def _is_reached(value: object, probed: int, max_tokens: int | None) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return probed < value and (max_tokens is None or value < max_tokens)


def rope_tables(owner: Any) -> list[dict[str, Any]]:
    """Returns a configuration's tables of rope parameters: the whole, and one per kind of layer."""
    if not isinstance(owner, PretrainedConfig):
        return []
    rope = getattr(owner, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]
