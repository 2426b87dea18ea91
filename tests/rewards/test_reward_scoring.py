"""`[reward]` of a run file: scoring finished groups, through the scheduler and the real search
environment, and what becomes of failures and of references."""

import asyncio
import json
from typing import Any

import pytest
from rollout_scripted import ScriptedEngine, scheduler_of
from tokenizers_for_tests import make_tokenizer

from agentrl.config import RewardSection
from agentrl.env import Environment, Task, register
from agentrl.env.client import connect
from agentrl.errors import ConfigError, GraderError
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.driver import Limits
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import RolloutBatch, TaskSource
from agentrl.types import StopReason, Trajectory, TrajectoryError, samples_of
from agentrl_rewards.scoring import GroupScorer

CANARY = "Quux 7731"
LIMITS = Limits(max_turns=3, turn_timeout_s=20, step_timeout_s=20, episode_timeout_s=60)


@register("scoring-test")
class ScoringTest(Environment):
    """Talks until it hears `end`; its own reward is 5, and 1 for every turn before."""

    def splits(self):
        return {"train": 2}

    def get(self, split, index):
        return Task(f"{split}/{index}", "say something", reference=CANARY)

    def on_text(self, text):
        if text.startswith("end"):
            info = {"reference": self.task.reference, "metadata": {"kind": "test"}}
            self.finish(5.0, info=info)
            return None
        return [{"role": "user", "content": "w " * 2000 if text == "flood" else "go on"}]


@register("scoring-test-silent")
class SilentTest(Environment):
    """Ends at once and reports no reference."""

    def splits(self):
        return {"train": 2}

    def get(self, split, index):
        return Task(f"{split}/{index}", "say something", reference=CANARY)

    def on_text(self, text):
        self.finish(5.0)


def play(say, score, *, env_id="scoring-test", group_size=1, **env_config: Any):
    """One group; also the prompts that the engine read, as text."""
    renderer = Renderer(make_tokenizer())
    engine = ScriptedEngine(renderer, say)

    async def run() -> RolloutBatch:
        env = connect()
        scheduler = scheduler_of(
            TokenPolicy(engine, renderer, max_turn_tokens=200, max_context_tokens=1500),
            env,
            TaskSource("train", 2, seed=1, shuffle=False),
            env_id=env_id,
            env_config=env_config,
            group_size=group_size,
            limits=LIMITS,
            score=score,
        )
        try:
            return await scheduler.collect(1)
        finally:
            await env.aclose()

    batch = asyncio.run(run())
    read = [renderer.tokenizer.decode(ids) for ids in engine.prompts.values()]
    return batch.groups[0].trajectories, read


def seen(record: list):
    def function(text, reference, *, prompt, num_tokens, metadata):
        record.append((text, reference, prompt, num_tokens, metadata))
        return {"score": 0.25, "extra": 7.0}

    return function


def test_a_function_gets_text_reference_prompt_tokens_and_metadata():
    record: list = []
    [trajectory], _ = play(
        lambda request, _: "more" if request.endswith("t000") else "end it",
        GroupScorer([seen(record)], weights=[2.0]),
    )
    prompt = [{"role": "user", "content": "say something"}]
    sampled = trajectory.num_sampled_tokens
    assert record == [("end it", CANARY, prompt, sampled, {"kind": "test"})]
    assert trajectory.reward == 0.5
    assert trajectory.reward_components == {"function": 0.25, "function/extra": 7.0}
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.5]
    assert trajectory.metrics["reward"] == 5.0  # the environment's own
    [sample] = samples_of(trajectory)
    assert sample.reward == 0.5 and sample.turn_rewards.tolist() == [0.0, 0.5]


def test_it_may_add_to_the_environment():
    [trajectory], _ = play(lambda *_: "end", GroupScorer([seen([])], add_to_environment=True))
    assert trajectory.reward == trajectory.turns[-1].reward == 5.25
    assert "reward" not in trajectory.metrics

    def em(text, reference):
        return 1.0

    search = {"dialect": "tags", "report_reference": True}
    with pytest.raises(ConfigError, match="add_to_environment"):
        play(
            lambda *_: "<answer>x</answer>", GroupScorer([em], add_to_environment=True),
            env_id="search", **search,
        )  # fmt: skip


@pytest.mark.parametrize("added", [False, True])
def test_a_function_may_reward_every_turn(added):
    record: list = []

    def steps(text, reference, *, turns):
        record.append([[message["content"] for message in said] for said in turns])
        return [0.5, 0.25]

    [trajectory], _ = play(
        lambda request, _: "more" if request.endswith("t000") else "end it",
        GroupScorer([steps], weights=[2.0], add_to_environment=added),
    )
    assert record == [[["more", "go on"], ["end it"]]]
    own = 5.0 * added
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.5 + own]
    assert [turn.reward_components["steps"] for turn in trajectory.turns] == [0.5, 0.25]
    assert (trajectory.reward, trajectory.reward_components["steps"]) == (1.5 + own, 0.75)
    [sample] = samples_of(trajectory)
    assert sample.turn_rewards.tolist() == [1.0, 0.5 + own]


def test_a_failure_takes_one_trajectory_out_of_the_gradient_and_is_counted():
    def picky(text, reference):
        if text == "end 1":
            raise GraderError("no")
        return float("nan") if text == "end 2" else 1.0

    score = GroupScorer([picky])
    played, _ = play(lambda request, _: f"end {request[12]}", score, group_size=4)
    assert [each.trainable for each in played] == [True, False, False, True]
    assert played[1].error == TrajectoryError("grade", "grader_error", "no")
    assert played[2].error.code == "grader_error"
    assert [each.reward for each in played if each.trainable] == [1.0, 1.0]


def test_a_group_reward_sees_the_members_that_were_played():
    groups = []

    async def longest(samples):
        groups.append([sample.text for sample in samples])
        return [float(len(sample.text)) for sample in samples]

    score = GroupScorer([longest])
    played, _ = play(
        lambda request, _: "end" + "!" * int(request[12]) if request[12] != "1" else 1 / 0,
        score, group_size=3,
    )  # fmt: skip
    assert groups == [["end", "end!!"]]
    assert [each.reward for each in played] == [3.0, 0.0, 5.0]
    assert played[1].error.stage == "generate"


def test_without_a_reference_it_says_what_to_set():
    with pytest.raises(ConfigError, match="report_reference"):
        play(lambda *_: "end", GroupScorer([seen([])]), env_id="scoring-test-silent")
    [trajectory], _ = play(
        lambda *_: "end", GroupScorer(["repetition"]), env_id="scoring-test-silent"
    )
    assert trajectory.reward == 0.0 and trajectory.error is None  # this one needs none
    with pytest.raises(ConfigError, match=r"reward\.text"):
        play(lambda *_: "end", GroupScorer([seen([])], text="answer"))


def test_the_reference_comes_from_any_member_that_reached_the_end():
    """A member that ran out of context never saw the reference; others of the same task did."""
    record: list = []

    def say(request, _):
        return "flood" if request[12] == "0" else "end"

    played, _ = play(say, GroupScorer([seen(record)]), group_size=2)
    assert played[0].stop_reason == StopReason.CONTEXT_LENGTH
    assert [(text, reference) for text, reference, *_ in record] == [
        ("flood", CANARY), ("end", CANARY),
    ]  # fmt: skip
    assert all(each.trainable for each in played)
    [alone], _ = play(lambda *_: "flood", GroupScorer([seen([])]))
    assert alone.error.stage == "grade" and alone.error.code == "no_reference"


@pytest.mark.parametrize("dialect", ["tags", "tools"])
def test_the_search_environment_tells_the_trainer_and_never_the_policy(tmp_path, dialect):
    rows = [{"question": "where?", "answers": [CANARY]}]
    (tmp_path / "q.jsonl").write_text(json.dumps(rows[0]))
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "nothing to see"}))
    turns = {
        "tags": ["<search>where</search>", "nothing", f"<answer>the {CANARY}</answer>"],
        "tools": [
            '<tool_call>{"name": "search", "arguments": {"query": "where"}}</tool_call>',
            "nothing",
            f'<tool_call>{{"name": "answer", "arguments": {{"text": "the {CANARY}"}}}}</tool_call>',
        ],
    }[dialect]
    config = {
        "source": str(tmp_path / "q.jsonl"), "corpus": str(tmp_path / "c.jsonl"),
        "dialect": dialect,
    }  # fmt: skip
    score = GroupScorer(["em", "f1"], weights=[1.0, 0.5], text="answer")

    def say(request, _):
        return turns[int(request[-1])]

    [trajectory], read = play(say, score, env_id="search", report_reference=True, **config)
    assert trajectory.reward == 1.5
    assert trajectory.reward_components == {"em": 1.0, "f1": 1.0}
    assert trajectory.metrics["reward"] == 1.0
    assert len(read) == 3 and not any(CANARY in text for text in read)
    observed = [m["content"] for m in trajectory.messages if m["role"] != "assistant"]
    assert CANARY not in json.dumps(observed)
    with pytest.raises(ConfigError, match="report_reference"):
        play(say, score, env_id="search", **config)


def test_an_episode_that_was_cut_has_an_empty_answer():
    config = {"dialect": "tags", "report_reference": True}
    [trajectory], _ = play(
        lambda *_: "hm", GroupScorer(["em"], text="answer"), env_id="search", **config
    )
    assert trajectory.stop_reason == StopReason.MAX_TURNS
    assert trajectory.reward == 0.0 and trajectory.trainable


def test_trajectories_with_an_error_are_left_as_they_are():
    trajectory = Trajectory("t", "g", "e", "task", 1, reward=3.0)
    trajectory.error = TrajectoryError("step", "env_error", "broken")
    asyncio.run(GroupScorer(["em"])([trajectory]))
    assert trajectory.reward == 3.0 and trajectory.error.code == "env_error"


def test_the_section_of_a_run_file_is_what_the_scorer_takes():
    section = RewardSection.model_validate(
        {
            "functions": "format,em",
            "weights": [0.2, 1],
            "options": {"format": {"style": "search"}},
            "text": "answer",
        }
    )
    assert section.functions == ["format", "em"]
    scorer = GroupScorer(**section.model_dump())
    assert scorer.text == "answer" and scorer.runner.needs_reference == ["em"]


@pytest.mark.parametrize(
    "section",
    [
        {"functions": ["em"], "weights": [1, 2]},
        {"weights": [1]},
        {"functions": ["em"], "options": {"f1": {}}},
        {"add_to_environment": True},
        {"functions": ["em"], "text": "all"},
    ],
)
def test_wrong_sections_are_refused(section):
    with pytest.raises(ValueError):
        RewardSection.model_validate(section)
