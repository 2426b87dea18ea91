"""What no run may go on with, looked at in every step: each would make the policy learn from
something that did not happen, without an error anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import CheckpointError, DataError, TrainingError
from agentrl.rollout.log import read_trajectories
from agentrl.rollout.mixture import Mixture
from agentrl.train.preflight import MISMATCH, mismatch_is_large
from agentrl.types import Group

FAR_APART = 10
"""Times MISMATCH: no rounding of any dtype explains this."""


def require_agreement(metrics: Mapping[str, float], config: RunConfig) -> None:
    """
    Raises:
        TrainingError: sampler and trainer are two policies, although nothing is stale.
    """
    gap = metrics.get("policy/rollout_train_logprob_diff_mean", 0.0)
    if config.rollout.max_staleness or config.run.replay is not None:
        return
    if gap >= FAR_APART * MISMATCH[config.model.dtype]:
        raise TrainingError(
            f"{mismatch_is_large(gap, config)}; no rounding does that: the sampler has other "
            "weights, another distribution, or other tokens than those that are trained"
        )


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
        # Who plays ahead has handed out more, and says which.
        if last is not None and part.scheduler.capacity is None and source.position > last + 1:
            raise CheckpointError(
                f"the checkpoint of step {step} goes on with task {source.position}, and the last "
                f"that was played is {last}: {source.position - last - 1} tasks would be skipped; "
                "restore data_position, or start anew"
            )
