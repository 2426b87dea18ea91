"""Bytes of the wire."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.env import protocol
from agentrl.env.protocol import (
    CreateRequest,
    StepReply,
    StepRequest,
    TaskSpec,
    WireAction,
    decode_reply,
    decode_request,
    encode,
    make_error,
)
from agentrl.errors import EnvError, EnvUnavailable, GraderError
from agentrl.types import Action, StepResult, Task, ToolCall

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.builds(
        Action,
        text,
        st.lists(
            st.builds(ToolCall, text, text, st.dictionaries(text, json_value, max_size=3)),
            max_size=3,
        ).map(tuple),
        st.none() | text,
    )
)
def test_an_action_survives_the_wire(action):
    request = StepRequest(0, protocol.to_wire_action(action))
    back = decode_request(encode(request), StepRequest)
    assert protocol.from_wire_action(back.action) == action


@given(number, st.dictionaries(text, number, max_size=3), st.dictionaries(text, json_value))
def test_a_result_survives_the_wire_bit_for_bit(reward, components, info):
    result = StepResult(
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        reward,
        terminated=True,
        reward_components=components,
        info=info,
        metrics=components,
    )
    reply = decode_reply(encode(protocol.to_step_reply(result, 3)), StepReply)
    back = protocol.from_step_reply(reply)
    assert back == result and reply.step == 3
    assert math.copysign(1, back.reward) == math.copysign(1, reward)


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    body = encode(WireAction("a\ud800b😀", [protocol.WireCall("1", "t", {"\udfff": ["\ud800"]})]))
    back = decode_request(body, WireAction)
    assert back.text == "a�b😀" and back.tool_calls[0].arguments == {"�": ["�"]}
    assert protocol.as_json({"x": "\ud800", "y": (1, 2)}) == {"x": "�", "y": [1, 2]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"step": NaN, "action": {}}', "not valid JSON"),
        (b'{"step": 0}', "missing required field `action`"),
        (b'{"step": -1, "action": {}}', "step"),
        (b'{"step": 0.5, "action": {}}', "step"),
        (b'{"step": 0, "action": {}, "extra": 1}', "unknown field `extra`"),
        (b'{"step": 0, "action": {"tool_calls": [{"id": "1", "name": "x"}]}}', "arguments"),
        (b'{"step": 0, "action": {}, "timeout_s": 0}', "timeout_s"),
        (b'{"step": 0, "action": {}, "timeout_s": 1e999}', "timeout_s"),
        (b"[" * 1_000_000, "nests deeper"),
        (b'{"step": 0, "action": ' + b'{"a":' * 100 + b"1" + b"}" * 101, "nests deeper"),
    ],
)
def test_a_bad_request_says_what_is_wrong(body, says):
    with pytest.raises(EnvError, match=says) as caught:
        decode_request(body, StepRequest)
    assert caught.value.code == "invalid_request" and caught.value.status == 422


def test_brackets_in_strings_and_side_by_side_are_not_depth():
    arguments = {"code": '[[[{{{"\\' * 200, "rows": [[]] * 500}
    action = Action(tool_calls=(ToolCall("1", "t", arguments),))
    body = encode(StepRequest(0, protocol.to_wire_action(action)))
    assert protocol.from_wire_action(decode_request(body, StepRequest).action) == action


@settings(max_examples=300)
@given(st.binary(max_size=60) | json_value.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused(body):
    try:
        decode_request(body, CreateRequest)
    except EnvError as error:
        assert error.code == "invalid_request"


@pytest.mark.parametrize(
    "spec", ['{"split": "a"}', '{"index": 1}', "{}", '{"split":"a","index":1,"inline":{}}']
)
def test_a_task_is_named_or_inline(spec):
    with pytest.raises(EnvError):
        decode_request(f'{{"env": "e", "task": {spec}}}'.encode(), CreateRequest)


def test_an_inline_task_survives_the_wire():
    task = Task("id", [{"role": "user", "content": "x"}], {"gold": [1]}, {"a": None})
    back = decode_request(encode(protocol.to_task_spec(task)), TaskSpec)
    assert back.inline is not None and protocol.from_inline(back.inline) == task


@pytest.mark.parametrize("code", protocol.PROBLEMS)
def test_an_error_survives_the_wire(code):
    error = make_error(code, "why", retry_after_s=None)
    problem = decode_reply(encode(protocol.to_problem(error)), protocol.Problem)
    back = protocol.from_problem(problem)
    assert type(back) is type(error) and str(back) == "why"
    assert (back.code, back.status, back.retryable) == (error.code, error.status, error.retryable)


def test_errors_keep_their_class():
    assert isinstance(make_error("grader_error", "x"), GraderError)
    full = make_error("at_capacity", "x", retry_after_s=2.0)
    assert isinstance(full, EnvUnavailable) and full.retry_after_s == 2.0 and full.status == 429
    assert type(make_error("step_timeout", "x")) is EnvError
