"""Computes the inputs that a vision-language model's decoder reads for a row with images.

The family's own forward pass runs up to its decoder and is stopped there. So the image tower's
embeddings at the placeholders, positions in three dimensions and features for deeper layers are the
family's own, and packed rows and padded batches are built from them.
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
    "qwen2_5_vl",
    "qwen3_vl",
    "idefics3",
    "smolvlm",
    "llava_next",
    "internvl",
    "mistral3",
)
"""Families whose rows with images were compared with their own forward pass. Gemma is not among
them: its images are attended to in both directions, which neither packed rows nor the embedded
engine compute."""

_PER_IMAGE_LISTS = ("pooler_output", "deepstack_features")


@dataclass(slots=True, frozen=True)
class DecoderInputs:
    """The decoder's inputs for one row of L tokens."""

    embeddings: torch.Tensor  # (1, L, hidden size)
    positions: torch.Tensor | None
    """(3, 1, L) in families with positions in three dimensions. None: positions are 0 to L - 1."""
    placeholders: torch.Tensor  # (1, L) bool
    deepstack: list[torch.Tensor]
    """Features (placeholders, hidden size) for each of the first layers, which add them at the
    placeholders."""

    def part(self, start: int, stop: int) -> DecoderInputs:
        """Returns the inputs of tokens [start, stop)."""
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
    """Checks that the model's family is known to be exact on images.

    Raises:
        ConfigError: it is not in `EXACT_FAMILIES`.
    """
    if model.config.model_type not in EXACT_FAMILIES:
        raise ConfigError(
            f"{type(model).__name__} ({model.config.model_type}) is shown images, but is not "
            "known to be exact on them; choose one of " + ", ".join(EXACT_FAMILIES)
        )


class Towers:
    """Computes the decoder's inputs for rows with images. Runs the image tower once per image."""

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
        """Computes the decoder's inputs for one row.

        Args:
            token_ids: (L,) int64, on the model's device.
            images: the row's images, in order.

        Raises:
            ValueError: the number of placeholders is not that of the tower's embeddings.
            TrainingError: an image has no pixels.
        """
        shown = torch.zeros_like(token_ids, dtype=torch.bool)
        for image in images:
            shown[image.start : image.end] = True
        placeholders = shown & (token_ids == self._image_token)
        # A placeholder token that the policy sampled is an ordinary token, not part of an image.
        ids = token_ids.masked_fill((token_ids == self._image_token) & ~shown, 0)
        arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        if images:
            arguments["mm_encoder_outputs"] = {"image": self._features_of(images)}
            if "image_grid_thw" in images[0].pixels:  # positions are computed from it
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
                self._base.rope_deltas = None  # else a later call would continue this row
        raise ValueError(f"{type(self._model).__name__} does not call its decoder")

    def _features_of(self, images: Sequence[ShownImage]) -> Any:
        """Returns the tower's output for several images, as if it had computed them together."""
        for image in images:
            if not image.pixels:
                raise TrainingError(
                    "a row read from the trajectory log shows an image, whose pixels the log does "
                    "not have; compute them with agentrl.model.text.processor.restore_pixels"
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
            else:  # a list of layers, each with a list of images
                joined[name] = [
                    [each for part in layer for each in part] for layer in zip(*parts, strict=True)
                ]
        return joined


def joined(parts: Sequence[DecoderInputs], starts: Sequence[int]) -> dict[str, Any]:
    """Returns the decoder's arguments for parts of rows packed end to end.

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
    """Returns the decoder's arguments for a batch of rows, left-padded to `length` tokens."""
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
    """Makes the model's decoder read these arguments instead of token ids, within the block."""

    def replace(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"input_ids": None} | arguments

    handle = model.get_decoder().register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
