import asyncio
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
from env_servers import running
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_scripted import LIMITS, ScriptedEngine, scheduler_of
from tokenizers_for_tests import CHATML, DROPS_THINKING, make_tokenizer

from agentrl.env import Environment, Task, register, reward, tool
from agentrl.env.client import connect
from agentrl.env.protocol import make_error
from agentrl.errors import GraderError
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.driver import MAX_RESTARTS, Episode, play
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import StopReason, samples_of

CALL = '<tool_call>{"name": "look", "arguments": {"word": "w"}}</tool_call>'


@register("driver-test")
class DriverTest(Environment):
    """Answers `look` calls; a text ends the episode with reward 1, unless it asks for trouble."""

    heard: ClassVar[list[str]] = []

    def splits(self):
        return {"train": 5, "empty": 0}

    def get(self, split, index):
        return Task(f"{split}-{index}", f"question {index}")

    @tool
    async def look(self, word: str) -> str:
        return f"found {word}"

    async def on_text(self, text: str):
        DriverTest.heard.append(text)
        if text == "grader":
            raise GraderError("the grader broke")
        if text == "crash":
            raise RuntimeError("a bug in the environment")
        if text == "hang":
            await asyncio.sleep(60)
        if text == "flood":
            return "words " * 50
        if text.startswith("again"):
            return "go on"
        self.finish(reward=1.0)


def collect(
    say,
    *,
    groups=1,
    group_size=1,
    limits=LIMITS,
    template=CHATML,
    delay_s=0.0,
    env_id="driver-test",
    url=None,
    served=None,
    **policy,
):
    renderer = Renderer(make_tokenizer(template))
    engine = ScriptedEngine(renderer, say, delay_s)
    engine.context_tokens = served

    async def run():
        env = connect(url)
        token_policy = TokenPolicy(
            engine, renderer, **{"max_turn_tokens": 64, "max_context_tokens": 1024, **policy}
        )
        options = {"env_id": env_id, "group_size": group_size, "limits": limits}
        scheduler = scheduler_of(token_policy, env, **options)
        try:
            return await scheduler.collect(groups)
        finally:
            await env.aclose()

    batch = asyncio.run(run())
    assert engine.seats == 0, "every seat is given back"
    return batch, engine


def one(say, **kwargs):
    batch, engine = collect(say, **kwargs)
    (trajectory,) = batch.trajectories
    return trajectory, engine


def test_a_tool_episode_is_one_append_only_row():
    turns = {0: CALL, 1: "done"}
    trajectory, engine = one(lambda request_id, _: turns[int(request_id[-3:])])
    assert trajectory.stop_reason is StopReason.TERMINATED
    assert trajectory.reward == 1.0
    assert [turn.parse_status for turn in trajectory.turns] == ["tool_calls", "text"]
    (row,) = trajectory.branches
    for turn, prompt in zip(trajectory.turns, engine.prompts.values(), strict=True):
        assert row.token_ids[: turn.start] == prompt, "the engine read what will be trained on"
        sampled = slice(turn.start, turn.start + turn.num_tokens)
        assert set(row.loss_mask[sampled]) == {1}
    assert sum(row.loss_mask) == trajectory.num_sampled_tokens
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2]["content"] == "found w"


def test_malformed_calls_reach_the_environment_and_the_episode_goes_on():
    turns = {0: "<tool_call>{oops</tool_call>", 1: "done"}
    trajectory, _ = one(lambda request_id, _: turns[int(request_id[-3:])])
    assert [turn.parse_status for turn in trajectory.turns] == ["malformed", "text"]
    assert trajectory.reward == 1.0
    assert "not valid JSON" in str(trajectory.messages)


@pytest.mark.parametrize(("say", "code"), [("grader", "grader_error"), ("crash", "env_error")])
def test_failures_are_recorded_and_carry_no_gradient(say, code):
    trajectory, _ = one(lambda *_: say)
    assert trajectory.stop_reason is StopReason.ERROR and not trajectory.trainable
    assert (trajectory.error.stage, trajectory.error.code) == ("step", code)


@settings(max_examples=40)
@given(st.text("ab</s>", max_size=30), st.text("ab</s>", max_size=12))
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(before, after):
    """The row is what an engine that stops there would have sampled."""
    said = f"{before}</s>{after}"
    trajectory, engine = one(lambda *_: said, max_turn_tokens=200, stop_strings=("</s>",))
    (row,) = trajectory.branches
    sampled = [i for i, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    ids = engine.renderer.tokenizer.encode(said, add_special_tokens=False)
    assert sampled == ids[: len(sampled)]
    decode = engine.renderer.decode
    assert "</s>" in decode(sampled) and "</s>" not in decode(sampled[:-1])
    turn = trajectory.turns[0]
    assert turn.num_tokens == len(sampled) and turn.finish_reason == "stop"
    untouched, _ = one(lambda *_: "aab", stop_strings=("</s>",))
    assert untouched.turns[0].num_tokens == untouched.branches[0].loss_mask.count(1)


def test_a_failing_engine_fails_its_trajectory_only():
    def say(request_id, _):
        if "m000" in request_id:
            raise RuntimeError("engine broke")
        return "done"

    batch, _ = collect(say, group_size=3)
    errors = [t.error.code if t.error else None for t in batch.trajectories]
    assert errors == ["runtime_error", None, None]


def test_deadlines_of_turn_step_and_episode():
    hang, _ = one(lambda *_: "hang", limits=replace(LIMITS, step_timeout_s=0.3))
    assert (hang.stop_reason, hang.error.code) == (StopReason.TIMEOUT, "step_timeout")
    slow, _ = one(lambda *_: "x", delay_s=5, limits=replace(LIMITS, turn_timeout_s=0.2))
    assert (slow.stop_reason, slow.error.code) == (StopReason.TIMEOUT, "turn_timeout")
    started = time.perf_counter()
    long, _ = one(
        lambda *_: "again", delay_s=0.15, limits=replace(LIMITS, max_turns=999, episode_timeout_s=1)
    )
    assert (long.stop_reason, long.error.code) == (StopReason.TIMEOUT, "episode_timeout")
    assert time.perf_counter() - started < 10


def test_limits_of_turns_and_context_truncate():
    many, _ = one(lambda *_: "again", limits=replace(LIMITS, max_turns=3))
    assert (many.stop_reason, len(many.turns)) == (StopReason.MAX_TURNS, 3)
    assert many.truncated and many.trainable
    # The smaller context of the servers holds as the run file's own does.
    for limit in ({"max_context_tokens": 280}, {"served": 280}):
        full, _ = one(lambda *_: "flood", **limit)
        assert full.stop_reason is StopReason.CONTEXT_LENGTH
        assert len(full.turns) == 1 and full.trainable and full.truncated
    cut, _ = one(lambda *_: "again " * 50, max_turn_tokens=8, limits=replace(LIMITS, max_turns=2))
    assert [turn.finish_reason for turn in cut.turns] == ["length", "length"]
    # The template's own close token follows a cut turn, with mask 0.
    (row,), second = cut.branches, cut.turns[1]
    end = cut.turns[0].start + cut.turns[0].num_tokens
    assert row.token_ids[end] == Renderer(make_tokenizer()).close_token_id
    assert set(row.loss_mask[end : second.start]) == {0}


@register("driver-graded", max_sessions=3)
class DriverGraded(DriverTest):
    """The same with a component of the reward, and room for three."""

    num_open: ClassVar[int] = 0
    most_open: ClassVar[int] = 0

    def reset(self, task, *, seed):
        DriverGraded.num_open += 1
        DriverGraded.most_open = max(DriverGraded.most_open, DriverGraded.num_open)
        self.metrics["left_at_first"] = self.episode.turns_left
        return task.prompt

    async def step(self, action):
        self.metrics["left"] = self.episode.turns_left
        return await super().step(action)

    def close(self):
        DriverGraded.num_open -= 1

    @reward(weight=0.5)
    def looked(self, episode) -> float:
        return episode.metrics.get("tool_calls", 0.0)


@register("driver-doors")
class DriverDoors(Environment):
    """Even tasks offer `open_door`, which brings `look`; odd ones offer `look` at once."""

    def splits(self):
        return {"train": 5}

    def get(self, split, index):
        return Task(f"{split}-{index}", f"question {index}", metadata={"inside": index % 2 == 1})

    def reset(self, task, *, seed):
        self.inside = task.metadata["inside"]
        return task.prompt

    def offered_tools(self):
        return ["look" if getattr(self, "inside", False) else "open_door"]

    @tool
    async def open_door(self) -> str:
        self.inside = True
        return "it is open"

    @tool
    async def look(self) -> str:
        return "a box"

    async def on_text(self, text: str):
        self.finish(reward=1.0)


@pytest.mark.parametrize("remote", [False, True])
def test_a_prompt_offers_the_tools_of_its_task_and_turn(remote):
    """Other tools are another prompt, so the row forks; each token is still trained once."""
    open_door, look = (CALL.replace('"look"', f'"{name}"') for name in ("open_door", "look"))
    open_door, look = (call.replace('{"word": "w"}', "{}") for call in (open_door, look))
    turns = {0: open_door, 1: look, 2: look, 3: "done"}
    with running(["driver-doors"]) if remote else nullcontext((None, None)) as (url, _):
        batch, engine = collect(
            lambda request_id, _: turns[int(request_id[-3:])],
            groups=5,
            env_id="driver-doors",
            url=url,
            max_context_tokens=4096,
        )
    for trajectory in batch.trajectories:
        changes = int(trajectory.task_id[-1]) % 2 == 0
        assert trajectory.error is None and trajectory.reward == 1.0
        assert [turn.branch for turn in trajectory.turns] == ([0, 1, 1, 1] if changes else [0] * 4)
        assert [row.branch_of for row in trajectory.branches] == [None, 0][: 1 + changes]
        for number, turn in enumerate(trajectory.turns):
            row = trajectory.branches[turn.branch]
            prompt = engine.prompts[f"{trajectory.trajectory_id}-t{number:03d}"]
            assert row.token_ids[: turn.start] == prompt
            offered = "open_door" if changes and not number else "look"
            (spec,) = re.findall(r'"name": ?"(\w+)", "description"', engine.renderer.decode(prompt))
            assert spec == offered
            sampled = slice(turn.start, turn.start + turn.num_tokens)
            assert set(row.loss_mask[sampled]) == {1}
        trained = [sum(row.loss_mask) for row in trajectory.branches]
        per_branch = [
            sum(turn.num_tokens for turn in trajectory.turns if turn.branch == branch)
            for branch in range(len(trajectory.branches))
        ]
        assert trained == per_branch


@pytest.mark.parametrize("remote", [False, True])
def test_the_last_turn_is_graded_and_recorded_as_the_limit_of_turns(remote):
    def say(request_id, _):
        return CALL if "m000" in request_id or request_id.endswith("t000") else "done"

    with running(["driver-graded"]) if remote else nullcontext((None, None)) as (url, _):
        batch, _ = collect(
            say, env_id="driver-graded", url=url, group_size=2, limits=replace(LIMITS, max_turns=3)
        )
    cut, ended = batch.trajectories
    assert (cut.stop_reason, cut.error) == (StopReason.MAX_TURNS, None)
    assert (cut.reward, cut.reward_components) == (1.5, {"looked": 3.0})
    assert cut.turns[-1].reward == 1.5 and cut.truncated and cut.trainable
    left = [(each.metrics["left_at_first"], each.metrics["left"]) for each in (cut, ended)]
    assert left == [(3, 0), (3, 1)]
    assert (ended.stop_reason, ended.reward) == (StopReason.TERMINATED, 1.5)
    assert not ended.truncated


def test_no_more_episodes_are_open_than_the_environment_has_sessions_for():
    DriverGraded.most_open = 0
    batch, _ = collect(lambda *_: "done", env_id="driver-graded", group_size=12, delay_s=0.02)
    assert [trajectory.error for trajectory in batch.trajectories] == [None] * 12
    assert DriverGraded.most_open == 3


def test_a_prompt_that_fills_the_context_is_an_error_with_numbers():
    trajectory, _ = one(lambda *_: "x", max_context_tokens=4)
    assert trajectory.error.stage == "render"
    assert "within 4 (rollout.max_context_tokens" in trajectory.error.message


async def test_cancelling_leaves_exactly_one_record_each():
    renderer = Renderer(make_tokenizer())
    engine = ScriptedEngine(renderer, lambda *_: "x", delay_s=30)
    engine.reserve(4)
    records, env = [], connect(None)
    policy = TokenPolicy(engine, renderer, 64, 1024)
    episodes = [Episode(f"m{n}", "g", "driver-test", "train", 0, 1, {}) for n in range(4)]
    tasks = [
        asyncio.ensure_future(play(each, policy, env, LIMITS, records.append)) for each in episodes
    ]
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await env.aclose()
    assert all(task.cancelled() for task in tasks)
    assert sorted(t.trajectory_id for t in records) == ["m0", "m1", "m2", "m3"]
    assert {t.stop_reason for t in records} == {StopReason.CANCELLED}


def test_a_template_that_edits_history_forks_rows_and_trains_each_token_once():
    turns = {0: "<think>\nlong\n</think>\n\nagain", 1: "<think>\nb\n</think>\n\nagain", 2: "done"}
    trajectory, engine = one(
        lambda request_id, _: turns[int(request_id[-3:])], template=DROPS_THINKING
    )
    said = [message for message in trajectory.messages if message["role"] == "assistant"]
    assert [message.get("reasoning") for message in said] == ["long", "b", None]
    assert [turn.branch for turn in trajectory.turns] == [0, 1, 2]
    assert [row.branch_of for row in trajectory.branches] == [None, 0, 1]
    for turn, prompt in zip(trajectory.turns, engine.prompts.values(), strict=True):
        row = trajectory.branches[turn.branch]
        assert row.token_ids[: turn.start] == prompt
        assert sum(row.loss_mask) == turn.num_tokens
    before, after = trajectory.branches[:2]
    assert before.token_ids[: after.fork_at] == after.token_ids[: after.fork_at]
    assert before.token_ids[after.fork_at] != after.token_ids[after.fork_at]
    assert sum(s.num_trained for s in samples_of(trajectory)) == trajectory.num_sampled_tokens


class Losing:
    """An environment client that loses sessions: the first `count` second steps meet `error`."""

    def __init__(self, client, error, count):
        self.client, self.error, self.left = client, error, count

    async def session(self, *args, **kwargs):
        session = await self.client.session(*args, **kwargs)
        step, num_steps = session.step, 0

        async def losing(action, **kwargs):
            nonlocal num_steps
            num_steps += 1
            if num_steps == 2 and self.left:
                self.left -= 1
                raise self.error
            return await step(action, **kwargs)

        session.step = losing
        return session

    def __getattr__(self, name):
        return getattr(self.client, name)


def play_losing(error, count, monkeypatch):
    real = connect
    monkeypatch.setattr(
        sys.modules[__name__], "connect", lambda url: Losing(real(url), error, count)
    )
    turns = {0: CALL, 1: "done"}
    return collect(lambda request_id, _: turns[int(request_id[-3:])], group_size=3)[0]


@pytest.mark.parametrize("code", ["session_lost", "session_expired", "not_found", "unavailable"])
def test_an_episode_that_lost_its_environment_is_started_over(code, monkeypatch):
    batch = play_losing(make_error(code, "gone"), 2, monkeypatch)
    assert [t.trajectory_id[-4:] for t in batch.trajectories] == ["m000", "m001", "m002"]
    for trajectory in batch.trajectories:
        assert trajectory.error is None and trajectory.reward == 1.0
        (row,) = trajectory.branches
        assert len(trajectory.turns) == 2 and sum(row.loss_mask) == trajectory.num_sampled_tokens
        roles = [message["role"] for message in trajectory.messages]
        assert roles == ["user", "assistant", "tool", "assistant"], "nothing of the lost attempt"
    assert batch.num_restarts == 2
    assert rollout_metrics(batch)["rollout/restarted_episodes"] == 2
    (group,) = batch.groups
    assert {t.seed for t in group.trajectories} == {batch.trajectories[0].seed}


def test_an_episode_is_not_started_over_for_ever(monkeypatch):
    batch = play_losing(make_error("session_lost", "gone"), 999, monkeypatch)
    assert [t.error.code for t in batch.trajectories] == ["session_lost"] * 3
    assert not any(t.trainable for t in batch.trajectories)
    assert batch.num_restarts == 3 * MAX_RESTARTS


@pytest.mark.parametrize("code", ["step_conflict", "env_error", "unavailable", "at_capacity"])
def test_what_the_episode_itself_brought_about_is_its_result(code, monkeypatch):
    error = make_error(code, "no")
    error.retryable = code == "at_capacity"
    batch = play_losing(error, 1, monkeypatch)
    assert sorted(t.error.code if t.error else "" for t in batch.trajectories) == ["", "", code]
    assert batch.num_restarts == 0


@given(st.lists(st.sampled_from(["again", CALL, "<tool_call>{</tool_call>"]), max_size=5))
@settings(max_examples=15)
def test_whatever_the_policy_does_the_row_is_what_the_engine_read(script):
    said = {**dict(enumerate(script)), len(script): "done"}
    trajectory, engine = one(lambda request_id, _: said[int(request_id[-3:])])
    assert trajectory.error is None
    for turn, prompt in zip(trajectory.turns, engine.prompts.values(), strict=True):
        assert trajectory.branches[turn.branch].token_ids[: turn.start] == prompt


def test_tools_that_the_chat_template_leaves_out_are_counted():
    without = CHATML.replace("{% if tools %}", "{% if false %}")
    blind, _ = one(lambda *_: "done", template=without)
    seeing, _ = one(lambda *_: "done")
    assert blind.metrics["unseen_tools"] >= 1 and "unseen_tools" not in seeing.metrics
