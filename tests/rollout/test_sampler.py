"""Samplers: which task is played next, and that a resumed run draws the same ones."""

import json
import random

import pytest
from samples_for_tests import trajectory_of

from agentrl.config import RolloutSection, load_config
from agentrl.errors import ConfigError, TrainingError
from agentrl.rollout.sampler import make_sampler
from agentrl.rollout.scheduler import TaskSource

FUNCTIONS = """
def third(choice):
    choice.memory["asked"] = choice.memory.get("asked", 0) + 1
    return 3

def words(choice):
    return "third"

def beyond(choice):
    return choice.size

def keeps_a_set(choice):
    choice.memory["seen"] = {1}
    return 0

number = 5
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "samplers.py"
    path.write_text(FUNCTIONS)
    return path


def source(size, seed=1, **options):
    """A task source with the sampler of these keys of `[rollout]`."""
    made = make_sampler(RolloutSection(**options), size, seed)
    return TaskSource("train", size, seed, sampler=made)


def play(tasks, num_groups, reward_of, record=None):
    """Play groups one by one: `reward_of` an index is what its groups earn."""
    for _ in range(num_groups):
        position = tasks.take()
        index = tasks.index_at(position)
        tasks.sampler.take_in({position: [trajectory_of(reward_of(index))]})
        if record is not None:
            record.append(index)


def test_difficulty_prefers_tasks_near_the_target_and_mixes_in_fresh_and_passed_ones():
    rates = {index: (0.0, 0.5, 1.0)[index % 3] for index in range(90)}
    played = []
    tasks = source(90, sampler="difficulty")
    play(tasks, 90, rates.__getitem__, played)
    first, seen = played[:90], set(played)
    assert len(seen) < 90, "tasks near the target are played again before all were seen"
    later = []
    play(tasks, 400, rates.__getitem__, later)
    shares = [sum(index % 3 == kind for index in later[200:]) / 200 for kind in range(3)]
    assert shares[1] > 0.6 and 0 < shares[0] < 0.3 and 0 < shares[2] < 0.3
    assert set(first + later) == set(range(90)), "every task is tried in the end"


def test_difficulty_goes_on_without_end_and_when_everything_is_passed():
    endless = []
    play(source(None, sampler="difficulty", sampler_fresh=1, sampler_retired=0), 5, int, endless)
    assert endless == [0, 1, 2, 3, 4]
    solved = []
    play(source(4, sampler="difficulty"), 40, lambda index: 1.0, solved)
    assert set(solved[4:]) == {0, 1, 2, 3}


def test_a_task_that_is_being_played_is_not_drawn_again_while_there_are_others():
    tasks = source(6, sampler="difficulty")
    indices = [tasks.index_at(tasks.take()) for _ in range(6)]
    assert sorted(indices) == list(range(6))
    assert 0 <= tasks.index_at(tasks.take()) < 6


def test_staged_opens_the_next_pool_when_the_present_one_is_passed():
    tasks, played = source(30, sampler="staged", sampler_stages=[10, 20]), []
    play(tasks, 100, lambda index: 0.5, played)
    assert max(played) < 10
    play(tasks, 17, lambda index: 1.0, played)
    assert max(played) < 20 and tasks.sampler.state()["memory"] == {"stage": 1}
    played.clear()
    play(tasks, 100, lambda index: float(index < 10), played)
    assert max(played) < 20 and 1 <= sum(index < 10 for index in played) < 30, "a share of old ones"
    play(tasks, 60, lambda index: 1.0, played)
    assert max(played) >= 20
    told = tasks.sampler.take_in({})
    assert told["sampler/stage"] == 2 and told["sampler/tasks"] <= 30


def test_a_function_of_ones_own_has_a_memory(functions):
    tasks = source(5, sampler=f"{functions}:third")
    play(tasks, 2, lambda index: -3.0)
    state = tasks.sampler.state()
    assert state["memory"] == {"asked": 2} and state["played"] == [[3, 2, 0.0]]


@pytest.mark.parametrize("kind", ["difficulty", "staged", "third"])
@pytest.mark.parametrize("seed", range(3))
def test_any_kill_changes_nothing(functions, kind, seed):
    """Groups end in any order, and are told to the sampler by a step, some never."""
    name = f"{functions}:third" if kind == "third" else kind
    options = {"sampler": name, "sampler_stages": [8, 16]}
    reward = lambda index, position: random.Random(f"{index}/{position}").random()  # noqa: E731

    def life(state, num_steps, kills):
        rng, tasks = random.Random(seed), source(24, seed, **options)
        waiting, log = [], []
        for _ in range(num_steps):
            while len(waiting) < 9:
                waiting.append(tasks.take())
            chosen = sorted(rng.sample(waiting, 4))
            waiting = [position for position in waiting if position not in chosen]
            groups = {
                at: [trajectory_of(reward(tasks.index_at(at), at))] * (rng.random() < 0.9)
                for at in chosen
            }
            log.append([(at, tasks.index_at(at)) for at in chosen])
            log.append(tasks.sampler.take_in(groups))
            if rng.random() < 0.5 and kills:
                saved = json.loads(json.dumps(tasks.sampler.state()))
                again = source(24, seed, **options)
                again.position = tasks.position
                again.sampler.restore(saved, waiting)
                again.returned.extend(waiting)
                waiting, tasks = [], again
                while tasks.returned:
                    waiting.append(tasks.take())
        return log, tasks.sampler.state()

    assert life(None, 40, kills=True) == life(None, 40, kills=False)


def test_a_resume_draws_what_an_older_checkpoint_without_a_sampler_left_open():
    tasks = source(9, sampler="difficulty")
    tasks.sampler.restore({}, [3, 5])
    assert {tasks.index_at(3), tasks.index_at(5)} <= set(range(9))


@pytest.mark.parametrize("name", ["difficulty", "staged"])
def test_a_forced_resume_may_have_a_shorter_split_and_fewer_pools(name):
    longer = source(30, sampler=name, sampler_stages=[4, 8])
    play(longer, 120, lambda index: 1.0)
    position = longer.take()
    shorter = source(6, sampler=name, sampler_stages=[4])
    shorter.position = longer.position
    shorter.sampler.restore(longer.sampler.state(), [position])
    assert 0 <= shorter.index_at(position) < 6
    play(shorter, 20, lambda index: 1.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("words", "words returned 'third' for position 0; return the index.* 0 to 4"),
        ("beyond", "beyond returned 5 for position 0"),
    ],
)
def test_an_answer_that_is_no_task_is_refused(functions, name, expected):
    with pytest.raises(TrainingError, match=expected):
        source(5, sampler=f"{functions}:{name}").take()


def test_a_memory_that_no_checkpoint_holds_is_refused(functions):
    tasks = source(5, sampler=f"{functions}:keeps_a_set")
    tasks.take()
    with pytest.raises(TrainingError, match="keeps in its memory what no checkpoint can hold"):
        tasks.sampler.state()


def test_wrong_samplers_are_named(functions):
    model = {"path": "some/model"}
    for keys, expected in [
        ({"sampler": "dificulty"}, "there is no sampler 'dificulty'"),
        ({"sampler": "staged"}, "needs sampler_stages"),
        ({"sampler": "staged", "sampler_stages": [9, 3]}, "increasing order"),
        ({"sampler_fresh": 0.9, "sampler_retired": 0.2}, "add up to more than 1; lower one"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            load_config({"model": model, "rollout": keys})
    with pytest.raises(ConfigError, match=r"\[\[env\]\] math: there is no sampler 'hard'"):
        load_config({"model": model, "env": [{"id": "math", "sampler": "hard"}]})
    with pytest.raises(ConfigError, match=r"needs a split of more than 30 tasks .* has 30 tasks"):
        source(30, sampler="staged", sampler_stages=[30])
    with pytest.raises(ConfigError, match="has no 'fourth'"):
        source(30, sampler=f"{functions}:fourth")
    with pytest.raises(ConfigError, match="is not a function"):
        source(30, sampler=f"{functions}:number")
