"""Agents that send images: read alike in all three protocols, and recorded as the driver would."""

from __future__ import annotations

import base64
import contextlib
import io
from typing import Any

import aiohttp
import numpy as np
import PIL.Image
import pytest

from agentrl.env import Environment, Task, register, tool
from agentrl.images import (
    MAX_EPISODE_IMAGES,
    MAX_STEP_IMAGES,
    Image,
    content_images,
    content_text,
    image_part,
    read_image,
)
from agentrl.model.load import load_processor, load_tokenizer
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.recorder import Recorder
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.agent.wire import ChatCompletions
from agentrl.rollout.agent.wire_anthropic import AnthropicMessages
from agentrl.rollout.agent.wire_responses import Responses
from agentrl.rollout.messages import RequestRefused
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import Message, Trajectory
from tests.agent_play import play as play_agent
from tests.rollout_scripted import NumberedEngine
from tests.tokenizers_for_tests import make_tokenizer
from tests.vision_models import save_with_processor


def noise(seed: int) -> Image:
    values = np.random.default_rng(seed).integers(0, 256, (30, 20, 3), np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(values).save(buffer, "PNG")
    return read_image(buffer.getvalue())


ONE, TWO = noise(1), noise(2)
TEXT = {"type": "text", "text": "Which colour?"}


def in_chat(url: str) -> Any:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def in_responses(url: str) -> Any:
    return {"type": "input_image", "image_url": url}


def in_anthropic(image: Image) -> Any:
    data = base64.b64encode(image.data).decode()
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": image.media_type, "data": data},
    }


def read_all(make: Any) -> list[list[Message]]:
    """The messages of a user's question with an image and of a tool's answer, in each protocol.

    Args:
        make: of an image, its part by the protocol's name.
    """
    call = {"id": "c", "type": "function", "function": {"name": "zoom", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": [TEXT, make("chat", ONE)]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [make("chat", TWO)]},
    ]
    asked = [{"type": "input_text", "text": TEXT["text"]}, make("responses", ONE)]
    items = [
        {"role": "user", "content": asked},
        {"type": "function_call", "call_id": "c", "name": "zoom", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [make("responses", TWO)]},
    ]
    used = {"type": "tool_use", "id": "c", "name": "zoom", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [make("anthropic", TWO)]}
    blocks = [
        {"role": "user", "content": [TEXT, make("anthropic", ONE)]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    return [
        ChatCompletions().read({"messages": chat}).messages,
        Responses().read({"input": items}).messages,
        AnthropicMessages().read({"messages": blocks}).messages,
    ]


def whole(protocol: str, image: Image) -> Any:
    if protocol == "anthropic":
        return in_anthropic(image)
    return in_chat(image.url) if protocol == "chat" else in_responses(image.url)


def test_the_three_protocols_say_the_same() -> None:
    chat, responses, anthropic = read_all(whole)
    assert chat == responses == anthropic
    assert chat[0]["content"] == [TEXT, image_part(ONE)]
    assert chat[2]["content"] == [image_part(TWO)]


def test_an_image_is_known_again_however_its_url_is_written() -> None:
    other = ONE.url.replace("image/png", "image/x-anything")
    messages = [{"role": "user", "content": [in_chat(url)]} for url in (ONE.url, other)]
    first, second = ChatCompletions().read({"messages": messages}).messages
    assert first == second


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([in_chat("https://example.com/a.png")], "nothing is fetched from a network"),
        ([in_chat("data:image/png;base64,PHN2Zy8+")], "neither PNG nor JPEG"),
        ([in_chat(ONE.url)] * (MAX_STEP_IMAGES + 1), f"at most {MAX_STEP_IMAGES}"),
        ([{"type": "input_image", "file_id": "file-1"}], "no files are kept here"),
        ([{"type": "input_audio"}], "'input_audio' is not served"),
    ],
)
def test_a_wrong_image_is_refused_in_words(parts: Any, why: str) -> None:
    with pytest.raises(RequestRefused, match=why) as refused:
        ChatCompletions().read({"messages": [{"role": "user", "content": parts}]})
    assert refused.value.status == 400 and "messages[0]" in str(refused.value)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "PHN2"}},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
    ],
)
def test_anthropics_sources_that_are_not_served(block: Any) -> None:
    with pytest.raises(RequestRefused, match=r"fetched from|neither PNG|no files are kept"):
        AnthropicMessages().read({"messages": [{"role": "user", "content": [block]}]})


def test_a_call_shows_no_more_images_than_an_episode_may() -> None:
    message = {"role": "user", "content": [in_chat(ONE.url)] * MAX_STEP_IMAGES}
    number = MAX_EPISODE_IMAGES // MAX_STEP_IMAGES
    read = ChatCompletions().read
    assert len(read({"messages": [message] * number}).messages) == number
    with pytest.raises(RequestRefused, match=f"more than {MAX_EPISODE_IMAGES} images"):
        read({"messages": [message] * (number + 1)})


def test_what_the_policy_said_shows_no_image() -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [in_chat(ONE.url)]}]
    with pytest.raises(RequestRefused, match="the policy writes texts"):
        ChatCompletions().read({"messages": said})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_with_processor("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


def seeing(folder: str) -> Renderer:
    tokenizer = load_tokenizer(folder)
    return Renderer(tokenizer, processor=load_processor(folder, tokenizer))


def questions() -> list[Any]:
    return [
        {"role": "user", "content": "Hello <|image_pad|>"},
        {"role": "user", "content": [TEXT, image_part(ONE), TEXT, image_part(TWO)]},
        {"role": "user", "content": [image_part(ONE)]},
    ]


async def ask_three(policy: TokenPolicy, trajectory: Trajectory) -> list[int]:
    """Sends the whole history with every call, as agents do; returns the status of each."""
    history: list[Any] = []
    statuses = []
    async with contextlib.aclosing(AgentServer()) as server, aiohttp.ClientSession() as http:
        await server.start()
        with server.episode(Recorder(trajectory, policy), max_turns=9, turn_timeout_s=60.0) as live:
            for question in questions():
                history.append(question)
                body = {"model": "m", "messages": history}
                async with http.post(f"{live.url}/chat/completions", json=body) as reply:
                    statuses.append(reply.status)
                    said = await reply.json()
                if reply.status != 200:
                    assert "error" in said
                    break
                history.append(said["choices"][0]["message"])
    return statuses


async def test_an_agents_row_is_the_drivers_row(folder: str) -> None:
    renderer = seeing(folder)
    engine: Any = NumberedEngine(renderer)
    by_agent = Trajectory("t", "g", "e", "k", 0)
    policy = TokenPolicy(engine, renderer, 64, 2000)
    assert await ask_three(policy, by_agent) == [200, 200, 200]

    other: Any = NumberedEngine(renderer)
    by_driver = Trajectory("t", "g", "e", "k", 0)
    policy = TokenPolicy(other, renderer, 64, 2000)
    for question in questions():
        assert policy.read(by_driver, [question], [], tools_changed=False)
        await policy.act(by_driver, [])
    (row,), (expected,) = by_agent.branches, by_driver.branches
    assert row.token_ids == expected.token_ids and row.loss_mask == expected.loss_mask
    places = [(each.sha256, each.start, each.end) for each in row.images]
    assert places == [(each.sha256, each.start, each.end) for each in expected.images]
    assert [sha256 for sha256, *_ in places] == [ONE.sha256, TWO.sha256, ONE.sha256]
    assert all(not any(row.loss_mask[start:end]) for _, start, end in places)
    assert [ids for ids, _ in engine.asked] == [ids for ids, _ in other.asked]
    assert [len(images) for _, images in engine.asked] == [0, 2, 3]


async def test_a_model_that_sees_nothing_refuses_the_call_in_words() -> None:
    renderer = Renderer(make_tokenizer())
    engine: Any = NumberedEngine(renderer)
    trajectory = Trajectory("t", "g", "e", "k", 0)
    policy = TokenPolicy(engine, renderer, 64, 2000)
    assert await ask_three(policy, trajectory) == [200, 400]
    (refusal,) = trajectory.info["refused_calls"]  # pyright: ignore
    assert "vision-language model" in refusal


@register("agent-sees-test")
class AgentSees(Environment):
    def splits(self) -> dict[str, int | None]:
        return {"train": 1}

    def get(self, split: str, index: int) -> Task:
        return Task("k", [{"role": "user", "content": [TEXT, image_part(ONE)]}])

    @tool
    def zoom(self) -> Image:
        """Show more."""
        return TWO

    def on_text(self, text: str) -> None:
        self.finish(1.0)


def test_an_agent_gets_the_environments_images(folder: str) -> None:
    renderer = seeing(folder)
    engine: Any = NumberedEngine(renderer)

    async def solve(task: Any, base_url: str, api_key: str) -> str:
        assert task.prompt == "Which colour?[image]"
        assert content_images(task.messages[0]["content"]) == [ONE]
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{task.tools_url}/zoom", json={}) as reply:
                content = (await reply.json())["content"]
            assert content_text(content) == "" and content_images(content) == [TWO]
            messages = [*task.messages, {"role": "user", "content": content}]
            asked = {"model": "m", "messages": messages}
            async with http.post(f"{base_url}/chat/completions", json=asked) as reply:
                return (await reply.json())["choices"][0]["message"]["content"]

    batch = play_agent(engine, renderer, solve, env_id="agent-sees-test", split_size=1)
    (trajectory,) = batch.trajectories
    assert trajectory.error is None and trajectory.reward == 1.0
    shown = [each.sha256 for each in trajectory.branches[0].images]
    assert shown == [ONE.sha256, TWO.sha256]
    (noted,) = trajectory.info["tool_calls"]  # pyright: ignore
    assert noted["content"] == "[image]"  # pyright: ignore


def test_tools_over_mcp_show_images() -> None:
    types = pytest.importorskip("mcp.types")
    from agentrl.images import mcp_blocks

    text, image = mcp_blocks(["here", ONE])
    assert isinstance(image, types.ImageContent) and text.text == "here"
    with contextlib.suppress(AttributeError):
        assert image.mime_type == "image/png"
    assert base64.b64decode(image.data) == ONE.data
