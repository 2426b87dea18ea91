"""Bytes of the wire."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentrl.env import protocol
from agentrl.env.protocol import (
    CreateRequest,
    StepReply,
    StepRequest,
    TaskSpec,
    decode,
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


@settings(deadline=None)
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
    request = StepRequest(0, action)
    assert decode(encode(request), StepRequest) == request


@settings(deadline=None)
@given(number, st.dictionaries(text, number, max_size=3), st.dictionaries(text, json_value))
def test_a_result_survives_the_wire_bit_for_bit(reward, components, info):
    reply = StepReply(
        observation=[{"role": "tool", "content": "x", "tool_call_id": "1"}],
        reward=reward,
        terminated=True,
        reward_components=components,
        info=info,
        metrics=components,
        step=3,
        tools=[{"type": "function", "function": {"name": "t"}}],
    )
    back = decode(encode(reply), StepReply)
    assert back == reply and isinstance(back, StepResult)
    assert math.copysign(1, back.reward) == math.copysign(1, reward)


MORE_KEYS = {"role": "assistant", "content": "", "reasoning": "so", "tool_calls": [{"id": 1}]}
BRACKETS = {"code": '[[[{{{"\\' * 200, "rows": [[]] * 500}
TASK = Task("id", [{"role": "user", "content": "x"}], {"gold": [1]}, {"a": None})


@pytest.mark.parametrize(
    "message",
    [
        protocol.SessionReply("s", "t", 0.0, 1.0, 0, [MORE_KEYS], []),
        StepRequest(0, Action(tool_calls=(ToolCall("1", "t", BRACKETS),))),  # which are not depth
        StepRequest(0, Action("NaN or Infinity?")),
        TaskSpec(inline=TASK),
    ],
)
def test_what_looks_odd_survives_the_wire(message):
    assert decode(encode(message), type(message)) == message


def test_replies_may_grow():
    body = b'{"environments": ["a"], "planned": 3}'
    assert decode(body, protocol.EnvList).environments == ["a"]


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    call = ToolCall("1", "t", {"\udfff": ["\ud800"]})
    back = decode(encode(Action("a\ud800b😀", (call,))), Action)
    assert back.text == "a�b😀" and back.tool_calls[0].arguments == {"�": ["�"]}
    assert protocol.as_json({"x": "\ud800", "y": (1, 2)}) == {"x": "�", "y": [1, 2]}


def test_what_is_no_json_is_refused_and_large_integers_and_other_keys_are_not():
    with pytest.raises(TypeError, match="object"):
        encode({"x": object()})
    assert protocol.as_json({"x": 10**30, 7: [float("inf")]}) == {"x": 10**30, "7": [None]}


ARGUMENTS = b'{"step": 0, "action": {"tool_calls": [{"id": "1", "name": "x", "arguments": '


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"step": NaN, "action": {}}', "not valid JSON"),
        (b'{"step": 0}', "action: this field is required"),
        (b'{"step": -1, "action": {}}', "step"),
        (b'{"step": 0.5, "action": {}}', "step"),
        (b'{"step": "0", "action": {}}', "step: Input should be a valid integer"),
        (b'{"step": true, "action": {}}', "step: Input should be a valid integer"),
        (b'{"step": 9007199254740992, "action": {}}', "step"),
        (b'{"step": 0, "action": {}, "last": 1}', "last: Input should be a valid boolean"),
        (b'{"step": 0, "action": {"txt": "x"}}', "action.txt: there is no such field"),
        (b'{"step": 0, "action": "\\ud800"}', "not valid JSON"),
        (b'{"step": 0, "action": {}, "extra": 1}', "extra: there is no such field"),
        (b'{"step": 0, "action": {"tool_calls": [{"id": "1", "name": "x"}]}}', "arguments"),
        (b'{"step": 0, "action": {}, "timeout_s": 0}', "timeout_s"),
        (b'{"step": 0, "action": {}, "timeout_s": 1e999}', "timeout_s"),
        (b"[" * 1_000_000, "not valid JSON"),
        (b"[]", "StepRequest: Input should be an object"),
        (ARGUMENTS + b'{"a":' * 1_000_000, "not valid JSON"),
        (ARGUMENTS + b'{"a": NaN}}]}}', "not valid JSON"),
        (ARGUMENTS + b'{"a":' * 61 + b"1" + b"}" * 61 + b"}]}}", "nests deeper"),
    ],
)
def test_a_bad_request_says_what_is_wrong(body, says):
    with pytest.raises(EnvError, match=says) as caught:
        decode(body, StepRequest)
    assert caught.value.code == "invalid_request" and caught.value.status == 422


@pytest.mark.parametrize(("levels", "fine"), [(59, True), (60, False)])
def test_the_depth_limit(levels, fine):
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    body = encode(StepRequest(0, Action(tool_calls=(ToolCall("1", "t", {"a": value}),))))
    if fine:
        decode(body, StepRequest)
    else:
        with pytest.raises(EnvError, match="nests deeper than 64"):
            decode(body, StepRequest)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | json_value.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused(body):
    try:
        decode(body, CreateRequest)
    except EnvError as error:
        assert error.code == "invalid_request"


@pytest.mark.parametrize(
    "spec", ['{"split": "a"}', '{"index": 1}', "{}", '{"split":"a","index":1,"inline":{}}']
)
def test_a_task_is_named_or_inline(spec):
    with pytest.raises(EnvError):
        decode(f'{{"env": "e", "task": {spec}}}'.encode(), CreateRequest)


@pytest.mark.parametrize(("text", "config"), [(None, {}), ("{}", {}), ('{"a":[1]}', {"a": [1]})])
def test_a_configuration_in_a_query(text, config):
    assert protocol.decode_config(text) == config


@pytest.mark.parametrize("text", ["", "[]", "{", "\ud800", '{"a":' * 70 + "1" + "}" * 70])
def test_a_query_without_a_configuration_is_refused(text):
    with pytest.raises(EnvError, match="config must be a JSON object") as caught:
        protocol.decode_config(text)
    assert caught.value.code == "invalid_request"


def test_a_web_framework_may_read_requests_from_dictionaries():
    read = TypeAdapter(StepRequest).validate_python
    assert read({"step": 1, "action": {"tool_calls": []}}) == StepRequest(1, Action())
    for wrong in ({"step": "1", "action": {}}, {"step": 1, "action": {}, "more": 1}):
        with pytest.raises(ValidationError):
            read(wrong)


def test_descriptions_of_fields_are_in_the_schema():
    schema = TypeAdapter(StepRequest).json_schema()
    assert schema["additionalProperties"] is False
    assert "a retry repeats it" in schema["properties"]["step"]["description"]


@pytest.mark.parametrize("code", protocol.PROBLEMS)
def test_an_error_survives_the_wire(code):
    error = make_error(code, "why", retry_after_s=None)
    problem = decode(encode(protocol.to_problem(error)), protocol.Problem)
    back = protocol.from_problem(problem)
    assert type(back) is type(error) and str(back) == "why"
    assert (back.code, back.status, back.retryable) == (error.code, error.status, error.retryable)


def test_errors_keep_their_class():
    assert isinstance(make_error("grader_error", "x"), GraderError)
    full = make_error("at_capacity", "x", retry_after_s=2.0)
    assert isinstance(full, EnvUnavailable) and full.retry_after_s == 2.0 and full.status == 429
    assert type(make_error("step_timeout", "x")) is EnvError
