"""Filters of groups: the built-in one and a user's own."""

import pytest
from samples_for_tests import group_of
from test_loop import QUICKSTART

from agentrl.config import RolloutSection, load_config
from agentrl.errors import ConfigError, TrainingError
from agentrl.rollout import read_trajectories
from agentrl.rollout.index import TrajectoryIndex
from agentrl.train.filters import filters_of
from agentrl.train.loop import train
from agentrl.view.tracking import read_metrics

FILTERS = """
def even(group):
    return int(group.group_id[1:]) % 2 == 0

def with_reason(group):
    return (len(group.trajectories) > 2, "small")

def wrong(group):
    return 1

def two_words(group):
    return (False, "two words")
"""


@pytest.fixture
def filters(tmp_path):
    path = tmp_path / "filters.py"
    path.write_text(FILTERS)
    return path


def test_filters_are_asked_in_turn_and_the_first_gives_the_reason(filters):
    keep = filters_of(
        RolloutSection(keep=["zero_variance", f"{filters}:even", f"{filters}:with_reason"])
    )
    assert keep(group_of(1, 1.0, 1.0)) == "zero_variance"
    assert keep(group_of(1, 1.0, 0.0)) == "even"
    assert keep(group_of(0, 1.0, 0.0)) == "small"
    assert keep(group_of(0, 1.0, 0.0, 0.0)) is None
    assert filters_of(RolloutSection()) is None


@pytest.mark.parametrize("name", ["wrong", "two_words"])
def test_an_answer_of_another_form_is_refused(filters, name):
    keep = filters_of(RolloutSection(keep=[f"{filters}:{name}"]))
    with pytest.raises(TrainingError, match=f"{name} returned .*return True or False"):
        keep(group_of(0, 1.0, 0.0))


def test_what_is_no_filter_is_named(filters):
    with pytest.raises(ConfigError, match="there is no filter 'zero_varianz'"):
        load_config(QUICKSTART, ["--rollout.keep", "zero_varianz"])
    with pytest.raises(ConfigError, match="has no 'odd'"):
        filters_of(RolloutSection(keep=[f"{filters}:odd"]))


def test_a_run_counts_reasons_replaces_groups_and_shows_the_dropped_ones(filters, tmp_path):
    config = load_config(
        QUICKSTART,
        [
            *("--rollout.groups_per_step", "2", "--rollout.group_size", "2"),
            *("--rollout.keep", f"{filters}:even", "--rollout.max_waves", "4"),
            *("--run.num_steps", "1", "--run.dir", str(tmp_path / "run")),
        ],
    )
    run_dir = train(config, quiet=True)
    (row,) = read_metrics(run_dir)
    assert row["group/dropped/even"] == 1 and row["train/samples"] == 4
    dropped = {t.group_id: t.info.get("dropped") for _, t in read_trajectories(run_dir)}
    assert dropped == {"g0000000": None, "g0000001": "even", "g0000002": None}
    entries = TrajectoryIndex(run_dir).refresh()
    assert {entry.group_id: entry.dropped or None for entry in entries} == dropped
