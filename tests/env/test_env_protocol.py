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


ARGUMENTS = b'{"step": 0, "action": {"tool_calls": [{"id": "1", "name": "x", "arguments": '


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
        (b"[" * 1_000_000, "Expected `object`, got `array`"),
        (ARGUMENTS + b'{"a":' * 1_000_000, "nests deeper"),
        (ARGUMENTS + b'{"a":' * 61 + b"1" + b"}" * 61 + b"}]}}", "nests deeper"),
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


# Frames

STEP = {"op": "step", "id": 1, "sid": "s", "step": 0, "action": {"text": "x"}}


def decode(*frames):
    return protocol.decode_frames(json.dumps(list(frames)))


def test_a_message_is_one_frame_or_an_array_of_them():
    one = protocol.decode_frames(json.dumps(STEP))
    assert one == decode(STEP) == protocol.decode_frames(json.dumps(STEP).encode())
    assert one == [protocol.StepFrame(0, WireAction("x"), id=1, sid="s")]
    assert decode() == [] and len(decode(*[STEP] * 1024)) == 1024
    assert isinstance(protocol.to_step_request(one[0]), StepRequest)


def test_a_frame_survives_the_wire():
    task = TaskSpec("train", 3)
    frames = [
        protocol.CreateFrame("e", task, seed=-5, count=2, id=2**53 - 1, key="k"),
        protocol.CreateFrame("e", id=0, from_snapshot="x"),
        protocol.ResetFrame(4, task, 7, id=1, sid="s"),
        protocol.SnapshotFrame(4, 9.0, id=1, sid="s"),
        protocol.RenewFrame(id=1, sid="s"),
        protocol.StatusFrame(1, "s"),
        protocol.DeleteFrame(1, "s"),
        protocol.InfoFrame(1, "e", {"a": 1}),
        protocol.PingFrame(1),
    ]
    assert protocol.decode_frames(b"[" + b",".join(map(encode, frames)) + b"]") == frames
    request = protocol.to_create_request(frames[0])
    assert type(request) is CreateRequest and request.seed == -5 and request.count == 2


@pytest.mark.parametrize(
    ("message", "id", "says"),
    [
        ("", None, "not valid JSON"),
        ("7", None, "expected `object`"),
        ("null", None, "expected `object`"),
        ('{"id":1', None, "not valid JSON"),
        (b"\xff\xfe", None, "not valid JSON"),
        ("\ud800", None, "not valid JSON"),
        ("[" * 100_000, None, "not valid JSON"),
        ('{"op":"step"}', None, "missing required field"),
        ('{"op":"ping","id":-1}', None, "id"),
        ('{"op":"ping","id":9007199254740992}', None, "id"),
        ('{"op":"ping","id":5,"x":1}', 5, "unknown field `x`"),
        ('{"op":"dance","id":5}', 5, "dance"),
        ('{"id":5}', 5, "op"),
        ('{"op":"create","id":5,"env":"e"}', 5, "either task or from_snapshot"),
        ('{"op":"create","id":5,"env":"e","from_snapshot":"x","seed":1}', 5, "leave them out"),
        (json.dumps([STEP] * 1025), None, "1025 frames"),
        (json.dumps([STEP] * 1025 + [5]), None, "1026 frames"),
    ],
)
def test_a_message_that_is_no_frame_says_why(message, id, says):
    (bad,) = protocol.decode_frames(message)
    assert isinstance(bad, protocol.FrameError) and bad.id == id
    assert says.lower() in str(bad.error).lower()
    code = "too_many_frames" if "frames" in says else "invalid_request"
    assert bad.error.code == code
    reply = json.loads(protocol.error_frame(bad.id, bad.error))
    assert reply["id"] == id and reply["error"]["code"] == code


def nested(levels):
    value = 1
    for _ in range(levels):
        value = {"a": value}
    return STEP | {"action": {"tool_calls": [{"id": "c", "name": "t", "arguments": value}]}}


def test_one_bad_frame_spoils_only_itself():
    bad = [STEP | {"id": 2, "step": -1}, 5, {"op": "ping", "id": 3, "sid": "s"}, nested(61)]
    frames = decode(STEP, *bad, STEP | {"id": 9})
    errors = [each.id for each in frames if isinstance(each, protocol.FrameError)]
    assert errors == [2, None, 3, 1]
    assert [each.id for each in frames if isinstance(each, protocol.StepFrame)] == [1, 9]


@pytest.mark.parametrize("others", [0, 40])
def test_the_depth_limit_is_the_same_alone_and_in_an_array(others):
    for levels, fine in ((60, True), (61, False)):
        frames = decode(nested(levels), *[STEP] * others)
        assert isinstance(frames[0], protocol.StepFrame) is fine, levels
        assert all(isinstance(each, protocol.StepFrame) for each in frames[1:])
    deep = {"op": "create", "id": 1, "env": "e", "task": {"split": "a", "index": 0}}
    value: object = 1
    for _ in range(62):
        value = [value]
    for config, fine in ((value, True), ([value], False)):
        frames = decode(deep | {"config": {"a": config}}, *[STEP] * others)
        assert isinstance(frames[0], protocol.CreateFrame) is fine


@settings(max_examples=300)
@given(st.binary(max_size=60) | json_value.map(json.dumps) | st.text(max_size=40))
def test_any_message_gives_frames_or_errors(message):
    for each in protocol.decode_frames(message):
        if isinstance(each, protocol.FrameError):
            assert each.error.code == "invalid_request"
            json.loads(protocol.error_frame(each.id, each.error))


def test_replies_are_put_together_without_being_read():
    body = encode(StepReply(1, [], 0.5, False, False, {}, {}, {}))
    assert json.loads(protocol.ok_frame(7, body)) == {"id": 7, "ok": json.loads(body)}
