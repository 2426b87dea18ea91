"""Images in messages: read and checked by their content, and kept once each by their hash.

A message's content is a text, or a list of parts in OpenAI's shape:

    [{"type": "text", "text": "Which colour is this?"}, image_part(Path("square.png"))]

An image is a PNG or JPEG file with one frame. Its bytes come from an environment, an agent or a
log, so `read_image` trusts no name and no declared type: it looks at the header first, refuses what
would take too much memory, and then decodes the whole file once. In a run's files a part may be
`{"type": "image", "sha256": ...}`, whose bytes are in the `ImageStore` beside them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import re
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, DataError, ImageError

if TYPE_CHECKING:
    import PIL.Image

    from agentrl.types import Content

MAX_IMAGE_BYTES = 20 * 2**20
"""The largest image file that is read."""
MAX_IMAGE_PIXELS = 16_000_000
"""Width times height at most: decoded, that is 64 MB."""
MAX_STEP_IMAGES = 16
"""Images that one observation, or one message of an agent, may show."""
MAX_STEP_IMAGE_BYTES = 32 * 2**20
"""Bytes of their files together."""
MAX_EPISODE_IMAGES = 256
"""Images that an episode, or one call of an agent, may show."""
MAX_DECODED_HASHES = 16_384
"""Images that are remembered as decoded; 32 bytes each."""
IMAGES_FOLDER = "images"
"""Name of a run's `ImageStore`."""

_SIGNATURES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg"}
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True, frozen=True)
class Image:
    """A PNG or JPEG file that `read_image` has checked."""

    data: bytes = field(repr=False)
    """The file, byte for byte."""
    media_type: str
    """`image/png` or `image/jpeg`, by its content."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""

    @property
    def sha256(self) -> str:
        """The hash of the file, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def file_name(self) -> str:
        """The hash with the suffix of the file's type."""
        return self.sha256 + _SUFFIXES[self.media_type]

    @property
    def picture(self) -> PIL.Image.Image:
        """The decoded pixels, in red, green and blue."""
        with _pillow().open(io.BytesIO(self.data)) as opened:
            return opened.convert("RGB")

    @property
    def url(self) -> str:
        """The file as a data URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


def read_image(
    data: bytes,
    *,
    max_bytes: int = MAX_IMAGE_BYTES,
    max_pixels: int = MAX_IMAGE_PIXELS,
    decode: bool = True,
) -> Image:
    """Checks an image file and decodes it once.

    Args:
        decode: false looks at the header only.

    Raises:
        ImageError: it is too large, is not a PNG or JPEG file, holds several frames, or is damaged.
        ConfigError: Pillow is not installed.
    """
    if len(data) > max_bytes:
        raise ImageError(f"the image has {len(data)} bytes; at most {max_bytes} are read")
    media_type = next((kind for kind, start in _SIGNATURES.items() if data.startswith(start)), None)
    if media_type is None:
        raise ImageError(
            f"the image is neither PNG nor JPEG (it begins with {data[:12]!r}); convert it first"
        )
    pillow = _pillow()
    try:
        # Reads the header only. Pillow warns of large images, which `-W error` makes an error.
        opened = pillow.open(io.BytesIO(data), formats=["PNG", "JPEG"])
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise ImageError(f"the image has more than {max_pixels} pixels; make it smaller") from None
    except _DAMAGE as error:
        raise _damaged(error) from error
    with opened as picture:
        width, height = picture.size
        if width * height > max_pixels:
            raise ImageError(
                f"the image has {width} x {height} pixels; at most {max_pixels} are decoded, so "
                "make it smaller"
            )
        if (frames := getattr(picture, "n_frames", 1)) != 1:
            raise ImageError(f"the image has {frames} frames; send one of them")
        try:
            if decode:
                picture.load()
        except _DAMAGE as error:
            raise _damaged(error) from error
    return Image(data, media_type, width, height)


_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)
"""What Pillow raises of files that are cut short or not what they claim to be."""


def _damaged(error: Exception) -> ImageError:
    return ImageError(f"the image cannot be decoded: {error}")


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise ConfigError("images need Pillow: pip install 'agentrl-gym[images]'") from None
    return PIL.Image


def image_part(source: bytes | Path | PIL.Image.Image | Image) -> dict[str, Any]:
    """Returns an image as a part of a message's content; a picture of Pillow's is saved as PNG.

    Raises:
        ImageError: as `read_image`; of a path, the file's name stands before it.
    """
    if isinstance(source, Path):
        # One byte more than is read, so that a huge file is refused without filling the memory.
        with source.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
        try:
            image = read_image(data)
        except ImageError as error:
            raise ImageError(f"{source}: {error}") from error
    elif isinstance(source, Image):
        image = source
    elif isinstance(source, bytes):
        image = read_image(source)
    else:
        image = _as_png(source)
    return {"type": "image_url", "image_url": {"url": image.url}}


def read_picture(pixels: Any) -> Image:
    """Returns a NumPy array of bytes, height x width or height x width x 3, as a PNG file."""
    return _as_png(_pillow().fromarray(pixels))


def _as_png(picture: PIL.Image.Image) -> Image:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return read_image(buffer.getvalue())


def content_text(content: str | Sequence[Mapping[str, Any]], image: str = "") -> str:
    """Returns the text of a message's content.

    Args:
        image: the text in place of each image, such as `[image]` in formats without images.

    Raises:
        ImageError: a part is neither a text nor an image.
    """
    if isinstance(content, str):
        return content
    return "".join(part["text"] if _kind(part) == "text" else image for part in content)


def count_images(content: str | Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of images in a message's content, without reading them."""
    return 0 if isinstance(content, str) else sum(_kind(part) != "text" for part in content)


def join_contents(contents: Iterable[Content], separator: str = "") -> Content:
    """Returns the contents of messages as one: a text where all are texts, else a list in which
    texts that follow each other are one."""
    contents = list(contents)
    parts: list[Any] = []
    for number, content in enumerate(contents):
        own: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in [{"type": "text", "text": separator if number else ""}, *own]:
            if parts and parts[-1]["type"] == part["type"] == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
            elif part.get("text") != "":
                parts.append(part)
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def check_images(contents: Iterable[Content], source: str) -> int:
    """Checks the images that are shown together, and returns their number.

    Args:
        source: names the sender of the images in the error.

    Raises:
        ImageError: they are too many, too large together, or one is wrong.
    """
    shown = [each for each in contents if not isinstance(each, str)]
    count = sum(map(count_images, shown))  # before any is decoded
    if count > MAX_STEP_IMAGES:
        raise ImageError(f"{source} shows {count} images; at most {MAX_STEP_IMAGES} are sent")
    size = sum(len(image.data) for each in shown for image in content_images(each))
    if size > MAX_STEP_IMAGE_BYTES:
        raise ImageError(
            f"{source} shows images of {size} bytes together; at most {MAX_STEP_IMAGE_BYTES} are "
            "sent, so make them smaller"
        )
    return count


def content_parts(
    content: str | Sequence[Mapping[str, Any]], store: ImageStore | None = None
) -> list[str | Image]:
    """Returns the texts and images of a message's content in order, each image read and checked.

    Args:
        store: holds the bytes of the parts that are only a hash.

    Raises:
        ImageError: an image is invalid, or is only a hash and no store is given.
        DataError: the store lacks an image.
    """
    if isinstance(content, str):
        return [content]
    return [part["text"] if _kind(part) == "text" else _read_part(part, store) for part in content]


def content_of_parts(parts: list[str | Image]) -> Content:
    """Returns texts and images as a message's content; a single text is one."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(part)
        for part in parts
    ]


def mcp_blocks(parts: Sequence[str | Image]) -> list[Any]:
    """Converts texts and images to content blocks of the package `mcp`."""
    from mcp import types  # pyright: ignore

    return [
        types.TextContent(type="text", text=part)
        if isinstance(part, str)
        else types.ImageContent(
            type="image", data=base64.b64encode(part.data).decode(), mime_type=part.media_type
        )
        for part in parts
    ]


def content_images(
    content: str | Sequence[Mapping[str, Any]], store: ImageStore | None = None
) -> list[Image]:
    """Returns the images among `content_parts`."""
    return [part for part in content_parts(content, store) if isinstance(part, Image)]


_FIELDS = {"text": "text", "image_url": "image_url", "image": "sha256"}
"""Kind of part -> the field that it needs."""


def _kind(part: Mapping[str, Any]) -> str:
    """Returns the kind of a part, and checks that it has the keys of that kind."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    value = part.get(_FIELDS[kind]) if isinstance(kind, str) and kind in _FIELDS else None
    if kind == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if not isinstance(kind, str) or not isinstance(value, str):
        raise ImageError(
            'a part of a message is {"type": "text", "text": "..."} or '
            f'{{"type": "image_url", "image_url": {{"url": "data:..."}}}}, not {str(part)[:100]}'
        )
    return kind


def _read_part(part: Mapping[str, Any], store: ImageStore | None) -> Image:
    if part["type"] == "image":
        if store is None:
            raise ImageError(f"image {part['sha256'][:64]} is only a hash here, without its bytes")
        return store.get(part["sha256"])
    return _read_url(part["image_url"]["url"])


def _read_url(url: str, *, decode: bool = True) -> Image:
    head = _DATA_URL.match(url)
    if head is None:
        raise ImageError(
            f"an image's url must be data:image/png;base64,... and is {url[:40]!r}; nothing is "
            "fetched from a network"
        )
    # Before it is decoded: four characters of base64 are three bytes.
    if (len(url) - head.end()) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        raise ImageError(f"the image has more than {MAX_IMAGE_BYTES} bytes")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image's url is not valid base64: {error}") from error
    # An agent sends its whole dialogue at each call, and with it images that were decoded before.
    digest = hashlib.sha256(data).digest()
    image = read_image(data, decode=decode and digest not in _decoded)
    if decode:
        if len(_decoded) >= MAX_DECODED_HASHES:
            _decoded.clear()
        _decoded.add(digest)
    return image


_decoded: set[bytes] = set()
"""Hashes of the files from data URLs that were whole when they were decoded."""


def shown_text(content: object) -> str:
    """Returns a content as a reader of a log sees it, in whatever shape an agent sent it: images
    are numbered, parts other than text are JSON."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    texts, number = [], 0
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(str(part.get("text")))
        elif kind == "image":
            number += 1
            texts.append(f"[image {number}]")
        else:
            texts.append(json.dumps(part, default=str))
    return "".join(texts)


def shown_images(content: object) -> list[str]:
    """Returns the hashes of a logged content's images, in order; "" for one that is not a hash."""
    if not isinstance(content, list):
        return []
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "image"]
    return [part["sha256"] if is_sha256(part.get("sha256")) else "" for part in parts]


def is_sha256(value: object) -> bool:
    """Tells whether a value from a file or a request is a hash, and so cannot be a path to another
    file."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


class ImageStore:
    """A folder of images named by their hashes, with each image stored once.

    Several processes may write to it at the same time: a file appears whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, image: Image) -> str:
        """Keeps an image and returns its hash."""
        sha256 = image.sha256
        path = self.folder / image.file_name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f".{sha256}.{secrets.token_hex(8)}"
            partial.write_bytes(image.data)
            os.replace(partial, path)
        return sha256

    def get(self, sha256: str) -> Image:
        """Reads an image.

        Raises:
            DataError: the store does not have it, or its file was changed.
        """
        return read_image(self.read(sha256)[0])

    def read(self, sha256: str) -> tuple[bytes, str]:
        """Returns the bytes of an image and their media type, without decoding them.

        Raises:
            DataError: as `get`.
        """
        if not is_sha256(sha256):
            raise DataError(f"{self.folder}: {sha256[:80]!r} is not the hash of an image")
        for media_type, suffix in _SUFFIXES.items():
            path = self.folder / (sha256 + suffix)
            if path.exists():
                data = path.read_bytes()
                if hashlib.sha256(data).hexdigest() != sha256:
                    raise DataError(
                        f"{path} is damaged: its content does not have the hash of its name"
                    )
                return data, media_type
        raise DataError(f"{self.folder} lacks image {sha256}; copy the folder with the run")

    def take_over(self, other: ImageStore) -> None:
        """Keeps every image of another store as well."""
        for path in other.folder.glob("[0-9a-f]*.*") if other.folder != self.folder else ():
            self.put(other.get(path.stem))

    def with_hashes(self, messages: Sequence[Any], known: dict[str, str]) -> list[Any]:
        """Returns messages with hashes in place of their images, which are kept here.

        A part that an agent sent as an image but that cannot be read stays unchanged.

        Args:
            known: hashes by data URL, which grows: most messages of a step show the same images.
        """

        def change(part: Any) -> Any:
            if not isinstance(part, Mapping) or part.get("type") != "image_url":
                return part
            try:
                url = part["image_url"]["url"]
                if url not in known:
                    known[url] = self.put(_read_url(url, decode=False))
            except (ImageError, KeyError, TypeError):
                return part
            return {"type": "image", "sha256": known[url]}

        return _with_parts(messages, change)

    def with_bytes(self, messages: Sequence[Any], known: dict[str, Any]) -> list[Any]:
        """Returns messages as they were before `with_hashes`.

        Args:
            known: parts by hash, which grows.

        Raises:
            DataError: the store lacks an image.
        """

        def change(part: Any) -> Any:
            if not isinstance(part, Mapping) or part.get("type") != "image":
                return part
            sha256 = part["sha256"]
            if sha256 not in known:
                known[sha256] = image_part(self.get(sha256))
            return known[sha256]

        return _with_parts(messages, change)


def _with_parts(messages: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    return [
        {**message, "content": [change(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
