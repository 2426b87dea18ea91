"""`rollout.generate`: episodes by a function of one's own, recorded exactly or checked."""

import asyncio
import json
from dataclasses import replace

import pytest
from agent_play import LIMITS, play, require_exact
from test_agent_server import AgentTest, scripted

from agentrl.config import RunConfig
from agentrl.env import register
from agentrl.errors import ConfigError, EnvError, InferenceError
from agentrl.rollout.agent.generate import Generating, Row, Rows, make_generating
from agentrl.types import Action, StopReason, assistant_message, samples_of

CALL = '<tool_call>{"name": "look", "arguments": {"word": "w"}}</tool_call>'


def played(generate, say=lambda *_: "right", env_id="agent-test", **options):
    engine, renderer = scripted(say)
    engine.policy_version = engine.version
    batch = play(
        engine, renderer, None, env_id=env_id, split_size=5, agents=Generating(generate), **options
    )
    assert engine.seats == 0, "every seat is given back"
    (trajectory,) = batch.trajectories
    return trajectory, engine


async def loop(task, policy, session):
    """Answers turns as the driver does."""
    messages = list(task.messages)
    while True:
        action = await policy.act(messages, session.tools)
        result = await session.step(action)
        messages += [assistant_message(action), *result.observation]
        if result.terminated or result.truncated:
            return None


def test_a_loop_of_ones_own_gives_the_rows_of_the_driver():
    rows = []
    for generate in (None, loop):
        said = [f"Look: {CALL}", "open", "right"]
        engine, renderer = scripted(lambda *_: said.pop(0))  # noqa: B023
        agents = Generating(generate) if generate else None
        batch = play(engine, renderer, None, env_id="agent-test", split_size=5, agents=agents)
        (trajectory,) = batch.trajectories
        assert (trajectory.error, trajectory.reward) == (None, 1.0)
        assert trajectory.stop_reason is StopReason.TERMINATED
        assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
        rows.append(
            [{k: v.tolist() for k, v in row.arrays().items()} for row in trajectory.branches]
        )
        require_exact(trajectory, list(engine.prompts.values()))
    assert rows[0] == rows[1] and len(rows[0]) == 1


def test_what_goes_on_twice_branches_and_an_answer_is_graded():
    async def best_of(task, policy, session):
        first = await policy.act(task.messages)
        history = [*task.messages, assistant_message(first)]
        asked = [[*history, {"role": "user", "content": text}] for text in ("a", "b")]
        await asyncio.gather(*map(policy.act, asked))
        return "right"

    trajectory, engine = played(best_of)
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    assert [(turn.branch, turn.parent) for turn in trajectory.turns] == [(0, None), (0, 0), (1, 0)]
    require_exact(trajectory, list(engine.prompts.values()))


def test_the_task_carries_metadata():
    seen = {}

    async def solve(task, policy, session):
        seen.update(task.metadata, prompt=task.prompt, tools=len(session.tools))
        await policy.act(task.messages)
        return 0.5

    trajectory, _ = played(solve)
    assert trajectory.reward == 0.5 and seen["trajectory_id"] == trajectory.trajectory_id
    assert seen["prompt"].startswith("question") and seen["tools"] == 1
    assert f"question {seen['level']}" == seen["prompt"], "what the task's row shows"


def row(version=None, **changed):
    given = {
        "token_ids": [5, 6, 7, 8, 9, 10],
        "loss_mask": [0, 1, 1, 0, 1, 0],
        "logprobs": [0.0, -0.5, -0.25, 0.0, -1.0, 0.0],
        "versions": version,
    }
    return Row(**(given | changed))


def test_rows_of_ones_own_are_trained_as_they_are_and_marked():
    async def solve(task, policy, session):
        return Rows([row(), row(loss_mask=[0] * 6)], reward=0.75, info={"note": "x"})

    trajectory, engine = played(solve)
    assert (trajectory.error, trajectory.reward) == (None, 0.75) and not engine.prompts
    assert trajectory.info == {"note": "x", "own_rows": 2}
    (sample,) = samples_of(trajectory)
    assert sample.token_ids.tolist() == row().token_ids
    assert sample.loss_mask.tolist() == row().loss_mask
    assert sample.rollout_logprobs.tolist() == row().logprobs
    assert sample.policy_versions.tolist() == [-1, 0, 0, -1, 0, -1]
    assert sample.turn_ids.tolist() == [0, 0, 0, 1, 1, 1]
    spans = [(turn.start, turn.num_tokens, turn.reward) for turn in trajectory.turns]
    assert spans == [(1, 2, 0.0), (4, 1, 0.75)]


def test_ids_may_be_sampled_for_such_rows():
    async def solve(task, policy, session):
        prompt = policy.renderer.prompt(task.messages, [])
        drawn = await policy.sample(prompt)
        read = [0.0] * len(prompt)
        mask = [0] * len(prompt) + [1] * len(drawn.token_ids)
        versions = [-1] * len(prompt) + drawn.versions
        ids = prompt + drawn.token_ids
        return Rows([Row(ids, mask, read + drawn.logprobs, versions)], reward=1.0)

    trajectory, engine = played(solve)
    assert trajectory.error is None and trajectory.trainable
    require_exact(trajectory, list(engine.prompts.values()))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (Rows([], 1.0), "no row holds a sampled token"),
        (Rows([row(loss_mask=[0] * 6)], 1.0), "no row holds a sampled token"),
        (Rows([row()], float("nan")), "the reward is nan"),
        (Rows([row(loss_mask=[0, 1])], 1.0), "row 0: 6 token ids with 2 loss_mask"),
        (Rows([row(), row(version=[1])], 1.0), "row 1: 6 token ids with 1 versions"),
        (Rows([row(loss_mask=[1] * 6)], 1.0), "row 0: the first token"),
        (Rows([row(loss_mask=[0, 2, 0, 0, 0, 0])], 1.0), "row 0: a loss_mask is 0 or 1"),
        (Rows([row(logprobs=[0.5] * 6)], 1.0), "row 0: log-probability 0.5"),
        (Rows([row(version=[-1] * 6)], 1.0), "row 0: policy version -1"),
        (Rows([row(token_ids=[-1] * 6)], 1.0), "row 0: a token id is negative"),
        (Rows([row(token_ids=[1 << 40] * 6)], 1.0), "row 0: a token id is beyond the vocabulary"),
        (["right"], "returned list"),
    ],
)
def test_malformed_rows_are_refused_by_their_number(rows, says):
    async def solve(task, policy, session):
        return rows

    trajectory, _ = played(solve)
    assert trajectory.error.stage == "agent" and says in trajectory.error.message
    assert not trajectory.trainable


@pytest.mark.parametrize(
    ("acts", "room", "says"),
    [(True, 4096, "has called policy.act"), (False, 5, "6 tokens are more than")],
)
def test_rows_beside_recorded_turns_or_longer_than_the_context_are_refused(acts, room, says):
    async def solve(task, policy, session):
        if acts:
            await policy.act(task.messages)
        return Rows([row()], 1.0)

    assert says in played(solve, max_context_tokens=room)[0].error.message


@pytest.mark.parametrize("how", ["turns", "context", "malformed", "raises", "hangs", "exits"])
def test_whatever_ends_such_a_function_is_one_record(how):
    async def solve(task, policy, session):
        messages = list(task.messages)
        if how == "malformed":
            messages.append({"role": "robot", "content": "x"})
        while how in ("turns", "context", "malformed"):
            said = assistant_message(await policy.act(messages))
            messages += [said, {"role": "user", "content": "?" * 20}]
        await policy.act(messages)
        if how == "raises":
            raise ValueError("a bug")
        if how == "exits":
            raise SystemExit(3)
        await asyncio.sleep(60)

    limits = replace(LIMITS, max_turns=4 if how == "turns" else 100)
    if how == "hangs":
        limits = replace(limits, episode_timeout_s=1.0)
    trajectory, _ = played(solve, limits=limits, max_context_tokens=300)
    stops = {
        "turns": StopReason.MAX_TURNS,
        "context": StopReason.CONTEXT_LENGTH,
        "hangs": StopReason.TIMEOUT,
    }
    assert trajectory.stop_reason is stops.get(how, StopReason.ERROR)
    assert (trajectory.error is None) == (how in ("turns", "context"))
    if how in ("malformed", "raises", "exits"):
        says = {"malformed": "a role is one of", "raises": "a bug", "exits": "exited with 3"}[how]
        assert trajectory.error.stage == "agent" and says in trajectory.error.message


def test_an_engine_that_fails_is_the_engines_failure():
    def say(*_):
        raise InferenceError("the engine broke")

    trajectory, _ = played(loop, say)
    assert (trajectory.error.stage, trajectory.error.code) == ("generate", "inference_error")


@register("agent-test-breaks")
class Breaks(AgentTest):
    async def on_text(self, text):
        raise EnvError("it broke", code="broken")


def test_an_environment_that_fails_is_the_environments_failure():
    trajectory, _ = played(loop, env_id="agent-test-breaks")
    assert trajectory.error.stage == "step" and "it broke" in trajectory.error.message


def test_a_step_behind_the_end_is_the_functions_mistake():
    async def solve(task, policy, session):
        await policy.act(task.messages)
        for _ in range(2):
            await session.step(Action("right"))

    trajectory, _ = played(solve)
    assert trajectory.reward == 1.0 and trajectory.error is None, "the episode had its end"


def test_a_run_file_names_the_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("async def solve(task, policy, session): ...\ndef blocks(*_): ...\n")
    make_generating(f"{file}:solve")
    with pytest.raises(ConfigError, match="is not an async function"):
        make_generating(f"{file}:blocks")
    base = {"env": {"id": "math"}, "model": {"path": "m"}}
    config = RunConfig(**base, rollout={"generate": f"{file}:solve"})
    assert config.plays_by_agent and json.loads(config.model_dump_json())
    with pytest.raises(ValueError, match="remove one"):
        RunConfig(**base, rollout={"generate": "a.py:b"}, agent={"run": "a.py:c"})
