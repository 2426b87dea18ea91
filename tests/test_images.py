"""Images are read by their content, and hostile ones are refused before they fill the memory."""

import base64
import io
import struct
import subprocess
import sys
import zlib

import PIL.Image
import pytest
from PIL.PngImagePlugin import PngImageFile

from agentrl.errors import DataError, ImageError
from agentrl.images import ImageStore, content_images, content_text, image_part, read_image


def saved(kind: str = "PNG", size: tuple[int, int] = (8, 6), colour="red", **options) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(buffer, kind, **options)
    return buffer.getvalue()


def frames(kind: str) -> bytes:
    others = [PIL.Image.new("RGB", (8, 6), colour) for colour in ("green", "blue")]
    return saved(kind, save_all=True, append_images=others)


def png_of_header(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG file that claims any size, its compressed pixels given."""

    def chunk(name: bytes, body: bytes) -> bytes:
        checksum = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(("kind", "media_type"), [("PNG", "image/png"), ("JPEG", "image/jpeg")])
def test_an_image_is_read_by_its_content(kind, media_type):
    image = read_image(saved(kind))
    assert (image.media_type, image.width, image.height) == (media_type, 8, 6)
    assert image.url.startswith(f"data:{media_type};base64,")
    assert len(image.sha256) == 64


HOSTILE = {
    "empty": (b"", "neither PNG nor JPEG"),
    "text": (b"hello, world", "neither PNG nor JPEG"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>", "neither PNG nor JPEG"),
    "gif": (saved("GIF"), "neither PNG nor JPEG"),
    "animated gif": (frames("GIF"), "neither PNG nor JPEG"),
    "webp": (saved("WEBP"), "neither PNG nor JPEG"),
    "animated png": (frames("PNG"), "3 frames"),
    "several jpegs": (frames("MPO"), "3 frames"),
    "truncated png": (saved(size=(64, 64))[:-40], "cannot be decoded"),
    "truncated jpeg": (saved("JPEG", size=(64, 64))[:-40], "cannot be decoded"),
    "only a png's signature": (saved()[:8], "cannot be decoded"),
    "only a jpeg's signature": (saved("JPEG")[:3], "cannot be decoded"),
    "png with text for pixels": (png_of_header(8, 6, b"pixels"), "cannot be decoded"),
    "png without pixels": (png_of_header(0, 0), "cannot be decoded|pixels"),
    "10,000 x 10,000": (png_of_header(10_000, 10_000, zlib.compress(bytes(10**6))), "pixels"),
    "bomb": (png_of_header(2**31 - 1, 2**31 - 1), "pixels"),
    "bomb in a jpeg": (saved("JPEG").replace(b"\x00\x06\x00\x08", b"\xff\xff\xff\xff"), "pixels"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_in_words(name):
    data, why = HOSTILE[name]
    with pytest.raises(ImageError, match=why):
        read_image(data)


def test_limits_can_be_set():
    with pytest.raises(ImageError, match="at most 10 are read"):
        read_image(saved(), max_bytes=10)
    with pytest.raises(ImageError, match="8 x 6 pixels; at most 47"):
        read_image(saved(), max_pixels=47)
    assert read_image(saved(), max_pixels=48).width == 8


def test_a_bomb_takes_no_memory():
    # A true bomb: 300 MB of pixels in 300 kB. Decoded, it would pass the process's limit.
    bomb = png_of_header(10_000, 10_000, zlib.compress(bytes(10_000 * 30_001)))
    code = (
        "import sys, resource\nfrom agentrl.errors import ImageError\n"
        "from agentrl.images import read_image\nimport PIL.Image, PIL.PngImagePlugin\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    read_image(sys.stdin.buffer.read())\n"
        "except ImageError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], input=bomb, stdout=-1)
    why, grown_kb = done.stdout.decode().splitlines()
    assert "10000 x 10000 pixels" in why
    assert int(grown_kb) < 50_000


def test_content_has_text_and_images(tmp_path):
    path = tmp_path / "named.gif"  # the name says nothing
    path.write_bytes(saved("JPEG"))
    picture = PIL.Image.new("RGB", (3, 2), "blue")
    content = [
        {"type": "text", "text": "Look: "},
        image_part(saved()),
        image_part(path),
        {"type": "text", "text": "which?"},
        image_part(picture),
    ]
    assert content_text(content) == "Look: which?"
    assert [image.media_type.removeprefix("image/") for image in content_images(content)] == [
        "png",
        "jpeg",
        "png",
    ]
    assert (content_text("plain"), content_images("plain")) == ("plain", [])
    with pytest.raises(ImageError, match=r"named.gif: the image is neither"):
        path.write_bytes(b"GIF89a")
        image_part(path)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/a.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64," + "A" * (29 * 2**20), "more than"),
        ("data:image/png;base64," + base64.b64encode(b"<svg/>").decode(), "neither PNG"),
    ],
)
def test_a_wrong_url_is_refused(url, why):
    with pytest.raises(ImageError, match=why):
        content_images([{"type": "image_url", "image_url": {"url": url}}])


def test_an_image_that_is_shown_again_is_decoded_once(monkeypatch):
    decoded = []
    load = PngImageFile.load
    monkeypatch.setattr(PngImageFile, "load", lambda self: decoded.append(self) or load(self))
    url = f"data:image/png;base64,{base64.b64encode(saved(size=(9, 7))).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    assert content_images(content) == content_images(content)
    assert len(decoded) == 1
    cut = base64.b64encode(saved(size=(64, 64))[:-40]).decode()
    damaged = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + cut}}]
    for _ in range(2):  # and so it stays refused
        with pytest.raises(ImageError, match="cannot be decoded"):
            content_images(damaged)


@pytest.mark.parametrize(
    "part", [{}, {"type": "audio"}, {"type": "text"}, {"type": "image_url", "image_url": {}}, "a"]
)
def test_a_wrong_part_is_refused(part):
    with pytest.raises(ImageError, match="a part of a message is"):
        content_text([part])


def test_a_store_holds_each_image_once(tmp_path):
    store = ImageStore(tmp_path / "images")
    image = read_image(saved())
    assert store.put(image) == store.put(image) == image.sha256
    assert [path.name for path in store.folder.iterdir()] == [f"{image.sha256}.png"]
    assert store.get(image.sha256) == image
    part = {"type": "image", "sha256": image.sha256}
    assert content_images([part], store) == [image]
    with pytest.raises(ImageError, match="only a hash"):
        content_images([part])


def test_a_store_says_what_it_lacks(tmp_path):
    store = ImageStore(tmp_path)
    with pytest.raises(DataError, match="lacks image 000"):
        store.get("0" * 64)
    with pytest.raises(DataError, match="is not the hash"):
        store.get("../../etc/passwd")
    sha256 = store.put(read_image(saved()))
    (tmp_path / f"{sha256}.png").write_bytes(saved(colour="blue"))
    with pytest.raises(DataError, match="is damaged"):
        store.get(sha256)
