from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.parse import assistant_message, parse_action


def test_plain_text_is_text():
    action, status = parse_action("#### 12", call_id_prefix="t0")
    assert (action.text, action.tool_calls, action.parse_error) == ("#### 12", (), None)
    assert status == "text"


def test_calls_are_taken_out_of_the_text_in_order():
    text = (
        'Let me see. <tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call> and '
        '<tool_call>\n{"name": "b"}\n</tool_call>'
    )
    action, status = parse_action(text, call_id_prefix="t3")
    assert status == "tool_calls"
    assert action.text == "Let me see.  and"
    assert [(c.id, c.name, c.arguments) for c in action.tool_calls] == [
        ("t3-0", "a", {"x": 1}),
        ("t3-1", "b", {}),
    ]


def test_every_kind_of_bad_call_says_what_is_wrong():
    cases = {
        '<tool_call>{"name": "a"': "never closed",
        "<tool_call>nonsense</tool_call>": "not valid JSON",
        "<tool_call>[1]</tool_call>": "not a JSON object",
        '<tool_call>{"arguments": {}}</tool_call>': 'no "name"',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>': "not a JSON object",
        '<tool_call>{"name": "a"}</tool_call><tool_call>{"name"}</tool_call>': "tool call 2",
    }
    for text, reason in cases.items():
        action, status = parse_action(text, call_id_prefix="t0")
        assert status == "malformed"
        assert action.tool_calls == ()
        assert reason in (action.parse_error or "")


@given(st.text(max_size=200))
def test_any_text_is_an_action(text):
    action, status = parse_action(text, call_id_prefix="t0")
    assert (status == "malformed") == (action.parse_error is not None)
    assert assistant_message(action)["role"] == "assistant"
