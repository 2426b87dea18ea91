"""Makes the inputs that a vision-language model's decoder reads for a row with images.

A family's own forward pass runs up to its decoder and no further: embeddings of its tower at the
placeholders, positions in three dimensions and features for deeper layers are what the family makes
of them, and packed rows and padded batches are built from those.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError, TrainingError
from agentrl.types import ShownImage

EXACT_FAMILIES = (
    *("qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"),
    *("llava_next", "internvl", "mistral3"),
)
"""Those whose rows with images were compared with their own forward pass. Gemma's images, for one,
are attended to in both directions, which neither packed rows nor the embedded engine compute."""

_PER_IMAGE_LISTS = ("pooler_output", "deepstack_features")


@dataclass(slots=True, frozen=True)
class DecoderInputs:
    """The decoder's inputs for one row of L tokens."""

    embeddings: torch.Tensor  # (1, L, hidden size)
    positions: torch.Tensor | None
    """(3, 1, L), of families that count them in three dimensions; None: 0 to L - 1."""
    placeholders: torch.Tensor  # (1, L) bool
    deepstack: list[torch.Tensor]
    """One (placeholders, hidden size) for each of the first layers, which add them there."""

    def part(self, start: int, stop: int) -> DecoderInputs:
        """Those of tokens [start, stop)."""
        before, here = (int(self.placeholders[:, :at].sum()) for at in (start, stop))
        return DecoderInputs(
            self.embeddings[:, start:stop],
            None if self.positions is None else self.positions[..., start:stop],
            self.placeholders[:, start:stop],
            [features[before:here] for features in self.deepstack],
        )


class _ReachedDecoder(Exception):
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


def require_exact_images(model: PreTrainedModel) -> None:
    """Raises:
    ConfigError: the model's family was not compared with its own forward pass on images.
    """
    if model.config.model_type not in EXACT_FAMILIES:
        raise ConfigError(
            f"{type(model).__name__} ({model.config.model_type}) is shown images, and is not "
            "known to be exact on them; choose one of " + ", ".join(EXACT_FAMILIES)
        )


class Towers:
    """Computes images, each once, and what the decoder reads of rows that show them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Raises:
            ConfigError: see `require_exact_images`.
        """
        self._model = model
        self._base: Any = model.base_model
        self._takes = inspect.signature(type(self._base).forward).parameters
        self._image_token: int | None = getattr(model.config, "image_token_id", None)
        require_exact_images(model)
        self._features: dict[str, Any] = {}

    def inputs(self, token_ids: torch.Tensor, images: Sequence[ShownImage]) -> DecoderInputs:
        """
        Args:
            token_ids: (L,) of the row, on the model's device.
            images: in the order in which they stand there.

        Raises:
            ValueError: there are not as many placeholders as the tower makes embeddings.
        """
        shown = torch.zeros_like(token_ids, dtype=torch.bool)
        for image in images:
            shown[image.start : image.end] = True
        placeholders = shown & (token_ids == self._image_token)
        # One that the policy sampled is a word like any other, not the place of an image.
        ids = token_ids.masked_fill((token_ids == self._image_token) & ~shown, 0)
        arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        if images:
            arguments["mm_encoder_outputs"] = {"image": self._features_of(images)}
            if "image_grid_thw" in images[0].pixels:  # of which the positions are made
                grids = np.concatenate([image.pixels["image_grid_thw"] for image in images])
                arguments["image_grid_thw"] = torch.from_numpy(grids).to(ids.device)
        if "mm_token_type_ids" in self._takes:
            arguments["mm_token_type_ids"] = placeholders[None].int()
        found = self._call(arguments)
        embeddings = found["inputs_embeds"]
        words = self._model.get_input_embeddings()(token_ids)[None]
        embeddings = torch.where(placeholders[None, :, None], embeddings, words)
        positions = found.get("position_ids")
        return DecoderInputs(
            embeddings,
            positions[-3:] if positions is not None and positions.ndim == 3 else None,
            placeholders[None],
            list(found.get("deepstack_visual_embeds") or ()),
        )

    def _call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        def stop(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            raise _ReachedDecoder(kwargs)

        handle = self._model.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._base(**arguments)
        except _ReachedDecoder as reached:
            return reached.arguments
        finally:
            handle.remove()
            if hasattr(self._base, "rope_deltas"):
                self._base.rope_deltas = None  # or a later call would continue this row
        raise ValueError(f"{type(self._model).__name__} does not call its decoder")

    def _features_of(self, images: Sequence[ShownImage]) -> Any:
        """The tower's output on several images as if it had seen them together."""
        for image in images:
            if not image.pixels:
                raise TrainingError(
                    "a row that was read back from the trajectory log shows an image, whose pixels "
                    "are not in it; compute them with agentrl.rollout.processor.restore_pixels"
                )
            if image.sha256 not in self._features:
                pixels = {
                    name: torch.from_numpy(values).to(self._model.device)
                    for name, values in image.pixels.items()
                }
                self._features[image.sha256] = self._base.get_image_features(
                    **pixels, return_dict=True
                )
        found = [self._features[image.sha256] for image in images]
        joined = type(found[0])()
        for name in _PER_IMAGE_LISTS:
            if (first := getattr(found[0], name, None)) is None:
                continue
            parts = [getattr(each, name) for each in found]
            if isinstance(first, torch.Tensor):
                joined[name] = torch.cat(parts)
            elif name == "pooler_output":
                joined[name] = tuple(each for part in parts for each in part)
            else:  # of each layer, those of each image
                joined[name] = [
                    [each for part in layer for each in part] for layer in zip(*parts, strict=True)
                ]
        return joined


def joined(parts: Sequence[DecoderInputs], starts: Sequence[int]) -> dict[str, Any]:
    """Arguments of the decoder for parts of rows that lie end to end.

    Args:
        starts: the position of each part's first token in its row.
    """
    arguments: dict[str, Any] = {"inputs_embeds": torch.cat([p.embeddings for p in parts], dim=1)}
    three = any(part.positions is not None for part in parts)
    positions = []
    for part, start in zip(parts, starts, strict=True):
        length, device = part.embeddings.shape[1], part.embeddings.device
        own = part.positions
        if own is None:
            own = torch.arange(start, start + length, device=device)[None]
            own = own.expand(3, 1, length) if three else own
        positions.append(own)
    arguments["position_ids"] = torch.cat(positions, dim=-1)
    layers = max(len(part.deepstack) for part in parts)
    if layers:
        arguments["visual_pos_masks"] = torch.cat([p.placeholders for p in parts], dim=1)
        arguments["deepstack_visual_embeds"] = [
            torch.cat([part.deepstack[layer] for part in parts if part.deepstack])
            for layer in range(layers)
        ]
    return arguments


def padded(parts: Sequence[DecoderInputs], length: int) -> dict[str, Any]:
    """Arguments of the decoder for a batch of rows, padded on the left to this length."""
    pad = torch.nn.functional.pad
    arguments: dict[str, Any] = {
        "inputs_embeds": torch.cat(
            [pad(p.embeddings, (0, 0, length - p.embeddings.shape[1], 0)) for p in parts]
        )
    }
    if any(part.positions is not None for part in parts):
        rows = [joined([part], [0])["position_ids"] for part in parts]
        rows = [row.expand(3, 1, -1) for row in rows]
        arguments["position_ids"] = torch.cat(
            [pad(row, (length - row.shape[-1], 0)) for row in rows], dim=1
        )
    if any(part.deepstack for part in parts):
        arguments["visual_pos_masks"] = torch.cat(
            [pad(p.placeholders, (length - p.placeholders.shape[1], 0)) for p in parts]
        )
        arguments["deepstack_visual_embeds"] = [
            torch.cat(layer)
            for layer in zip(*(p.deepstack for p in parts if p.deepstack), strict=True)
        ]
    return arguments


@contextlib.contextmanager
def reading(model: PreTrainedModel, arguments: dict[str, Any]) -> Iterator[None]:
    """The model's decoder reads these arguments in this block, in place of token ids."""

    def replace(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"input_ids": None} | arguments

    handle = model.get_decoder().register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
