"""Images in the trajectory log: each once, as they were, and whatever else agents send."""

import io
import shutil
from pathlib import Path

import PIL.Image
import pytest

from agentrl.errors import DataError
from agentrl.images import image_part
from agentrl.rollout import TrajectoryLog, read_trajectories
from agentrl.rollout.index import TrajectoryIndex
from agentrl.types import ShownImage, StopReason, TokenRow, Trajectory


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.effect_noise((64, 64), 100).convert("RGB").save(buffer, "PNG", title=colour)
    return buffer.getvalue()


def member(name: str, *contents) -> Trajectory:
    row = TokenRow()
    row.append_context([1, 9, 9, 2], 0)
    row.images = [ShownImage("a" * 64, 1, 3, {}, "b" * 64)]
    row.messages = [{"role": "user", "content": content} for content in contents]
    ended = StopReason.TERMINATED
    return Trajectory(name, "g", "e", "k", 0, branches=[row], stop_reason=ended)


def test_a_groups_image_lies_once_in_the_log(tmp_path: Path) -> None:
    data = png("red")
    text = {"type": "text", "text": "Which colour?"}
    group = [member(f"t{i}", [text, image_part(data)], "Now?") for i in range(8)]
    said = group[0].messages
    log = TrajectoryLog(tmp_path)
    log.append(1, group[:4])
    log.append(2, group[4:])
    assert said == group[0].messages  # what was played stays as it is
    (kept,) = (tmp_path / "images").iterdir()
    assert kept.read_bytes() == data
    size = sum(path.stat().st_size for path in (tmp_path / "trajectories").iterdir())
    assert len(data) > 10_000 and size < 8 * 800
    read = [each for _, each in read_trajectories(tmp_path)]
    assert read[0].messages[0]["content"] == [text, {"type": "image", "sha256": kept.stem}]
    assert [each for _, each in read_trajectories(tmp_path, images=True)] == group
    # What names an image by its hash is written as it is.
    TrajectoryLog(tmp_path / "again").append(1, read)
    assert [each for _, each in read_trajectories(tmp_path / "again")] == read
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(DataError, match="lacks image"):
        list(read_trajectories(tmp_path, images=True))


def test_what_is_not_an_image_stays_as_it_is(tmp_path: Path) -> None:
    odd = [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,PHN2Zy8+"}},
        {"type": "image_url", "image_url": "../../etc/passwd"},
        {"type": "image_url"},
        {"type": "audio", "data": [1]},
        "words",
    ]
    sent = member("t", odd, None)
    TrajectoryLog(tmp_path).append(1, [sent])
    assert [each for _, each in read_trajectories(tmp_path, images=True)] == [sent]
    assert not (tmp_path / "images").exists()


def test_the_index_tells_what_was_said_beside_images(tmp_path: Path) -> None:
    text = {"type": "text", "text": "look"}
    TrajectoryLog(tmp_path).append(1, [member("t", [image_part(png("red")), text])])
    (entry,) = TrajectoryIndex(tmp_path).refresh()
    assert entry.preview == "[image 1]look"
