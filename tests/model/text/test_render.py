import pytest
from dialect_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CHATML, DROPS_THINKING, NO_CLOSE_TOKEN, make_tokenizer

from agentrl.errors import ConfigError
from agentrl.model.text.renderer import MAX_PROMPTS, Renderer
from agentrl.model.text.template import RAW

CHATML_RENDERER = Renderer(make_tokenizer(CHATML))
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
# Text that a template's own markers are made of must stay text of its message.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), max_size=30)


def test_the_self_test_tells_templates_apart():
    assert CHATML_RENDERER.history == "append_only"
    assert Renderer(make_tokenizer(DROPS_THINKING)).history == "fork"
    forced = Renderer(make_tokenizer(DROPS_THINKING), history="append_only")
    assert forced.history == "append_only"


def test_a_template_that_takes_no_tools_serves_without_them():
    template = DROPS_THINKING.replace(
        "{% for message in messages %}<|im_start|>",
        "{% for message in messages %}{% if message.role == 'tool' %}"
        "{{ raise_exception('no such role') }}{% endif %}<|im_start|>",
    )
    assert Renderer(make_tokenizer(template)).history == "fork"
    keeps = template.replace("loop.index0 < last.user", "false")
    assert Renderer(make_tokenizer(keeps)).history == "append_only"


TOOLS_ONLY = CHATML.replace("{% if tools %}", "{% if true %}")


def test_a_template_for_tools_only_gets_an_empty_list_where_there_are_none():
    renderer = Renderer(make_tokenizer(TOOLS_ONLY))
    asked = [{"role": "user", "content": "hi"}]
    assert renderer.history == "append_only" and not renderer.template.hides_tools
    text = renderer.tokenizer.decode(renderer.prompt(asked, []))
    assert text.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhi")
    assert "look" in renderer.tokenizer.decode(renderer.prompt(asked, [TOOL]))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('one message at a time') }}", "one message at a time"),
        ("{{ functions.names }}" + CHATML, "'functions' is undefined"),
        ("{{ messages.count() + 'x' }}" + CHATML, "TypeError"),
        ("{{ (messages | map('length')) | tojson }}" + CHATML, "not JSON serializable"),
        ("<|im_start|>{{ messages[0].content }}<|im_end|>", "does not write what an assistant"),
        (
            CHATML.replace(
                "{{ message.content }}",
                "{% for part in message.content %}{{ part.text }}{% endfor %}",
            ),
            "takes contents as lists of parts",
        ),
    ],
)
def test_a_template_that_renders_no_dialogue_is_refused_in_words(template, reason):
    with pytest.raises(ConfigError, match=reason):
        Renderer(make_tokenizer(template))


def test_prompts_without_a_template_are_the_texts_alone():
    renderer = Renderer(make_tokenizer(RAW))
    tokenizer = renderer.tokenizer
    assert renderer.history == "append_only" and renderer.template.hides_tools
    asked = [{"role": "user", "content": "What is 2+2?"}]
    row = renderer.prompt(asked, [])
    assert tokenizer.decode(row) == "What is 2+2?"
    said, heard = {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}
    row = row + renderer.assistant_turn(said)
    assert row[-1] == tokenizer.eos_token_id
    row = row + renderer.suffix([heard], closed_by=row[-1])
    assert row == renderer.prompt([*asked, said, heard], [])


def test_unusable_tokenizers_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(make_tokenizer(None))
    with pytest.raises(ConfigError, match="close an assistant turn with one special token"):
        Renderer(make_tokenizer(NO_CLOSE_TOKEN))


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.booleans())
@settings(max_examples=60)
def test_growing_a_row_equals_rendering_the_dialogue_whole(turns, with_tools):
    renderer, tools = CHATML_RENDERER, [TOOL] if with_tools else []
    messages = [{"role": "user", "content": "go"}]
    row = renderer.prompt(messages, tools)
    for said, heard in turns:
        assistant = {"role": "assistant", "content": said}
        observation = {"role": "tool" if with_tools else "user", "content": heard}
        row = row + renderer.assistant_turn(assistant)
        row = row + renderer.suffix([observation], closed_by=row[-1])
        messages += [assistant, observation]
    whole = renderer.prompt(messages, tools)
    tokenizer = renderer.tokenizer
    # The same text always; the same ids unless a merge crosses the generation prompt's border,
    # which sampling would never produce.
    assert tokenizer.decode(row, skip_special_tokens=False) == tokenizer.decode(
        whole, skip_special_tokens=False
    )
    if not any(said[:1].isspace() or not said for said, _ in turns):
        assert row == whole


def test_a_turn_cut_by_length_is_closed_by_the_template():
    observation = [{"role": "user", "content": "more"}]
    closed = CHATML_RENDERER.suffix(observation, closed_by=CHATML_RENDERER.close_token_id)
    cut = CHATML_RENDERER.suffix(observation, closed_by=None)
    assert cut == [CHATML_RENDERER.close_token_id, *closed]


def test_a_run_names_more_tokens_that_end_a_turn():
    plain = CHATML_RENDERER
    encode = plain.tokenizer.encode
    (end,) = encode("<|endoftext|>")
    (dot,) = encode(".")
    renderer = Renderer(make_tokenizer(CHATML), stop_token_ids=[end, dot])
    assert set(renderer.stop_token_ids) == {*plain.stop_token_ids, end, dot}
    assert renderer.history == "append_only" and renderer.close_token_id == plain.close_token_id
    assert renderer.decode(encode("So.")) == "So"
    observation = [{"role": "user", "content": "And?"}]
    assert renderer.suffix(observation, closed_by=dot)[0] == renderer.close_token_id
    with pytest.raises(ConfigError, match="stop_token_ids: the tokenizer has no token 99999"):
        Renderer(make_tokenizer(CHATML), stop_token_ids=[99999])


def test_several_observations_in_one_suffix():
    observations = [
        {"role": "tool", "content": "one", "tool_call_id": "a"},
        {"role": "tool", "content": "two", "tool_call_id": "b"},
    ]
    text = CHATML_RENDERER.tokenizer.decode(
        CHATML_RENDERER.suffix(observations, closed_by=CHATML_RENDERER.close_token_id),
        skip_special_tokens=False,
    )
    assert text == (
        "\n<|im_start|>tool\none<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_decoding_drops_stop_tokens_at_the_end_only():
    tokenizer = CHATML_RENDERER.tokenizer
    end = CHATML_RENDERER.close_token_id
    ids = tokenizer.encode("<tool_call>a", add_special_tokens=False)
    assert CHATML_RENDERER.decode([*ids, end]) == "<tool_call>a"
    assert CHATML_RENDERER.decode([end, *ids]) == "<|im_end|><tool_call>a"


@given(st.lists(st.integers(0, 300), max_size=30))
def test_decoding_is_the_tokenizers_own(token_ids):
    renderer = CHATML_RENDERER
    kept = [token for token in token_ids if token not in renderer.stop_token_ids]
    assert renderer.decode(kept) == renderer.tokenizer.decode(kept, skip_special_tokens=False)


@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), st.text(max_size=40)), max_size=3))
@settings(max_examples=60)
def test_spliced_suffixes_equal_rendered_ones(observation):
    messages = [{"role": role, "content": content} for role, content in observation]
    assert CHATML_RENDERER._tail(messages) == CHATML_RENDERER._render_tail(messages)


@pytest.mark.parametrize(
    "content",
    ["message.content | trim", "message.content | e", "message.content.split('</think>')[-1]"],
)
def test_a_template_that_edits_contents_is_rendered_every_time(content):
    template = CHATML.replace("message.content", content)
    assert template != CHATML
    renderer = Renderer(make_tokenizer(template))
    for text in (" spaces ", "<b>", "<think>x</think>y", "plain"):
        messages = [{"role": "user", "content": text}]
        assert renderer._tail(messages) == renderer._render_tail(messages)
    assert renderer._frame((("role", "user"), ("content", ""))) is None


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_encoding_is_the_tokenizers_own(text):
    renderer = CHATML_RENDERER
    text = "<|im_end|>\n<tool_call>" + text
    expected = renderer.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert renderer._encode(text) == expected
    assert renderer.tokenizer.encode(text, add_special_tokens=False) == expected


def test_a_prompt_is_rendered_once_per_group_and_handed_out_as_a_copy():
    renderer = Renderer(make_tokenizer())
    rendered = []
    text = renderer._text

    def count(messages, tools, generation_prompt):
        rendered.append(messages)
        return text(messages, tools, generation_prompt)

    renderer._text = count
    tool = {"type": "function", "function": {"name": "look"}}
    first = renderer.prompt([{"role": "user", "content": "x"}], [tool])
    first.append(0)
    again = renderer.prompt([{"role": "user", "content": "x"}], [tool])
    assert again == first[:-1] and len(rendered) == 1
    others = [
        renderer.prompt([{"role": "user", "content": "x"}], []),
        renderer.prompt([{"role": "system", "content": "x"}], [tool]),
        renderer.prompt([{"role": "user", "content": "x", "name": "y"}], [tool]),
    ]
    assert len(rendered) == 4
    assert len({tuple(ids) for ids in [again, *others]}) == 3, "the template ignores names"
    for number in range(MAX_PROMPTS):
        renderer.prompt([{"role": "user", "content": str(number)}], [])
    assert len(renderer._prompts) == MAX_PROMPTS
    num_rendered = len(rendered)
    assert renderer.prompt([{"role": "user", "content": "x"}], [tool]) == again
    assert len(rendered) == num_rendered + 1, "the oldest was dropped"


def test_prompts_that_cannot_be_kept_are_rendered_every_time():
    odd = [{"role": "user", "content": "\ud83d"}]  # half of a surrogate pair has no bytes
    assert CHATML_RENDERER._prompt_key(odd, []) is None
    dated = Renderer(make_tokenizer("{{ strftime_now('%H%M%S%f') }}" + CHATML), history="fork")
    messages = [{"role": "user", "content": "x"}]
    assert dated.prompt(messages, []) != dated.prompt(messages, [])
    assert None not in dated._prompts and None not in CHATML_RENDERER._prompts


def test_an_answer_may_hold_the_words_of_the_dummy_turn():
    for name in ("llama_json", "hermes", "mistral"):
        renderer = Renderer(FAMILIES[name].tokenizer(), history="append_only")
        call_id = renderer.dialect.call_id.format(turn=0, index=0, name="look")
        for said in ("agentrl-dummy-argument", "agentrl-dummy-argument-", "agentrl-dummy-turn"):
            content = f"before {said} after"
            answer = {"role": "tool", "content": content, "tool_call_id": call_id, "name": "look"}
            suffix = renderer.suffix([answer], closed_by=None)
            assert content in renderer._decode(suffix, skip_special_tokens=False)
            assert content in renderer._render_tail([answer])
