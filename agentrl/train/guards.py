"""Faults that no run may go on with, looked for in every step: each would make the policy learn
from something that did not happen, without an error anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import CheckpointError, DataError, TrainingError
from agentrl.rollout.log import read_trajectories
from agentrl.rollout.mixture import Mixture
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.train.preflight import explained_mismatch, mismatch_is_large
from agentrl.train.run import Run, require_some_success
from agentrl.types import Group
from agentrl.view.diagnosis import MISMATCH
from agentrl.view.display import Display

FAR_APART = 10
"""Times what rounding explains: none does this."""


def look_at(run: Run, rollouts: RolloutBatch, step: int, display: Display) -> None:
    """Tell what is wrong with a step's rollouts.

    Raises:
        TrainingError: nothing is to be learned from them.
    """
    require_some_success(run, rollouts, step, display)
    require_own_rewards(rollouts.groups)
    if stale := rollouts.dropped["stale"]:
        display.note(
            f"step {step}: {stale} of {stale + len(rollouts.groups)} groups were dropped as "
            "stale: a server says that other weights sampled them than it was sent"
        )
    if warning := run.first_rewards.look(rollouts.trajectories, run.config):
        display.note(f"step {step}: {warning}")


def disagreement(metrics: Mapping[str, float], config: RunConfig) -> str | None:
    """Returns a warning where sampler and trainer differ by more than rounding in a step.

    Where a step trains on what older policies sampled, how far the policy moved counts too.

    Raises:
        TrainingError: they are two policies, although nothing is stale.
    """
    gap = metrics.get("policy/rollout_train_logprob_diff_mean", 0.0)
    warning = mismatch_is_large(gap, config)
    rollout = config.rollout
    if rollout.max_staleness or rollout.replay_share or config.run.replay is not None:
        return None if gap < max(MISMATCH["bfloat16"], explained_mismatch(config)) else warning
    if gap >= FAR_APART * explained_mismatch(config):
        raise TrainingError(
            f"{warning}; no rounding does that: the sampler has other weights, another "
            "distribution, or other tokens than those that are trained"
        )
    return warning


def require_own_rewards(groups: Sequence[Group]) -> None:
    """
    Raises:
        TrainingError: the rewards of a group's trajectories are those of its turns, dealt to other
            members.
    """
    for group in groups:
        scored = [t for t in group.trajectories if t.trainable]
        rewards = [round(t.reward, 6) for t in scored]
        earned = [round(sum(turn.reward for turn in t.turns), 6) for t in scored]
        if rewards != earned and sorted(rewards) == sorted(earned):
            wrong = next(
                i for i, pair in enumerate(zip(rewards, earned, strict=True)) if pair[0] != pair[1]
            )
            raise TrainingError(
                f"trajectory {scored[wrong].trajectory_id} has reward {rewards[wrong]:g}, and its "
                f"turns earned {earned[wrong]:g}: the rewards of group {group.group_id} went to "
                "other members; look at what scores it"
            )


def require_no_gap(run_dir: Path, step: int, mixture: Mixture) -> None:
    """
    Raises:
        CheckpointError: the tasks that a resumed run would take next are not those behind the last
            that it played.
    """
    try:
        last_step = range(step, step + 1)
        played = [t.group_id for _, t in read_trajectories(run_dir, steps=last_step)]
    except DataError:
        return
    for part in mixture.parts:
        prefix = f"{part.scheduler.id_prefix}g"
        ours = (each.removeprefix(prefix) for each in played if each.startswith(prefix))
        last = max((int(each) for each in ours if each.isdigit()), default=None)
        source = part.scheduler.source
        # Who plays ahead has handed out more, and says which; those are played first.
        in_order = part.scheduler.capacity is None and not source.returned
        if last is not None and in_order and source.position > last + 1:
            raise CheckpointError(
                f"the checkpoint of step {step} goes on with task {source.position}, and the last "
                f"that was played is {last}: {source.position - last - 1} tasks would be skipped; "
                "restore data_position, or start anew"
            )
