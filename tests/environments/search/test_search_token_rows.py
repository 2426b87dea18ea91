"""Training on an episode in Search-R1's dialect covers the policy's own tokens and no others."""

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rollout_scripted import ScriptedEngine, scheduler_of
from tokenizers_for_tests import CHATML, DROPS_THINKING, make_tokenizer

from agentrl.env.client import connect
from agentrl.inference.base import Generation
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import TaskSource
from agentrl.types import Trajectory, samples_of

ROOT = Path(__file__).parents[3]
OSMERE = 2  # In which year did Osmere burn down? 1791
SEARCH = "<think>I look.</think><search>Osmere burnt down</search>"
ANSWER = "<think>So.</think><answer>1791</answer>"


class StopsAtTags(ScriptedEngine):
    """Leaves out the close token where the turn ends with a tag, as a stop string does."""

    async def generate(self, request_id, prompt_ids, sampling) -> Generation:
        made = await super().generate(request_id, prompt_ids, sampling)
        return Generation(made.token_ids[:-1], made.logprobs[:-1], made.versions[:-1], "stop")


def play(turns: list[str], template: str, engine_type=ScriptedEngine, **config: Any):
    renderer = Renderer(make_tokenizer(), template_kwargs={"chat_template": template})
    engine = engine_type(renderer, lambda request, _: turns[int(request[-3:])])
    policy = TokenPolicy(engine, renderer, max_turn_tokens=400, max_context_tokens=8000)
    source = TaskSource("train", 12, seed=1, position=OSMERE, shuffle=False)
    config = {"dialect": "tags", "instruction": "", "top_k": 1, **config}

    async def run() -> Trajectory:
        env = connect()
        scheduler = scheduler_of(policy, env, source, env_id="search", env_config=config)
        try:
            return (await scheduler.collect(1)).trajectories[0]
        finally:
            await env.aclose()

    trajectory = asyncio.run(run())
    assert trajectory.error is None, trajectory.error
    return trajectory, renderer.tokenizer


def trained_text(trajectory: Trajectory, tokenizer) -> str:
    """The tokens with mask 1, in order, of all rows."""
    ids = [
        token
        for sample in samples_of(trajectory)
        for token in sample.token_ids[sample.loss_mask > 0].tolist()
    ]
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, DROPS_THINKING], ids=["chatml", "drops-thinking"])
def test_information_is_never_trained(template):
    said = [SEARCH, "<think>x</think>nothing", f"{SEARCH}<information>made up", ANSWER]
    trajectory, tokenizer = play(said, template)
    assert trajectory.reward == 1.0
    assert trained_text(trajectory, tokenizer) == "".join(f"{text}<|im_end|>" for text in said)
    for row in trajectory.branches:
        seen = tokenizer.decode(
            [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if not m],
            skip_special_tokens=False,
        )
        assert "Osmere was founded" in seen or row is trajectory.branches[0]


def test_what_is_written_after_the_action_has_no_effect():
    made_up = f"{SEARCH}<information>Osmere burnt in 1600</information><answer>1600</answer>"
    trajectory, _ = play([made_up, f"{ANSWER} and so on"], CHATML)
    assert trajectory.reward == 1.0
    assert trajectory.reward_components["format"] == 1.0
    assert trajectory.metrics["searches"] == 1 and trajectory.metrics["overrun_turns"] == 2
    plain, _ = play([SEARCH, ANSWER], CHATML)
    assert "overrun_turns" not in plain.metrics
    assert plain.messages[2] == trajectory.messages[2]  # the same passages were found


def test_the_recipe_s_row_is_search_r1_s_own_text():
    """With the recipe's template, and an engine that stops at the tags, an episode is one turn."""
    recipe = tomllib.loads((ROOT / "examples" / "search" / "search_r1.toml").read_text())
    template = recipe["rollout"]["template"]["chat_template"]
    trajectory, tokenizer = play([SEARCH, ANSWER], template, StopsAtTags)
    [row] = trajectory.branches
    information = trajectory.messages[2]["content"]
    assert information.startswith('\n\n<information>Doc 1(Title: "Osmere")')
    assert tokenizer.decode(row.token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nIn which year did Osmere burn down?<|im_end|>\n<|im_start|>assistant\n"
        f"{SEARCH}{information}{ANSWER}"
    )
    assert trained_text(trajectory, tokenizer) == SEARCH + ANSWER
