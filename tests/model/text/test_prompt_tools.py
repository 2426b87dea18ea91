"""Templates that show no tools: found, refused, and served by describing the tools themselves."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers_for_tests import make_tokenizer

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.model.text.renderer import Renderer
from agentrl.model.text.template import TOOL
from agentrl.rollout.setup import require_shown_tools

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + CHATML
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
SPECIAL = ("<|im_end|>", "<|im_start|>")
USER: Any = {"role": "user", "content": "Find it."}
CALL: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": {"word": "it"}}}
    ],
}
ANSWERS: Any = [
    {"role": "tool", "content": "one", "tool_call_id": "a", "name": "lookup"},
    {"role": "tool", "content": "two", "tool_call_id": "b", "name": "lookup"},
]


def renderer_of(template: str, **options: Any) -> Renderer:
    return Renderer(make_tokenizer(template, special=SPECIAL), **options)


def text_of(renderer, ids) -> str:
    return renderer.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "tools", "hidden"),
    [
        (CHATML, "template", True),
        (NO_SYSTEM, "template", True),
        (WITH_TOOLS, "template", False),
        (CHATML, "prompt", False),
        (NO_SYSTEM, "prompt", False),
    ],
)
def test_it_is_found_whether_a_prompt_shows_tools(template, tools, hidden):
    assert renderer_of(template, tools=tools).template.hides_tools == hidden


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_described_tool_is_called_and_answers(system):
    renderer = renderer_of(CHATML, tools="prompt")
    assert renderer.dialect.name == "hermes" and renderer.history == "append_only"
    ids = renderer.prompt([*system, USER], [TOOL])
    prompt = text_of(renderer, ids)
    assert "Look a word up." in prompt and prompt.count("<|im_start|>system") == 1
    assert ("Be brief.\n\n# Tools" in prompt) == bool(system)
    turn = '<tool_call>\n{"name": "lookup", "arguments": {"word": "it"}}\n</tool_call><|im_end|>'
    sampled = renderer.tokenizer.encode(turn, add_special_tokens=False)
    row = [*ids, *sampled]
    action, status = renderer.read_turn(row, len(ids), [TOOL], turn_id=0)
    assert status == "tool_calls" and action.tool_calls[0].arguments == {"word": "it"}
    row += renderer.suffix(ANSWERS, closed_by=sampled[-1])
    answers = (
        "user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|"
    )
    assert answers in text_of(renderer, row)
    assert row == renderer.prompt([*system, USER, CALL, *ANSWERS], [TOOL])


def test_a_template_without_a_system_role_gets_the_description_from_the_user():
    renderer = renderer_of(NO_SYSTEM, tools="prompt")
    prompt = text_of(renderer, renderer.prompt([USER], [TOOL]))
    assert prompt.startswith("<|im_start|>user\n# Tools") and "\n\nFind it.<|im_end|>" in prompt


def test_without_tools_nothing_is_added():
    plain, prompted = renderer_of(CHATML), renderer_of(CHATML, tools="prompt")
    assert plain.prompt([USER], []) == prompted.prompt([USER], [])


@pytest.mark.parametrize("tools", ["template", "prompt", "hidden"])
async def test_a_run_whose_model_would_not_see_its_tools_is_refused(tools):
    async def info(env_id, env_config):
        return SimpleNamespace(tools=[TOOL])

    config = RunConfig.model_validate(
        {"env": {"id": "e"}, "model": {"path": "m"}, "rollout": {"tools": tools}}
    )
    env = SimpleNamespace(info=info)
    check = require_shown_tools(env, config, renderer_of(CHATML, tools=tools))  # type: ignore[arg-type]
    expected = nullcontext()
    if tools == "template":
        says = r"tools \(lookup\).*rollout.tools = 'prompt'"
        expected = pytest.raises(ConfigError, match=says)
    with expected:
        await check
