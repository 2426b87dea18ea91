"""Environments that show images: in this process and over HTTP, and what is refused."""

import io
import random

import httpx
import PIL.Image
import pytest

from agentrl.env import Action, Environment, StepResult, Task, ToolCall, connect, register, tool
from agentrl.errors import AgentRLError
from agentrl.images import (
    MAX_EPISODE_IMAGES,
    MAX_STEP_IMAGES,
    content_images,
    content_text,
    image_part,
    read_image,
)


def png(colour, size=(8, 6)) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def noise(seed) -> bytes:
    """A file of about 30 kB, which no compression makes smaller."""
    picture = PIL.Image.frombytes("RGB", (100, 100), random.Random(seed).randbytes(30_000))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@register("pictures")
class Pictures(Environment):
    def splits(self):
        return {"train": 1}

    def get(self, split, index):
        return Task("t", [{"role": "user", "content": [image_part(png("red"))]}])

    @tool
    def zoom(self):
        """Show the middle."""
        return read_image(png("green"))

    @tool
    def show(self):
        """Show it with words."""
        return [{"type": "text", "text": "here"}, image_part(png("blue"))]

    def on_text(self, text):
        if text == "many":
            return [{"role": "user", "content": [image_part(png("red"))] * (MAX_STEP_IMAGES + 1)}]
        if text == "sixteen":
            return [{"role": "user", "content": [image_part(png("red"))] * MAX_STEP_IMAGES}]
        if text.startswith("noise"):
            return [{"role": "user", "content": [image_part(noise(int(text[-1])))]}]
        if text == "large":
            images = [image_part(read_image(png("red") + bytes(7 * 2**20))) for _ in range(5)]
            return [{"role": "user", "content": images}]
        if text in ("svg", "part"):
            url = {"url": "data:image/png;base64,PHN2Zy8+"}
            part = {"type": "image_url", "image_url": url} if text == "svg" else {"type": "audio"}
            return [{"role": "user", "content": [part]}]
        self.finish(1.0)
        return None

    async def step(self, action):
        if action.text == "whole":
            shown = [{"role": "user", "content": [image_part(png("white"))]}]
            return StepResult(shown)
        return await self.run_tools(action)


def call(name):
    return Action(tool_calls=(ToolCall("c", name, {}),))


async def play(client, actions):
    """The messages of an episode; of a step that failed, its error."""
    session = await client.session("pictures", split="train", index=0)
    seen = list(session.messages)
    for action in actions:
        try:
            seen += (await session.step(action, timeout_s=30)).observation
        except AgentRLError as error:
            seen.append((error.code, str(error)))
    await session.close()
    return seen


@pytest.fixture(scope="module")
def url():
    from env_servers import running

    with running(["pictures"]) as (url, _):
        yield url


async def here_and_there(url, actions):
    async with connect() as here, connect(url) as there:
        messages = await play(here, actions)
        assert await play(there, actions) == messages
    return messages


async def test_an_episode_with_images_is_the_same_over_http(url):
    actions = [call("zoom"), call("show"), Action("whole"), Action("done")]
    here = await here_and_there(url, actions)
    shown = [content_images(message["content"])[0].data for message in here]
    assert shown == [png(colour) for colour in ("red", "green", "blue", "white")]
    assert content_text(here[2]["content"]) == "here"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("many", f"{MAX_STEP_IMAGES + 1} images"),
        ("large", "bytes together"),
        ("svg", "neither PNG nor JPEG"),
        ("part", "a part of a message is"),
    ],
)
async def test_a_wrong_image_fails_the_step_in_words(url, text, why):
    assert why in (await here_and_there(url, [Action(text)]))[-1][1]


async def test_an_episode_shows_so_many_images_and_no_more(url):
    turns = MAX_EPISODE_IMAGES // MAX_STEP_IMAGES  # the first prompt has shown one
    *seen, (code, why) = await here_and_there(url, [Action("sixteen")] * turns)
    assert len(seen) == MAX_EPISODE_IMAGES // MAX_STEP_IMAGES
    assert code == "env_error" and f"at most {MAX_EPISODE_IMAGES}" in why


def test_each_image_crosses_the_wire_once(url):
    """A reply has what is new, and nothing of the turns before it."""
    sizes = []
    with httpx.Client(base_url=url) as http:
        body = {"env": "pictures", "task": {"split": "train", "index": 0}, "seed": 0}
        (opened,) = http.post("/v1/sessions", json=body).json()["sessions"]
        place = f"/v1/sessions/{opened['id']}"
        for step in (1, 2, 3):
            body = {"step": step - 1, "action": {"text": f"noise{step}"}}
            reply = http.post(f"{place}/step", json=body)
            assert reply.status_code == 200, reply.text
            sizes.append(len(reply.content))
        http.delete(place)
    encoded = [len(noise(step)) * 4 / 3 for step in (1, 2, 3)]
    assert all(a < b < a + 1000 for a, b in zip(encoded, sizes, strict=True)), (encoded, sizes)
