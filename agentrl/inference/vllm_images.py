"""Encodes images for vLLM's token endpoint, with the pixels that the trainer computes with.

vLLM gets the pixel tensors and the positions of their placeholders among the token ids. It does not
run its own image processor, so neither ids nor pixels can differ from the trainer's. Tensors are
serialised like vLLM's `MultiModalKwargsItem`, in msgpack: for each argument of the image tower, its
data (dtype, shape, bytes) and the way in which vLLM joins the data of several images.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from agentrl.errors import InferenceError
from agentrl.types import ShownImage

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Families whose images are patches with a grid, and whose images are represented by placeholder
tokens only: vLLM takes an image as one range of placeholders without other tokens in it."""

_RAW_BYTES = 3
"""Code of the msgpack extension for a tensor's bytes."""


RENDER = "/v1/chat/completions/render"
NORMALISED = "--no-mm-device-do-normalize"
"""Server flag that makes its tower expect normalised pixels, as the trainer's does."""

_GREY_SQUARE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAIAAAD9b0jDAAAAKElEQVR42mNsaGhgoDZg"
    "YqABGDV01NBRQ0cNHTV01NBRQ0cNHXyGAgD9bgG49E5a1gAAAABJRU5ErkJggg=="
)


class Features(msgspec.Struct):
    """The images of a prompt, in order. Keys are modalities."""

    mm_hashes: dict[str, list[str]]
    """Hashes of the pixels, by which vLLM caches the tower's results and prefixes."""
    mm_placeholders: dict[str, list[dict[str, int]]]
    kwargs_data: dict[str, list[str]]


def features_of(images: Sequence[ShownImage]) -> Features:
    """Returns a prompt's images in vLLM's form.

    Raises:
        InferenceError: they are from a family that is not in `FAMILIES`.
    """
    for image in images:
        if set(image.pixels) != {"pixel_values", "image_grid_thw"}:
            raise InferenceError(
                f"vLLM takes images of {', '.join(FAMILIES)}, but this model's images consist of "
                f"{', '.join(sorted(image.pixels))}; set inference.backend = 'embedded'"
            )
    return Features(
        {"image": [image.pixels_sha256 for image in images]},
        {"image": [{"offset": i.start, "length": i.end - i.start} for i in images]},
        {"image": [_encoded(image.pixels) for image in images]},
    )


def _encoded(pixels: Mapping[str, np.ndarray]) -> str:
    """Encodes one image's `pixel_values` (patches, values of a patch) and `image_grid_thw` (1, 3)
    as vLLM reads them, in base64."""
    patches = pixels["pixel_values"]
    joined_end_to_end = {"slices": [[0, len(patches), None]], "dim": 0, "keep_on_cpu": False}
    item = {
        "pixel_values": {"data": _tensor(patches), "field": ("flat", joined_end_to_end)},
        "image_grid_thw": {
            "data": _tensor(pixels["image_grid_thw"][0]),
            "field": ("batched", {"keep_on_cpu": True}),
        },
    }
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()


def _tensor(values: np.ndarray) -> tuple[Any, ...]:
    return str(values.dtype), values.shape, msgspec.msgpack.Ext(_RAW_BYTES, values.tobytes())


def render_request(model: str) -> bytes:
    """Returns the body of a request to `RENDER`; the answer shows how a server reads an image."""
    shown = [{"type": "image_url", "image_url": {"url": _GREY_SQUARE}}]
    return msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": shown}]})


def normalises_itself(body: bytes) -> bool:
    """Returns True if the server's tower normalises pixels, from the answer to `render_request`.

    The server's processor then leaves pixels as bytes.

    Raises:
        msgspec.ValidationError: the answer has no image.
    """
    features = msgspec.json.decode(body, type=_Rendered).features
    item = msgspec.msgpack.decode(base64.b64decode(features.kwargs_data["image"][0]))
    return item["pixel_values"]["data"][0] == "uint8"


class _Rendered(msgspec.Struct):
    features: Features
