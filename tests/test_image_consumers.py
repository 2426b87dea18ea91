"""Whoever takes messages keeps their images, or says what it leaves out: nothing is lost in
silence, and no content that is a list breaks what reads texts."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import PIL.Image
import pytest

from agentrl.env.play import _shown as shown_in_play
from agentrl.errors import AgentError
from agentrl.images import (
    Image,
    content_images,
    content_text,
    image_part,
    join_contents,
    read_image,
)
from agentrl.model.text.prompt_tools import with_prompted_tools
from agentrl.rollout.agent.command import AgentTask, agent_variables
from agentrl.rollout.agent.recorder import identity
from agentrl.rollout.agent.roles import system_of
from agentrl.rollout.agent.server import _characters
from agentrl.rollout.agent.wire import Call
from agentrl.rollout.chat import _wire_message
from agentrl.train.batch import turn_states
from agentrl.types import StopReason, TokenRow, Trajectory, Turn
from agentrl_rewards.judge import _question


def picture(colour: str) -> Image:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (8, 6), colour).save(buffer, "PNG")
    return read_image(buffer.getvalue())


RED, BLUE = picture("red"), picture("blue")
ASKED: Any = [{"type": "text", "text": "Which colour?"}, image_part(RED)]
ANSWERED: Any = [image_part(BLUE)]
CALL: Any = {"id": "c", "type": "function", "function": {"name": "zoom", "arguments": {}}}


def seen() -> Trajectory:
    """An episode whose question and whose tool's answer show an image each."""
    row = TokenRow(
        messages=[
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "name": "zoom", "content": ANSWERED},
            {"role": "assistant", "content": "red", "reasoning": "It is red."},
        ]
    )
    turns = [Turn(0, 0, 1, "stop", "tool_calls", message=1)]
    turns.append(Turn(0, 0, 1, "stop", "text", message=3, parent=0))
    return Trajectory(
        "t", "g", "e", "k", 0, [row], turns, reward=1.0, stop_reason=StopReason.TERMINATED
    )


def test_states_with_other_images_are_other_states() -> None:
    other = seen()
    assert turn_states(seen()) == turn_states(other)
    other.messages[2]["content"] = [image_part(RED)]
    first, second = turn_states(seen()), turn_states(other)
    assert first[0] == second[0] and first[1] != second[1]


def test_texts_for_those_who_see_none_say_where_an_image_was() -> None:
    messages = seen().messages
    assert _question(messages[:1]) == "Which colour?[image]"
    assert "[tool]\n[image]" in _question(messages)
    assert shown_in_play(ASKED) == "Which colour?\n[image, 8 x 6]"
    system: Any = [{"role": "system", "content": ASKED}]
    assert system_of(Call(system, [], "m")) == "Which colour?"
    assert _characters(Call(messages, [], "m")) == len("Which colour?" + "red")


def test_a_chat_server_is_sent_the_images() -> None:
    assert [_wire_message(each)["content"] for each in seen().messages[::2]] == [ASKED, ANSWERED]


def test_a_program_that_gets_only_text_is_refused_a_task_with_an_image() -> None:
    task = AgentTask("k", content_text(ASKED, "[image]"), seen().messages[:1])
    with pytest.raises(AgentError, match="the task shows an image"):
        agent_variables(task, "http://127.0.0.1/e/key/v1", "key")


def test_messages_with_other_images_are_others_to_the_recorder() -> None:
    one: Any = {"role": "user", "content": ASKED}
    other: Any = {"role": "user", "content": [ASKED[0], *ANSWERED]}
    assert identity(one) == identity(dict(one)) and identity(one) != identity(other)


def test_tools_in_the_prompt_stand_around_images() -> None:
    def render(messages: list[Any], tools: Any, _: bool) -> str:
        if messages[0]["role"] == "system":
            return ""  # the template has no place for it
        return json.dumps([each["content"] for each in messages])

    image = {"type": "image"}  # as templates see it
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, image]},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": [image]},
        {"role": "tool", "content": "none"},
    ]
    zoom: Any = {"type": "function", "function": {"name": "zoom"}}
    asked, _, answers = json.loads(with_prompted_tools(render)(messages, [zoom], True))
    assert asked[0]["text"].startswith("# Tools") and asked[0]["text"].endswith("Look: ")
    assert asked[1] == image
    text = "\n</tool_response>\n<tool_response>\nnone\n</tool_response>"
    opened = {"type": "text", "text": "<tool_response>\n"}
    assert answers == [opened, image, {"type": "text", "text": text}]


def test_contents_are_joined_as_texts_where_all_are() -> None:
    assert join_contents(["a", [{"type": "text", "text": "b"}]], "-") == "a-b"
    joined = join_contents(["a", ASKED, "b"], "\n")
    assert content_text(joined, "|") == "a\nWhich colour?|\nb"
    assert [image.sha256 for image in content_images(joined)] == [RED.sha256]
    assert base64.b64encode(RED.data).decode() in json.dumps(joined)
