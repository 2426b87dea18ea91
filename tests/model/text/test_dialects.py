"""Every dialect on the same turns: what is read, what is refused, and what is never executed."""

import json

import pytest
from dialect_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import CHATML, make_tokenizer

from agentrl.env import Environment, Task, register, tool
from agentrl.env.client import connect
from agentrl.errors import ConfigError
from agentrl.model.text.renderer import Renderer
from agentrl.model.text.shipped import from_response_template
from agentrl.model.text.table import DIALECTS
from agentrl.model.text.template import read_template
from agentrl.rollout.driver import Episode, Limits, play
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import assistant_message

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
ONE = [("look", {"word": "fox", "count": 3})]
TWO = [*ONE, ("look", {"word": "42", "count": -1})]
UNICODE = [
    ("look", {"word": "ünï 你好 \U0001f600 <b>&amp;</b> 'q' \"d\" \\ {x}: y, [z]", "count": 3})
]
NAMES = sorted(FAMILIES)


def opened(name):
    """A family writes its thoughts so, and with them its prompt, where that opens them."""
    family = FAMILIES[name]
    return "" if family.think[0] else f"<|im_start|>assistant\n{DIALECTS[name].think[0]}\n"


def read(name, text, prompt_end=""):
    action, status = DIALECTS[name].read_turn(text, [LOOK], turn_id=7, prompt_end=prompt_end)
    return action, status


def calls_of(action):
    return [(call.name, call.arguments) for call in action.tool_calls]


def unclosed(name):
    """One call without its last marker, or without its last character where it has none."""
    text = FAMILIES[name].calls(ONE)
    closes = (DIALECTS[name].call or (None, None))[1]
    return text.removesuffix(closes) if closes else text[:-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_turns(name):
    family = FAMILIES[name]
    broken = family.calls(ONE).replace(*family.broken)
    assert broken != family.calls(ONE)
    inside = family.turn("ok", reasoning=f"I could write {family.calls(ONE)} here")
    if name == "harmony":  # its markers cannot stand inside a message, so only the text does
        inside = family.turn("ok", reasoning='to=functions.look json {"word": "fox", "count": 3}')
    table = [
        ("text", family.turn("It is 42."), "text", []),
        ("text behind a thought", family.turn("It is 42.", reasoning="hm"), "text", []),
        ("one call", family.turn(calls=ONE), "tool_calls", ONE),
        ("two calls", family.turn(calls=TWO), "tool_calls", TWO),
        ("a thought, then a call", family.turn(calls=ONE, reasoning="hm"), "tool_calls", ONE),
        ("a call inside a thought", inside, "text", []),
        ("an unclosed call", unclosed(name), "malformed", []),
        ("wrong JSON or markup", broken, "malformed", []),
        (
            "a good call and a broken one",
            family.calls(TWO).replace(*family.broken),
            "malformed",
            [],
        ),
        ("unicode arguments", family.turn(calls=UNICODE), "tool_calls", UNICODE),
    ]
    for what, text, status, calls in table:
        prompt_end = opened(name) if family.think[1] in text else ""
        action, found = read(name, text, prompt_end)
        print(f"{name:13} {what:30} {found}")
        assert (found, calls_of(action)) == (status, calls), (what, text, action)
        assert (action.parse_error is None) == (found != "malformed")
        if "thought" in what:
            assert action.reasoning and action.reasoning not in action.text
        if status == "text":
            assert action.text in ("It is 42.", "ok")
        ids = [call.id for call in action.tool_calls]
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", NAMES)
def test_a_thought_that_does_not_end_executes_nothing(name):
    family, think = FAMILIES[name], DIALECTS[name].think
    call = family.calls(ONE)
    for text, prompt_end in (
        (f"{think[0]}now {call}", ""),
        (f"now {call}", f"<|im_start|>assistant\n{think[0]}"),
        (f"now {call}{think[1]}then", ""),
    ):
        if name == "harmony":
            text = call.replace("commentary", "analysis")
        action, status = read(name, text, prompt_end)
        assert action.tool_calls == (), text
        assert action.reasoning and "now" not in action.text
        assert status in ("text", "malformed")


def test_only_a_closed_thought_lets_a_call_through():
    call = FAMILIES["gemma4"].calls(ONE)
    for text, prompt_end in (
        (f"<|channel>thought I could {call}", ""),
        (f"<|channel>thought I could {call} or not", ""),
        (f"<|channel>plan\nI could {call}", ""),
        (f"<|channel>{call}", ""),
        (f"thought\nI could {call}", "<|turn>model\n<|channel>"),
        (f"I could {call}", "<|turn>model\n<|channel>thought"),
        (f"I could {call}", "<channel|><|channel>thought\nWell, "),
    ):
        action, status = read("gemma4", text, prompt_end)
        assert (status, action.tool_calls) == ("malformed", ()), (text, prompt_end)
        assert "never closed by <channel|>" in action.parse_error
        action, status = read("gemma4", f"{text}<channel|>{call}", prompt_end)
        assert (status, calls_of(action)) == ("tool_calls", ONE), (text, prompt_end)
    action, _ = read("gemma4", "<|channel>thought\nhm<channel|>ok")
    assert (action.reasoning, action.text) == ("hm", "ok")
    action, _ = read("gemma4", "ght\nhm<channel|>ok", "<|channel>thou")
    assert (action.reasoning, action.text) == ("hm", "ok")


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_may_open_a_thought_and_begin_it(name):
    family, think = FAMILIES[name], DIALECTS[name].think
    call = family.calls(ONE)
    if name == "harmony":
        begun, closed = "<|start|>assistant<|channel|>analysis<|message|>Well,", think[1]
        inside = '<|channel|>commentary to=functions.look<|message|>{"word": "fox"}'
    else:
        begun, closed, inside = f"x{think[1]}y{think[0]}Well,", think[1], call
    action, status = read(name, f" now {inside}", begun)
    assert action.tool_calls == () and "now" in action.reasoning and status != "tool_calls"
    closing = family.think[1] if name == "harmony" else closed
    action, status = read(name, f" now {inside}{closing}{call}", begun)
    assert (status, calls_of(action)) == ("tool_calls", ONE)
    if name != "harmony":
        action, status = read(name, call, f"{begun}{closed}\n\n")
        assert (status, calls_of(action)) == ("tool_calls", ONE)


def test_the_renderer_asks_the_template_not_the_question_whether_a_thought_is_open():
    template = FAMILIES["hermes"].template
    opened_template = template.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\nOkay, {% endif %}"
    )
    assert opened_template != template
    said = FAMILIES["hermes"].calls(ONE)
    asked = [{"role": "user", "content": "What does <think> mean?"}]
    for source, called in ((template, ONE), (opened_template, [])):
        renderer = Renderer(make_tokenizer(source, special=FAMILIES["hermes"].special))
        prompt = renderer.prompt(asked, [LOOK])
        ids = renderer._encode(said)
        action, _ = renderer.read_turn([*prompt, *ids], len(prompt), [LOOK], turn_id=0)
        assert calls_of(action) == called


@pytest.mark.parametrize("name", NAMES)
def test_marks_inside_an_argument_are_a_part_of_it(name):
    think = DIALECTS[name].think if name != "harmony" else ("<think>", "</think>")
    for word in (f"a {think[1]} b", f"{think[0]} a", f"{think[0]}a{think[1]}"):
        calls = [("look", {"word": word.replace("\n", " "), "count": 3})]
        action, status = read(name, FAMILIES[name].calls(calls))
        assert (status, calls_of(action), action.reasoning) == ("tool_calls", calls, "")


@pytest.mark.parametrize(
    ("name", "closing"),
    [
        ("qwen_xml", "\n</parameter>"),
        ("minimax_m2", "</parameter>"),
        ("deepseek_v32", "</｜DSML｜parameter>"),
        ("glm4", "</arg_value>"),
    ],
)
def test_a_parameter_that_is_not_closed_swallows_nothing(name, closing):
    for calls in (ONE, TWO):
        text = FAMILIES[name].calls(calls)
        for cut in range(text.count(closing)):
            at = -1
            for _ in range(cut + 1):
                at = text.index(closing, at + 1)
            action, status = read(name, text[:at] + text[at + len(closing) :])
            assert (status, action.tool_calls) == ("malformed", ()), (cut, text)


# Granite's list of calls has no second mark that could tell it from an answer.
DELIMITED = [name for name in NAMES if DIALECTS[name].call and name != "granite3"]


@pytest.mark.parametrize("name", DELIMITED)
def test_a_call_without_its_opening_is_no_answer(name):
    opens, closes = DIALECTS[name].call
    one, two = FAMILIES[name].calls(ONE), FAMILIES[name].calls(TWO)
    texts = [one.replace(opens, "", 1), two.replace(opens, "", 1)]
    if closes and two.count(opens) == 2:
        texts += [opens.join(two.rsplit(opens, 1)[:1]) + two.rsplit(opens, 1)[1]]
    if name == "qwen_xml":
        texts.append(one.replace(opens, "").replace(closes, ""))
    if name == "mistral":
        texts.pop(1)  # [ARGS] of the first call stands in front of the second
        texts.append(two.replace(opens, "", 1))
    for text in texts:
        action, status = read(name, text)
        assert (status, action.tool_calls) == ("malformed", ()), text
        assert action.parse_error
        action, status = DIALECTS[name].read_turn(text.replace(opens, ""), [], turn_id=0)
        assert status == "text", "without tools it is an answer"


def test_two_calls_have_two_ids():
    call = '{"name": "look", "arguments": {}, "id": "a"}'
    action, status = read("hermes", f"<tool_call>{call}</tool_call>" * 2)
    assert status == "malformed" and "two calls have the id 'a'" in action.parse_error
    text = FAMILIES["kimi_k2"].calls(TWO).replace("look:1", "look:0")
    assert read("kimi_k2", text)[1] == "malformed"
    call = '{"name": "look", "arguments": {}, "id": "t0007c001"}'
    plain = '{"name": "look", "arguments": {}}'
    text = f"<tool_call>{call}</tool_call><tool_call>{plain}</tool_call>"
    assert read("hermes", text)[1] == "malformed", "one is the id that the other is given"


WORDS = st.text(max_size=8) | st.sampled_from(
    ["</think>", "<think>", "<tool_call>", '"}', "', b='", "\\", "<parameter=x>", "{", "]", ";"]
)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=8)
def test_no_truncation_changes_a_call(name, data):
    """A turn that was cut makes some of its first calls or none, and never another."""
    family = FAMILIES[name]
    number = 1 if name == "harmony" else data.draw(st.integers(1, 3))
    calls = [
        ("look", {"word": data.draw(WORDS), "count": data.draw(st.integers(-99, 99))})
        for _ in range(number)
    ]
    reasoning = data.draw(st.sampled_from(["", "hm", f"I could {family.calls(ONE)}"]))
    text = family.turn(calls=calls, reasoning=reasoning if name != "harmony" else "hm")
    prompt_end = opened(name) if family.think[1] in text else ""
    for end in range(len(text) + 1):
        cut = calls_of(read(name, text[:end], prompt_end)[0])
        assert cut == calls[: len(cut)], text[:end]


@given(st.sampled_from(NAMES), st.data())
@settings(max_examples=100)
def test_any_text_is_an_action(name, data):
    """Whatever is put together from a family's own pieces is read without an exception, and
    what stands before a thought's end is never called."""
    family, dialect = FAMILIES[name], DIALECTS[name]
    pieces = [
        family.calls(ONE),
        *dialect.think,
        *(m for m in dialect.call or () if m),
        "{",
        "a",
        "[",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=9), max_size=9)))
    action, status = read(name, text)
    assert (status == "malformed") == (action.parse_error is not None)
    assert (status == "tool_calls") == bool(action.tool_calls)
    json.dumps(assistant_message(action))
    if name != "harmony":
        within, _ = read(name, dialect.think[0] + text.replace(dialect.think[1], ""))
        assert within.tool_calls == ()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_renders_back_to_the_same_ids(name):
    renderer = Renderer(FAMILIES[name].tokenizer())
    assert (renderer.dialect.name, renderer.history) == (name, FAMILIES[name].history)
    prompt = renderer.prompt([{"role": "user", "content": "x"}], [LOOK])
    # gpt-oss stops at the end of a call: it makes no second one in the same turn.
    for calls in ([], ONE, *([] if name == "harmony" else [TWO]), UNICODE):
        for reasoning in ("", "first\n\nthen"):
            said = FAMILIES[name].turn("" if calls else "It is so.", calls, reasoning)
            end = renderer.prompt([{"role": "user", "content": "x"}], [])[-20:]
            text_ids = renderer._encode(said)
            action, status = renderer.read_turn([*end, *text_ids], len(end), [LOOK], turn_id=2)
            assert status == ("tool_calls" if calls else "text")
            message = assistant_message(action)
            ids = renderer.assistant_turn(message)
            again, _ = renderer.read_turn([*prompt, *ids], len(prompt), [LOOK], turn_id=2)
            assert calls_of(again) == calls
            assert renderer.assistant_turn(assistant_message(again)) == ids
            if not reasoning or FAMILIES[name].text_beside_calls:
                assert again.reasoning == action.reasoning


@register("dialect-test")
class DialectTest(Environment):
    def splits(self):
        return {"train": 1}

    def get(self, split, index):
        return Task("t", "Which animal?")

    @tool
    async def look(self, word: str, count: int) -> str:
        """Look a word up."""
        return f"found {word} {count}"

    async def on_text(self, text: str):
        self.finish(reward=1.0, info={"answer": text})


@pytest.mark.parametrize("name", NAMES)
async def test_three_turns_through_the_driver(name):
    """Every sampled id stands once in a row with mask 1, and every prompt is the template's."""
    family = FAMILIES[name]
    renderer = Renderer(family.tokenizer())
    reasoning = "" if name in ("llama_json", "pythonic", "xlam") else "let me see"
    unseen = [("look", {"word": "nö", "count": 1})]
    turns = [
        family.turn(calls=ONE, reasoning=reasoning),
        family.turn(calls=unseen, reasoning=reasoning),
        family.turn("a fox", reasoning=reasoning),
    ]
    if name == "kimi_k2":
        turns[1] = turns[1].replace(":0<", ":1<")
    engine = ScriptedEngine(renderer, lambda request_id, _: turns[int(request_id[-3:])])
    sampled, generate = [], engine.generate

    async def noted(*args):
        generation = await generate(*args)
        sampled.append(generation.token_ids)
        return generation

    engine.generate = noted
    policy = TokenPolicy(engine, renderer, max_turn_tokens=400, max_context_tokens=6000)
    recorded, offered = [], []

    env = connect(None)
    policy.reserve(1)
    episode = Episode("e", "g", "dialect-test", "train", 0, 0, {})
    limits = Limits(5, 20, 20, 60)
    session = await env.session("dialect-test", split="train", index=0, seed=0)
    offered.extend(session.tools)
    await session.close()
    await play(episode, policy, env, limits, recorded.append)
    await env.aclose()
    (trajectory,) = recorded
    assert trajectory.error is None, trajectory.error
    assert trajectory.info["answer"] == "a fox" and trajectory.reward == 1.0
    assert [turn.parse_status for turn in trajectory.turns] == ["tool_calls"] * 2 + ["text"]
    messages = trajectory.messages
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["found fox 3", "found nö 1"]
    trained = []
    for number, turn in enumerate(trajectory.turns):
        row = trajectory.branches[turn.branch]
        prompt = engine.prompts[f"e-t{number:03d}"]
        assert row.token_ids[: turn.start] == prompt
        assert prompt == renderer.prompt(messages[: 1 + 2 * number], offered)
        trained += row.token_ids[turn.start : turn.start + turn.num_tokens]
        assert set(row.loss_mask[turn.start : turn.start + turn.num_tokens]) == {1}
    assert trained == [token for ids in sampled for token in ids]
    assert sum(sum(row.loss_mask) for row in trajectory.branches) == len(trained)


def test_reasoning_goes_where_the_template_wants_it():
    said = {"role": "assistant", "content": "So.", "reasoning": "hm"}
    asked = {"role": "user", "content": "x"}
    inline = Renderer(make_tokenizer(CHATML))
    assert "<think>\nhm\n</think>\n\nSo." in inline.template.text([asked, said], [], False)
    keyed = Renderer(FAMILIES["gemma4"].tokenizer())
    assert "<|channel>thought\nhm\n<channel|>So." in keyed.template.text([asked, said], [], False)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"word": "w"}}}
    one_of_both = Renderer(FAMILIES["harmony"].tokenizer()).template
    text = one_of_both.text([asked, {**said, "tool_calls": [call]}], [], False)
    assert "hm" in text and "So." not in text, "its template refuses a text beside the two"
    dropped = Renderer(FAMILIES["hermes"].tokenizer())
    assert "hm" in dropped.template.text([asked, said], [], False)
    assert "hm" not in dropped.template.text([asked, said, asked], [], True)


def test_schemas_made_by_hand_name_types_as_python_does():
    kinds = {"a": "int", "b": "float", "c": "bool", "d": "dict", "e": "list", "f": "str"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    values = {"a": 1, "b": 0.5, "c": True, "d": {"x": 1}, "e": [1], "f": "1"}
    body = "".join(
        f"<parameter={name}>{value if name == 'f' else json.dumps(value)}</parameter>"
        for name, value in values.items()
    )
    text = f"<tool_call><function=f>{body}</function></tool_call>"
    action, _ = DIALECTS["qwen_xml"].read_turn(text, [tool], turn_id=0)
    assert calls_of(action) == [("f", values)]


POINT = {"type": "object", "properties": {"x": {"type": "number"}}}
DEFINED = {
    "Point": POINT,
    "Color": {"type": "string", "enum": ["1", "red"]},
    "Loop": {"$ref": "#/$defs/Loop"},
}
WRITTEN = {
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm4": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{}</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}


@pytest.mark.parametrize("dialect", WRITTEN)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/Point"}, '{"x": "y"}', {"x": "y"}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}, "1", "1"),
        ({"$ref": "#/properties/b"}, "[1]", [1]),
        ({"$ref": "#/$defs/Nowhere"}, "1", "1"),
        ({"$ref": "https://example.org/schema"}, "[1]", "[1]"),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [1, None]}, "null", None),
        ({"enum": [1, 2]}, "true", "true"),
        ({"const": "1"}, "1", "1"),
        ({"type": None, "anyOf": None, "enum": None}, "1", 1),
        ({"type": "integer", "oneOf": None, "const": None}, "1", 1),
        ({"type": [{"type": "string"}]}, "1", "1"),
        ({"type": "any"}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [True, {"type": "null"}]}, "1", 1),
        (True, "1", 1),
        (False, "1", "1"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "integer", "minimum": 5}, "1", 1),
        ({"type": "boolean"}, "False", False),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string"}, "None", "None"),
        ({"type": "string"}, "[1]", "[1]"),
        ({}, "True", True),
        ({"type": "object"}, "{'k': (1, None)}", {"k": [1, None]}),
        ({"type": "object"}, "{'k': f()}", "{'k': f()}"),
        ({"type": "array"}, "[" * 2000, "[" * 2000),
        ({"type": "integer"}, "1_000", "1_000"),
    ],
)
def test_arguments_take_a_value_that_their_schema_declares(dialect, schema, text, value):
    parameters = {"type": "object", "properties": {"a": schema, "b": {"type": "array"}}}
    function = {"name": "f", "parameters": {**parameters, "$defs": DEFINED}}
    tools = [{"type": "function", "function": function}]
    action, _ = DIALECTS[dialect].read_turn(WRITTEN[dialect].format(text), tools, turn_id=0)
    (call,) = action.tool_calls
    assert repr(call.arguments) == repr({"a": value})


def test_untyped_arguments_take_the_type_of_the_schema():
    kinds = {"n": "integer", "x": "number", "s": "string", "b": "boolean", "o": "object"}
    schema = {k: {"type": v} for k, v in kinds.items()} | {
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    }
    function = {"name": "f", "parameters": {"type": "object", "properties": schema}}

    def one(key, value, tools=({"type": "function", "function": function},)):
        text = f"<tool_call><function=f><parameter={key}>{value}</parameter></function></tool_call>"
        action, status = DIALECTS["qwen_xml"].read_turn(text, list(tools), turn_id=0)
        assert status == "tool_calls"
        return action.tool_calls[0].arguments[key]

    assert [one("n", "3"), one("x", "3"), one("s", "3"), one("b", "true")] == [3, 3, "3", True]
    assert [one("o", '{"a": 1}'), one("maybe", "null"), one("maybe", "4")] == [{"a": 1}, None, 4]
    assert one("n", "three") == "three", "the environment says what is wrong with it"
    assert one("s", '"quoted"') == '"quoted"'
    assert [one("n", "3", ()), one("s", "fox", ()), one("s", '"a"', ())] == [3, "fox", '"a"']
    assert one("s", "\n two\nlines \n") == " two\nlines "


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", "<tool_call>[1]</tool_call>", "not a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "not a JSON object"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>{}", "never closed by </tool_call>"),
        ("hermes", "<think>so <tool_call>{}</tool_call>", "never closed by </think>"),
        ("qwen_xml", "<tool_call><function=a>x</function></tool_call>", "'x' is not part"),
        ("glm4", "<tool_call>a<arg_key>k</arg_key></tool_call>", "not part of a call"),
        ("olmo3", "<function_calls>a(1)</function_calls>", "by name"),
        ("olmo3", "<function_calls>a(x=b())</function_calls>", "not a literal"),
        ("olmo3", "<function_calls>a(x=1e999)</function_calls>", "1e309 is not a JSON value"),
        ("pythonic", "[look(word=fox)]", "not a literal"),
        ("llama_json", "<|python_tag|>print(1)", "not valid JSON"),
        ("llama_json", '{"name": "look", "parameters": {"count": NaN}}', "not valid JSON"),
        ("mistral", "[TOOL_CALLS]look", "not part of a call"),
        ("gemma4", "<|tool_call>look{}<tool_call|>", "written call:name"),
        ("harmony", "<|channel|>commentary to=browser.open<|message|>{}", "not part of a call"),
        ("harmony", "<|channel|>analysis to=functions.look<|message|>{}", "analysis channel"),
        ("harmony", "<|channel|>commentary to=functions.look", "no <|message|>"),
    ],
)
def test_a_refusal_says_why(name, text, reason):
    action, status = read(name, text)
    assert status == "malformed" and reason in action.parse_error


def test_older_versions_of_a_dialect_are_read_too():
    look = '"name": "look", "arguments": {"word": "fox", "count": 3}'
    for text, call_id in (
        (f'[TOOL_CALLS] [{{{look}, "id": "123456789"}}]', "123456789"),
        ('[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{"word": "fox", "count": 3}', "123456789"),
        ('[TOOL_CALLS]look{"word": "fox", "count": 3}', "t0007c000"),
    ):
        action, status = read("mistral", text)
        assert (status, calls_of(action)) == ("tool_calls", ONE)
        assert action.tool_calls[0].id == call_id
    text = ' to=functions.look<|channel|>commentary json<|message|>{"count": 3}'
    action, _ = read("harmony", text)
    assert calls_of(action) == [("look", {"count": 3})]
    action, _ = read("llama_json", f"<|python_tag|>{{{look.replace('arguments', 'parameters')}}}")
    assert calls_of(action) == ONE


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def m3(text):
    """MiniMax M3's mark before each tag."""
    mark = "]<]minimax[>["
    return ("" if text.startswith("@") else mark) + text.replace("@", mark)


TOKYO = ("get_weather", {"city": "Tokyo"})


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("seed_oss",
         "<seed:think>The budget is 512.</seed:cot_budget_reflect>\nI call <seed:tool_call>"
         "</seed:tool_call>.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n"
         "<parameter=city>Tokyo</parameter>\n</function>\n</seed:tool_call>", [TOKYO]),
        ("granite3", '<|tool_call|> [{"arguments": {"city": "Tokyo"}, "name": "get_weather"},\n'
         '{"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}]',
         [TOKYO, ("get_time", {"timezone": "Asia/Tokyo"})]),
        ("granite3", '<|tool_call|> {"name": "f", "arguments": {', None),
        ("jamba",
         ' Sure! <tool_calls>[\n  {"name": "get_weather", "arguments": {"city": "Tokyo"}}\n]'
         "</tool_calls>", [TOKYO]),
        ("jamba", '<think>hm</think><answer>So.</answer><tool_calls>[{"name": "get_weather", '
         '"arguments": {"city": "Tokyo"}}]</tool_calls>', [TOKYO]),
        ("hermes", 'One call.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": '
         '{"city": "Tokyo"}}\n</tool_call>\n', [TOKYO]),
        ("xlam",
         '<think>I\'ll help.</think>[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]',
         [TOKYO]),
        ("functiongemma", "Wait. <start_function_call>call:get_weather{city:<escape>Tokyo<escape>}"
         "<end_function_call><start_function_call>call:f{n:3,b:true}<end_function_call>",
         [TOKYO, ("f", {"n": 3, "b": True})]),
        ("cohere", "<|START_THINKING|> i will call<|END_THINKING|><|START_ACTION|>\n[\n"
         '  {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Tokyo"}},'
         '\n  {"tool_call_id": "1", "tool_name": "b", "parameters": {"x": 42}}\n]\n'
         "<|END_ACTION|>", [TOKYO, ("b", {"x": 42})]),
        ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="get_weather">'
         '<steptml:parameter name="city">Tokyo</steptml:parameter></steptml:invoke>'
         "<｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>function<｜tool_sep｜>f\n"
         '<steptml:invoke name="f"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
         [TOKYO, ("f", {})]),
        ("step3",
         '<｜tool_call_begin｜><steptml:invoke name="f"></steptml:invoke><｜tool_call_end｜>',
         None),
        ("longcat", '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Tokyo"}}'
         '</longcat_tool_call>\n<longcat_tool_call>{"name": "f", "arguments": {}}'
         "</longcat_tool_call>", [TOKYO, ("f", {})]),
        ("longcat", "Text with <longcat_tool_call>invalid json", None),
        ("apertus", '<|tools_prefix|>[{"get_weather": {"city": "Tokyo"}}, {"f": {"a": [1]}}]'
         "<|tools_suffix|>", [TOKYO, ("f", {"a": [1]})]),
        ("apertus", '<|tools_prefix|>[{"get_weather": {"city": "Tokyo"}}', None),
        ("apertus", '<|tools_prefix|>[{"a": {}, "b": {}}]<|tools_suffix|>', None),
        ("nemotron_v2",
         'Let me check that.<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]'
         "</TOOLCALL>", [TOKYO]),
        ("nemotron_v2", '<TOOLCALL>[{"name": "broken", "arguments": {}</TOOLCALL>', None),
        ("deepseek_v4", 'Let me check. <｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
         '<｜DSML｜parameter name="city" string="true">Tokyo</｜DSML｜parameter>\n'
         "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", [TOKYO]),
        ("deepseek_v4", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n'
         "</｜DSML｜function_calls>", None),
        ("granite3", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]',
         [TOKYO]),
        ("granite3", '<think>hm<tool_call>[{"name": "get_weather", "arguments": {}}]', None),
        ("phi4", ' functools[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]', [TOKYO]),
        ("phi4", 'functools[{"name": "get_weather", "arguments": {"city": "Tokyo"}', None),
        ("command_r",
         'Action:\n```json\n[{"tool_name": "get_weather", "parameters": {"city": "Tokyo"}}]```',
         [TOKYO]),
        ("command_r", 'Plan.\nAction: ```json\n[{"tool_name": "get_weather"', None),
        ("command_r",
         'Action:\n```json\n[{"tool_name": "f", "parameters": {"code": "```x```"}}]\n```\n',
         [("f", {"code": "```x```"})]),
        ("command_r", 'Action: ```json\n[{"tool_name": "f", "parameters": {}}]', None),
        ("command_r", 'Action: ```json\n[{"tool_name": "f", "parameters": {}}]``` So.', None),
        ("deepseek_v3",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
         '```json\n{"city": "Tokyo"}```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [TOKYO]),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="a&amp;b&quot;c" index="1"<|sep|>'
         '<|open|>argument key="k" type="array"<|sep|>[1]<|close|>argument<|sep|>'
         "<|close|>call<|sep|><|close|>tools<|sep|>", [('a&b"c', {"k": [1]})]),
        (
            "minimax_m3",
            m3('<tool_call>\n@<invoke name="f">@<a>@<item>1@</item>@<item>@<b>x@</b>@</item>@</a>')
            + m3("@<c>@<d>@</d>@</c>@</invoke>\n@</tool_call>"),
            [("f", {"a": [1, {"b": "x"}], "c": {"d": ""}})],
        ),
        ("minimax_m3", m3('<tool_call>@<invoke name="f">@<a>1@</b>@</invoke>@</tool_call>'), None),
        ("minimax_m3", m3('<tool_call>@<invoke name="f">@<a>1@</invoke>@</tool_call>'), None),
        ("minimax_m3", m3('<tool_call>@<invoke name="f">@<a>@<b>1@</a>@</invoke>@</tool_call>'),
         None),
        ("minimax_m3",
         m3('<tool_call>@<invoke name="f">@<a>1@</a>@<a>2@</a>@</invoke>@</tool_call>'), None),
        (
            "minimax_m3",
            m3('<tool_call>@<invoke name="f">' + "@<a>" * 200 + "@</a>" * 200)
            + m3("@</invoke>@</tool_call>"),
            None,
        ),
        ("seed_oss",
         "<seed:tool_call><function=get_weather><parameter=city>Tokyo\n</parameter></function>"
         "</seed:tool_call>", [("get_weather", {"city": "Tokyo\n"})]),
        ("minicpm5",
         '<function name="f"><param name="a"><![CDATA[<b> </param>]]></param></function>',
         [("f", {"a": "<b> </param>"})]),
        ("minicpm5", '<function name="f"><param name="a">x[y[0]]></param></function>',
         [("f", {"a": "x[y[0]]>"})]),
        ("minicpm5", '<function name="f"><param name="a"><![CDATA[<b></param></function>', None),
        ("minicpm5",
         'Intro.\n<function name="get_weather"><param name="city"><![CDATA[To\nkyo]]></param>'
         '</function>\nTXT\n<function name="sum"><param name="n">[1, 2]</param></function>\n',
         [("get_weather", {"city": "To\nkyo"}), ("sum", {"n": [1, 2]})]),
        ("minicpm5", '<function name="get_weather"><param>x</param></function>', None),
        ("minicpm5",
         '<function name="f"><param name="a">1</param><param name="a">2</param></function>', None),
    ],
)  # fmt: skip
def test_the_fields_own_strings(name, text, calls):
    """In the shapes of vLLM's own tests; None is a turn that is refused."""
    action, status = DIALECTS[name].read_turn(text, [WEATHER], turn_id=0)
    assert status == ("malformed" if calls is None else "tool_calls"), action
    assert calls_of(action) == (calls or [])


def test_code_in_an_answer_of_command_r_is_text():
    text = "Run this:\n```python\nprint(1)\n```\nIt prints 1."
    action, status = DIALECTS["command_r"].read_turn(text, [WEATHER], turn_id=0)
    assert (status, action.text) == ("text", text)


def test_marks_around_an_answer_are_no_part_of_it():
    text = "<|START_THINKING|>hm<|END_THINKING|>\n<|START_RESPONSE|>foo bar<|END_RESPONSE|>"
    action, status = read("cohere", text)
    assert (status, action.reasoning, action.text) == ("text", "hm", "foo bar")
    action, _ = read("jamba", "<think>\nhm\n</think>\n<answer>\nIt is 42.\n</answer>")
    assert action.text == "It is 42."


def test_calls_without_delimiters_need_tools():
    for name in ("llama_json", "pythonic", "xlam"):
        text = FAMILIES[name].calls(ONE)
        action, status = DIALECTS[name].read_turn(text, [], turn_id=0)
        assert (status, action.text) == ("text", text)
    action, status = read("llama_json", '{"answer": 3}')
    assert status == "text"
    action, status = DIALECTS["text"].read_turn("<think><tool_call>", [LOOK], turn_id=0)
    assert (status, action.text) == ("text", "<think><tool_call>")


def test_a_wrong_dialect_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"rollout.dialect = 'qwen' is unknown.*one of auto"):
        Renderer(make_tokenizer(CHATML), dialect="qwen")
    with pytest.raises(ConfigError, match=r"no response_template in its tokenizer_config.json"):
        Renderer(make_tokenizer(CHATML), dialect="response_template")
    with pytest.raises(ConfigError, match=r"rollout.dialect = 'glm4': it does not read.*'auto'"):
        Renderer(make_tokenizer(CHATML), dialect="glm4")
    odd = CHATML.replace("<tool_call>", "<<call>>")
    with pytest.raises(ConfigError, match=r"'auto': no dialect reads.*<<call>>.*'text'"):
        Renderer(make_tokenizer(odd))
    assert Renderer(make_tokenizer(odd), dialect="text").dialect.name == "text"


def test_a_dry_run_finds_the_dialect_without_the_tokenizer(tmp_path):
    assert read_template("Qwen/Qwen3-0.6B", {}, "auto") is None
    for name, family in FAMILIES.items():
        family.tokenizer().save_pretrained(tmp_path / name)
        assert read_template(str(tmp_path / name), {}, "auto").dialect.name == name


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<thought>", "close": "</thought>"},
        "tool_calls": {
            "open_pattern": r"\s*<<call>>",
            "close_pattern": r"<</call>>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}


def test_a_checkpoint_may_bring_its_own_response_template():
    dialect = from_response_template(RESPONSE_TEMPLATE)
    call = '<<call>>{"name": "look", "arguments": {"word": "fox", "count": 3}}<</call>>'

    def result(text, prompt_end=""):
        action, status = dialect.read_turn(text, [LOOK], turn_id=0, prompt_end=prompt_end)
        return status, action.reasoning, action.text, calls_of(action)

    assert result("It is 42.<|im_end|>") == ("text", "", "It is 42.", [])
    assert result(f"So.{call}<|im_end|>") == ("tool_calls", "", "So.", ONE)
    assert result(f"{call}\n{call}") == ("tool_calls", "", "", ONE * 2)
    assert result(f"<thought>{call}</thought>ok") == ("text", call, "ok", [])
    opened = "<|im_start|>user\n<thought><|im_end|>\n<|im_start|>assistant\n<thought>"
    assert result(f"{call}</thought>ok", opened) == ("text", call, "ok", [])
    assert result(f"<thought>{call}")[3] == []
    for text in (call[:-6], call.replace(":", ""), call.replace("look", "")):
        assert result(text)[0] == "malformed"
    tokenizer = make_tokenizer(
        CHATML.replace("<tool_call>", "<<call>>").replace("</tool_call>", "<</call>>")
    )
    tokenizer.response_template = RESPONSE_TEMPLATE
    assert Renderer(tokenizer).dialect.name == "response_template"
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(ConfigError, match="response_template cannot be used"):
        Renderer(tokenizer)


def test_a_template_that_writes_numbers_as_text_has_a_dialect_all_the_same():
    """vLLM's template for Llama 4 writes `count="3"`; a policy may write `count=3`."""
    family = FAMILIES["pythonic"]
    quoted = family.template.replace("{{ v | tojson }}", '"{{ v }}"')
    assert quoted != family.template
    assert Renderer(make_tokenizer(quoted, special=family.special)).dialect.name == "pythonic"


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        ("", ("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2"),
        ("", ("<|tool_call_start|>",), "hermes"),
        ("", ("<|tool_call|>", "<|/tool_call|>"), "phi4"),
        ("", ("<|tool_call|>",), "granite3"),
        ("{# answer with <|tool_call|> and a JSON list #}", (), "granite3"),
        ("", ("<tool_call>", "</tool_call>"), "hermes"),
        ("", (), "hermes"),
    ],
)
def test_a_template_without_calls_is_asked_for_both_delimiters(
    tmp_path, template, special, expected
):
    """In the template, then among the tokens that the tokenizer was given for it."""
    chatml = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template + chatml, special=("<|im_end|>", "<|im_start|>", *special))
    assert Renderer(tokenizer).dialect.name == expected
    tokenizer.save_pretrained(tmp_path)
    found = read_template(str(tmp_path), {}, "auto")
    assert found is not None and found.dialect.name == expected
