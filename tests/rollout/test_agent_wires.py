"""Responses and Anthropic's messages: the same turns as over chat completions, and what each
refuses. Their SDKs play whole episodes in tests/agents."""

import json

import pytest

from agentrl.rollout.agent.recorder import identity
from agentrl.rollout.agent.wire import Answer, Call, ChatCompletions
from agentrl.rollout.agent.wire_anthropic import AnthropicMessages
from agentrl.rollout.agent.wire_responses import Responses
from agentrl.rollout.messages import RequestRefused
from agentrl.types import Action, ToolCall, assistant_message

ACTIONS = (
    Action("done"),
    Action(""),
    Action("Let me see.", (ToolCall("t0000c000", "look", {"word": "w", "n": [1, None]}),)),
    Action("", (ToolCall("a", "look", {}), ToolCall("b", "look", {"word": "ü"})), None, "I think"),
    Action("so", reasoning="hm"),
)
TEXT = [{"type": "text", "text": "in two"}, {"type": "text", "text": " parts"}]


ASK = {"messages": [{"role": "user", "content": "q"}]}
BEGUN = {"role": "assistant", "content": "So", "prefix": True}
FOUND = {"type": "function_call_output", "call_id": "c", "output": "found"}
NO_OBJECT = {"id": "1", "function": {"name": "f", "arguments": "[1]"}}


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
    assert last["content"] == "go on" and (call.replaced, call.max_tokens) == ((), 5)
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
        (Responses(), {"input": "q", "conversation": "c"}, "send the history"),
        (Responses(), {"input": 3}, "body is malformed"),
        (Responses(), {}, "text or a list"),
        (Responses(), {"input": [{"type": "item_reference", "id": "x"}]}, "no item 'x'"),
        (Responses(), {"input": [{"type": "computer_call"}]}, "'computer_call' is not served"),
        (Responses(), {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "sent whole, as a data URL"),
        (ChatCompletions(), {**ASK, "n": 2}, "n > 1"),
        (ChatCompletions(), {**ASK, "logit_bias": {"5": 1}}, "logit_bias"),
        (ChatCompletions(), {**ASK, "functions": [{"name": "f"}]}, "send tools"),
        (ChatCompletions(), {"messages": []}, "at least one"),
        (ChatCompletions(), {"messages": [{"role": "robot", "content": "x"}]}, "a role is one of"),
        (ChatCompletions(),
         {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "an image is sent whole, as a data URL"),
        (ChatCompletions(), {**ASK, "tools": [{"type": "function"}]}, "a function with a name"),
        (ChatCompletions(), {"messages": [{"role": "user", "content": 3}]}, "is a text or a list"),
        (ChatCompletions(), {**ASK, "stream_options": "include_usage"}, "stream_options"),
        (ChatCompletions(), {**ASK, "max_tokens": 0}, "leaves no token"),
        (ChatCompletions(), {"messages": [{"role": "assistant", "tool_calls": [NO_OBJECT]}]},
         "no JSON object"),
        (ChatCompletions(), {**ASK, "continue_final_message": True}, "is not served"),
        (ChatCompletions(), {"messages": [*ASK["messages"], BEGUN]}, "begun by the agent"),
        (ChatCompletions(), {"messages": [{"role": "tool", "content": "x"}]}, "whole history"),
        (Responses(), {"input": [FOUND]}, "whole history"),
        (AnthropicMessages(), {**ASK, "mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        (AnthropicMessages(), {"messages": [*ASK["messages"], BEGUN]}, "the last message is"),
        (AnthropicMessages(), {"messages": []}, "at least one"),
        (AnthropicMessages(), {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "sent whole, as a data URL"),
        (AnthropicMessages(), {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "'document' is not served"),
    ],
)  # fmt: skip
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


def user(text):
    return {"role": "user", "content": text}


def question(wire):
    return {"input": "q"} if isinstance(wire, Responses) else {"messages": [user("q")]}


def said(text):
    return {"type": "message", "role": "assistant", "content": text}


def call_of(call_id, name="look"):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def read_as(items, wire=None):
    """(role, text, ids of calls) of each message."""
    return [
        (each["role"], each["content"], [call["id"] for call in each.get("tool_calls", [])])
        for each in (wire or Responses()).read({"input": items}).messages
    ]


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([said("FIRST"), said("SECOND")], [("FIRST", []), ("SECOND", [])]),
        ([said("FIRST"), call_of("a"), said("SECOND")], [("FIRST", ["a"]), ("SECOND", [])]),
        ([said("ONE"), call_of("a"), call_of("b")], [("ONE", ["a", "b"])]),
        ([call_of("a"), said("beside"), call_of("b")], [("beside", ["a", "b"])]),
        ([said(""), said("SECOND")], [("", []), ("SECOND", [])]),
        (
            [said("ONE"), {"type": "reasoning", "content": [{"text": "hm"}]}, call_of("a")],
            [("ONE", []), ("", ["a"])],
        ),
    ],
)
def test_a_turn_of_responses_ends_where_another_text_begins(items, turns):
    expected = [("user", "q", []), *(("assistant", *turn) for turn in turns), ("user", "r", [])]
    assert read_as([user("q"), *items, user("r")]) == expected


def test_thoughts_in_several_items_are_one():
    thoughts = [{"type": "reasoning", "summary": [{"text": text}]} for text in ("hm", ", yes")]
    assert Responses().read({"input": [*thoughts, said("so")]}).messages[0]["reasoning"] == (
        "hm, yes"
    )


def played_responses(wire, body, action):
    """Read, answered, and the reply."""
    call = wire.read(body)
    number = len(wire._dialogues)
    return call, wire.reply(call, Answer(f"turn-{number}", action, False, 7, 3))


@pytest.mark.parametrize("by", ["previous_response_id", "item_reference"])
def test_what_was_answered_may_be_named_instead_of_sent(by):
    wire, action = Responses(), ACTIONS[2]
    first, told = played_responses(wire, {"input": "q", "instructions": "be brief"}, action)
    result = {"type": "function_call_output", "call_id": "t0000c000", "output": "found"}
    if by == "item_reference":
        named = [{"type": by, "id": item["id"]} for item in told["output"]]
        body = {"input": [user("q"), *named, result], "instructions": "be brief"}
    else:
        body = {"input": [result], by: told["id"], "instructions": "be brief"}
    second, told = played_responses(wire, body, Action("done"))
    assert second.messages[:2] == first.messages
    assert identity(second.messages[2]) == identity(assistant_message(action))
    assert second.messages[3]["content"] == "found" and len(second.messages) == 4
    if by == "previous_response_id":
        third = wire.read({"input": "and?", by: told["id"]})
        assert [each["content"] for each in third.messages[1:]] == [
            "Let me see.", "found", "done", "and?",
        ]  # fmt: skip
    with pytest.raises(RequestRefused, match=r"no (item|response)"):
        Responses().read(body)


def test_a_thread_is_continued_by_the_id_of_its_last_answer():
    wire, action = AnthropicMessages(), ACTIONS[2]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"system": "be brief", "messages": [user("q")], "tools": tools}
    first = wire.read({**body, "thread": {"type": "create"}})
    told = wire.reply(first, answer(action))
    result = {"type": "tool_result", "tool_use_id": "t0000c000", "content": "found"}
    newest = {"messages": [{"role": "user", "content": [{**result, "is_error": True}]}]}
    continued = {"type": "continue", "previous_message_id": told["id"]}
    second = wire.read({**newest, "thread": continued})
    whole = [user("q"), {"role": "assistant", "content": told["content"]}, *newest["messages"]]
    same = AnthropicMessages().read({**body, "messages": whole})
    assert (second.messages, second.tools) == (same.messages, same.tools)
    assert second.unenforced == same.unenforced == ("tool_result.is_error",)
    assert len(second.messages) == 4 and second.messages[:2] == first.messages
    told = wire.reply(second, Answer("y", Action("done"), False, 7, 3))
    again = {"type": "continue", "previous_message_id": told["id"]}
    third = wire.read({"messages": [user("and?")], "tools": [], "thread": again})
    assert [each["content"] for each in third.messages] == [
        "be brief", "q", "Let me see.", "found", "done", "and?",
    ]  # fmt: skip
    assert third.tools == []
    with pytest.raises(RequestRefused, match="whole history") as refused:
        AnthropicMessages().read({**newest, "thread": again})
    assert refused.value.status == 404
    assert wire.error(refused.value)["error"]["details"] == {"error_code": "thread_not_found"}


def test_a_call_of_older_logs_is_a_tool_call():
    function = {"name": "look", "arguments": '{"word": "w"}'}
    messages = [
        user("q"),
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "look", "content": "found"},
    ]
    _, said, found = ChatCompletions().read({"messages": messages}).messages
    (call,) = said["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": {"word": "w"}}
    assert (found["role"], found["name"], found["content"]) == ("tool", "look", "found")


def test_keys_of_messages_without_a_meaning_are_known():
    messages = [{**user("q"), "mood": "good", "cache_control": {"type": "ephemeral"}}]
    assert ChatCompletions().read({"messages": messages}).unread == ("mood",)
    edits = {"edits": [{"type": "clear_tool_uses"}]}
    call = AnthropicMessages().read({"messages": messages, "context_management": edits})
    assert (call.unread, call.replaced) == (("context_management", "mood"), ())


def test_a_response_that_is_not_stored_cannot_be_named():
    wire = Responses()
    _, told = played_responses(wire, {"input": "q", "store": False}, ACTIONS[0])
    with pytest.raises(RequestRefused, match="that was stored") as refused:
        wire.read({"input": "r", "previous_response_id": told["id"]})
    assert refused.value.code == "previous_response_not_found"


def test_ids_of_items_tell_two_turns_apart_that_nothing_stands_between():
    wire = Responses()
    _, first = played_responses(wire, {"input": "q"}, Action("a"))
    _, second = played_responses(wire, {"input": "q"}, ACTIONS[3])
    items = [
        user("q"),
        *first["output"],
        *(i for i in second["output"] if i["type"] != "reasoning"),
    ]
    assert read_as(items, wire)[1:] == [("assistant", "a", []), ("assistant", "", ["a", "b"])]
    assert read_as(items)[1:] == [("assistant", "a", ["a", "b"])], "nobody knows better"


def test_tools_of_a_namespace_are_functions_and_called_by_both_names():
    """As Codex sends tools over MCP, and its patch tool."""
    inner = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    tools = [
        {"type": "namespace", "name": "mcp__files", "description": "d", "tools": [inner]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "function", "name": "shell"},
        {"type": "web_search", "external_web_access": False},
    ]
    wire = Responses()
    call = wire.read({"input": "q", "tools": tools})
    names = [tool["function"]["name"] for tool in call.tools]
    assert names == ["mcp__files__read", "apply_patch", "shell"]
    assert call.left_out == ("web_search",)
    action = Action(
        "",
        (
            ToolCall("1", "mcp__files__read", {"path": "x"}),
            ToolCall("2", "apply_patch", {"input": "*** Begin Patch"}),
            ToolCall("3", "shell", {}),
        ),
    )
    told = wire.reply(call, answer(action))["output"]
    assert [(i["type"], i["name"], i.get("namespace")) for i in told] == [
        ("function_call", "read", "mcp__files"),
        ("custom_tool_call", "apply_patch", None),
        ("function_call", "shell", None),
    ]
    assert told[1]["input"] == "*** Begin Patch"
    outputs = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
        for item in told
    ]
    again = wire.read({"input": [user("q"), *told, *outputs], "tools": tools}).messages
    assert identity(again[1]) == identity(assistant_message(action))
    assert [each["name"] for each in again[2:]] == names
    streamed = b"".join(wire.events(call, answer(action))).decode()
    assert "response.custom_tool_call_input.done" in streamed


@pytest.mark.parametrize(
    ("wire", "body", "left_out"),
    [
        (ChatCompletions(), {"tools": [{"type": "web_search"}]}, ("web_search",)),
        (Responses(), {"tools": [{"type": "mcp", "name": "deepwiki"}]}, ("mcp deepwiki",)),
        (
            AnthropicMessages(),
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            ("bash_20250124 bash",),
        ),
    ],
)
def test_tools_that_are_no_functions_are_left_out_by_name(wire, body, left_out):
    call = wire.read({**question(wire), **body})
    assert (call.tools, call.left_out) == ([], left_out)


@pytest.mark.parametrize(
    ("wire", "body", "unenforced"),
    [
        (ChatCompletions(), {"response_format": {"type": "json_object"}}, ("response_format",)),
        (ChatCompletions(), {"response_format": {"type": "text"}}, ()),
        (ChatCompletions(), {"parallel_tool_calls": False}, ("parallel_tool_calls",)),
        (ChatCompletions(), {"parallel_tool_calls": True}, ()),
        (Responses(), {"parallel_tool_calls": False}, ("parallel_tool_calls",)),
        (
            AnthropicMessages(),
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("tool_choice.disable_parallel_tool_use",),
        ),
        (Responses(), {"text": {"format": {"type": "json_schema"}}}, ("text.format",)),
        (Responses(), {"text": {"format": {"type": "text"}, "verbosity": "low"}}, ()),
        (AnthropicMessages(), {"output_config": {"format": {}, "effort": "low"}}, ()),
        (
            AnthropicMessages(),
            {"output_config": {"format": {"type": "json_schema"}}},
            ("output_config.format",),
        ),
    ],
)
def test_a_form_of_the_answer_that_nothing_enforces_is_known(wire, body, unenforced):
    call = wire.read({**question(wire), **body})
    assert (call.unenforced, call.replaced) == (unenforced, ())


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (ChatCompletions(), {"max_tokens": 9, "max_completion_tokens": 7, "stop": ["a", "b"]}),
        (Responses(), {"max_output_tokens": 7}),
        (AnthropicMessages(), {"max_tokens": 7, "stop_sequences": ["a", "b"]}),
    ],
)
def test_limits_of_a_call_are_read(wire, body):
    call = wire.read({**question(wire), **body})
    assert (call.max_tokens, call.replaced) == (7, ())
    assert call.stop == (() if isinstance(wire, Responses) else ("a", "b"))


def test_whatever_is_sent_is_read_or_refused():
    """Every value of three true requests, replaced by others of every type."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assistant = {"role": "assistant", "content": "x", "reasoning": "r", "tool_calls": calls}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    chat = {
        "model": "m",
        "messages": [
            user([{"type": "text", "text": "q"}]),
            assistant,
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "x"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "max_tokens": 5,
        "response_format": {"type": "text"},
        "n": 1,
        "logit_bias": {},
    }
    responses = {
        "input": [
            user([{"type": "input_text", "text": "q"}]),
            {"type": "reasoning", "id": "r", "content": [{"text": "hm"}], "summary": []},
            {**said([{"type": "output_text", "text": "x"}]), "id": "m"},
            {**call_of("a"), "namespace": "n", "id": "i"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
            {"type": "custom_tool_call", "call_id": "b", "name": "p", "input": "x"},
        ],
        "instructions": "i",
        "tools": [
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **function}]},
            {"type": "custom", "name": "p", "description": "d"},
        ],
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
        "store": True,
        "tool_choice": {"type": "function"},
    }
    blocks = [
        {"type": "text", "text": "x"},
        {"type": "thinking", "thinking": "hm"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    ]
    results = [{"type": "tool_result", "tool_use_id": "1", "content": [blocks[0]]}]
    anthropic = {
        "system": [blocks[0]],
        "messages": [user("q"), {"role": "assistant", "content": blocks}, user(results)],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 5,
        "stop_sequences": ["x"],
        "output_config": {"format": None},
        "metadata": {},
    }
    others = (None, True, 0, -1, 2.5, "auto", "", [], [3], [None], [[]], {}, {"type": 3}, {"x": []})
    num_refused = 0
    for wire, whole in (
        (ChatCompletions(), chat),
        (Responses(), responses),
        (AnthropicMessages(), anthropic),
    ):
        wire.read(whole)
        for path in paths(whole):
            for other in others:
                body = json.loads(json.dumps(whole))
                at = body
                for key in path[:-1]:
                    at = at[key]
                at[path[-1]] = other
                try:
                    wire.read(body)
                except RequestRefused as refused:
                    assert refused.status == 400 and str(refused)
                    num_refused += 1
    assert num_refused > 500


def paths(value, before=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*before, key)
        if isinstance(each, dict | list):
            yield from paths(each, (*before, key))
