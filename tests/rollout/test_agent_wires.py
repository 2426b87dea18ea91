"""Responses and Anthropic's messages: the same turns as over chat completions, and what each
refuses. Their SDKs play whole episodes in tests/agents."""

import json

import pytest

from agentrl.rollout.agent.recorder import identity
from agentrl.rollout.agent.wire import Answer, Call, ChatCompletions, RequestRefused
from agentrl.rollout.agent.wire_anthropic import AnthropicMessages
from agentrl.rollout.agent.wire_responses import Responses
from agentrl.types import Action, ToolCall, assistant_message

ACTIONS = (
    Action("done"),
    Action(""),
    Action("Let me see.", (ToolCall("t0000c000", "look", {"word": "w", "n": [1, None]}),)),
    Action("", (ToolCall("a", "look", {}), ToolCall("b", "look", {"word": "ü"})), None, "I think"),
    Action("so", reasoning="hm"),
)
TEXT = [{"type": "text", "text": "in two"}, {"type": "text", "text": " parts"}]


def answer(action, cut=False):
    return Answer("x", action, cut, 7, 3)


def events(wire, action):
    frames = b"".join(wire.events(Call([], [], "m"), answer(action))).decode().split("\n\n")[:-1]
    return [json.loads(frame.split("data: ", 1)[1]) for frame in frames if "[DONE]" not in frame]


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_told_over_responses_comes_back_as_the_same_message(action):
    wire = Responses()
    told = json.loads(json.dumps(wire.reply(Call([], [], "m"), answer(action))))
    assert (told["status"], told["usage"]["total_tokens"]) == ("completed", 10)
    results = [
        {"type": "function_call_output", "call_id": call.id, "output": "found"}
        for call in action.tool_calls
    ]
    body = {"input": [{"role": "user", "content": "q"}, *told["output"], *results]}
    _, said, *answers = wire.read({**body, "instructions": "be brief"}).messages[1:]
    assert identity(said) == identity(assistant_message(action))
    assert said.get("reasoning", "") == action.reasoning
    assert [(each["tool_call_id"], each["name"]) for each in answers] == [
        (call.id, "look") for call in action.tool_calls
    ]
    streamed = events(wire, action)
    assert streamed[-1]["response"] == told
    assert [each["sequence_number"] for each in streamed] == list(range(len(streamed)))
    done = [each["item"] for each in streamed if each["type"] == "response.output_item.done"]
    assert done == told["output"]


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_told_over_anthropics_messages_comes_back_as_the_same_message(action):
    wire = AnthropicMessages()
    told = json.loads(json.dumps(wire.reply(Call([], [], "m"), answer(action))))
    assert told["stop_reason"] == ("tool_use" if action.tool_calls else "end_turn")
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": TEXT}
        for call in action.tool_calls
    ]
    call = wire.read(
        {
            "system": TEXT,
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": told["content"]},
                {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
            ],
            "max_tokens": 5,
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        }
    )
    system, _, said, *answers, last = call.messages
    assert (system["role"], system["content"]) == ("system", "in two parts")
    assert identity(said) == identity(assistant_message(action))
    assert said.get("reasoning", "") == action.reasoning
    assert [(each["role"], each["content"]) for each in answers] == [
        ("tool", "in two parts")
    ] * len(action.tool_calls)
    assert last["content"] == "go on" and call.replaced == ("max_tokens",)
    assert call.tools[0]["function"]["parameters"] == {"type": "object"}
    blocks = {}
    for each in events(wire, action):
        if each["type"] == "content_block_start":
            blocks[each["index"]] = dict(each["content_block"])
        elif each["type"] == "content_block_delta":
            block, delta = blocks[each["index"]], each["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block[block["type"]] += delta[block["type"]]
    assert list(blocks.values()) == told["content"]


def test_a_turn_cut_by_its_limit_says_so_on_every_wire():
    call, cut = Call([], [], "m"), answer(Action("so lo"), cut=True)
    assert ChatCompletions().reply(call, cut)["choices"][0]["finish_reason"] == "length"
    assert Responses().reply(call, cut)["incomplete_details"] == {"reason": "max_output_tokens"}
    assert AnthropicMessages().reply(call, cut)["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("wire", "body", "says"),
    [
        (Responses(), {"input": "q", "previous_response_id": "r"}, "send the whole history"),
        (Responses(), {"input": 3}, "text or a list"),
        (Responses(), {"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        (Responses(), {"input": "q", "tools": [{"type": "web_search"}]}, "only functions"),
        (
            Responses(),
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input_image' is not served",
        ),
        (AnthropicMessages(), {"messages": []}, "at least one"),
        (
            AnthropicMessages(),
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "'image' is not served",
        ),
        (
            AnthropicMessages(),
            {"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "bash_20250124"}]},
            "only functions",
        ),
    ],
)
def test_what_is_not_served_is_refused_in_words(wire, body, says):
    with pytest.raises(RequestRefused, match=says) as refused:
        wire.read(body)
    assert says in json.dumps(wire.error(refused.value)) and refused.value.status == 400


def test_a_tool_without_parameters_takes_none():
    """qwen-code has such; chat templates read the properties of each."""
    empty = {"type": "object", "properties": {}}
    said = {"messages": [{"role": "user", "content": "q"}], "input": "q"}
    for wire, tool in (
        (ChatCompletions(), {"type": "function", "function": {"name": "look"}}),
        (Responses(), {"type": "function", "name": "look"}),
    ):
        (read,) = wire.read({**said, "tools": [tool]}).tools
        assert read["function"]["parameters"] == empty
