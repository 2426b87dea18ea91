"""Checks in every step for faults that stop a run. Each of them would silently make the policy
learn from something that did not happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import CheckpointError, DataError, TrainingError
from agentrl.rollout.log import read_trajectories
from agentrl.rollout.mixture import Mixture
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.train.run import Run, require_some_success
from agentrl.types import Group
from agentrl.view.display import Display
from agentrl.view.rules import Evidence, explained_mismatch, findings

FAR_APART = 10
"""A mismatch this many times what rounding explains has another cause."""
TURN_APART, TOKEN_APART, MANY_FAR = 0.5, 3.0, 0.01
"""The same for the mean of a turn and for a token, in nats, whatever rounds, and for the share of
tokens that are far off."""
MOVED_FAR = 1.0
"""Mean in nats over all tokens, those of older policies included. An update moves a policy by
hundredths."""


def check_rollouts(run: Run, rollouts: RolloutBatch, step: int, display: Display) -> None:
    """Shows a warning of each problem with a step's rollouts.

    Raises:
        TrainingError: the run must not train on them, see `require_some_success`,
            `require_own_rewards` and `FirstRewards.look`.
    """
    require_some_success(run, rollouts, step, display)
    require_own_rewards(rollouts.groups)
    if stale := rollouts.dropped["stale"]:
        display.note(
            f"step {step}: {stale} of {stale + len(rollouts.groups)} groups were dropped as "
            "stale: a server reports that it sampled them with weights other than those it was sent"
        )
    if warning := run.first_rewards.look(rollouts.trajectories, run.config):
        display.note(f"step {step}: {warning}")


def mismatch_warning(metrics: Mapping[str, float], config: RunConfig) -> str | None:
    """Returns a warning if sampler and trainer differ in a step by more than rounding explains.

    Turns of the newest policy are judged apart (`update.agreement`). The rest of the difference
    includes how far the policy has moved since, so its limit is higher. Recorded episodes
    (`run.replay`) may be of any policy, so for them nothing is raised.

    Raises:
        TrainingError: sampler and trainer are two different policies.
    """
    seen = Evidence([{"step": 1, **metrics}], [], config.model_dump())
    _, explained = explained_mismatch(seen.config)
    of_all = metrics.get("policy/rollout_train_logprob_diff_mean", 0.0)
    fresh = metrics.get("policy/fresh_diff_mean", 0.0)
    found = {
        f"{fresh:.2g} nats per token": fresh >= FAR_APART * explained,
        f"{of_all:.2g} nats per token over all": of_all >= MOVED_FAR,
    }
    for key, limit, what in (
        ("turn_max", max(TURN_APART, 20 * explained), "nats per token of a turn"),
        ("max", max(TOKEN_APART, 200 * explained), "nats at a token"),
        ("far", MANY_FAR, "of the tokens by more than 2 nats"),
    ):
        value = metrics.get(f"policy/fresh_diff_{key}", 0.0)
        found[f"{value:.2g} {what}"] = value >= limit
    causes = [what for what, is_too_far in found.items() if is_too_far]
    if causes and config.run.replay is None:
        raise TrainingError(
            f"sampler and trainer differ by {', '.join(causes)}; rounding cannot explain this: the "
            "sampler has other weights, another sampling distribution, or other tokens than the "
            "trainer"
        )
    rule, finding = findings(seen).get("mismatch", (None, None))
    return None if rule is None or finding is None else f"{finding.text}: {rule.fix}"


def require_own_rewards(groups: Sequence[Group]) -> None:
    """Checks that each trajectory has the reward that its own turns earned.

    Raises:
        TrainingError: the rewards of a group were assigned to the wrong members.
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
                f"trajectory {scored[wrong].trajectory_id} has reward {rewards[wrong]:g}, but its "
                f"turns earned {earned[wrong]:g}: the rewards of group {group.group_id} went to "
                "other members; check the code that scores it"
            )


def require_no_gap(run_dir: Path, step: int, mixture: Mixture) -> None:
    """Checks that a resumed run skips no task: the next one must follow the last one played.

    Raises:
        CheckpointError: tasks would be skipped.
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
        # A stream that plays ahead has taken more tasks; `returned` lists them, to be played first.
        in_order = part.scheduler.capacity is None and not source.returned
        if last is not None and in_order and source.position > last + 1:
            raise CheckpointError(
                f"the checkpoint of step {step} continues with task {source.position}, but the "
                f"last task played is {last}: {source.position - last - 1} tasks would be skipped; "
                "restore the checkpoint's data_position, or start a new run"
            )
