"""Templates that edit the past only now and then: each is found at the start or by the audit."""

import pytest
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import CHATML, make_tokenizer

from agentrl.env import Environment, Task, register
from agentrl.env.client import connect
from agentrl.errors import HistoryError
from agentrl.model.text import renderer as render
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.driver import Episode, Limits, play
from agentrl.rollout.policy import TokenPolicy

LOOP = "{% for message in messages %}"
CONTENT = "{{ message.content }}"


def dropping(condition):
    """CHATML without the messages for which the condition holds."""
    return CHATML.replace(LOOP, LOOP + "{% if not (" + condition + ") %}").replace(
        "\n{% endfor %}{% if add_gen", "\n{% endif %}{% endfor %}{% if add_gen"
    )


def writing(content):
    return CHATML.replace(CONTENT, content)


OLD = "loop.index0 < messages | length - 4"
FOOLING = {
    "drops old answers": dropping(
        f"messages | length > 9 and message.role == 'assistant' and {OLD}"
    ),
    "drops all but the last forty": dropping("loop.index0 < messages | length - 40"),
    "drops old answers of tools": dropping(
        "messages | length > 20 and message.role == 'tool' and loop.index0 < messages | length - 3"
    ),
    "drops thoughts after thirty messages": writing(
        "{% if messages | length > 30 and not loop.last and '</think>' in message.content %}"
        "{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}"
    ),
    "cuts old contents that are very long": writing(
        "{{ message.content if loop.last or message.content | length < 9000 else 'cut' }}"
    ),
    "a very late system text at the end": CHATML.replace(
        "{% if add_generation",
        "{% if messages | length > 24 %}<|im_start|>system\nHurry.<|im_end|>\n{% endif %}"
        "{% if add_generation",
    ),
    "starts anew when all is long": dropping(
        "(messages | map(attribute='content') | join | length) > 30000 and not loop.last"
    ),
    "answers of one error hide the call before": dropping(
        "loop.index0 + 1 < messages | length and messages[loop.index0 + 1].content[:6] == 'Error:'"
        " and loop.index0 + 4 < messages | length"
    ),
    "trims what is not new": writing(
        "{{ message.content if loop.last else message.content | trim }}"
    ),
    "drops what was said before": dropping(
        "loop.index0 > 18 and message.content in messages[:loop.index0] | map(attribute='content')"
        " | list and not loop.last"
    ),
    "counts tokens of the past": "{{ messages | map(attribute='content') | join | length > 9000 }}"
    + CHATML,
    "begins thoughts after twenty": CHATML.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if messages | length > 20 %}<think>\n{% endif %}{% endif %}",
    ),
    "says who spoke last": "{{ messages[-1].content[:6] == 'Error:' }}" + CHATML,
    "tools are named again after twenty": CHATML.replace(
        "{% if tools %}", "{% if tools and messages | length < 20 %}"
    ),
}


def dialogue(renderer, seed):
    """Plays on, the way `TokenPolicy` does; whether the row is the whole render, now and then."""
    tool = {"type": "function", "function": {"name": "look", "description": "Look."}}
    tools = [tool] if seed % 2 else []
    messages = [{"role": "user", "content": "go"}]
    row = renderer.prompt(messages, tools)
    for turn in range(30):
        said = {"role": "assistant", "content": f"<think>hm</think>step {turn}"}
        heard = (
            "Error: no"
            if (turn + seed) % 7 == 3
            else f"{turn} " * (4000 if turn == 20 else 8 << min(turn, 6))
        )
        observation = [{"role": "tool" if tools else "user", "content": heard}]
        if tools and turn % 5 == 4:
            observation.append({"role": "tool", "content": "and this"})
        messages += [said, *observation]
        behind = renderer.continuation(
            messages, len(observation), tools, closed_by=renderer.close_token_id
        )
        if behind is None:
            row = renderer.prompt(messages, tools)
        else:
            row = row + renderer.assistant_turn(said) + behind
        yield turn != 25 or row == renderer.prompt(messages, tools)


@pytest.mark.parametrize("name", FOOLING)
def test_a_template_that_edits_the_past_is_found(name, monkeypatch):
    monkeypatch.setattr(render, "AUDIT_EVERY", 7)
    assert FOOLING[name] != CHATML
    renderer = Renderer(make_tokenizer(FOOLING[name]))
    if renderer.history == "fork":
        return
    with pytest.raises(HistoryError, match=r"of \d+ messages.*rollout.history = \"fork\""):
        for seed in range(6):
            list(dialogue(renderer, seed))
    assert renderer.history == "fork"
    assert all(exact for exact in dialogue(renderer, 1))


def test_an_honest_template_raises_no_alarm(monkeypatch):
    monkeypatch.setattr(render, "AUDIT_EVERY", 7)
    renderer = Renderer(make_tokenizer(CHATML))
    assert all(exact for exact in dialogue(renderer, 1))
    assert renderer.history == "append_only" and renderer.num_audited == 30


def test_few_turns_are_audited():
    renderer = Renderer(make_tokenizer(CHATML))
    short = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for _ in range(2 * render.AUDIT_EVERY):
        renderer.continuation([*short, short[0]], 1, [], closed_by=None)
    assert renderer.num_audited == 3, "the first, and one of a hundred"
    forced = Renderer(make_tokenizer(CHATML), history="append_only")
    forced.continuation([*short, short[0]], 1, [], closed_by=None)
    assert forced.num_audited == 0, "who forces it wants what the template would not write"


@register("history-test")
class HistoryTest(Environment):
    def splits(self):
        return {"train": 1}

    def get(self, split, index):
        return Task("t", "Count.")

    async def on_text(self, text: str):
        return "more " * 9 if text != "end" else self.finish(reward=1.0)


async def test_the_episode_that_finds_it_is_recorded_as_failed():
    template = FOOLING["drops all but the last forty"]
    engine = ScriptedEngine(
        Renderer(make_tokenizer(template)),
        lambda request_id, _: "end" if request_id.endswith("024") else "go on",
    )
    policy = TokenPolicy(engine, engine.renderer, max_turn_tokens=50, max_context_tokens=60000)
    recorded = []

    env = connect(None)
    policy.reserve(2)
    for number in range(2):
        episode = Episode(f"e{number}", "g", "history-test", "train", 0, 0, {})
        await play(episode, policy, env, Limits(30, 60, 60, 300), recorded.append)
    await env.aclose()
    failed, exact = recorded
    assert (failed.error.code, failed.error.stage) == ("history_error", "render")
    assert len(failed.turns) == 20, "before the first turn that would have read another past"
    assert exact.error is None and exact.reward == 1.0 and len(exact.branches) > 1
