"""Encodes images with the model's own processor: the tokens it writes and the pixels it computes.

The processor is called with the text of one marker and one image, and returns the tokens that
stand for that image, as many as its size takes, and its pixel tensors.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.errors import ConfigError
from agentrl.images import Image, ImageStore, content_images, content_text
from agentrl.types import Message, ShownImage, TokenRow, Trajectory

MAX_KEPT = 256
"""Images whose pixels are kept: a group shows the same ones again and again."""


class Processor:
    """Replaces the image markers that a chat template writes by the image's tokens."""

    def __init__(self, processor: Any, family: str = "") -> None:
        """
        Args:
            processor: one of transformers', with an image processor and a tokenizer.
            family: `model_type` of the model's configuration.

        Raises:
            ConfigError: the marker is not one token.
        """
        self._processor = processor
        self.family = family
        self.marker: str = processor.image_token
        ids = processor.tokenizer.encode(self.marker, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"{type(processor).__name__} marks an image with {self.marker!r}, which its "
                "tokenizer does not read as one token; add it to the tokenizer's special tokens"
            )
        self.marker_id: int = ids[0]
        self._kept: OrderedDict[str, tuple[list[int], dict[str, np.ndarray], str]] = OrderedDict()

    def show(
        self, ids: list[int], messages: list[Message], start: int
    ) -> tuple[list[int], list[ShownImage]]:
        """Returns the ids with every marker replaced, and the images with their positions.

        Args:
            ids: the messages as the template rendered them.
            start: position of the first id in its row.

        Raises:
            ConfigError: the template does not write one marker for each image.
        """
        images = [image for message in messages for image in content_images(message["content"])]
        found = ids.count(self.marker_id)
        if found != len(images):
            raise ConfigError(
                f"the chat template writes {found} image markers ({self.marker}) for "
                f"{len(images)} images; it may show none in such a message (some do not in answers "
                "of tools): put the image into a user's message, or name another template with "
                "model.chat_template"
            )
        if not images:
            return ids, []
        row: list[int] = []
        shown = []
        queue = iter(images)
        for each in ids:
            if each != self.marker_id:
                row.append(each)
                continue
            image = next(queue)
            tokens, pixels, sha256 = self.read(image)
            at = start + len(row)
            shown.append(ShownImage(image.sha256, at, at + len(tokens), pixels, sha256))
            row += tokens
        return row, shown

    def read(self, image: Image) -> tuple[list[int], dict[str, np.ndarray], str]:
        """Returns the tokens that stand for an image, its pixels, and their hash."""
        if image.sha256 in self._kept:
            self._kept.move_to_end(image.sha256)
            return self._kept[image.sha256]
        made = dict(
            self._processor(
                images=[image.picture],
                text=self.marker,
                add_special_tokens=False,
                return_tensors="np",
            )
        )
        ids = made.pop("input_ids")[0].tolist()
        pixels = {name: made[name] for name in made if name in _OF_TOWERS}
        self._kept[image.sha256] = ids, pixels, pixels_sha256(pixels)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return self._kept[image.sha256]


_OF_TOWERS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes")


def pixels_sha256(pixels: Mapping[str, np.ndarray]) -> str:
    """Returns a hash of the pixel tensors that the vision tower reads."""
    digest = hashlib.sha256()
    for name in sorted(pixels):
        values = np.ascontiguousarray(pixels[name])
        digest.update(f"{name} {values.dtype} {values.shape} ".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def restore_pixels(
    trajectories: Sequence[Trajectory], store: ImageStore, processor: Processor | None
) -> None:
    """Computes the pixels of rows that were read from a run's log.

    Raises:
        ConfigError: the model takes no images, or its processor makes other tokens or pixels from
            an image than the processor with which the row was sampled.
        DataError: the store lacks an image.
    """
    for trajectory in trajectories:
        for row in trajectory.branches:
            row.images = [_with_pixels(row, each, store, processor) for each in row.images]


def _with_pixels(
    row: TokenRow, shown: ShownImage, store: ImageStore, processor: Processor | None
) -> ShownImage:
    if processor is None:
        raise ConfigError(
            "a recorded row shows an image, and the model takes none; name in model.path the model "
            "that sampled it"
        )
    ids, pixels, sha256 = processor.read(store.get(shown.sha256))
    if sha256 != shown.pixels_sha256 or ids != row.token_ids[shown.start : shown.end]:
        raise ConfigError(
            f"image {shown.sha256} was sampled with {shown.end - shown.start} tokens and pixels of "
            f"hash {shown.pixels_sha256}, and the model's processor makes {len(ids)} tokens and "
            f"pixels of hash {sha256} of it: use the processor (preprocessor_config.json) and the "
            "version of transformers of the run that recorded it"
        )
    return replace(shown, pixels=pixels, pixels_sha256=sha256)


def with_markers(messages: Sequence[Message], *, takes_images: bool) -> list[Message]:
    """Returns messages as chat templates take them: images without their data, and a list of texts
    as one text.

    Raises:
        ConfigError: a message shows an image, and the model takes none.
    """
    if all(isinstance(message["content"], str) for message in messages):
        return list(messages)
    rendered: list[Any] = []
    for message in messages:
        content: Any = message["content"]
        if not isinstance(content, str):
            if all(part["type"] == "text" for part in content):
                content = content_text(content)
            elif takes_images:
                content = [
                    {"type": "text", "text": part["text"]}
                    if part["type"] == "text"
                    else {"type": "image"}
                    for part in content
                ]
            else:
                raise ConfigError(
                    "the environment shows an image, and the model takes none; choose a "
                    "vision-language model (docs/models.md)"
                )
        rendered.append({**message, "content": content})
    return rendered
