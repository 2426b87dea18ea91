"""Images in dialogues: served from the run's store by their hash, shown as text everywhere else."""

import io
import json
from pathlib import Path

import PIL.Image
import pytest
from attacks import ATTACKS
from test_report import Tags, report_of
from test_server import Client

from agentrl.images import image_part
from agentrl.rollout import TrajectoryLog
from agentrl.types import ShownImage, StopReason, TokenRow, Trajectory, Turn
from agentrl.view import report


def picture(kind: str, size: tuple[int, int] = (300, 200)) -> bytes:
    buffer = io.BytesIO()
    image = PIL.Image.radial_gradient("L").resize(size)
    # A page to whoever guesses at what it is.
    image.convert("RGB").save(buffer, kind, comment=b"<html><script>alert(1)</script>")
    return buffer.getvalue()


def shown_run(run_dir: Path, said: str = "which?", sha256: object = None) -> Path:
    """A run whose user shows a PNG and a JPEG file beside this text.

    Args:
        sha256: what the log names in place of the first one's hash.
    """
    parts: list = [image_part(picture("PNG")), {"type": "text", "text": said}]
    parts.append(image_part(picture("JPEG", (1600, 900))))
    if sha256 is not None:
        parts[0] = {"type": "image", "sha256": sha256}
    row = TokenRow(messages=[{"role": "user", "content": parts}])
    row.messages += [{"role": "assistant", "content": "grey"}, {"role": "tool", "content": parts}]
    row.append_context([1, 5, 5, 5, 2, 6, 6, 3], 0)
    row.append_sampled([4], [-0.5], [0], 0)
    row.images = [ShownImage("0" * 64, 1, 4, {}), ShownImage("1" * 64, 5, 7, {})]
    turns = [Turn(0, 8, 1, "stop", "text", message=1)]
    made = Trajectory("a", "g", "e", "t", 0, [row], turns, stop_reason=StopReason.TERMINATED)
    TrajectoryLog(run_dir).append(1, [made])
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    return run_dir


def opened(run_dir: Path) -> tuple[Client, str]:
    """A client, and the path of the run."""
    client = Client(run_dir)
    return client, f"/api/runs/{client.get('/api/runs')[0]['id']}"


def test_pictures_are_served_by_their_hash_and_nothing_else_is(tmp_path):
    run_dir = shown_run(tmp_path / "run")
    client, base = opened(run_dir)
    one, _, last = client.get(f"{base}/trajectories/1/0/messages")["messages"]
    assert (one["content"], len(one["images"])) == ("[image 1]which?[image 2]", 2)
    assert one["images"] == last["images"]
    for sha256, kind in zip(one["images"], ("png", "jpeg"), strict=True):
        response = client.response(f"{base}/images/{sha256}")
        assert response.headers["content-type"] == f"image/{kind}"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.content == picture(
            kind.upper(), (300, 200) if kind == "png" else (1600, 900)
        )
    secret = run_dir / "images" / "secret.png"
    secret.write_bytes(picture("PNG"))
    names = ["secret", "secret.png", "0" * 64, one["images"][0] + ".png", one["images"][0].upper()]
    for name in [*names, "..%2fmetrics.jsonl", "%2e%2e%2fsecret", "<script>", "%00"]:
        response = client.response(f"{base}/images/{name}")
        assert response.status_code == 404, name
        assert response.headers["content-type"] == "application/json"
    # What another than the store put there is not what its name says.
    (run_dir / "images" / f"{one['images'][0]}.png").write_bytes(b"<script>alert(1)</script>")
    response = client.response(f"{base}/images/{one['images'][0]}")
    assert response.status_code == 404 and "is damaged" in response.json()["error"]


def test_the_places_of_images_are_marked_among_the_tokens(tmp_path):
    client, base = opened(shown_run(tmp_path / "run"))
    path = f"{base}/trajectories/1/0/tokens"
    assert client.get(path)["images"] == [0, 1, 1, 1, 0, 2, 2, 0, 0]
    assert client.get(path, start=3, count=3)["images"] == [1, 0, 2]


@pytest.mark.parametrize("attack", ATTACKS[:-1])  # the log holds no lone surrogate
def test_hostile_text_beside_and_in_place_of_images_is_text(tmp_path, attack):
    hostile = shown_run(tmp_path / "hostile", attack, sha256=attack)
    source, stored = report_of(hostile)
    plain, _ = report_of(shown_run(tmp_path / "plain"))
    assert Tags(source).found == Tags(plain).found
    said = next(value for key, value in stored.items() if "/messages" in key)["messages"][0]
    assert said["content"] == f"[image 1]{attack}[image 2]"
    assert said["images"][0] == "" and len(said["images"][1]) == 64
    urls = [value for key, value in stored.items() if "/images/" in key]
    assert len(urls) == 1 and urls[0].startswith("data:image/jpeg;base64,")
    assert "img-src data:;" in source


def test_a_report_holds_as_many_images_as_it_has_room_for(tmp_path, monkeypatch):
    run_dir = shown_run(tmp_path / "run")
    monkeypatch.setattr(report, "MAX_BYTES", len(picture("PNG")) + 100)
    _, stored = report_of(run_dir)
    (url,) = [value for key, value in stored.items() if "/images/" in key]
    assert url.startswith("data:image/png;base64,")
    assert "data:" not in json.dumps([v for k, v in stored.items() if "/messages" in k])
