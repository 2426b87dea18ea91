"""Tests which calls are trained, and what an agent may reward."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from agent_play import play, play_groups
from rollout_scripted import ScriptedEngine
from test_agent_server import ASK, LOOK, post, scripted
from tokenizers_for_tests import make_tokenizer

from agentrl.config import AgentRole
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.recorder import Recorder
from agentrl.rollout.agent.roles import Asked, asked_by, served_turns
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.agent.wire import Call
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import StopReason, Trajectory, samples_of


def system(text, said="q"):
    return [{"role": "system", "content": text}, {"role": "user", "content": said}]


def call(text="", tools=(), model="m"):
    return Call(system(text), list(tools), model)


def trained(trajectory):
    """Turns that carry a gradient."""
    return {
        int(turn)
        for sample in samples_of(trajectory)
        for turn, mask in zip(sample.turn_ids, sample.loss_mask, strict=True)
        if mask
    }


@pytest.mark.parametrize(
    ("rule", "headers", "matches"),
    [
        ({"model": "mini"}, {}, True),
        ({"model": "^mini"}, {}, False),
        ({"system": "TITLE"}, {}, True),
        ({"system": "title", "model": "large"}, {}, False),
        ({"header": "^x-role: title$"}, {"Accept": "*", "X-Role": "title"}, True),
        ({"header": "^x-role: title$"}, {"X-Role": "titles"}, False),
        ({}, {}, True),
    ],
)
def test_a_rule_matches_by_all_that_it_names(rule, headers, matches):
    rules = [AgentRole(**rule, role="served"), AgentRole(role="trained")]
    asked = asked_by(call("make a title", model="gpt-mini"), headers, rules)
    assert asked.role == ("served" if matches else "trained")


def test_a_pattern_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="system is not a regular expression"):
        AgentRole(system="(", role="served")


@pytest.mark.parametrize(
    ("calls", "served"),
    [
        ([("title", False), ("work", True), ("work", True)], [0]),
        ([("work", True), ("work", False)], []),
        ([("plan", False), ("critic", False)], []),
        ([("work", True), ("sub-agent", True), ("summary", False)], [2]),
    ],
)
def test_without_a_rule_other_calls_without_tools_are_served(calls, served):
    assert served_turns([Asked(None, *each) for each in calls]) == served
    assert served_turns([Asked("trained", *each) for each in calls]) == []
    assert served_turns([Asked("served", *each) for each in calls]) == [*range(len(calls))]


async def with_a_title(task, base_url, api_key):
    """As opencode and gptme: a title is asked for before the work and after it."""
    for text, tools in (("titles", []), ("work", LOOK), ("titles", [])):
        body = {"messages": system(text, task.prompt), "tools": tools}
        assert (await post(base_url, api_key, body))[0] == 200


def played(solve, roles=(), **options):
    said = ["a title", "right", "another title"]
    engine, renderer = scripted(lambda *_: said.pop(0) if said else "more")
    batch = play(engine, renderer, solve, env_id="agent-test", split_size=5, roles=roles, **options)
    return batch.trajectories[0], engine


def test_a_title_is_served_and_shown_and_the_answer_is_that_of_the_work():
    trajectory, engine = played(with_a_title)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0, 0.0]
    assert trained(trajectory) == {1} and trajectory.info["served_turns"] == [0, 2]
    (sample,) = samples_of(trajectory)
    assert sample.num_trained == trajectory.turns[1].num_tokens
    assert len(trajectory.branches) == 3, "all of it is shown"
    for number, prompt in enumerate(engine.prompts.values()):
        turn = trajectory.turns[number]
        row = trajectory.branches[turn.branch]
        assert row.token_ids[: turn.start] == prompt
        assert set(row.loss_mask[turn.start :]) == {int(number == 1)}
        assert all((version >= 0) == (number == 1) for version in row.policy_versions[turn.start :])


def test_a_rule_trains_a_title_or_leaves_the_work_out():
    everything = [AgentRole(role="trained")]
    trajectory, _ = played(with_a_title, everything)
    assert trained(trajectory) == {0, 1, 2} and trajectory.reward == 0.0
    only_titles = [AgentRole(system="work", role="served"), AgentRole(role="trained")]
    assert trained(played(with_a_title, only_titles)[0]) == {0, 2}
    nothing, _ = played(with_a_title, [AgentRole(role="served")])
    assert nothing.error.stage == "agent" and "agent.roles" in nothing.error.message


def test_a_served_turn_in_front_of_a_trained_one_is_context_in_its_row():
    async def solve(task, base_url, api_key):
        messages = list(task.messages)
        for name in ("draft", "work"):
            body = {"messages": messages, "model": name, "tools": LOOK}
            _, text, _ = await post(base_url, api_key, body)
            messages += [
                json.loads(text)["choices"][0]["message"],
                {"role": "user", "content": "?"},
            ]

    trajectory, _ = played(solve, [AgentRole(model="draft", role="served")])
    assert trained(trajectory) == {1} and len(trajectory.branches) == 1
    row, turn = trajectory.branches[0], trajectory.turns[1]
    assert sum(row.loss_mask) == turn.num_tokens == sum(row.loss_mask[turn.start :])


def test_ids_that_a_token_was_drawn_from_go_with_its_mask():
    class Kept(ScriptedEngine):
        async def generate(self, request_id, prompt_ids, sampling):
            generation = await super().generate(request_id, prompt_ids, sampling)
            kept = [np.array([each], np.int32) for each in generation.token_ids]
            return replace(generation, kept_ids=kept)

    renderer = Renderer(make_tokenizer())
    said = ["a title", "right", "another title"]
    engine = Kept(renderer, lambda *_: said.pop(0))
    batch = play(engine, renderer, with_a_title, env_id="agent-test", split_size=5)
    (sample,) = samples_of(batch.trajectories[0])
    drawn = sample.token_ids[sample.loss_mask.astype(bool)]
    assert [int(each[0]) for each in sample.kept_ids] == drawn.tolist()


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_an_agent_may_reward_its_calls_by_the_ids_of_responses(path):
    async def solve(task, base_url, api_key):
        ids = []
        for number in range(3):
            said = f"{task.prompt} {number}"
            body = {"messages": [{"role": "user", "content": said}], "input": said}
            body.pop("messages" if path == "responses" else "input")
            ids.append(json.loads((await post(base_url, api_key, body, path=path))[1])["id"])
        return {ids[0]: 0.25, ids[2]: 0.5}

    trajectory, _ = played(solve)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.TERMINATED)
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.0, 0.5]
    assert trajectory.reward == 0.75


@pytest.mark.parametrize(
    ("gives", "says"),
    [({"chatcmpl-x": 1.0}, "rewards 'chatcmpl-x'"), ({"x": "1"}, "returned dict")],
)
def test_a_reward_of_no_response_is_an_error(gives, says):
    async def solve(task, base_url, api_key):
        await post(base_url, api_key, ASK)
        return gives

    trajectory, _ = played(solve)
    assert trajectory.error.stage == "agent" and says in trajectory.error.message


def test_a_task_says_which_episode_it_is():
    seen = {}

    async def solve(task, base_url, api_key):
        seen.update(task.metadata)
        await post(base_url, api_key, ASK)

    trajectory, _ = played(solve)
    assert seen == {
        "env_id": "agent-test",
        "seed": trajectory.seed,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "level": 4,  # Task.public
    }


async def with_a_judge(task, base_url, api_key):
    """The judge has no tools, sees what was said, and is asked in parallel with the next turn."""
    body = {"messages": task.messages, "tools": LOOK}
    said = json.loads((await post(base_url, api_key, body))[1])["choices"][0]["message"]
    asked = {"model": "judge", "messages": [{"role": "user", "content": said["content"]}]}
    status, text, _ = await post(base_url, api_key, asked)
    return json.loads(text)["choices"][0]["message"]["content"] if status == 200 else "wrong"


async def test_another_server_answers_in_place_of_the_policy(monkeypatch):
    judged = Trajectory("judge", "g", "e", "k", 0)
    async with contextlib.aclosing(AgentServer()) as server:
        await server.start()
        engine, renderer = scripted(lambda *_: "right")
        engine.reserve(1)
        recorder = Recorder(judged, TokenPolicy(engine, renderer, 64, 4096))
        with server.episode(recorder, max_turns=9, turn_timeout_s=9) as live:
            monkeypatch.setenv("JUDGE_KEY", live.key)
            rule = {"model": "judge", "role": "served", "api_key_variable": "JUDGE_KEY"}
            roles = [AgentRole(**rule, url=live.url)]
            engine, renderer = scripted(lambda *_: "a turn of the policy")
            batch = await play_groups(
                engine, renderer, with_a_judge, env_id="agent-test", split_size=5, roles=roles
            )
    (trajectory,) = batch.trajectories
    assert (trajectory.error, trajectory.reward) == (None, 1.0), "what the judge said is graded"
    assert len(trajectory.turns) == len(engine.prompts) == 1 and trained(trajectory) == {0}
    (told,) = trajectory.info["served_elsewhere"]
    assert (told["model"], told["text"]) == ("judge", "right")
    assert judged.messages[0]["content"] == "a turn of the policy"


def test_another_server_that_is_not_there_fails_the_episode(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    rule = AgentRole(model="judge", role="served", url="http://127.0.0.1:1/v1")
    trajectory, _ = played(with_a_judge, [rule])
    assert (trajectory.error.stage, trajectory.error.code) == ("generate", "inference_error")
    assert "127.0.0.1:1" in trajectory.error.message


def test_a_server_trains_nothing():
    with pytest.raises(ValueError, match="set role = 'served'"):
        AgentRole(url="http://x/v1", role="trained")
