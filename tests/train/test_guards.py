"""Guards of every step: what ends a run, what only warns, and what each leaves alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from samples_for_tests import trajectory_of

from agentrl.config import RunConfig
from agentrl.errors import CheckpointError, TrainingError
from agentrl.rollout.log import TrajectoryLog
from agentrl.rollout.scheduler import TaskSource
from agentrl.train.guards import mismatch_warning, require_no_gap, require_own_rewards
from agentrl.types import Group, Trajectory, Turn

STALE = {
    "replay_share": {
        "rollout": {"replay_share": 0.5},
        "objective": {"off_policy": {"level": "token"}},
    },
    "max_staleness": {
        "rollout": {"max_staleness": 2, "max_turn_tokens": 8},
        "inference": {"backend": "vllm", "urls": "http://a"},
    },
    "replay": {"run": {"replay": "other"}},
}


def config(**sections) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "env": {"id": "e"}, **sections})


def apart(gap: float) -> dict[str, float]:
    return {"policy/fresh_diff_mean": gap, "policy/rollout_train_logprob_diff_mean": gap}


def test_two_policies_end_a_run_and_a_smaller_difference_warns():
    assert mismatch_warning({}, config()) is None
    assert mismatch_warning(apart(0.004), config()) is None
    assert "differ by 0.02 nats" in (mismatch_warning(apart(0.02), config()) or "")
    with pytest.raises(TrainingError):
        mismatch_warning(apart(0.06), config())


@pytest.mark.parametrize("sections", [{}, *STALE.values()], ids=["synchronous", *STALE])
def test_turns_of_the_newest_policy_are_judged_alike_in_every_run(sections):
    """A few wrong turns or tokens hide in the mean of a step."""
    run = config(**sections)
    assert "0.02" in (mismatch_warning({"policy/fresh_diff_mean": 0.02}, run) or "")
    for key, honest, wrong in (
        ("mean", 0.049, 0.051),
        ("turn_max", 0.4, 0.6),
        ("max", 2.9, 3.1),
        ("far", 0.009, 0.011),
    ):
        mismatch_warning({f"policy/fresh_diff_{key}": honest}, run)
        if run.run.replay is not None:  # recorded by whatever policy
            mismatch_warning({f"policy/fresh_diff_{key}": wrong}, run)
            continue
        with pytest.raises(TrainingError):
            mismatch_warning({f"policy/fresh_diff_{key}": wrong}, run)


@pytest.mark.parametrize(("dtype", "token"), [("float32", 3.5), ("bfloat16", 10.5)])
def test_a_token_may_be_further_off_where_weights_are_rounded_more(dtype, token):
    run = config(model={"path": "m", "dtype": dtype})
    mismatch_warning({"policy/fresh_diff_max": token - 1}, run)
    with pytest.raises(TrainingError):
        mismatch_warning({"policy/fresh_diff_max": token}, run)


@pytest.mark.parametrize("sections", STALE.values(), ids=STALE.keys())
def test_a_policy_that_moved_since_it_sampled_is_not_taken_for_another(sections):
    stale = config(**sections)
    key = "policy/rollout_train_logprob_diff_mean"
    assert mismatch_warning({key: 0.02}, stale) is None
    assert "differ by 0.06 nats" in (mismatch_warning({key: 0.06}, stale) or "")
    assert mismatch_warning({key: 0.5}, stale) is not None, "said, and no end"
    if stale.run.replay is not None:
        assert mismatch_warning({key: 9.0}, stale) is not None
        return
    with pytest.raises(TrainingError):
        mismatch_warning({key: 1.1}, stale)


def trajectory(group_id: str, member: int, reward: float, earned: float) -> Trajectory:
    turns = [Turn(0, 1, 1, "stop", "text", reward=earned, message=1)]
    return trajectory_of(reward, f"{group_id}-m{member}", group_id, turns=turns)


def test_rewards_that_went_to_another_member_are_named():
    sound = [trajectory("g0", 0, 1.0, 1.0), trajectory("g0", 1, 0.0, 0.0)]
    require_own_rewards([Group("g0", "t", sound)])
    dealt = [trajectory("g0", 0, 0.0, 1.0), trajectory("g0", 1, 1.0, 0.0)]
    with pytest.raises(TrainingError, match="g0-m0 has reward 0, but its turns earned 1"):
        require_own_rewards([Group("g0", "t", dealt)])


def test_tasks_that_would_be_skipped_end_a_resumed_run_and_those_that_came_back_do_not(tmp_path):
    log = TrajectoryLog(tmp_path)
    log.append(3, [trajectory("g0000004", 0, 1.0, 1.0), trajectory("g0000005", 0, 1.0, 1.0)])
    source = TaskSource("train", None, 0)
    mixture: Any = SimpleNamespace(
        parts=[
            SimpleNamespace(scheduler=SimpleNamespace(id_prefix="", capacity=None, source=source))
        ]
    )
    source.position = 6
    require_no_gap(tmp_path, 3, mixture)
    source.position = 9
    with pytest.raises(CheckpointError, match="3 tasks would be skipped"):
        require_no_gap(tmp_path, 3, mixture)
    source.returned.extend([6, 7, 8])  # of a run that played ahead
    require_no_gap(tmp_path, 3, mixture)
