"""reasoning-gym's datasets played as agentrl environments: their tasks, their scores."""

import asyncio
from functools import partial

import pytest

reasoning_gym = pytest.importorskip(
    "reasoning_gym", reason="needs reasoning-gym: pip install 'agentrl-gym[reasoning-gym]'"
)

from agentrl.env import Task, connect  # noqa: E402
from agentrl.errors import ConfigError, EnvError, GraderError  # noqa: E402
from agentrl_adapters.reasoning_gym_env import (  # noqa: E402
    ReasoningGymEnvironment,
    evaluates_answers,
)


@pytest.fixture
def play(opened):
    return partial(opened, ReasoningGymEnvironment)


def test_tasks_and_scores_are_the_datasets_own(play):
    env = play(datasets="basic_arithmetic", train_size=50, seed=3)
    theirs = reasoning_gym.create_dataset("basic_arithmetic", seed=3, size=50)
    for index in (0, 7, 49):
        (message,) = env.reset("train", index)
        assert message["content"].startswith(theirs[index]["question"])
        answer = theirs[index]["answer"]
        near_miss = f"{answer} or so"
        result = env.step(f"<answer>0</answer> no, <answer> {near_miss} </answer>!")
        assert 0 < result.reward == theirs.score_answer(near_miss, theirs[index]) < 1
        env.reset("train", index)
        result = env.step(f"<answer>{answer}</answer>")
        assert (result.reward, result.terminated) == (1.0, True)
        assert result.reward_components == {"score": 1.0}
    assert env.info().splits == {"train": 50, "test": 200}


@pytest.mark.parametrize("text", ["", "42", "<answer>", "</answer> 3 <answer>", "<answer>4"])
def test_no_answer_scores_nothing(play, text):
    env = play()
    env.reset("train", 0)
    result = env.step(text)
    assert (result.reward, result.terminated, result.info) == (0.0, True, {"answer": None})


@pytest.mark.parametrize("broken", [False, True], ids=["the answer is", "the grader is"])
def test_an_answer_that_the_grader_cannot_read_scores_nothing(play, monkeypatch, broken):
    env = play()
    env.reset("train", 0)
    reference = reasoning_gym.create_dataset("leg_counting", seed=0, size=50)[0]["answer"]

    def score_answer(self, answer, entry):
        if broken or answer != reference:
            raise KeyError("no such move")
        return 1.0

    monkeypatch.setattr(
        "reasoning_gym.arithmetic.leg_counting.LegCountingDataset.score_answer",
        score_answer,
        raising=False,
    )
    if broken:
        with pytest.raises(GraderError, match="no such move"):
            env.step("<answer>x</answer>")
    else:
        result = env.step("<answer>x</answer>")
        assert (result.reward, result.metrics["unreadable_answer"]) == (0.0, 1.0)


def test_the_tool_takes_the_answer(play):
    env = play(datasets=["leg_counting", "gcd"], answer="tool", train_size=10)
    gcd = reasoning_gym.create_dataset("gcd", seed=0, size=5)
    (message,) = env.reset("train", 5)  # odd tasks are the second dataset's
    assert message["content"].startswith(gcd[2]["question"])
    assert not env.step("42").terminated
    result = env.call("answer", text=gcd[2]["answer"])
    assert (result.reward, result.terminated) == (1.0, True)


def test_settings_reach_the_dataset(play):
    env = play(datasets={"leg_counting": {"min_animals": 1, "max_animals": 1}})
    (message,) = env.reset("train", 4)
    theirs = reasoning_gym.create_dataset(
        "leg_counting", seed=0, size=10_000, min_animals=1, max_animals=1
    )
    assert message["content"].startswith(theirs[4]["question"])


def test_splits_share_no_tasks():
    env = ReasoningGymEnvironment({"datasets": "gcd", "train_size": 300, "test_size": 300})
    train = {env.get("train", index).prompt for index in range(300)}
    test = {env.get("test", index).prompt for index in range(300)}
    assert len(train) > 290 and len(train & test) < 5


def test_a_task_of_ones_own_is_refused(play):
    env = play()
    with pytest.raises(EnvError, match="not a reasoning-gym task"):
        env.reset(task=Task("mine", "How many legs?", "4"))


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"datasets": "nope"}, "nope"),
        ({"datasets": {"gcd": {"wings": 2}}}, "wings"),
        ({"datasets": []}, "empty"),
        ({"datasets": "string_insertion"}, "as code .eval."),
        ({"datasets": "simple_integration"}, "parse_expr"),
        ({"datasets": "list_functions"}, "a different task each time"),
    ],
)
async def test_a_wrong_configuration_is_named(config, problem):
    with pytest.raises((EnvError, ConfigError), match=problem):
        async with connect() as client:
            await client.session("reasoning-gym", split="train", index=0, config=config)


def test_the_refused_grader_really_runs_answers(play):
    """If this fails, the package has mended it and the refusal can go."""
    code = "[str(9) for _ in [__import__('builtins').setattr(__import__('sys'), 'agentrl_ran', 1)]]"
    env = play(datasets="string_insertion", trust_answers=True)
    env.reset("train", 0)
    env.step(f"<answer>{code}</answer>")
    import sys

    assert sys.__dict__.pop("agentrl_ran") == 1


def test_literal_eval_is_no_eval():
    assert evaluates_answers(reasoning_gym.create_dataset("leg_counting", size=1)) == ""
    assert evaluates_answers(reasoning_gym.create_dataset("basic_arithmetic", size=1)) == ""
    assert evaluates_answers(reasoning_gym.create_dataset("spiral_matrix", size=1)) == "eval"


async def test_many_sessions_at_a_real_server(serve_environments):
    async def episode(client, index):
        session = await client.session(
            "reasoning-gym", split="test", index=index, config={"datasets": ["gcd", "lcm"]}
        )
        result = await session.step(_action("12"), timeout_s=20)
        await session.close()
        return session.messages, result.reward, result.reward_components

    with serve_environments([ReasoningGymEnvironment]) as (url, _):
        async with connect(url) as there, connect() as here:
            remote = await asyncio.gather(*(episode(there, index) for index in range(40)))
            remote, local = remote, [await episode(here, index) for index in range(40)]
    assert remote == local


def _action(answer):
    from agentrl.env import Action

    return Action(text=f"<answer>{answer}</answer>")


@pytest.mark.parametrize("answer", ["tags", "tool"])
async def test_the_oracle_scores_one(answer):
    from agentrl.env.episode import start_episode, take_turn

    env = ReasoningGymEnvironment({"datasets": ["gcd", "leg_counting"], "answer": answer})
    for index in range(6):
        await start_episode(env, env.get("test", index), 0)
        (action,) = env.oracle()
        assert (await take_turn(env, action)).reward == 1.0


@pytest.mark.parametrize("name", ["complex_arithmetic", "game_of_life_halting"])
def test_a_grader_that_pays_for_nonsense_is_refused(name):
    config = ReasoningGymEnvironment.Config(datasets=name, train_size=4, test_size=2)
    with pytest.raises(ConfigError):
        ReasoningGymEnvironment.load_shared(config)


def test_a_task_is_generated_once_for_its_group():
    config = ReasoningGymEnvironment.Config(datasets="leg_counting", train_size=4, test_size=2)
    shared = ReasoningGymEnvironment.load_shared(config)
    asked = []

    class Counted:
        def __getitem__(self, row):
            asked.append(row)
            return datasets[row]

    datasets = shared.by_split["train"][0]
    shared.by_split["train"] = [Counted()]
    one, other = (shared.entry("train", 2)[2] for _ in range(2))
    assert one == other and one is not other and asked == [2]
